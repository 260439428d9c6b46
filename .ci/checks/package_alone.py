"""Run where the package is installed without extras: the reference on a CPU, and a kernel compiled for two GPUs."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import torch

import cute_kernels
from cute_kernels.commands.cli import main
from cute_kernels.config import GemmProblem
from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import make_plan

generator = torch.Generator().manual_seed(0)
a, b = (torch.randint(-2, 3, shape, generator=generator) for shape in ((32, 64), (48, 64)))
assert torch.equal(cute_kernels.gemm(a.bfloat16(), b.bfloat16()).long(), a @ b.T)
layer = torch.nn.Conv2d(3, 64, 16, stride=16)
images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=generator)
with torch.no_grad():
    expected = layer(images / 127.5 - 1)
    error = (convert_layer(layer, PatchOptions(precision="int8"))(images) - expected).norm() / expected.norm()
assert error < 2e-2, error
for arch in ("sm_90a", "sm_100a"):
    assert ".entry" in compile_plan(make_plan(GemmProblem(64, 64, 64), arch=arch)).ptx
assert main(["doctor"]) in (0, 1)
with contextlib.redirect_stderr(io.StringIO()) as said:
    assert main(["emulate", "program.py"]) == 2
assert "pip install 'cute-kernels[emulator]'" in said.getvalue(), said.getvalue()
assert Path(sys.prefix, "share/cute-kernels/SKILL.md").read_text().startswith("---\nname: cute-kernels\n")
print(f"torch {torch.__version__}: reference, layer, kernels for sm_90a and sm_100a")
