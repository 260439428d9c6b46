"""What the emulator costs on one core: per tile, per warp instruction, for a whole GEMM, and for the whole problem.

Run with ``python -m bench.emulator``. ``--one-launch`` compares launches whose clusters run in one process and in
``--processes`` (`cute_kernels.emulator.Options.processes`). ``--preparation`` times what a kernel costs before its
first instruction. ``--certificate`` compares launches with and without what is asked for certificates alone, the latter
with a core that is compiled for that. ``--headline`` emulates all 10,878 tiles of the 928,256 x 768 x 768 patch embed,
in as many processes as asked for, and checks a sample of the result. Times are CPU seconds of the process, which runs
one thread: what else keeps the machine busy hardly shows in them. Compilation comes before the clock starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cute_kernels import gemm
from cute_kernels.config import (
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm90GemmConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.emulator import GlobalMemory, Options, default_options, run
from cute_kernels.emulator.core import build
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.bytecode.execution import translate
from cute_kernels.emulator.machine.launch import run as runs
from cute_kernels.emulator.options import CHOICES
from cute_kernels.emulator.races import launch_shadow, tracker
from cute_kernels.emulator.races.points import PointRaces
from cute_kernels.operations import reference
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.runtime.emulated import launch as emulate
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.table import build_table
from cute_kernels.plan import make_plan

POSITIONS, FEATURES = 196, 768
HEADLINE_IMAGES = 4736

ARITHMETIC = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 rounds)
{
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<2>; .reg .b64 %d<4>;
    mov.u32 %r1, %tid.x; ld.param.u64 %d1, [out]; ld.param.u32 %r7, [rounds];
    mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
    mov.u32 %r2, 0; mov.u32 %r3, 0; mov.f32 %f1, 0f3F800000;
NEXT:
    mad.lo.s32 %r3, %r3, 5, %r1; xor.b32 %r4, %r3, %r2; shr.u32 %r6, %r4, 3; add.s32 %r3, %r3, %r6;
    fma.rn.f32 %f1, %f1, 0f3F7FFFFF, 0f3A000000; st.global.u32 [%d1], %r3; ld.global.u32 %r5, [%d1];
    add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r7;
    @%p1 bra NEXT;
    ret;
}
"""

ELEMENTWISE = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c)
{
    .reg .b32 %r<4>; .reg .f32 %f<8>; .reg .b64 %d<5>;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 128, %r1; mul.wide.u32 %d4, %r3, 16;
    ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [c];
    add.s64 %d1, %d1, %d4; add.s64 %d2, %d2, %d4; add.s64 %d3, %d3, %d4;
    ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d1]; ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%d2];
    add.f32 %f0, %f0, %f4; add.f32 %f1, %f1, %f5; add.f32 %f2, %f2, %f6; add.f32 %f3, %f3, %f7;
    st.global.v4.f32 [%d3], {%f0, %f1, %f2, %f3}; ret;
}
"""


@dataclass
class Case:
    """A launch to time: so many tiles of 256 x 256 x 768, on one cluster of SM100 or of SM90, or on several."""

    tiles: int
    name: str
    options: Options
    config: Sm100PatchEmbedConfig | Sm90PatchEmbedConfig = field(default_factory=Sm100PatchEmbedConfig)
    clusters: int = 1
    tensors: Operands | None = None
    plan: Any = None
    instructions: int = 0
    times: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        """Makes the operands, and runs once: compilation comes before the clock starts."""
        rows = 256 * self.tiles
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, FEATURES, generator=generator).to(torch.float8_e4m3fn)
        weight = torch.randn(256, FEATURES, generator=generator).to(torch.float8_e4m3fn)
        problem = PatchEmbedProblem(rows, 256, FEATURES, POSITIONS)
        self.plan = make_plan(problem, self.config, sm_count=2 * self.clusters)
        table = torch.randn(self.plan.table_shape, generator=generator).to(getattr(torch, self.plan.table_dtype))
        out = torch.empty(rows, 256, dtype=torch.bfloat16)
        self.tensors = Operands(x=x, weight=weight, table=table, scale=0.5, out=out)
        self.run()
        self.times.clear()

    def run(self) -> None:
        """One launch, in CPU seconds."""
        start = time.process_time()
        self.instructions = emulate(self.plan, self.tensors, self.options).warp_instructions
        self.times.append(time.process_time() - start)


def tile_table(tile_counts: list[int], repeats: int, arithmetic: str) -> Table:
    """Milliseconds per tile for growing launches and other options, with the best straight line through the former.

    The cases take turns, ``repeats`` times, so that what else the machine does meets all of them.
    """
    table = Table(title="256 x 256 x 768 FP8 tiles, one cluster")
    columns = ("tiles", "config", "options", "ms per tile: best", "median", "max", "warp instr. per tile", "M instr./s")
    for column in columns:
        table.add_column(column, justify="right")
    last = tile_counts[-1]
    on = Options(arithmetic=arithmetic)
    off = dataclasses.replace(on, detectors=False)
    counted = dataclasses.replace(on, counters=True)
    cases = [Case(tiles, "", on) for tiles in tile_counts]
    cases += [Case(tiles, "no detectors", off) for tiles in tile_counts]
    cases.append(Case(last, "", on, Sm100PatchEmbedConfig(epilogue="bf16x2")))
    hopper = ("", on), ("no detectors", off), ("counters", counted)
    cases += [Case(last, name, options, Sm90PatchEmbedConfig()) for name, options in hopper]
    with tempfile.TemporaryDirectory() as folder:
        cases.append(Case(last, "counters", counted))
        trace = Options(trace=f"{folder}/trace.json", arithmetic=arithmetic)
        cases.append(Case(last, "trace", trace))
        for case in cases:
            case.prepare()
        for _ in range(repeats):
            for case in cases:
                case.run()
    for case in cases:
        per_tile = [1e3 * seconds / case.tiles for seconds in case.times]
        best, instructions = min(per_tile), case.instructions / case.tiles
        which = "sm_90a" if isinstance(case.config, Sm90PatchEmbedConfig) else f"sm_100a {case.config.epilogue}"
        table.add_row(
            str(case.tiles), which, case.name, f"{best:.2f}", f"{statistics.median(per_tile):.2f}",
            f"{max(per_tile):.2f}", f"{instructions:,.0f}", f"{instructions / best / 1e3:.2f}",
        )  # fmt: skip
    if len(tile_counts) > 2:
        counts = len(tile_counts)
        best = [1e3 * min(case.times) for case in cases]
        table.caption = f"with detectors: {growth(tile_counts, best[:counts])}\n"
        table.caption += f"without: {growth(tile_counts, best[counts : 2 * counts])}"
    return table


def growth(tile_counts: list[int], milliseconds: list[float]) -> str:
    """Least squares of time over tiles, in words."""
    tiles, times = np.array(tile_counts, float), np.array(milliseconds)
    (slope, start), *_ = np.linalg.lstsq(np.stack([tiles, np.ones_like(tiles)], 1), times, rcond=None)
    residual = np.abs(times - slope * tiles - start).max() / times.max()
    return f"{slope:.2f} ms per tile + {start:.1f} ms per launch; largest residual {100 * residual:.1f}% of the longest"


def preparation_table(repeats: int) -> Table:
    """CPU milliseconds that a kernel takes before its first instruction, once per process and PTX text."""
    table = Table(title="before the first instruction, CPU ms, best")
    for column in ("kernel", "instructions", "parser", "lowering", "sum"):
        table.add_column(column, justify="right")
    for config in (Sm100PatchEmbedConfig(), Sm90PatchEmbedConfig()):
        plan = make_plan(PatchEmbedProblem(256, 256, FEATURES, POSITIONS), config, sm_count=2)
        artifact = compile_plan(plan, emulated=True)
        parsing, lowering = [], []
        for _ in range(repeats):
            parse.cache_clear()
            translate.cache_clear()
            start = time.process_time()
            parse(artifact.ptx)
            parsed = time.process_time()
            made = translate(artifact.ptx, artifact.kernel_name, (plan.threads, 1, 1))
            parsing.append(1e3 * (parsed - start))
            lowering.append(1e3 * (time.process_time() - parsed))
        best = min(parsing), min(lowering), min(map(sum, zip(parsing, lowering)))
        count = len(made.kernel.instructions)
        table.add_row(artifact.kernel_name, f"{count:,}", *(f"{each:.0f}" for each in best))
    return table


def arithmetic_rate(rounds: int, detectors: bool) -> float:
    """Million warp instructions per second of a loop of integer and FP32 arithmetic with a load and a store."""
    out = np.zeros(32, np.uint32)
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    params = [struct.pack("<Q", value) for value in (out.ctypes.data, rounds)]
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        report = run(
            ARITHMETIC, grid=(1, 1, 1), block=(32, 1, 1), params=params, memory=memory,
            options=Options(detectors=detectors),
        )
        best = max(best, report.warp_instructions / (time.process_time() - start) / 1e6)
    return best


def cta_seconds(ctas: int, repeats: int) -> dict[bool, float]:
    """CPU seconds of a CTA of four warps that adds two vectors, without and with detectors, in a launch of so many."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats + 1):
        for detectors, measured in times.items():
            a, b = np.arange(512 * ctas, dtype=np.float32), np.ones(512 * ctas, np.float32)
            c = np.zeros_like(a)
            start = time.process_time()
            run(ELEMENTWISE, grid=ctas, block=128, args=[a, b, c], options=Options(detectors=detectors))
            measured.append((time.process_time() - start) / ctas)
            assert np.array_equal(c, a + b)
    return {detectors: min(measured[1:]) for detectors, measured in times.items()}


def gemm_seconds(size: int, repeats: int, arithmetic: str) -> dict[bool, float]:
    """CPU seconds of a square FP8 GEMM with CTA pairs, without and with detectors, which take turns.

    It is the patch embed with a table of zeros, on one persistent cluster: everything from the call of `emulate` to its
    result, once the kernel has been compiled. Steady state: the first of the ``repeats`` + 1 launches does not count.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, size, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    plan = make_plan(PatchEmbedProblem(size, size, size, POSITIONS), Sm100PatchEmbedConfig(), sm_count=2)
    table = torch.zeros(plan.table_shape, dtype=getattr(torch, plan.table_dtype))
    out = torch.empty(size, size, dtype=torch.bfloat16)
    tensors = Operands(x=x, weight=weight, table=table, scale=1.0, out=out)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats + 1):
        for detectors, measured in times.items():
            start = time.process_time()
            emulate(plan, tensors, Options(detectors=detectors, arithmetic=arithmetic))
            measured.append(time.process_time() - start)
    exact = x[:64].double() @ weight.double().T
    error = (out[:64].double() - exact).abs().max() / exact.abs().max()
    assert error < 2**-8, f"the product is wrong by {error}"
    return {detectors: min(measured[1:]) for detectors, measured in times.items()}


# --- the certificate ------------------------------------------------------------------------------------------------


def certified_cases() -> dict[str, Callable[[], object]]:
    """Launches of ordinary kernels, by name."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 1024, generator=generator).to(torch.bfloat16) for rows in (768, 512))
    found: dict[str, Callable[[], object]] = {}
    for arch, config in (("sm_100a", Sm100PatchEmbedConfig()), ("sm_90a", Sm90PatchEmbedConfig())):
        case = Case(8, arch, Options(), config)
        case.prepare()
        found[f"patch_embed FP8, {arch}"] = case.run
    configs = {"sm_100a": Sm100GemmConfig(), "sm_90a": Sm90GemmConfig(), "sm_80": Sm80GemmConfig()}
    for arch, config in configs.items():
        found[f"gemm BF16, {arch}"] = functools.partial(gemm, a, b, config=config, backend="emulator")
    return found


def _serve(certified: bool, connection: multiprocessing.connection.Connection) -> None:
    """In a process of its own: runs launches by name, and says how many CPU seconds each took."""
    torch.set_num_threads(1)
    if not certified:  # the core has been compiled without it
        runs.judge = lambda *_: None
        launch_shadow.parting = lambda flow: frozenset()
        PointRaces._meet = lambda *_: None
        tracker.RaceTracker._phase_lacking = lambda *_: -1
    with default_options(Options()):
        cases = certified_cases()
        connection.send(list(cases))
        for name in iter(connection.recv, ""):
            start = time.process_time()
            cases[name]()
            connection.send(time.process_time() - start)


def certificate_table(repeats: int) -> Table:
    """Launches with detectors, with and without what is asked for the certificate alone, which take turns."""
    table = Table(title="CPU ms of a launch with detectors: best (median)")
    for column in ("launch", "without certificate", "with it", "ratio of the best", "median of the ratios"):
        table.add_column(column, justify="right")
    context, ends = multiprocessing.get_context("spawn"), []
    for certified in (True, False):
        with mock.patch.dict(os.environ, {} if certified else {build.FLAGS_VARIABLE: "-DUNCERTIFIED=1"}):
            here, there = context.Pipe()
            context.Process(target=_serve, args=(certified, there), daemon=True).start()
            ends.append(here)
    names = [end.recv() for end in ends][0]
    for name in names:
        times: list[list[float]] = [[], []]
        for turn in range(repeats + 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                ends[which].send(name)
                times[which].append(1e3 * ends[which].recv())
        (on, off), best = (each[1:] for each in times), [min(each[1:]) for each in times]
        shown = (f"{min(each):.1f} ({statistics.median(each):.1f})" for each in (off, on))
        ratios = statistics.median(one / other for one, other in zip(on, off))
        table.add_row(name, *shown, f"{best[0] / best[1]:.3f}", f"{ratios:.3f}")
    for end in ends:
        end.send("")
    return table


# --- clusters in several processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of a launch: on the clock, and of the processor in this process and in all that it forked."""

    wall: float
    own: float
    forked: float

    @staticmethod
    def of(case: Case, processes: int) -> Cost:
        """One launch, whose clusters are independent."""
        options = dataclasses.replace(case.options, processes=processes)
        before, start = [_cpu_seconds(who) for who in _WHOSE], time.perf_counter()
        report = emulate(case.plan, case.tensors, options)
        wall = time.perf_counter() - start
        assert report.processes == processes, report.one_process
        return Cost(wall, *(_cpu_seconds(who) - seconds for who, seconds in zip(_WHOSE, before)))


_WHOSE = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN


def _cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def processes_table(tile_counts: list[int], processes: int, repeats: int) -> Table:
    """Launches of eight clusters in one process and in several, which take turns."""
    table = Table(title=f"8 clusters in {processes} processes and in one, detectors on; ratios: best (median)")
    for column in ("config", "tiles", "s in one process", "s here + s in each process", "CPU ratio", "wall ratio"):
        table.add_column(column, justify="right")
    for config in (Sm100PatchEmbedConfig(), Sm90PatchEmbedConfig()):
        for tiles in tile_counts:
            case = Case(tiles, "processes", Options(), config, clusters=8)
            case.prepare()
            pairs = [(Cost.of(case, 1), Cost.of(case, processes)) for _ in range(repeats)]
            busy = sorted((several.own + several.forked / processes) / one.own for one, several in pairs)
            wall = sorted(several.wall / one.wall for one, several in pairs)
            one, own, forked = (
                min(seconds) for seconds in zip(*((a.own, b.own, b.forked / processes) for a, b in pairs))
            )
            which = "sm_90a" if isinstance(config, Sm90PatchEmbedConfig) else "sm_100a"
            ratios = (f"{ratios[0]:.2f} ({statistics.median(ratios):.2f})" for ratios in (busy, wall))
            table.add_row(which, str(tiles), f"{one:.2f}", f"{own:.2f} + {forked:.2f}", *ratios)
    return table


# --- the whole problem ----------------------------------------------------------------------------------------------


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that forked processes share."""
    count = int(np.prod(shape))
    store = mmap.mmap(-1, count * torch.empty((), dtype=dtype).element_size())
    return torch.frombuffer(store, dtype=dtype, count=count).view(shape)


def headline(images: int, processes: int, detectors: bool, console: Console) -> None:
    """Emulates the full launch, the clusters dealt to processes, and checks rows of the result bit for bit."""
    torch.set_num_threads(1)  # a forked process must not inherit a pool of threads
    rows = images * POSITIONS
    generator = torch.Generator().manual_seed(0)
    x = shared_tensor((rows, FEATURES), torch.float8_e4m3fn)
    for start in range(0, rows, 1 << 15):
        part = x[start : start + (1 << 15)]
        part.copy_(torch.randn(part.shape, generator=generator))
    weight = torch.randn(FEATURES, FEATURES, generator=generator).to(torch.float8_e4m3fn)
    bias, position = (torch.randn(n, FEATURES, generator=generator) for n in (1, POSITIONS))
    plan = make_plan(PatchEmbedProblem(rows, FEATURES, FEATURES, POSITIONS), Sm100PatchEmbedConfig())
    table = build_table(
        bias[0], position, plan.table_shape, plan.table_layout, getattr(torch, plan.table_dtype)
    )
    out = shared_tensor((rows, FEATURES), torch.bfloat16)
    tensors = Operands(x=x, weight=weight, table=table, scale=0.037, out=out)
    context = multiprocessing.get_context("fork")
    done = context.Queue()

    def work(first: int) -> None:
        mine = tuple(range(first, plan.clusters, processes))
        options = Options(clusters=mine, detectors=detectors)
        options = dataclasses.replace(options, progress=lambda count, _: done.put((count > 0, 0)))
        report = emulate(plan, tensors, options)
        done.put((0, report.warp_instructions))

    start = time.perf_counter()
    workers = [context.Process(target=work, args=(first,)) for first in range(processes)]
    for worker in workers:
        worker.start()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    instructions = finished = 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"clusters ({plan.tiles} tiles)", total=plan.clusters)
        while finished < processes:
            clusters, counted = done.get()
            progress.advance(task, clusters)
            finished += bool(counted)
            instructions += counted
            failed = [worker for worker in workers if worker.exitcode]
            if failed:
                raise SystemExit(f"{len(failed)} processes failed")
    seconds = time.perf_counter() - start
    sample = torch.randint(rows, (4096,), generator=generator)
    expected = reference.patch_embed_f32(x[sample], weight, bias[0], position, 0.037, pos_index=sample % POSITIONS)
    wrong = int((out[sample].view(torch.int16) != expected.view(torch.int16)).sum())
    console.print(
        f"{rows} x {FEATURES} x {FEATURES}: {seconds:.0f} s in {processes} processes, "
        f"{1e3 * seconds / plan.tiles:.1f} ms per tile, {instructions / 1e6:.1f} M warp instructions; "
        f"{wrong} of {expected.numel()} sampled elements differ"
    )
    if wrong:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arithmetic", choices=CHOICES, default="silicon", help="of the products")
    parser.add_argument("--gemm", type=int, default=2048, help="size of the square GEMM")
    parser.add_argument("--ctas", type=int, default=2048, help="small ones, of a launch")
    parser.add_argument("--one-launch", action="store_true", help="compare one process and --processes instead")
    parser.add_argument("--preparation", action="store_true", help="what a kernel costs before it runs instead")
    parser.add_argument("--certificate", action="store_true", help="what certificates cost instead")
    parser.add_argument("--headline", action="store_true", help="emulate the whole problem instead")
    parser.add_argument("--images", type=int, default=HEADLINE_IMAGES, help="of the whole problem")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-detectors", action="store_true", help="for --headline")
    arguments = parser.parse_args()
    console = Console()
    if arguments.headline:
        headline(arguments.images, arguments.processes, not arguments.no_detectors, console)
        return
    if arguments.preparation:
        console.print(preparation_table(arguments.repeats))
        return
    if arguments.certificate:
        console.print(certificate_table(arguments.repeats))
        return
    if arguments.one_launch:
        torch.set_num_threads(1)
        console.print(processes_table(arguments.tiles, arguments.processes, arguments.repeats))
        return
    console.print(tile_table(arguments.tiles, arguments.repeats, arguments.arithmetic))
    for detectors in (False, True):
        rate = arithmetic_rate(1_000_000, detectors)
        what = "with" if detectors else "without"
        console.print(f"arithmetic loop, {what} detectors: {rate:.2f} M warp instructions/s")
    seconds = cta_seconds(arguments.ctas, arguments.repeats)
    console.print(
        f"{arguments.ctas} CTAs of 4 warps add vectors: {1e6 * seconds[False]:.1f} us each, with detectors "
        f"{1e6 * seconds[True]:.1f} us"
    )
    seconds = gemm_seconds(arguments.gemm, arguments.repeats, arguments.arithmetic)
    console.print(
        f"{arguments.gemm}^3 FP8 GEMM: {seconds[False]:.2f} s, with detectors {seconds[True]:.2f} s "
        f"({seconds[True] / seconds[False]:.1f} times)"
    )


if __name__ == "__main__":
    main()
