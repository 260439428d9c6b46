"""Runs the kernel of bias_add.py with tile and ring sizes from the command line, and checks its result."""

import argparse

import bias_add as kernel
import torch

parser = argparse.ArgumentParser()
for name in ("rows", "stages", "ctas"):
    parser.add_argument(f"--{name}", type=int, default=getattr(kernel, name.upper()))
parser.add_argument("--m", type=int, default=256)
options = parser.parse_args()
if options.m % options.rows:
    parser.error(f"--rows {options.rows} does not divide --m {options.m}")
kernel.ROWS, kernel.STAGES, kernel.CTAS = options.rows, options.stages, options.ctas

x, bias = torch.randn(options.m, kernel.COLUMNS, device="cuda"), torch.randn(kernel.COLUMNS, device="cuda")
assert torch.equal(kernel.bias_add(x, bias), x + bias)
