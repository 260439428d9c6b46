"""Causes of accesses that come too early: rows of the table of `causes`."""

import functools
import math
from collections.abc import Callable

from cute_kernels.emulator.facts import Located, Moment, WarpName
from cute_kernels.emulator.reports.evidence import (
    Cause,
    Evidence,
    Fields,
    Spot,
    is_barrier,
    named_barrier,
    passed_at_once,
    stores_shared,
)

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
    return {"full": e.name(spot), "at": e.line(looks[-1].instruction)}


def _not_waited(e: Evidence) -> Fields | None:
    spot = _looks_at_copy(e)
    if spot is None or not e.facts.past.whole or e.last_wait(spot) is not None:
        return None
    return {"full": e.name(spot)}


def _copy_waited_for(e: Evidence) -> Fields | None:
    """The mbarrier of the copy, the last wait for it or its like, the stages of both and of the memory."""
    spot = _looks_at_copy(e)
    wait = e.last_wait(spot) if spot is not None else None
    if wait is None:
        return None
    stages, phase = e.stages(spot), wait.phase - 1
    memory = e.stage_of_memory(e.facts.memory, len(stages))
    copy = f", or the copy at {e.common['use']} names the mbarrier of another stage"
    return {"full": e.name(spot), "waited": e.name(wait.place), "at": e.line(wait.instruction), "stage": e.stage(spot),
            "other": stages.index(wait.place[1]), "memory": memory, "copy": copy * (memory is None), "phase": phase,
            "same": spot == wait.place and not passed_at_once(wait), "bytes": e.bytes_of(spot, phase)[2],
            "again": bool(e.did("announce", spot, phase + 1)), "here_too": spot[0] == wait.place[0]}  # fmt: skip


def _generic_stages(e: Evidence) -> Fields | None:
    """The last wait of who reads what a thread or a cp.async wrote, its stage, and the one of the memory."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or other.signals or not e.warp:
        return None
    told = {each.place[1] for each in e.signals([other.warp])}  # what the writer does not signal tells nothing of it
    waits = [each for each in e.did("wait", warp=e.warp) if told.intersection(e.stages(each.place))]
    wait = waits[-1] if waits and other.warp != e.warp else None
    stages = e.stages(wait.place) if wait is not None else []
    memory = e.stage_of_memory(e.facts.memory, len(stages))
    if memory is None:
        return None
    signals = e.did("arrive", wait.place, wait.phase - 1)
    return {"full": e.name(wait.place), "at": e.line(wait.instruction), "stage": stages.index(wait.place[1]),
            "other": memory, "more": ", or a wait is missing behind that one" * (wait != e.last_wait()),
            "signals": e.lines(signals), "late": bool(signals) and not passed_at_once(wait)
            and bool(other.instructions)}  # fmt: skip


def _waited_at_once(e: Evidence) -> Fields | None:
    wait = e.last_wait(_looks_at_copy(e))
    memory = e.facts.memory
    reads = e.error.kind == "uninitialised-read" or _looks_at_copy(e) is not None
    if wait is None or not reads or not passed_at_once(wait) or (memory is not None and memory.space == "global"):
        return None
    if _tells_of_room(e, wait.place):
        return None
    waits = [wait]
    if not e.signals():  # nothing tells which of them should have waited
        waits = [each for each in e.did("wait", warp=e.warp) if passed_at_once(each)]
    return {"at": e.lines(waits), "full": " or ".join(dict.fromkeys(e.name(each.place) for each in waits))}


def _tells_of_room(e: Evidence, spot: Spot) -> bool:
    """Whether an mbarrier seems to tell producers that a stage is free: copies signal others, or its name says so."""
    alike = e.alike(spot)
    filled = [alike(each.place) for each in (*e.did("announce"), *e.did("deliver"))]
    # Of tensor memory, which MMAs write, commits tell, and not copies.
    others = bool(filled) and e.facts.memory is not None and e.facts.memory.space != "tensor"
    return not any(filled) and (others or any(word in e.name(spot).lower() for word in ("empty", "free")))


def _waited_for_room(e: Evidence) -> Fields | None:
    wait = e.last_wait()
    if wait is None or not passed_at_once(wait) or not _tells_of_room(e, wait.place):
        return None
    return {"empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _never_waited(e: Evidence) -> Fields | None:
    if not e.warp or not e.facts.past.whole or not e.facts.past.barriers or e.last_wait() is not None:
        return None
    waits = e.behind(e.at_fault, _is("try_wait"), _is("mbarrier", "arrive")) if e.at_fault is not None else []
    return {"late": f" (the one at {e.line(waits[0])} stands behind the read)" if waits else ""}


def _part_of_other_cta(e: Evidence) -> Fields | None:
    """The phase was complete before another CTA had brought its part of a multicast, which is as large as the gap."""
    wait, memory = e.last_wait(), e.facts.memory
    if wait is None or memory is None or passed_at_once(wait):
        return None
    announced, came, words = e.bytes_of(wait.place, wait.phase - 1)
    for cast in e.did("deliver", wait.place, wait.phase - 1):
        reached = {each.place[0] for each in e.did("deliver", warp=cast.warp) if each.instruction == cast.instruction}
        gap = [count for cta, first, count in e.facts.past.unwritten
               if cta == memory.cta and first <= memory.first < first + count]  # fmt: skip
        sender = WarpName.of(cast.warp)
        if announced == came and len(reached) > 1 and gap and gap[0] % cast.amount == 0 and sender is not None:
            ctas = " and ".join(str(each) for each in sorted(reached - {sender.cta}))
            return {"full": e.name(wait.place), "phase": wait.phase - 1, "bytes": words, "ctas": ctas,
                    "at": e.line(cast.instruction), "count": f"{cast.amount:,}"}  # fmt: skip
    return None


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
    return {"array": array.name, "written": written}


def _written_otherwise(e: Evidence) -> Fields | None:
    wait = e.last_wait()
    if wait is None or passed_at_once(wait):
        return None
    phase = wait.phase - 1
    came = e.did("deliver", wait.place, phase)
    what = f"the copies at {e.lines(came)} have brought" if came else "no copy has brought any bytes of"
    return {"at": e.line(wait.instruction), "full": e.name(wait.place), "phase": phase, "what": what}


def _nothing_announced(e: Evidence) -> Fields | None:
    """The reader's own arrival has completed the phase, and no bytes were announced: it waits for nothing."""
    wait = e.last_wait()
    if wait is None or passed_at_once(wait) or any(e.alike(wait.place)(each.place) for each in e.did("announce")):
        return None
    arrivals = [each for each in e.did("arrive", wait.place, wait.phase - 1) if each.warp == e.warp]
    return {"full": e.name(wait.place), "at": e.lines(arrivals)} if arrivals else None


# --- accesses too early: a stage that is still in use -----------------------------------------------------------------


def _refills(e: Evidence) -> Fields | None:
    """No facts but common ones of a write over what is still in use; None if it is no such fault."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "writes" or not e.warp or not e.facts.past.barriers:
        return None
    by_thread = not side.what and not any(part in (e.error.instruction or "") for part in ("cp.async", "tcgen05.mma"))
    return None if by_thread else {}


def _refills_without_wait(e: Evidence) -> Fields | None:
    fields = _refills(e)
    mine, signals = _signalled_by(e), e.signals()
    other = e.facts.other
    full = e.alike(other.signals) if other is not None and other.signals is not None else mine.__contains__
    readers = {each.warp for each in e.did("wait") if full(each.place)} - {e.warp}

    def tells(wait: Moment) -> bool:
        """Whether who signals it may know that the stage is free: it has waited for what the warp itself signals."""
        by = {each.warp for each in signals if e.alike(wait.place)(each.place)}
        return wait.place not in mine and (not by or bool(by & readers))

    told = any(tells(each) for each in e.did("wait", warp=e.warp))
    return fields if fields is not None and e.facts.past.whole and not told else None


def _signalled_by(e: Evidence) -> set[Spot]:
    """Mbarriers that the warp's own arrivals and copies signal: it does not learn from these that a stage is empty."""
    return {each.place for each in e.signals([e.warp])}


def _fills_other_stage(e: Evidence) -> Fields | None:
    """The copy before wrote another stage than the one whose mbarrier it signals; the one at fault writes its own."""
    other = e.facts.other
    if _refills(e) is None or other.signals is None or other.verb != "wrote":
        return None
    stages = e.stages(other.signals)
    memory = e.stage_of_memory(e.facts.memory, len(stages))
    if memory in (None, e.stage(other.signals)):
        return None
    return {"full": e.name(other.signals), "stage": e.stage(other.signals), "memory": memory}


def _refills_at_once(e: Evidence) -> Fields | None:
    fields, wait = _refills(e), e.last_wait()
    if fields is None or wait is None or not passed_at_once(wait):
        return None
    return {"empty": e.name(wait.place), "at": e.line(wait.instruction)}


def _released(e: Evidence) -> Fields | None:
    """The wait for the stage to be empty, who completed its phase, and who of these still uses the stage."""
    fields, wait, other, memory = _refills(e), e.last_wait(), e.facts.other, e.facts.memory
    if fields is None or wait is None or passed_at_once(wait) or wait.phase < 1:
        return None
    arrivals = e.did("arrive", wait.place, wait.phase - 1)
    if not arrivals:
        return None
    if other.warp:
        user, used = e.who([other.warp]), [each for each in arrivals if each.warp == other.warp]
    elif memory is not None:
        user, used = f"CTA {memory.cta}", [each for each in arrivals if _cta(each, memory.cta) == memory.cta]
    else:
        user, used = "who uses it", arrivals
    return {"empty": e.name(wait.place), "at": e.lines(arrivals), "arrived": e.who(each.warp for each in arrivals),
            "user": user, "used": bool(used), "count": e.state(wait.place).expected,
            "read": other.verb == "read", "lanes": other.verb == "read" and _leaves_lanes(e, used),
            "over": bool(used) and all(_waits_for_reads(e, each) for each in used)}  # fmt: skip


def _waits_for_reads(e: Evidence, arrival: Moment) -> bool:
    """Whether MMAs that stand in front of an arrival are over when it counts."""
    reads, signal = e.facts.other.instructions, arrival.instruction
    if signal is None or not reads or any(each.parts[:2] not in _MMAS for each in reads):
        return False
    if reads[0].parts[0] == "tcgen05":
        return "commit" in signal.parts
    return not any(e.reaches(read, signal, _waits_for_wgmmas) for read in reads)


def _waits_for_wgmmas(each: Located) -> bool:
    return each.parts[:2] == ("wgmma", "wait_group") and each.text.rstrip("; ").endswith(" 0")


def _leaves_lanes(e: Evidence, arrivals: list[Moment]) -> bool:
    """Whether one lane arrives behind the reads of its warp, and nothing has it wait for the other lanes."""
    reads, signals = e.facts.other.instructions, [each.instruction for each in arrivals]
    if any(each.parts[0] not in ("ld", "ldmatrix") for each in reads):
        return False  # it goes on behind the lanes
    lanes = sum(each.amount for each in arrivals if each.phase == arrivals[0].phase) if arrivals else _LANES
    behind = None not in signals and all(a.line > read.line for a in signals for read in reads)
    return lanes < _LANES and behind and any(e.reaches(read, a, _is("bar", "warp")) for a in signals for read in reads)


def _cta(each: Moment, unknown: int) -> int:
    return (WarpName.of(each.warp) or WarpName(0, unknown, 0)).cta


# --- tensor memory ----------------------------------------------------------------------------------------------------


def _is(*parts: str) -> Callable[[Located], bool]:
    return lambda each: all(part in each.parts for part in parts)


def _arrives(each: Located) -> bool:
    return each.parts[:2] == ("mbarrier", "arrive") or each.parts[0] in ("bar", "barrier")


def _frees(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or side.verb != "frees" or other is None:
        return None
    return {}


def _loads_not_waited(e: Evidence) -> Fields | None:
    other = e.facts.other
    if other is None or other.verb != "read" or not other.instructions or other.instructions[0].parts[1:2] != ("ld",):
        return None
    load = other.instructions[0]
    if e.behind(load, _is("wait::ld"), _arrives):
        return None
    return {}


def _loads_released(e: Evidence) -> Fields | None:
    other = e.facts.other
    if other is None or other.verb != "read" or not other.warp or not other.instructions:
        return None
    arrivals = [each for each in e.did("arrive", warp=other.warp) if each.instruction is not None]
    early = [each for each in arrivals if each.instruction.line < other.instructions[0].line]
    return {"at": e.lines(early[-1:])} if early else None


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
    last = room[-1] if room else wait
    return {"full": e.name(wait.place), "at": e.lines(commits), "room": bool(room), "empty": e.name(last.place),
            "wait": e.line(last.instruction),
            "commits": any(each.instruction is None or "commit" in each.instruction.parts
                           for each in commits)}  # fmt: skip


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
    return {"empty": e.name(behind[-1].place), "at": e.line(behind[-1].instruction)}


def _sums_not_waited(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or side.verb != "reads" or other.verb != "wrote" or not e.warp:
        return None
    return {}


# --- groups of copies, of stores and of wgmmas ------------------------------------------------------------------------

_NEVER: Callable[[Located], bool] = lambda each: False  # noqa: E731


def _groups(e: Evidence, prefix: tuple[str, ...]) -> Fields | None:
    """An operation of a group that is in flight: which of its commit and its wait is missing, or leaves it so.

    ``copy`` has no commit in front of a wait, or ``wait`` leaves the latest ``number`` groups in flight; ``skips``:
    the instruction of the error is reached from the copy without a wait as well, or the next wait without a commit.
    """
    other = e.facts.other
    start = other.instructions[0] if other is not None and other.instructions else None
    if start is None and prefix == ("wgmma",) and "accumulator" in e.error.message:
        number = e.error.message.partition("wgmma at PTX line ")[2].partition(",")[0]
        start = next((each for each in e.instructions if str(each.line) == number), None)
    if start is None or e.at_fault is None or not _of_groups(prefix, start):
        return None

    told = [each for each in e.instructions if each.parts[:3] == ("cp", "async", "mbarrier")]
    if told and prefix == ("cp", "async"):
        return {"copy": e.line(start), "which": "mbarrier", "told": e.line(told[0])}

    def is_wait(each: Located) -> bool:
        return each.parts[: len(prefix)] == prefix and each.parts[len(prefix)] in ("wait_group", "wait_all")

    def is_commit(each: Located) -> bool:
        return each.parts[: len(prefix) + 1] == (*prefix, "commit_group")

    for each in (start, *(each for each in e.instructions if _of_groups(prefix, each))):
        behind = e.reached(each, lambda x: is_wait(x) or is_commit(x))
        if any(map(is_wait, behind)) or not any(map(is_commit, behind)):
            return {"which": "commit", "copy": e.line(each)}
    waits = [each for each in e.reached(start) if is_wait(each)]
    last = [each for each in waits if e.reaches(each, e.at_fault, is_wait)] or waits
    numbers = {int(text) if (text := each.text.rstrip("; ").split()[-1]).isdecimal() else 0: each for each in last}
    commit = min((each for each in e.reached(start) if is_commit(each)), key=lambda each: each.line)
    alone = e.error.kind == "register-in-flight"  # registers are the waiting thread's own
    found = {"copy": e.line(start), "which": "" if waits else "wait", "commit": e.line(commit),
             "barrier": "" if alone else ", and behind it the barrier of all who go on"}  # fmt: skip
    if most := max(numbers, default=0):
        wait = numbers[most]
        skips = e.reaches(start, e.at_fault, is_wait) or e.reaches(wait, wait, is_commit)
        found |= {"which": "number", "number": most, "wait": e.line(wait), "skips": skips}
    return found


def _of_groups(prefix: tuple[str, ...], each: Located) -> bool:
    """Whether an instruction is an operation of such groups."""
    if prefix == ("wgmma",):
        return each.parts[:2] == ("wgmma", "mma_async")
    bulk = {"bulk", "bulk_group"} & {*each.parts}
    copies = each.parts[:2] == ("cp", "async") and {"shared", "global"} <= {part.split("::")[0] for part in each.parts}
    return copies and ("bulk_group" in bulk if "bulk" in prefix else not bulk)


def _group_rows(kinds: tuple[str, ...], prefix: tuple[str, ...], commit: str, wait: str) -> tuple[Cause, ...]:
    """Rows of operations that are waited for by groups; of commit and wait the calls."""
    holds = functools.partial(_groups, prefix=prefix)
    leaves = f"{wait} at {{wait}} leaves the latest {{number}} groups in flight, and the one of {{copy}} is among these"
    return (
        Cause(kinds, holds, "a wait is missing: {who} has not waited for the mbarrier at which {told} arrives when the "
              "copy at {copy} is complete: mbarrier_wait for it before {here}, with parity 0 in the ring's first turn",
              when=lambda found: found["which"] == "mbarrier"),
        Cause(kinds, holds, f"{commit} is missing behind {{copy}}: {wait} waits for groups that are committed, and "
              "what no group has is in flight for ever", when=lambda found: found["which"] == "commit"),
        Cause(kinds, holds, f"{wait} is missing behind the commit at {{commit}}, in the threads that issued "
              "{copy}{barrier}", when=lambda found: found["which"] == "wait"),
        Cause(kinds, holds, f"{leaves}: a smaller number, with a group committed in every step, also an empty one; or "
              "the stage that {copy} fills, or the one that {here} reads, is not the one of this step",
              when=lambda found: found["which"] == "number" and found["skips"]),
        Cause(kinds, holds, leaves + ": a smaller number, or the index at {here} is that of a later step",
              when=lambda found: found["which"] == "number"),
    )  # fmt: skip


def _by_itself(e: Evidence) -> Fields | None:
    """A CTA of one thread, into whose shared memory nothing copies: nobody else could have written."""
    launch = e.error.launch
    alone = launch is not None and math.prod(launch.block) == math.prod(launch.cluster) == 1
    copies = any(each.parts[:2] == ("cp", "async") for each in e.instructions)
    return {} if alone and not copies and e.facts.memory is not None and e.facts.memory.space == "shared" else None


def _no_barrier(e: Evidence) -> Fields | None:
    """A read that is reached without a barrier from what writes shared memory, or from the wait for cp.async."""
    side, other, memory = e.facts.side, e.facts.other, e.facts.memory
    here = e.at_fault
    if here is None or memory is None or memory.space != "shared" or here.parts[0] not in ("ld", "ldmatrix"):
        return None
    if other is None and e.facts.past.barriers:
        return None  # others may write, and signal an mbarrier
    if other is not None and (side is None or side.verb != "reads" or other.signals is not None):
        return None
    writes = [
        each for each in e.instructions
        if each.parts[:3] in (("cp", "async", "wait_group"), ("cp", "async", "wait_all"))
        or stores_shared(each)
    ]  # fmt: skip
    if other is not None:
        lines = {each.line for each in other.instructions}
        writes = [each for each in writes if each.parts[0] == "cp" or each.line in lines]
    near = [each for each in writes if e.reaches(each, here, is_barrier)]
    return {"write": e.line(near[-1])} if near else None


def _refilled_without_barrier(e: Evidence) -> Fields | None:
    """From a read, a warp comes to the cp.async that fills the buffer again, and passes no barrier."""
    other, here = e.facts.other, e.at_fault
    reads = here is not None and here.parts[0] in ("ld", "ldmatrix")
    if not reads or other is None or not other.instructions or not other.warp:
        return None
    copy = other.instructions[0]
    ahead = other.warp != e.warp and _of_groups(("cp", "async"), copy) and "bulk" not in copy.parts
    return {} if ahead and e.reaches(here, copy, is_barrier) else None


def _writer_not_heard(e: Evidence) -> Fields | None:
    """The mbarrier at which the writer arrives behind the write, for which the reader waits behind the read, or never.

    ``early``: it arrives in front of the write alone, and the reader has waited for that.
    """
    side, other, here = e.facts.side, e.facts.other, e.at_fault
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or not other.instructions:
        return None
    if e.warp in ("", other.warp) or not e.facts.past.whole or other.signals is not None or here is None:
        return None
    write = other.instructions[0]
    arrivals = [each for each in e.did("arrive", warp=other.warp) if each.instruction is not None]
    wait = e.last_wait()
    if wait is not None and not e.behind(write, _is("mbarrier", "arrive"), _is("try_wait")):
        told = [each for each in arrivals if each.place == wait.place and each.instruction.line < write.line]
        if told and not passed_at_once(wait):
            return {"full": e.name(wait.place), "at": e.line(told[-1].instruction), "early": True}
    behind = [each for each in arrivals if each.instruction.line > write.line]
    first = min(behind, key=lambda each: each.instruction.line, default=None)
    if first is None or any(map(e.alike(first.place), _signalled_by(e))) and e.last_wait(first.place) is None:
        return None
    wait, alike = e.last_wait(first.place), e.alike(first.place)
    if wait is not None and (wait.instruction is None or wait.instruction.line < here.line):
        return None
    if wait is None and any(passed_at_once(each) and alike(each.place) for each in e.did("wait")):
        return None  # it tells that there is room
    return {"full": e.name(first.place), "at": e.line(first.instruction), "early": False}


def _fenced_late(e: Evidence) -> Fields | None:
    """The proxy fence of the writer stands behind the arrival that tells of the write."""
    other = e.facts.other
    write = other.instructions[0] if other is not None and other.instructions else None
    if write is None or other.verb != "wrote":
        return None
    arrivals, fences = (e.behind(write, _is(*parts), _is("try_wait")) for parts in
                        (("mbarrier", "arrive"), ("fence", "proxy")))  # fmt: skip
    if not arrivals or not fences or fences[0].line < arrivals[0].line:
        return None
    return {"fence": e.line(fences[0]), "at": e.line(arrivals[0])}


def _arrived_before(e: Evidence) -> Fields | None:
    """The writer arrives at a named barrier, for which the reader waits, in front of the write and not behind it."""
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or (side.verb, other.verb) != ("reads", "wrote") or not other.instructions:
        return None
    write, here = other.instructions[0], e.at_fault
    named = [each for each in e.instructions if (named_barrier(each) or -1) >= 0] if here is not None else []
    numbers = {named_barrier(each) for each in named if e.reaches(each, here, is_barrier)}
    arrivals = [each for each in named if named_barrier(each) in numbers]
    early = [each for each in arrivals if e.reaches(each, write, is_barrier)]
    behind = {each.line for each in e.reached(write)}
    if not early or any(each.line in behind for each in arrivals):
        return None
    return {"arrival": e.line(early[-1]), "number": named_barrier(early[-1])}


def _writes_ahead(e: Evidence) -> Fields | None:
    """Reads from which a warp comes to a write without a barrier, but not the other way round: ``read``, "" for none.

    Reads of several instructions may be kept as one. ``late``: those that are reached from the write alone.
    """
    side, other, here = e.facts.side, e.facts.other, e.at_fault
    if side is None or other is None or not other.instructions or here is None or other.signals is not None:
        return None
    verbs = side.verb, other.verb
    if verbs == ("reads", "wrote"):
        reads, write, reader, writer = [here], other.instructions[0], e.warp, other.warp
    elif verbs == ("writes", "read"):
        reads, write, reader, writer = other.instructions, here, other.warp, e.warp
    else:
        return None
    told = {each.place for each in e.signals([reader])} & {each.place for each in e.did("wait", warp=writer)}
    ahead = {each.line: each for each in reads if e.reaches(each, write, _waits_for_all)}
    behind = {each.line: each for each in reads if e.reaches(write, each, _waits_for_all)}
    read, late = (" and ".join(dict.fromkeys(e.line(here[line]) for line in here if line not in there))
                  for here, there in ((ahead, behind), (behind, ahead)))  # fmt: skip
    if told or not (read or (late and verbs == ("writes", "read"))):
        return None
    fields = {"write": e.line(write), "reader": e.who([reader]), "writer": e.who([writer])}
    return fields | {"read": read, "late": late}


def _waits_for_all(each: Located) -> bool:
    """Whether it is a barrier of threads of the CTA."""
    return named_barrier(each) is not None


def _both_write(e: Evidence) -> Fields | None:
    side, other = e.facts.side, e.facts.other
    if side is None or other is None or (side.verb, other.verb) != ("writes", "wrote") or e.at_fault is None:
        return None
    opcodes = {each.parts[0] for each in (e.at_fault, *other.instructions)} if other.instructions else ()
    return {} if opcodes == {"st"} else None


def _behind_array(e: Evidence) -> Fields | None:
    """The bytes are in no array of shared memory."""
    memory = e.facts.memory
    if memory is None or memory.space != "shared":
        return None
    before = [each for each in e.arrays if each.first <= memory.first]
    last = max(before, key=lambda each: each.first + each.nbytes, default=None)
    distance = memory.first - last.first - last.nbytes if last is not None else -1
    return {"array": last.name, "distance": f"{distance:,}"} if distance >= 0 else None


def _adds_to_nothing(e: Evidence) -> Fields | None:
    """A tcgen05.mma reads sums that nobody has written; where A is in tensor memory, it may be that."""
    here = e.at_fault
    mma = here is not None and here.parts[:2] == ("tcgen05", "mma") and here.text.count("[") == 1
    return {} if mma and (e.facts.memory is None or e.facts.memory.space == "tensor") else None


def _source_in_use(e: Evidence) -> Fields | None:
    """A write over what an operation may still be reading, and whether its own warp has waited for its end."""
    other = e.facts.other
    if other is None or not other.instructions or other.verb != "read":
        return None
    return {"waited": other.waited, "issued": bool(other.warp)}


def _source_handed_back(e: Evidence) -> Fields | None:
    """The mbarrier.arrive behind a bulk store, and whether the wait for the store stands in front of it.

    ``awaited``: the writer waits for an mbarrier that the storing warp signals, or that nobody has signalled yet.
    """
    if _source_in_use(e) is None or "bulk" not in e.facts.other.instructions[0].parts or not e.facts.past.whole:
        return None
    store = e.facts.other.instructions[0]
    waits = e.behind(store, _is("bulk", "wait_group"), _NEVER)
    back = e.behind(store, _is("mbarrier", "arrive"), _NEVER)
    if not waits or not back:
        return None
    others = {each.place for each in e.signals() if each.warp != e.facts.other.warp}
    awaited = any(each.place not in others for each in e.did("wait", warp=e.warp))
    first = back[0].line < waits[0].line
    return {"wait": e.line(waits[0]), "back": e.line(back[0]), "first": first, "awaited": awaited}


def _copy_unheard(e: Evidence) -> Fields | None:
    """A CTA's own copies have signalled an mbarrier in more phases than its warps have waited for."""
    name = WarpName.of(e.warp)
    copies = [each for each in e.did("deliver", warp=e.warp) if name is not None and each.place[0] == name.cta]
    copies = [each for each in copies if e.at_fault is not None and each.instruction == e.at_fault]
    last = copies[-1] if copies and e.facts.past.whole else None
    heard = last is None or any(each.phase > last.phase for each in e.did("wait", last.place))
    return None if heard else {"full": e.name(last.place)}


def _freed(e: Evidence) -> Fields | None:
    """A tcgen05.dealloc of what is not allocated, and where else its warp may have freed it."""
    here = e.at_fault
    allocs = [each for each in e.instructions if each.parts[:2] == ("tcgen05", "alloc")]
    if here is None or here.parts[:2] != ("tcgen05", "dealloc") or not allocs:
        return None
    others = [each for each in e.instructions if each.parts[:2] == here.parts[:2] and each.line != here.line]
    before = [e.line(each) for each in others if e.reaches(each, here, _NEVER)]
    return {"alloc": e.line(allocs[0]), "before": f", since {before[-1]}" if before else "",
            "nothing": e.error.message.endswith("nothing")}  # fmt: skip


def _past_shared(e: Evidence) -> Fields | None:
    """Bytes behind the last array of shared memory that ends in front of them."""
    memory = e.facts.memory
    if memory is None or memory.space != "shared":
        return None
    before = [each for each in e.arrays if each.name and each.first + each.nbytes <= memory.first]
    array = max(before, key=lambda each: each.first + each.nbytes, default=None)
    byte = memory.first - array.first if array is not None else 0
    return {"array": array.name, "nbytes": f"{array.nbytes:,}", "byte": f"{byte:,}"} if array is not None else None


def _at_one_barrier(e: Evidence) -> Fields | None:
    number = named_barrier(e.at_fault)
    return {"number": number} if number is not None and number >= 0 and e.facts.other is not None else None


def _beside_other_warps(e: Evidence) -> Fields | None:
    """The CTA has several warps: this one came first to what may be a fault between them, too."""
    launch = e.error.launch
    return {} if launch is not None and math.prod(launch.block) > _LANES else None


def _says(*words: str) -> Callable[[Evidence], Fields | None]:
    return lambda e: {} if all(word in e.error.message for word in words) else None


_LANES = 32
_MMAS = ("tcgen05", "mma"), ("wgmma", "mma_async")
_EARLY = ("unfinished-copy", "shared-race")
_IN_USE = ("stage-in-use", "shared-race")

ACCESSES: tuple[Cause, ...] = (
    # A stage that is not full: no wait, its parity, its stage, the bytes that it waits for.
    Cause(_EARLY, _timed_out, "{who} has looked at {full} at {at}, where a single try_wait timed out: mbarrier_wait "
          "repeats it until the phase is complete", "unfinished-copy"),
    Cause(_EARLY, _not_waited, "{who} has not waited for {full}, which the copy at {use} signals: mbarrier_wait for "
          "it, with parity 0 in the ring's first turn", "unfinished-copy"),
    Cause((*_EARLY, "uninitialised-read", "tensor-race"), _waited_at_once, "wrong parity: the wait of {who} for {full} "
          "at {at} asked for parity 1 and passed at once, since the phase before the first one counts as complete: a "
          "consumer's first wait has parity 0"),
    Cause(_EARLY, _copy_waited_for, "the copy at {use} writes stage {memory} and signals {full}, the mbarrier of stage "
          "{stage}: both have to be of the same stage", "unfinished-copy",
          lambda found: found["memory"] not in (None, found["stage"])),
    Cause(_EARLY, _copy_waited_for, "stages differ: {who} has waited for {waited} (stage {other}) at {at}, and reads "
          "stage {stage} at {here}, of which {full} tells: the index of the wait and the index of what is read have to "
          "be the same{copy}", "unfinished-copy", lambda found: found["other"] != found["stage"]),
    Cause(_EARLY, _copy_waited_for, "the copy at {use} signals {full}, and {who} has waited for {waited} at {at}: a "
          "copy signals the mbarrier of the CTA that waits (in a pair the leader's), or the other CTA passes on that "
          "its bytes have come", "unfinished-copy", lambda found: not found["here_too"]),
    Cause(_EARLY, _copy_waited_for, "phase {phase} of {full} was complete before this copy: {bytes}; the copy at "
          "{use} by {by} signals it too. mbarrier_arrive_and_expect_tx has to announce the bytes of all copies of a "
          "stage, of both CTAs of a pair", "unfinished-copy", lambda found: found["same"] and not found["again"]),
    Cause(_EARLY, _copy_waited_for, "{who} has waited for phase {phase} of {full}, and the stage has been filled "
          "again since: a wait is missing in this turn, or its parity is that of the turn before", "unfinished-copy",
          lambda found: found["same"]),
    Cause(("proxy-fence",), _fenced_late, "the fence at {fence} stands behind the arrival at {at}, which tells that "
          "the bytes are written: fence_proxy first, then arrive"),
    Cause(("shared-race",), _writer_not_heard, "the arrival of {by} for {full} at {at} stands in front of the write at "
          "{use}, and comes too early: arrive behind the write", when=lambda found: found["early"]),
    Cause(("shared-race",), _writer_not_heard, "a wait is missing: {who} has not waited for {full}, at which {by} "
          "arrives at {at} behind the write at {use}: mbarrier_wait for it before {here}, with parity 0 in the first "
          "turn"),
    Cause(("shared-race",), _generic_stages, "stages differ: {who} has waited for {full} (stage {stage}) at {at}, "
          "and reads stage {other} at {here}: the index of the wait and the index of what is read have to be the "
          "same{more}", when=lambda found: found["stage"] != found["other"]),
    Cause(("uninitialised-read",), _behind_array, "these bytes are in no array, {distance} bytes behind the end of "
          "{array}: the index at {here} is too large"),
    Cause(("uninitialised-read",), _adds_to_nothing, "the tcgen05.mma at {here} adds to sums that nobody has written: "
          "the first MMA of a tile has ACCUMULATE False (mma.set(tcgen05.Field.ACCUMULATE, k != 0))"),
    Cause(("uninitialised-read",), _by_itself, "the CTA has one thread, and no copy writes its shared memory: a store "
          "is missing in front of {here}, or what is stored and what is read have different indices"),
    Cause(("uninitialised-read",), _no_barrier, "a barrier is missing between {write} and the read at {here}, or the "
          "index of one of the two is wrong: sync_threads, or a named barrier of all who write and read; a wait for "
          "cp.async tells its own thread alone"),
    Cause(("uninitialised-read",), _never_waited, "a barrier or a wait is missing: {who} has waited for no mbarrier so "
          "far{late}, and nobody has written these bytes yet; who reads waits for who writes, by mbarrier_wait (of "
          "MMAs the mbarrier of their tcgen05.commit), sync_threads or cluster_wait"),
    Cause(("uninitialised-read",), _waited_for_room, "a wait is missing: the last wait of {who}, for {empty} at {at}, "
          "tells that there is room, and not that these bytes are there: mbarrier_wait for the full mbarrier of the "
          "stage, which copies signal, with parity 0 at first"),
    Cause(("uninitialised-read",), _part_of_other_cta, "phase {phase} of {full} was complete before the {count} bytes "
          "that the multicast at {at} of CTA {ctas} brings: {bytes}. mbarrier_arrive_and_expect_tx announces the bytes "
          "that come from all CTAs"),
    Cause(("uninitialised-read",), _written_in_part, "{written} bytes of {array} have been written, and not these: a "
          "barrier is missing between who writes and the read at {here} (sync_threads, or a wait for an mbarrier), or "
          "the stage or index that is written and the one that is read differ, or a copy or a border of the tile is "
          "missing"),
    Cause(("uninitialised-read",), _nothing_announced, "the arrival of {who} at {at} completes the phase of {full} by "
          "itself, and no bytes are announced: mbarrier_arrive_and_expect_tx has to announce the bytes of all copies "
          "of the phase"),
    Cause(("uninitialised-read",), _written_otherwise, "{who} has waited for phase {phase} of {full} at {at}, and "
          "{what} that phase: a copy of these bytes is not issued, has another size or fills another stage, or a "
          "border of the tile is never filled"),
    # A stage that is in use: no wait, its parity, too few arrivals, an arrival that comes too early.
    Cause(_IN_USE, _refills_without_wait, "{who} has waited for no mbarrier that tells that the stage is free: "
          "mbarrier_wait on the empty mbarrier before {here}, with parity 1 in the ring's first turn"),
    Cause(_IN_USE, _fills_other_stage, "the copy at {use} writes stage {memory} and signals {full}, the mbarrier of "
          "stage {stage}: both have to be of the same stage"),
    Cause(_IN_USE, _refills_at_once, "wrong parity, or a missing wait: the last wait of {who}, for {empty} at {at}, "
          "passed at once though the stage has been filled before: its parity changes with every turn of the ring, "
          "from 1 on"),
    Cause(_IN_USE, _released, "{empty} was completed by {arrived} ({at}), without {user}, which still uses "
          "the stage: its count, {count}, has to be the number of all who use the stage, and each of them arrives at "
          "the mbarrier of each CTA that fills it", when=lambda found: not found["used"]),
    Cause(_IN_USE, _released, "a warp's barrier is missing: the lane of {user} that arrives at {empty} at {at} does "
          "not wait for the reads of the other lanes at {use}: cute.arch.sync_warp() between the two",
          when=lambda found: found["lanes"]),
    Cause(_IN_USE, _released, "stages differ: {use} reads a stage that {arrived} has handed back by {empty} at {at}, "
          "behind all reads that were issued before: the index of the operand, of the wait in front of it and of the "
          "arrival behind it have to be the same", when=lambda found: found["over"]),
    Cause(_IN_USE, _released, "the release comes too early: {empty} at {at}, by {arrived}, before the reads "
          "at {use} are over: arrive behind the last of them (of wgmma behind warpgroup.wait_group(0); of tcgen05.mma "
          "by tcgen05.commit)", when=lambda found: found["read"]),
    # Tensor memory: freed, read, overwritten.
    Cause(("tensor-race",), _frees, "tcgen05.dealloc at {here} comes before {use} is over: a barrier of all who use "
          "the columns (in a pair of CTAs cluster_arrive and cluster_wait) stands in front of it, behind the last "
          "tcgen05.wait::ld"),
    Cause(("tensor-race",), _loads_not_waited, "tcgen05.wait::ld (cute.arch.fence_view_async_tmem_load) is missing "
          "between the tcgen05.ld at {use} and the arrival that hands the columns back"),
    Cause(("tensor-race",), _loads_released, "the columns are handed back at {at}, before the tcgen05.ld at {use}: "
          "arrive behind it and its tcgen05.wait::ld"),
    Cause(("tensor-race",), _columns_not_free, "a wait is missing: {who} has not waited for {empty}, at which {by} "
          "hands the columns back at {at}: mbarrier_wait for it before {here}, with parity 1 in the first turn"),
    Cause(("tensor-race",), _sums_overwritten, "{who} has waited for {full}, which {by} commits at {at}; the MMAs "
          "behind that commit write over what it still reads: {by} waits, before the first MMA of a tile, for an "
          "mbarrier on which all who read the accumulator arrive", when=lambda found: not found["room"]),
    Cause(("tensor-race",), _sums_overwritten, "{by} arrives at {full} at {at}, which does not wait for the MMAs at "
          "{use}: tcgen05.commit to this mbarrier in its place", when=lambda found: not found["commits"]),
    Cause(("tensor-race",), _sums_overwritten, "stages differ, or a parity is wrong: {by} waits for {empty} at {wait}, "
          "writes sums at {use} and commits them to {full} at {at}, and {who} reads at {here} behind its wait for "
          "{full}: all of these have to be of the same stage"),
    Cause(("tensor-race",), _sums_not_waited, "{who} reads before the MMAs at {use} are complete: tcgen05.commit "
          "behind them, and a wait of {who} for its mbarrier"),
    # A buffer that is filled again before all have read it.
    Cause(("copy-in-flight", "shared-race"), _refilled_without_barrier, "a barrier is missing between the reads at "
          "{here} and the copy at {use}, by which {by}, a step ahead, fills the buffer again: sync_threads behind the "
          "reads"),
    # Groups: not committed, not waited for, too many left.
    *_group_rows(("copy-in-flight", "shared-race"), ("cp", "async"), "cp_async_commit_group()",
                 "cp_async_wait_group(N)"),
    *_group_rows(("source-in-use",), ("cp", "async", "bulk"), "cp_async_bulk_commit_group()",
                 "cp_async_bulk_wait_group(0, read=True)"),
    *_group_rows(("source-in-use", "register-in-flight"), ("wgmma",), "warpgroup.commit_group()",
                 "warpgroup.wait_group(0)"),
    Cause(("lanes-race",), _beside_other_warps, "a barrier is missing between {use} and {here}: if other warps of the "
          "CTA read or write this array, too, sync_threads or a named barrier of them all; if this warp alone does, "
          "cute.arch.sync_warp(): lanes of a warp do not run in lockstep"),
    Cause(("copy-in-flight", "shared-race"), _no_barrier, "a barrier is missing between {write} and the read at "
          "{here}: sync_threads, or a named barrier of all who write and read; a wait for cp.async tells its own "
          "thread alone"),
    Cause(("shared-race",), _arrived_before, "the arrival at named barrier {number} at {arrival} stands in front of "
          "the write at {use}, and tells {who} that it is over: arrive behind the write"),
    Cause(("shared-race",), _writes_ahead, "a barrier is missing behind the read at {read}: {writer} goes on to the "
          "write at {write} (in a loop, that of the next turn) while {reader} has yet to read: sync_threads, or the "
          "named barrier of all who read and write", when=lambda found: not found["late"]),
    Cause(("shared-race",), _writes_ahead, "a barrier is missing between the write at {write} and the read at {late}, "
          "to which {reader} comes before {writer} has written: sync_threads, or the named barrier of all who read and "
          "write", when=lambda found: not found["read"]),
    Cause(("shared-race",), _writes_ahead, "a barrier is missing between the write at {write} and the read at {late}, "
          "or between the read at {read} and that write: sync_threads, or the named barrier of all who read and write"),
    Cause(("shared-race", "global-race"), _both_write, "two threads store to the same place, at {use} and at {here}: "
          "the index of one of the two is wrong, or a single thread is to store (a predicate); a barrier is right only "
          "where the second value replaces the first"),
    Cause(("register-in-flight",), _says("wgmma.fence"), "warpgroup.fence() before the first wgmma that reads or "
          "writes these registers, at {here}"),
    Cause(("register-in-flight",), _says("wgmma.wait_group"), "warpgroup.wait_group(0) before {here}, where registers "
          "of a wgmma are used"),
    Cause(("source-in-use",), _source_handed_back, "the arrival at {back} lets {who} write at {here} before the "
          "wait at {wait} for the store at {use}: arrive behind that wait", when=lambda found: found["first"]),
    Cause(("source-in-use",), _source_handed_back, "a wait is missing: {who} writes at {here} without waiting for "
          "the mbarrier at which {back} arrives behind the store at {use}: mbarrier_wait for it before the write, "
          "with parity 1 in the first turn", when=lambda found: not found["first"] and not found["awaited"]),
    Cause(("source-in-use",), _source_in_use, "the warp that issued {use} has waited for its end, and nothing tells "
          "the threads that write at {here}: a barrier of both, behind that wait", when=lambda found: found["waited"]),
    Cause(("source-in-use",), _source_in_use, "no wait for the operation at {use} is executed before the write "
          "at {here}: in the thread that issued it cp_async_bulk_wait_group(0, read=True), of wgmma "
          "warpgroup.wait_group(0), and then a barrier of all who write", when=lambda found: found["issued"]),
    Cause(("shared-race",), _generic_stages, "{who} has waited for {full}, which is signalled at {signals}; the write "
          "at {use} is not in front of that signal, or is meant for another stage than {stage}: write first, then "
          "arrive, at the mbarrier of the same stage", when=lambda found: found["late"]),
    Cause(("illegal-access",), _freed, "the columns are free already{before}: the warp that allocated them at "
          "{alloc} calls tcgen05.dealloc once, and no other warp does", when=lambda found: found["nothing"]),
    Cause(("illegal-access",), _freed, "tcgen05.dealloc takes the address and the number of columns of the "
          "tcgen05.alloc at {alloc}: an allocation is freed as a whole"),
    Cause(("out-of-bounds",), _past_shared, "{array} has {nbytes} bytes, and {here} accesses byte {byte}: an index or "
          "a stage is too large, or alloc_smem has to give more"),
    Cause(("arrival-early",), _at_one_barrier, "{by} comes to named barrier {number} at {use}, and nothing tells it "
          "that the phase of {who} at {here} is over: warps that do not wait for each other have barriers with ids of "
          "their own"),
    Cause(("exit-in-use",), _says("never waited for it"), "cp_async_bulk_wait_group(0, read=True) by the thread that "
          "stored at {here}, before it ends"),
    Cause(("exit-in-use",), _copy_unheard, "nobody waits for the last bytes that the copy at {here} brings to its own "
          "CTA: a loop that waits for {full} takes fewer turns than the one that copies, or a wait is missing behind "
          "it"),
    Cause(("exit-in-use",), _says("may exit before"), "cluster_arrive and cluster_wait at the end of the kernel, in "
          "all threads of the cluster, or a wait in the other CTA for the mbarrier that {here} signals"),
)  # fmt: skip
