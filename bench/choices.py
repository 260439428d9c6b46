"""Shapes of the dense GEMM that nobody chose: drawn at random, timed in many configurations, some kept out of fits.

    python -m bench.choices time --seed 1 --seconds 400 --output FILE.csv    # on an SM90 GPU
    python -m bench.choices fit FILE ...       # writes cute_kernels/plan/gemm_sm90_fit.py, prints regrets
    python -m bench.choices regret FILE ...    # prints those of shapes that were kept out; with --all of all

A file is what ``time`` has written, or an archive of such: bench/results/2026-11-29-h200.tar.xz. The chooser was fitted
to that one and to the older.csv in it, squares and layers that were chosen by hand. "Regret" is the time of the
chooser's choice over that of the fastest candidate.

A shape is of a kind, what is multiplied and what follows, in the shares of `KINDS`. One in three is a layer of a vision
or language model at some number of images or rows; the others have M log-uniform from 1 to 65,536, N and K from 64 to
16,384. Of each shape the candidates that the present model finds most promising are timed beside each other, and some
others by chance: launches in CUDA graphs, all in turn; the fastest once more in bursts after a pause. ``--peers`` adds
cuBLAS's: what torch calls, and the algorithms that cuBLASLt's heuristic proposes. Kernels are compiled meanwhile, in
the order in which shapes need them. A candidate that fails, or hangs, costs itself: timing goes on in a new process.

``--narrow`` draws BF16 shapes of few columns or few rows instead, where tiles and clusters matter most, and times tiles
beside the chooser's that the model finds good for several of them; ``--other-tiles`` times such tiles on BF16
shapes of 64 rows or more. ``--images`` draws models of `patch_embed_images` and `patch_embed` (`bench.choices_images`);
``fit --images`` and ``regret --images`` take their files.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import gc
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench import choices_fit, choices_images
from bench.choices_fit import held_out
from bench.configs import arch_of
from bench.peers.cublaslt import CublasError, Matmul, Operand
from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.dsl import kernel_cache
from cute_kernels.explore.tuning import search
from cute_kernels.operations.base import Operation
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import ARCHS, Plan, gemm_sm90_fit, make_plan, patches_sm90
from cute_kernels.plan import gemm_sm90 as sm90
from cute_kernels.plan.base import ITEMSIZE

_BIAS: dict[str, Any] = {"bias": True, "bias_dtype": "bfloat16"}
_FP8: dict[str, Any] = {"in_dtype": "float8_e4m3fn", "row_scale": True, "column_scale": True}
_GELU: dict[str, Any] = {"activation": "gelu_tanh"}

KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "bf16": (0.40, {}),
    "fp8": (0.16, _FP8),
    "bf16 gelu": (0.12, _BIAS | _GELU),
    "tf32": (0.10, {"in_dtype": "float32", "out_dtype": "float32"}),
    "fp8 gelu to fp8": (0.10, _FP8 | _GELU | {"out_dtype": "float8_e4m3fn"}),
    "bf16 residual": (0.06, {"residual": "bfloat16"}),
    "int8": (0.06, _FP8 | {"in_dtype": "int8"}),
}
"""Share of the shapes and fields of the problem, by the name of a kind."""

RARE = ("bf16 residual", "int8")
"""Kinds with fewer candidates: kernels are compiled for every kind."""

WIDTHS = (
    (384, 1536), (512, 2048), (768, 3072), (1024, 4096), (1152, 4304), (1280, 5120), (1408, 6144), (1536, 6144),
    (1664, 8192), (2048, 8192), (3200, 12800), (4096, 11008), (4096, 14336), (5120, 13824),
)  # fmt: skip
"""Width and hidden width of vision and language models."""

POSITIONS = (49, 196, 197, 201, 256, 257, 261, 576, 577, 729, 730, 784, 1024, 1025, 1369, 2050)
IMAGES = (1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

MOST_MACS = 1e12
"""Of 16-bit operands: a launch takes at most about 3 ms."""

MOST_BYTES = 1 << 30

OUT_OF_REACH = tuple(
    GemmProblem(*sizes)
    for sizes in ((535, 2096, 5184), (134, 4240, 1904), (2970, 416, 8032), (784, 768, 3072), (128, 4096, 4096))
)
"""Where once no candidate was as fast as cuBLASLt: at the end more of the search space is timed, beside cuBLAS."""

_PROMISING = 24
_BY_CHANCE = 12
_OTHER_TILES = 80
_NEAR = 0.05
"""How much longer than the least modelled time a tile may take until it counts little."""
_SCATTER = 0.12
"""How far from the best modelled time a candidate by chance is, as an exponent."""

FIELDS = [field.name for field in dataclasses.fields(Sm90GemmConfig)]
COLUMNS = [
    "number", "kind", "m", "n", "k", "candidate", *FIELDS, "chosen", "mode", "rounds", "microseconds", "failure",
]  # fmt: skip


Launch = Callable[[int, int], object]


@dataclass(frozen=True)
class Shape:
    number: int
    kind: str
    problem: GemmProblem

    operation: ClassVar[Operation] = GEMM
    columns: ClassVar[Sequence[str]] = COLUMNS

    @property
    def row(self) -> list[Any]:
        return [self.number, self.kind, self.problem.m, self.problem.n, self.problem.k]

    def cells(self, config: Sm90GemmConfig | None) -> list[Any]:
        """Of a configuration; of a peer, None."""
        return ["" if config is None else int(getattr(config, name)) for name in FIELDS]

    def peers(self, inputs: Sequence[Any]) -> dict[str, Launch]:
        return peers(self, inputs)


def log_uniform(generator: random.Random, least: int, most: int) -> int:
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def draw(seed: int, count: int) -> list[Shape]:
    """Shapes of a seed: a third of each kind's in blocks, so that kernels are ready, then the others mixed."""
    generator = random.Random(seed)
    drawn: list[tuple[str, GemmProblem]] = []
    while len(drawn) < count:
        (kind,) = generator.choices(list(KINDS), [share for share, _ in KINDS.values()])
        if generator.random() < 1 / 3:
            width, hidden = generator.choice(WIDTHS)
            m = generator.choice(POSITIONS) * generator.choice(IMAGES)
            n, k = generator.choice(((3 * width, width), (width, width), (hidden, width), (width, hidden)))
        else:
            m = log_uniform(generator, 1, 65536)
            n, k = (8 * log_uniform(generator, 8, 2048) for _ in range(2))
        problem = GemmProblem(m, n, k, **KINDS[kind][1])
        size = ITEMSIZE[problem.in_dtype]
        step = 16 if size == 1 else 8  # of cuBLAS's products of 8 bits
        problem = dataclasses.replace(problem, n=-(-n // step) * step, k=-(-k // step) * step)
        p = problem
        if p.m * p.n * p.k * size <= 2 * MOST_MACS and (p.m + p.n) * p.k * size + p.m * p.n * 4 <= MOST_BYTES:
            drawn.append((kind, problem))
    blocks: list[tuple[str, GemmProblem]] = []
    for kind in KINDS:
        own = [each for each in drawn if each[0] == kind]
        blocks += own[: len(own) // 3]
    rest = [each for each in drawn if each not in blocks]
    return [Shape(number, *each) for number, each in enumerate(blocks + rest)]


def draw_narrow(seed: int, count: int) -> list[Shape]:
    """Shapes of BF16: three of five have few columns, the others few rows."""
    generator, shapes = random.Random(seed), []
    for number in range(count):
        few_columns = (2000, 50000), (4, 36), (32, 512)
        few_rows = (16, 600), (128, 640), (64, 512)
        m, *others = (log_uniform(generator, *range_) for range_ in (few_columns if number % 5 < 3 else few_rows))
        shapes.append(Shape(number, "bf16", GemmProblem(m, *(16 * each for each in others))))
    return shapes


def large_bf16(seed: int, count: int) -> list[Shape]:
    """Those of `draw` in BF16 that have a tile of rows or more."""
    return [shape for shape in draw(seed, count) if shape.kind == "bf16" and shape.problem.m >= 64]


# --- candidates ------------------------------------------------------------------------------------------------------


def candidates(shape: Shape, arch: str = "sm_90a", sm_count: int = 132) -> list[Plan]:
    """What is timed of a shape: the chooser's own first, then the most promising, then some by chance."""
    generator = random.Random(f"{shape.number} {shape.problem}")
    own = make_plan(shape.problem, arch=arch, sm_count=sm_count)
    plans = sm90.candidates(shape.problem, ARCHS[arch], sm_count)
    clocks = {plan: sm90.modelled_clocks(plan) for plan in plans}
    ranked = sorted(clocks, key=clocks.__getitem__)
    best = min(clocks.values(), default=1.0)

    def luck(plan: Plan) -> float:
        return math.log(clocks[plan] / best) / _SCATTER + math.log(-math.log(1 - generator.random()))

    share = 2 if shape.kind in RARE else 1
    promising = _PROMISING // share
    others = sorted(ranked[promising:], key=luck)[: _BY_CHANCE // share]
    return list(dict.fromkeys([own, *ranked[:promising], *others]))


def more_candidates(problem: GemmProblem, arch: str = "sm_90a", sm_count: int = 132) -> list[Plan]:
    """Of a shape that is out of reach: much of the search space."""
    found = sorted(sm90.search_space(problem, ARCHS[arch], sm_count), key=sm90.modelled_clocks)
    return list(dict.fromkeys([make_plan(problem, arch=arch, sm_count=sm_count), *found[:110]]))


def other_candidates(shapes: Sequence[Shape], arch: str = "sm_90a", sm_count: int = 132) -> list[list[Plan]]:
    """Of each shape the chooser's ten most promising, and 30 in tiles that it does not have."""
    found = (sm90.search_space(shape.problem, ARCHS[arch], sm_count) for shape in shapes)
    spaces = [sorted(space, key=sm90.modelled_clocks) for space in found]
    worth: Counter[tuple] = Counter()
    for space in spaces:
        least = sm90.modelled_clocks(space[0])
        for plan in space[:80]:
            worth[sm90.tile(plan.config)] += math.exp((1 - sm90.modelled_clocks(plan) / least) / _NEAR)
    tiles = [tile for tile, _ in worth.most_common() if tile not in gemm_sm90_fit.CANDIDATES][:_OTHER_TILES]
    found = []
    for shape, space in zip(shapes, spaces, strict=True):
        own = make_plan(shape.problem, arch=arch, sm_count=sm_count)
        known = sorted(sm90.candidates(shape.problem, ARCHS[arch], sm_count), key=sm90.modelled_clocks)[:10]
        others = [plan for plan in space if sm90.tile(plan.config) in tiles][:30]
        found.append(list(dict.fromkeys([own, *known, *others])))
    return found


def work(seed: int, count: int, narrow: bool = False, other_tiles: bool = False) -> list[tuple[Shape, list[Plan]]]:
    """Shapes in the order in which they are timed, and their candidates; last those that are out of reach."""
    if narrow or other_tiles:
        shapes = draw_narrow(seed, count) if narrow else large_bf16(seed, count)
        return list(zip(shapes, other_candidates(shapes), strict=True))
    last = [Shape(count + number, "bf16", problem) for number, problem in enumerate(OUT_OF_REACH)]
    return [
        *((shape, candidates(shape)) for shape in draw(seed, count)),
        *((shape, more_candidates(shape.problem)) for shape in last),
    ]


# --- cuBLAS ----------------------------------------------------------------------------------------------------------


def peers(shape: Shape, inputs: Sequence[Any]) -> dict[str, Launch]:
    """cuBLAS's launches of a kind by name: what torch calls, and cuBLASLt's algorithms, which add no bias here."""
    p, first, count = shape.problem, inputs[0], len(inputs)
    rows, b = [each.a.view(p.m, p.k) for each in inputs], first.b.view(p.n, p.k)
    if p.in_dtype == "int8":
        return {}
    if shape.kind.startswith("fp8"):
        rows, b = [row.to(torch.float8_e4m3fn) for row in rows], b.to(torch.float8_e4m3fn)
        scales = {"scale_a": first.scale_a.view(p.m, 1), "scale_b": first.scale_b.view(1, p.n)}
        return {
            f"torch _scaled_mm, fast {fast}": lambda i, _, fast=fast: torch._scaled_mm(
                rows[i % count], b.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            for fast in (True, False)
        }
    torch.backends.cuda.matmul.allow_tf32 = True
    if p.activation != "none":
        return {
            "torch _addmm_activation": lambda i, _: torch._addmm_activation(
                first.bias, rows[i % count], b.T, use_gelu=True
            )
        }
    if p.residual is not None:
        residual = first.residual.view(p.m, p.n)
        return {"torch addmm": lambda i, _: torch.addmm(residual, rows[i % count], b.T)}
    out = torch.empty(p.m, p.n, device="cuda", dtype=rows[0].dtype)
    found: dict[str, Launch] = {"torch linear": lambda i, _: torch.nn.functional.linear(rows[i % count], b, first.bias)}
    operands = Operand(p.k, p.n, p.k, 0), Operand(p.k, p.m, p.k, 0), Operand(p.n, p.m, p.n, 0)
    kind = "tf32" if p.in_dtype == "float32" else "bf16"
    with contextlib.suppress(CublasError):
        matmul = Matmul(*operands, batch=1, alpha=1.0, device=torch.cuda.current_device(), kind=kind)
        for number, algorithm in enumerate(matmul.algorithms(9)):
            found[f"cuBLASLt {number}"] = lambda i, _, algorithm=algorithm: matmul.run(
                algorithm, b.data_ptr(), rows[i % count].data_ptr(), out.data_ptr(), out.data_ptr()
            )
    return found


# --- timing ----------------------------------------------------------------------------------------------------------

_MOST_INPUTS = 64  # a graph has no more launches
_RUN_MS = 1.5
_ROUNDS = 9
_FIRST_ROUNDS = 2
_BEHIND = 1.3  # what takes this much longer after the first rounds is timed no more
_BURSTS, _BURST, _PAUSE_S, _FINALISTS = 5, 10, 0.004, 8
_LAST_S = 16.0  # for those that are out of reach
_WAIT_S = 15.0  # for a kernel that is being compiled
_STALL_S = 40.0
_CRASHES = 8


def absent(plan: Plan) -> set[tuple]:
    """Keys of its kernels that are not in the disk cache."""
    folder, keys = kernel_cache.directory(), [kernel.kernel_key for kernel in plan.launches]
    return {key for key in keys if folder is None or not kernel_cache.entry_path(folder, key).exists()}


def input_sets(operation: Operation, problem: Any) -> list[Any]:
    """As `search.input_sets`, but no more than a graph has launches."""
    first = operation.example(problem, "cuda")
    nbytes = (
        sum(t.nbytes for _, _, t in operation.table.tensors_of(first)) + math.prod(operation.output_shape(first)) * 4
    )
    more = min(_MOST_INPUTS, -(-search.ROTATED_BYTES // nbytes)) - 1
    others = (operation.example(problem, "cuda") for _ in range(more))
    name = operation.rotated
    return [first, *(dataclasses.replace(first, **{name: getattr(other, name)}) for other in others)]


class Stopwatch:
    """Timers of a shape's launches, each with as many launches in a graph."""

    def __init__(self, operation: Operation, inputs: Sequence[Any]) -> None:
        self.operation, self.inputs = operation, inputs
        self.outputs: list[torch.Tensor] = []
        self.expected: torch.Tensor | None = None
        self.launches = 0

    def launch_of(self, plan: Plan) -> Launch:
        """A plan's launches, after its result was compared with that of the first one.

        Raises:
            RuntimeError: it computes something else.
        """
        slots = [self.operation.prepare(arguments, plan).operands for arguments in self.inputs]
        self.outputs = self.outputs or [slot.out for slot in slots]
        slots = [slot.replace(out=out.view(slot.out.shape)) for slot, out in zip(slots, self.outputs, strict=True)]
        calls = [search.calls_of(plan, slot) for slot in slots]

        def launch(i: int, stream: int, calls=calls, slots=slots) -> None:  # slots: calls have addresses only
            for call in calls[i % len(slots)]:
                call((stream,))

        out = self.outputs[0][..., : plan.problem.n]
        out.view(torch.uint8).fill_(0x7F)  # NaN of 8 bits, and beyond every sum of the other types
        launch(0, torch.cuda.current_stream().cuda_stream)
        result = out.to(torch.float32, copy=True)
        if self.expected is None:
            self.expected = result.clone()
        error = float((result - self.expected).norm() / self.expected.norm())
        if not error <= search.MAX_ERROR * (4 if getattr(plan, "narrows", False) else 1):
            raise RuntimeError(f"it differs by {error:.3g} of the norm")
        return launch

    def timer(self, launch: Launch) -> search.Timer:
        launch(0, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        if not self.launches:
            single = search.replay_timer(launch, 1)
            single()
            self.launches = max(1, min(_MOST_INPUTS, round(_RUN_MS / max(single(), 1e-4))))
        return search.replay_timer(launch, self.launches)


def medians(timers: dict[Any, search.Timer], rounds: int, seed: int) -> dict[Any, float]:
    return search.interleaved(timers, rounds, seed)


def time_shape(
    shape: Shape, plans: Sequence[Plan], with_peers: bool, skipped: set[int], at: Callable[[int], None]
) -> list[list[Any]]:
    """Rows of the file: times of a shape's candidates, and failures.

    Args:
        plans: candidates, the chosen one first; those that are not compiled are left out.
        skipped: places in ``plans`` of what has crashed before.
        at: is told the place that is tried next.
    """
    watch = Stopwatch(shape.operation, input_sets(shape.operation, shape.problem))
    launches: dict[Any, Launch] = {}
    timers: dict[Any, search.Timer] = {}
    rows: list[list[Any]] = []

    def record(key: Any, mode: str, rounds: int, microseconds: float | str, failure: str = "") -> None:
        ours = not isinstance(key, str)
        chosen, name = int(key == plans[0].config), "ours" if ours else key
        cells = shape.cells(key if ours else None)
        rows.append([*shape.row, name, *cells, chosen, mode, rounds, microseconds, failure])

    def attempt(place: int, key: Any, make: Callable[[], Launch]) -> None:
        at(place)
        if place in skipped:
            record(key, "", 0, "", "crashed or hung")
            return
        try:
            launches[key] = make()
            timers[key] = watch.timer(launches[key])
        except Exception as error:
            record(key, "", 0, "", f"{type(error).__name__}: {error}".splitlines()[0][:120])
            torch.cuda.synchronize()  # an error that stays ends the process here

    for place, plan in enumerate(plans):
        if not absent(plan):
            attempt(place, plan.config, functools.partial(watch.launch_of, plan))
    at(len(plans))
    others = shape.peers(watch.inputs) if with_peers else {}
    for place, (name, launch) in enumerate(others.items(), len(plans)):
        attempt(place, name, lambda launch=launch: launch)
    first = medians(timers, _FIRST_ROUNDS, shape.number)
    least = min(first.values())
    kept = {key: timer for key, timer in timers.items() if first[key] <= _BEHIND * least}
    rounds = _ROUNDS * (1 + (watch.launches == _MOST_INPUTS))  # those are short
    again = medians(kept, rounds, shape.number + 1)
    for key, value in (first | again).items():
        record(key, "sustained", rounds if key in again else _FIRST_ROUNDS, round(1e3 * value, 3))
    finalists = sorted(again, key=again.__getitem__)[:_FINALISTS]
    finalists += [key for key in again if (key == plans[0].config or key in others) and key not in finalists]
    bursts: dict[Any, search.Timer] = {}
    for key in finalists:
        bursts[key] = functools.partial(rested, search.replay_timer(launches[key], _BURST))
    for key, value in medians(bursts, _BURSTS, shape.number).items():
        record(key, "burst", _BURSTS, round(1e3 * value, 3))
    return rows


def rested(timer: search.Timer) -> float:
    time.sleep(_PAUSE_S)
    return timer()


def read(paths: Sequence[Path]) -> list[choices_fit.Timed]:
    """Shapes and times of files of ``time``, or of ``choices*.csv`` in archives."""
    return choices_fit.read(choices_fit.files_of(paths, "choices*.csv"), parsed)


def parsed(row: dict[str, str]) -> tuple[GemmProblem, Sm90GemmConfig | None]:
    """Of a row of a file."""
    problem = GemmProblem(*(int(row[name]) for name in "mnk"), **KINDS[row["kind"]][1])
    if row["candidate"] != "ours":
        return problem, None
    return problem, Sm90GemmConfig(**{name: kinds[0](int(row[name])) for name, kinds in Sm90GemmConfig.types.items()})


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass
class Files:
    """Of a measurement: its rows, the pickled work, and where the timing process is."""

    output: Path

    @property
    def work(self) -> Path:
        return self.output.with_suffix(".work")

    @property
    def progress(self) -> Path:
        return self.output.with_suffix(".progress")

    def at(self, shape: int, place: int) -> None:
        self.progress.write_text(f"{shape} {place}")

    def where(self, start: int) -> tuple[int, int]:
        """Shape and place; the first of ``start`` where a process was ended while it wrote them."""
        found = self.progress.read_text().split()
        return (int(found[0]), int(found[1])) if len(found) == 2 else (start, 0)


def time_all(files: Files, start: int, skipped: set[tuple[int, int]], deadline: float, with_peers: bool) -> None:
    """The timing process: shapes from ``start`` on; rows are written after each, until ``deadline`` (`time.time`)."""
    shapes: list[tuple[Shape, list[Plan]]] = pickle.loads(files.work.read_bytes())
    capability = torch.cuda.get_device_capability()
    if arch_of(capability) != "sm_90a":
        raise RuntimeError(f"compute capability {capability}: must be 9.0")
    missing: set[tuple] = set()
    last = any(shape.problem in OUT_OF_REACH for shape, _ in shapes)
    gc.freeze()  # a capture may collect garbage, which takes as long as there are objects
    for index, (shape, plans) in enumerate(shapes):
        special = shape.problem in OUT_OF_REACH
        if index < start or time.time() > deadline - _LAST_S * (last and not special):
            continue
        files.at(index, 0)
        until = min(time.time() + _WAIT_S * (4 if index == 0 else 1), deadline)
        while not special and time.time() < until and any(absent(plan) - missing for plan in plans):
            time.sleep(0.05)
            files.at(index, 0)
        there = sum(not absent(plan) for plan in plans)
        missing.update(key for plan in plans for key in absent(plan))
        if there < 2:
            print(f"{index}: no kernels", file=sys.stderr, flush=True)
            continue
        began = time.time()
        gone = {place for number, place in skipped if number == index}
        rows = time_shape(shape, plans, with_peers or special, gone, functools.partial(files.at, index))
        with files.output.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(
            f"{index} {shape.row[1:]}: {there} of {len(plans)} candidates, {time.time() - began:.2f} s",
            file=sys.stderr,
            flush=True,
        )
        torch.cuda.empty_cache()


def measure(files: Files, shapes: list[tuple[Shape, list[Plan]]], seconds: float, with_peers: bool) -> None:
    """Compiles and times in processes of their own; a timing process that crashes or stalls is followed by another."""
    deadline = time.time() + seconds
    files.work.write_bytes(pickle.dumps(shapes))
    with files.output.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(shapes[0][0].columns)
    plans = kernels(shapes)
    print(f"{len(shapes)} shapes, {len(plans)} kernels", file=sys.stderr, flush=True)
    compiling = compiled(plans)
    start, skipped = 0, set()
    try:
        for _ in range(_CRASHES):
            files.at(start, 0)
            arguments = files.output, start, json.dumps(sorted(skipped)), deadline, int(with_peers)
            timing = started([sys.executable, "-m", "bench.choices", "--timing", *map(str, arguments)])
            if watched(timing, files, deadline + _STALL_S):
                break
            start, place = files.where(start)
            print(f"crashed or stalled at {start}, {place}", file=sys.stderr, flush=True)
            again = any(number == start for number, _ in skipped)
            skipped.add((start, place))
            start += again
    finally:
        ended(compiling)
        files.work.unlink()
        files.progress.unlink()


def kernels(shapes: list[tuple[Shape, list[Plan]]]) -> list[Plan]:
    """All different ones, in the order in which shapes need them."""
    launches = (each for _, group in shapes for plan in group for each in plan.launches)
    return list({plan.kernel_key: plan for plan in launches}.values())


def compiled(plans: list[Plan]) -> subprocess.Popen:
    """The process that compiles plans into the disk cache, in their order."""
    compiling = started(["nice", sys.executable, "-m", "bench.compile_ahead"], stdin=subprocess.PIPE)
    compiling.stdin.write(pickle.dumps(plans))
    compiling.stdin.close()
    return compiling


def started(command: Sequence[str], **options: Any) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"CUTE_KERNELS_CACHE_MB": "8000"} | os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def ended(process: subprocess.Popen) -> None:
    """With the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watched(process: subprocess.Popen, files: Files, latest: float) -> bool:
    """Whether a timing process came to its end; one that makes no progress, or is late, is ended."""
    while process.poll() is None:
        time.sleep(0.2)
        if time.time() > latest or time.time() - files.progress.stat().st_mtime > _STALL_S:
            ended(process)
            return time.time() > latest
    return process.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--timing"]:
        output, start, skipped, deadline, with_peers = arguments[1:]
        pairs = {(index, place) for index, place in json.loads(skipped)}
        time_all(Files(Path(output)), int(start), pairs, float(deadline), bool(int(with_peers)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time", help="on an SM90 GPU")
    timing.add_argument("--output", type=Path, required=True)
    compiling = commands.add_parser("compile", help="what `time` of the same shapes would, before")
    for command in (timing, compiling):
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--count", type=int, default=400, help="shapes that are drawn, if there is time for all")
        kinds = command.add_mutually_exclusive_group()
        kinds.add_argument("--narrow", action="store_true", help="shapes of few columns or few rows")
        kinds.add_argument("--other-tiles", action="store_true", help="those of BF16 in tiles that no choice has yet")
        kinds.add_argument("--images", action="store_true", help="`patch_embed_images` and `patch_embed`")
        kinds.add_argument("--passes", action="store_true", help="images that a pass lays out: eight, none drawn")
    timing.add_argument("--seconds", type=float, default=400)
    timing.add_argument("--peers", action="store_true", help="time cuBLAS beside ours")
    fitting = commands.add_parser("fit", help="the chooser, to shapes that are not kept out")
    judging = commands.add_parser("regret", help="of the chooser, on shapes that were kept out")
    judging.add_argument("--all", action="store_true", help="on all shapes: no fit has seen the files")
    judging.add_argument("--top", type=int, default=1, help="of the fastest of so many, as a tuner times them")
    for command in (fitting, judging):
        command.add_argument("--images", action="store_true", help="`patch_embed_images` and `patch_embed`")
        command.add_argument("files", type=Path, nargs="*", help="of time, or archives; of images also all recorded")
    args = parser.parse_args(arguments)
    if args.command in ("time", "compile"):
        if args.passes:
            shapes = choices_images.passes()
        elif args.images:
            shapes = choices_images.work(args.seed, args.count)
        else:
            shapes = work(args.seed, args.count, args.narrow, args.other_tiles)
        if args.command == "compile":
            return compiled(kernels(shapes)).wait()
        measure(Files(args.output), shapes, args.seconds, args.peers)
        return 0
    shapes = choices_images.read(args.files or choices_images.RECORDED) if args.images else read(args.files)
    if args.command == "regret":
        choices_fit.report_regrets([shape for shape in shapes if args.all or held_out(shape.problem)], args.top)
        return 0
    seen = [shape for shape in shapes if not held_out(shape.problem)]
    with choices_fit.doubles():
        if args.images:
            choices_fit.report_fit(choices_images.PatchData(seen), Path(patches_sm90.__file__), choices_images.text)
        else:
            choices_fit.report_fit(choices_fit.GemmData(seen), Path(gemm_sm90_fit.__file__), choices_fit.gemm_text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
