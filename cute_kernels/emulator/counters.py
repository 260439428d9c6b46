"""Dynamic instruction counts per warp role and opcode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cute_kernels.emulator.flow import Flow
from cute_kernels.emulator.warp import Warp


class Counters:
    """Sums executions of basic blocks; instructions follow because a block is executed as a whole.

    An instruction whose guard is false counts: it is issued. A wait counts once, however often it is retried.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._sizes = [block.end - block.start for block in flow.blocks]
        self._blocks = [0] * len(flow.blocks)
        self.by_role: Counter[str] = Counter()

    def add(self, warps: Iterable[Warp]) -> None:
        """Adds what these warps executed."""
        for warp in warps:
            counts = warp.counts[: len(self._sizes)]
            self._blocks = [a + b for a, b in zip(self._blocks, counts)]
            self.by_role[warp.role or f"warp {warp.index}"] += sum(n * size for n, size in zip(counts, self._sizes))

    @property
    def total(self) -> int:
        return sum(self.by_role.values())

    def by_opcode(self) -> dict[str, int]:
        """Executions per opcode, most frequent first."""
        result: Counter[str] = Counter()
        for block, count in zip(self._flow.blocks, self._blocks):
            if count:
                for instruction in self._flow.kernel.instructions[block.start : block.end]:
                    result[instruction.opcode] += count
        return dict(result.most_common())
