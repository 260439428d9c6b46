"""Wgmmas in the core: what it knows of those of a cluster, and how Python takes over what is in flight.

Where operations take effect at once (``completion="eager"``) the core issues, executes and waits for wgmmas
(``core/wgmma.c``). Operands are found by Python when a descriptor is first used (`CoreWgmmas.learn`). Whatever the core
leaves makes Python take over the operations of all warpgroups for good (`CoreWgmmas.take_over`): an error that only
Python words, or a case that is not worth more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.observe.races.operations import Operation as Watched
from cute_kernels.emulator.observe.races.sync_point import ROWS, Columns, widened
from cute_kernels.emulator.observe.races.tracker import JointOperation
from cute_kernels.emulator.state.async_engine import AsyncOp
from cute_kernels.emulator.state.memory_tables import MemoryTables
from cute_kernels.emulator.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.units.matrix.wgmma import (
    WARPS,
    Form,
    Operation,
    Part,
    WarpGroups,
    described,
    operand_of,
    operation_text,
)

if TYPE_CHECKING:
    from cute_kernels.emulator.observe.races.shadow import Shadow
    from cute_kernels.emulator.units.surroundings import Surroundings

_Warpgroup, _FormEntry, _OperandEntry, WgmmaWork = (
    STRUCTURES[name] for name in ("Warpgroup", "WgmmaForm", "WgmmaOperand", "WgmmaWork")
)
_OPERANDS, _KEY, _RING, _GROUPS = (
    CONSTANTS[name] for name in ("WGMMA_OPERANDS", "OPERAND_KEY", "WGMMAS", "WGMMA_GROUPS")
)
_MOST_PLACES = 4096  # that are kept


@dataclass(frozen=True)
class Site:
    """A wgmma.mma_async of a kernel in bytecode.

    Attributes:
        form: what it says.
        places: indices of the accumulators' 32-bit words in a warp's state.
    """

    form: Form
    places: np.ndarray


class _Clocks:
    """Knowledge of warps that issued operations of a warpgroup, int32 [operations, rows, columns] of `WgmmaKnown`."""

    def __init__(self, group: ctypes.Structure, columns: Columns) -> None:
        self._group = group
        self.array = columns.matrix(self, _RING * ROWS).reshape(_RING, ROWS, -1)
        self._locate()

    def widen(self, width: int) -> None:
        self.array = widened(self.array, width)
        self._locate()

    def _locate(self) -> None:
        self._group.width = self.array.shape[-1]
        self._group.clocks = self.array.ctypes.data


class CoreWgmmas:
    """The wgmmas of a cluster, as long as the core executes them all.

    Args:
        cluster: whose they are.
        tables: where the core finds them.
        sites: the kernel's wgmmas, by number.
    """

    def __init__(self, cluster: Surroundings, tables: MemoryTables, sites: Sequence[Site]) -> None:
        self._cluster, self._header, self._sites = cluster, tables.header, sites
        self._of_cta = -(-max(len(cta.warps) for cta in cluster.ctas) // WARPS)
        self._groups = (_Warpgroup * (self._of_cta * len(cluster.ctas)))()
        self._entries = (_OperandEntry * (2 * _OPERANDS))()  # of B, and of A
        self._places: list[ctypes.Structure] = []  # of operands that the core may use
        epochs = None if cluster.tracker is None else cluster.tracker.epochs
        texts = [0 if epochs is None else epochs.text(site.form.text) for site in sites]
        entries = (described(site.form, cluster.arithmetic, text) for site, text in zip(sites, texts))
        self._forms = (_FormEntry * len(sites))(*entries)
        kinds: dict[tuple[int, int, bool], int] = {}
        for entry, site in zip(self._forms, sites):
            entry.kinds[:] = [kinds.setdefault(site.form.layout(which), len(kinds) + 1) for which in range(2)]
        self._clocks: dict[int, _Clocks] = {}
        for number, group in enumerate(self._groups):
            group.data, group.states = cluster.ctas[number // self._of_cta].shared.addresses()
        header = self._header
        header.wgmma_forms, header.wgmma_operands = ctypes.addressof(self._forms), ctypes.addressof(self._entries)
        header.warpgroups, header.warpgroups_of_cta = ctypes.addressof(self._groups), self._of_cta
        cluster.engine.words[CONSTANTS["WORK_WGMMA"]] = self._work

    def learn(self, rank: int, warp: int, number: int, descriptors: Sequence[int]) -> None:
        """The core can issue this operation from now on.

        Args:
            rank, warp: who issues it.
            number: of its site.
            descriptors: of B, and of A where that is in shared memory.

        Raises:
            IllegalAccess: an operand outside of shared memory.
            UnsupportedPTX: a descriptor that is none.
        """
        cluster, form = self._cluster, self._sites[number].form
        if len(self._places) > _MOST_PLACES:
            return
        if cluster.tracker is not None:
            cluster.tracker.epochs.make_room()
            self._make_room(cluster.tracker.shared[rank])
        for which, descriptor in enumerate(descriptors):
            where = operand_of(form, which, descriptor, cluster.ctas[rank].shared).where
            starts, nbytes = where.starts, CHUNK
            if cluster.tracker is not None:
                starts, nbytes = cluster.tracker.unit.merged(starts, nbytes)
            self._places.append((where, starts))
            key = descriptor - (descriptor >> 63 << 64), self._forms[number].kinds[which]
            slot = library().key_slot((ctypes.c_int64 * _KEY)(*key), _KEY, _OPERANDS)
            entry = self._entries[which * _OPERANDS + slot]
            entry.key[:], entry.places, entry.starts = key, where.address, starts.ctypes.data
            entry.count, entry.nbytes = len(starts), nbytes
        group = rank * self._of_cta + warp // WARPS
        if cluster.tracker is not None and group not in self._clocks:
            columns = cluster.tracker.columns
            self._groups[group].column = columns.named(("wgmma", rank, warp // WARPS))
            self._clocks[group] = _Clocks(self._groups[group], columns)

    def _make_room(self, shadow: Shadow) -> None:
        """The core records reads where there are layers for them; warpgroups that read one operand take one each."""
        for plane in (shadow.coarse, shadow.fine):
            if plane is not None and len(plane.reads) <= self._of_cta:
                plane.expect_reads(len(plane.reads) + 1)

    def end_of_wait(self, rank: int, warp: int, newest: int) -> int:
        """How many operations of its warpgroup have to be complete for a wait of a warp to end."""
        mine = self._groups[rank * self._of_cta + warp // WARPS].warps[warp % WARPS]
        older = mine.committed - mine.waited - newest
        return mine.ends[(mine.waited + older - 1) % _GROUPS] if older > 0 else 0

    def _unfinished(self, rank: int, warp: int, newest: int) -> range:
        """Numbers of the operations that a warp would wait for."""
        complete = min(each.issued for each in self._groups[rank * self._of_cta + warp // WARPS].warps)
        return range(complete, self.end_of_wait(rank, warp, newest))

    def _work(self, address: int) -> AsyncOp:
        """An operation that all warps have issued, for observers."""
        work = WgmmaWork.from_address(address)
        form = self._sites[work.form].form
        queue = "wgmma", work.rank, work.warpgroup
        return AsyncOp(queue, None, operation_text(form, work.rank, range(WARPS)), name=form.name)

    def complete(self, rank: int, warp: int, newest: int) -> bool:
        """Completes groups like `WgmmaUnit.complete`."""
        return not self._unfinished(rank, warp, newest)

    def outstanding(self, rank: int, warp: int, newest: int) -> tuple[int, str]:
        """Outstanding groups like `WgmmaUnit.outstanding`."""
        unfinished, group = self._unfinished(rank, warp, newest), self._groups[rank * self._of_cta + warp // WARPS]
        if not unfinished:
            return 0, ""
        first = unfinished[0]
        form = self._sites[group.operations[first % _RING].form].form
        return len(unfinished), operation_text(form, rank, self._issued(group, first))

    @staticmethod
    def _issued(group: ctypes.Structure, number: int) -> list[int]:
        """The warps of a warpgroup that have issued an operation."""
        return [member for member in range(WARPS) if group.warps[member].issued > number]

    def _operation(self, rank: int, warpgroup: int, number: int) -> Operation:
        """An operation of the core, for Python."""
        index = rank * self._of_cta + warpgroup
        group, cluster = self._groups[index], self._cluster
        entry = group.operations[number % _RING]
        site, b = self._sites[entry.form], entry.b % (1 << 64)
        form = site.form
        a = None if form.a_in_registers else entry.a % (1 << 64)
        issued = self._issued(group, number)
        operation = Operation(form, rank, a, b, bool(entry.accumulate))
        operation.done = len(issued) == WARPS
        operation.observed = any(each.observed > number for each in group.warps)
        operation.operands = [
            operand_of(form, which, descriptor, cluster.ctas[rank].shared)
            for which, descriptor in enumerate((b, a)) if descriptor is not None
        ]  # fmt: skip
        for member in issued:
            part = entry.parts[member]
            registers = cluster.ctas[rank].warps[WARPS * warpgroup + member].code.registers(site.places)
            given = np.array(part.a, np.uint32).reshape(-1, 32) if a is None else a
            operation.parts[member] = Part(registers, given)
        if cluster.tracker is not None:
            clocks = np.zeros_like(self._clocks[index].array[0])
            library().wgmma_tell(ctypes.addressof(group), number, clocks.ctypes.data)
            watched = Watched(entry.identity, group.column, clocks, -1, -1)
            operation.watched = JointOperation(watched, number + 1)
        return operation

    def take_over(self) -> tuple[dict[tuple[int, int], list[Operation]], dict[tuple[int, int], WarpGroups]]:
        """Ends the core's part.

        Returns:
            Per (rank, warpgroup) the operations that some of its warps have issued and some have not, and per
            (rank, warp) its groups.
        """
        self._header.warpgroups = None
        partial: dict[tuple[int, int], list[Operation]] = {}
        warps: dict[tuple[int, int], WarpGroups] = {}
        order: dict[tuple[int, int], int] = {}
        for index, group in enumerate(self._groups):
            rank, warpgroup = divmod(index, self._of_cta)
            first = min(each.observed for each in group.warps)
            last = max(each.issued for each in group.warps)
            operations = {number: self._operation(rank, warpgroup, number) for number in range(first, last)}
            partial[rank, warpgroup] = [operation for operation in operations.values() if not operation.done]
            for member, each in enumerate(group.warps):
                ends = [each.ends[number % _GROUPS] for number in range(each.waited, each.committed)]
                borders = [each.observed, *ends, each.issued]
                lists = [[operations[n] for n in range(*pair)] for pair in zip(borders, borders[1:])]
                warps[rank, WARPS * warpgroup + member] = WarpGroups(lists[-1], lists[:-1])
                order[rank, WARPS * warpgroup + member] = each.order
            if self._cluster.tracker is not None and last:
                self._cluster.tracker.note_joint(group.column, last)
        by_order = sorted(order, key=order.get)  # reports name who issued first
        queues = dict.fromkeys((rank, warp // WARPS) for rank, warp in by_order)
        return {key: partial[key] for key in queues}, {key: warps[key] for key in by_order}
