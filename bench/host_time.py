"""Microseconds of Python that a repeated call takes, from the call to the launch in the queue, here or against another
checkout.

    python -m bench.host_time                         # this checkout
    python -m bench.host_time --against ../before     # both, in turns, and the ratio

Needs a GPU of compute capability 9.0 or 10.0. A sample is the time of 25 calls that follow each other, divided by 25,
with an empty queue before the first, so that none waits for the device; a run's figure is the median of its samples.
Every run is a process of its own. With ``--against`` runs of both checkouts alternate, so that a host whose clock
changes treats both alike; the lines show the median and the range of the runs. Any version can be compared; calls that
one of the two does not know are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CALLS = 25
HERE = Path(__file__).resolve().parent.parent


def cases() -> dict[str, Callable[[], object]]:
    """Calls by name; the device's work is small, so that the queue never fills."""
    import torch

    import cute_kernels

    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    x, weight = (draw(*shape).to(torch.float8_e4m3fn) for shape in ((1, 196, 768), (768, 768)))
    bias, pos = torch.nn.Parameter(draw(768)), torch.nn.Parameter(draw(196, 768))
    scale = torch.tensor(0.05, device="cuda")
    rows, features = torch.rand(1, 196, 1, device="cuda"), torch.rand(1, 768, device="cuda")
    index = torch.arange(196, device="cuda", dtype=torch.int32)[None]
    a, b, addend = draw(196, 768).bfloat16(), draw(768, 768).bfloat16(), draw(768)
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, device="cuda", generator=generator)

    @functools.cache
    def patches() -> object:
        return cute_kernels.prepare_patch_weight(draw(768, 3, 16, 16))

    patch_embed, gemm = cute_kernels.patch_embed, cute_kernels.gemm
    operator = torch.ops.cute_kernels.patch_embed
    return {
        "patch_embed": lambda: patch_embed(x, weight, bias, pos, scale_a=0.05),
        "patch_embed, scale tensor": lambda: patch_embed(x, weight, bias, pos, scale_a=scale),
        "patch_embed, row-wise scales": lambda: patch_embed(x, weight, bias, pos, scale_a=rows, scale_b=features),
        "patch_embed, pos_index": lambda: patch_embed(x, weight, bias, pos, pos_index=index, scale_a=0.05),
        "patch_embed, torch.ops": lambda: operator(x, weight, bias, pos, None, None, None, 0.05, 1.0, "auto"),
        "patch_embed_images": lambda: cute_kernels.patch_embed_images(images, patches(), bias, pos),
        "gemm": lambda: gemm(a, b),
        "gemm, bias": lambda: gemm(a, b, bias=addend),
    }


def measure(rounds: int) -> dict[str, float]:
    """Median microseconds of every case, whose rounds take turns.

    Raises:
        SystemExit: no GPU, or the package of another folder than the working directory was imported.
    """
    import torch

    import cute_kernels

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: host time is that of calls that launch")
    imported = Path(cute_kernels.__file__).resolve()
    if not imported.is_relative_to(Path.cwd()):
        raise SystemExit(f"imported {imported}, which is not of {Path.cwd()}")
    calls = cases()
    with torch.no_grad():
        for name, function in list(calls.items()):  # compile, remember, fill the allocator
            try:
                for _ in range(3):
                    function()
            except (AttributeError, NotImplementedError):  # of an older version
                del calls[name]
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, function in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def run(checkout: Path, rounds: int) -> dict[str, float]:
    """`measure` in a process that imports the package of a checkout.

    Raises:
        SystemExit: with what the process wrote.
    """
    # In front of what is there: on a machine without an environment of its own, dependencies come that way.
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--measure", "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, the one before")
    parser.add_argument("--runs", type=int, default=5, help="processes of each checkout (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="samples of a run (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rounds)))
        return
    checkouts = {"here": HERE}
    if options.against is not None:
        if not (options.against / "cute_kernels").is_dir():
            parser.error(f"--against {options.against}: no folder with cute_kernels in it")
        checkouts = {"there": options.against.resolve()} | checkouts
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.runs):
        for name, checkout in checkouts.items():
            found[name].append(run(checkout, options.rounds))
    for case in found["here"][0]:
        if any(case not in result for runs in found.values() for result in runs):
            continue
        parts, medians = [], {}
        for name, runs in found.items():
            values = [result[case] for result in runs]
            medians[name] = statistics.median(values)
            parts.append(f"{name} {medians[name]:6.2f} us ({min(values):.2f} to {max(values):.2f})")
        if len(medians) > 1:
            parts.append(f"here / there {medians['here'] / medians['there']:.3f}")
        print(f"{case:28}  {'   '.join(parts)}")


if __name__ == "__main__":
    main()
