"""Integer arithmetic, logic, shifts and bit fields."""

import functools

from cute_kernels.emulator.isa.ptx.families import as_integer
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Immediate, Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import (
    CANONICAL,
    DTYPES,
    STORED_BITS,
    Constant,
    Pack,
    PureOp,
    Value,
    of_one_type,
)

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_BITS = ("b16", "b32", "b64", "pred")


def storage(type_: str) -> str:
    return type_ if type_ in DTYPES else CANONICAL[TYPE_BITS[type_]]


def apply(block: BlockBuilder, instruction: Instruction, op: PureOp) -> None:
    """Operands 1.. through ``op`` into operand 0."""
    sources = [block.value(operand, STORED_BITS[type_]) for operand, type_ in zip(instruction.operands[1:], op.inputs)]
    result = block.pure(op, *sources)
    if block.context.is_uniform_of_tid(instruction):
        result = block.first_lane(result)
    block.define(instruction.operands[0], result)


@functools.cache
def binary(name: str, type_: str) -> PureOp:
    """add, sub, min, max, mul.lo, mul.hi, div, rem of two integers; and, or, xor of bits or predicates."""
    return of_one_type(f"{name.replace('.', '_')}_{type_}", storage(type_), 2)


@family(
    *(f"{name}.{t}" for name in ("add", "sub", "min", "max", "div", "rem") for t in INTEGERS),
    "add.sat.s32", "sub.sat.s32", operands="d, a, b", qualifiers="",
)  # fmt: skip
def _arithmetic(block: BlockBuilder, instruction: Instruction) -> None:
    """add, sub, min, max, div, rem on integers; .sat of add and sub on s32."""
    name, _, type_ = instruction.opcode.rpartition(".")
    apply(block, instruction, binary(name, type_))


@family(
    *(f"{name}.{kind}16x2" for name in ("add", "min", "max") for kind in "us"),
    *(f"{name}.relu.{type_}" for name in ("min", "max") for type_ in ("s16x2", "s32")),
    operands="d, a, b", qualifiers="",
)  # fmt: skip
def _halves(block: BlockBuilder, instruction: Instruction) -> None:
    """add, min, max on pairs of 16-bit integers; .relu of min and max on s16x2 and s32."""
    name, type_ = instruction.parts[0], instruction.parts[-1]
    element = type_.removesuffix("x2")
    op = of_one_type(f"{name}_{element}{'_relu' if 'relu' in instruction.parts else ''}", element, 2)
    if not type_.endswith("x2"):
        apply(block, instruction, op)
        return
    first, second = (block.split(block.value(operand, 32), 2) for operand in instruction.operands[1:])
    block.define(instruction.operands[0], Pack([block.pure(op, a, b) for a, b in zip(first, second)]))


@family(*(f"sad.{t}" for t in INTEGERS), operands="d, a, b, c", qualifiers="")
def _sad(block: BlockBuilder, instruction: Instruction) -> None:
    """sad: the difference of two integers without its sign, added to a third."""
    type_ = instruction.parts[1]
    apply(block, instruction, of_one_type(f"sad_{type_}", type_, 3))


def multiply(half: str, type_: str) -> PureOp:
    """mul.lo, mul.hi, mul.wide."""
    if half == "wide":
        return PureOp(f"mul_wide_{type_}", (type_, type_), f"{type_[0]}{2 * TYPE_BITS[type_]}")
    return binary(f"mul.{half}", type_)


def _product(block: BlockBuilder, instruction: Instruction) -> Value:
    half, type_ = instruction.parts[1], instruction.parts[-1]
    bits = TYPE_BITS[type_]
    a, b = (block.value(operand, bits) for operand in instruction.operands[1:3])
    return block.pure(multiply(half, type_), a, b)


_MULTIPLY = [f"{half}.{t}" for half in ("lo", "hi", "wide") for t in INTEGERS if (half, t[1:]) != ("wide", "64")]


@family(*(f"mul.{form}" for form in _MULTIPLY), operands=lambda parts: "d:2T, a, b" if "wide" in parts else "d, a, b")
def _mul(block: BlockBuilder, instruction: Instruction) -> None:
    """mul.lo, mul.hi, mul.wide."""
    block.define(instruction.operands[0], _product(block, instruction))


@family(
    *(f"mad.{form}" for form in _MULTIPLY), "mad.hi.sat.s32",
    operands=lambda parts: "d:2T, a, b, c:2T" if "wide" in parts else "d, a, b, c", qualifiers="",
)  # fmt: skip
def _mad(block: BlockBuilder, instruction: Instruction) -> None:
    """mad.lo, mad.hi, mad.wide, mad.hi.sat."""
    product = _product(block, instruction)
    total = f"{instruction.parts[-1][0]}{product.bits}"
    addend = block.value(instruction.operands[3], product.bits)
    add = binary("add.sat" if "sat" in instruction.parts else "add", total)
    block.define(instruction.operands[0], block.pure(add, product, addend))


@family(
    *(f"{name}.{t}" for name in ("neg", "abs") for t in ("s16", "s32", "s64")), *(f"not.{t}" for t in _BITS[:3]),
    operands="d, a",
)  # fmt: skip
def _one_operand(block: BlockBuilder, instruction: Instruction) -> None:
    """neg, abs, not."""
    name, type_ = instruction.parts
    apply(block, instruction, of_one_type(f"{name}_{type_}", storage(type_), 1))


@family(*(f"{name}.{t}" for name in ("and", "or", "xor") for t in _BITS), operands="d, a, b")
def _and_or_xor(block: BlockBuilder, instruction: Instruction) -> None:
    """and, or, xor, on bits and predicates."""
    apply(block, instruction, binary(*instruction.parts))


@family("not.pred", operands="d, a")
def _not_predicate(block: BlockBuilder, instruction: Instruction) -> None:
    """not.pred."""
    block.define(instruction.operands[0], block.logic_not(block.value(instruction.operands[1], 1)))


def shift(name: str, type_: str) -> PureOp:
    """shl or shr."""
    return PureOp(f"{name}_{type_}", (storage(type_), "u32"), storage(type_))


def shift_by(name: str, type_: str, amount: int) -> PureOp:
    """shl or shr by a literal, the common case."""
    return of_one_type(f"{name}_{type_}_by{amount}", storage(type_), 1)


@family(
    *(f"shl.b{n}" for n in (16, 32, 64)), *(f"shr.{k}{n}" for k in "bsu" for n in (16, 32, 64)), operands="d, a, b:u32",
)  # fmt: skip
def _shl_shr(block: BlockBuilder, instruction: Instruction) -> None:
    """shl, shr."""
    name, type_ = instruction.parts
    x = block.value(instruction.operands[1], TYPE_BITS[type_])
    amount = instruction.operands[2]
    if isinstance(amount, Immediate):
        result = block.pure(shift_by(name, type_, amount.value & 0xFFFFFFFF), x)
    else:
        result = block.pure(shift(name, type_), x, block.value(amount, 32))
    if block.context.is_uniform_of_tid(instruction):
        result = block.first_lane(result)
    block.define(instruction.operands[0], result)


@family(*(f"shf.{d}.{m}.b32" for d in "lr" for m in ("wrap", "clamp")), operands="d, a, b, c:u32")
def _shf(block: BlockBuilder, instruction: Instruction) -> None:
    """shf: funnel shift."""
    apply(block, instruction, of_one_type("_".join(instruction.parts[:3]), "u32", 3))


@family(*(f"bfe.{t}" for t in ("u32", "s32", "u64", "s64")), operands="d, a, b:u32, c:u32")
def _bfe(block: BlockBuilder, instruction: Instruction) -> None:
    """bfe: bit field extract."""
    type_ = instruction.parts[1]
    apply(block, instruction, PureOp(f"bfe_{type_}", (type_, "u32", "u32"), type_))


@family("bfi.b32", "bfi.b64", operands="f, a, b, c:u32, d:u32")
def _bfi(block: BlockBuilder, instruction: Instruction) -> None:
    """bfi: bit field insert."""
    bits = instruction.parts[1]
    type_ = storage(bits)
    apply(block, instruction, PureOp(f"bfi_{bits}", (type_, type_, "u32", "u32"), type_))


_PRMT = of_one_type("prmt_b32", "u32", 3)
#: Selectors of the default mode by the low two bits of the third operand, 16 bits each (PTX ISA, prmt).
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@family("prmt.b32", operands="d, a, b, c", qualifiers="f4e|b4e|rc8|ecl|ecr|rc16?")
def _prmt(block: BlockBuilder, instruction: Instruction) -> None:
    """prmt: byte permutation, with all modes."""
    modes = instruction.parts[2:]
    if not modes:
        apply(block, instruction, _PRMT)
        return
    a, b, which = (block.value(operand, 32) for operand in instruction.operands[1:])
    table = sum(selector << 16 * i for i, selector in enumerate(_PRMT_MODES[modes[0]]))
    place = block.pure(shift_by("shl", "b32", 4), block.pure(binary("and", "b32"), which, Constant(3, 32)))
    selector = block.resize(block.pure(shift("shr", "b64"), Constant(table, 64), place), 32)
    block.define(instruction.operands[0], block.pure(_PRMT, a, b, selector))


@family(
    "dp4a", *(f"dp2a.{half}" for half in ("lo", "hi")), operands="d:u32, a:u32, b:u32, c:u32",
    qualifiers="{u,s}32 {u,s}32",
)  # fmt: skip
def _dot(block: BlockBuilder, instruction: Instruction) -> None:
    """dp4a, dp2a: dot product of four bytes, or of two halves and two bytes, added to 32 bits."""
    name, *parts = instruction.parts
    half = parts.pop(0) if name == "dp2a" else "lo"
    pieces = 8 if name == "dp4a" else 16
    first = 2 if half == "hi" else 0  # byte of the second operand
    apply(block, instruction, of_one_type("_".join((name, str(pieces), str(first), *parts)), "u32", 3))


@family("lop3.b32", operands="d, a, b, c, immLut:imm", qualifiers="")
def _lop3(block: BlockBuilder, instruction: Instruction) -> None:
    """lop3: any logic function of three operands."""
    table = as_integer(instruction, instruction.operands[4]) & 255
    sources = [block.value(operand, 32) for operand in instruction.operands[1:4]]
    block.define(instruction.operands[0], block.pure(of_one_type(f"lop3_{table:#04x}", "u32", 3), *sources))


@family("brev.b32", "brev.b64", operands="d, a", qualifiers="")
@family(
    *(f"{n}.b{b}" for n in ("popc", "clz") for b in (32, 64)),
    *(f"bfind.{k}{b}" for k in "us" for b in (32, 64)), operands="d:u32, a", qualifiers="",
)  # fmt: skip
def _counting(block: BlockBuilder, instruction: Instruction) -> None:
    """popc, clz, brev, bfind."""
    name, type_ = instruction.parts
    source = f"u{TYPE_BITS[type_]}"
    apply(block, instruction, PureOp(f"{name}_{type_}", (source,), source if name == "brev" else "u32"))


@family(*(f"bfind.shiftamt.{k}{b}" for k in "us" for b in (32, 64)), operands="d:u32, a")
def _bfind_shift(block: BlockBuilder, instruction: Instruction) -> None:
    """bfind.shiftamt: by how much to shift left so that the bit found is the highest; all ones where there is none."""
    type_ = instruction.parts[2]
    bits = TYPE_BITS[type_]
    value = block.whole(block.value(instruction.operands[1], bits))
    found, none = block.pure(PureOp(f"bfind_{type_}", (f"u{bits}",), "u32"), value), Constant(-1, 32)
    amount = block.pure(binary("sub", "u32"), Constant(bits - 1, 32), found)
    missing = block.pure(PureOp("setp_eq_b32", ("u32", "u32"), "pred"), found, none)
    block.define(instruction.operands[0], block.select(missing, none, amount))


@family("fns.b32", operands="d, mask, base, offset", qualifiers="")
def _fns(block: BlockBuilder, instruction: Instruction) -> None:
    """fns: the n-th set bit from a position on, upwards or downwards."""
    apply(block, instruction, PureOp("fns_b32", ("u32", "u32", "s32"), "u32"))


@family("bmsk.clamp.b32", "bmsk.wrap.b32", operands="d, position, width", qualifiers="")
def _bmsk(block: BlockBuilder, instruction: Instruction) -> None:
    """bmsk: ones from a position on, so many as a width says, both limited to 32 or taken modulo 32."""
    apply(block, instruction, of_one_type(f"bmsk_{instruction.parts[1]}", "u32", 2))


# --- extended precision: the carry flag of a thread, CC.CF, is a predicate register here, which `decode_body` adds to
# the operands of an instruction, so that the flow analysis knows of it like of any other register --------------------

_CARRY_TYPES = "{u,s}{32,64}"
_CARRY_SUMS = ("add.cc", "addc.cc", "sub.cc", "subc.cc")
_CARRY_PRODUCTS = tuple(f"{name}.{half}" for name in ("mad", "madc") for half in ("lo", "hi"))


def _carry_operands(parts: tuple[str, ...]) -> str:
    """Decoding adds the carry, which .cc writes and addc, subc and madc read."""
    written = ", carry_out:pred" if "cc" in parts else ""
    addend = ", c" if parts[0].startswith("mad") else ""
    return f"d{written}, a, b{addend}" + (", carry_in:pred" if parts[0].endswith("c") else "")


@family(*_CARRY_SUMS, destinations=2, operands=_carry_operands, qualifiers=_CARRY_TYPES)
@family("addc", "subc", operands=_carry_operands, qualifiers=_CARRY_TYPES)
@family(*(f"{name}.cc" for name in _CARRY_PRODUCTS), destinations=2, operands=_carry_operands, qualifiers=_CARRY_TYPES)
@family(*_CARRY_PRODUCTS[2:], operands=_carry_operands, qualifiers=_CARRY_TYPES)
def _with_carry(block: BlockBuilder, instruction: Instruction) -> None:
    """add.cc, sub.cc, mad.cc (.lo, .hi), addc, subc, madc, also with .cc: sums that leave or take a carry or borrow."""
    name, type_, leaves = instruction.parts[0], instruction.parts[-1], "cc" in instruction.parts
    bits = TYPE_BITS[type_]
    operands = list(instruction.operands[2 if leaves else 1 :])
    carry = block.value(operands.pop(), 1) if name.endswith("c") else Constant(0, 1)
    *factors, a, b = (block.value(operand, bits) for operand in operands)
    if factors:
        a = block.pure(binary(f"mul.{instruction.parts[1]}", type_), *factors, a)
    total, out = ("subc", "borrow") if name.startswith("sub") else ("addc", "carry")
    inputs = (f"u{bits}", f"u{bits}", "pred")
    result = block.pure(PureOp(f"{total}_u{bits}", inputs, f"u{bits}"), a, b, carry)
    left = block.pure(PureOp(f"{out}_u{bits}", inputs, "pred"), a, b, carry)
    block.define(instruction.operands[0], result)
    if leaves:
        block.define(instruction.operands[1], left)
