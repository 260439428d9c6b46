"""tcgen05.alloc and tcgen05.dealloc with .cta_group::2: one warp of each CTA of a pair perform them together.

The PTX ISA ("Issue Granularity") lets the first of the two warps block until the other one performs the operation as
well. Here it always does: so columns are there in both CTAs when the first of them goes on, and a CTA whose peer never
takes part hangs. Nothing else is ordered by it: the ISA does not say that these instructions synchronise memory.
"""

from collections.abc import Callable

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.machine.state.tmem import TensorMemory
from cute_kernels.emulator.machine.state.warp import Wait, WarpState

Operands = tuple[int, ...]


class PairOperation:
    """One kind of operation of a pair of CTAs. ``name``: of the instruction. ``memories``: tensor memory of the CTAs of
    the cluster by rank. ``perform``: with a memory and the operands of its warp: the result, None while it is not
    possible. ``possible``: whether `perform` would give a result."""

    def __init__(
        self, name: str, memories: list[TensorMemory], perform: Callable[[TensorMemory, Operands], int | None],
        possible: Callable[[TensorMemory, Operands], bool] = lambda memory, operands: True,
    ) -> None:
        self.name, self._memories, self._perform, self._possible = name, memories, perform, possible
        self._waiting: dict[int, tuple[WarpState, Operands]] = {}
        self._results: dict[int, tuple[WarpState, int]] = {}

    def join(
        self, warp: WarpState, operands: Operands, done: Callable[..., None] = lambda parts, operands: None
    ) -> int | None:
        """A warp performs the operation, or looks again whether its peer has; None: it has to wait. ``warp``: the warp.
        ``operands``: its operands. ``done``: is called when both have performed it, with each of them and its result,
        and the operands. Raises IllegalAccess: there is no peer, or the operands of the two differ."""
        rank, peer = warp.cta.rank, warp.cta.rank ^ 1
        if peer >= len(self._memories):
            raise IllegalAccess(f"{self.name}.cta_group::2 by CTA {rank} of a cluster without CTA {peer}, its peer")
        if self._results.get(rank, (None, 0))[0] is warp:
            return self._results.pop(rank)[1]
        if rank not in self._waiting:
            self._waiting[rank] = warp, operands
            warp.cluster.progress += 1
        if self._waiting[rank][0] is not warp or {rank, peer} & self._results.keys() or not self._possible_now(rank):
            # A result that another warp has not taken yet would be lost.
            warp.wait = Wait(
                self.name, lambda: rank in self._results or self._possible_now(rank), lambda: self._describe(rank)
            )
            return None
        if operands != self._waiting[peer][1]:
            other, given = self._waiting[peer]
            raise IllegalAccess(
                f"{self.name}.cta_group::2 with operands {operands} by {warp.label} and {given} by {other.label}, "
                "which perform it together"
            )
        for each in (rank, peer):
            who, given = self._waiting.pop(each)
            self._results[each] = who, self._perform(self._memories[each], given)
        done([self._results[each] for each in (rank, peer)], operands)
        warp.cluster.progress += 1
        return self._results.pop(rank)[1]

    def _possible_now(self, rank: int) -> bool:
        """Whether a warp of either CTA waits for the other, and memory is free."""
        both = [self._waiting.get(each) for each in (rank, rank ^ 1)]
        return all(both) and all(
            self._possible(self._memories[each], self._waiting[each][1]) for each in (rank, rank ^ 1)
        )

    def _describe(self, rank: int) -> str:
        """Condition that the warp of a CTA waits for, in words."""
        if rank not in self._waiting:
            return f"waits for a warp of CTA {rank} that executes {self.name}.cta_group::2 before it"
        if (rank ^ 1) in self._waiting:
            return f"waits for free TMEM columns: {self.name}.cta_group::2 of {self._waiting[rank][1][-1]} columns"
        return f"waits for a warp of CTA {rank ^ 1} to execute {self.name}.cta_group::2 as well"


def pair_operations(memories: list[TensorMemory]) -> dict[str, PairOperation]:
    """The operations of one pair, by name; ``memories``: of all CTAs of the cluster."""

    def deallocate(memory: TensorMemory, operands: Operands) -> int:
        memory.dealloc(*operands)
        return 0

    return {
        "alloc": PairOperation("tcgen05.alloc", memories, lambda memory, operands: memory.alloc(*operands),
                               lambda memory, operands: memory.has_room(*operands)),
        "dealloc": PairOperation("tcgen05.dealloc", memories, deallocate),
    }  # fmt: skip
