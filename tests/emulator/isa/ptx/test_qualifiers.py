"""Qualifiers of opcodes: what is refused before anything runs, compared with ptxas; the notation of the rows."""

from __future__ import annotations

import json

import pytest

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.families import FAMILIES, arranged
from cute_kernels.emulator.isa.ptx.qualifiers import read_grammar
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch
from tests.emulator.ptxas_qualifiers import DATA, differences, explained, variants
from tests.nightly import NIGHTLY

RECORDED = json.loads(DATA.read_text())


def test_opcodes_are_accepted_and_refused_as_by_ptxas() -> None:
    """By day a quarter of the instructions with all of their variants."""
    found, compared = [], 0
    for instruction, verdicts in list(RECORDED["verdicts"].items())[:: 1 if NIGHTLY else 4]:
        drawn = variants(instruction, RECORDED["seed"])
        compared += len(drawn)
        found += [each for each in differences(drawn, verdicts) if not explained(*each)]
    assert not found
    assert compared > 3000


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("ld.acquire.global.b32 %r1, [%d1]", "a qualifier is missing, one of .cluster, .cta, .gpu, .sys; it takes"),
        ("fma.f32 %r1, %r2, %r2, %r2", "fma.f32: a qualifier is missing, one of .rm, .rn, .rp, .rz; it takes"),
        ("ld.global.shared.b32 %r1, [%d1]", "ld.global.shared.b32: qualifier .shared does not go with the others"),
        ("ld.volatile.local.b32 %r1, [%d1]", "qualifiers .volatile and .local do not go together"),
        ("st.local.volatile.v2.b32 [%d1], {%r1, %r2}", "qualifiers .volatile and .local do not go together"),
        ("ld.weak.weak.b32 %r1, [%d1]", "qualifier .weak does not go with the others; it takes {.weak}"),
        ("shfl.sync.idx.b32.release %r1, %r2, 0, 31, -1", "qualifier .release does not exist here; it takes nothing"),
        ("ld.shared.L1::evict_last.b32 %r1, [%r2]", "qualifiers .L1::evict_last and .shared do not go together"),
        ("max.xorsign.f32 %r1, %r2, %r3", "qualifier .xorsign needs one of .abs"),
        ("cvt.f16.f32.rp.relu %h1, %r2", "cvt.f16.f32.rp.relu: qualifier .r"),
    ],
)
def test_errors_name_the_qualifier(instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(module(f"{instruction};\nret;", parameters=0))
    assert error.value.ptx_line is not None


def test_words_stand_in_the_order_of_the_row() -> None:
    """ptxas takes them in any order but types and spaces."""
    assert arranged("ld.b32.global") == ("ld", "global", "b32")
    assert arranged("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.u8.satfinite")[5:] == ("satfinite", "s32", "s8", "u8")
    assert arranged("cvt.f32.sat.s32.rn") == ("cvt", "rn", "sat", "f32", "s32")
    assert arranged("no.such.opcode") == ("no", "such", "opcode")


def test_notation() -> None:
    grammar = read_grammar("a|b? {u,s}{8,16} $scope; c; a > gpu; b / cta")
    assert [str(slot) for slot in grammar.forms[0][:2]] == ["{.a|.b}", "(.u8|.s8|.u16|.s16)"]
    assert grammar.arrange(("gpu", "u8", "a")) == (("a", "u8", "gpu"), "")
    assert grammar.arrange(("c",)) == (("c",), "")
    assert "needs one of .gpu" in grammar.arrange(("a", "u8", "cta"))[1]
    assert "do not go together" in grammar.arrange(("b", "u8", "cta"))[1]
    assert "does not exist here" in grammar.arrange(("c", "d"))[1]
    ordered = read_grammar("s32 s8|u8")
    assert ordered.arrange(("s8", "s32"))[1] and not ordered.arrange(("s32", "s8"))[1]
    with pytest.raises(KeyError):
        read_grammar("$nothing")
    assert all(read_grammar(family.qualifiers).forms for family in FAMILIES.values())
