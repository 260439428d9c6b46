"""The grid: checks a launch, has its clusters executed, and adds up what they did."""

import functools
import math
import time
from collections.abc import Callable, Sequence
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
from cute_kernels.emulator.races.meetings import Meeting


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
    execution = Execution(ptx, kernel, extents("block", block), options)
    memory = memory if memory is not None else GlobalMemory()
    if args is not None:
        if params:
            raise ValueError("params and args are both given; args are made into params")
        params = pack_arguments(execution.kernel, args, memory)
    launch = Launch(execution, grid, block, cluster, dynamic_smem, params, memory, options, parse(ptx).target)
    launch.watch(programmatic=programmatic)
    launch.prepare(ptx, cooperative=cooperative)
    work, start = _Work(launch), time.perf_counter()
    processes, one_process = _execute(launch, work)
    return work.report(time.perf_counter() - start, processes, one_process)


class _Work:
    """Work of a launch's clusters, added up."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.counters = Counters(launch.execution.flow)
        self.meter = UnitCounters() if launch.options.counters else None
        self.loaded = self.stored = self.mmas = self.columns = self.clusters = 0
        self.places: set[tuple[str, int, str]] = set()
        self.meetings: set[tuple[str, int, Meeting]] = set()
        self.strong: set[tuple[int, bool]] = set()

    def add(self, work: ClusterWork) -> None:
        self.counters.merge(work.executions)
        if self.meter is not None:
            self.meter.merge(work.meter)
        self.loaded += work.loaded
        self.stored += work.stored
        self.mmas += work.mmas
        self.columns = max(self.columns, work.columns)
        self.clusters += work.clusters
        self.places |= work.places
        self.meetings |= work.meetings
        self.strong |= work.strong

    def report(self, seconds: float, processes: int, one_process: str) -> Report:
        units, counters = None, self.counters
        if self.meter is not None:
            ctas = self.clusters * math.prod(self.launch.cluster)
            units = self.meter.result(ctas, counters, self.launch.execution.kernel.instructions)
        by_opcode = counters.by_opcode()
        by_warps = sum(count for opcode, count in by_opcode.items() if opcode.split(".")[0] == "mma")
        return Report(
            warp_instructions=counters.total, by_role=counters.by_role, by_opcode=by_opcode, seconds=seconds,
            clusters=self.clusters, tma_bytes_loaded=self.loaded, tma_bytes_stored=self.stored,
            mma_instructions=self.mmas + by_warps, shared_bytes=self.launch.shared_bytes - SYSTEM_BYTES,
            tensor_columns=self.columns, units=units, processes=processes, one_process=one_process,
            certificate=self._certificate(),
        )

    def _certificate(self) -> Certificate | None:
        launch, options = self.launch, self.launch.options
        if not options.detectors:
            return None
        whole = ""
        if options.without:
            whole = f"the run was without these detectors: {', '.join(options.without)}"
        elif options.completion != "eager":
            whole = "asynchronous work did not take effect at once in the run, as it has to where phases are counted"
        elif options.clusters is not None:
            whole = "some clusters were executed, not all"
        return judge(launch.execution.flow, self.counters.of_blocks(), self.places, whole, self.meetings, self.strong)


def _execute(launch: Launch, work: _Work) -> tuple[int, str]:
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
