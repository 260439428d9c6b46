"""The pass that lays out images as rows of patches, beside a copy of the same images, on one GPU in the same run.

    python -m bench.patchify                              # 4736 images of 224 x 224
    python -m bench.patchify --images 64 --side 448

The rows are compared with plain torch, element by element with the result poisoned before, and then timed by the
protocol of bench/timing.py. Prints milliseconds per launch, medians of all rounds, as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from bench.configs import arch_of
from bench.timing import DeviceSampler, Protocol, measure
from cute_kernels.operations import reference
from cute_kernels.operations.runtime import gpu
from cute_kernels.plan import ARCHS
from cute_kernels.plan.patchify import PatchifyPlan, PatchifyProblem, plan_patchify

CASES: dict[str, dict] = {
    "uint8, p = 16": {"patch": 16},
    "uint8, p = 32": {"patch": 32},
    "uint8, channels last, p = 16": {"patch": 16, "channels_last": True, "order": "hwc"},
    "uint8 to BF16, p = 16": {"patch": 16, "out_dtype": "bfloat16"},
    "BF16, p = 16": {"patch": 16, "in_dtype": "bfloat16", "out_dtype": "bfloat16"},
    "uint8, p = 14": {"patch": 14},
    "BF16, p = 14": {"patch": 14, "in_dtype": "bfloat16", "out_dtype": "bfloat16"},
    "BF16, channels last to planes, p = 16": {
        "patch": 16, "in_dtype": "bfloat16", "out_dtype": "bfloat16", "channels_last": True,
    },
}  # fmt: skip
"""Of every row of the table, what differs from uint8 images in planes, laid out in the order (channel, row, column)."""

_CHUNK = 16
"""Images that are compared at once."""


def problem_of(name: str, images: int, side: int) -> PatchifyProblem:
    """The problem of a case for square images of three channels."""
    return PatchifyProblem(batch=images, channels=3, height=side, width=side, **CASES[name])


def draw(problem: PatchifyProblem) -> torch.Tensor:
    """Random images on the GPU, in the problem's memory order."""
    shape = (problem.batch, problem.channels, problem.height, problem.width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").to(getattr(torch, problem.in_dtype))
    return images.contiguous(memory_format=torch.channels_last) if problem.channels_last else images


def build(plan: PatchifyPlan, images: torch.Tensor, rows: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """A launch fills ``rows`` and returns it."""
    stream = torch.cuda.current_stream().cuda_stream
    bound = gpu.bound_launch(plan)
    run = bound.with_constants((), images=images.data_ptr(), x=rows.data_ptr(), stream=stream)

    def launch(_: int) -> torch.Tensor:
        run(())
        return rows

    return launch


def differing(images: torch.Tensor, rows: torch.Tensor, problem: PatchifyProblem) -> int:
    """Elements of the rows that are not what plain torch makes of the images; padding has to be zero."""
    count, positions, k = 0, problem.positions, problem.channels * problem.patch**2
    for start in range(0, problem.batch, _CHUNK):
        part = images[start : start + _CHUNK]
        expected = reference.patch_rows(part, problem.patch)
        if problem.order == "hwc":
            expected = expected.unflatten(1, (problem.channels, problem.patch**2)).transpose(1, 2).flatten(1)
        got = rows[start * positions : (start + len(part)) * positions]
        count += int((got[:, :k] != expected.to(rows.dtype)).sum()) + int((got[:, k:] != 0).sum())
    return count


def run_case(name: str, problem: PatchifyProblem, protocol: Protocol, sampler: DeviceSampler) -> tuple[float, float]:
    """Milliseconds of the pass and of the copy.

    Raises:
        AssertionError: a row is wrong.
    """
    plan = plan_patchify(problem, ARCHS[arch_of(torch.cuda.get_device_capability())])
    images = draw(problem)
    shape = (problem.batch * problem.positions, plan.row_elements)
    rows = torch.full(shape, 77, dtype=getattr(torch, problem.out_dtype), device="cuda")
    launch = build(plan, images, rows)
    launch(0)
    wrong = differing(images, rows, problem)
    if wrong:
        raise AssertionError(f"{name}: {wrong:,} of {rows.numel():,} elements are wrong")
    target = torch.empty_like(images)
    candidates = {"pass": launch, "copy": lambda _: target.copy_(images)}
    # The images of a useful size do not fit into L2: one input set.
    runs = measure(candidates, protocol, sampler, 1, ("burst",), case=name)
    taken, copied = (statistics.median(run.ms for run in runs[candidate]) for candidate in candidates)
    return taken, copied


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4736, help="default: %(default)s")
    parser.add_argument("--side", type=int, default=224, help="pixels, whole patches; default: %(default)s")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        protocol = Protocol(rounds=arguments.rounds, burst_launches=10, seed=arguments.seed)
        problems = {name: problem_of(name, arguments.images, arguments.side) for name in arguments.cases}
        for problem in problems.values():
            plan_patchify(problem, ARCHS["sm_90a"])
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("bench.patchify: no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(arguments.seed)
    sampler = DeviceSampler(torch.device("cuda", torch.cuda.current_device()))
    print("| images | pass | copy of the images |\n|---|---|---|")
    for name, problem in problems.items():
        taken, copied = run_case(name, problem, protocol, sampler)
        print(f"| {name} | {taken:.3f} | {copied:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
