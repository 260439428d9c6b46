"""Hangs: equal warps together, and how they hold each other up."""

import dataclasses
from collections.abc import Callable, Sequence

from cute_kernels.emulator.facts import WaitState, WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.reports.barriers import Barriers
from cute_kernels.emulator.reports.model import Place, Waiting
from cute_kernels.emulator.reports.words import short_names

_MOST_NAMED = 4  # groups of warps in a sentence


def grouped(
    waits: Sequence[WaitState], place: Callable[[Instruction], Place], barriers: Barriers
) -> tuple[Waiting, ...]:
    """Warps and what they wait for; warps of a CTA that wait for the same together."""
    groups: dict[object, list[WaitState]] = {}
    for wait in waits:
        name = WarpName.of(wait.warp)
        line = wait.instruction.line if wait.instruction is not None else None
        what = (wait.barrier.cta, wait.barrier.offset) if wait.barrier is not None else wait.text
        groups.setdefault((name and (name.cluster, name.cta, name.role), line, what, wait.state), []).append(wait)
    return tuple(_group(members, place, barriers) for members in groups.values())


def _group(members: list[WaitState], place: Callable[[Instruction], Place], barriers: Barriers) -> Waiting:
    first = members[0]
    warps = tuple(name for each in members if (name := WarpName.of(each.warp)) is not None)
    where = place(first.instruction) if first.instruction is not None else Place()
    where = dataclasses.replace(where, warps=warps)
    missing = tuple(name for each in first.missing if (name := WarpName.of(each)) is not None)
    if first.barrier is None:
        return Waiting(where, first.text, missing=missing)
    barrier = barriers.barrier(first.barrier)
    phase = first.barrier.phase if first.by_parity else first.state
    parity = f" (parity {first.state})" if first.by_parity else ""
    return Waiting(where, f"waits for phase {phase}{parity} of {barrier.title}", barrier, phase, missing)


def in_one_sentence(waiting: Sequence[Waiting]) -> str:
    """Who waits for what, "" if somebody does not wait."""
    if not all(each.place.warps and _object(each) for each in waiting) or not waiting:
        return ""
    first = waiting[0].place.warps[0]
    here = f"CTA {first.cta} of cluster {first.cluster}" if first.several else f"CTA {first.cta}"
    inside = [each for each in waiting if each.place.warps[0].cta == first.cta]
    parts = []
    for each in inside[:_MOST_NAMED]:
        verb = "wait" if len(each.place.warps) > 1 else "waits"
        parts.append(f"{short_names(each.place.warps)} {verb} {_object(each)}")
    more = f" and {len(waiting) - len(parts)} more" if len(waiting) > len(parts) else ""
    return f"the kernel hangs: in {here} {', '.join(parts)}{more}"


def _object(waiting: Waiting) -> str:
    """Object that it waits for, "" if it does not wait."""
    if waiting.barrier is not None:
        return f"for {waiting.barrier.title}"
    verb, _, rest = waiting.what.partition(":")[0].partition(" ")
    return rest if verb == "waits" else ""


def cycle(waiting: Sequence[Waiting]) -> tuple[str, ...]:
    """How the groups hold each other up, a sentence each, the last one leading back to the first; none if not known.

    A group waits for the group whose warp arrived last at its barrier, or has not arrived yet at the barrier of the
    CTA or cluster. Where nobody has arrived at an mbarrier so far, and two groups wait, it can only be the other one.
    """
    following = {number: _released_by(number, waiting) for number in range(len(waiting))}
    for start in following:
        way = [start]
        while (after := following[way[-1]]) is not None and after not in way:
            way.append(after)
        if after == start and len(way) > 1:
            return tuple(_step(waiting[a], waiting[b]) for a, b in zip(way, (*way[1:], start)))
    return ()


def _released_by(number: int, waiting: Sequence[Waiting]) -> int | None:
    here = waiting[number]
    others = [index for index in range(len(waiting)) if index != number]
    wanted = set(here.missing)
    if here.barrier is not None:
        if here.barrier.last_arrival is None:
            return others[0] if len(others) == 1 else None
        wanted = {here.barrier.last_arrival}
    return next((index for index in others if wanted & set(waiting[index].place.warps)), None)


def _step(here: Waiting, after: Waiting) -> str:
    who, whom = short_names(here.place.warps), short_names(after.place.warps)
    verb = "wait" if len(here.place.warps) > 1 else "waits"
    if here.barrier is None:
        return f"{who} {verb} for {whom} to arrive at the barrier"
    what = f"phase {here.phase} of {here.barrier.title}"
    if here.barrier.last_arrival is None:
        return f"{who} {verb} for {what}, at which nobody has arrived yet; who else runs is {whom}"
    return f"{who} {verb} for {what}, at which {whom} arrived last"
