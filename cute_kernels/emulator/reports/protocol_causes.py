"""Causes that follow from how each warp goes round a ring of mbarriers: first rows of the table of `causes`.

A ring is gone round stage by stage from the first one on; the parity that a warp asks for stays the same within a turn
and changes with it; who signals a ring and who waits for it do so equally often; and who signals a stage again has
waited for those who use it. What breaks one of these is at fault, whatever came of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cute_kernels.emulator.facts import Moment
from cute_kernels.emulator.reports.evidence import Cause, Evidence, Fields, Spot, kept, passed_at_once

_CLASSES = {"wait": "waits for", "timeout": "waits for", "announce": "announces bytes at", "deliver": "copies for",
            "arrive": "arrives at"}  # fmt: skip
_BACK = ("arrive", "wait")
_RINGS = ("hang", "extra-arrivals", "extra-bytes", "phase-overrun", "phase-missed", "phase-ambiguous", "stage-in-use",
          "unfinished-copy", "shared-race", "uninitialised-read", "tensor-race", "source-in-use", "proxy-reuse",
          "arrival-early", "bytes-early", "lanes-overtaken", "copy-in-flight", "phase-at-exit")  # fmt: skip

Ring = tuple[int, tuple[int, ...]]
"""CTA, and offsets of the mbarriers of an array in its shared memory."""


@kept
def _ring(e: Evidence, spot: Spot) -> Ring:
    """The mbarriers of the same array, count and line of initialisation."""
    state = e.state(spot)
    purpose = e.purpose(state) if state is not None else ("",)
    if not purpose[0]:
        return spot[0], (spot[1],)
    alike = (each for each in e.facts.past.barriers if each.cta == spot[0] and e.purpose(each) == purpose)
    return spot[0], tuple(sorted(each.offset for each in alike))


@kept
def _tours(e: Evidence) -> dict[tuple[str, str, Ring], list[Moment]]:
    """Operations of each warp at each ring, by class, in order; several in a row for one stage are one."""
    tours: dict[tuple[str, str, Ring], list[Moment]] = {}
    state, moments = e.facts.barrier, list(e.moments)
    if e.facts.phase >= 0 and state is not None:
        spot = state.cta, state.offset
        moments.append(Moment("wait", spot, state.phase, e.facts.phase & 1, e.warp, e.at_fault))
    for each in moments if e.facts.past.whole else ():
        if not each.warp or each.instruction is None:
            continue
        announces = "expect_tx" in each.instruction.parts and each.operation == "arrive"
        what = _CLASSES["announce" if announces else each.operation]
        tour = tours.setdefault((each.warp, what, _ring(e, each.place)), [])
        if tour and tour[-1].place == each.place and _again(e, tour[-1], each):
            tour[-1] = each
        else:
            tour.append(each)
    return tours


def _again(e: Evidence, last: Moment, each: Moment) -> bool:
    """Whether an operation at an mbarrier is for the same turn as the last one of its warp there."""
    if last.operation == "timeout" and last.amount == each.amount:
        return True
    waits = each.operation in ("wait", "timeout")
    return last.phase == each.phase and not (waits and e.line(last.instruction) == e.line(each.instruction))


@dataclass(frozen=True)
class _Tour:
    """Operations of a warp at a ring; each should be for step ``first + number * by`` of all that go round the ring."""

    warp: str
    does: str
    ring: Ring
    moments: list[Moment]
    first: int
    by: int

    def stage(self, number: int) -> int:
        """Stage that an operation is for."""
        return self.ring[1].index(self.moments[number].place[1])

    def due(self, number: int) -> tuple[int, int]:
        """Turn of the ring, and stage in it, that an operation should be for."""
        return divmod(self.first + number * self.by, len(self.ring[1]))


@kept
def _planned(e: Evidence) -> list[_Tour]:
    """All tours of warps that go round a ring one stage after the other, or take turns at that.

    A ring may have an mbarrier for each warp. Not those of warps that take turns at a single mbarrier.
    """
    found, classes = [], {}
    for (warp, does, ring), moments in _tours(e).items():
        classes.setdefault((does, ring), []).append((warp, moments))
    for (does, ring), tours in classes.items():
        count = len(ring[1])
        stages = {warp: [ring[1].index(each.place[1]) for each in moments] for warp, moments in tours}
        steps = {(b - a) % count for path in stages.values() for a, b in zip(path, path[1:])}
        several = len({path[0] for path in stages.values()}) > 1
        if count == 1 and len({moments[0].amount for _, moments in tours}) > 1:
            continue
        by = 1
        if several and steps <= {0}:
            by = count
        elif len(steps) == 1 and steps.isdisjoint({0, 1}):
            (by,) = steps
        for warp, moments in tours:
            found.append(_Tour(warp, does, ring, moments, stages[warp][0] if by > 1 else 0, by))
    return found


def _first_astray(tour: _Tour) -> int | None:
    """Where a warp is at another stage than that whose turn it is; None: nowhere."""
    return next((at for at in range(len(tour.moments)) if tour.stage(at) != tour.due(at)[1]), None)


def _shares_turns(e: Evidence, tour: _Tour) -> bool:
    """Whether other warps have a part in phases of a ring that a warp leaves out, as consumers that take turns do."""
    seen = {each.warp: {(done.place, done.phase) for done in each.moments
                        if done.operation != "timeout" and (done.operation, done.phase) != ("wait", 0)}
            for each in _planned(e) if (each.does, each.ring, each.by) == (tour.does, tour.ring, 1)}  # fmt: skip
    mine = seen.get(tour.warp, set())
    return bool(mine) and any(theirs and mine.isdisjoint(theirs) for theirs in seen.values())


def _stage_astray(e: Evidence) -> Fields | None:
    """The one class of operations at a ring that does not go round it from the first stage on, as others do."""
    tours = _planned(e)
    announced = {each.place[1] for each in e.did("announce")}
    strays = any(not announced.intersection(_ring(e, each.place)[1]) for each in e.did("deliver"))
    for ring in dict.fromkeys(tour.ring for tour in tours):
        # Copies are left out where some name another array's mbarriers.
        here = [tour for tour in tours if tour.ring[1] == ring[1] and not (strays and tour.does == "copies for")]
        if len(ring[1]) < 2 or all(len({each.place for each in tour.moments}) < 2 for tour in here):
            continue  # nobody goes round it
        if any(_shares_turns(e, tour) for tour in here):
            continue
        waiters = {tour.warp for tour in here if tour.does == "waits for"}
        if any(tour.does == "arrives at" and tour.warp in waiters for tour in here) and announced & {*ring[1]}:
            continue  # copies signal it, and who waits for it does, too
        regular = {tour.does for tour in here if _first_astray(tour) is None}
        astray = [tour for tour in here if _first_astray(tour) is not None]
        if not astray or len({tour.does for tour in astray}) > 1 or astray[0].does in regular or not regular:
            continue
        tour, at = astray[0], _first_astray(astray[0])
        each = tour.moments[at]
        steps = {(tour.stage(n + 1) - tour.stage(n)) % len(ring[1]) for n in range(len(tour.moments) - 1)}
        if len(steps) > 1 and at == 0 or at and tour.moments[at - 1].place == each.place:
            continue  # it goes another way round, or does not advance
        return {"who": e.who([tour.warp]), "does": tour.does, "there": e.name(each.place),
                "at": e.line(each.instruction), "turn": e.name((each.place[0], ring[1][tour.due(at)[1]]))}  # fmt: skip
    return None


def _parity_astray(e: Evidence) -> Fields | None:
    """A wait whose parity is not the one that its warp's waits before it lead to."""
    for tour in _planned(e):
        if tour.does != "waits for" or _shares_turns(e, tour):
            continue
        first = tour.moments[0].amount ^ tour.due(0)[0] & 1
        turns: dict[int, int] = {}  # by stage, of a warp that is not where it should be
        for number, each in enumerate(tour.moments):
            turn = turns[each.place[1]] = turns.get(each.place[1], -1) + 1
            turn = tour.due(number)[0] if tour.by > 1 else turn
            if each.amount < 0 or each.amount == first ^ turn & 1:
                continue
            before = tour.moments[number - 1]
            astray = _first_astray(tour) if tour.by == 1 else None
            if astray is not None and 0 < astray <= number:
                break  # the stage does not advance, or leaves one out
            words = f"asks for parity {each.amount} in every turn: it changes each time that the ring begins anew"
            if before.place != each.place and turn == (
                tour.due(number - 1)[0] if tour.by > 1 else turns.get(before.place[1])
            ):
                words = (
                    f"asks for parity {each.amount}, and for {e.name(before.place)} in the same turn of the ring it "
                    f"asked for {before.amount}: the parity changes where the ring begins anew, and there alone"
                )
            return {"who": e.who([tour.warp]), "there": e.name(each.place), "at": e.line(each.instruction),
                    "words": words}  # fmt: skip
    return None


def _signallers(e: Evidence, ring: Ring) -> dict[str, list[Moment]]:
    """Who has signalled a ring, but for announcements."""
    found: dict[str, list[Moment]] = {}
    for each in e.moments:
        if (
            each.operation in ("arrive", "deliver")
            and each.place[0] == ring[0]
            and each.place[1] in ring[1]
            and each.warp
        ):
            found.setdefault(each.warp, []).append(each)
    return found


def _blocked(e: Evidence) -> Iterator[tuple[str, Spot, object]]:
    """Warps that wait for an mbarrier, which one, and where."""
    for each in e.facts.waits:
        if each.barrier is not None:
            yield each.warp, (each.barrier.cta, each.barrier.offset), each.instruction


def _trips_differ(e: Evidence) -> Fields | None:
    """A wait for an mbarrier that lacks who has signalled it, or its ring if nobody has: they have left their loops."""
    standing = {each.warp: each.instruction for each in e.facts.waits}
    for warp, spot, place in _blocked(e):
        signals, state = _signallers(e, _ring(e, spot)), e.state(spot)
        if not signals or warp in signals or state.tx:
            continue
        if state.pending < state.expected:
            came = {each.warp for each in e.did("arrive", spot, state.phase)}
            before = {each.warp for each in e.did("arrive", spot, state.phase - 1)}
            signals = {who: done for who, done in signals.items() if who in before - came}
        for who, done in signals.items():
            here = standing.get(who)
            lines = {each.instruction.line for each in done if each.instruction is not None}
            if who in standing and (here is None or lines & {each.line for each in e.reached(here)}):
                break
        else:
            if signals:
                return {"who": e.who([warp]), "there": e.name(spot), "at": e.line(place), "count": state.phase,
                        "others": e.who(signals), "lines": e.lines(next(iter(signals.values()))[-1:])}  # fmt: skip
    return None


def _release_not_waited(e: Evidence) -> Fields | None:
    """A warp signals a ring again, and has never waited for another one that the waiters of the first signal."""
    tours = _tours(e)
    state = e.facts.barrier
    at_fault = [(state.cta, state.offset)] if state is not None else []
    for (warp, kind, ring), tour in tours.items():
        if kind not in ("arrives at", "copies for") or len(tour) <= (0 if warp == e.warp else len(ring[1]) - 1):
            continue
        if warp != e.warp and not any(spot in ((ring[0], offset) for offset in ring[1]) for spot in at_fault):
            continue
        readers = {key[0] for key in tours if key[1] == "waits for" and key[2] == ring} - {warp}
        if any(key[0] in readers and key[1] == "arrives at" and key[2][1] == ring[1] for key in tours):
            continue  # these signal what they wait for
        mine = {key[2][1] for key in tours if key[0] == warp}
        back = [
            (key[2], moments) for key, moments in tours.items()
            if key[0] in readers and key[1] == "arrives at" and key[2][1] not in mine and key[2][1] != ring[1]
        ]  # fmt: skip
        waited = [
            key[2]
            for key in tours
            if key[0] == warp
            and key[1] == "waits for"
            and any(other[0] in readers and other[1] == "arrives at" and other[2][1] == key[2][1] for other in tours)
        ]
        back = [each for each in back if not any(len(each[0][1]) == len(other[1]) for other in waited)]
        same = [each for each in back if len(each[0][1]) == len(ring[1])] or (back if not waited else [])
        if not same and not any(key[0] == warp and key[1] == "waits for" for key in tours) and readers:
            last = tour[-1]
            return {"who": e.who([warp]), "full": e.name(last.place), "at": e.line(last.instruction), "more": "",
                    "users": e.who(readers)}  # fmt: skip
        if same:
            there, moments = same[0]
            last = tour[-1]
            return {"who": e.who([warp]), "users": e.who(readers),
                    "more": f", {e.name((there[0], moments[0].place[1]))}, at {e.lines(moments[-1:])}",
                    "full": e.name(last.place), "at": e.line(last.instruction)}  # fmt: skip
    return None


def _unheard(e: Evidence) -> bool:
    """Whether somebody signals an mbarrier of an array that nobody waits for."""
    awaited = {each.place for each in e.moments if each.operation in ("wait", "timeout")}
    awaited |= {spot for _, spot, _ in _blocked(e)}
    return any(each.warp and not any(map(e.alike(each.place), awaited)) for each in e.signals())


def _waits_behind(e: Evidence) -> Fields | None:
    """A warp signals a stage, and only then waits for the mbarrier by which those who wait for it say that it is free.

    Its wait passes at once in the first turn, as one for room does.
    """
    tours = _tours(e)
    for (warp, does, ring), waits in tours.items():
        if does != "waits for" or not passed_at_once(waits[0]):
            continue
        back = {key[0] for key in tours if key[1] == "arrives at" and key[2][1] == ring[1]} - {warp}
        mine = [each for each in e.moments if each.warp == warp]
        for full in dict.fromkeys(key[2] for key in tours if key[0] == warp and key[1] != "waits for"):
            heard = {key[0] for key in tours if key[1] == "waits for" and key[2][1] == full[1]} - {warp}
            if full[1] == ring[1] or len(full[1]) != len(ring[1]) or back and not back & heard:
                continue
            first = next(n for n, each in enumerate(mine) if each.place[1] in full[1])
            told = {_ring(e, each.place)[1] for each in mine[:first] if each.operation == "wait"}
            later = {each.place[1] for each in mine[first:] if each.operation == "wait"}
            own = ring[1][full[1].index(mine[first].place[1])]
            if own in later and not any(len(other) == len(full[1]) for other in told):
                return {"who": e.who([warp]), "there": e.name(waits[0].place), "at": e.line(waits[0].instruction),
                        "full": e.name(mine[first].place), "signal": e.line(mine[first].instruction)}  # fmt: skip
    return None


def _released_before_wait(e: Evidence) -> Fields | None:
    """A warp hands each stage back, and only then waits for it to be full; the first turn of others finds room."""
    tours = _tours(e)
    rooms = {key[2][1]: moments[0] for key, moments in tours.items() if key[1] == "waits for" and moments[0].amount}
    for warp, does, ring in tours:
        fulls = [key[2] for key in tours if key[:2] == (warp, "waits for") and len(key[2][1]) == len(ring[1])]
        for full in fulls if does == "arrives at" and ring[1] in rooms else ():
            filled = any(key[0] == rooms[ring[1]].warp and key[2][1] == full[1] for key in tours)
            mine = [
                each for each in e.moments
                if each.warp == warp and each.place[1] in {"arrive": ring[1], "wait": full[1]}.get(each.operation, ())
            ]  # fmt: skip
            pairs = list(zip(mine[::2], mine[1::2]))
            stages = [(e.stage(a.place), e.stage(b.place)) for a, b in pairs if (a.operation, b.operation) == _BACK]
            if filled and stages and len(stages) == len(pairs) and all(a == b for a, b in stages):
                a, b = pairs[0]
                return {"who": e.who([warp]), "there": e.name(a.place), "at": e.line(a.instruction),
                        "full": e.name(b.place), "wait": e.line(b.instruction)}  # fmt: skip
    return None


def _signalled_twice(e: Evidence) -> Fields | None:
    """A warp arrives at an array's mbarriers at two places, and nobody at another one's, for which the same wait."""
    if not e.facts.past.whole:
        return None
    signals = [each for each in e.signals() if each.instruction is not None]
    waits = [*((each.warp, each.place) for each in e.did("wait")), *((warp, spot) for warp, spot, _ in _blocked(e))]
    for spot in dict.fromkeys(spot for _, spot in waits):
        alike = e.alike(spot)
        if any(alike(each.place) for each in signals):
            continue
        who = {warp for warp, place in waits if alike(place)}
        for each in signals:
            there = e.alike(each.place)
            mine = [other for other in e.did("arrive", warp=each.warp) if there(other.place)
                    and other.instruction is not None and "expect_tx" not in other.instruction.parts]  # fmt: skip
            hear = {warp for warp, place in waits if there(place)}
            if len({e.line(other.instruction) for other in mine}) > 1 and who & hear:
                return {"who": e.who([each.warp]), "at": e.lines(mine), "there": e.name(each.place),
                        "here": e.name(spot), "others": e.who(who)}  # fmt: skip
    return None


def _waits_for_own(e: Evidence) -> Fields | None:
    """A warp waits for an array's mbarriers that its own copies signal, for which others wait."""
    tours = _tours(e)
    for (warp, does, ring), waits in tours.items():
        mine = [key for key in tours if key[0] == warp and key[2][1] == ring[1] and key[1] == "copies for"]
        others = {key[0] for key in tours if key[1] == "waits for" and key[2] == ring} - {warp}
        if does == "waits for" and mine and others:
            return {"who": e.who([warp]), "there": e.name(waits[-1].place), "at": e.line(waits[-1].instruction),
                    "copies": e.lines(tours[mine[0]][-1:]), "others": e.who(others)}  # fmt: skip
    return None


def _waits_for_itself(e: Evidence) -> Fields | None:
    """An mbarrier lacks the arrivals of those who wait for it, beside who always does."""
    blocked = list(_blocked(e))
    for warp, spot, place in blocked:
        state = e.state(spot)
        sites: dict[str, list[str]] = {}
        for each, there, where in blocked:
            if there == spot:
                sites.setdefault(e.line(where), []).append(each)
        for each in e.did("wait", spot):
            sites.setdefault(e.line(each.instruction), []).append(each.warp)
        mine = sites.get(e.line(place), [])
        if state is None or len(sites) < 2 or not state.pending or state.pending % len({*mine}):
            continue
        signals = _signallers(e, _ring(e, spot))
        alike = e.alike(spot)
        waited = [each for each in e.did("wait", warp=warp) if alike(each.place)]
        beside = [line for line in sites if line != e.line(place)]
        came = {each.warp for each in e.did("arrive", spot, state.phase)}
        own = {*mine} <= {*signals} - came or not waited and {*mine}.isdisjoint(signals) and _unheard(e)
        if not own or state.pending != len({*mine}):
            continue
        return {"who": e.who(mine), "there": e.name(spot), "at": e.line(place), "other": " and ".join(beside),
                "pending": state.pending}  # fmt: skip
    return None


def _never_heard(e: Evidence) -> Fields | None:
    """An array's mbarriers of which phases are complete, and for which nobody has waited."""
    if not e.facts.past.whole or e.warp == "":
        return None
    awaited = {each.place for each in e.moments if each.operation in ("wait", "timeout")}
    for each in e.did("arrive"):
        state = e.state(each.place)
        if state is not None and state.phase and each.warp and not any(map(e.alike(each.place), awaited)):
            return {"there": e.name(each.place), "signaller": e.who([each.warp]), "at": e.line(each.instruction)}
    return None


def _waits_after_read(e: Evidence) -> Fields | None:
    """Behind a read, and before its warp arrives anywhere, stands a wait for an mbarrier."""
    side, other, here = e.facts.side, e.facts.other, e.at_fault
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or here is None:
        return None
    waits = e.behind(here, lambda each: "try_wait" in each.parts, lambda each: each.parts[:2] == ("mbarrier", "arrive"))
    return {"at": e.line(waits[0])} if waits and here.parts[0] == "ld" else None


UNHEARD: tuple[Cause, ...] = (
    Cause(_RINGS, _never_heard, "perhaps a wait is missing, or names another mbarrier: nobody has waited for {there} "
          "so far, which {signaller} signals at {at}"),
    Cause(("shared-race",), _waits_after_read, "a wait is missing before the read at {here}, or the one at {at}, which "
          "stands behind it, comes too late: wait for the mbarrier at which the writer arrives, then read"),
)
"""Rows behind all others."""

PROTOCOL: tuple[Cause, ...] = (
    Cause(_RINGS, _parity_astray, "wrong parity: {who} waits at {at} for {there}, and {words} (phase ^= 1)"),
    Cause(_RINGS, _released_before_wait, "the release comes too early: {who} arrives at {there} at {at}, in front of "
          "its wait for {full} at {wait}: wait for the stage, read it, then arrive"),
    Cause(tuple({*_RINGS} - {"unfinished-copy", "shared-race"}), _stage_astray, "stages differ: {who} {does} {there} "
          "at {at} where it is the turn of {turn}, as all others of this ring go round it: the index there is that of "
          "another stage, or its loops leave turns out"),
    Cause(_RINGS, _signalled_twice, "{who} signals {there} at {at}, and nobody signals {here}, for which {others} "
          "waits: one of these arrivals or commits names the wrong mbarrier"),
    Cause(_RINGS, _waits_for_own, "{who} waits at {at} for {there}, which its own copies at {copies} signal, and for "
          "which {others} waits: that wait names the wrong mbarrier, in place of the one that tells that the stage is "
          "free"),
    Cause(_RINGS, _waits_behind, "the wait of {who} for {there} at {at}, which tells that the stage is free, stands "
          "behind the signal for {full} at {signal}: wait before the stage is used"),
    Cause(("hang",), _trips_differ, "the loops take different numbers of turns: {who} waits at {at} for {there}, of "
          "which {count} phases are complete, and {others}, which signals it at {lines}, has ended its loop: the trips "
          "of the two loops have to be the same number"),
    Cause(("hang",), _waits_for_itself, "the wait of {who} at {at} is for {there}, at which {pending} arrivals are "
          "missing, those of as many warps that wait there themselves, beside the wait at {other}: that wait names the "
          "wrong mbarrier"),
    Cause(("phase-ambiguous", "phase-overrun", "phase-missed", "stage-in-use", "extra-arrivals", "arrival-early",
           "bytes-early", "extra-bytes"), _release_not_waited, "a wait is missing: {who} signals "
          "{full} at {at} again, and has not waited for the mbarrier by which {users} tells that the stage is "
          "free{more}: mbarrier_wait for it first, with parity 1 in the ring's first turn"),
)  # fmt: skip
