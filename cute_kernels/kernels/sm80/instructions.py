"""The instructions of the main loop, each function named after the one that it emits.

CuTe DSL has no warp-level MMA of integers and none of FP8 that takes registers as ``ldmatrix`` leaves them, and its
`inline_ptx` copies every FP32 operand to a register of its own. So these are LLVM's inline assembly.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64

from cute_kernels.dsl import dsl_user_op, llvm

_SHAPES = {
    "float32": ("m16n8k8", "tf32", "tf32"),
    "bfloat16": ("m16n8k16", "bf16", "bf16"),
    "float16": ("m16n8k16", "f16", "f16"),
    "float8_e4m3fn": ("m16n8k32", "e4m3", "e4m3"),
    "int8": ("m16n8k32", "s8", "s8"),
    "uint8": ("m16n8k32", "u8", "s8"),
}
"""Shape and element types of A and B by the type of A, as torch names it: 32 bytes of K each."""


def accumulator_type(multiplied: str) -> type:
    """Int32 or Float32, by the type of A."""
    return Int32 if multiplied in ("int8", "uint8") else Float32


def _asm(result: Any, text: str, constraints: str, arguments: Sequence[Any], effects: bool, loc: Any) -> Any:
    values = [a.ir_value(loc=loc) if hasattr(a, "ir_value") else a for a in arguments]
    return llvm.inline_asm(
        result, values, text, constraints, has_side_effects=effects, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc
    )


def _four(kind: type, text: str, constraints: str, arguments: Sequence[Any], effects: bool, loc: Any) -> list:
    """An instruction with four results of one type."""
    kinds = llvm.StructType.get_literal([kind.mlir_type] * 4)
    out = _asm(kinds, text, constraints, arguments, effects, loc)
    return [kind(llvm.extractvalue(kind.mlir_type, out, [i], loc=loc)) for i in range(4)]


@dsl_user_op
def mma_sync(multiplied: str, c: Sequence[Any], a: Sequence[Int32], b: Sequence[Int32], *, loc=None) -> list[Any]:
    """D of a 16 x 8 tile over 32 bytes of K: C is four numbers of a lane, A four registers, B two."""
    shape, of_a, of_b = _SHAPES[multiplied]
    kind = accumulator_type(multiplied)
    word, letter = ("s32", "r") if kind is Int32 else ("f32", "f")
    text = (
        f"mma.sync.aligned.{shape}.row.col.{word}.{of_a}.{of_b}.{word} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)
    return _four(kind, text, constraints, [*a, *b, *c], False, loc)


@dsl_user_op
def ldmatrix_x4(address: Int32, offset: int, *, loc=None) -> list[Int32]:
    """Four matrices of 8 rows x 16 bytes; lane l has the address of row ``l % 8`` of matrix ``l // 8``."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return _four(Int32, text, "=r,=r,=r,=r,r", [address], True, loc)


@dsl_user_op
def cp_async_16(target: Int32, offset: int, source: Int64, when: Int32, size: Int32 | None = None, *, loc=None) -> None:
    """Copies 16 bytes of global to shared memory if ``when`` is not 0, past L1; zeros in place of those from ``size``
    on."""
    tail = "" if size is None else ", $3"
    text = (
        "{\n\t.reg .pred copied;\n\tsetp.ne.b32 copied, $2, 0;\n\t"
        f"@copied cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1], 16{tail};\n\t}}"
    )
    given = [target, source, when] + ([] if size is None else [size])
    _asm(None, text, "r,l,r" + (",r" if size is not None else ""), given, True, loc)


@dsl_user_op
def round_tf32_in_place(address: Int32, offset: int, when: Int32, *, loc=None) -> None:
    """Rounds four FP32 in shared memory to TF32 if ``when`` is not 0: to nearest, ties to even; a NaN stays one.

    ``x + 0xFFF + bit 13 of x`` carries into the bits that stay, also from the largest TF32 number to infinity.
    ``cvt.rna.tf32`` would take ties away from zero.
    """
    text = [
        "{",
        ".reg .pred rounded, number;",
        ".reg .b32 a, b, c, d, odd;",
        "setp.ne.b32 rounded, $1, 0;",
        "mov.b32 a, 0;",
        "mov.b32 b, 0;",
        "mov.b32 c, 0;",
        "mov.b32 d, 0;",
        f"@rounded ld.shared.v4.b32 {{a, b, c, d}}, [$0+{offset}];",
    ]
    for x in "abcd":
        text += [
            f"bfe.u32 odd, {x}, 13, 1;",
            "add.u32 odd, odd, 0xFFF;",
            f"setp.num.f32 number, {x}, {x};",
            f"add.u32 {x}, {x}, odd;",
            f"selp.b32 {x}, {x}, 0x7FFFFFFF, number;",
        ]
    text += [f"@rounded st.shared.v4.b32 [$0+{offset}], {{a, b, c, d}};", "}"]
    _asm(None, "\n\t".join(text), "r,r", [address, when], True, loc)


@dsl_user_op
def round_tf32(x: Int32, *, loc=None) -> Int32:
    """TF32 of one register, rounded to nearest even by the instruction that sm_90 and later have."""
    text = "{\n\t.reg .f32 number;\n\tmov.b32 number, $1;\n\tcvt.rn.tf32.f32 $0, number;\n\t}"
    return Int32(_asm(Int32.mlir_type, text, "=r,r", [x], False, loc))


@dsl_user_op
def count_arrival(address: Int64, *, loc=None) -> Int32:
    """Adds 1 to a number in global memory and returns what it was.

    What the CTA has stored before a barrier in front of it is visible to the CTA that reads the number later, behind a
    barrier after it.
    """
    text = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
    return Int32(_asm(Int32.mlir_type, text, "=r,l", [address], True, loc))


@dsl_user_op
def any_of_cta(value: Int32, *, loc=None) -> Int32:
    """A barrier of the CTA; whether any thread brings another number than 0."""
    text = (
        "{\n\t.reg .pred mine, any;\n\tsetp.ne.u32 mine, $1, 0;\n\t"
        "barrier.cta.red.or.pred any, 0, mine;\n\tselp.u32 $0, 1, 0, any;\n\t}"
    )
    return Int32(_asm(Int32.mlir_type, text, "=r,r", [value], True, loc))


@dsl_user_op
def add_opaque(a: Int64, b: Int64, *, loc=None) -> Int64:
    """A sum that the compiler neither takes apart nor moves out of a loop.

    It would keep the offset of every row of a copy in registers of its own, and a warp's tile of 64 x 64 then spills.
    """
    return Int64(_asm(Int64.mlir_type, "add.s64 $0, $1, $2;", "=l,l,l", [a, b], False, loc))


@dsl_user_op
def computed_here(value: Int32, *, loc=None) -> Int32:
    """Gives the number back, unknown to the compiler: what follows from it is not computed earlier.

    What a tile's end needs would be computed before the first tile, and kept in registers that the products need.
    """
    return Int32(_asm(Int32.mlir_type, "mov.b32 $0, $1;", "=r,r", [value], True, loc))
