"""Emulated launches whose tensor cores add exactly, with one rounding per instruction.

`cute_kernels.operations.reference` computes these sums quickly, so that whole kernels are compared with it bit by bit.
What the tensor cores of a chip add instead, the emulator's default, is compared with models of them and with the torch
reference of the same sums in test_silicon.py and test_arithmetic.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cute_kernels.emulator import Options, Report
from cute_kernels.operations.runtime import emulated
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan


def emulate(plan: Plan, operands: Operands, options: Options | None = None, **others: Any) -> Report:
    """`cute_kernels.operations.runtime.emulated.launch` with ``arithmetic="exact"``."""
    return emulated.launch(plan, operands, dataclasses.replace(options or Options(), arithmetic="exact"), **others)
