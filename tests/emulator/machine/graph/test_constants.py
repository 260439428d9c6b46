"""Integer instructions whose operands the translator knows are evaluated by it."""

from __future__ import annotations

import pytest

from cute_kernels.emulator import Options
from tests.emulator.instruction_cases import check_constants
from tests.emulator.isa.instructions.test_instructions import INTEGER


@pytest.mark.parametrize("seed", range(3))
def test_every_integer_instruction_on_constants(seed: int):
    for case in INTEGER.values():
        check_constants(case, seed)


def test_constants_in_machine_code():
    opcodes = ("div.u32", "rem.s64", "bfe.s32", "bfi.b64", "prmt.b32", "clz.b32", "brev.b64", "bfind.s32")
    for name in (*opcodes, "lop3 0x96"):
        check_constants(INTEGER[name], 0, Options())
