"""PTX text to instructions."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import (
    Guard,
    Immediate,
    Memory,
    Not,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cute_kernels.operations.compile import compile_plan
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.kernel_inputs import make_case
from tests.emulator.ptx_launch import launch


def decode(body: str, **more: object):
    return parse(module(body, **more)).kernels["k"]


def only(body: str):
    (instruction,) = decode(body).instructions
    return instruction


def test_operands_of_every_form():
    instruction = only("@!%p3 cp.test.v2::x.b32 {%r1, _}, [%d1+-8], %r2|%p4, !%p5, dynamic, %tid.x, -7, 0x1F;")
    assert instruction.parts == ("cp", "test", "v2::x", "b32")
    assert instruction.guard == Guard("%p3", True)
    assert instruction.operands == (
        Vector((Register("%r1"), Sink())),
        Memory(Register("%d1"), -8),
        Pair(Register("%r2"), Register("%p4")),
        Not(Register("%p5")),
        Symbol("dynamic"),
        Special("%tid.x"),
        Immediate(-7),
        Immediate(31),
    )


def test_tensor_operand_keeps_its_coordinates():
    instruction = only("cp.async [%r1+16], [%d2, {%r3, %r4}], [dynamic+8];")
    assert instruction.operands == (
        Memory(Register("%r1"), 16),
        Memory(Register("%d2"), 0, (Vector((Register("%r3"), Register("%r4"))),)),
        Memory(Symbol("dynamic"), 8),
    )


@given(st.integers(-(2**63), 2**64 - 1))
def test_integer_literals_in_every_base(value: int):
    magnitude = abs(value)
    sign = "-" if value < 0 else ""
    for spelling in (str(magnitude), f"0x{magnitude:x}", f"0X{magnitude:X}U", f"0b{magnitude:b}"):
        assert only(f"mov.b64 %d1, {sign}{spelling};").operands[1] == Immediate(value)
    octal = f"0{magnitude:o}" if magnitude else "0"
    assert only(f"mov.b64 %d1, {sign}{octal};").operands[1] == Immediate(value)


@given(st.floats(width=32, allow_nan=False))
def test_single_precision_literals_are_bit_patterns(value: float):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert only(f"mov.f32 %r1, 0f{bits:08X};").operands[1] == Immediate(bits, 32)
    assert only(f"mov.f32 %r1, -0f{bits:08x};").operands[1] == Immediate(bits ^ 1 << 31, 32)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_double_precision_literals_are_bit_patterns(value: float):
    bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    assert only(f"mov.f64 %d1, 0d{bits:016x};").operands[1] == Immediate(bits, 64)
    decimal = f"{abs(value):.20e}"
    expected = struct.unpack("<Q", struct.pack("<d", float(decimal)))[0]
    assert only(f"mov.f64 %d1, {decimal};").operands[1] == Immediate(expected, 64)


def test_inline_assembly_scopes_have_their_own_labels_and_registers():
    scope = "{ .reg .pred P1; .reg .b128 wide; W: mov.pred P1, 1; @P1 bra.uni D; bra.uni W; D: }\n"
    kernel = decode(".reg .b32 P1;\nmov.b32 P1, 3;\n" + scope + scope + "mov.b32 %r1, P1;")
    first, second = (kernel.instructions[i].operands[0].name for i in (1, 4))
    assert (kernel.instructions[0].operands[0].name, kernel.instructions[-1].operands[1].name) == ("P1", "P1")
    assert kernel.registers["P1"] == "b32"
    assert first != second
    assert kernel.registers[first] == kernel.registers[second] == "pred"
    assert sorted(kernel.registers[name] for name in kernel.registers if name.startswith("wide")) == ["b128", "b128"]
    jumps = [i for i in kernel.instructions if i.parts[0] == "bra"]
    targets = [kernel.labels[i.operands[0].name] for i in jumps]
    assert targets == [4, 1, 7, 4]  # each D and W is the one of its own braces


@pytest.mark.parametrize("scoped", [False, True])
def test_vector_registers(scoped: bool):
    """Elements by .xyzw and .rgba; the name alone stands for all (PTX ISA, "Vectors as Operands")."""
    body = """
        .reg .v4 .b32 whole;
        .reg .v2 .b32 %v<2>;
        mov.b32 whole.r, 5;  mov.b32 whole.y, 6;  mov.b32 whole.b, 7;  mov.b32 whole.a, 8;
        ld.param.u64 %d1, [p0];
        st.global.v4.b32 [%d1], whole;
        ld.global.v2.b32 %v1, [%d1 + 8];
        mov.b32 %v0.x, %v1.y;  mov.b32 %v0.y, %v1.x;
        st.global.v2.b32 [%d1 + 16], %v0;
    """
    data = np.zeros(6, np.uint32)
    launch(module(f"{{ {body} }}" if scoped else body, parameters=1), data, block=(1, 1, 1))
    assert data.tolist() == [5, 6, 7, 8, 8, 7]


def test_an_inner_scope_sees_the_registers_around_it():
    kernel = decode("{ .reg .b32 inner; mov.b32 inner, %r7; { mov.b32 %r8, inner; } }")
    inner = kernel.instructions[0].operands[0]
    assert kernel.instructions[0].operands[1] == Register("%r7")
    assert kernel.instructions[1].operands == (Register("%r8"), inner)


def test_loc_has_no_semicolon_and_its_file_table_may_follow():
    text = module(
        '.loc 1 12 3\nmov.b32 %r1, 1;\n.pragma "nounroll";\n'
        ".loc 2 7 1, function_name $L__info, inlined_at 1 30 2\nmov.b32 %r2, 2;\nmov.b32 %r3, 3;"
    )
    text += '.file 1 "/a/kernel.py"\n.file 2 "/b/helper.py"\n.section .debug_str { $L__info:\n.b8 102\n.b8 0\n}\n'
    instructions = parse(text).kernels["k"].instructions
    assert [i.source for i in instructions] == [
        "kernel.py:12",
        "helper.py:7 inlined at kernel.py:30",
        "helper.py:7 inlined at kernel.py:30",
    ]
    lines = text.splitlines()
    assert [lines[i.line - 1] for i in instructions] == [i.text + ";" for i in instructions]


def test_parameters_are_placed_by_their_alignment():
    text = (
        ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k(.param .u8 a, .param .align 64 .b8 b[128], "
        ".param .u16 c, .param .u64 .ptr .global .align 16 d)\n.reqntid 64, 2\n.reqnctapercluster 2, 1, 1\n{ ret; }"
    )
    kernel = parse(text).kernels["k"]
    assert [(p.name, p.offset, p.nbytes) for p in kernel.parameters] == [
        ("a", 0, 1),
        ("b", 64, 128),
        ("c", 192, 2),
        ("d", 200, 8),  # .align behind .ptr is the alignment of what d points to
    ]
    assert kernel.parameter_bytes == 208
    assert kernel.reqntid == (64, 2, 1)
    assert kernel.reqnctapercluster == (2, 1, 1)


def test_module_variables():
    head = (
        ".global .align 4 .u32 table[3] = {1, 2, 0xFFFFFFFF};\n.const .u16 two = 515;\n"
        ".shared .align 16 .b8 fixed[48];\n"
    )
    found = {v.name: v for v in parse(module("ret;", head=head)).variables}
    assert (found["table"].space, found["table"].nbytes) == ("global", 12)
    assert found["table"].initial == struct.pack("<3I", 1, 2, 0xFFFFFFFF)
    assert found["two"].initial == b"\x03\x02"
    assert (found["fixed"].nbytes, found["fixed"].align) == (48, 16)
    assert found["dynamic"].nbytes == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.u32 %r1, 1;", set()),
        ("mov.u32 %r1, a;", {"a"}),
        ("mov.u32 %r1, a+4;", {"a"}),
        ("st.shared.u32 [b+8], %r1;", {"b"}),
        ("cp.async.ca.shared.global [a], [%d1], 4; @%p1 ld.shared.v2.u32 {%r1, %r2}, [c];", {"a", "c"}),
        ("call use;", {"c"}),
        (".shared .b8 own[16];", {"own"}),
    ],
)
def test_a_kernel_has_the_shared_arrays_that_it_uses(body: str, expected: set[str]) -> None:
    """And dynamic memory, which takes no bytes of its own."""
    head = (
        ".shared .b8 a[16]; .shared .align 4 .b8 b[16]; .shared .b8 c[16]; .global .u32 g;\n"
        ".func use() { .reg .u32 %r; ld.shared.u32 %r, [c]; ret; }\n"
        ".entry other() { .reg .u32 %r; mov.u32 %r, a; mov.u32 %r, b; ret; }"
    )
    kernel = parse(module(f"{body} ret;", head=head)).kernels["k"]
    assert {v.name for v in kernel.variables} == expected | {"g", "dynamic"}


def test_a_launch_is_not_charged_for_another_kernel_s_shared_array() -> None:
    head = ".shared .b8 large[200000];\n.entry other() { .reg .u32 %r; mov.u32 %r, large; ret; }"
    size = aligned(np.zeros(1, np.uint32))
    body = "ld.param.u64 %d0, [p0]; mov.u32 %r1, %dynamic_smem_size; st.global.u32 [%d0], %r1; ret;"
    text = module(body, parameters=1, head=head)
    for dynamic in (0, 1024, 213_120):
        launch(text, size, block=(1, 1, 1), dynamic_smem=dynamic, kernel="k")
        assert size[0] == dynamic
    with pytest.raises(ValueError, match="200000 bytes of static shared memory"):
        launch(text.replace("%dynamic_smem_size", "large"), size, block=(1, 1, 1), dynamic_smem=213_120, kernel="k")


def test_the_constant_of_the_warp_s_size() -> None:
    """WARP_SZ is a number wherever one may stand, and only as a whole word."""
    out = aligned(np.zeros(7, np.uint32))
    body = """
        .reg .b32 %q<WARP_SZ>; .reg .b32 WARP_SZ_; .shared .align 4 .b8 room[WARP_SZ]; .shared .align 4 .b8 behind[4];
        ld.param.u64 %d0, [p0]; mov.u32 %q31, WARP_SZ; mov.u32 WARP_SZ_, 5; mov.u32 %r0, room; mov.u32 %r1, behind;
        sub.u32 %r1, %r1, %r0; st.global.u32 [%d0], %q31; st.global.u32 [%d0+4], WARP_SZ_; st.global.u32 [%d0+8], %r1;
        add.s64 %d1, %d0, -20; st.global.u32 [%d1+WARP_SZ], WARP_SZ; mul.lo.u32 %r2, %q31, -WARP_SZ;
        st.global.u32 [%d0+16], %r2; setp.eq.u32 %p1, %q31, WARP_SZ; selp.u32 %r3, WARP_SZ, 1, %p1;
        st.global.u32 [%d0+20], %r3; ld.global.u32 %r4, [initial]; st.global.u32 [%d0+24], %r4; ret;
    """
    launch(module(body, parameters=1, head=".global .u32 initial = WARP_SZ;"), out, block=(1, 1, 1))
    assert out.tolist() == [32, 5, 32, 32, 2**32 - 32 * 32, 32, 32]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, ?;", "cannot read"),
        ("mov.b32 %r1, %r2", "expected"),
        ("L: L: ret;", "declared twice"),
        ("mov.b32 {%r1, %r2;", "expected"),
        (".tex .u32 x;", "directive '.tex'"),
        (".reg .v3 .b32 %q;", "registers of type .v3"),
        ("mov.u32 %q5, 1;", "^register %q5 is not declared at PTX line"),
        ("mov.u32 %r1, %tid.q;", "register %tid.q is not declared"),
        ("@%pp bra L; L: ret;", "register %pp is not declared"),
        ("mov.b64 {%r1, %u}, %d1;", "register %u is not declared"),
        ("st.global.b32 [%zz], %r1;", "register %zz is not declared"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(body: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message) as caught:
        decode(body)
    assert caught.value.ptx_line is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u32 count, 1; ret;", "operand d of mov.u32 is count: must be a register of type .* at PTX line"),
        ("mov.u32 %tid.x, 1; ret;", "operand d of mov.u32 is special register %tid.x: must be a register of type"),
        ("mov.u32 5, 1; ret;", "operand d of mov.u32 is the integer literal 5: must be a register of type"),
        ("mov.u64 p0, 1; ret;", "operand d of mov.u64 is p0: must be a register of type"),
        ("mov.u32 %r1, %pm3; ret;", "special register %pm3 is not implemented"),
    ],
)
def test_what_cannot_be_written_is_refused_by_its_name(body: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message):
        launch(module(body), 0, 0)


@pytest.mark.parametrize("text", [".unknown a, b;", ".local .b32 a;", ".global .align 4 .f128 x;"])
def test_unknown_module_level_text_is_refused(text: str):
    with pytest.raises(UnsupportedPTX):
        parse(module("ret;", head=text))


def test_blanks_where_ptxas_needs_none():
    """NVIDIA's headers write ``.reg.b16``; the qualifiers of an opcode may stand apart."""
    out = aligned(np.zeros(4, np.uint32))
    text = """.version 8.8 .target sm_90a .address_size 64 .global.align 16.b8 kept[16]; .shared.b32 word;
        .visible.entry k(.param.u64 p0,.param.align 8 .b8 q[16]){ .reg.b16%h<4>;.reg.v2 .b32 v;.reg.b64%d; .shared.b8 x;
        { .reg.b32 a,b; mov .u32 a, 7; mov.b16 %h1, 5; cvt
        .u32 .u16 b, %h1; add.u32 v.x,a,b; }
        ld .param.u64 %d,[p0]; st.global .u32[%d],v.x; ret; }""".replace("16.b8", "16 .b8")
    launch(text, out, bytes(16))
    assert out[0] == 12


OTHERS = """
.visible .entry opcode() { not.an.opcode; ret; }
.visible .entry directive() { .unknown; ret; }
.visible .entry clusters() .blocksareclusters { ret; }
.visible .entry texture(.param .texref t) { ret; }
.global .texref image; .common .global .b32 cell; .global .attribute(.managed) .b32 shared_with_host;
.visible .entry reads() { .reg .b64 %d; mov.b64 %d, image; ret; }
.func (.param .b32 out) one() { st.param.b32 [out], 1; ret; } .alias eins, one;
.pragma "nounroll";
"""


def test_a_kernel_is_decoded_when_it_is_launched():
    """What is not implemented in one kernel, or in a variable that it does not name, refuses no other."""
    body = "{ .reg .b32 a; ld.param.u64 %d1, [p0]; call (a), eins, (); st.global.b32 [%d1], a; } ret;"
    text, out = module(body, parameters=1, head=OTHERS), aligned(np.zeros(4, np.uint32))
    launch(text, out, kernel="k")
    assert out[0] == 1
    assert list(parse(text).kernels) == ["opcode", "directive", "clusters", "texture", "reads", "k"]
    for name, message in {
        "opcode": "opcode 'not.an.opcode' is not implemented",
        "directive": "directive '.unknown' in a kernel is not supported",
        "clusters": ".blocksareclusters is not supported",
        "texture": "'.texref' of a parameter is not supported",
        "reads": "a variable of type .texref is not implemented",
    }.items():
        with pytest.raises(UnsupportedPTX, match=message):
            launch(text, kernel=name)


def test_every_statement_of_a_generated_kernel_is_decoded():
    """Counted independently by a regular expression: what ends in a semicolon and is no directive."""
    ptx = compile_plan(make_case().plan, emulated=True).ptx
    body = ptx[re.search(r"^\{$", ptx, flags=re.M).start() :]
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"^\s*\.(loc|file|pragma|reg)[^\n]*", "", body, flags=re.M)
    (kernel,) = parse(ptx).kernels.values()
    assert len(kernel.instructions) == body.count(";")
    opcodes = re.findall(r"^\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:\.[\w:.]+)?)[^:\n]*;", body, flags=re.M)
    assert [i.opcode for i in kernel.instructions] == opcodes


_CHAIN = "".join(f".func f{i}() {{ {f'call f{i + 1};' * (i < 800)} ret; }}\n" for i in reversed(range(801)))
_DOUBLED = "".join(f".func f{i}() {{ {f'call f{i + 1};' * 2 * (i < 30)} ret; }}\n" for i in reversed(range(31)))


@pytest.mark.parametrize(
    ("body", "head", "message"),
    [
        (f"mov.b32 %r1, {'{' * 5000}%r2{'}' * 5000};", "", "more than 8 lists, addresses and negations inside of each"),
        (f"ld.global.b32 %r1, {'[' * 5000}%d1{']' * 5000};", "", "more than 8 lists, addresses and negations"),
        (f"@{'!' * 5000}%p1 ret;", "", "more than 8 lists, addresses and negations"),
        (f"mov.u64 %d1, {'9' * 100_000};", "", r"the integer 99999999999999999999\.\. has more than 64 bits"),
        ("mov.u64 %d1, 0x10000000000000000;", "", "the integer 0x10000000000000000 has more than 64 bits"),
        ("", ".shared .b8 x[4611686018427387904];", r"the \.shared variable x is larger than 232448 bytes"),
        ("", ".const .b32 x[16385];", r"the \.const variable x is larger than 65536 bytes"),
        ("", f".global .b32 x{'[1000000]' * 2000};", r"the \.global variable x is larger than 1099511627776 bytes"),
        (".local .b8 x[524289];", "", r"the \.local variable x is larger than 524288 bytes"),
        (".local .b8 x[400000]; .local .b8 y[200000];", "", "600000 bytes of local memory for each thread; at most"),
        ("".join(f".reg .b32 %z{i}<99999>;" for i in range(12)), "", "99999 registers %z10<n> besides"),
        ("", ".global .u32 x[2] = {1, 2, 3};", "x has 8 bytes and an initialiser of 12"),
        ("call f0;", _CHAIN, "more than 100 functions that call one another"),
        ("call f0;", _DOUBLED, "calls expanded to more than 1048576 instructions or 32768 scopes"),
    ],
    ids=lambda text: text[:24],
)
def test_sizes_that_no_program_has_are_refused(body: str, head: str, message: str) -> None:
    """Before they become recursion, memory or time without end."""
    with pytest.raises(UnsupportedPTX, match=message) as error:
        parse(module(body + "ret;", head=head)).kernels["k"]
    assert error.value.ptx_line is not None
