"""Causes that follow from how each warp goes round a ring of mbarriers: first rows of the table of `causes`.

A ring is gone round stage by stage from the first one on; the parity that a warp asks for stays the same within a turn
and changes with it; who signals a ring and who waits for it do so equally often; and who signals a stage again has
waited for those who use it. What breaks one of these is at fault, whatever came of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_kernels.emulator.facts import Moment
from cute_kernels.emulator.reports.evidence import Cause, Evidence, Fields, Spot

_CLASSES = {"wait": "waits for", "timeout": "waits for", "announce": "announces bytes at", "deliver": "copies for",
            "arrive": "arrives at"}  # fmt: skip
_RINGS = ("hang", "extra-arrivals", "extra-bytes", "phase-overrun", "phase-missed", "phase-ambiguous", "stage-in-use",
          "unfinished-copy", "shared-race", "uninitialised-read", "tensor-race", "source-in-use", "proxy-reuse",
          "arrival-early", "bytes-early", "lanes-overtaken", "copy-in-flight", "phase-at-exit")  # fmt: skip

Ring = tuple[int, tuple[int, ...]]
"""CTA, and offsets of the mbarriers of an array in its shared memory."""


def _ring(e: Evidence, spot: Spot) -> Ring:
    """The mbarriers of the same array, count and line of initialisation."""
    rings = e.known.setdefault("rings", {})
    if spot not in rings:
        rings[spot] = _find_ring(e, spot)
    return rings[spot]


def _find_ring(e: Evidence, spot: Spot) -> Ring:
    state = e.state(spot)
    purpose = e.purpose(state) if state is not None else ("",)
    if not purpose[0]:
        return spot[0], (spot[1],)
    alike = (each for each in e.facts.past.barriers if each.cta == spot[0] and e.purpose(each) == purpose)
    return spot[0], tuple(sorted(each.offset for each in alike))


def _tours(e: Evidence) -> dict[tuple[str, str, Ring], list[Moment]]:
    """What each warp does at each ring, by class: one after the other, several for one stage in a row once."""
    if "tours" not in e.known:
        tours: dict[tuple[str, str, Ring], list[Moment]] = {}
        state, moments = e.facts.barrier, list(e.moments)
        if e.facts.phase >= 0 and state is not None:
            spot = state.cta, state.offset
            moments.append(Moment("wait", spot, state.phase, e.facts.phase & 1, e.warp, e.at_fault))
        for each in moments if e.facts.past.whole else ():
            if each.warp and each.instruction is not None:
                announces = "expect_tx" in each.instruction.parts and each.operation == "arrive"
                what = _CLASSES["announce" if announces else each.operation]
                tour = tours.setdefault((each.warp, what, _ring(e, each.place)), [])
                waits = each.operation in ("wait", "timeout")
                again = (
                    bool(tour)
                    and tour[-1].place == each.place
                    and (
                        tour[-1].operation == "timeout"
                        and tour[-1].amount == each.amount
                        or (waits and e.line(tour[-1].instruction) != e.line(each.instruction) or not waits)
                        and tour[-1].phase == each.phase
                    )
                )
                if again:
                    tour[-1] = each
                else:
                    tour.append(each)
        e.known["tours"] = tours
    return e.known["tours"]


def _first_astray(tour: list[Moment], offsets: tuple[int, ...]) -> int | None:
    """Where a warp is at another stage than that whose turn it is; None: nowhere."""
    stages = [offsets.index(each.place[1]) for each in tour]
    return next((at for at, stage in enumerate(stages) if stage != at % len(offsets)), None)


def _stage_astray(e: Evidence) -> Fields | None:
    """The one class of operations at a ring that does not go round it from the first stage on, as others do."""
    tours = _tours(e)
    for ring in dict.fromkeys(key[2] for key in tours):
        if len(ring[1]) < 2:
            continue
        here = {key: _first_astray(tour, ring[1]) for key, tour in tours.items() if key[2][1] == ring[1]}
        regular = {key[1] for key, at in here.items() if at is None}
        astray = {key[1] for key, at in here.items() if at is not None}
        if len(astray) != 1 or astray & regular or not regular:
            continue
        key = next(key for key, at in here.items() if at is not None)
        tour, at = tours[key], here[key]
        each = tour[at]
        turn = ring[1][at % len(ring[1])]
        steps = {(ring[1].index(b.place[1]) - ring[1].index(a.place[1])) % len(ring[1]) for a, b in zip(tour, tour[1:])}
        if len(steps) > 1 and at == 0:
            continue
        return {"who": e.who([key[0]]), "does": key[1], "there": e.name(each.place), "at": e.line(each.instruction),
                "turn": e.name((each.place[0], turn))}  # fmt: skip
    return None


def _parity_astray(e: Evidence) -> Fields | None:
    """A wait whose parity is not the one that its warp's waits before it lead to."""
    for (warp, kind, ring), tour in _tours(e).items():
        if kind != "waits for":
            continue
        seen: dict[int, int] = {}
        first = tour[0].amount
        for number, each in enumerate(tour):
            turn = seen[each.place[1]] = seen.get(each.place[1], -1) + 1
            if each.amount < 0 or each.amount == first ^ turn & 1:
                continue
            before = tour[number - 1]
            if before.place == each.place and len(ring[1]) > 1:
                break  # the stage does not advance
            same = seen[before.place[1]] == turn and before.place != each.place
            words = f"asks for parity {each.amount} in every turn: it changes each time that the ring begins anew"
            if same:
                words = (
                    f"asks for parity {each.amount}, and for {e.name(before.place)} in the same turn of the ring it "
                    f"asked for {before.amount}: the parity changes where the ring begins anew, and there alone"
                )
            return {"who": e.who([warp]), "there": e.name(each.place), "at": e.line(each.instruction), "words": words}
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
    """A wait for an mbarrier that nobody can signal again who has signalled its ring: all have left their loops."""
    standing = {each.warp: each.instruction for each in e.facts.waits}
    for warp, spot, place in _blocked(e):
        signals, state = _signallers(e, _ring(e, spot)), e.state(spot)
        if not signals or warp in signals or state.pending < state.expected or state.tx:
            continue
        for who, done in signals.items():
            here = standing.get(who)
            lines = {each.instruction.line for each in done if each.instruction is not None}
            if who in standing and (here is None or lines & {each.line for each in e.reached(here)}):
                break
        else:
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


def _waits_for_itself(e: Evidence) -> Fields | None:
    """What is missing at an mbarrier are arrivals of those who wait for it, beside who always does."""
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
        own = {*mine} <= {*signals} - came or not waited and {*mine}.isdisjoint(signals)
        if not own or state.pending != len({*mine}):
            continue
        return {"who": e.who(mine), "there": e.name(spot), "at": e.line(place), "other": " and ".join(beside),
                "pending": state.pending}  # fmt: skip
    return None


PROTOCOL: tuple[Cause, ...] = (
    Cause(_RINGS, _parity_astray, "wrong parity: {who} waits at {at} for {there}, and {words} (phase ^= 1)"),
    Cause(tuple({*_RINGS} - {"unfinished-copy", "shared-race"}), _stage_astray, "stages differ: {who} {does} {there} "
          "at {at} where it is the turn of {turn}, as all others of this ring go round it: the index there is that of "
          "another stage"),
    Cause(("hang",), _trips_differ, "the loops take different numbers of turns: {who} waits at {at} for {there}, of "
          "which {count} phases are complete, and {others}, which signals it at {lines}, has ended its loop: the trips "
          "of the two loops have to be the same number"),
    Cause(("hang",), _waits_for_itself, "the wait of {who} at {at} is for {there}, at which {pending} arrivals are "
          "missing, those of as many warps that wait there themselves, beside the wait at {other}: that wait names the "
          "wrong mbarrier"),
    Cause(("phase-ambiguous", "phase-overrun", "phase-missed", "stage-in-use", "extra-arrivals", "source-in-use",
           "arrival-early", "bytes-early", "extra-bytes"), _release_not_waited, "a wait is missing: {who} signals "
          "{full} at {at} again, and has not waited for the mbarrier by which {users} tells that the stage is "
          "free{more}: mbarrier_wait for it first, with parity 1 in the ring's first turn"),
)  # fmt: skip
