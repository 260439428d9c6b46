"""One launch: its checks, its memory, and the clusters that are made of it."""

import math
import operator
import random
from collections.abc import Sequence

import numpy as np

from cute_kernels.common.chips import PORTABLE_CLUSTER, chip_of
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import Kernel, Variable
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.emulator.machine.launch.arguments import extents, parameter_block
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.register_pool import at_entry
from cute_kernels.emulator.machine.state.smem import SYSTEM_BYTES, gaps
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.sm import Cluster
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.steps import Step

_MOST_CTAS, _MOST_THREADS = (2**31 - 1, 65_535, 65_535), (1024, 1024, 64)  # per dimension, compute capability >= 3.0
GRID_WORKSPACE = 64  # bytes that cooperative groups find by %envreg1 and 2: their size, a barrier of 32 bits


def _cells(variable: Variable) -> np.ndarray:
    """Host memory that stands for the device memory of a variable, with its initial value: uint8 [bytes]."""
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


def ctas_of_multiprocessor(target: str, threads: int, shared_bytes: int, registers: int | None) -> int:
    """How many CTAs of a launch a multiprocessor holds at once; arguments as of `capacity`."""
    chip = chip_of(target)
    threads = -(-threads // 32) * 32
    fit = [chip.ctas, chip.threads // threads, chip.sm_smem_bytes // shared_bytes]
    if registers is not None:
        fit.append(chip.register_file // (registers * threads))
    return min(fit)


def capacity(target: str, ctas: int, threads: int, shared_bytes: int, registers: int | None) -> int:
    """How many clusters the chip of a target holds at once, 1 at least. ``target``: of the PTX, e.g. ``"sm_90a"``.
    ``ctas``: of a cluster. ``threads``, ``shared_bytes``: of a CTA, with the system's shared memory. ``registers``: of
    a thread, None where the PTX does not say so and they count for nothing."""
    held = ctas_of_multiprocessor(target, threads, shared_bytes, registers)
    return max(sum(count * held // ctas for count in chip_of(target).gpcs if ctas <= count), 1)


class Launch:
    """A checked launch; makes its clusters, for which it is `LaunchFacts`. ``waiting``: those that have not started, by
    index in their order."""

    def __init__(
        self, execution: Execution, grid: int | Sequence[int], block: int | Sequence[int], cluster: int | Sequence[int],
        dynamic_smem: int, params: bytes | Sequence[bytes], memory: GlobalMemory, options: Options, target: str,
    ) -> None:
        self.execution, self.memory, self.options, self.target = execution, memory, options, target
        self.grid, self.block, self.cluster = (
            extents(name, shape) for name, shape in (("grid", grid), ("block", block), ("cluster", cluster))
        )
        kernel = execution.kernel
        self._check_shapes(kernel)
        static = execution.static_shared
        if isinstance(dynamic_smem, bool) or not hasattr(dynamic_smem, "__index__"):
            raise TypeError(f"dynamic_smem = {dynamic_smem!r}: must be an int, a number of bytes")
        self.dynamic_smem = dynamic_smem = operator.index(dynamic_smem)
        chip = chip_of(target)
        if static > chip.static_smem_bytes:
            raise ValueError(
                f"{static} bytes of static shared memory: must be at most {chip.static_smem_bytes} on {target}"
            )
        most = chip.smem_bytes
        if dynamic_smem < 0 or static + dynamic_smem > most:
            raise ValueError(
                f"dynamic_smem = {dynamic_smem}: must be 0 to {most - static} bytes, since a CTA on {target} has at "
                f"most {most} and the kernel has {static} bytes of static shared memory"
            )
        self.shared_bytes = SYSTEM_BYTES + -(-static // 1024) * 1024 + dynamic_smem
        self.params = parameter_block(kernel, params)
        self.symbols: dict[str, int] = {}
        self.races = LaunchShadow(memory) if options.looks_for("races") else None
        self.reported: set[tuple[object, ...]] = set()
        self.gaps = gaps(kernel.variables, dynamic_smem, self.shared_bytes)
        self.arithmetic = Arithmetic(options.arithmetic, target)
        self.blocks, self.instructions = len(execution.flow.blocks), kernel.instructions
        self.registers = self._registers(kernel)
        self._refusals = random.Random(f"refusals {options.seed}")
        self.waiting: Sequence[int] = ()
        ranks, threads = math.prod(self.cluster), math.prod(self.block)
        needs = threads, self.shared_bytes, self.registers
        self.capacity, self.neighbours = capacity(target, ranks, *needs), ctas_of_multiprocessor(target, *needs)
        self.dependent = ranks > 1 or bool(kernel.dependence)
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
        most = chip_of(self.target).cluster
        if ranks > most:
            least = f"{PORTABLE_CLUSTER} on every GPU)" if most > 1 else "clusters need sm_90)"
            raise ValueError(f"cluster = {self.cluster}: must have 1 to {most} CTAs on {self.target} ({least}")
        if any(g % c for g, c in zip(self.grid, self.cluster)):
            raise ValueError(f"grid = {self.grid}: must be a multiple of cluster {self.cluster}")
        if kernel.most_threads is not None and threads > kernel.most_threads:
            raise ValueError(f"{threads} threads per CTA; the kernel was compiled for {kernel.most_threads} (.maxntid)")
        for name, wanted, given in (
            ("block", kernel.reqntid, self.block),
            ("cluster", kernel.reqnctapercluster, self.cluster),
        ):
            if wanted is not None and wanted != given:
                raise ValueError(f"{name} {given}, but the kernel was compiled for {wanted}")

    def watch(self, *, programmatic: bool) -> None:
        """Looks for races in global memory; ``programmatic``: also with the launch before."""
        if self.races is not None:
            if programmatic and isinstance(self.memory.accesses, LaunchShadow):
                self.races = self.memory.accesses.successor()
            self.races.follow(self.execution.flow)
        self.memory.accesses = self.races

    def prepare(self, ptx: str, *, cooperative: bool) -> None:
        """Gives its variables memory; arguments and errors as of `run.run`. Then all its clusters wait."""
        self._place_variables(ptx)
        if cooperative:
            self._cooperate()
        self.waiting = self._cluster_indices()

    def _place_variables(self, ptx: str) -> None:
        """Gives .global and .const variables memory; they have it until `GlobalMemory` ends."""
        held, named = self.memory.modules.setdefault(ptx, {}), []
        for variable in parse(ptx).variables:
            if variable.space not in ("global", "const"):
                continue
            cells = held.get(variable.name)
            if cells is None:
                cells = held[variable.name] = _cells(variable)
                named += [(cells, *each) for each in variable.named]
            if self.memory.region_index(cells.ctypes.data, cells.nbytes) is None:
                self.memory.register_tensor(cells, variable.name, writable=variable.space == "global")
            self.symbols[variable.name] = cells.ctypes.data
        for cells, offset, name, more in named:
            if name not in self.symbols:
                raise ValueError(f"the initialiser of a variable names {name}, which is no variable of the module")
            cells[offset : offset + 8].view(np.uint64)[0] = self.symbols[name] + more

    def _cooperate(self) -> None:
        """The launch is a cooperative one. Raises ValueError: the chip does not hold its clusters at once."""
        clusters = math.prod(self.grid) // math.prod(self.cluster)
        if clusters > self.capacity:
            raise ValueError(
                f"grid = {self.grid} of a cooperative launch has {clusters} clusters: must be at most {self.capacity}, "
                "which are resident at once"
            )
        cells = np.zeros(GRID_WORKSPACE, np.uint8)
        self.memory.register_tensor(cells, "the grid's barrier", writable=True)
        self.symbols["%envreg"] = cells.ctypes.data

    def _cluster_indices(self) -> Sequence[int]:
        counts = [g // c for g, c in zip(self.grid, self.cluster)]
        total = counts[0] * counts[1] * counts[2]
        if self.options.clusters is None:
            return range(total)
        for index in self.options.clusters:
            if not 0 <= index < total:
                raise ValueError(f"cluster {index} of a grid of {total} clusters")
        return self.options.clusters

    def coordinates(self, index: int) -> tuple[int, int, int]:
        """%clusterid of an index, or of an array of them."""
        nx, ny = (g // c for g, c in zip(self.grid[:2], self.cluster[:2]))
        return index % nx, index // nx % ny, index // (nx * ny)

    def take(self, count: int = 1) -> int:
        """The next clusters start; the last of them."""
        last, self.waiting = self.waiting[count - 1], self.waiting[count:]
        return last

    def take_cluster(self, request: Step) -> tuple[int, int, int] | None:
        """Removes a cluster that has not started; the %ctaid of its first CTA, None if none is left, or by chance."""
        options = self.options
        by_chance = options.spurious_try_wait_failures and self._refusals.random() < 0.25 or request in options.steps
        if not self.waiting:
            return None
        if by_chance:
            if options.stepped is not None:
                options.stepped(request, f"cluster {request.cluster}: a try_cancel reports that no cluster is left")
            return None
        x, y, z = (place * size for place, size in zip(self.coordinates(self.take()), self.cluster))
        return x, y, z

    def make_cluster(self, index: int) -> Cluster:
        return Cluster(index, self.coordinates(index), self)
