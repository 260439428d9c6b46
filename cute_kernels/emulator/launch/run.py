"""The grid: checks a launch, has its clusters executed, and adds up what they did."""

from __future__ import annotations

import functools
import math
import operator
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels import interrupts
from cute_kernels.emulator.bytecode.execution import Execution
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.launch.arguments import extents, pack_arguments, parameter_block, require_type
from cute_kernels.emulator.launch.clusters import ClusterWork, Dependent, at_once, in_turn, known_dependence
from cute_kernels.emulator.launch.residents import capacity
from cute_kernels.emulator.observe.counters import Counters, UnitCounters, UnitCounts
from cute_kernels.emulator.observe.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.observe.trace import recording
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.ptx.decode import Kernel, Variable, parse
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.state.register_pool import at_entry
from cute_kernels.emulator.state.smem import SYSTEM_BYTES, gaps
from cute_kernels.emulator.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.units.sm import Cluster, LaunchFacts

MAX_SHARED_BYTES = 232_448  # per CTA on sm_90 and sm_100, without the system's 1024
_MOST_CTAS, _MOST_THREADS = (2**31 - 1, 65_535, 65_535), (1024, 1024, 64)  # per dimension, compute capability >= 3.0
GRID_WORKSPACE = 64  # bytes that cooperative groups find by %envreg1 and 2: their size, a barrier of 32 bits
_MOST_RANKS = 16  # CTAs per cluster, with the non-portable size allowed


@dataclass(frozen=True)
class Report:
    """Work of a launch, counted.

    Attributes:
        warp_instructions: executed by all warps; ``by_role`` and ``by_opcode`` split them.
        seconds: of emulation, translation excluded.
        clusters: number of clusters that ran (clusters cancelled by cluster launch control do not run).
        tma_bytes_loaded, tma_bytes_stored: box bytes.
        mma_instructions: tcgen05.mma executed, wgmma.mma_async, once per warpgroup, and mma.sync, once per warp.
        shared_bytes: per CTA, static and dynamic.
        tensor_columns: most tensor-memory columns allocated in one CTA.
        units: the work of every unit, or None without `Options.counters`.
        processes: how many executed clusters at the same time.
        one_process: why clusters were executed one after the other although `Options.processes` allowed more; "" where
            they were not, or one process was asked for.
    """

    warp_instructions: int
    by_role: dict[str, int]
    by_opcode: dict[str, int]
    seconds: float
    clusters: int
    tma_bytes_loaded: int
    tma_bytes_stored: int
    mma_instructions: int
    shared_bytes: int
    tensor_columns: int
    units: UnitCounts | None = None
    processes: int = 1
    one_process: str = ""


def _carrying_ptx(function: Callable[..., Report]) -> Callable[..., Report]:
    """Errors of a launch carry its PTX."""

    @functools.wraps(function)
    def wrapper(ptx: str, *arguments: Any, **keywords: Any) -> Report:
        try:
            return function(ptx, *arguments, **keywords)
        except EmulatorError as error:
            name = keywords["kernel"] if "kernel" in keywords else next(iter(arguments), None)
            error.attach(ptx, kernel=name)
            raise

    return wrapper


@_carrying_ptx
def run(
    ptx: str,
    kernel: str | None = None,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    cluster: int | Sequence[int] = 1,
    dynamic_smem: int = 0,
    params: bytes | Sequence[bytes] = b"",
    args: Sequence[Any] | None = None,
    memory: GlobalMemory | None = None,
    options: Options | None = None,
    progress: Callable[[int, int], None] | None = None,
    programmatic: bool = False,
    cooperative: bool = False,
) -> Report:
    """Executes a launch.

    Args:
        ptx: PTX text.
        kernel: entry name; None when there is only one.
        grid: CTAs (x, y, z), a multiple of ``cluster`` in each dimension. Here as for the next two, what is left out is
            1, and an integer is x.
        block: threads per CTA.
        cluster: CTAs per cluster.
        dynamic_smem: bytes of dynamic shared memory.
        params: the parameter block, or one byte string per kernel parameter.
        args: instead of ``params``, one Python value per kernel parameter: `arguments.pack_arguments` says which.
        memory: what global memory the launch may touch, besides tensors and arrays in ``args``.
        options: schedule and detectors.
        progress: called with (clusters done, clusters to run), first with 0; with ``options.processes`` again with 0
            where clusters that have been executed turn out to depend on each other.
        programmatic: launched with programmatic stream serialisation, behind the launch that ran last with the same
            ``memory``: what is not ordered after griddepcontrol.wait races with what that launch did.
        cooperative: a cooperative launch: the chip has to hold all clusters at once, and the grid has a barrier.

    Returns:
        Counts and timings.

    Raises:
        ValueError: a launch shape, parameter block or argument that does not fit the kernel.
        TypeError: an argument of another type.
        EmulatorError: see `cute_kernels.emulator.errors`; the message ends with where it happened, and ``ptx`` of the
            error is the text.
    """
    require_type("ptx", ptx, str, "PTX text, a str (of a file: pathlib.Path(...).read_text()),")
    require_type("kernel", kernel, (str, type(None)), "the name of an entry, a str, or None")
    require_type("memory", memory, (GlobalMemory, type(None)), "a GlobalMemory or None")
    require_type("options", options, (Options, type(None)), "an Options or None")
    require_type("programmatic", programmatic, bool, "a bool")
    require_type("cooperative", cooperative, bool, "a bool")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a {type(progress).__name__}; a function of two ints or None is needed")
    options = options or Options()
    execution = Execution(ptx, kernel, extents("block", block), options)
    memory = memory if memory is not None else GlobalMemory()
    if args is not None:
        if params:
            raise ValueError("params and args are both given; args are made into params")
        params = pack_arguments(execution.kernel, args, memory)
    launch = Launch(execution, grid, block, cluster, dynamic_smem, params, memory, options, parse(ptx).target)
    if launch.races is not None and programmatic and memory.accesses is not None:
        launch.races = memory.accesses.successor()
    if launch.races is not None:
        launch.races.follow(execution.flow)
    memory.accesses = launch.races
    launch.place_variables(ptx)
    if cooperative:
        launch.cooperate()
    indices = launch.cluster_indices()
    launch.waiting.extend(indices)
    counters = Counters(execution.flow)
    totals = {"loaded": 0, "stored": 0, "mmas": 0, "columns": 0, "clusters": 0}
    meter = UnitCounters() if options.counters else None
    processes = 1
    start = time.perf_counter()
    if progress is not None:
        progress(0, len(indices))

    def add(work: ClusterWork) -> None:
        counters.merge(work.executions)
        if meter is not None:
            meter.merge(work.meter)
        for name, done in (("loaded", work.loaded), ("stored", work.stored), ("mmas", work.mmas), ("clusters", 1)):
            totals[name] += done
        totals["columns"] = max(totals["columns"], work.columns)

    one_process = known_dependence(launch) if options.processes > 1 else ""
    with interrupts.deferred():
        if options.processes > 1 and not one_process:
            try:
                for work in at_once(launch, progress):
                    add(work)
                processes = min(options.processes, len(indices))
            except Dependent as dependent:
                one_process = str(dependent)
                if progress is not None:
                    progress(0, len(indices))
        with recording(options.trace) as timeline:
            for work in in_turn(launch, timeline):
                add(work)
                if progress is not None:
                    progress(len(indices) - len(launch.waiting), len(indices))
    units = None
    if meter is not None:
        ctas = totals["clusters"] * math.prod(launch.cluster)
        units = meter.result(ctas, counters, execution.kernel.instructions)
    by_opcode = counters.by_opcode()
    by_warps = sum(count for opcode, count in by_opcode.items() if opcode.split(".")[0] == "mma")
    return Report(
        warp_instructions=counters.total,
        by_role=counters.by_role,
        by_opcode=by_opcode,
        seconds=time.perf_counter() - start,
        clusters=totals["clusters"],
        tma_bytes_loaded=totals["loaded"],
        tma_bytes_stored=totals["stored"],
        mma_instructions=totals["mmas"] + by_warps,
        shared_bytes=launch.shared_bytes - SYSTEM_BYTES,
        tensor_columns=totals["columns"],
        units=units,
        processes=processes,
        one_process=one_process,
    )


def _cells(variable: Variable) -> np.ndarray:
    """Host memory that stands for the device memory of a variable, with its initial value: uint8 [bytes].

    Raises:
        ValueError: there is not so much memory.
    """
    try:
        store = np.zeros(variable.nbytes + variable.align, np.uint8)
    except MemoryError:
        raise ValueError(
            f"the .{variable.space} variable {variable.name} has {variable.nbytes} bytes, for which there is no memory"
        ) from None
    skip = -store.ctypes.data % variable.align
    cells = store[skip : skip + variable.nbytes]
    cells[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
    return cells


class Launch:
    """A checked launch; makes its clusters."""

    def __init__(
        self,
        execution: Execution,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        cluster: int | Sequence[int],
        dynamic_smem: int,
        params: bytes | Sequence[bytes],
        memory: GlobalMemory,
        options: Options,
        target: str,
    ) -> None:
        self.execution, self.memory, self.options = execution, memory, options
        self.grid, self.block, self.cluster = (
            extents(name, shape) for name, shape in (("grid", grid), ("block", block), ("cluster", cluster))
        )
        kernel = execution.kernel
        self._check_shapes(kernel)
        static = execution.static_shared
        if isinstance(dynamic_smem, bool) or not hasattr(dynamic_smem, "__index__"):
            raise TypeError(f"dynamic_smem {dynamic_smem!r}: an int, a number of bytes, is needed")
        self.dynamic_smem = dynamic_smem = operator.index(dynamic_smem)
        if static > MAX_SHARED_BYTES:
            raise ValueError(f"{static} bytes of static shared memory; a CTA has {MAX_SHARED_BYTES} at most")
        if dynamic_smem < 0 or static + dynamic_smem > MAX_SHARED_BYTES:
            raise ValueError(
                f"dynamic_smem {dynamic_smem}: 0 to {MAX_SHARED_BYTES - static} bytes are possible, since the kernel "
                f"has {static} bytes of static shared memory and a CTA at most {MAX_SHARED_BYTES} in all"
            )
        self.shared_bytes = SYSTEM_BYTES + -(-static // 1024) * 1024 + dynamic_smem
        self.params = parameter_block(kernel, params)
        self.target = target
        self.symbols: dict[str, int] = {}
        self.races = LaunchShadow(memory) if options.looks_for("races") else None
        self.reported: set[tuple[object, ...]] = set()
        self._refusals = random.Random(f"refusals {options.seed}")
        self.waiting: deque[int] = deque()  # clusters that have not started
        ranks, threads = math.prod(self.cluster), math.prod(self.block)
        self.capacity = capacity(target, ranks, threads, self.shared_bytes, self._registers(kernel))
        if options.resident is not None:
            self.capacity = min(self.capacity, options.resident)

    def _registers(self, kernel: Kernel) -> int | None:
        """Registers that a thread begins with, where the kernel's directives say so."""
        threads = math.prod(kernel.reqntid) if kernel.reqntid is not None else kernel.most_threads
        ctas = None if threads is None else kernel.ctas_per_sm
        return at_entry(threads or 0, most=kernel.most_registers, ctas_per_sm=ctas)

    def _check_shapes(self, kernel: Kernel) -> None:
        threads = self.block[0] * self.block[1] * self.block[2]
        if threads > 1024:
            raise ValueError(f"{threads} threads per CTA; at most 1024")
        for name, shape, most in (("grid", self.grid, _MOST_CTAS), ("block", self.block, _MOST_THREADS)):
            if any(n > limit for n, limit in zip(shape, most)):
                raise ValueError(f"{name} {shape}; at most {most}")
        ranks = self.cluster[0] * self.cluster[1] * self.cluster[2]
        if ranks > _MOST_RANKS:
            raise ValueError(f"cluster {self.cluster} has {ranks} CTAs; at most {_MOST_RANKS} (8 on every GPU)")
        if any(g % c for g, c in zip(self.grid, self.cluster)):
            raise ValueError(f"grid {self.grid} is not a multiple of cluster {self.cluster}")
        if kernel.most_threads is not None and threads > kernel.most_threads:
            raise ValueError(f"{threads} threads per CTA; the kernel was compiled for {kernel.most_threads} (.maxntid)")
        for name, wanted, given in (
            ("block", kernel.reqntid, self.block),
            ("cluster", kernel.reqnctapercluster, self.cluster),
        ):
            if wanted is not None and wanted != given:
                raise ValueError(f"{name} {given}, but the kernel was compiled for {wanted}")

    def place_variables(self, ptx: str) -> None:
        """Gives .global and .const variables memory; they have it until `GlobalMemory` ends."""
        held = self.memory.modules.setdefault(ptx, {})
        for variable in parse(ptx).variables:
            if variable.space not in ("global", "const"):
                continue
            cells = held.get(variable.name)
            if cells is None:
                cells = held[variable.name] = _cells(variable)
            if self.memory.region_index(cells.ctypes.data, cells.nbytes) is None:
                self.memory.register_tensor(cells, variable.name, writable=variable.space == "global")
            self.symbols[variable.name] = cells.ctypes.data

    def cooperate(self) -> None:
        """The launch is a cooperative one.

        Raises:
            ValueError: the chip does not hold its clusters at once.
        """
        clusters = math.prod(self.grid) // math.prod(self.cluster)
        if clusters > self.capacity:
            raise ValueError(
                f"grid {self.grid} of a cooperative launch has {clusters} clusters, which have to be resident at once; "
                f"{self.capacity} fit"
            )
        cells = np.zeros(GRID_WORKSPACE, np.uint8)
        self.memory.register_tensor(cells, "the grid's barrier", writable=True)
        self.symbols["%envreg"] = cells.ctypes.data

    def cluster_indices(self) -> Sequence[int]:
        counts = [g // c for g, c in zip(self.grid, self.cluster)]
        total = counts[0] * counts[1] * counts[2]
        if self.options.clusters is None:
            return range(total)
        for index in self.options.clusters:
            if not 0 <= index < total:
                raise ValueError(f"cluster {index} of a grid of {total} clusters")
        return self.options.clusters

    def _coordinates(self, index: int) -> tuple[int, int, int]:
        nx, ny = (g // c for g, c in zip(self.grid[:2], self.cluster[:2]))
        return index % nx, index // nx % ny, index // (nx * ny)

    def _take_cluster(self) -> tuple[int, int, int] | None:
        spurious = self.options.spurious_try_wait_failures and self._refusals.random() < 0.25
        if not self.waiting or spurious:
            return None
        x, y, z = (place * size for place, size in zip(self._coordinates(self.waiting.popleft()), self.cluster))
        return x, y, z

    def make_cluster(self, index: int) -> Cluster:
        facts = LaunchFacts(
            grid=self.grid,
            block=self.block,
            shape=self.cluster,
            smem=self.shared_bytes,
            static_smem=self.shared_bytes - self.dynamic_smem,
            gaps=gaps(self.execution.kernel.variables, self.dynamic_smem, self.shared_bytes),
            params=self.params,
            symbols=self.symbols,
            gmem=self.memory,
            options=self.options,
            arithmetic=Arithmetic(self.options.arithmetic, self.target),
            races=self.races,
            blocks=len(self.execution.flow.blocks),
            instructions=self.execution.kernel.instructions,
            registers=self._registers(self.execution.kernel),
            reported=self.reported,
            take_cluster=self._take_cluster,
        )
        return Cluster(index, self._coordinates(index), facts)
