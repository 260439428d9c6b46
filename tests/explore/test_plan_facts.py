"""The mix of instructions in a plan's machine code, from a listing that is written here by hand."""

import types

import pytest

from cute_kernels.config import GemmProblem
from cute_kernels.explore import plan_facts
from cute_kernels.plan import make_plan

LISTING = """//--- .text.k ---
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 LDG.E.64 R4, desc[UR4][R2.64+0x8] ;
        /*0020*/             @UP1  UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ ;
        /*10030*/             @P0   BRA `(.L_x_0) ;
        /*10040*/                  LDG.E R4, desc[UR4][R2.64] ;
"""


def test_instructions_are_counted_by_opcode_without_modifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_facts.compile, "compile_plan", lambda plan, emulated: types.SimpleNamespace(cubin=b""))
    monkeypatch.setattr(plan_facts.compile, "disassemble", lambda cubin: LISTING)
    mix = plan_facts.instruction_mix(make_plan(GemmProblem(128, 128, 64), arch="sm_90a"))
    assert list(mix.items()) == [("all", 5), ("LDG", 2), ("BRA", 1), ("LDC", 1), ("UIADD3", 1)]


def test_a_description_ends_with_the_modelled_time() -> None:
    rows = plan_facts.described(make_plan(GemmProblem(4096, 768, 768), arch="sm_90a"))
    assert [name for name, _ in rows][-2:] == ["time", ""] and " us" in rows[-2][1]
