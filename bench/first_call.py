"""Seconds until the first result of a process whose kernel is on disk, by part; and of the process that compiled it.

    python -m bench.first_call                       # on a GPU of compute capability 9.0 or 10.0
    python -m bench.first_call --backend emulator    # anywhere; what the emulator adds is in the call

Every line is a process of its own. "torch" and "device" are what any program that uses torch on a GPU waits for: the
import of torch, and its first kernel. "package" is the import of this package behind that, with the modules of the
operation, and "call" the first call until its result is there. The target is 0.5 s for package and call together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = ("torch", "device", "package", "call", "second call")


def measure(backend: str) -> dict[str, float | bool]:
    """Seconds of each part, and whether CuTe DSL was imported for them."""
    marks = [time.perf_counter()]
    import torch

    marks.append(time.perf_counter())
    device = "cpu" if backend == "emulator" else "cuda"
    a, b = (torch.ones(size, 768, device=device).bfloat16() for size in (128, 768))
    expected = (a @ b.T).clone()
    _ready(device)
    marks.append(time.perf_counter())
    import cute_kernels

    gemm, config = cute_kernels.gemm, cute_kernels.Sm90GemmConfig() if backend == "emulator" else None
    marks.append(time.perf_counter())
    for _ in range(2):
        out = gemm(a, b, config=config, backend=backend)
        _ready(device)
        marks.append(time.perf_counter())
    if not torch.equal(out, expected):
        raise SystemExit("the product is wrong")
    found: dict[str, float | bool] = dict(zip(PARTS, (after - before for before, after in zip(marks, marks[1:]))))
    return found | {"CuTe DSL": "cutlass" in sys.modules}


def _ready(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--backend", choices=("auto", "emulator"), default="auto", help="default: the GPU")
    parser.add_argument("--runs", type=int, default=3, help="processes that find the kernel on disk (default: 3)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.backend)))
        return
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "bench.first_call", "--measure", "--backend", options.backend]
    print("seconds   ", "".join(f"{part:>12}" for part in PARTS), "  package + call   CuTe DSL")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": folder}
        for number in range(1 + options.runs):
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
            if done.returncode:
                raise SystemExit(done.stderr.strip())
            found = json.loads(done.stdout.splitlines()[-1])
            times = "".join(f"{found[part]:12.4f}" for part in PARTS)
            imported = "imported" if found["CuTe DSL"] else "not imported"
            name = "from disk" if number else "compiling"
            print(f"{name:10} {times} {found['package'] + found['call']:16.3f}   {imported}", flush=True)


if __name__ == "__main__":
    main()
