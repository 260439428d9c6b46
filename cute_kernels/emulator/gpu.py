"""The grid: runs the clusters of a launch under one seeded scheduler and reports hangs.

Clusters are independent and run one after the other. Inside a cluster all warps run interleaved: a warp runs until it
has to wait or its budget of basic blocks is used up. When no warp can run, pending asynchronous work completes; when
there is none, suspended try_waits time out; when that changes nothing either, the kernel hangs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.emulator.arguments import extents, pack_arguments, parameter_block, require_type
from cute_kernels.emulator.back_end import Execution
from cute_kernels.emulator.counters import Counters, UnitCounters, UnitCounts
from cute_kernels.emulator.decode import Instruction, Kernel, parse
from cute_kernels.emulator.errors import EmulatorError, Hang
from cute_kernels.emulator.facts import WaitState
from cute_kernels.emulator.gmem import GlobalMemory
from cute_kernels.emulator.launch_shadow import LaunchShadow
from cute_kernels.emulator.matrix_arithmetic import Arithmetic
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.sm import Cluster, LaunchFacts
from cute_kernels.emulator.smem import SYSTEM_BYTES
from cute_kernels.emulator.starvation import draw_starved
from cute_kernels.emulator.trace import Timeline, recording
from cute_kernels.emulator.warp import NamedWait, PhaseWait, Warp

MAX_SHARED_BYTES = 232_448  # per CTA on sm_90 and sm_100, without the system's 1024
_MOST_CTAS, _MOST_THREADS = (2**31 - 1, 65_535, 65_535), (1024, 1024, 64)  # per dimension, compute capability >= 3.0
_MOST_RANKS = 16  # CTAs per cluster, with the non-portable size allowed
_SLICE = 20_000  # basic blocks until a warp that never waits gives way
_RANDOM_SLICE = 24
_PATIENCE = 3  # rounds in which every suspended wait timed out and nothing changed
_SLEEPING_PATIENCE = 10_000  # the same while a warp sleeps: how often it does before it goes on is its own affair
_FRUITLESS = 64  # rounds without any effect after which starved warps run
_SUSPICIOUS = 200_000  # basic blocks without any effect after which a repetition is looked for
_LONGEST_LOOP = 20_000  # basic blocks of the longest endless loop that is recognised
_LONGEST_POLLING = 500  # strong loads in it
_POLL = 250  # blocks that a strong load counts as: a kernel that does nothing but look waits for something
_LIMIT_CHECK = 256  # rounds of short slices between two looks at the number of instructions


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        warp_instructions: executed by all warps; ``by_role`` and ``by_opcode`` split them.
        seconds: of emulation, translation excluded.
        clusters: number of clusters that ran (clusters cancelled by cluster launch control do not run).
        tma_bytes_loaded, tma_bytes_stored: box bytes.
        mma_instructions: tcgen05.mma executed, and wgmma.mma_async, once per warpgroup.
        shared_bytes: per CTA, static and dynamic.
        tensor_columns: most tensor-memory columns allocated in one CTA.
        units: the work of every unit, or None without `Options.counters`.
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
        progress: called with (clusters done, clusters to run), first with 0.
        programmatic: launched with programmatic stream serialisation, behind the launch that ran last with the same
            ``memory``: what is not ordered after griddepcontrol.wait races with what that launch did.

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
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a {type(progress).__name__}; a function of two ints or None is needed")
    options = options or Options()
    execution = Execution(ptx, kernel, extents("block", block), options)
    memory = memory if memory is not None else GlobalMemory()
    if args is not None:
        if params:
            raise ValueError("params and args are both given; args are made into params")
        params = pack_arguments(execution.kernel, args, memory)
    launch = _Launch(execution, grid, block, cluster, dynamic_smem, params, memory, options, parse(ptx).target)
    if launch.races is not None and programmatic and memory.accesses is not None:
        launch.races = memory.accesses.successor()
    if launch.races is not None:
        launch.races.follow(execution.flow)
    memory.accesses = launch.races
    launch.place_variables(ptx)
    indices = launch.cluster_indices()
    launch.waiting.extend(indices)
    counters = Counters(execution.flow)
    totals: dict[str, int] = {"loaded": 0, "stored": 0, "mma": 0, "columns": 0}
    meter = UnitCounters() if options.counters else None
    clusters = 0
    start = time.perf_counter()
    if progress is not None:
        progress(0, len(indices))
    with recording(options.trace) as timeline:
        while launch.waiting:
            state = launch.make_cluster(launch.waiting.popleft())
            warps = state.warps
            _Scheduler(state, execution, options, timeline, len(launch.waiting)).run()
            counters.add(warps)
            totals["loaded"] += state.tma.bytes_loaded
            totals["stored"] += state.tma.bytes_stored
            totals["mma"] += state.tensor_core.instructions + state.wgmma.instructions
            if meter is not None:
                meter.merge(state.meter)
            totals["columns"] = max(totals["columns"], *(cta.tmem.columns_used for cta in state.ctas))
            clusters += 1
            if progress is not None:
                progress(len(indices) - len(launch.waiting), len(indices))
    units = None
    if meter is not None:
        ctas = clusters * math.prod(launch.cluster)
        units = meter.result(ctas, counters, execution.kernel.instructions)
    return Report(
        warp_instructions=counters.total,
        by_role=counters.by_role,
        by_opcode=counters.by_opcode(),
        seconds=time.perf_counter() - start,
        clusters=clusters,
        tma_bytes_loaded=totals["loaded"],
        tma_bytes_stored=totals["stored"],
        mma_instructions=totals["mma"],
        shared_bytes=launch.shared_bytes - SYSTEM_BYTES,
        tensor_columns=totals["columns"],
        units=units,
    )


class _Launch:
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
        self.waiting: deque[int] = deque()  # clusters that have not started

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
        """Gives .global and .const variables memory."""
        for variable in parse(ptx).variables:
            if variable.space in ("global", "const"):
                # Host memory stands for device memory; the view starts at the first suitably aligned byte.
                store = np.zeros(variable.nbytes + variable.align, np.uint8)
                skip = -store.ctypes.data % variable.align
                cells = store[skip : skip + variable.nbytes]
                cells[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
                self.memory.register_tensor(cells, variable.name, writable=variable.space == "global")
                self.symbols[variable.name] = cells.ctypes.data

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
        if not self.waiting:
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
            params=self.params,
            symbols=self.symbols,
            gmem=self.memory,
            options=self.options,
            arithmetic=Arithmetic(self.options.arithmetic, self.target),
            races=self.races,
            blocks=len(self.execution.flow.blocks),
            instructions=self.execution.kernel.instructions,
            take_cluster=self._take_cluster,
        )
        return Cluster(index, self._coordinates(index), facts)


# --- scheduling -----------------------------------------------------------------------------------------------------


class _Scheduler:
    """Runs one cluster to its end."""

    def __init__(
        self, cluster: Cluster, execution: Execution, options: Options, timeline: Timeline | None, later: int
    ) -> None:
        self.later = later  # clusters that have not started
        self.cluster, self.execution, self.options = cluster, execution, options
        self.rng = cluster.rng
        self.random = options.interleave != "round_robin"
        self.starved = draw_starved(self.rng, cluster.warps) if options.interleave == "starve" else frozenset()
        self.fruitless_rounds = 0
        self.idle_blocks = 0  # since livelocks were looked for
        self.idle_since = 0  # all, since anything happened
        self.rounds = 0
        self.long_slice = False
        self.suspicious = _SUSPICIOUS
        trace = timeline.attach(cluster, execution.python) if timeline is not None else None
        self.probes = tuple(probe for probe in (cluster.meter, trace) if probe is not None)

    def run(self) -> None:
        try:
            self._run()
        except EmulatorError as error:
            if error.facts.barrier is not None:  # others of its array tell which of them it is
                error.know(barriers=self.cluster.barriers.states())
            raise

    def _run(self) -> None:
        cluster = self.cluster
        for warp in cluster.warps:
            warp.code = self.execution.start(warp)
        idle_rounds = 0
        while cluster.running:
            before = cluster.changes()
            ran = self._round()
            self._check_limit()
            if cluster.changes() != before:
                idle_rounds = self.idle_blocks = self.idle_since = cluster.polls = 0
            elif self.idle_blocks > self.suspicious or (cluster.polls and self._idle_for_too_long()):
                self._look_for_livelock()
            if ran or not cluster.running or cluster.engine.step():
                continue
            idle_rounds += 1
            sleeping = any(getattr(warp.wait, "what", None) == "nanosleep" for warp in cluster.warps)
            if idle_rounds > (_SLEEPING_PATIENCE if sleeping else _PATIENCE) or not self._time_out():
                self._hang("no warp can run and no asynchronous work is pending")
        cluster.finish()

    def _round(self) -> bool:
        """Lets every warp that can run do so once. Returns whether there was one."""
        warps = self.cluster.warps
        self.long_slice = False
        if self.random:
            self.rng.shuffle(warps)
        if not self.starved:
            return self._let_run(warps)
        before = self.cluster.changes()
        ran = self._let_run([warp for warp in warps if warp not in self.starved])
        # Warps that poll memory can always run; the limit on rounds without effect lets the starved ones bring about
        # what is polled for.
        self.fruitless_rounds = 0 if self.cluster.changes() != before else self.fruitless_rounds + 1
        if (ran and self.fruitless_rounds < _FRUITLESS) or self.cluster.engine.step():
            return True
        self.fruitless_rounds = 0
        return self._let_run([warp for warp in warps if warp in self.starved]) or ran

    def _let_run(self, warps: list[Warp]) -> bool:
        """Lets each of these warps run once that can. Returns whether there was one."""
        ran = False
        for warp in list(warps):
            if warp.wait is not None and not warp.timed_out and not self._ready(warp):
                continue
            ran = True
            budget = self.rng.randrange(1, _RANDOM_SLICE) if self.random else _SLICE
            self._resume(warp, budget)
            if warp.wait is None:
                self.idle_blocks += budget
                self.long_slice |= budget == _SLICE
            if self.options.completion == "random":
                self.cluster.engine.tick()
        return ran

    def _ready(self, warp: Warp) -> bool:
        try:
            return warp.wait.ready()
        except EmulatorError as error:
            raise self._standing(error, warp) from None

    def _resume(self, warp: Warp, budget: int) -> None:
        """Runs a warp until it waits, exits, or has executed ``budget`` basic blocks."""
        for probe in self.probes:
            probe.resume(warp)
        warp.wait, self.cluster.executing = None, warp
        try:
            warp.code.send(budget)
        except StopIteration:
            self.cluster.exit(warp)
        except EmulatorError as error:
            raise self._located(error, warp) from None
        except Exception as error:
            wrapped = EmulatorError(f"internal error: {type(error).__name__}: {error}")
            raise self._located(wrapped, warp, error) from error
        finally:
            self.cluster.executing = None
            for probe in self.probes:
                probe.give_way(warp)

    def _look_for_livelock(self) -> None:
        """Warps have run for long without effect: a hang if each returns to a state in which it has been before.

        A warp is deterministic, so it then goes round for ever; a long computation never repeats its registers.
        """
        self.idle_since += self.idle_blocks
        self.idle_blocks = 0
        if self.cluster.engine.step():  # what is polled for may be what completes at last
            self.idle_since = self.cluster.polls = 0
            return
        self.suspicious *= 2
        spinning = [warp for warp in self.cluster.warps if warp.wait is None]
        if spinning and all(self._repeats(warp) for warp in spinning):
            self._hang("livelock: warps go round in loops that have no effect", "livelock")
        if self._idle_for_too_long():
            self._hang(
                f"{self.idle_since} basic blocks with {self.cluster.polls} strong loads have run without effect, "
                f"more than max_idle_blocks = {self.options.max_idle_blocks} allows. A kernel that computes for "
                "so long needs a larger limit",
                "limit",
            )

    def _idle_for_too_long(self) -> bool:
        limit = self.options.max_idle_blocks
        if limit is None:
            return False
        spinning = sum(warp.wait is None for warp in self.cluster.warps)
        return self.idle_since + self.idle_blocks + _POLL * self.cluster.polls > limit * max(spinning, 1)

    def _repeats(self, warp: Warp) -> bool:
        before = self.cluster.changes()
        state = warp.code.snapshot()
        polls, clock = self.cluster.polls, self.cluster.clock
        for _ in range(_LONGEST_LOOP):
            self._resume(warp, 1)
            if warp.wait is not None or warp not in self.cluster.running or self.cluster.changes() != before:
                return False
            if self.cluster.clock != clock:  # it looks at the clock, which goes on: it may wait for a time
                return False
            if self.cluster.polls > polls + _LONGEST_POLLING:
                return False
            if warp.code.same(state, warp.code.snapshot()):
                return True
        return False

    def _time_out(self) -> bool:
        """All suspended try_waits reach their time limit."""
        waiting = [warp for warp in self.cluster.warps if warp.wait is not None and warp.wait.may_time_out]
        for warp in waiting:
            warp.timed_out = True
        return bool(waiting)

    def _check_limit(self) -> None:
        limit = self.options.max_warp_instructions
        self.rounds += 1
        if limit is None or not (self.long_slice or self.rounds % _LIMIT_CHECK == 0):
            return
        counters = Counters(self.execution.flow)
        counters.add(warp for cta in self.cluster.ctas for warp in cta.warps)
        if counters.total > limit:
            self._hang(
                f"more than max_warp_instructions = {limit} instructions in cluster {self.cluster.index}. A kernel "
                "that needs more needs a larger limit",
                "limit",
            )

    # --- reports --------------------------------------------------------------------------------------------------

    def _located(self, error: EmulatorError, warp: Warp, cause: BaseException | None = None) -> EmulatorError:
        """Adds where the warp stood when the error was raised."""
        return error.at(warp.code.failed_at(cause or error), warp.label)

    def _standing(self, error: EmulatorError, warp: Warp) -> EmulatorError:
        """Adds where a warp stands that is not running."""
        instruction = self._standing_at(warp.code.standing) if warp.code is not None else None
        return error.at(instruction, warp.label)

    def _hang(self, why: str, kind: str = "hang") -> None:
        lines = [self._describe(warp) for warp in self.cluster.warps]
        exited = [w.label for cta in self.cluster.ctas for w in cta.warps if w not in self.cluster.running]
        if exited:
            lines.append(f"exited: {', '.join(exited)}")
        pending = self.cluster.engine.pending()
        lines.append("pending asynchronous work: " + ("; ".join(pending) or "none"))
        barriers = [self.cluster.barriers.describe(barrier.address) for barrier in self.cluster.barriers]
        lines.extend(barriers)
        if self.later:
            lines.append(
                f"{self.later} clusters have not started: clusters run one after the other, so what one of them would "
                "signal to this one never comes"
            )
        raise Hang(f"cluster {self.cluster.index} hangs: {why}", "\n".join(lines)).know(
            kind,
            waits=tuple(self._waiting(warp) for warp in self.cluster.warps),
            exited=tuple(exited),
            pending=tuple(pending),
            barriers=self.cluster.barriers.states(),
        )

    def _waiting(self, warp: Warp) -> WaitState:
        instruction = self._standing_at(warp.code.standing) if warp.code is not None else None
        wait = warp.wait
        if wait is None:
            return WaitState(warp.label, instruction, text="can run")
        state = WaitState(warp.label, instruction, wait.kind, wait.describe())
        if isinstance(wait, PhaseWait):
            barrier = self.cluster.barriers.state(wait.address)
            return dataclasses.replace(state, barrier=barrier, state=wait.state, by_parity=wait.parity)
        if isinstance(wait, NamedWait):
            return dataclasses.replace(state, missing=tuple(wait.barrier.missing()))
        return state

    def _describe(self, warp: Warp) -> str:
        instruction = self._standing_at(warp.code.standing) if warp.code is not None else None
        where = ""
        if instruction is not None:
            where = f" at PTX line {instruction.line} `{instruction.text}`"
            where += f" ({instruction.source})" if instruction.source else ""
        state = warp.wait.describe() if warp.wait is not None else "can run"
        return f"{warp.label} {state}{where}"

    def _standing_at(self, block: int | None) -> Instruction | None:
        blocks = self.execution.flow.blocks
        if block is None or block >= len(blocks):
            return None
        return self.execution.kernel.instructions[blocks[block].start]
