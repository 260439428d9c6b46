"""Instructions that are made of operations which others have: set, slct, cnot, testp, mul24, mad24, szext, isspacep."""

from cute_kernels.emulator.isa.instructions.compare import integer_compare
from cute_kernels.emulator.isa.instructions.integers import binary, multiply, shift_by
from cute_kernels.emulator.isa.instructions.video import Numbers
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Special
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, PureOp, Value
from cute_kernels.emulator.machine.state.smem import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW


@family("cnot.b16", "cnot.b32", "cnot.b64", operands="d, a")
def _cnot(block: BlockBuilder, instruction: Instruction) -> None:
    """cnot: 1 for 0, 0 for all others."""
    bits = TYPE_BITS[instruction.parts[1]]
    zero = block.pure(integer_compare("eq", f"b{bits}"), block.value(instruction.operands[1], bits), Constant(0, bits))
    block.define(instruction.operands[0], block.select(zero, Constant(1, bits), Constant(0, bits)))


_NOT_NEGATIVE = {type_: PureOp(f"setp_ge_{type_}", (type_, type_), "pred") for type_ in ("s32", "f32")}
_ABOVE = PureOp("setp_gt_f32", ("f32", "f32"), "pred")
_LARGEST_FLUSHED = Constant(0x80800000, 32)  # the first negative number that .ftz keeps


@family(
    "slct", operands=lambda parts: "d:{0}, a:{0}, b:{0}, c".format(parts[-2]),
    qualifiers="$bits|$ints|f32|f64 s32; ftz? $bits|$ints|f32|f64 f32",
)  # fmt: skip
def _slct(block: BlockBuilder, instruction: Instruction) -> None:
    """slct: the first operand where the third is not negative (-0 is not, NaN is), else the second."""
    parts = instruction.parts[1:]
    type_, by = parts[-2:]
    bits = TYPE_BITS[type_]
    yes, no = (block.whole(block.value(operand, bits)) for operand in instruction.operands[1:3])
    decides = block.value(instruction.operands[3], 32)
    if "ftz" in parts:
        holds = block.pure(_ABOVE, decides, _LARGEST_FLUSHED)
    else:
        holds = block.pure(_NOT_NEGATIVE[by], decides, Constant(0, 32))
    block.define(instruction.operands[0], block.select(holds, yes, no))


#: Bits of infinity and of the smallest normal number.
_FORMATS = {"f32": (0x7F800000, 0x00800000), "f64": (0x7FF << 52, 1 << 52)}
#: Property of a number without its sign: relation and which of these it is compared with. Zero counts as normal.
_PROPERTIES = {"finite": ("lt", 0), "infinite": ("eq", 0), "number": ("le", 0), "notanumber": ("gt", 0)}


@family(
    *(f"testp.{name}.{t}" for name in (*_PROPERTIES, "normal", "subnormal") for t in _FORMATS), operands="p:pred, a",
)  # fmt: skip
def _testp(block: BlockBuilder, instruction: Instruction) -> None:
    """testp: whether a float is finite, infinite, a number, not one, normal (zero is) or subnormal."""
    name, type_ = instruction.parts[1:]
    bits = TYPE_BITS[type_]
    infinity, least = (Constant(x, bits) for x in _FORMATS[type_])
    value = block.whole(block.value(instruction.operands[1], bits))
    size = block.pure(binary("and", f"b{bits}"), value, Constant((1 << bits - 1) - 1, bits))

    def compared(relation: str, with_: Value) -> Value:
        return block.pure(integer_compare(relation, f"u{bits}"), size, with_)

    if name in _PROPERTIES:
        relation, which = _PROPERTIES[name]
        result = compared(relation, (infinity, least)[which])
    else:
        subnormal = block.pure(binary("and", "pred"), compared("lt", least), compared("ne", Constant(0, bits)))
        finite = compared("lt", infinity)
        normal = block.pure(binary("and", "pred"), finite, block.logic_not(subnormal))
        result = subnormal if name == "subnormal" else normal
    block.define(instruction.operands[0], result)


def _of_24_bits(block: BlockBuilder, value: Value, type_: str) -> Value:
    if type_ == "u32":
        return block.pure(binary("and", "b32"), value, Constant(0xFFFFFF, 32))
    return block.pure(shift_by("shr", "s32", 8), block.pure(shift_by("shl", "b32", 8), value))


@family(
    *(f"{name}.{half}.{t}" for name in ("mul24", "mad24") for half in ("lo", "hi") for t in ("u32", "s32")),
    "mad24.hi.sat.s32", operands=lambda parts: "d, a, b" if parts[0] == "mul24" else "d, a, b, c",
)  # fmt: skip
def _mul24(block: BlockBuilder, instruction: Instruction) -> None:
    """mul24, mad24: products of the low 24 bits; of 48 bits the low 32, or (.hi) the high 32."""
    name, half, type_ = instruction.parts[0], instruction.parts[1], instruction.parts[-1]
    a, b = (_of_24_bits(block, block.value(operand, 32), type_) for operand in instruction.operands[1:3])
    if half == "lo":
        product = block.pure(binary("mul.lo", type_), a, b)
    else:
        product = block.resize(block.pure(shift_by("shr", "u64", 16), block.pure(multiply("wide", type_), a, b)), 32)
    if "sat" in instruction.parts:
        numbers = Numbers(block)
        c = block.value(instruction.operands[3], 32)
        total = numbers.do("add", *(numbers.field(value, 0, 32, signed=True) for value in (product, c)))
        product = block.resize(numbers.clamp(total, 32, signed=True), 32)
    elif name == "mad24":
        product = block.pure(binary("add", type_), product, block.value(instruction.operands[3], 32))
    block.define(instruction.operands[0], product)


@family(*(f"szext.{mode}.{t}" for mode in ("clamp", "wrap") for t in ("u32", "s32")), operands="d, a, b:u32")
def _szext(block: BlockBuilder, instruction: Instruction) -> None:
    """szext: a number of so many bits, limited to 32 or taken modulo 32, extended by its sign or by zeros."""
    _, mode, type_ = instruction.parts
    value, width = (block.value(operand, 32) for operand in instruction.operands[1:])
    if mode == "clamp":
        width = block.pure(binary("min", "u32"), width, Constant(32, 32))
    else:
        width = block.pure(binary("and", "b32"), width, Constant(31, 32))
    field = PureOp(f"bfe_{type_}", (type_, "u32", "u32"), type_)
    block.define(instruction.operands[0], block.pure(field, value, Constant(0, 32), width))


# What is outside of the windows is global memory, and a kernel's parameters are a part of it (PTX ISA).
_SPACES = {
    "global": (PARAM_WINDOW - (1 << 64), SHARED_WINDOW), "local": (LOCAL_WINDOW, PARAM_WINDOW),
    "param": (PARAM_WINDOW, 1 << 64), "shared::cluster": (SHARED_WINDOW, LOCAL_WINDOW),
}  # fmt: skip
_SPACES["param::entry"] = _SPACES["param"]
_SPACES["shared"] = _SPACES["shared::cta"] = _SPACES["shared::cluster"]


@family(*(f"isspacep.{space}" for space in _SPACES), operands="p:pred, a:u32/u64")
def _isspacep(block: BlockBuilder, instruction: Instruction) -> None:
    """isspacep: whether a generic address is of global, shared (own CTA or cluster), local memory or of a parameter."""
    space = instruction.parts[1]
    start, end = _SPACES[space]
    address = block.resize(block.whole(block.value(instruction.operands[1], 64)), 64)
    place = block.pure(binary("sub", "u64"), address, Constant(start % (1 << 64), 64))
    holds = block.pure(integer_compare("lt", "u64"), place, Constant(end - start, 64))
    if space in ("shared", "shared::cta"):
        rank = block.resize(block.pure(shift_by("shr", "u64", 24), place), 32)
        own = block.pure(integer_compare("eq", "b32"), rank, block.value(Special("%cluster_ctarank"), 32))
        holds = block.pure(binary("and", "pred"), holds, own)
    block.define(instruction.operands[0], holds)
