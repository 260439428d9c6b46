"""Microseconds of Python that a repeated call takes, from the call to the launch in the queue, here or against another
checkout.

    python -m bench.host_time                         # this checkout
    python -m bench.host_time --against ../before     # both, in turns, and the ratio
    python -m bench.host_time --without-device        # the same Python on any machine, up to the launch

Needs a GPU of compute capability 9.0 or 10.0. ``--without-device`` has CPU tensors in place of the device's, and
calls a function that does nothing where the host function of a kernel would be called, which encodes descriptors and
launches: what is left is what Python takes, for comparisons of two checkouts. A sample is the time of 25 calls that
follow each other, divided by 25, with an empty queue before the first, so that none waits for the device; a run's
figure is the median of its samples. Without a device it is the least of them, in time of the processor: whatever else
the machine does only adds to it.
Every run is a process of its own. With ``--against`` runs of both checkouts alternate, so that a host whose clock
changes treats both alike; the lines show the median and the range of the runs. Any version can be compared; calls that
one of the two does not know are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

CALLS = 25
HERE = Path(__file__).resolve().parent.parent


def leave_out_the_device() -> None:
    """Has CPU tensors taken for a device's, on stream 0, and launches nothing; for the rest of this process."""
    import torch

    from cute_kernels.operations import base
    from cute_kernels.operations.runtime import gpu, repeat

    nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(("abs", ctypes.CDLL(None)))

    class NoLaunch(gpu.BoundLaunch):
        def __init__(self, plan: object) -> None:
            self.plan, self._name = plan, "nothing"
            self._given = {operand.name for operand in plan.operands if operand.given} | {"stream"}
            self._function = types.SimpleNamespace(call=nothing)

    repeat._HOST = None
    repeat._current_stream, repeat._current_device, repeat._is_capturing = lambda _: 0, lambda: -1, lambda: False
    repeat._empty_strided = torch._C._dynamo.guards._empty_strided_cpu
    gpu.bound_launch, gpu.launch = NoLaunch, lambda *_: None
    base.choose_backend = lambda *_: "kernel"
    base.Operation._first = lambda self, _, values: self.execute(self.arguments(*values))
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda: None


def cases(device: str) -> dict[str, Callable[[], object]]:
    """Calls by name; the device's work is small, so that the queue never fills."""
    import torch

    import cute_kernels

    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x, weight = (draw(*shape).to(torch.float8_e4m3fn) for shape in ((1, 196, 768), (768, 768)))
    bias, pos = torch.nn.Parameter(draw(768)), torch.nn.Parameter(draw(196, 768))
    scale = torch.tensor(0.05, device=device)
    rows, features = torch.rand(1, 196, 1, device=device), torch.rand(1, 768, device=device)
    index = torch.arange(196, device=device, dtype=torch.int32)[None]
    a, b, addend = draw(196, 768).bfloat16(), draw(768, 768).bfloat16(), draw(768)
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, device=device, generator=generator)

    @functools.cache
    def patches(side: int) -> object:
        return cute_kernels.prepare_patch_weight(draw(768, 3, side, side))

    longer, other = torch.nn.Parameter(draw(256, 768)), draw(768)
    patch_embed, gemm = cute_kernels.patch_embed, cute_kernels.gemm
    operator = torch.ops.cute_kernels.patch_embed
    return {
        "patch_embed": lambda: patch_embed(x, weight, bias, pos, scale_a=0.05),
        "patch_embed, scale tensor": lambda: patch_embed(x, weight, bias, pos, scale_a=scale),
        "patch_embed, two scale tensors": lambda: patch_embed(x, weight, bias, pos, scale_a=scale, scale_b=scale),
        "patch_embed, row-wise scales": lambda: patch_embed(x, weight, bias, pos, scale_a=rows, scale_b=features),
        "patch_embed, pos_index": lambda: patch_embed(x, weight, bias, pos, pos_index=index, scale_a=0.05),
        "patch_embed, torch.ops": lambda: operator(x, weight, bias, pos, None, None, None, 0.05, 1.0, "auto"),
        "patch_embed_images": lambda: cute_kernels.patch_embed_images(images, patches(16), bias, pos),
        "patch_embed_images, pass + rows": lambda: cute_kernels.patch_embed_images(images, patches(14), bias, longer),
        "gemm": lambda: gemm(a, b),
        "gemm, bias": lambda: gemm(a, b, bias=addend),
        "torch.empty_like, to compare": lambda: torch.empty_like(a),
        "tensor.add_(1) of torch, to compare": lambda: other.add_(1),
    }


def measure(rounds: int, without_device: bool) -> dict[str, float]:
    """Median microseconds of every case, whose rounds take turns.

    Raises:
        SystemExit: no GPU, or the package of another folder than the working directory was imported.
    """
    import torch

    import cute_kernels

    if without_device:
        leave_out_the_device()
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device: host time is that of calls that launch")
    imported = Path(cute_kernels.__file__).resolve()
    if not imported.is_relative_to(Path.cwd()):
        raise SystemExit(f"imported {imported}, which is not of {Path.cwd()}")
    calls = cases("cpu" if without_device else "cuda")
    clock = time.process_time if without_device else time.perf_counter
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
                start = clock()
                for _ in range(CALLS):
                    function()
                samples[name].append((clock() - start) / CALLS * 1e6)
    figure = min if without_device else statistics.median
    return {name: figure(values) for name, values in samples.items()}


def run(checkout: Path, rounds: int, without_device: bool) -> dict[str, float]:
    """`measure` in a process that imports the package of a checkout.

    Raises:
        SystemExit: with what the process wrote.
    """
    # In front of what is there: on a machine without an environment of its own, dependencies come that way.
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # What takes the device's place replaces parts of the package, which a checkout's own file knows.
    file = checkout / "bench" / "host_time.py" if without_device else Path(__file__)
    command = [sys.executable, str(file), "--measure", "--rounds", str(rounds)]
    command += ["--without-device"] * without_device
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, the one before")
    parser.add_argument("--runs", type=int, default=5, help="processes of each checkout (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="samples of a run (default: %(default)s)")
    parser.add_argument("--without-device", action="store_true", help="up to the launch, on any machine")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rounds, options.without_device)))
        return
    checkouts = {"here": HERE}
    if options.against is not None:
        if not (options.against / "cute_kernels").is_dir():
            parser.error(f"--against {options.against}: no folder with cute_kernels in it")
        checkouts = {"there": options.against.resolve()} | checkouts
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.runs):
        for name, checkout in checkouts.items():
            found[name].append(run(checkout, options.rounds, options.without_device))
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
        print(f"{case:32}  {'   '.join(parts)}")


if __name__ == "__main__":
    main()
