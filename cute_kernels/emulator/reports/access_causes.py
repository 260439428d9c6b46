"""Causes of accesses that come too early: rows of the table of `causes`."""

from __future__ import annotations

from collections.abc import Callable

from cute_kernels.emulator.facts import Located, Moment, WarpName
from cute_kernels.emulator.reports.evidence import Cause, Evidence, Fields, Spot, passed_at_once

# --- accesses too early: a stage that is not full yet -----------------------------------------------------------------


def _looks_at_copy(e: Evidence) -> Spot | None:
    """The mbarrier of the copy that has written what is accessed now; None if it is no such fault."""
    other, side = e.facts.other, e.facts.side
    if other is None or side is None or other.verb != "wrote" or other.signals is None or not e.warp:
        return None
    return other.signals if side.verb == "reads" else None


def _timed_out(e: Evidence) -> Fields | None:
    spot = _looks_at_copy(e)
    looks = [each for each in e.moments if each.place == spot and each.warp == e.warp] if spot is not None else []
    looks = [each for each in looks if each.operation in ("wait", "timeout")]
    if not looks or looks[-1].operation == "wait":
        return None
    return {"who": e.who([e.warp]), "full": e.name(spot), "at": e.line(looks[-1].instruction)}


def _not_waited(e: Evidence) -> Fields | None:
    spot = _looks_at_copy(e)
    if spot is None or not e.facts.past.whole or e.last_wait(spot) is not None:
        return None
    return {"who": e.who([e.warp]), "full": e.name(spot), "copy": e.line(e.facts.other.instructions[0])}


def _stages_differ(e: Evidence) -> tuple[Spot, Moment, int, int, int | None] | None:
    """The copy's mbarrier, the wait, the stages of both, and the one of the memory."""
    spot = _looks_at_copy(e)
    wait = e.last_wait(spot) if spot is not None else None
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
    spot, wait, waited, stage, memory = found
    copy = f", or the copy at {e.line(e.facts.other.instructions[0])} names the mbarrier of another stage"
    return {"who": e.who([e.warp]), "waited": e.name(wait.place), "at": e.line(wait.instruction), "full": e.name(spot),
            "stage": stage, "other": waited, "here": e.line(e.at_fault), "copy": copy * (memory is None)}  # fmt: skip


def _generic_stages(e: Evidence) -> tuple[Moment, int, int] | None:
    """The last wait of who reads what a thread or a cp.async wrote, its stage, and the one of the memory."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or other.signals or not e.warp:
        return None
    wait = e.last_wait()
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
    signals = e.did("arrive", wait.place, wait.phase - 1)
    write = e.facts.other.instructions
    if not signals or not write:
        return None
    return {"who": e.who([e.warp]), "full": e.name(wait.place), "at": e.lines(signals), "stage": stage,
            "write": e.line(write[0])}  # fmt: skip


def _signals_other_cta(e: Evidence) -> Fields | None:
    found = _stages_differ(e)
    if found is None or found[0][0] == found[1].place[0] or found[2] != found[3]:
        return None
    spot, wait = found[:2]
    return {"copy": e.line(e.facts.other.instructions[0]), "full": e.name(spot), "waited": e.name(wait.place),
            "who": e.who([e.warp]), "at": e.line(wait.instruction)}  # fmt: skip


def _waited_at_once(e: Evidence) -> Fields | None:
    wait = e.last_wait(_looks_at_copy(e))
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
    wait = e.last_wait()
    if wait is None or not passed_at_once(wait) or not _tells_of_room(e, wait.place):
        return None
    return {"who": e.who([e.warp]), "empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _phase_over(e: Evidence) -> tuple[Spot, int, bool] | None:
    """The mbarrier of the copy, the phase of it that was waited for, and whether a later one was announced."""
    found = _stages_differ(e)
    if found is None or found[0] != found[1].place or passed_at_once(found[1]):
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
    return {"who": e.who([e.warp])} if known and e.last_wait() is None else None


def _written_in_part(e: Evidence) -> Fields | None:
    """Others of the same array have been written, and these bytes have not."""
    memory = e.facts.memory
    if memory is None or memory.space != "shared":
        return None
    array = next((each for each in e.arrays if each.first <= memory.first < each.first + each.nbytes), None)
    if array is None:
        return None
    end = array.first + array.nbytes
    parts = (min(end, first + count) - max(array.first, first) for cta, first, count in e.facts.past.unwritten
             if cta == memory.cta)  # fmt: skip
    unwritten = sum(max(0, each) for each in parts)
    if not 0 < unwritten < array.nbytes:
        return None
    written = f"{array.nbytes - unwritten:,} of {array.nbytes:,}"
    return {"array": array.name, "written": written, "here": e.line(e.at_fault)}


def _written_otherwise(e: Evidence) -> Fields | None:
    wait = e.last_wait()
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
    return {each.place for each in e.signals([e.warp])}


def _refills_at_once(e: Evidence) -> Fields | None:
    fields, wait = _refills(e), e.last_wait()
    if fields is None or wait is None or not passed_at_once(wait):
        return None
    return fields | {"empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _released(e: Evidence) -> tuple[Fields, Moment, list[Moment]] | None:
    """Fields, the wait for the stage to be empty, and the arrivals that completed its phase."""
    fields, wait = _refills(e), e.last_wait()
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
    wait = e.last_wait()
    if wait is None or passed_at_once(wait) or not e.did("arrive", wait.place, wait.phase - 1):
        return None
    commits = e.did("arrive", wait.place, wait.phase - 1)
    if other.warp not in {each.warp for each in commits}:
        return None
    back = {each.place for each in e.did("arrive", warp=e.warp)}
    room = [each for each in e.did("wait", warp=other.warp) if passed_at_once(each) or each.place in back]
    return {"full": e.name(wait.place), "at": e.lines(commits), "mma": e.who([other.warp]), "reader": e.who([e.warp]),
            "room": room, "use": e.line(other.instructions[0]) if other.instructions else "the MMAs"}  # fmt: skip


def _sums_never_free(e: Evidence) -> Fields | None:
    fields = _sums_overwritten(e)
    return fields if fields is not None and not fields["room"] else None


def _sums_of_other_stage(e: Evidence) -> Fields | None:
    fields = _sums_overwritten(e)
    if fields is None:
        return None
    last = fields["room"][-1]
    return fields | {"empty": e.name(last.place), "wait": e.line(last.instruction), "here": e.line(e.at_fault)}


def _columns_not_free(e: Evidence) -> Fields | None:
    """The reader hands the columns back at an mbarrier for which the MMAs' warp has never waited."""
    side, other = e.facts.side, e.facts.other
    if side is None or side.verb != "writes" or not e.warp or not other.warp or not e.facts.past.whole:
        return None
    load = other.instructions[0] if other.instructions else None
    if load is None or not e.behind(load, _is("wait::ld"), _arrives):
        return None
    arrivals = [each for each in e.did("arrive", warp=other.warp) if each.instruction is not None]
    behind = [each for each in arrivals if each.instruction.line > load.line]
    if not behind or any(map(e.alike(behind[-1].place), (each.place for each in e.did("wait", warp=e.warp)))):
        return None
    return {"who": e.who([e.warp]), "empty": e.name(behind[-1].place), "reader": e.who([other.warp]),
            "at": e.line(behind[-1].instruction), "here": e.line(e.at_fault)}  # fmt: skip


def _sums_not_waited(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "reads" or other.verb != "wrote" or not e.warp:
        return None
    return {"reader": e.who([e.warp]), "mma": e.line(other.instructions[0]) if other.instructions else "the MMA"}


# --- groups of copies, of stores and of wgmmas ------------------------------------------------------------------------

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


def _groups(
    which: str, commit: tuple[str, ...], wait: tuple[str, ...], reads: str
) -> Callable[[Evidence], Fields | None]:
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
        missing = "commit" if not found["commits"] else "wait" if not found["waits"] else ""
        return found if (missing or ("number" if found["number"] else "")) == which else None

    return holds


def _group_rows(
    kinds: tuple[str, ...], reads: str, commit: tuple[str, ...], wait: tuple[str, ...], calls: tuple[str, str]
) -> tuple[Cause, ...]:
    called_commit, called_wait = calls
    return (
        Cause(kinds, _groups("commit", commit, wait, reads),
              f"{called_commit} is missing behind {{copy}}: {called_wait} waits for groups that are committed, and "
              f"what "
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


def _says(*words: str) -> Callable[[Evidence], Fields | None]:
    return lambda e: {"here": e.line(e.at_fault)} if all(word in e.error.message for word in words) else None


_EARLY = ("unfinished-copy", "shared-race")
_IN_USE = ("stage-in-use", "shared-race")

ACCESSES: tuple[Cause, ...] = (
    # A stage that is not full: no wait, its parity, its stage, the bytes that it waits for.
    Cause(_EARLY, _timed_out, "{who} has looked at {full} at {at}, where a single try_wait timed out: mbarrier_wait "
          "repeats it until the phase is complete", "unfinished-copy"),
    Cause(_EARLY, _not_waited, "{who} has not waited for {full}, which the copy at {copy} signals: mbarrier_wait for "
          "it, with parity 0 in the ring's first turn", "unfinished-copy"),
    Cause((*_EARLY, "uninitialised-read", "tensor-race"), _waited_at_once, "wrong parity: the wait of {who} for {full} "
          "at {at} asked for parity 1 and passed at once, since the phase before the first one counts as complete: a "
          "consumer's first wait has parity 0"),
    Cause(_EARLY, _copy_of_other_stage, "the copy at {copy} writes stage {memory} and signals {full}, the mbarrier of "
          "stage {stage}: both have to be of the same stage", "unfinished-copy"),
    Cause(_EARLY, _reads_other_stage, "stages differ: {who} has waited for {waited} (stage {other}) at {at}, and reads "
          "stage {stage} at {here}, of which {full} tells: the index of the wait and the index of what is read have to "
          "be the same{copy}", "unfinished-copy"),
    Cause(_EARLY, _signals_other_cta, "the copy at {copy} signals {full}, and {who} has waited for {waited} at {at}: a "
          "copy signals the mbarrier of the CTA that waits (in a pair the leader's), or the other CTA passes on that "
          "its bytes have come", "unfinished-copy"),
    Cause(_EARLY, _announced_too_few, "phase {phase} of {full} was complete before this copy: {bytes}; the copy at "
          "{copy} by {who} signals it too. mbarrier_arrive_and_expect_tx has to announce the bytes of all copies of a "
          "stage, of both CTAs of a pair", "unfinished-copy"),
    Cause(_EARLY, _not_waited_again, "{who} has waited for phase {phase} of {full}, and the stage has been filled "
          "again since: a wait is missing in this turn, or its parity is that of the turn before", "unfinished-copy"),
    Cause(("shared-race",), _generic_other_stage, "stages differ: {who} has waited for {full} (stage {stage}) at {at}, "
          "and reads stage {other} at {here}: the index of the wait and the index of what is read have to be the "
          "same"),
    Cause(("uninitialised-read",), _never_waited, "a barrier or a wait is missing: {who} has waited for no mbarrier so "
          "far, and nobody has written these bytes yet; who reads waits for who writes, by mbarrier_wait (of MMAs the "
          "mbarrier of their tcgen05.commit), sync_threads or cluster_wait"),
    Cause(("uninitialised-read",), _waited_for_room, "a wait is missing: the last wait of {who}, for {empty} at {at}, "
          "tells that there is room, and not that these bytes are there: mbarrier_wait for the full mbarrier of the "
          "stage, which copies signal, with parity 0 at first"),
    Cause(("uninitialised-read",), _written_in_part, "{written} bytes of {array} have been written, and not these: the "
          "stage or index that is written and the one that is read at {here} differ, or a wait, a copy or a border of "
          "the tile is missing"),
    Cause(("uninitialised-read",), _written_otherwise, "{who} has waited for phase {phase} of {full} at {at}, and "
          "{what} that phase: a copy of these bytes is not issued, has another size or fills another stage, or a "
          "border of the tile is never filled"),
    # A stage that is in use: no wait, its parity, too few arrivals, an arrival that comes too early.
    Cause(_IN_USE, _refills_without_wait, "{who} has waited for no mbarrier that tells that the stage is free: "
          "mbarrier_wait on the empty mbarrier before {here}, with parity 1 in the ring's first turn"),
    Cause(_IN_USE, _refills_at_once, "wrong parity, or a missing wait: the last wait of {who}, for {empty} at {at}, "
          "passed at once though the stage has been filled before: its parity changes with every turn of the ring, "
          "from 1 on"),
    Cause(_IN_USE, _released_by_others, "{empty} was completed by {arrived} ({at}), without {user}, which still uses "
          "the stage: its count, {count}, has to be the number of all who use the stage, and each of them arrives at "
          "the mbarrier of each CTA that fills it"),
    Cause(_IN_USE, _released_too_early, "the release comes too early: {empty} at {at}, by {arrived}, before the reads "
          "at {use} are over: arrive behind the last of them (of wgmma behind warpgroup.wait_group(0); of tcgen05.mma "
          "by tcgen05.commit)"),
    # Tensor memory: freed, read, overwritten.
    Cause(("tensor-race",), _frees, "tcgen05.dealloc at {here} comes before {use} is over: a barrier of all who use "
          "the columns (in a pair of CTAs cluster_arrive and cluster_wait) stands in front of it, behind the last "
          "tcgen05.wait::ld"),
    Cause(("tensor-race",), _loads_not_waited, "tcgen05.wait::ld (cute.arch.fence_view_async_tmem_load) is missing "
          "between the tcgen05.ld at {load} and the arrival that hands the columns back"),
    Cause(("tensor-race",), _loads_released, "the columns are handed back at {at}, before the tcgen05.ld at {load}: "
          "arrive behind it and its tcgen05.wait::ld"),
    Cause(("tensor-race",), _columns_not_free, "a wait is missing: {who} has not waited for {empty}, at which {reader} "
          "hands the columns back at {at}: mbarrier_wait for it before {here}, with parity 1 in the first turn"),
    Cause(("tensor-race",), _sums_never_free, "{reader} has waited for {full}, which {mma} commits at {at}; the MMAs "
          "behind that commit write over what it still reads: {mma} waits, before the first MMA of a tile, for an "
          "mbarrier on which all who read the accumulator arrive"),
    Cause(("tensor-race",), _sums_of_other_stage, "stages differ, or a parity is wrong: {mma} waits for {empty} at "
          "{wait}, writes sums at {use} and commits them to {full} at {at}, and {reader} reads at {here} behind its "
          "wait for {full}: all of these have to be of the same stage"),
    Cause(("tensor-race",), _sums_not_waited, "{reader} reads before the MMAs at {mma} are complete: tcgen05.commit "
          "behind them, and a wait of {reader} for its mbarrier"),
    # Groups: not committed, not waited for, too many left.
    *_group_rows(("copy-in-flight", "shared-race"), "cp.async", ("async", "commit_group"), ("async", "wait_group"),
                 ("cp_async_commit_group()", "cp_async_wait_group(N)")),
    *_group_rows(("source-in-use",), "cp.bulk", ("bulk", "commit_group"), ("bulk", "wait_group"),
                 ("cp_async_bulk_commit_group()", "cp_async_bulk_wait_group(0, read=True)")),
    *_group_rows(("source-in-use", "register-in-flight"), "wgmma", ("wgmma", "commit_group"), ("wgmma", "wait_group"),
                 ("warpgroup.commit_group()", "warpgroup.wait_group(0)")),
    Cause(("register-in-flight",), _says("wgmma.fence"), "warpgroup.fence() before the first wgmma that reads or "
          "writes these registers, at {here}"),
    Cause(("register-in-flight",), _says("wgmma.wait_group"), "warpgroup.wait_group(0) before {here}, where registers "
          "of a wgmma are used"),
    Cause(("source-in-use",), _waited_alone, "the warp that issued {copy} has waited for its end, and nothing tells "
          "the threads that write at {here}: a barrier of both, behind that wait"),
    Cause(("source-in-use",), _not_waited_between, "no wait for the operation at {copy} is executed before the write "
          "at {here}: in the thread that issued it cp_async_bulk_wait_group(0, read=True), of wgmma "
          "warpgroup.wait_group(0), and then a barrier of all who write"),
    Cause(("shared-race",), _generic_same_stage, "{who} has waited for {full}, which is signalled at {at}; the write "
          "at {write} is not in front of that signal, or is meant for another stage than {stage}: write first, then "
          "arrive, at the mbarrier of the same stage"),
    Cause(("exit-in-use",), _says("never waited for it"), "cp_async_bulk_wait_group(0, read=True) by the thread that "
          "stored at {here}, before it ends"),
    Cause(("exit-in-use",), _says("may exit before"), "cluster_arrive and cluster_wait at the end of the kernel, in "
          "all threads of the cluster, or a wait in the other CTA for the mbarrier that {here} signals"),
)  # fmt: skip
