"""Which of several causes a fault has: a table of facts that tell them apart, and of the mend of each.

A row holds if its function finds its facts in the `Evidence`; it gives the fields of the row's sentence. The first row
of a kind that holds replaces the help of the kind. Rows that are taken for each other stand together, each with a fact
that the other one's fault does not have. Where the facts are not known no row holds, and the kind's own help stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cute_kernels.diagnostics.evidence import Evidence, Spot, passed_at_once
from cute_kernels.diagnostics.model import Waiting
from cute_kernels.emulator.facts import Located, Moment, WarpName

Fields = dict[str, object]


@dataclass(frozen=True)
class Cause:
    """A row.

    Attributes:
        kinds: of the reports that it may be the cause of.
        holds: fields of ``help`` where it is the cause, None where it is not.
        help: cause and mend; "": the help of ``kind``.
        kind: that the report becomes, "" for none.
    """

    kinds: tuple[str, ...]
    holds: Callable[[Evidence], Fields | None]
    help: str
    kind: str = ""


def cause_of(kind: str, evidence: Evidence) -> tuple[str, str]:
    """The kind of a report, and its help where a row holds, else ""."""
    for cause in CAUSES:
        if kind in cause.kinds and (fields := cause.holds(evidence)) is not None:
            return cause.kind or kind, cause.help.format_map(fields)
    return kind, ""


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
    usual = _usual(e, waiting, spot)
    return any(usual & set(_labels(other)) for other, place in _at_barriers(e) if place != spot)


def _usual(e: Evidence, waiting: Waiting, spot: Spot) -> set[str]:
    """Warps that signalled the mbarrier, or its like, in earlier phases, and not in this one."""
    operation = "deliver" if waiting.barrier.tx > 0 and not waiting.barrier.pending else "arrive"
    alike = e.alike(spot)
    usual = {each.warp for each in e.did(operation) if alike(each.place) and each.place[0] == spot[0]}
    return usual - {each.warp for each in e.did(operation, spot, waiting.barrier.phase)}


def _roots(e: Evidence) -> list[tuple[Waiting, Spot]]:
    """Waits that nobody else's wait explains, then those of warps that have done nothing so far."""
    waits = _at_barriers(e)
    found = [(waiting, spot) for waiting, spot in waits if not _held_up(e, waiting, spot)]
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

    return sorted(found, key=lambda each: (explained(*each), _was_here(e, *each)))


def _should_signal(e: Evidence, waiting: Waiting, spot: Spot) -> set[str]:
    """Warps that wait for what the waiting ones signal, and have not signalled these in another way."""
    mine = set(_labels(waiting))
    signals = {each.place for each in e.moments if each.warp in mine and each.operation != "wait"}
    awaited = {each.place for each in e.did("wait") if each.warp in mine and each.place != spot}
    back = {each.warp for each in e.moments if each.operation != "wait" and each.place in awaited}
    return {each.warp for each in e.did("wait") if each.place in signals} - mine - back


def _signalled_own(e: Evidence) -> Fields | None:
    waits = _at_barriers(e)
    for waiting, spot in waits:
        own = [each for each in e.did("arrive", spot, waiting.barrier.phase) if each.warp in _labels(waiting)]
        other = next((place for _, place in waits if place != spot and e.untouched(place)), None)
        if own and other is not None and waiting.barrier.pending:
            return {"who": e.who(_labels(waiting)), "own": e.name(spot), "at": e.lines(own), "other": e.name(other)}
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
                return {
                    "here": e.name(spot), "there": e.name(place), "at": e.lines(there), "who": e.who(w.warp for w in there)
                }  # fmt: skip
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
    first = [
        (waiting, spot) for waiting, spot in waits
        if waiting.phase == 0 and e.untouched(spot) and not _was_here(e, waiting, spot)
    ]  # fmt: skip
    if len({spot[1] for _, spot in first}) < 2:
        return None
    acted = {each.warp for each in (*e.did("arrive"), *e.did("deliver"))}
    if any(not acted & set(_labels(each[0])) for each in waits if each not in first):
        return None
    empty = [each for each in first if any(word in e.name(each[1]).lower() for word in ("empty", "free"))]
    named = empty or first
    lines = dict.fromkeys(f"{e.who(_labels(waiting))} for {e.name(spot)}" for waiting, spot in named)
    return {"who": " or ".join(lines)}


def _bytes_missing(e: Evidence) -> tuple[Waiting, Spot] | None:
    return next((each for each in _roots(e) if each[0].barrier.tx > 0 and not each[0].barrier.pending), None)


def _nothing_comes(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None or e.did("deliver", found[1], found[0].barrier.phase):
        return None
    announced, _, words = e.bytes_of(found[1], found[0].barrier.phase)
    return {"bytes": words} if announced else None


def _copy_missing(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None:
        return None
    (waiting, spot), stages = found, len(e.stages(found[1]))
    empty = [(first, first + count) for cta, first, count in e.facts.past.unwritten if cta == spot[0]]
    for array in e.arrays:
        inside = any(first <= array.first and array.first + array.nbytes <= end for first, end in empty)
        if inside and array.nbytes == waiting.barrier.tx * stages:
            return {"bytes": e.bytes_of(spot, waiting.barrier.phase)[2], "array": array.name}
    return None


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
    return {"here": e.name(spot), "there": e.name(other), "at": e.lines(e.did("deliver", other, ahead.phase))}


def _bytes_differ(e: Evidence) -> Fields | None:
    found = _bytes_missing(e)
    if found is None:
        return None
    announced, came, words = e.bytes_of(found[1], found[0].barrier.phase)
    return {"bytes": words, "came": f"{came:,}"} if announced else None


def _arrivals_short(e: Evidence) -> tuple[Waiting, Spot, list[Moment], list[str]] | None:
    """A wait for which some have arrived, their arrivals, and warps that stand beside these and have not."""
    for waiting, spot in _roots(e):
        arrived = e.did("arrive", spot, waiting.barrier.phase)
        if waiting.barrier.pending and arrived:
            who = {each.warp for each in arrived}
            beside = [_labels(each) for each in e.waiting if who & set(_labels(each))]
            return waiting, spot, arrived, [warp for warps in beside for warp in warps if warp not in who]
    return None


def _some_do_not_arrive(e: Evidence) -> Fields | None:
    found = _arrivals_short(e)
    if found is None or not found[3]:
        return None
    _, spot, arrived, others = found
    return {"here": e.name(spot), "who": e.who(each.warp for each in arrived), "at": e.lines(arrived),
            "others": e.who(others)}  # fmt: skip


def _count_too_high(e: Evidence) -> Fields | None:
    found = _arrivals_short(e)
    if found is None or found[3]:
        return None
    waiting, spot, arrived, _ = found
    state = e.state(spot)
    return {"here": e.name(spot), "count": state.expected, "init": e.line(state.init),
            "came": sum(each.amount for each in arrived), "who": e.who(each.warp for each in arrived),
            "at": e.lines(arrived)}  # fmt: skip


def _nobody_arrives(e: Evidence) -> Fields | None:
    for waiting, spot in _roots(e):
        if not waiting.barrier.pending or e.did("arrive", spot, waiting.barrier.phase):
            continue
        who = _should_signal(e, waiting, spot)
        if not who:  # who else has gone round once, and signalled nobody
            others = [each for each, place in _at_barriers(e) if place[1] != spot[1] and _was_here(e, each, place)]
            who = {warp for each in others for warp in _labels(each)}
        waits = [each for each in e.did("wait") if each.warp in who]
        words = f"{e.who(sorted(who))} (with a wait at {e.lines(waits)})" if waits else "somebody"
        return {"here": e.name(spot), "waits": e.who(_labels(waiting)), "who": words}
    return None


# --- accesses too early: a stage that is not full yet -----------------------------------------------------------------


def _looks_at_copy(e: Evidence) -> Spot | None:
    """The mbarrier of the copy that has written what is accessed now; None if it is no such fault."""
    other, side = e.facts.other, e.facts.side
    if other is None or side is None or other.verb != "wrote" or other.signals is None or not e.warp:
        return None
    return other.signals if side.verb == "reads" else None


def _last_wait(e: Evidence, spot: Spot | None) -> Moment | None:
    """The last wait that the warp has passed, for the mbarrier or its like; for any without one."""
    alike = e.alike(spot) if spot is not None else lambda place: True
    return next((each for each in reversed(e.did("wait", warp=e.warp)) if alike(each.place)), None)


def _not_waited(e: Evidence) -> Fields | None:
    spot = _looks_at_copy(e)
    if spot is None or not e.facts.past.whole or _last_wait(e, spot) is not None:
        return None
    return {"who": e.who([e.warp]), "full": e.name(spot), "copy": e.line(e.facts.other.instructions[0])}


def _stages_differ(e: Evidence) -> tuple[Spot, Moment, int, int, int | None] | None:
    """The copy's mbarrier, the wait, the stages of both, and the one of the memory."""
    spot = _looks_at_copy(e)
    wait = _last_wait(e, spot) if spot is not None else None
    if wait is None:
        return None
    memory = e.stage_of_memory(e.facts.memory, len(e.stages(spot)))
    return spot, wait, e.stages(spot).index(wait.place[1]), e.stage(spot), memory


def _copy_of_other_stage(e: Evidence) -> Fields | None:
    found = _stages_differ(e)
    if found is None or found[4] is None or found[4] == found[3]:
        return None
    spot, _, _, signalled, memory = found
    return {"copy": e.line(e.facts.other.instructions[0]), "memory": memory, "full": e.name(spot), "stage": signalled}


def _reads_other_stage(e: Evidence) -> Fields | None:
    found = _stages_differ(e)
    if found is None or found[2] == found[3]:
        return None
    spot, wait, waited, stage, _ = found
    return {"who": e.who([e.warp]), "waited": e.name(wait.place), "at": e.line(wait.instruction), "full": e.name(spot),
            "stage": stage, "other": waited, "here": e.line(e.at_fault)}  # fmt: skip


def _generic_stages(e: Evidence) -> tuple[Moment, int, int] | None:
    """The last wait of who reads what a thread or a cp.async wrote, its stage, and the one of the memory."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or other.signals or not e.warp:
        return None
    wait = _last_wait(e, None)
    stages = e.stages(wait.place) if wait is not None and other.warp != e.warp else []
    memory = e.stage_of_memory(e.facts.memory, len(stages))
    return (wait, stages.index(wait.place[1]), memory) if memory is not None else None


def _generic_other_stage(e: Evidence) -> Fields | None:
    found = _generic_stages(e)
    if found is None or found[1] == found[2]:
        return None
    wait, waited, memory = found
    return {"who": e.who([e.warp]), "full": e.name(wait.place), "at": e.line(wait.instruction), "stage": waited,
            "other": memory, "here": e.line(e.at_fault)}  # fmt: skip


def _generic_same_stage(e: Evidence) -> Fields | None:
    found = _generic_stages(e)
    if found is None or found[1] != found[2] or passed_at_once(found[0]):
        return None
    wait, _, stage = found
    signals = [each for each in e.did("arrive", wait.place, wait.phase - 1)]
    write = e.facts.other.instructions
    if not signals or not write:
        return None
    return {"who": e.who([e.warp]), "full": e.name(wait.place), "at": e.lines(signals), "stage": stage,
            "write": e.line(write[0])}  # fmt: skip


def _waited_at_once(e: Evidence) -> Fields | None:
    wait = _last_wait(e, _looks_at_copy(e))
    memory = e.facts.memory
    reads = e.error.kind == "uninitialised-read" or _looks_at_copy(e) is not None
    if wait is None or not reads or not passed_at_once(wait) or (memory is not None and memory.space == "global"):
        return None
    if _tells_of_room(e, wait.place):
        return None
    return {"who": e.who([e.warp]), "at": e.line(wait.instruction), "full": e.name(wait.place)}


def _tells_of_room(e: Evidence, spot: Spot) -> bool:
    """Whether an mbarrier seems to tell producers that a stage is free: copies signal others, or its name says so."""
    alike = e.alike(spot)
    filled = [alike(each.place) for each in (*e.did("announce"), *e.did("deliver"))]
    # Of tensor memory, which MMAs write, commits tell, and not copies.
    others = bool(filled) and e.facts.memory is not None
    return not any(filled) and (others or any(word in e.name(spot).lower() for word in ("empty", "free")))


def _waited_for_room(e: Evidence) -> Fields | None:
    wait = _last_wait(e, None) if e.warp else None
    if wait is None or not passed_at_once(wait) or not _tells_of_room(e, wait.place):
        return None
    return {"who": e.who([e.warp]), "empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _phase_over(e: Evidence) -> tuple[Spot, int, bool] | None:
    """The mbarrier of the copy, the phase of it that was waited for, and whether a later one was announced."""
    found = _stages_differ(e)
    if found is None or found[2] != found[3] or passed_at_once(found[1]):
        return None
    spot, wait = found[:2]
    phase = wait.phase - 1
    return spot, phase, bool(e.did("announce", spot, phase + 1))


def _announced_too_few(e: Evidence) -> Fields | None:
    found = _phase_over(e)
    if found is None or found[2]:
        return None
    spot, phase, _ = found
    return {"full": e.name(spot), "phase": phase, "bytes": e.bytes_of(spot, phase)[2],
            "copy": e.line(e.facts.other.instructions[0]), "who": e.who([e.facts.other.warp])}  # fmt: skip


def _not_waited_again(e: Evidence) -> Fields | None:
    found = _phase_over(e)
    if found is None or not found[2]:
        return None
    return {"full": e.name(found[0]), "phase": found[1], "who": e.who([e.warp])}


def _never_waited(e: Evidence) -> Fields | None:
    known = e.warp and e.facts.past.whole and e.facts.past.barriers
    return {"who": e.who([e.warp])} if known and _last_wait(e, None) is None else None


def _written_otherwise(e: Evidence) -> Fields | None:
    wait = _last_wait(e, None) if e.warp else None
    if wait is None or passed_at_once(wait):
        return None
    phase = wait.phase - 1
    came = e.did("deliver", wait.place, phase)
    what = f"the copies at {e.lines(came)} have brought" if came else "no copy has brought any bytes of"
    return {"who": e.who([e.warp]), "at": e.line(wait.instruction), "full": e.name(wait.place), "phase": phase,
            "what": what}  # fmt: skip


# --- accesses too early: a stage that is still in use -----------------------------------------------------------------


def _refills(e: Evidence) -> Fields | None:
    """Facts of a write over what is still in use; None if it is no such fault."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "writes" or not e.warp or not e.facts.past.barriers:
        return None
    by_thread = not side.what and not any(part in (e.error.instruction or "") for part in ("cp.async", "tcgen05.mma"))
    return None if by_thread else {"who": e.who([e.warp]), "here": e.line(e.at_fault)}


def _refills_without_wait(e: Evidence) -> Fields | None:
    fields = _refills(e)
    alike = [each for each in e.did("wait", warp=e.warp) if each.place not in _signalled_by(e)]
    return fields if fields is not None and e.facts.past.whole and not alike else None


def _signalled_by(e: Evidence) -> set[Spot]:
    """Mbarriers that the warp's own arrivals and copies signal: it does not learn from these that a stage is empty."""
    return {each.place for each in e.moments if each.warp == e.warp and each.operation != "wait"}


def _empty_wait(e: Evidence) -> Moment | None:
    waits = e.did("wait", warp=e.warp)
    return waits[-1] if waits else None


def _refills_at_once(e: Evidence) -> Fields | None:
    fields, wait = _refills(e), _empty_wait(e)
    if fields is None or wait is None or not passed_at_once(wait):
        return None
    return fields | {"empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _released(e: Evidence) -> tuple[Fields, Moment, list[Moment]] | None:
    """Fields, the wait for the stage to be empty, and the arrivals that completed its phase."""
    fields, wait = _refills(e), _empty_wait(e)
    if fields is None or wait is None or passed_at_once(wait) or wait.phase < 1:
        return None
    arrivals = e.did("arrive", wait.place, wait.phase - 1)
    fields |= {"empty": e.name(wait.place), "at": e.lines(arrivals), "arrived": e.who(each.warp for each in arrivals)}
    return (fields, wait, arrivals) if arrivals else None


def _used_by(e: Evidence) -> Callable[[Moment], bool]:
    """Tells arrivals of the warp, or where that is not known the CTA, that still uses the stage."""
    warp, memory = e.facts.other.warp, e.facts.memory
    if warp:
        return lambda each: each.warp == warp
    return lambda each: memory is None or (WarpName.of(each.warp) or WarpName(0, memory.cta, 0)).cta == memory.cta


def _released_by_others(e: Evidence) -> Fields | None:
    found = _released(e)
    if found is None or any(map(_used_by(e), found[2])):
        return None
    warp, memory = e.facts.other.warp, e.facts.memory
    user = e.who([warp]) if warp else f"CTA {memory.cta}" if memory is not None else "who uses it"
    return found[0] | {"user": user, "count": e.state(found[1].place).expected}


def _released_too_early(e: Evidence) -> Fields | None:
    found = _released(e)
    if found is None or not any(map(_used_by(e), found[2])) or e.facts.other.verb != "read":
        return None
    return found[0] | {"use": e.line(e.facts.other.instructions[0]) if e.facts.other.instructions else "its use"}


# --- tensor memory ----------------------------------------------------------------------------------------------------


def _is(*parts: str) -> Callable[[Located], bool]:
    return lambda each: all(part in each.parts for part in parts)


def _arrives(each: Located) -> bool:
    return each.parts[:2] == ("mbarrier", "arrive") or each.parts[0] in ("bar", "barrier")


def _frees(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or side.verb != "frees" or other is None:
        return None
    return {"here": e.line(e.at_fault), "use": e.line(other.instructions[0]) if other.instructions else "the last use"}


def _loads_not_waited(e: Evidence) -> Fields | None:
    other = e.facts.other
    if other is None or other.verb != "read" or not other.instructions or other.instructions[0].parts[1:2] != ("ld",):
        return None
    load = other.instructions[0]
    if e.behind(load, _is("wait::ld"), _arrives):
        return None
    return {"load": e.line(load)}


def _loads_released(e: Evidence) -> Fields | None:
    other = e.facts.other
    if other is None or other.verb != "read" or not other.warp or not other.instructions:
        return None
    arrivals = [each for each in e.did("arrive", warp=other.warp) if each.instruction is not None]
    early = [each for each in arrivals if each.instruction.line < other.instructions[0].line]
    return {"load": e.line(other.instructions[0]), "at": e.lines(early[-1:])} if early else None


def _sums_overwritten(e: Evidence) -> Fields | None:
    """The reader has waited for a commit: what it reads is what MMAs behind that commit write over."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "reads" or other.verb != "wrote" or not e.warp:
        return None
    wait = _last_wait(e, None)
    if wait is None or passed_at_once(wait) or not e.did("arrive", wait.place, wait.phase - 1):
        return None
    commits = e.did("arrive", wait.place, wait.phase - 1)
    if other.warp not in {each.warp for each in commits}:
        return None
    return {"full": e.name(wait.place), "at": e.lines(commits), "mma": e.who([other.warp]), "reader": e.who([e.warp])}


def _sums_not_waited(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "reads" or other.verb != "wrote" or not e.warp:
        return None
    return {"reader": e.who([e.warp]), "mma": e.line(other.instructions[0]) if other.instructions else "the MMA"}


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
    return {"who": e.who([e.warp]), "here": e.name(found[0]), "at": e.lines(found[1])}


def _announces_elsewhere(e: Evidence) -> Fields | None:
    found = _this_phase(e) if e.warp else None
    copies = e.did("deliver", warp=e.warp) if found is not None else []
    there = next((each.place for each in copies if each.place[1] == found[0][1] and each.place != found[0]), None)
    if there is None or any(each.place == found[0] for each in copies):
        return None
    return {"who": e.who([e.warp]), "here": e.name(found[0]), "there": e.name(there), "at": e.line(e.at_fault)}


def _too_many_at_once(e: Evidence) -> Fields | None:
    found, state = _this_phase(e), e.facts.barrier
    if found is None or found[1] or state.pending != state.expected:
        return None
    return {"here": e.name(found[0]), "count": state.expected, "init": e.line(state.init), "who": e.who([e.warp]),
            "at": e.line(e.at_fault)}  # fmt: skip


def _others_arrived(e: Evidence) -> Fields | None:
    found = _this_phase(e)
    if found is None or not found[1] or any(each.warp == e.warp for each in found[1]):
        return None
    state = e.facts.barrier
    return {"here": e.name(found[0]), "count": state.expected, "init": e.line(state.init), "warp": e.who([e.warp]),
            "who": e.who(each.warp for each in found[1]), "at": e.lines(found[1])}  # fmt: skip


def _signals_other_stage(e: Evidence) -> Fields | None:
    state, wait = e.facts.barrier, _last_wait(e, None) if e.warp else None
    if state is None or wait is None:
        return None
    spot = state.cta, state.offset
    here = e.at_fault
    signals = here is not None and ("arrive" in here.parts or "commit" in here.parts)
    stages, waited = e.stages(spot), e.stages(wait.place)
    if not signals or len(stages) < 2 or len(stages) != len(waited) or e.alike(spot)(wait.place):
        return None
    if stages.index(spot[1]) == waited.index(wait.place[1]):
        return None
    return {"who": e.who([e.warp]), "waited": e.name(wait.place), "wait": e.line(wait.instruction),
            "here": e.name(spot), "at": e.line(here)}  # fmt: skip


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
    return {"here": e.name(spot), "count": state.expected, "init": e.line(state.init), "at": e.lines(arrivals),
            "who": e.who(each.warp for each in arrivals)}  # fmt: skip


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
    return {"here": e.name(spot), "announced": f"{total:,}", "came": f"{total - state.tx:,}", "at": e.lines(announced),
            "copy": e.line(e.at_fault)}  # fmt: skip


# --- groups of copies, of stores and of wgmmas --------------------------------------------------------------------------

_NEVER: Callable[[Located], bool] = lambda each: False  # noqa: E731


def _group_wait(e: Evidence, commit: tuple[str, ...], wait: tuple[str, ...], start: Located | None) -> Fields | None:
    """Which of commit and wait stands in the text behind an operation."""
    if start is None or not e.instructions:
        return None
    waits = e.behind(start, _is(*wait), _NEVER)
    commits = e.behind(start, _is(*commit), _NEVER)
    number = waits[0].text.rstrip("; ").split()[-1] if waits else ""
    number = number if number.isdecimal() else "0"
    return {"commits": len(commits), "waits": len(waits), "number": int(number), "copy": e.line(start),
            "wait": e.line(waits[0]) if waits else ""}  # fmt: skip


def _groups(which: str, commit: tuple[str, ...], wait: tuple[str, ...], reads: str) -> Callable[[Evidence], Fields | None]:
    def holds(e: Evidence) -> Fields | None:
        other = e.facts.other
        start = other.instructions[0] if other is not None and other.instructions else None
        if start is None and reads == "wgmma" and "accumulator" in e.error.message:
            number = e.error.message.partition("wgmma at PTX line ")[2].partition(",")[0]
            start = next((each for each in e.instructions if str(each.line) == number), None)
        if start is None or start.parts[0] not in (reads, "cp") or not start.parts[0] == reads.split(".")[0]:
            return None
        if reads == "cp.async" and "bulk" in start.parts or reads == "cp.bulk" and "bulk" not in start.parts:
            return None
        found = _group_wait(e, commit, wait, start)
        if found is None:
            return None
        cause = "commit" if not found["commits"] else "wait" if not found["waits"] else "number" if found["number"] else ""
        return found if cause == which else None

    return holds


def _group_rows(
    kinds: tuple[str, ...], reads: str, commit: tuple[str, ...], wait: tuple[str, ...], calls: tuple[str, str]
) -> tuple[Cause, ...]:
    called_commit, called_wait = calls
    return (
        Cause(kinds, _groups("commit", commit, wait, reads),
              f"{called_commit} is missing behind {{copy}}: {called_wait} waits for groups that are committed, and what "
              "no group has is in flight for ever"),
        Cause(kinds, _groups("wait", commit, wait, reads), f"{called_wait} is missing behind {{copy}}, in the threads "
              "that issued it, and behind it the barrier of all who go on"),
        Cause(kinds, _groups("number", commit, wait, reads),
              f"{called_wait} at {{wait}} leaves the latest {{number}} groups in flight, and the one of {{copy}} is "
              "among these: a smaller number"),
    )  # fmt: skip


def _use_of_source(e: Evidence) -> Fields | None:
    other = e.facts.other
    if other is None or not other.instructions or other.verb != "read":
        return None
    return {"copy": e.line(other.instructions[0]), "here": e.line(e.at_fault)}


def _waited_alone(e: Evidence) -> Fields | None:
    return _use_of_source(e) if e.facts.other is not None and e.facts.other.waited else None


def _not_waited_between(e: Evidence) -> Fields | None:
    other = e.facts.other
    return _use_of_source(e) if other is not None and other.warp and not other.waited else None


def _barrier_of_other_cta(e: Evidence) -> Fields | None:
    state, name = e.facts.barrier, WarpName.of(e.warp)
    if state is None or name is None or state.cta == name.cta:
        return None
    return {"cta": state.cta}


def _says(*words: str) -> Callable[[Evidence], Fields | None]:
    return lambda e: {"here": e.line(e.at_fault)} if all(word in e.error.message for word in words) else None


_EARLY = ("unfinished-copy", "shared-race")
_IN_USE = ("stage-in-use", "shared-race")

CAUSES: tuple[Cause, ...] = (
    # Hangs: resources first, then mbarriers.
    Cause(("hang",), _waits("setmaxnreg"), "", "registers"),
    Cause(("hang",), _waits("tcgen05.alloc"), "", "tensor-columns"),
    Cause(("hang",), _signalled_own,
          "{who} signals {own} at {at}, for which it waits itself, and nobody has signalled {other}: that arrival or "
          "commit names the wrong mbarrier"),
    Cause(("hang",), _signalled_elsewhere,
          "{at} (of {who}) signals {there}, and not {here}, which is waited for: a tcgen05.commit needs the mask of all "
          "CTAs that wait (tcgen05.commit(barrier, mask, cta_group)), an mbarrier_arrive the rank of the CTA that does"),
    Cause(("hang",), _multicast_elsewhere,
          "{here} lacks {missing} bytes of the multicast at {at}: what {who} loads there reaches CTA {ctas} alone, so "
          "mcast_mask has to have the bit of CTA {cta}, too", "transaction-bytes"),
    Cause(("hang",), _first_parity,
          "a producer's first wait on an empty ring has parity 1: the phase before the first one counts as complete. "
          "Here everybody waits first, {who}", "first-parity"),
    Cause(("hang",), _bytes_elsewhere,
          "the bytes that {here} waits for have come to {there}, at {at}: a copy names the mbarrier of its own stage",
          "transaction-bytes"),
    Cause(("hang",), _copy_missing,
          "a copy is missing: {bytes}. Nothing has written {array}, of which a stage has as many bytes as are missing: "
          "is its copy issued, and does it name this mbarrier?", "transaction-bytes"),
    Cause(("hang",), _nothing_comes,
          "a copy is missing: {bytes}. Is one issued behind that, and does it name this mbarrier?", "transaction-bytes"),
    Cause(("hang",), _one_cta_brings,
          "{bytes}: as much again has to come from CTA {cta} of the pair, whose copies signal the leader's mbarrier, and "
          "which has issued none", "transaction-bytes"),
    Cause(("hang",), _bytes_differ,
          "too much is announced: {bytes}. The number given to mbarrier_arrive_and_expect_tx (tx_count) is {came} if these "
          "copies are all of the stage; if not, one has not been issued", "transaction-bytes"),
    Cause(("hang",), _some_do_not_arrive,
          "an arrival is missing: at {here} there are arrivals of {who} ({at}), and none of {others}: let every one "
          "arrive, or give mbarrier_init the number that does"),
    Cause(("hang",), _count_too_high,
          "the count of {here} is too high: mbarrier_init at {init} gives {count}, and {came} come in a phase, from {who} "
          "at {at}, all of whom have arrived"),
    Cause(("hang",), _nobody_arrives,
          "an arrival is missing: nobody has arrived in this phase at {here}, the mbarrier of the wait of {waits}. The "
          "signal has to come from {who}: mbarrier_arrive behind the last access, or tcgen05.commit where MMAs read or "
          "write the stage. Is it there, and does it name this mbarrier?"),
    # A stage that is not full: no wait, its parity, its stage, the bytes that it waits for.
    Cause(_EARLY, _not_waited, "{who} has not waited for {full}, which the copy at {copy} signals: mbarrier_wait for it, "
          "with parity 0 in the ring's first turn", "unfinished-copy"),
    Cause((*_EARLY, "uninitialised-read", "tensor-race"), _waited_at_once,
          "wrong parity: the wait of {who} for {full} at {at} asked for parity 1 and passed at once, since the phase "
          "before the first one counts as complete: a consumer's first wait has parity 0"),
    Cause(_EARLY, _copy_of_other_stage,
          "the copy at {copy} writes stage {memory} and signals {full}, the mbarrier of stage {stage}: both have to be "
          "of the same stage", "unfinished-copy"),
    Cause(_EARLY, _reads_other_stage,
          "stages differ: {who} has waited for {waited} (stage {other}) at {at}, and reads stage {stage} at {here}, of "
          "which {full} tells: the index of the wait and the index of what is read have to be the same", "unfinished-copy"),
    Cause(_EARLY, _announced_too_few,
          "phase {phase} of {full} was complete before this copy: {bytes}; the copy at {copy} by {who} signals it too. "
          "mbarrier_arrive_and_expect_tx has to announce the bytes of all copies of a stage, of both CTAs of a pair",
          "unfinished-copy"),
    Cause(_EARLY, _not_waited_again,
          "{who} has waited for phase {phase} of {full}, and the stage has been filled again since: a wait is missing in "
          "this turn, or its parity is that of the turn before", "unfinished-copy"),
    Cause(("shared-race",), _generic_other_stage,
          "stages differ: {who} has waited for {full} (stage {stage}) at {at}, and reads stage {other} at {here}: the "
          "index of the wait and the index of what is read have to be the same"),
    Cause(("uninitialised-read",), _never_waited,
          "a barrier or a wait is missing: {who} has waited for no mbarrier so far, and nobody has written these bytes "
          "yet; who reads waits for who writes, by mbarrier_wait (of MMAs the mbarrier of their tcgen05.commit), "
          "sync_threads or cluster_wait"),
    Cause(("uninitialised-read",), _waited_for_room,
          "a wait is missing: the last wait of {who}, for {empty} at {at}, tells that there is room, and not that these "
          "bytes are there: mbarrier_wait for the full mbarrier of the stage, which copies signal, with parity 0 at first"),
    Cause(("uninitialised-read",), _written_otherwise,
          "{who} has waited for phase {phase} of {full} at {at}, and {what} that phase: a copy of these bytes is not "
          "issued, has another size or fills another stage, or a border of the tile is never filled"),
    # A stage that is in use: no wait, its parity, too few arrivals, an arrival that comes too early.
    Cause(_IN_USE, _refills_without_wait,
          "{who} has waited for no mbarrier that tells that the stage is free: mbarrier_wait on the empty mbarrier before "
          "{here}, with parity 1 in the ring's first turn"),
    Cause(_IN_USE, _refills_at_once,
          "wrong parity, or a missing wait: the last wait of {who}, for {empty} at {at}, passed at once though the stage "
          "has been filled before: its parity changes with every turn of the ring, from 1 on"),
    Cause(_IN_USE, _released_by_others,
          "{empty} was completed by {arrived} ({at}), without {user}, which still uses the stage: its count, {count}, has "
          "to be the number of all who use the stage, and each of them arrives at the mbarrier of each CTA that fills it"),
    Cause(_IN_USE, _released_too_early,
          "the release comes too early: {arrived} arrives at {empty} at {at}, before the reads at {use} are over: arrive "
          "behind the last of them (of wgmma behind warpgroup.wait_group(0); of tcgen05.mma by tcgen05.commit)"),
    # Tensor memory: freed, read, overwritten.
    Cause(("tensor-race",), _frees,
          "tcgen05.dealloc at {here} comes before {use} is over: a barrier of all who use the columns (in a pair of CTAs "
          "cluster_arrive and cluster_wait) stands in front of it, behind the last tcgen05.wait::ld"),
    Cause(("tensor-race",), _loads_not_waited,
          "tcgen05.wait::ld (cute.arch.fence_view_async_tmem_load) is missing between the tcgen05.ld at {load} and the "
          "arrival that hands the columns back"),
    Cause(("tensor-race",), _loads_released,
          "the columns are handed back at {at}, before the tcgen05.ld at {load}: arrive behind it and its "
          "tcgen05.wait::ld"),
    Cause(("tensor-race",), _sums_overwritten,
          "{reader} has waited for {full}, which {mma} commits at {at}; the MMAs behind that commit write over what it "
          "still reads: {mma} waits, before the first MMA of a tile, for an mbarrier on which all who read the "
          "accumulator arrive"),
    Cause(("tensor-race",), _sums_not_waited,
          "{reader} reads before the MMAs at {mma} are complete: tcgen05.commit behind them, and a wait of {reader} for "
          "its mbarrier"),
    # Arrivals and phases: who comes again, who is not counted, whose stage it is.
    Cause(("extra-arrivals",), _announces_elsewhere,
          "{who} announces at {here}, and its copies signal {there}: of a pair of CTAs the leader alone announces the "
          "bytes of both, so the arrive_and_expect_tx at {at} is for CTA 0 alone"),
    Cause(("extra-arrivals",), _too_many_at_once,
          "the count of {here} is too low: mbarrier_init at {init} gives {count}, and more threads of {who} arrive at "
          "{at}: the number of all threads that arrive, or one of each warp arrives (elect_one)"),
    Cause(("extra-arrivals",), _arrives_again,
          "{who} has arrived at {here} in this phase already, at {at}: it has come round the ring without waiting for "
          "the stage to be free. A producer waits for the stage's empty mbarrier before it announces bytes again"),
    Cause(("extra-arrivals",), _others_arrived,
          "{warp} arrives at {here} behind the arrivals of {who} ({at}), and mbarrier_init at {init} counts {count}: count "
          "all who arrive, or let one of them do it"),
    Cause(("phase-overrun", "extra-arrivals"), _signals_other_stage,
          "stages differ: {who} has waited for {waited} at {wait} and signals {here} at {at}: a stage is released at the "
          "empty mbarrier of the same index"),
    Cause(("phase-overrun", "phase-missed", "phase-ambiguous"), _count_too_low,
          "the count of {here} is too low: mbarrier_init at {init} gives {count}, and a phase is complete before all have "
          "arrived that do at {at}: {who}"),
    Cause(("extra-bytes",), _copy_signals_again,
          "the copy at {copy} by {who} has signalled {here} twice in this phase: it names the mbarrier of another stage, "
          "or its warp has come round the ring without waiting for the stage to be free"),
    Cause(("extra-bytes",), _bytes_of_phase,
          "too few bytes are announced for {here}: {announced} at {at}, and with the copy at {copy} {came} have come: "
          "mbarrier_arrive_and_expect_tx takes the bytes of all copies of the phase, every operand and every CTA of a "
          "multicast or a pair counted"),
    # Groups: not committed, not waited for, too many left.
    *_group_rows(("copy-in-flight", "shared-race"), "cp.async", ("async", "commit_group"), ("async", "wait_group"),
                 ("cp_async_commit_group()", "cp_async_wait_group(N)")),
    *_group_rows(("source-in-use",), "cp.bulk", ("bulk", "commit_group"), ("bulk", "wait_group"),
                 ("cp_async_bulk_commit_group()", "cp_async_bulk_wait_group(0, read=True)")),
    *_group_rows(("source-in-use", "register-in-flight"), "wgmma", ("wgmma", "commit_group"), ("wgmma", "wait_group"),
                 ("warpgroup.commit_group()", "warpgroup.wait_group(0)")),
    Cause(("register-in-flight",), _says("wgmma.fence"),
          "warpgroup.fence() before the first wgmma that reads or writes these registers, at {here}"),
    Cause(("register-in-flight",), _says("wgmma.wait_group"),
          "warpgroup.wait_group(0) before {here}, where registers of a wgmma are used"),
    Cause(("source-in-use",), _waited_alone,
          "the warp that issued {copy} has waited for its end, and nothing tells the threads that write at {here}: a "
          "barrier of both, behind that wait"),
    Cause(("source-in-use",), _not_waited_between,
          "no wait for the operation at {copy} is executed before the write at {here}: in the thread that issued it "
          "cp_async_bulk_wait_group(0, read=True), of wgmma warpgroup.wait_group(0), and then a barrier of all who write"),
    Cause(("shared-race",), _generic_same_stage,
          "{who} has waited for {full}, which is signalled at {at}; the write at {write} is not in front of that signal, "
          "or is meant for another stage than {stage}: write first, then arrive, at the mbarrier of the same stage"),
    Cause(("exit-in-use",), _says("never waited for it"),
          "cp_async_bulk_wait_group(0, read=True) by the thread that stored at {here}, before it ends"),
    Cause(("exit-in-use",), _says("may exit before"),
          "cluster_arrive and cluster_wait at the end of the kernel, in all threads of the cluster, or a wait in the "
          "other CTA for the mbarrier that {here} signals"),
    Cause(("uninitialised-barrier",), _barrier_of_other_cta,
          "CTA {cta} has not initialised its mbarriers yet: behind mbarrier_init and mbarrier_init_fence, "
          "cluster_arrive_relaxed and cluster_wait, in place of sync_threads"),
)  # fmt: skip
