"""Warps that are held in front of an event until one of another warp has happened: steps of kind "h".

An event is known by how many instructions its warp has executed up to the end of the event's basic block. A warp that
is held goes on all the same when nothing else can run.
"""

from collections.abc import Iterable

from cute_kernels.emulator.machine.state.warp import WarpCode
from cute_kernels.emulator.steps import Step


class Holds:
    """Warps of a launch that are held. ``steps``: of this kind."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.left = list(steps)  # the steps that may still hold a warp
        self.freed: list[int] = []  # clusters of which a warp is held no longer, by what another cluster has done

    def stop(self, cluster: int, warp: int) -> int | None:
        """So many instructions may the warp have executed when its turn ends; None: any number."""
        stops = [step.count for step in self.left if (step.cluster, step.who) == (cluster, warp)]
        stops += [step.until[2] + 1 for step in self.left if step.until[:2] == (cluster, warp)]
        return min(stops, default=None)

    def of(self, cluster: int, warp: int, code: WarpCode) -> Step | None:
        """The step that holds the warp where it stands."""
        here = ((step.cluster, step.who, step.count) == (cluster, warp, code.steps) for step in self.left)
        return next((step for step, fits in zip(self.left, here) if fits), None) if code.counted else None

    def passed(self, cluster: int, warp: int, code: WarpCode | None) -> list[int]:
        """A turn of a warp is over, or the warp has ended (None). Warps of the cluster that are held no longer."""
        gone = []
        for step in self.left:
            *who, count = step.until
            mine = who == [cluster, warp]
            if mine and (code is None or code.steps > count or (code.steps == count and not code.counted)):
                gone.append(step)
        self.left = [step for step in self.left if step not in gone]
        still = {(step.cluster, step.who) for step in self.left}
        free = [(step.cluster, step.who) for step in gone if (step.cluster, step.who) not in still]
        self.freed += [of for of, _ in free if of != cluster]
        return [who for of, who in free if of == cluster]
