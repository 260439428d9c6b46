"""Integer arithmetic, logic, shifts and bit fields."""

from __future__ import annotations

import functools

import numpy as np

from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.decode import TYPE_BITS, Immediate, Instruction
from cute_kernels.emulator.instructions_registry import as_integer, family, qualifiers
from cute_kernels.emulator.scalars import SCALAR_NAMES, bfe_int, bfi_int, dot_int, lop3_value
from cute_kernels.emulator.values import CANONICAL, DTYPES, Constant, Pack, PureOp, Value

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_BITS = ("b16", "b32", "b64", "pred")


def storage(type_: str) -> str:
    """Storage type of a PTX integer or bit type."""
    return type_ if type_ in DTYPES else CANONICAL[TYPE_BITS[type_]]


def signed(text: str, bits: int) -> str:
    """Expression of a bit pattern read as two's complement."""
    half = 1 << (bits - 1)
    return f"(({text} ^ {half:#x}) - {half:#x})"


def typed(text: str, type_: str) -> str:
    """Expression of a bit pattern read as a PTX integer type."""
    return signed(text, TYPE_BITS[type_]) if type_[0] == "s" else text


def wrap(text: str, bits: int) -> str:
    """Expression of an integer cut to its low bits."""
    return f"({text} & {(1 << bits) - 1:#x})"


def apply(block: BlockBuilder, instruction: Instruction, op: PureOp) -> None:
    """Operands 1.. through ``op`` into operand 0."""
    sources = [
        block.value(operand, 1 if t == "pred" else np.dtype(DTYPES[t]).itemsize * 8)
        for operand, t in zip(instruction.operands[1:], op.inputs)
    ]
    if len(instruction.operands) != len(op.inputs) + 1:
        raise instruction.refuse(f"{op.name} takes {len(op.inputs)} source operands")
    result = block.pure(op, *sources)
    if block.context.is_uniform_of_tid(instruction):
        result = block.first_lane(result)
    block.define(instruction.operands[0], result)


def quiet(function):
    """Integer division by zero and overflow are defined in PTX: no NumPy warning."""

    @functools.wraps(function)
    def inner(*args: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(*args)

    return inner


# --- addition, multiplication, division -----------------------------------------------------------------------------


@functools.cache
def binary(name: str, type_: str) -> PureOp:
    """add, sub, min, max, mul.lo, mul.hi, div, rem of two integers."""
    bits = TYPE_BITS[type_]
    s, u = typed("{0}", type_), typed("{1}", type_)
    table = {
        "add": (np.add, "{0} + {1}"),
        "sub": (np.subtract, "{0} - {1}"),
        "min": (np.minimum, f"min({s}, {u})"),
        "max": (np.maximum, f"max({s}, {u})"),
        "mul.lo": (np.multiply, "{0} * {1}"),
        "mul.hi": (functools.partial(_high, bits=bits), f"{s} * {u} >> {bits}"),
        "div": (quiet(functools.partial(_divide, bits=bits)), f"int_div({s}, {u})"),
        "rem": (quiet(functools.partial(_remainder, bits=bits)), f"int_rem({s}, {u})"),
    }
    vector, scalar = table[name]
    stored = storage(type_)
    return PureOp(f"{name.replace('.', '_')}_{type_}", (stored, stored), stored, vector, wrap(scalar, bits))


def _high(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    if bits < 64:
        wide = {16: np.int64, 32: np.int64}[bits] if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)  # 128-bit products: Python integers
    upper = [int(x) >> 64 & (1 << 64) - 1 for x in product.ravel()]
    return np.array(upper, np.uint64).reshape(product.shape).view(a.dtype)


def _divide(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.kind == "u":
        return np.where(b == 0, a.dtype.type((1 << bits) - 1), a // np.where(b == 0, a.dtype.type(1), b))
    safe = np.where(b == 0, a.dtype.type(1), b)
    q = a // safe
    q = q + ((a - q * safe != 0) & ((a < 0) != (safe < 0)))  # from rounded down to rounded towards zero
    return np.where(b == 0, a.dtype.type(-1), q.astype(a.dtype))


def _remainder(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    ones = ~a.dtype.type(0)
    return np.where(b == 0, ones, a - np.where(b == 0, a.dtype.type(0), b * _divide(a, b, bits)))


@family(*(f"{name}.{t}" for name in ("add", "sub", "min", "max", "div", "rem") for t in INTEGERS))
def _arithmetic(block: BlockBuilder, instruction: Instruction) -> None:
    """add, sub, min, max, div, rem on integers."""
    name, type_ = instruction.parts[0], instruction.parts[1]
    if len(instruction.parts) != 2:
        raise instruction.refuse(f"qualifier .{instruction.parts[2]} of {name} is not implemented")
    apply(block, instruction, binary(name, type_))


@functools.cache
def _packed(name: str, type_: str, relu: bool) -> PureOp:
    """add, min or max of one 16-bit element (of s32: min and max .relu); relu: negative results become 0."""
    op = binary(name, type_)

    def vector(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(op.vector(a, b), a.dtype.type(0))

    return PureOp(f"{op.name}_relu", op.inputs, op.output, vector) if relu else op


@family(
    *(f"{name}.{kind}16x2" for name in ("add", "min", "max") for kind in "us"),
    *(f"{name}.relu.{type_}" for name in ("min", "max") for type_ in ("s16x2", "s32")),
)
def _halves(block: BlockBuilder, instruction: Instruction) -> None:
    """add, min, max on pairs of 16-bit integers; .relu of min and max on s16x2 and s32."""
    name, type_ = instruction.parts[0], instruction.parts[-1]
    qualifiers(instruction, "relu", type_)
    op = _packed(name, type_.removesuffix("x2"), "relu" in instruction.parts)
    if not type_.endswith("x2"):
        apply(block, instruction, op)
        return
    first, second = (block.split(block.value(operand, 32), 2) for operand in instruction.operands[1:])
    block.define(instruction.operands[0], Pack([block.pure(op, a, b) for a, b in zip(first, second)]))


@functools.cache
def _difference(type_: str) -> PureOp:
    bits = TYPE_BITS[type_]
    unsigned = DTYPES[f"u{bits}"]

    def vector(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        larger, smaller = np.maximum(a, b).view(unsigned), np.minimum(a, b).view(unsigned)
        return (c.view(unsigned) + (larger - smaller)).view(c.dtype)

    scalar = wrap(f"{{2}} + abs({typed('{0}', type_)} - {typed('{1}', type_)})", bits)
    return PureOp(f"sad_{type_}", (type_,) * 3, type_, vector, scalar)


@family(*(f"sad.{t}" for t in INTEGERS))
def _sad(block: BlockBuilder, instruction: Instruction) -> None:
    """sad: the difference of two integers without its sign, added to a third."""
    qualifiers(instruction, instruction.parts[1])
    apply(block, instruction, _difference(instruction.parts[1]))


@functools.cache
def _wide(type_: str) -> PureOp:
    bits = TYPE_BITS[type_]
    target = f"{type_[0]}{2 * bits}"
    scalar = wrap(f"{typed('{0}', type_)} * {typed('{1}', type_)}", 2 * bits)
    dtype = DTYPES[target]
    return PureOp(
        f"mul_wide_{type_}", (type_, type_), target, lambda a, b: a.astype(dtype) * b.astype(dtype), scalar
    )


def _product(block: BlockBuilder, instruction: Instruction) -> Value:
    half, type_ = instruction.parts[1:3]
    bits = TYPE_BITS[type_]
    a, b = (block.value(operand, bits) for operand in instruction.operands[1:3])
    return block.pure(_wide(type_) if half == "wide" else binary(f"mul.{half}", type_), a, b)


_MULTIPLY = [f"{half}.{t}" for half in ("lo", "hi", "wide") for t in INTEGERS if (half, t[1:]) != ("wide", "64")]


@family(*(f"mul.{form}" for form in _MULTIPLY))
def _mul(block: BlockBuilder, instruction: Instruction) -> None:
    """mul.lo, mul.hi, mul.wide."""
    block.define(instruction.operands[0], _product(block, instruction))


@family(*(f"mad.{form}" for form in _MULTIPLY))
def _mad(block: BlockBuilder, instruction: Instruction) -> None:
    """mad.lo, mad.hi, mad.wide."""
    qualifiers(instruction, instruction.parts[1], instruction.parts[2])
    product = _product(block, instruction)
    type_ = instruction.parts[2]
    total = f"{type_[0]}{product.bits}"
    addend = block.value(instruction.operands[3], product.bits)
    block.define(instruction.operands[0], block.pure(binary("add", total), product, addend))


@functools.cache
def _unary(name: str, type_: str) -> PureOp:
    bits = TYPE_BITS[type_]
    s = typed("{0}", type_)
    vector, scalar = {"neg": (np.negative, "-{0}"), "abs": (np.abs, f"abs({s})"), "not": (np.invert, "~{0}")}[name]
    return PureOp(f"{name}_{type_}", (storage(type_),), storage(type_), vector, wrap(scalar, bits))


@family(*(f"{name}.{t}" for name in ("neg", "abs") for t in ("s16", "s32", "s64")), *(f"not.{t}" for t in _BITS[:3]))
def _one_operand(block: BlockBuilder, instruction: Instruction) -> None:
    """neg, abs, not."""
    apply(block, instruction, _unary(*instruction.parts))


# --- bits -----------------------------------------------------------------------------------------------------------


@functools.cache
def logic(name: str, type_: str) -> PureOp:
    """and, or, xor of bits or predicates."""
    sign = {"and": "&", "or": "|", "xor": "^"}[name]
    vector = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    text = f"({{0}} {sign} {{1}})"
    if type_ == "pred":
        scalar = {"and": "({0} and {1})", "or": "({0} or {1})", "xor": "({0} != {1})"}[name]
        return PureOp(f"{name}_pred", ("pred", "pred"), "pred", None, scalar, text)
    return PureOp(f"{name}_{type_}", (storage(type_),) * 2, storage(type_), vector, text)


@family(*(f"{name}.{t}" for name in ("and", "or", "xor") for t in _BITS))
def _and_or_xor(block: BlockBuilder, instruction: Instruction) -> None:
    """and, or, xor, on bits and predicates."""
    apply(block, instruction, logic(*instruction.parts))


@family("not.pred")
def _not_predicate(block: BlockBuilder, instruction: Instruction) -> None:
    """not.pred."""
    block.define(instruction.operands[0], block.logic_not(block.value(instruction.operands[1], 1)))


@functools.cache
def _shift(name: str, type_: str) -> PureOp:
    # PTX clamps shift amounts to the width; NumPy and Python do too once amounts beyond it are cut.
    bits = TYPE_BITS[type_]
    amount = f"min({{1}}, {bits})"
    value = typed("{0}", type_) if name == "shr" else "{0}"
    scalar = wrap(f"({value} {'<<' if name == 'shl' else '>>'} {amount})", bits)
    dtype = DTYPES[storage(type_)]

    def vector(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        shift = np.left_shift if name == "shl" else np.right_shift
        top = shift(x, (bits - 1))
        far = top if dtype(0).dtype.kind == "i" else dtype(0)
        return np.where(n >= bits, far, shift(x, np.minimum(n, bits - 1).astype(dtype)))

    return PureOp(f"{name}_{type_}", (storage(type_), "u32"), storage(type_), vector, scalar)


@functools.cache
def shift_by(name: str, type_: str, amount: int) -> PureOp:
    """shl or shr by a literal: the common case, one NumPy call."""
    general = _shift(name, type_)
    if amount >= TYPE_BITS[type_]:
        literal = np.array([amount], np.uint32)
        return PureOp(
            f"{general.name}_by{amount}",
            general.inputs[:1],
            general.output,
            lambda x: general.vector(x, literal),
            general.scalar.replace("{1}", str(amount)),
        )
    shift = np.left_shift if name == "shl" else np.right_shift
    count = np.array([amount], DTYPES[storage(type_)])
    return PureOp(
        f"{general.name}_by{amount}",
        general.inputs[:1],
        general.output,
        lambda x: shift(x, count),
        general.scalar.replace(f"min({{1}}, {TYPE_BITS[type_]})", str(amount)),
    )


@family(*(f"shl.b{n}" for n in (16, 32, 64)), *(f"shr.{k}{n}" for k in "bsu" for n in (16, 32, 64)))
def _shl_shr(block: BlockBuilder, instruction: Instruction) -> None:
    """shl, shr."""
    name, type_ = instruction.parts
    x = block.value(instruction.operands[1], TYPE_BITS[type_])
    amount = instruction.operands[2]
    if isinstance(amount, Immediate):
        result = block.pure(shift_by(name, type_, amount.value & 0xFFFFFFFF), x)
    else:
        result = block.pure(_shift(name, type_), x, block.value(amount, 32))
    if block.context.is_uniform_of_tid(instruction):
        result = block.first_lane(result)
    block.define(instruction.operands[0], result)


@functools.cache
def _funnel(direction: str, mode: str) -> PureOp:
    limit = "({2} & 31)" if mode == "wrap" else "min({2}, 32)"
    both = "({1} << 32 | {0})"
    scalar = f"({both} >> {limit} & 0xFFFFFFFF)" if direction == "r" else f"({both} << {limit} >> 32 & 0xFFFFFFFF)"

    def vector(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))).astype(np.uint64)
        word = (high.astype(np.uint64) << np.uint64(32)) | low
        return (word >> n if direction == "r" else word << n >> np.uint64(32)).astype(np.uint32)

    return PureOp(f"shf_{direction}_{mode}", ("u32", "u32", "u32"), "u32", vector, scalar)


@family(*(f"shf.{d}.{m}.b32" for d in "lr" for m in ("wrap", "clamp")))
def _shf(block: BlockBuilder, instruction: Instruction) -> None:
    """shf: funnel shift."""
    apply(block, instruction, _funnel(*instruction.parts[1:3]))


def _bfe_vector(x: np.ndarray, start: np.ndarray, length: np.ndarray, bits: int) -> np.ndarray:
    """The field is sign-extended for signed types: bits beyond the register repeat its sign bit."""
    x, start, length = np.broadcast_arrays(x, start & np.uint32(255), length & np.uint32(255))
    wide = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)
    out = []
    for value, first, count in zip(wide.ravel().tolist(), start.ravel().tolist(), length.ravel().tolist()):
        out.append(bfe_int(value, first, count, bits, x.dtype.kind == "i"))
    unsigned = np.uint32 if bits == 32 else np.uint64
    return np.array(out, unsigned).reshape(x.shape).view(x.dtype)


@functools.cache
def _bfe_op(type_: str) -> PureOp:
    bits = TYPE_BITS[type_]
    scalar = f"bfe_int({typed('{0}', type_)}, {{1}}, {{2}}, {bits}, {type_[0] == 's'})"
    return PureOp(f"bfe_{type_}", (type_, "u32", "u32"), type_, functools.partial(_bfe_vector, bits=bits), scalar)


@family(*(f"bfe.{t}" for t in ("u32", "s32", "u64", "s64")))
def _bfe(block: BlockBuilder, instruction: Instruction) -> None:
    """bfe: bit field extract."""
    apply(block, instruction, _bfe_op(instruction.parts[1]))


@functools.cache
def _bfi_op(bits: int) -> PureOp:
    type_ = f"u{bits}"

    def vector(f: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        arrays = np.broadcast_arrays(f, b, start, length)
        rows = zip(*(a.ravel().tolist() for a in arrays))
        return np.array([bfi_int(*row, bits) for row in rows], DTYPES[type_]).reshape(arrays[0].shape)

    scalar = f"bfi_int({{0}}, {{1}}, {{2}}, {{3}}, {bits})"
    return PureOp(f"bfi_b{bits}", (type_, type_, "u32", "u32"), type_, vector, scalar)


@family("bfi.b32", "bfi.b64")
def _bfi(block: BlockBuilder, instruction: Instruction) -> None:
    """bfi: bit field insert."""
    apply(block, instruction, _bfi_op(int(instruction.parts[1][1:])))


def _prmt_vector(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    source = (b.astype(np.uint64) << np.uint64(32)) | a
    out = np.zeros(np.broadcast_shapes(source.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        shift = ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
        byte = (source >> shift & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * i)
    return out


_PRMT = PureOp("prmt_b32", ("u32", "u32", "u32"), "u32", _prmt_vector, "prmt_int({0}, {1}, {2})")


#: Selectors of the default mode by the low two bits of the third operand, 16 bits each (PTX ISA, prmt).
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@family("prmt.b32")
def _prmt(block: BlockBuilder, instruction: Instruction) -> None:
    """prmt: byte permutation, with all modes."""
    _, *modes = qualifiers(instruction, "b32", *_PRMT_MODES)
    if len(modes) > 1:
        raise instruction.refuse(f"{instruction.opcode}: one mode at most")
    if not modes:
        apply(block, instruction, _PRMT)
        return
    a, b, which = (block.value(operand, 32) for operand in instruction.operands[1:])
    table = sum(selector << 16 * i for i, selector in enumerate(_PRMT_MODES[modes[0]]))
    place = block.pure(shift_by("shl", "b32", 4), block.pure(logic("and", "b32"), which, Constant(3, 32)))
    selector = block.resize(block.pure(_shift("shr", "b64"), Constant(table, 64), place), 32)
    block.define(instruction.operands[0], block.pure(_PRMT, a, b, selector))


@functools.cache
def _dot_op(name: str, bits: int, first: int, a_type: str, b_type: str) -> PureOp:
    form = (bits, first, a_type == "s32", b_type == "s32")

    def vector(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return dot_int(*(x.astype(np.int64) for x in (a, b, c)), *form).astype(np.uint32)

    scalar = f"dot_int({{0}}, {{1}}, {{2}}, {', '.join(map(str, form))})"
    return PureOp(f"{name}_{bits}_{first}_{a_type}_{b_type}", ("u32",) * 3, "u32", vector, scalar)


@family("dp4a", *(f"dp2a.{half}" for half in ("lo", "hi")))
def _dot(block: BlockBuilder, instruction: Instruction) -> None:
    """dp4a, dp2a: dot product of four bytes, or of two halves and two bytes, added to 32 bits."""
    name, *parts = instruction.parts
    half = parts.pop(0) if name == "dp2a" else "lo"
    if len(parts) != 2:
        raise instruction.refuse(f"{name} takes the types of two operands")
    qualifiers(instruction, "u32", "s32", skip=len(instruction.parts) - 2)
    apply(block, instruction, _dot_op(name, 8 if name == "dp4a" else 16, 2 if half == "hi" else 0, *parts))


@functools.cache
def _lop3_op(table: int) -> PureOp:
    return PureOp(
        f"lop3_{table:#04x}",
        ("u32",) * 3,
        "u32",
        lambda a, b, c: lop3_value(a, b, c, table, np.uint32(0xFFFFFFFF)),
        f"lop3_int({{0}}, {{1}}, {{2}}, {table})",
    )


@family("lop3.b32")
def _lop3(block: BlockBuilder, instruction: Instruction) -> None:
    """lop3: any logic function of three operands."""
    qualifiers(instruction, "b32")
    table = as_integer(instruction, instruction.operands[4]) & 255
    sources = [block.value(operand, 32) for operand in instruction.operands[1:4]]
    block.define(instruction.operands[0], block.pure(_lop3_op(table), *sources))


@functools.cache
def _bit_count(name: str, type_: str) -> PureOp:
    bits = TYPE_BITS[type_]
    pattern = "{0}"
    if name == "bfind" and type_[0] == "s":  # the highest bit that differs from the sign bit
        pattern = f"({{0}} ^ ({(1 << bits) - 1:#x} if {{0}} >> {bits - 1} else 0))"
    scalar = {
        "popc": '({0}).bit_count() if hasattr(int, "bit_count") else bin({0}).count("1")',
        "clz": f"clz_int({{0}}, {bits})",
        "brev": f"brev_int({{0}}, {bits})",
        "bfind": f"bfind_int({pattern})",
    }[name]
    output = f"u{bits}" if name == "brev" else "u32"
    code = compile(f"lambda x: {scalar.format('x')}", "<bits>", "eval")
    one = eval(code, dict(SCALAR_NAMES))  # noqa: S307 - our own template

    def vector(x: np.ndarray) -> np.ndarray:
        return np.array([one(v) for v in x.ravel().tolist()], DTYPES[output]).reshape(x.shape)

    return PureOp(f"{name}_{type_}", (f"u{bits}",), output, vector, f"({scalar})")


@family(
    *(f"{n}.b{b}" for n in ("popc", "clz", "brev") for b in (32, 64)),
    *(f"bfind.{k}{b}" for k in "us" for b in (32, 64)),
)
def _counting(block: BlockBuilder, instruction: Instruction) -> None:
    """popc, clz, brev, bfind."""
    qualifiers(instruction, instruction.parts[1])
    apply(block, instruction, _bit_count(*instruction.parts[:2]))
