"""The grid: checks a launch, has its clusters executed, and adds up what they did."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cute_kernels.common import interrupts
from cute_kernels.common.float_environment import default_environment
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.emulator.machine.launch.arguments import extents, pack_arguments, require_type
from cute_kernels.emulator.machine.launch.clusters import Dependent, at_once, in_turn, known_dependence
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.emulator.machine.launch.residents import ClusterWork
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.smem import SYSTEM_BYTES
from cute_kernels.emulator.observe.counters import Counters, UnitCounters, UnitCounts
from cute_kernels.emulator.observe.trace import recording
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.races.certificate import Certificate, judge


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
        certificate: whether the run stands for every schedule of the launch, and what stands against it; None without
            detectors.
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
    certificate: Certificate | None = None


@contextlib.contextmanager
def _carrying(ptx: str, kernel: str | None) -> Iterator[None]:
    """Errors of a launch carry its PTX."""
    try:
        yield
    except EmulatorError as error:
        error.attach(ptx, kernel=kernel)
        raise


@default_environment()
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
    require_type("ptx", ptx, str, "PTX text, a str (of a file: pathlib.Path(...).read_text())")
    require_type("kernel", kernel, (str, type(None)), "the name of an entry, a str, or None")
    require_type("memory", memory, (GlobalMemory, type(None)), "a GlobalMemory or None")
    require_type("options", options, (Options, type(None)), "an Options or None")
    require_type("programmatic", programmatic, bool, "a bool")
    require_type("cooperative", cooperative, bool, "a bool")
    options = options or Options()
    with _carrying(ptx, kernel):
        execution = Execution(ptx, kernel, extents("block", block), options)
        memory = memory if memory is not None else GlobalMemory()
        if args is not None:
            if params:
                raise ValueError("params and args are both given; args are made into params")
            params = pack_arguments(execution.kernel, args, memory)
        launch = Launch(execution, grid, block, cluster, dynamic_smem, params, memory, options, parse(ptx).target)
        launch.watch(programmatic=programmatic)
        launch.prepare(ptx, cooperative=cooperative)
        work, start = ClusterWork(meter=UnitCounters() if options.counters else None), time.perf_counter()
        processes, one_process = _execute(launch, work)
        return _report(launch, work, time.perf_counter() - start, processes, one_process)


def _report(launch: Launch, work: ClusterWork, seconds: float, processes: int, one_process: str) -> Report:
    counters, units = Counters(launch.execution.flow, work.executions), None
    if work.meter is not None:
        ctas = work.clusters * math.prod(launch.cluster)
        units = work.meter.result(ctas, counters, launch.execution.kernel.instructions)
    by_opcode = counters.by_opcode()
    by_warps = sum(count for opcode, count in by_opcode.items() if opcode.split(".")[0] == "mma")
    return Report(
        warp_instructions=counters.total, by_role=counters.by_role, by_opcode=by_opcode, seconds=seconds,
        clusters=work.clusters, tma_bytes_loaded=work.loaded, tma_bytes_stored=work.stored,
        mma_instructions=work.mmas + by_warps, shared_bytes=launch.shared_bytes - SYSTEM_BYTES,
        tensor_columns=work.columns, units=units, processes=processes, one_process=one_process,
        certificate=_certificate(launch, work, counters.of_blocks()),
    )


def _certificate(launch: Launch, work: ClusterWork, executions: list[int]) -> Certificate | None:
    options = launch.options
    if not options.detectors:
        return None
    whole = ""
    if options.without:
        whole = f"the run was without these detectors: {', '.join(options.without)}"
    elif options.completion != "eager":
        whole = "asynchronous work did not take effect at once in the run, as it has to where phases are counted"
    elif options.clusters is not None:
        whole = "some clusters were executed, not all"
    return judge(launch.execution.flow, executions, work.places, whole, work.meetings, work.strong)


def _execute(launch: Launch, work: ClusterWork) -> tuple[int, str]:
    """Executes all clusters; by how many processes, and why by one, as in `Report`."""
    tell = launch.options.progress or (lambda done, of: None)
    allowed, clusters, processes = launch.options.processes, len(launch.waiting), 1
    tell(0, clusters)
    one_process = known_dependence(launch) if allowed > 1 else ""
    with interrupts.deferred():
        if allowed > 1 and not one_process:
            try:
                for done in at_once(launch, tell):
                    work.add(done)
                processes = min(allowed, clusters)
            except Dependent as dependent:
                one_process = str(dependent)
                tell(0, clusters)
        with recording(launch.options.trace) as timeline:
            for done in in_turn(launch, timeline):
                work.add(done)
                gone = clusters - len(launch.waiting)
                for number in range(gone - done.clusters, gone):
                    tell(number + 1, clusters)
    return processes, one_process
