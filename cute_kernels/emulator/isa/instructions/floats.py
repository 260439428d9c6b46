"""Floating-point arithmetic: f32, f32x2, f16, bf16 and their pairs, f64.

Sums, products, fused multiply-adds, quotients and square roots are correctly rounded; these and their NaNs were found
equal to an H200 bit for bit. The ``.approx`` functions (ex2, lg2, rcp, rsqrt, sin, cos, tanh, div) are computed in f64
and rounded: the hardware's tables are not documented. An H200 differed from them in the last bits of a fifth of random
ex2, lg2 and rsqrt, and in more of tanh, sin and cos, whose error on silicon is bounded absolutely only.
"""

import dataclasses
import functools

from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Pack, PureOp, Value, of_one_type

#: Towards zero, down, up.
_DIRECTIONS = ("rz", "rm", "rp")
_OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "min": 2, "max": 2}  # all others: 1
_APPROXIMATE = ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")


@functools.cache
def _operation(name: str, type_: str, modifiers: str = "") -> PureOp:
    """``name`` with its qualifiers on f32, f64, or on bits of f16 or bf16; ``modifiers``: _ftz, _sat."""
    stored = type_ if type_ in ("f32", "f64") else "u16"
    return of_one_type(f"{name.replace('.', '_')}_{type_}{modifiers}", stored, _OPERANDS.get(name.split(".")[0], 1))


def _lower(block: BlockBuilder, instruction: Instruction, name: str, sources: list[Value], type_: str) -> Value:
    ftz = "ftz" in instruction.parts and type_ != "f64"
    if ftz and type_ != "f32":
        raise instruction.refuse(f".ftz of {name}.{type_} is not implemented")
    return block.pure(_operation(name, type_, "_ftz" * ftz + "_sat" * ("sat" in instruction.parts)), *sources)


def _elementwise(block: BlockBuilder, instruction: Instruction, name: str = "") -> None:
    """Applies the operation, pairs (x2 types) element by element."""
    name, type_ = name or instruction.parts[0], instruction.parts[-1]
    base, pair = (type_[:-2], True) if type_.endswith("x2") else (type_, False)
    bits = TYPE_BITS[base] * (2 if pair else 1)
    sources = [block.value(operand, bits) for operand in instruction.operands[1:]]
    if pair:
        halves = [block.split(source, 2) for source in sources]
        result: Value = Pack([_lower(block, instruction, name, [h[i] for h in halves], base) for i in (0, 1)])
    else:
        result = _lower(block, instruction, name, sources, base)
    block.define(instruction.operands[0], result)


_FLOATS = ("f32", "f32x2", "f16", "f16x2", "bf16", "bf16x2", "f64")


def _sum_operands(parts: tuple[str, ...]) -> str:
    """The last operand of add.f32.f16 and fma.f32.f16 has the type of the result."""
    return {"fma": "d:S, a:T, b:T, c:S", "mul": "d, a, b"}.get(parts[0], "d:S, a:T, b:S")


_SUMS = ("$round? ftz? sat? f32; $round? f64; $round? ftz? f32x2; rn? ftz? sat? f16|f16x2; rn? bf16|bf16x2")
_MIXED = "$round? sat? f32 f16|bf16"


@family("add", "sub", operands=_sum_operands, qualifiers=f"{_SUMS}; {_MIXED}")
@family("mul", operands=_sum_operands, qualifiers=_SUMS)
@family(
    "fma", operands=_sum_operands,
    qualifiers="$round ftz? sat? f32; $round f64; $round ftz? f32x2; rn ftz? sat? f16|f16x2; rn ftz? relu f16|f16x2; "
    "rn relu? bf16|bf16x2; $round sat? f32 f16|bf16",
)  # fmt: skip
def _sum_product(block: BlockBuilder, instruction: Instruction) -> None:
    """add, sub, mul, fma on floats: .rn (the default), .ftz, .sat; f16 or bf16 operands of f32 sums; f32, f32x2
    and f64 directed; .relu of fma on f16 and bf16."""
    parts = instruction.parts
    modes = [part for part in parts if part in (*_DIRECTIONS, "relu")]
    types = [part for part in parts if part in _FLOATS]
    if len(types) == 1:
        _elementwise(block, instruction, ".".join((parts[0], *modes)))
    elif modes:
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    else:
        _mixed(block, instruction, types[1])


def float_to_float(target: str, source: str) -> PureOp:
    """To f32 or f64: exactly, or to nearest even. NaN of f16 become canonical, others keep their payload."""
    return PureOp(f"cvt_{target}_{source}", (source if source in ("f32", "f64") else "u16",), target)


def _mixed(block: BlockBuilder, instruction: Instruction, type_: str) -> None:
    """All operands but the last are of the half type; the result and the last one are f32."""
    *narrow, last = instruction.operands[1:]
    sources = [block.pure(float_to_float("f32", type_), block.value(operand, 16)) for operand in narrow]
    sources.append(block.value(last, 32))
    parts = (*(part for part in instruction.parts if part not in _FLOATS), "f32")
    plain = dataclasses.replace(instruction, parts=parts)
    block.define(instruction.operands[0], _lower(block, plain, instruction.parts[0], sources, "f32"))


def _order_operands(parts: tuple[str, ...]) -> str:
    if parts[0] in ("abs", "neg"):
        return "d, a"
    return "d, a, b, c?" if parts[-1] == "f32" and "xorsign" not in parts else "d, a, b"


@family(
    "min", "max", operands=_order_operands,
    qualifiers="ftz? NaN? xorsign? abs? f32|f16|f16x2; NaN? xorsign? abs? bf16|bf16x2; f64; xorsign > abs; "
    "abs > xorsign",
)  # fmt: skip
@family("abs", "neg", operands=_order_operands, qualifiers="ftz? f32|f16|f16x2; f64|bf16|bf16x2")
def _order(block: BlockBuilder, instruction: Instruction) -> None:
    """min, max (of three operands too; .NaN; .xorsign.abs), abs, neg on floats."""
    parts = instruction.parts[1:]
    name, type_ = instruction.parts[0], instruction.parts[-1]
    name += ".NaN" * ("NaN" in parts) + ".xorsign" * ("xorsign" in parts)
    if len(instruction.operands) == 4:
        first, second, third = (block.value(operand, 32) for operand in instruction.operands[1:])
        both = _lower(block, instruction, name, [first, second], type_)
        block.define(instruction.operands[0], _lower(block, instruction, name, [both, third], type_))
        return
    _elementwise(block, instruction, name)


@family("copysign", operands="d, a, b", qualifiers="f32|f64")
def _copysign(block: BlockBuilder, instruction: Instruction) -> None:
    """copysign: the sign of the first operand, the rest of the second one, NaN as they are."""
    bits = TYPE_BITS[instruction.parts[-1]]
    kind = f"u{bits}"
    sources = [block.value(operand, bits) for operand in instruction.operands[1:]]
    block.define(instruction.operands[0], block.pure(of_one_type(f"copysign_{kind}", kind, 2), *sources))


@family("div", operands="d, a, b", qualifiers="rn|approx|full ftz? f32; rn f64")
@family("rcp", operands="d, a", qualifiers="rn|approx ftz? f32; rn f64; approx ftz f64")
@family("sqrt", operands="d, a", qualifiers="rn|approx ftz? f32; rn f64")
def _quotient(block: BlockBuilder, instruction: Instruction) -> None:
    """div, rcp, sqrt: .rn exactly, .approx and .full rounded correctly too."""
    _elementwise(block, instruction)


@family("lg2", "sin", "cos", operands="d, a", qualifiers="approx ftz? f32")
@family("ex2", operands="d, a", qualifiers="approx ftz? f32; approx f16|f16x2; approx ftz bf16|bf16x2")
@family("tanh", operands="d, a", qualifiers="approx f32|f16|f16x2|bf16|bf16x2")
@family("rsqrt", operands="d, a", qualifiers="approx ftz? f32; approx f64")
def _approximate(block: BlockBuilder, instruction: Instruction) -> None:
    """ex2, lg2, sin, cos, tanh, rsqrt (.approx)."""
    if instruction.parts[-1] in ("bf16", "bf16x2"):  # these have f32's exponents: nothing to flush
        parts = tuple(part for part in instruction.parts if part != "ftz")
        instruction = dataclasses.replace(instruction, parts=parts)
    _elementwise(block, instruction)
