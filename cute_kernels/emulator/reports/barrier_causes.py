"""Causes of hangs, and of arrivals, bytes and phases that do not fit: rows of the table of `causes`."""

import re
from collections.abc import Callable, Iterator

from cute_kernels.emulator.facts import Located, Moment, WarpName
from cute_kernels.emulator.reports.evidence import Cause, Evidence, Fields, Spot, named_barrier, stores_shared
from cute_kernels.emulator.reports.model import Waiting

# --- hangs -----------------------------------------------------------------------------------------------------------


def _waits(kind: str) -> Callable[[Evidence], Fields | None]:
    return lambda e: {} if any(wait.kind == kind for wait in e.facts.waits) else None


def _at_barriers(e: Evidence) -> list[tuple[Waiting, Spot]]:
    return [(each, (each.barrier.cta, each.barrier.offset)) for each in e.waiting if each.barrier is not None]


def _labels(waiting: Waiting) -> list[str]:
    return [str(warp) for warp in waiting.place.warps]


def _was_here(e: Evidence, waiting: Waiting, spot: Spot) -> bool:
    """Whether its warps have passed a wait for this mbarrier, or another one of its array, before."""
    alike = e.alike(spot)
    return any(each.warp in _labels(waiting) and alike(each.place) for each in e.did("wait"))


def _held_up(e: Evidence, waiting: Waiting, spot: Spot) -> bool:
    """Whether who usually signals the mbarrier waits for something else."""
    usual, mine = _usual(e, waiting, spot), set(_labels(waiting))
    at_named = {wait.warp for wait in e.facts.waits if wait.kind == "bar" and set(wait.missing) - mine}
    return bool(usual & at_named) or any(usual & set(_labels(w)) for w, place in _at_barriers(e) if place != spot)


def _usual(e: Evidence, waiting: Waiting, spot: Spot) -> set[str]:
    """Warps that signalled the mbarrier, or its like, in earlier phases, and not in this one."""
    operation = "deliver" if waiting.barrier.tx > 0 and not waiting.barrier.pending else "arrive"
    alike = e.alike(spot)
    usual = {each.warp for each in e.did(operation) if alike(each.place) and each.place[0] == spot[0]}
    return usual - {each.warp for each in e.did(operation, spot, waiting.barrier.phase)}


def _in_part(e: Evidence, waiting: Waiting, spot: Spot) -> bool:
    """Whether others have contributed to the phase that is waited for: what is missing is at fault, and not they."""
    mine = set(_labels(waiting))
    return any(each.warp not in mine and each.place == spot and each.phase == waiting.barrier.phase
               for each in e.signals())  # fmt: skip


def _roots(e: Evidence) -> list[tuple[Waiting, Spot]]:
    """Waits that nobody else's wait explains, then those of warps that have done nothing so far.

    Where all wait for each other, those for phases that are complete in part.
    """
    waits = _at_barriers(e)
    found = [(waiting, spot) for waiting, spot in waits if not _held_up(e, waiting, spot)]
    found = found or [each for each in waits if _in_part(e, *each)]
    roots = {spot for _, spot in found}

    def explained(waiting: Waiting, spot: Spot) -> bool:
        """Whether who should signal it waits, at last, for another root."""
        work, seen = _should_signal(e, waiting, spot) or {w for each, _ in waits for w in _labels(each)}, set()
        work = set(work) - set(_labels(waiting))
        while work:
            warp = work.pop()
            seen.add(warp)
            for other, place in waits:
                if warp not in _labels(other) or place[1] == spot[1]:
                    continue
                if place in roots:
                    return True
                work |= _usual(e, other, place) - seen
        return False

    ranks = e.known["ranks"] = {spot: (explained(each, spot), not _in_part(e, each, spot)) for each, spot in found}
    found.sort(key=lambda each: (*ranks[each[1]], _was_here(e, *each)))
    return found


def _should_signal(e: Evidence, waiting: Waiting, spot: Spot) -> set[str]:
    """Warps that wait for what the waiting ones signal, and have not signalled these in another way."""
    mine = set(_labels(waiting))
    signals = {each.place for each in e.signals(mine)}
    awaited = {each.place for each in e.did("wait") if each.warp in mine and each.place != spot}
    back = {each.warp for each in e.signals() if each.place in awaited}
    return {each.warp for each in e.did("wait") if each.place in signals} - mine - back


def _roots_without_arrival(e: Evidence) -> list[tuple[Waiting, Spot]]:
    """Roots at which nobody has arrived in the phase that is waited for."""
    return [
        (waiting, spot) for waiting, spot in _roots(e)
        if waiting.barrier.pending and not e.did("arrive", spot, waiting.barrier.phase)
    ]  # fmt: skip


def _signalled_own(e: Evidence) -> Fields | None:
    """Who signals an mbarrier of others, for which it waits itself, while nobody signals the one that is waited for."""
    now = {(warp, place) for each, place in _at_barriers(e) for warp in _labels(each)}
    awaited = now | {(each.warp, each.place) for each in e.did("wait")}
    for waiting, spot in _roots_without_arrival(e):
        own = [
            each for each in e.did("arrive") if (each.warp, each.place) in awaited and not e.alike(spot)(each.place)
            and not e.did("announce", each.place, warp=each.warp)
            and each.warp not in _labels(waiting) and ((each.warp, each.place) in now or any(
                (other.warp, other.place) not in awaited for other in e.signals() if other.place == each.place))
        ]  # fmt: skip
        if own and e.untouched(spot):
            own = [each for each in own if each.warp == own[0].warp]
            return {"who": e.who([own[0].warp]), "own": e.name(own[0].place), "at": e.lines(own), "other": e.name(spot)}
    return None


def _waits_elsewhere(e: Evidence) -> Fields | None:
    """Two places of the program wait for one mbarrier, and nobody for another one, of which a phase is complete."""
    if not e.facts.past.whole:
        return None
    awaited = {each.place for each in e.moments if each.operation in ("wait", "timeout")}
    awaited |= {place for _, place in _at_barriers(e)}
    for _, spot in _roots_without_arrival(e):
        there = [each for each, place in _at_barriers(e) if place == spot]
        sites = {e.line(wait.instruction): wait.warp for wait in e.facts.waits for each in there
                 if wait.warp in _labels(each)}  # fmt: skip
        sites |= {e.line(each.instruction): each.warp for each in e.did("wait", spot)}
        for state in e.facts.past.barriers:
            place = state.cta, state.offset
            if place[0] != spot[0] or not state.phase or any(map(e.alike(place), awaited)):
                continue
            signals = [each for each in e.signals() if each.place == place]
            signals = [each for each in signals if each.operation == "deliver"] or signals
            others = [w for each in there for w in _labels(each) if w not in {signal.warp for signal in signals}]
            alone = len(e.stages(place)) == len(e.stages(spot)) and e.untouched(spot) and not state.tx
            # Who has yet to pass its first wait may be the one that waits there later.
            fresh = [w for w in e.facts.waits if w.warp not in others and not e.did("wait", warp=w.warp)]
            if (len(sites) > 1 or alone) and others and not fresh:
                return {"who": e.who(others), "at": " and ".join(at for at, warp in sites.items() if warp in others),
                        "here": e.name(spot), "there": e.name(place), "signals": e.lines(signals)}  # fmt: skip
    return None


def _at_named_barriers(e: Evidence) -> Fields | None:
    """No mbarrier is the root: warps wait for each other at named barriers."""
    by_place: dict[str, list[str]] = {}
    for wait in e.facts.waits:
        if wait.kind == "bar":
            by_place.setdefault(e.line(wait.instruction), []).append(wait.warp)
    if len(by_place) < 2 or _roots(e):
        return None
    return {"waits": ", ".join(f"{e.who(warps)} at {place}" for place, warps in by_place.items())}


def _arrived_twice(e: Evidence) -> Fields | None:
    """An arrival of a warp was counted at a named barrier in place of one by a warp that has a part in the fault."""
    waits = {each.warp: named_barrier(each.instruction) for each in e.facts.waits if each.kind == "bar"}
    sides = {e.warp, e.facts.other.warp} if e.facts.other is not None else {e.warp}
    for each in e.facts.past.doubles:
        concerned = {warp for warp, number in waits.items() if number in (each.number, -1)} or sides
        absent = sorted(warp for warp in concerned if warp and warp not in each.warps)
        fields = {"number": each.number, "twice": e.who([each.warp]), "again": e.line(each.instruction)}
        if absent and (waits or len(absent) < len(sides)):
            return fields | {"absent": e.who(absent)}
        here = [x for x in e.instructions if named_barrier(x) in (each.number, -1)]
        writes = filter(stores_shared, e.instructions)
        if not absent and not waits and len(sides) == 1 and any(
            e.reaches(write, arrival, lambda _: False) for write in writes for arrival in here
        ):  # nobody has written what the warp reads, and somebody who comes to the barrier writes
            return fields | {"absent": "another warp"}
    return None


def _named_barrier_short(e: Evidence) -> Fields | None:
    """Nobody else can come to a named barrier at which threads wait."""
    waits = [(wait, named_barrier(wait.instruction)) for wait in e.facts.waits if wait.kind == "bar"]
    for wait, number in waits:
        if number is None or number < 0 or "threads arrived" not in wait.text:
            continue
        others = [each.instruction for each in e.facts.waits if each.warp in wait.missing]
        if any(each is None or any(named_barrier(x) in (number, -1) for x in e.reached(each)) for each in others):
            continue
        who = [each.warp for each, here in waits if here == number and each.text == wait.text]
        unused = [
            each
            for each in e.instructions
            if "arrive" in each.parts
            and (named_barrier(each) or 0) > 0
            and named_barrier(each) not in {named_barrier(x) for x in e.instructions if "arrive" not in x.parts}
        ]
        hint = "".join(f" Nobody ever waits for barrier {named_barrier(each)}, at which {e.line(each)} arrives."
                       for each in unused[:1])  # fmt: skip
        came = re.search(r"(\d+) of (\d+) threads", wait.text)
        return {"who": e.who(who), "at": e.line(wait.instruction), "number": number, "came": came[1],
                "count": came[2], "hint": hint}  # fmt: skip
    return None


def _waits_again(e: Evidence) -> Iterator[tuple[Moment, list[Moment]]]:
    """Waits for a phase for which the warp has waited before, and all that it has done since then."""
    seen: dict[tuple[str, Spot, int], int] = {}
    for now, each in enumerate(e.moments):
        if each.operation == "wait":
            key = each.warp, each.place, each.phase
            if key in seen:
                yield each, [s for s in e.moments[seen[key] : now] if s.warp == each.warp]
            seen[key] = now


def _ring_at_fault(e: Evidence) -> list[int]:
    """Stages of the mbarrier of the error, or of the last wait of its warp; none if there is one stage alone."""
    state, last = e.facts.barrier, e.last_wait()
    spot = (state.cta, state.offset) if state is not None else last.place if last is not None else None
    stages = e.stages(spot) if spot is not None else []
    return stages if len(stages) > 1 else []


def _not_advanced(e: Evidence) -> Fields | None:
    """Who waits for a phase, signals the same stage, and waits for the same phase again."""
    stages = _ring_at_fault(e)
    for each, between in _waits_again(e) if stages else ():
        there = [s for s in between if s.operation == "arrive" and s.place[1] in stages]
        mine = e.stages(each.place)
        if there and len(mine) == len(stages) and mine.index(each.place[1]) == stages.index(there[0].place[1]):
            return {"who": e.who([each.warp]), "here": e.name(each.place), "at": e.line(each.instruction),
                    "other": e.name(there[0].place), "signal": e.line(there[0].instruction)}  # fmt: skip
    return None


def _signalled_elsewhere(e: Evidence) -> Fields | None:
    for waiting, spot in _roots(e):
        if not waiting.barrier.pending:
            continue
        for sibling in e.siblings(spot):
            place, phase = (sibling.cta, sibling.offset), waiting.barrier.phase
            there = e.did("arrive", place, phase)
            mine = e.did("arrive", spot, phase)
            instead = sibling.phase > phase or not any(each == place for _, each in _at_barriers(e))
            if there and instead and len(mine) < len(there) + (sibling.phase == phase):
                who = e.who(each.warp for each in there)
                return {"here": e.name(spot), "there": e.name(place), "at": e.lines(there), "who": who}
    return None


def _multicast_elsewhere(e: Evidence) -> Fields | None:
    for waiting, spot in _roots(e):
        alike = e.alike(spot)
        missing = waiting.barrier.tx
        copies = [
            each for each in e.did("deliver")
            if alike(each.place) and each.instruction and "multicast::cluster" in each.instruction.parts
        ]  # fmt: skip
        for copy in copies if missing > 0 and not waiting.barrier.pending else ():
            same = [each for each in copies if each.instruction == copy.instruction]
            reached = {each.place[0] for each in same if each.warp == copy.warp}
            if spot[0] not in reached and missing % copy.amount == 0:
                ctas = " and ".join(map(str, sorted(reached)))
                return {"who": e.who([copy.warp]), "at": e.line(copy.instruction), "ctas": ctas, "cta": spot[0],
                        "here": e.name(spot), "missing": f"{missing:,}"}  # fmt: skip
    return None


def _first_parity(e: Evidence) -> Fields | None:
    waits = _at_barriers(e)
    acted = {each.warp for each in (*e.did("arrive"), *e.did("deliver"))}
    first = [
        (waiting, spot) for waiting, spot in waits
        if waiting.phase == 0 and e.untouched(spot) and not acted & set(_labels(waiting))
    ]  # fmt: skip
    if len({spot[1] for _, spot in first}) < 2:
        return None
    if any(not acted & set(_labels(each[0])) for each in waits if each not in first):
        return None
    waits = [wait for wait in e.facts.waits if wait.instruction is not None]
    filling = {wait.warp for wait in waits if _follows(e, wait.instruction, "expect_tx")}
    reading = {wait.warp for wait in waits if _follows(e, wait.instruction, "ld", "ldmatrix", "bulk_group")}
    empty = [each for each in first if any(word in e.name(each[1]).lower() for word in ("empty", "free"))]
    named = empty or [each for each in first if filling & set(_labels(each[0]))]
    named = named or [each for each in first if not reading & set(_labels(each[0]))] or first
    lines = dict.fromkeys(f"{e.who(_labels(waiting))} for {e.name(spot)}" for waiting, spot in named)
    return {"who": " or ".join(lines)}


def _follows(e: Evidence, wait: Located, *parts: str) -> bool:
    """Whether an instruction with such a part stands behind a wait, and before the next one."""
    return bool(e.behind(wait, lambda each: bool({*parts} & {*each.parts}), lambda each: "try_wait" in each.parts))


def _bytes_missing(e: Evidence) -> tuple[Waiting, Spot] | None:
    roots = _roots(e)
    first = [each for each in roots if e.known["ranks"][each[1]] == e.known["ranks"][roots[0][1]]]
    return next((each for each in first if each[0].barrier.tx > 0 and not each[0].barrier.pending), None)


def _nothing_comes(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None or e.did("deliver", found[1], found[0].barrier.phase):
        return None
    announced, _, words = e.bytes_of(found[1], found[0].barrier.phase)
    return {"bytes": words} if announced else None


def _one_cta_brings(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None:
        return None
    copies = e.did("deliver", found[1], found[0].barrier.phase)
    ctas = {name.cta for each in copies if (name := WarpName.of(each.warp)) is not None}
    pair = any(each.instruction and "cta_group::2" in each.instruction.parts for each in copies)
    if not pair or len(ctas) != 1 or found[0].barrier.tx != sum(each.amount for each in copies):
        return None
    return {"bytes": e.bytes_of(found[1], found[0].barrier.phase)[2], "cta": ctas.pop() ^ 1}


def _bytes_elsewhere(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    ahead = next((each for each in e.facts.past.barriers if each.tx < 0), None)
    if found is None or ahead is None:
        return None
    spot, other = found[1], (ahead.cta, ahead.offset)
    if {each.warp for each in e.did("announce") if e.alike(other)(each.place)} & {*_labels(found[0])}:
        return None  # who announces the bytes there waits here
    return {"here": e.name(spot), "there": e.name(other), "at": e.lines(e.did("deliver", other, ahead.phase))}


def _bytes_differ(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None:
        return None
    (waiting, spot), stages = found, len(e.stages(found[1]))
    announced, came, words = e.bytes_of(spot, waiting.barrier.phase)
    empty = [(first, first + count) for cta, first, count in e.facts.past.unwritten if cta == spot[0]]
    names = [
        array.name for array in e.arrays if array.nbytes == waiting.barrier.tx * stages
        and any(first <= array.first and array.first + array.nbytes <= end for first, end in empty)
    ]  # fmt: skip
    hint = f" Nobody has written {names[0]}, of which a stage has as many bytes as are missing." if names else ""
    return {"bytes": words, "came": f"{came:,}", "hint": hint} if announced else None


def _arrivals_short(e: Evidence) -> Fields | None:
    """A wait for which some have arrived, their arrivals, and warps that stand beside these and have not."""
    for waiting, spot in _roots(e):
        arrived = e.did("arrive", spot, waiting.barrier.phase)
        if waiting.barrier.pending and arrived:
            who = {each.warp for each in arrived}
            beside = [_labels(each) for each in e.waiting if who & set(_labels(each))]
            others = [warp for warps in beside for warp in warps if warp not in who]
            return e.about(spot) | {"who": e.who(each.warp for each in arrived), "at": e.lines(arrived),
                "others": e.who(others), "some": bool(others),
                "came": sum(each.amount for each in arrived)}  # fmt: skip
    return None


def _each_signals_its_own(e: Evidence) -> Fields | None:
    """Each CTA signals its own mbarrier alone, where all CTAs count to which the copies of the stage go."""
    for waiting, spot in _roots(e):
        arrived = e.did("arrive", spot, waiting.barrier.phase)
        ctas = 1 + len(list(e.siblings(spot)))
        filled = {each.place[0] for each in e.did("deliver") if each.warp in _labels(waiting)}
        own = {name.cta for each in arrived if (name := WarpName.of(each.warp)) is not None} == {spot[0]}
        if own and len(filled) > 1 and sum(each.amount for each in arrived) * ctas == e.state(spot).expected:
            return e.about(spot) | {"at": e.lines(arrived), "who": e.who(_labels(waiting))}
    return None


def _not_announced(e: Evidence) -> Fields | None:
    """A phase lacks arrivals, and bytes have come that nobody announces.

    ``there``: where bytes are announced by their warp, or by others and no copy brings any.
    """
    for waiting, spot in _roots(e):
        came, announced = e.did("deliver", spot, waiting.barrier.phase), e.did("announce", spot, waiting.barrier.phase)
        if not waiting.barrier.pending or waiting.barrier.tx >= 0 or not came:
            continue
        came = [each for each in came if each.warp not in {other.warp for other in announced}] or came
        who, alike, everywhere = {each.warp for each in came}, e.alike(spot), e.did("announce")
        there = [
            each for each in everywhere
            if each.warp in who or not any(e.alike(each.place)(copy.place) for copy in e.did("deliver"))
        ]  # fmt: skip
        if any(alike(each.place) for each in everywhere):
            there = []
        return {"here": e.name(spot), "copy": e.lines(came), "waits": e.who(_labels(waiting)), "announced":
                e.lines(there[-1:]), "there": e.name(there[-1].place) if there else ""}  # fmt: skip
    return None


def _nobody_arrives(e: Evidence) -> Fields | None:
    for waiting, spot in _roots_without_arrival(e):
        who = _should_signal(e, waiting, spot)
        if not who:  # who else has gone round once, and signalled nobody
            others = [each for each, place in _at_barriers(e) if place[1] != spot[1] and _was_here(e, each, place)]
            who = {warp for each in others for warp in _labels(each)}
        counts = [set(_labels(each)) & who for each, _ in _at_barriers(e)]
        exact = [group for group in counts if group and e.state(spot).expected in (len(group), 32 * len(group))]
        who = exact[0] if len(exact) == 1 and e.state(spot).expected > 1 else who
        waits = [each for each in e.did("wait") if each.warp in who]
        words = f"{e.who(sorted(who))} (with a wait at {e.lines(waits)})" if waits else "somebody"
        return {"here": e.name(spot), "waits": e.who(_labels(waiting)), "who": words}
    return None


# --- arrivals and phases ----------------------------------------------------------------------------------------------


def _this_phase(e: Evidence) -> tuple[Spot, list[Moment]] | None:
    """The mbarrier of the error, and arrivals in its phase."""
    state = e.facts.barrier
    if state is None:
        return None
    spot = state.cta, state.offset
    return spot, e.did("arrive", spot, state.phase)


def _arrives_again(e: Evidence) -> Fields | None:
    found = _this_phase(e) if e.warp else None
    if found is None or not any(each.warp == e.warp for each in found[1]):
        return None
    return {"here": e.name(found[0]), "at": e.lines(found[1])}


def _arrives_where_it_waits(e: Evidence) -> Fields | None:
    """A warp arrives where it has waited, and so does not at an mbarrier for which the others who arrive there wait."""
    found = _this_phase(e)
    if found is None:
        return None
    alike = e.alike(found[0])
    waiters = {each.warp for each in e.did("wait") if alike(each.place)}
    signals = [each for each in e.signals() if alike(each.place)]
    now = [each for each in signals if each.warp in waiters and each.instruction is not None
           and "expect_tx" not in each.instruction.parts]  # fmt: skip
    if e.at_fault is not None and "arrive" in e.at_fault.parts and "expect_tx" not in e.at_fault.parts:
        now.append(Moment("arrive", found[0], 0, 1, e.warp, e.at_fault))
    who = next((each for each in reversed(now) if each.warp in waiters), None)
    signals = [each for each in signals if each.warp not in waiters]
    if who is None or not signals:
        return None
    mine = [each.place for each in e.did("arrive", warp=who.warp)]
    usual = {each.warp for each in signals}
    other = [each.place for each in e.did("wait") if each.warp in usual and not alike(each.place)
             and not any(map(e.alike(each.place), mine))]  # fmt: skip
    instead = f", and not at {e.name(other[-1])}, for which these wait" if other else ""
    return {"who": e.who([who.warp]), "at": e.line(who.instruction), "here": e.name(found[0]),
            "signals": e.lines(signals), "others": e.who(usual), "instead": instead}  # fmt: skip


def _announces_elsewhere(e: Evidence) -> Fields | None:
    found = _this_phase(e) if e.warp else None
    copies = e.did("deliver", warp=e.warp) if found is not None else []
    there = next((each.place for each in copies if each.place[1] == found[0][1] and each.place != found[0]), None)
    if there is None or any(each.place == found[0] for each in copies):
        return None
    return {"here": e.name(found[0]), "there": e.name(there)}


def _too_many_at_once(e: Evidence) -> Fields | None:
    found, state = _this_phase(e), e.facts.barrier
    if found is None or found[1] or state.pending != state.expected:
        return None
    return e.about(found[0])


def _lanes_signal(e: Evidence) -> Fields | None:
    """One instruction has signalled an mbarrier several times in a row: each lane does, and each completes a phase."""
    state = e.facts.barrier
    spot = (state.cta, state.offset) if state is not None else None
    arrivals = e.did("arrive", spot) if spot is not None else []
    for each in arrivals[:1]:
        mine = [done for done in e.moments if done.warp == each.warp]
        row = mine[mine.index(each) :][: 2 * state.expected + 1]
        if len(row) > 2 and {(done.place, done.instruction) for done in row} == {(spot, each.instruction)}:
            return e.about(spot) | {"by": e.who([each.warp]), "at": e.line(each.instruction)}
    return None


def _others_arrived(e: Evidence) -> Fields | None:
    found = _this_phase(e)
    if found is None or not found[1] or any(each.warp == e.warp for each in found[1]):
        return None
    who = e.who(each.warp for each in found[1])
    return e.about(found[0]) | {"warp": e.who([e.warp]), "who": who, "at": e.lines(found[1])}


def _released_unwaited(e: Evidence) -> Fields | None:
    """A warp has signalled a stage more often than it has waited for it in any ring that its waiters signal."""
    here, state = e.at_fault, e.facts.barrier
    moments = list(e.moments) if e.facts.past.whole else []
    if state is not None and here is not None and {"arrive", "commit"} & {*here.parts}:
        moments.append(Moment("arrive", (state.cta, state.offset), state.phase, 1, e.warp, here))
    who: dict[tuple[bool, int], set[str]] = {}  # who waits for the mbarriers at an offset, or signals them
    for each in moments:
        who.setdefault((each.operation in ("wait", "timeout"), each.place[1]), set()).add(each.warp)
    waited: dict[str, dict[tuple[int, ...], list[Moment]]] = {}
    released: dict[tuple[str, Spot], set[int]] = {}
    for each in moments:
        ring = tuple(e.stages(each.place))
        if each.operation == "wait":
            waited.setdefault(each.warp, {}).setdefault(ring, []).append(each)
        if each.operation != "arrive" or len(ring) < 2:
            continue
        phases = released.setdefault((each.warp, each.place), set())
        phases.add(each.phase)
        stage, back = ring.index(each.place[1]), set().union(*(who.get((True, at), set()) for at in ring)) - {each.warp}
        partners = [
            (waits[-1], {wait.phase for wait in waits if wait.place[1] == other[stage]})
            for other, waits in waited.get(each.warp, {}).items()
            if len(other) == len(ring) and other != ring and any(back & who.get((False, at), set()) for at in other)
        ]
        if partners and all(len(there) < len(phases) for _, there in partners):
            last = partners[-1][0]
            return {"who": e.who([each.warp]), "waited": e.name(last.place), "wait": e.line(last.instruction),
                    "here": e.name(each.place), "at": e.line(each.instruction)}  # fmt: skip
    return None


def _waits_too_early(e: Evidence) -> Fields | None:
    """The first wait of a warp for an mbarrier asks for the phase before the first one."""
    state = e.facts.barrier
    if state is None or state.phase > 1 or not e.warp or not e.facts.past.whole:
        return None
    spot = state.cta, state.offset
    if e.did("wait", spot, warp=e.warp) or not e.did("deliver", spot) and not e.did("arrive", spot):
        return None
    alike = e.alike(spot)
    if any(alike(each.place) and each.amount == 0 for each in e.did("wait", warp=e.warp)):
        return None  # it has begun with parity 0
    early = [each for each in e.did("arrive", spot) if not e.did("wait", warp=each.warp)]
    room = bool(early) and e.at_fault is not None and _follows(e, e.at_fault, "expect_tx")
    return {"here": e.name(spot), "room": room, "by": e.who(each.warp for each in early), "early": e.lines(early)}


def _completed_from_elsewhere(e: Evidence) -> Fields | None:
    """An arrival completes a phase to which warps of other CTAs than the mbarrier's have come alone."""
    found = _this_phase(e)
    if found is None or not e.warp or not e.several:
        return None
    spot, arrivals = found
    who = [*(each.warp for each in arrivals), e.warp]
    if any(name is None or name.cta == spot[0] for name in map(WarpName.of, who)):
        return None
    return e.about(spot) | {"who": e.who(who)}


def _count_too_low(e: Evidence) -> Fields | None:
    state = e.facts.barrier
    if state is None:
        return None
    spot = state.cta, state.offset
    arrivals = e.did("arrive", spot)
    by_phase: dict[int, set[str]] = {}
    for each in arrivals:
        by_phase.setdefault(each.phase, set()).add(each.warp)
    if not any(by_phase[phase] - by_phase.get(phase + 1, by_phase[phase]) for phase in by_phase):
        return None
    return e.about(spot) | {"at": e.lines(arrivals), "who": e.who(each.warp for each in arrivals)}


def _copy_signals_again(e: Evidence) -> Fields | None:
    state = e.facts.barrier
    if state is None:
        return None
    copies = e.did("deliver", (state.cta, state.offset), state.phase)
    seen = [(each.warp, each.instruction) for each in copies]
    again = next((each for each in copies if seen.count((each.warp, each.instruction)) > 1), None)
    if again is None or len({each.place for each in copies}) > 1:
        return None
    return {"here": e.name((state.cta, state.offset)), "copy": e.line(again.instruction), "who": e.who([again.warp])}


def _bytes_of_phase(e: Evidence) -> Fields | None:
    state = e.facts.barrier
    if state is None:
        return None
    spot = state.cta, state.offset
    announced = e.did("announce", spot, state.phase)
    total = sum(each.amount for each in announced)
    if not announced:
        return None
    came = f"{total - state.tx:,}"
    return {"here": e.name(spot), "announced": f"{total:,}", "came": came, "at": e.lines(announced),
            "copy": e.line(e.at_fault)}  # fmt: skip


def _announces_nothing(e: Evidence) -> Fields | None:
    """Copies signal mbarriers of an array at which nobody has ever announced bytes; where their warp announces them."""
    state = e.facts.barrier
    alike = e.alike((state.cta, state.offset)) if state is not None else None
    if alike is None or any(alike(each.place) for each in e.did("announce")):
        return None
    arrivals = [each for each in e.did("arrive") if alike(each.place) and each.warp in ("", e.warp)]
    there = e.did("announce", warp=e.warp)
    return {"here": e.name((state.cta, state.offset)), "copy": e.line(e.at_fault),
            "at": f" ({e.lines(arrivals)})" if arrivals else "", "there": e.name(there[-1].place) if there else "",
            "announced": e.lines(there[-1:])}  # fmt: skip


def _barrier_of_other_cta(e: Evidence) -> Fields | None:
    state, name = e.facts.barrier, WarpName.of(e.warp)
    if state is None or name is None or state.cta == name.cta:
        return None
    return {"cta": state.cta}


def _init_fenced(e: Evidence) -> Fields | None:
    """The fence behind the initialisation is there, and a barrier behind the fence is not."""
    init = e.facts.barrier.init if e.facts.barrier is not None else None
    here = e.at_fault
    fences = [each for each in e.reached(init) if each.parts[:2] == ("fence", "mbarrier_init")] if init else []
    if not fences or here is None or not e.reaches(fences[0], here, _meets):
        return None
    return {"name": e.title(e.facts.barrier), "init": e.line(init), "fence": e.line(fences[0])}


def _meets(each: Located) -> bool:
    """Whether it is a barrier of threads of the CTA, or of the cluster."""
    return named_barrier(each) is not None or "cluster" in each.parts and each.parts[0] == "barrier"


_PHASES = ("extra-arrivals", "phase-overrun", "phase-missed", "stage-in-use", "shared-race")

BARRIERS: tuple[Cause, ...] = (
    Cause(("barrier-init-order",), _init_fenced, "sync_threads (in a cluster cluster_arrive_relaxed and cluster_wait) "
          "is missing behind the fence at {fence}: {who} comes to {here} without waiting for the thread that "
          "initialises {name} at {init}"),
    # Hangs: resources first, then mbarriers.
    Cause(("hang",), _waits("setmaxnreg"), "", "registers"),
    Cause(("hang",), _waits("tcgen05.alloc"), "", "tensor-columns"),
    Cause(("hang", "shared-race", "uninitialised-read"), _arrived_twice, "named barrier {number} counted two arrivals "
          "of {twice} in one phase, the second at {again} in place of one by {absent}, without which it was complete. "
          "An arrival of the next turn has to wait until the phase is complete, or turns in flight have barriers of "
          "their own (an id for each stage)"),
    Cause(("hang",), _named_barrier_short, "nobody else can come to named barrier {number}, at which {who} wait at "
          "{at}: {came} of {count} threads have arrived. number_of_threads is the number of all who come, arriving and "
          "waiting, or the others have to come to a barrier with this id.{hint}"),
    Cause(("hang",), _signalled_own, "{who} signals {own} at {at}, for which it waits itself, and nobody has signalled "
          "{other}: that arrival or commit names the wrong mbarrier"),
    Cause(("hang",), _waits_elsewhere, "the wait of {who} at {at} is for {here}, which nobody has signalled, and "
          "nobody waits for {there}, which is signalled at {signals}: that wait names the wrong mbarrier"),
    Cause(("hang",), _signalled_elsewhere, "{at} (of {who}) signals {there}, and not {here}, which is waited for: a "
          "tcgen05.commit needs the mask of all CTAs that wait (tcgen05.commit(barrier, mask, cta_group)), an "
          "mbarrier_arrive the rank of the CTA that does"),
    Cause(("hang",), _multicast_elsewhere, "{here} lacks {missing} bytes of the multicast at {at}: what {who} loads "
          "there reaches CTA {ctas} alone, so mcast_mask has to have the bit of CTA {cta}, too", "transaction-bytes"),
    Cause(("hang",), _first_parity, "a producer's first wait on an empty ring has parity 1: the phase before the first "
          "one counts as complete. Here everybody waits first, {who}", "first-parity"),
    Cause(("hang",), _at_named_barriers, "warps wait for each other at named barriers: {waits}. In front of one of "
          "these waits somebody has not arrived at the barrier of the other one (barrier_arrive or barrier, with its "
          "id and number of threads)"),
    Cause(("hang",), _bytes_elsewhere, "the bytes that {here} waits for have come to {there}, at {at}: a copy names "
          "the mbarrier of its own stage", "transaction-bytes"),
    Cause(("hang",), _nothing_comes, "a copy is missing: {bytes}. Is one issued behind that, and does it name this "
          "mbarrier?", "transaction-bytes"),
    Cause(("hang",), _one_cta_brings, "{bytes}: as much again has to come from CTA {cta} of the pair, whose copies "
          "signal the leader's mbarrier, and which has issued none", "transaction-bytes"),
    Cause(("hang",), _bytes_differ, "too much is announced, or a copy is missing: {bytes}.{hint} If these copies are "
          "all of the stage, mbarrier_arrive_and_expect_tx (tx_count) has to announce {came}; if not, another one has "
          "to be issued, or has to name this mbarrier", "transaction-bytes"),
    Cause(("hang",), _each_signals_its_own, "each CTA signals its own {here} alone, at {at}, and the copies of {who} "
          "fill the stage in all CTAs, as the count {count} of mbarrier_init at {init} says: tcgen05.commit(barrier, "
          "mask, cta_group) needs the mask of all of them, and mbarrier_arrive is called for the rank of each"),
    Cause(("hang",), _not_announced, "the copy at {copy} signals {here}, at which nobody announces bytes, and those "
          "announced for {there} at {announced} have not come: the copy names the wrong mbarrier",
          when=lambda found: found["there"]),
    Cause(("hang",), _not_announced, "an announcement is missing: the bytes of the copy at {copy} have come to {here}, "
          "for which {waits} waits, and nobody announces them: mbarrier_arrive_and_expect_tx in front of the copy"),
    Cause(("hang",), _arrivals_short, "an arrival is missing: at {here} there are arrivals of {who} ({at}), and "
          "none of {others}: let every one arrive, or give mbarrier_init the number that does",
          when=lambda found: found["some"]),
    Cause(("hang",), _arrivals_short, "the count of {here} is too high: mbarrier_init at {init} gives {count}, and "
          "{came} come in a phase, from {who} at {at}, all of whom have arrived"),
    Cause(("hang",), _nobody_arrives, "an arrival is missing: nobody has arrived in this phase at {here}, the mbarrier "
          "of the wait of {waits}. The signal has to come from {who}: mbarrier_arrive behind the last access, or "
          "tcgen05.commit where MMAs read or write the stage. Is it there, and does it name this mbarrier?"),
    # Arrivals and phases: who comes again, who is not counted, whose stage it is.
    Cause(_PHASES, _not_advanced, "{who} waits at {at} for a phase of {here} for which it has waited before, and has "
          "signalled {other} at {signal} in between: the stage, or its parity, does not advance (state.advance())"),
    Cause(("extra-arrivals", "phase-overrun", "phase-missed", "phase-ambiguous", "arrival-early"),
          _arrives_where_it_waits, "{who} "
          "arrives at {at} at {here}, for which it has waited itself, and which {others} signals at "
          "{signals}{instead}: that arrival names the wrong mbarrier"),
    Cause(("extra-arrivals",), _announces_elsewhere, "{who} announces at {here}, and its copies signal {there}: of a "
          "pair of CTAs the leader alone announces the bytes of both, so the arrive_and_expect_tx at {at} is for CTA 0 "
          "alone"),
    Cause(("extra-arrivals",), _too_many_at_once, "the count of {here} is too low: mbarrier_init at {init} gives "
          "{count}, and more threads of {who} arrive at {at}: the number of all threads that arrive, or one of each "
          "warp arrives (elect_one)"),
    Cause(("phase-missed", "phase-overrun"), _lanes_signal, "all lanes of {by} arrive at {here} at {at}, and "
          "mbarrier_init at {init} counts {count}: one lane arrives (elect_one)"),
    Cause(("extra-arrivals",), _arrives_again, "{who} has arrived at {here} in this phase already, at {at}: it has "
          "come round the ring without waiting for the stage to be free, or several of its lanes arrive (elect_one). A "
          "producer waits for the stage's empty mbarrier before it announces bytes again"),
    Cause(("extra-arrivals",), _others_arrived, "{warp} arrives at {here} behind the arrivals of {who} ({at}), and "
          "mbarrier_init at {init} counts {count}: count all who arrive, or let one of them do it"),
    Cause((*_PHASES, "tensor-race"), _released_unwaited, "stages differ: {who} has waited for {waited} at {wait} and "
          "signals {here} at {at}, a stage for which it has not waited: the index of both has to be the same"),
    Cause(("phase-overrun", "extra-arrivals"), _completed_from_elsewhere, "{who} alone complete a phase of {here}, at "
          "{at}: the count {count} of mbarrier_init at {init} has to be the number of arrivals of all CTAs, that of "
          "{here} counted, or these arrivals name the wrong CTA"),
    Cause(("phase-overrun", "phase-missed", "phase-ambiguous"), _count_too_low, "the count of {here} is too low: "
          "mbarrier_init at {init} gives {count}, and a phase is complete before all have arrived that do at {at}: "
          "{who}"),
    Cause(("phase-ambiguous",), _waits_too_early, "the release comes too early: {by} arrives at {here} at {early} "
          "before any wait, and hands back a stage that nobody has filled: wait for the stage, read it, then arrive",
          when=lambda found: found["room"]),
    Cause(("phase-ambiguous",), _waits_too_early, "wrong parity: the first wait of {who} for {here}, at {at}, asks for "
          "parity 1, and passes at once where it comes before the first phase is complete: a consumer's first wait has "
          "parity 0"),
    Cause(("extra-bytes", "bytes-early"), _announces_nothing, "the copy at {copy} signals {here}, at which nobody "
          "announces bytes, and its warp announces them for {there} at {announced}: the copy names the wrong mbarrier",
          when=lambda found: found["there"]),
    Cause(("extra-bytes", "bytes-early"), _announces_nothing, "nobody announces the bytes of the copy at {copy}, which "
          "signals {here}: mbarrier_arrive_and_expect_tx in place of mbarrier_arrive{at} announces the bytes of all "
          "copies of the phase"),
    Cause(("extra-bytes",), _copy_signals_again, "the copy at {copy} by {who} has signalled {here} twice in this "
          "phase: it names the mbarrier of another stage, or its warp has come round the ring without waiting for the "
          "stage to be free"),
    Cause(("extra-bytes",), _bytes_of_phase, "too few bytes are announced for {here}: {announced} at {at}, and with "
          "the copy at {copy} {came} have come: mbarrier_arrive_and_expect_tx takes the bytes of all copies of the "
          "phase, every operand and every CTA of a multicast or a pair counted"),
    Cause(("uninitialised-barrier",), _barrier_of_other_cta, "CTA {cta} has not initialised its mbarriers yet: behind "
          "mbarrier_init and mbarrier_init_fence, cluster_arrive_relaxed and cluster_wait, in place of sync_threads"),
)  # fmt: skip
