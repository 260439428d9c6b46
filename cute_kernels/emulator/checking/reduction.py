"""The fewest steps that make a launch fail: what a schedule drew, reduced by deletion as long as it still fails."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.steps import Step

Item = TypeVar("Item")

Fails = Callable[[Schedule, Callable[[Step, str], None] | None], bool]
"""Whether the launch fails in the same way under a schedule; the function is `Options.stepped`."""


@dataclasses.dataclass(frozen=True)
class FewestSteps:
    """Steps of which none can be left out. ``schedule``: has them; ``lines``: one per step, who does what."""

    schedule: Schedule
    lines: tuple[str, ...]


def fewest(items: Sequence[Item], fails: Callable[[list[Item]], bool]) -> list[Item]:
    """The items that are left when none can be left out any more (delta debugging: Zeller, Hildebrandt 2002).
    ``items``: which fail; ``fails``: whether a part of them, in order, still does."""
    kept, size = list(items), len(items)
    while size:
        position, before = len(kept), len(kept)
        while position > 0:  # from the end: what comes after the failure's causes matters least
            rest = kept[: max(position - size, 0)] + kept[position:]
            if fails(rest):
                kept = rest
            position -= size
        if size > 1 or len(kept) == before:
            size //= 2
        size = min(size, len(kept))
    return kept


def fewest_steps(schedule: Schedule, fails: Fails, seconds: float) -> FewestSteps | None:
    """Reduces what a schedule, under which a launch fails, draws at random. ``schedule``: which draws something, or
    holds warps. With ``overlap`` the steps are those of the launch by itself, and the one before it runs in turn.
    ``fails``: runs the launch. ``seconds``: after which what is left is not reduced further. Returns none where nothing
    is drawn, or where the steps do not show the failure again."""
    end = time.monotonic() + seconds
    taken: list[Step] = []
    if not fails(schedule, lambda step, _: taken.append(step)):
        return None
    for completion in ("eager", "lazy"):

        def with_steps(steps: Sequence[Step], completion: str = completion) -> Schedule:
            return Schedule(completion=completion, steps=tuple(steps), overlap=schedule.overlap)

        def still(steps: Sequence[Step]) -> bool:
            return time.monotonic() < end and fails(with_steps(steps), None)  # noqa: B023 - called in this turn

        steps = list(_merged(taken))
        if still(steps):
            break
    else:
        return None
    while (shorter := list(_merged(fewest(steps, still)))) != steps:
        steps = shorter
    for place, step in enumerate(steps):  # as long as it can is simpler than a number
        longer = [*steps[:place], dataclasses.replace(step, count=None), *steps[place + 1 :]]
        if step.kind == "w" and still(longer):
            steps = longer
    found: dict[int, str] = {}

    def note(step: Step, words: str) -> None:
        place = next((n for n, each in enumerate(steps) if each == step and n not in found), None)
        if place is not None:
            found[place] = words

    fails(with_steps(steps), note)
    return FewestSteps(with_steps(steps), tuple(found[place] for place in sorted(found))) if steps else None


def _merged(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps with those turns as one that a warp has right behind each other."""
    last: Step | None = None
    for step in steps:
        both = last is not None and last.kind == step.kind == "w"
        if both and (last.cluster, last.who) == (step.cluster, step.who):
            count = None if last.count is None or step.count is None else last.count + step.count
            last = dataclasses.replace(step, count=count)
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last
