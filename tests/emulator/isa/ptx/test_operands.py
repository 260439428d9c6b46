"""Operands of instructions: what is refused before anything runs, compared with ptxas; narrow addresses."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options, UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.families import CONTROL, FAMILIES, check_operands, forms_of
from cute_kernels.emulator.isa.ptx.operand_syntax import read_forms, registers_for
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS
from cute_kernels.emulator.machine.bytecode import lowering
from cute_kernels.testing.ptx import module as kernel
from tests.emulator.ptx_launch import launch
from tests.emulator.ptxas_operands import DATA, FIRST, TYPES, module, split, target_of, variants, verdicts

VERDICTS = json.loads(DATA.read_text())["verdicts"]

#: What ptxas 13.0 takes and the PTX ISA does not have: expression of the variant, and why.
BEYOND = {
    r"\{[^}]*%pred_5|%pred_5[^{]*\}": "vectors have no predicates (PTX ISA, 'Vectors')",
    r"\{[^}]*%tid\.x[^}]*\}": "special registers are read only, and in a list of destinations they are written",
    r"^(and|not|mov|vote|barrier).*pred .*%f16x2_5": "must be a predicate",
    r"^cvt\S*(ue8m0x2\.bf16x2 .*, %\w+_5$|bf16x2\.ue8m0x2 %\w+_5,)": "bf16x2 is held in .b32",
    r"\[%(pred|f16|f32|f16x2|f64|b128)_5": "addresses are integers or bits",
    r"\.tensor\..*\{[^}]*0[fd]": "coordinates are .s32",
    r"im2col::w.*\{[^}]*%f16_5": "the halo and the offset are .u16",
    r"(bf16|mbarrier.arrive|multicast::cluster|query_cancel).*\{%b\d+_\d(, %b\d+_\d)?\}": "one register is no vector",
    r"\.tensor\.\S+ (%|.*\], %b32_\d($|,))": "addresses are written in brackets",
    r"^createpolicy\S+ (.*\{0f|1|0|%tid|variable)": "destinations are registers, a literal is no vector",
    r"^(movmatrix|mma\.sp).*%pred_5": "elements of matrices and metadata are no predicates",
    r"^mma\.sp.*\{%b32_4, %b32_4\}": "metadata is one register",
    r"^ld.*b128 \{%b128": "ptxas makes a load of 64 bits of it",
    r"^(st|red)\.async\S+ \[%b32_0\], %b32_1$": "this form has an mbarrier",
}


@functools.cache
def refused(form: str) -> dict[str, str | None]:
    """Per variant of a form why it is refused, or None."""
    found: dict[str, str | None] = dict.fromkeys(variants(form))
    left = list(found)
    while True:  # until only what can be read is left
        try:
            entry = parse.__wrapped__(module(left, target_of(form))).kernels["k"]
            break
        except UnsupportedPTX as error:
            found[left.pop(error.ptx_line - FIRST)] = error.message
    for variant, instruction in zip(left, entry.instructions):
        try:
            check_operands(dataclasses.replace(entry, instructions=(instruction,)))
        except UnsupportedPTX as error:
            found[variant] = error.message
    return found


def test_what_ptxas_accepts_is_accepted() -> None:
    used = set()
    for form, said in VERDICTS.items():
        for (variant, reason), verdict in zip(refused(form).items(), said, strict=True):
            if verdict == "1" and reason is not None:
                why = [expression for expression in BEYOND if re.search(expression, variant)]
                assert why, (variant, reason)
                used.update(why)
    assert used == set(BEYOND)


def test_an_error_that_ptxas_says_once_in_a_file_is_one_of_each_instruction(tmp_path: Path) -> None:
    program = tmp_path / "ptxas"  # of bad instructions it says the first one alone
    script = '/wrong/ && !said++ || /^add.u32 %b32_0;$/ { print "ptxas x.ptx, line " NR "; error   : no" }'
    program.write_text(f"#!/bin/sh\nawk '{script}' \"$3\" >&2\n")
    program.chmod(0o755)
    asked = ["right 1", "wrong 1", "right 2", "wrong 2", "wrong 3"]
    assert verdicts(str(program), "sm_90a", asked) == "10100"
    assert verdicts(str(program), "sm_90a", asked[:1]) == "1"
    assert verdicts(str(program), "sm_90a", asked[1:2]) == "0"


def bits(register: str) -> int:
    return TYPE_BITS[register[1:].split("_")[0]]


def test_other_widths_and_numbers_of_operands_are_refused_as_by_ptxas() -> None:
    """Lists and addresses are not compared: ptxas wants the elements of a list alike, and tensor memory 32 bits."""
    compared, accepted = 0, []
    for form, said in VERDICTS.items():
        operands = split(form.partition(" ")[2])
        for (variant, reason), verdict in zip(refused(form).items(), said, strict=True):
            others = split(variant.partition(" ")[2])
            changed = [(a, b) for a, b in zip(operands, others) if a != b]
            if len(operands) != len(others):
                differs = not form.startswith("wgmma.mma_async")  # its literals are the matter of test_wgmma
            else:
                plain = [re.fullmatch(r"%[a-z]+\d*(x2)?_\d", each) for pair in changed for each in pair]
                differs = len(changed) == 1 and all(plain) and bits(changed[0][0]) != bits(changed[0][1])
            if verdict == "0" and differs:
                compared += 1
                accepted += [variant] * (reason is None)
    assert not accepted
    assert compared > 4000


def test_the_operands_of_every_family_can_be_read() -> None:
    assert lowering.lower  # importing it registers every family
    assert {key for key, family in FAMILIES.items() if family.operands is None} == {("call",)}  # as its callee says
    assert all(forms_of((opcode,)) for opcode in CONTROL)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@;", "cannot read the instruction: an operand is missing"),
        ("bra;", r"bra takes 1 operands \(tgt\); 0 are given at PTX line"),
        ("bra %r1;", "operand tgt of bra is %r1, a register of type .b32: must be a label"),
        ("mov.b32 %r1;", r"mov.b32 takes 2 operands \(d, a\); 1 are given"),
        ("mbarrier.init.shared.b64 [%r1], ;", r"mbarrier.init.* takes 2 operands \(addr, count\); 1 are given"),
        ("mov.b32 %r1, -;", "cannot read the instruction: an operand is missing"),
        ("mov.b64 %d1, {%r1, %h1};", "a list of 2 of types .b32, .b16: must be .* or a list of them"),
        ("atom.global.add.u32 %r1, [%d1], %d2;", "operand b of atom.* is %d2, a register of type .b64: must be a reg"),
        ("mad.lo.u32 %r1, %d2, %r3, %r4;", "operand a of mad.lo.u32 is %d2, a register of type .b64"),
        ("setp.f32 %p1, %r1, %r2;", "setp.f32: a qualifier is missing, one of .eq, "),
        ("setp.lt.and.s32 %p1, %r1, %r2;", r"setp.lt.and.s32 takes 4 operands \(p, a, b, c\); 3 are given"),
        ("ld.shared.b32 %r1, [%p1];", "is an address .%p1, a register of type .pred.: must be an address"),
        ("st.global.v2.b32 [%d1], {%r1};", "is a list of 1, each of type .b32: must be a list of 2 registers"),
        ("ld.shared.u32 %h1, [%r1];", "is %h1, a register of type .b16: must be a register of type"),
        ("add.f32 %r1, %r2, 1;", "operand b of add.* is the integer literal 1: must be a register of type .b32 or"),
        ("add.u32 7, %r2, %r3;", "operand d of add.u32 is the integer literal 7: must be a register"),
        ("elect.sync %r1, -1;", "must be a register of type .* and behind `|` a predicate"),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %d4}, %d1, %d2, %p1, 1, 1, 0, 0;",
            "operand d of wgmma.* has %d4, a register of type .b64",
        ),
    ],
)
def test_errors_name_the_operand(body: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(kernel(f"{body}\nret;", parameters=0))
    assert error.value.ptx_line is not None


@pytest.mark.parametrize("bits", [8, 16])
def test_narrow_addresses_are_zero_extended(bits: int) -> None:
    """PTX ISA, "Addresses as Operands". The address has its highest bit set, and lies behind 1 KB of shared memory."""
    text = kernel(
        f".reg .b{bits} %narrow; .shared .align 4 .b8 room[65536];\n"
        f"ld.param.u64 %d0, [p0];\nmov.u32 %r0, {(1 << bits) - 64};\nmov.u32 %r1, %laneid;\n"
        "add.u32 %r2, %r0, 4096;\nst.shared.b32 [%r2+-4096], 77;\n"
        f"cvt.u{bits}.u32 %narrow, %r0;\nld.shared.b32 %r3, [%narrow];\n"
        "mad.wide.u32 %d0, %r1, 4, %d0;\nst.global.b32 [%d0], %r3;\nret;",
        parameters=1,
    )
    out = np.zeros(32, np.uint32)
    launch(text, out, dynamic_smem=0, options=Options(detectors=False))
    assert (out == 77).all()


def test_notation() -> None:
    forms = read_forms("d|p?, {a}2:b16, [m{c}], n:imm?, t:label?", ("ld", "u32"), 1)
    assert sorted(forms) == [3, 4, 5]
    [slots] = forms[5]
    assert [slot.kind for slot in slots] == ["value", "list", "memory", "imm", "label"]
    assert slots[0].written and slots[0].second == "allowed" and slots[1].count == 2 and slots[2].coordinates
    assert slots[0].registers == registers_for("u32", False)
    with pytest.raises(ValueError, match="no operand in the notation"):
        read_forms("d, a b", ("mov", "b32"), 1)
    assert set(TYPES) <= set(TYPE_BITS)
