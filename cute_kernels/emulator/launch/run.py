"""The grid: checks a launch, has its clusters executed, and adds up what they did."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_kernels import interrupts
from cute_kernels.emulator.bytecode.execution import Execution
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.launch.arguments import extents, pack_arguments, require_type
from cute_kernels.emulator.launch.clusters import ClusterWork, Dependent, at_once, in_turn, known_dependence
from cute_kernels.emulator.launch.launch import Launch
from cute_kernels.emulator.observe.counters import Counters, UnitCounters, UnitCounts
from cute_kernels.emulator.observe.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.observe.trace import recording
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.ptx.decode import parse
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.state.smem import SYSTEM_BYTES


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
    def wrapper(ptx: str, *arguments: object, **keywords: object) -> Report:
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
    args: Sequence[object] | None = None,
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
    if launch.races is not None and programmatic and isinstance(memory.accesses, LaunchShadow):
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
