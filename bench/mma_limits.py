"""What holds back the kernels of ``mma.sync``: the same launches with parts of their work left out, clocks and power.

    python -m bench.mma_limits                 # both cases: about a minute
    python -m bench.mma_limits --cases tf32    # a product of 8192^3

Parts are left out of the kernel's source before it is compiled, and results are wrong then. What a launch without a
part saves is the most that hiding this part could. ``clocks`` are those of one ``mma.sync`` on a quarter of a
multiprocessor, at the clock rate of the sustained runs: the bare loop has as few as the hardware needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from bench import image_cases, mma_rate, mma_sync
from bench.cases import BATCHES
from bench.configs import arch_of
from bench.gemm_cases import GemmCase, GemmData
from bench.image_cases import ImagesCase, ImagesData
from bench.results import markdown
from bench.timing import DeviceSampler, Launch, Protocol, Run, measure, summarize
from cute_kernels.config import GemmProblem
from cute_kernels.kernels.sm80.gemm import GemmTiles
from cute_kernels.kernels.sm80.mainloop import Fragments, MainLoop, Warp
from cute_kernels.kernels.sm80.patch_embed_images import ImagesTiles
from cute_kernels.operations.compile import compile_uncached
from cute_kernels.operations.runtime.gpu import BoundLaunch
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan, make_plan
from cute_kernels.plan.sm80 import STEP_BYTES

COPIES, STORES, FRAGMENTS = "copies", "stores", "fragments"
LEFT_OUT = ((), (FRAGMENTS,), (STORES,), (COPIES,), (COPIES, STORES), (COPIES, STORES, FRAGMENTS))
"""Copies into shared memory but those of the first blocks; stores of results; all reads of fragments but the first."""

BARE = "bare mma.sync"

CASES: dict[str, GemmCase | ImagesCase] = {
    "tf32": GemmCase("8192x8192x8192 tf32, truncate", 8192, 8192, 8192, "tf32"),
    "bfloat16": image_cases.make_cases(["base-p16"], BATCHES[-1:], "bfloat16")[0],
}


class _Held(Fragments):
    """Fragments that stay what they are."""

    def load(self, *_: Any) -> None:
        """Reads nothing."""


@cute.jit
def _use(tiles: GemmTiles | ImagesTiles, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
    """In place of ``store``: all sums are needed, and nothing is stored."""
    total = sums[0]
    for i in cutlass.range_constexpr(1, cute.size(sums)):
        total = total + sums[i]
    if total == 12345:
        first = cute.make_tensor(tiles.out, cute.make_layout(1))
        first[0] = total.to(tiles.out.dtype)


@contextlib.contextmanager
def left_out(parts: Sequence[str]) -> Iterator[None]:
    """Kernels that are compiled meanwhile go without these parts of their work."""
    stage, multiply = MainLoop._stage, MainLoop._multiply

    def short_stage(self: MainLoop, sums: cute.Tensor, fragments: Fragments, loads: tuple, *others: Any) -> None:
        if FRAGMENTS in parts:
            fragments = _Held(*(getattr(fragments, field.name) for field in dataclasses.fields(fragments)))
        stage(self, sums, fragments, () if COPIES in parts else loads, *others)

    def first_fragments(self: MainLoop, sums: cute.Tensor, fragments: Fragments, buffer: int) -> None:
        multiply(self, sums, fragments, 0 if FRAGMENTS in parts else buffer)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(MainLoop, "_stage", short_stage))
        stack.enter_context(mock.patch.object(MainLoop, "_multiply", first_fragments))
        for tiles in (GemmTiles, ImagesTiles) if STORES in parts else ():
            stack.enter_context(mock.patch.object(tiles, "store", _use))
        yield


def plan_of(case: GemmCase | ImagesCase, arch: str, sm_count: int) -> Plan:
    """What the plan chooses for a case; TF32 is cut."""
    config = next(iter(mma_sync.configs_of(case, arch, sm_count).values()))
    if isinstance(case, ImagesCase):
        return make_plan(image_cases.problem(case), config, arch, sm_count=sm_count)
    problem = GemmProblem(case.m, case.n, case.k, in_dtype="float32", out_dtype="float32")
    return make_plan(problem, config, arch, sm_count=sm_count)


def operands_of(case: GemmCase | ImagesCase, device: torch.device) -> Operands:
    """Random ones."""
    if isinstance(case, GemmCase):
        data = GemmData(case, device)
        return Operands(a=data.a[0], b=data.b, out=data.out[0])
    images = ImagesData(case, device)
    out = torch.empty(case.images, case.positions, case.n, dtype=torch.bfloat16, device=device)
    return Operands(images=images.images[0], weight=images.weight.flatten(1), table=images.pos.float(), out=out)


def launches(plan: Plan, operands: Operands) -> dict[str, Launch]:
    """The kernel of a plan with and without its parts, by what is left out."""
    given = operands.of(plan).addresses()

    def launch_of(parts: Sequence[str]) -> Launch:
        with left_out(parts):
            artifact = compile_uncached(plan)
        bound = BoundLaunch(plan, artifact)
        return lambda _: bound(**given, stream=torch.cuda.current_stream().cuda_stream)

    return {f"without {', '.join(parts)}" if parts else "all": launch_of(parts) for parts in LEFT_OUT}


def row_of(name: str, runs: Sequence[Run], flops: int, quarters: int, step_flops: int) -> list[str]:
    """A line of the table.

    Args:
        name, runs: of a launch.
        flops: of a launch.
        quarters: of multiprocessors, each with a tensor core.
        step_flops: of one ``mma.sync``.
    """

    def median(mode: str, value: Callable[[Run], float | None]) -> float:
        return summarize([found for run in runs if run.mode == mode and (found := value(run)) is not None]).median

    burst, sustained = (median(mode, lambda run: run.ms) for mode in ("burst", "sustained"))
    mhz, watts = (median("sustained", lambda run, n=name: getattr(run, n)) for name in ("sm_mhz", "watts"))
    clocks = sustained * mhz * 1e3 * quarters * step_flops / flops
    rates = (f"{flops / ms / 1e9:.0f}" for ms in (burst, sustained))
    return [name, f"{burst:.3f}", f"{sustained:.3f}", *rates, f"{mhz:.0f}", f"{watts:.0f}", f"{clocks:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.mma_limits: no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    arch = mma_sync.mma_arch(arch_of(torch.cuda.get_device_capability()))
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    protocol = Protocol(rounds=arguments.rounds, sustained_s=0.25, settle_s=0.1)
    sampler = DeviceSampler(device)
    for name in arguments.cases:
        case = CASES[name]
        plan = plan_of(case, arch, sm_count)
        bare, bare_flops = mma_rate.compiled(mma_sync.RATES[name], arch, turns=2048)
        candidates = launches(plan, operands_of(case, device)) | {BARE: bare}
        runs = measure(candidates, protocol, sampler, 1, case=case.name)
        step_flops = 2 * 16 * 8 * STEP_BYTES // (4 if name == "tf32" else 2)
        header = ["", "burst, ms", "sustained, ms", "burst, TFLOP/s", "sustained, TFLOP/s", "MHz", "W", "clocks"]
        rows = [
            row_of(what, found, bare_flops if what == BARE else case.flops, 4 * sm_count, step_flops)
            for what, found in runs.items()
        ]
        print(f"{case.title}; {plan.config}", markdown(header, rows), sep="\n\n", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
