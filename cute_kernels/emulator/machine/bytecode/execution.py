"""A kernel to bytecode, and the warps that run it.

The bytecode walks the basic blocks of the flow graph; what a block computes is a graph of values (`block`). Between
runs a warp is a block of bytes: header, executions per block, registers, constants of the warp. Whatever the core does
not know (barriers that have to wait, rare operations, every error) is a call of a Python function, in program order;
the core only ever skips the way there.

Inside a call of `warp_run` a warp executes until it has to wait, has used up its budget of blocks, or exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cute_kernels.common import interrupts
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.isa.ptx.flow import Block, Flow
from cute_kernels.emulator.isa.ptx.program import Kernel
from cute_kernels.emulator.isa.ptx.register_hazards import accumulators_in_flight
from cute_kernels.emulator.machine.bytecode.context import OF_CLUSTER
from cute_kernels.emulator.machine.bytecode.emitter import BlockEmitter
from cute_kernels.emulator.machine.bytecode.lowering import Lowering, lower
from cute_kernels.emulator.machine.bytecode.program import Bytecode, Program, row_bytes
from cute_kernels.emulator.machine.bytecode.sites import Site, bound
from cute_kernels.emulator.machine.graph.values import OfWarp, Value
from cute_kernels.emulator.machine.state import memory_tables
from cute_kernels.emulator.machine.state.tmem import rectangle
from cute_kernels.emulator.machine.state.warp import NamedWait, PhaseWait, Wait, until_progress
from cute_kernels.emulator.machine.units.matrix.mma_sync import Form as MmaForm
from cute_kernels.emulator.machine.units.matrix.mma_sync import table as mma_table
from cute_kernels.emulator.machine.units.matrix.wgmma import Form as WgmmaForm
from cute_kernels.emulator.machine.units.sm import Cluster, Warp
from cute_kernels.emulator.observe.meter import CoreMeter
from cute_kernels.emulator.options import Options

_Header, _LogEntry = STRUCTURES["WarpHeader"], STRUCTURES["LogEntry"]
_HEADER = ctypes.sizeof(_Header)  # bytes before the counts
_GO, _WAIT, _ERROR, _EXIT = (CONSTANTS[name] for name in ("GO", "WAIT", "ERROR", "EXIT"))
_SITES = tuple(CONSTANTS[f"SITE_{name}"] for name in ("EXIT", "WAIT", "STOP"))
_DECIDES = _Header.waiting.offset  # bytes of the header that decide what the warp does next


@dataclass(frozen=True)
class Translation:
    """A kernel in bytecode."""

    kernel: Kernel
    flow: Flow
    static_shared: int  # bytes of statically sized shared variables; dynamic shared memory follows them
    bytecode: Bytecode
    sites: tuple[Site, ...]  # places that call Python
    registers: slice  # the part of a warp's state with the registers
    slots: dict[str, tuple[int, int, bool]]  # (offset, bits, uniform) of each register that lives longer than a block
    # (function of the warp, offset, bits, uniform) of each constant of a warp
    constants: tuple[tuple[OfWarp, int, int, bool], ...]
    # of those that clusters of one CTA differ in, (offset, which of `context.OF_CLUSTER`)
    of_cluster: tuple[tuple[int, int], ...]
    rows: int  # of the exchange area
    local_bytes: int  # of local memory, in each lane
    wgmmas: tuple[WgmmaForm, ...]  # forms of its wgmma.mma_async
    warp_mmas: tuple[MmaForm, ...]  # forms of its mma.sync that the core executes
    # where results go that no register holds any more; None if only wgmmas touch accumulators in flight
    spare: int | None


@functools.lru_cache(maxsize=64)
def translate(
    ptx: str, kernel: str | None, block_shape: tuple[int, int, int], check: bool = True, registers: bool = True,
    single: bool = False,
) -> Translation:
    """One kernel of a PTX text in bytecode (cached by its arguments); arguments and errors as for `lowering.lower`."""
    with _collecting_later():
        return _Translator(lower(ptx, kernel, block_shape, check, registers, single), check).run()


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """No collection of garbage, which takes as long as the translation where large libraries are loaded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Translator:
    def __init__(self, lowering: Lowering, detectors: bool) -> None:
        self.lowering = lowering
        self.flow: Flow = lowering.flow
        header = _HEADER + 8 * (len(self.flow.blocks) + 1)
        self.start = -(-header // 64) * 64
        self.program = Program(self.start, detectors)
        for _ in _SITES:
            self.program.site(Site(None))
        self.in_flight = accumulators_in_flight(self.flow)

    def run(self) -> Translation:
        flow, program = self.flow, self.program
        places: dict[str, tuple[int, int, bool]] = {}
        for block in flow.blocks:  # registers first, so that they lie together
            live = (block.live_in | block.live_out) - places.keys()
            for name in sorted(live):
                bits, uniform = self.lowering.bits(name), name not in flow.varying
                places[name] = program.layout.slot(name, bits, uniform), bits, uniform
        registers = slice(self.start, program.layout.size)
        starts = [self._block(block) for block in flow.blocks]
        starts.append(len(program.code))
        program.put("exit")
        spare = None if self.in_flight is None else program.layout.new(row_bytes(32, False))
        slots = program.layout.slots
        constants = tuple(
            (of_warp, slots[name], bits, uniform) for name, of_warp, bits, uniform in program.layout.of_warps
        )
        local_bytes = self.lowering.context.local_bytes
        of_cluster = tuple((slots[name], which) for name, which in OF_CLUSTER.items() if name in slots)
        return Translation(
            kernel=self.lowering.kernel, flow=flow, static_shared=self.lowering.context.static_shared,
            bytecode=Bytecode(program, starts), sites=tuple(program.sites), registers=registers, slots=places,
            constants=constants, of_cluster=of_cluster, rows=program.rows, local_bytes=local_bytes,
            wgmmas=tuple(program.wgmmas), warp_mmas=tuple(self.lowering.context.warp_mmas), spare=spare,
        )

    def _block(self, block: Block) -> int:
        """Index of the first instruction of a block."""
        program, start = self.program, len(self.program.code)
        builder, condition = self.lowering.block(block)
        count = _HEADER + 8 * block.index
        program.put("block", a=count, b=block.end - block.start, c=int(not block.continues), imm=block.index)
        ages = None if self.in_flight is None else dict(self.in_flight[block.index])
        emitter = BlockEmitter(program, builder, block.index, ages)
        emitter.emit(block.live_out, condition)
        self._branch(emitter, block, condition)
        return start

    def _branch(self, emitter: BlockEmitter, block: Block, condition: Value | None) -> None:
        divergent = int(block.divergent)
        if condition is None:
            self.program.put("jump", b=block.successors[0], d=divergent)
            return
        taken, following = block.successors
        lanes = not condition.uniform
        meet = self.flow.reconvergence[block.index] if lanes else 0
        where = emitter.operand(condition, lanes)
        self.program.put("branch", lanes=lanes, a=where, b=taken, c=following, d=divergent, imm=meet)


class Execution:
    """The code of one launch: what its warps share, with the exchange area and the sites that work on it. ``ptx``,
    ``kernel``, ``block``: as for `translate`; ``options``: which detectors look."""

    def __init__(self, ptx: str, kernel: str | None, block: tuple[int, int, int], options: Options) -> None:
        self.debugger = options.debugger
        single = self.debugger is not None
        translation = translate(ptx, kernel, block, options.detectors, options.looks_for("registers"), single)
        self.translation = translation
        self.bytecode = translation.bytecode.copy() if single else translation.bytecode
        self.flow, self.kernel, self.static_shared = translation.flow, translation.kernel, translation.static_shared
        self.area, self.exchange = memory_tables.exchange_area(translation.rows)
        words = memoryview(self.area).cast("B").cast("Q")
        row = memory_tables.ROW
        lanes = {8 * size: self.area.view(f"u{size}").reshape(-1, row // size)[:, :32] for size in (1, 2, 4, 8)}
        own = [self._exit, self._wait, self._stop]  # in the order of `_SITES`
        self.sites = own + [bound(site, words, lanes) for site in translation.sites[len(_SITES) :]]
        self.places = [-1 if site.instruction is None else site.instruction.index for site in translation.sites]
        self.current: WarpExecution | None = None
        self.tables: dict[Cluster, memory_tables.MemoryTables] = {}
        # The callback refers to this object: a cycle, but collected like any other.
        self.callback = memory_tables.CALLBACK(self.call)
        self.run = library().warp_run
        self.callback_address = ctypes.cast(self.callback, ctypes.c_void_p).value

    def start(self, warp: Warp) -> WarpExecution:
        """The execution of one warp, before its first instruction."""
        cluster = warp.cluster
        if cluster not in self.tables:
            tables = memory_tables.MemoryTables(cluster.barriers, cluster.gmem, cluster.params, _flags(cluster))
            self.tables = {cluster: tables}  # one cluster runs at a time
            tables.warp_mmas = mma_table(self.translation.warp_mmas, cluster.arithmetic)
            tables.header.warp_mmas = ctypes.addressof(tables.warp_mmas)
            spare = self.translation.spare
            cells = 0 if spare is None else len(self.bytecode.template) // CONSTANTS["REGISTER_CELL"]
            cluster.wgmma.begin(self.translation.wgmmas, cells, spare or 0)
            if cluster.meter is not None:
                cluster.meter.core = CoreMeter(tables.header, self.translation.kernel.instructions)
        return WarpExecution(self, warp, self.tables[cluster])

    def call(self, site: int, mask: int) -> int:
        """Executes a site for the running warp; the core calls it."""
        current = self.current
        try:
            current.publish()
            current.place = self.places[site]
            result = self.sites[site](current.warp, mask)
            if interrupts.noted:
                current.header.budget = 1  # gives way at the next block
            if result == _WAIT:
                current.waits[current.header.mask] = current.warp.wait
            return result
        except BaseException as error:  # noqa: BLE001 - must not unwind through the core; `WarpExecution.send` raises it
            current.error = error
            return _ERROR

    def _exit(self, warp: Warp, mask: int) -> int:
        warp.live = self.current.header.live
        warp.cta.thread_exited()
        return _GO

    def _wait(self, warp: Warp, mask: int) -> int:
        self.current.wait()
        return _WAIT

    def _stop(self, warp: Warp, mask: int) -> int:
        self.current.place = self.flow.blocks[self.current.header.pc].start
        self.debugger.stops(warp)
        return _GO


def _flags(cluster: Cluster) -> int:
    flags = memory_tables.STATES if cluster.options.detectors else 0
    if cluster.options.spurious_try_wait_failures or any(step.kind == "t" for step in cluster.options.steps):
        flags |= memory_tables.SPURIOUS
    if cluster.tracker is not None:
        flags |= sum(memory_tables.LOG.values()) | memory_tables.TENSOR_LOAD
    return flags


class WarpLog:
    """The log of one warp's execution: accesses, which the race detector is told in program order. The core works
    it off (``core/log.c``); what it finds late is worded as of the entry. ``instruction``: index of the one whose entry
    is being reported, or was when that raised; -1: none; ``steps``: the warp's `WarpHeader.steps` at that entry."""

    def __init__(self, warp: Warp, tables: memory_tables.MemoryTables) -> None:
        self.warp, self.tables = warp, tables
        self.instruction, self.steps = -1, 0

    def enter(self) -> None:
        """The warp is about to execute: what it logs is its own."""
        tracker = self.warp.cluster.tracker
        if tracker is not None:
            self.tables.header.context = ctypes.addressof(tracker.context(self.warp.agent))

    def report(self) -> None:
        """Tells the race detector what is in the log, which is empty afterwards. Raises Race: see `races.tracker` and
        `races.tensor_memory`."""
        if not self.tables.header.log_used:
            return
        log, tracker = self.tables.take_log(), self.warp.cluster.tracker
        start = 0
        while (start := tracker.observe(self.warp.agent, log, start, self._stand_at)) < len(log):
            self._load_tensor(_LogEntry.from_buffer(log[start]))
            start += 1
        self.instruction = -1

    def _stand_at(self, entry: ctypes.Structure) -> None:
        self.instruction, self.steps = entry.instruction, entry.steps

    def _load_tensor(self, entry: ctypes.Structure) -> None:
        """tcgen05.ld that is not in order at once."""
        self._stand_at(entry)
        address, index = entry.addresses[:2]
        tensor = self.warp.cluster.tracker.tensor
        tensor.load(self.warp.agent, rectangle(address, "32x32b", entry.argument), index)


class WarpExecution:
    """The execution of one warp by the core: what a scheduler needs of it. ``ran``: what its turn has ended with, and
    what it then waits for, where that was before `send`; or None."""

    def __init__(self, launch: Execution, warp: Warp, tables: memory_tables.MemoryTables) -> None:
        translation = launch.translation
        self.launch, self.warp, self.tables = launch, warp, tables
        self.log = WarpLog(warp, tables)
        template = translation.bytecode.template
        self.state, self.address = memory_tables.exchange_area(len(template) // memory_tables.ROW + 1)
        self.state[: len(template)] = template
        self.header = _Header.from_buffer(self.state)
        blocks = len(translation.flow.blocks) + 1
        self.counts = self.state[_HEADER : _HEADER + 8 * blocks].view(np.int64)
        warp.counts = self.counts
        self.header.number, self.header.rank, self.header.index = warp.number, warp.cta.rank, warp.index
        self.header.mask, self.header.live = warp.live, warp.live
        self.header.meet, self.header.top = CONSTANTS["NO_MEET"], CONSTANTS["NO_FRAME"]
        if translation.local_bytes:
            warp.local = np.zeros((32, translation.local_bytes), np.uint8)
        self.error: BaseException | None = None
        self.ran: tuple[int, Wait | None] | None = None
        self.place = -1
        self.waits: dict[int, Wait] = {}  # of paths, by their lanes
        self._bulk: np.ndarray | None = None
        for of_warp, offset, bits, uniform in translation.constants:
            self._set(offset, bits, uniform, of_warp(warp))

    def _set(self, offset: int, bits: int, uniform: bool, value: int) -> None:
        if uniform or bits == 1:
            self.state[offset : offset + 8] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)
        else:
            lanes = self.state[offset : offset + 4 * bits].view(f"u{bits // 8}")
            lanes[:] = np.asarray(value).view(lanes.dtype)

    def send(self, budget: int) -> None:
        """Runs until the warp waits or has executed ``budget`` blocks. Raises StopIteration: it has exited."""
        launch = self.launch
        launch.current = self
        self.log.enter()
        self.header.budget = budget
        local = self.launch.translation.local_bytes
        if local:
            self.tables.header.local, self.tables.header.local_bytes = self.warp.local.ctypes.data, local
        meter = self.warp.cluster.meter
        if meter is not None:
            meter.core.counts_for(self.warp)
        if self.ran is not None:
            (status, self.warp.wait), self.ran = self.ran, None
        else:
            status = launch.run(
                launch.bytecode.address, self.address, launch.exchange, self.tables.address, launch.callback_address
            )
        if status == _ERROR:
            error, self.error = self.error or self.warp.cluster.barriers.error, None
            self.warp.cluster.barriers.error = None
            raise error
        self.publish()
        if self.header.waits:
            self.wait()
            return
        if self.header.waiting:
            paths = self.header, *self.header.paths[: self.header.parted]
            self.waits = {path.mask: self.waits[path.mask] for path in paths if not path.gathers}
            waits = tuple(self.waits.values())
            self.warp.wait = Wait(
                "diverged", lambda: any(wait.ready() for wait in waits),
                lambda: "is diverged: " + "; ".join(wait.describe() for wait in waits), may_time_out=True, waits=waits,
            )
            self.header.waiting = 0
            return
        if self.header.entered:  # its turn is over: what lanes wait for that have parted does not hold the others up
            self.warp.wait = None
        if status == _EXIT:
            self.place = -1
            raise StopIteration

    def stand_at(self, place: int) -> None:
        """The core is in this instruction, and asks Python."""
        self.publish()
        self.place = place

    def stores_in_bulk(self, lane: int, groups: int) -> None:
        """A lane has bulk groups; ``groups``: address of its `BulkThread`."""
        if self._bulk is None:
            self._bulk = np.zeros(CONSTANTS["LANES"], np.int64)
            self.header.bulk = self._bulk.ctypes.data
        self._bulk[lane] = groups
        self.header.storing |= 1 << lane

    def wait(self, place: int | None = None) -> None:
        """The core has found out what the warp waits for, in the instruction of an index (None: the latest)."""
        header, warp = self.header, self.warp
        waits, header.waits = header.waits, 0
        self.place = self.tables.header.place if place is None else place
        barriers = warp.cluster.barriers
        if waits in (CONSTANTS["WAITS_PHASE"], CONSTANTS["WAITS_STATE"]):
            warp.wait = PhaseWait(barriers, header.mbarrier, header.awaited, waits == CONSTANTS["WAITS_PHASE"])
        elif waits == CONSTANTS["WAITS_POLLING"]:
            warp.wait = until_progress(warp.cluster, f"(mbarrier.test_wait) {barriers.describe(header.mbarrier)}")
        elif waits == CONSTANTS["WAITS_BULK"]:
            thread = warp.cta.rank, warp.index, header.awaited >> 1
            warp.wait = warp.cluster.bulk.wait(thread, header.newest, bool(header.awaited & 1))
        elif waits == CONSTANTS["WAITS_COPIES"]:
            warp.wait = warp.cluster.copies.wait(warp, header.newest, header.awaited)
        elif waits == CONSTANTS["WAITS_GROUPS"]:
            warp.wait = warp.cluster.wgmma.wait(warp.cta.rank, warp.index, header.awaited, header.newest)
        else:
            warp.wait = NamedWait(warp.cta.named.barrier(header.awaited), warp.cta.named.waits_in(warp.index))

    def publish(self) -> None:
        """Tells the units what the core did since: effects, and accesses that somebody observes."""
        header, cluster = self.tables.header, self.warp.cluster
        cluster.polls += header.polls
        header.polls = 0
        if header.progress:
            cluster.progress += header.progress
            header.progress = 0
        self.log.report()

    @property
    def executing(self) -> int:
        """Index of the instruction that has called Python last, or whose entry in the log is looked at; -1: none."""
        return self.log.instruction if self.log.instruction >= 0 else self.place

    @property
    def steps(self) -> int:
        """Instructions executed up to the end of its block: the one it is in, or that of the log's entry looked at."""
        return self.log.steps if self.log.instruction >= 0 else self.header.steps

    @property
    def counted(self) -> bool:
        """Whether it gave way behind the count of its block."""
        return self.header.entered != 0 and self.log.instruction < 0

    @property
    def standing(self) -> int:
        """The basic block that the warp is in."""
        return self.header.pc

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of what the core changes of it."""
        state = self.address, len(self.launch.translation.bytecode.template)
        local = self.warp.local
        return [state] if local is None else [state, (local.ctypes.data, local.nbytes)]

    def snapshot(self) -> tuple[bytes, ...]:
        """Everything that decides what the warp does next."""
        return self.state[:_DECIDES].tobytes(), self.state[self.launch.translation.registers].tobytes()
