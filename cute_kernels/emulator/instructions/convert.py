"""cvt between integer and floating-point types; those of less than eight bits are in `instructions.convert_narrow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.graph.values import CANONICAL, Pack, PureOp, Value, of_one_type
from cute_kernels.emulator.instructions.convert_narrow import convert_narrow
from cute_kernels.emulator.instructions.floats import float_to_float
from cute_kernels.emulator.ptx.decode import Instruction, Register
from cute_kernels.emulator.ptx.operand_syntax import HELD_IN, is_type

_INTEGER_BITS = {f"{k}{b}": b for k in "us" for b in (8, 16, 32, 64)}
_FP8 = ("e4m3x2", "e5m2x2")


def _operands(parts: tuple[str, ...]) -> str:
    types = [part for part in parts if is_type(part)]
    newer = any(part in HELD_IN or part in ("bf16", "bf16x2") for part in types)  # without wider registers
    wider = "" if newer else "+"
    random = ", rbits:b32" if "rs" in parts else ""
    if len(types) == 2 and types[0].endswith("x4"):
        return f"d:S, {{a}}4:T{random}"
    two = len(types) == 2 and types[0].endswith("x2") and types[1] == "f32"
    return f"d:S{wider}, a:T{wider}" + (f", b:T{wider}" if two else "") + random


_INTEGRAL, _WHOLE = "rni|rzi|rmi|rpi", "{u,s}{8,16,32,64}"
_PACKED = "e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2"
_FORMS = (
    f"{_INTEGRAL} sat? {_WHOLE} f16|f64", f"{_INTEGRAL} ftz? sat? {_WHOLE} f32", f"{_INTEGRAL} {_WHOLE} bf16",
    f"$round sat? f16|f64 {_WHOLE}", f"$round ftz? sat? f32 {_WHOLE}", f"$round bf16 {_WHOLE}",
    *(f"{_INTEGRAL}? {flags} {type_} {type_}"
      for flags, type_ in (("sat?", "f16"), ("sat?", "f64"), ("", "bf16"), ("ftz? sat?", "f32"))),
    "$round? f16 bf16", "$round sat? f16 f64", "$round ftz? sat? f16 f32", "rn|rz satfinite? relu? f16|bf16 f32",
    "$round? bf16 f16", "$round bf16 f64", "$round ftz? bf16 f32",
    "ftz? sat? f32 f16", "$round? ftz? f32 bf16", "$round ftz? sat? f32 f64",
    "sat? f64 f16", "$round? f64 bf16", "ftz? sat? f64 f32",
    "rn|rz satfinite? relu? tf32|f16x2|bf16x2 f32", "rna satfinite? tf32 f32", f"rn satfinite relu? {_PACKED} f32",
    "rn satfinite relu? e4m3x2|e5m2x2|e2m1x2 f16x2", f"rn relu? f16x2 {_PACKED}",
    "rz|rp satfinite? ue8m0x2 f32|bf16x2", "rn bf16x2 ue8m0x2",
)  # fmt: skip


def _between_integers() -> Iterator[str]:
    """.sat exists where the target does not hold all numbers of the source."""
    for target, source in itertools.product(_INTEGER_BITS, repeat=2):
        more = _INTEGER_BITS[target] - (target[0] == "s") - _INTEGER_BITS[source] + (source[0] == "s")
        yield f"{'sat? ' * (more < 0 or target[0] > source[0])}{target} {source}"


@family("cvt", operands=_operands, qualifiers="; ".join((*_FORMS, *_between_integers())))
def _cvt(block: BlockBuilder, instruction: Instruction) -> None:
    """cvt: integers, f16, bf16, f32, f64, packed f16x2/bf16x2/e4m3x2/e5m2x2/e2m3x2/e3m2x2/e2m1x2/ue8m0x2, tf32."""
    *flags, target, source = instruction.parts[1:]
    narrow = convert_narrow(block, instruction, flags, target, source)
    if narrow is not None:
        result = narrow
    elif target in _INTEGER_BITS and source in _INTEGER_BITS:
        result = _integer_to_integer(block, instruction, flags, target, source)
    elif target in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2") and source == "f32":
        result = _pair(block, instruction, flags, target)
    elif target in _FP8 or source in _FP8:
        result = _fp8(block, instruction, flags, target, source)
    elif target in _INTEGER_BITS:
        result = _float_to_integer(block, instruction, flags, target, source)
    elif source in _INTEGER_BITS:
        result = _integer_to_float(block, instruction, flags, target, source)
    else:
        result = _float_to_float(block, instruction, flags, target, source)
    block.define(instruction.operands[0], result)


def _only(instruction: Instruction, flags: list[str], *allowed: str) -> None:
    for flag in flags:
        if flag not in allowed:
            raise instruction.refuse(f"cvt.{'.'.join(instruction.parts[1:])}: .{flag} is not implemented here")


def _register_bits(block: BlockBuilder, instruction: Instruction) -> int:
    destination = instruction.operands[0]
    return block.bits_of(destination.name) if isinstance(destination, Register) else 32


def extend(source: str, bits: int, source_bits: int) -> PureOp:
    """Reads the low bits of a register as ``source`` and extends them to ``bits`` bits by their sign."""
    return PureOp(f"extend_{source}_{bits}_{source_bits}", (CANONICAL[source_bits],), f"u{bits}")


def saturate(source: str, target: str) -> PureOp:
    """Reads the low bits of 64 as ``source`` and limits them to the range of ``target``; the result has 64 bits."""
    return of_one_type(f"saturate_{source}_{target}", "u64", 1)


def _integer_to_integer(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    """Truncation, extension, saturation. A register wider than the destination type is extended by the type's sign."""
    _only(instruction, flags, "sat")
    operand = instruction.operands[1]
    source_bits = _value_bits(block, operand, _INTEGER_BITS[source])
    value = block.value(operand, source_bits)
    register = _register_bits(block, instruction)
    width = _INTEGER_BITS[target]
    if "sat" in flags:
        value = block.pure(saturate(source, target), block.resize(value, 64))
    elif width > _INTEGER_BITS[source]:
        value = block.pure(extend(source, width, value.bits), value)
    if register == width == value.bits:
        return value
    if register < width:
        raise instruction.refuse("the destination register is narrower than the destination type")
    return block.pure(extend(target, register, value.bits), value)


def _value_bits(block: BlockBuilder, operand: object, default: int) -> int:
    return block.bits_of(operand.name) if isinstance(operand, Register) else default


def _narrow_from_flags(instruction: Instruction, flags: list[str], target: str) -> PureOp:
    """f32 to f16 or bf16 bits."""
    _only(instruction, flags, "rn", "rz", "satfinite", "relu")
    mode = "rz" if "rz" in flags else "rn"
    if (target, mode) == ("f16", "rz"):
        raise instruction.refuse("cvt.rz to f16 is not implemented")
    modifiers = "".join(f"_{flag}" for flag in ("satfinite", "relu") if flag in flags)
    return PureOp(f"cvt_{target}_f32_{mode}{modifiers}", ("f32",), "u16")


def _pair(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    if len(instruction.operands) != 3:
        raise instruction.refuse("a packed conversion takes two sources")
    high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    if target in _FP8:
        op = _to_fp8(instruction, flags, target)
    else:
        op = _narrow_from_flags(instruction, flags, target[:-2])
    return Pack([block.pure(op, low), block.pure(op, high)])


def _fp8(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """Two FP8 values to f16x2 (exact), or back."""
    operand = instruction.operands[1]
    if target in _FP8 and source == "f16x2":
        op = _to_fp8(instruction, flags, target)
        halves = block.split(block.value(operand, 32), 2)
        return Pack([block.pure(op, block.pure(float_to_float("f32", "f16"), half)) for half in halves])
    if target != "f16x2" or source not in _FP8:
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    _only(instruction, flags, "rn")
    codes = block.split(block.value(operand, 16), 2)
    return Pack([block.pure(PureOp(f"cvt_f16_{source}", ("u8",), "u16"), code) for code in codes])


def _to_fp8(instruction: Instruction, flags: list[str], target: str) -> PureOp:
    _only(instruction, flags, "rn", "satfinite", "relu")
    if "satfinite" not in flags:
        raise instruction.refuse("a conversion to FP8 needs .satfinite")
    return PureOp(f"cvt_{target}_f32{'_relu' if 'relu' in flags else ''}", ("f32",), "u8")


_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def _float_to_integer(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    _only(instruction, flags, "rni", "rzi", "rmi", "rpi", "sat", "ftz")
    modes = [flag for flag in flags if flag in ("rni", "rzi", "rmi", "rpi")]
    if len(modes) != 1 or source not in _FLOAT_BITS:
        raise instruction.refuse("a float-to-integer conversion needs one integer rounding")
    ftz = "ftz" in flags
    if ftz and source != "f32":
        raise instruction.refuse("a float-to-integer conversion has .ftz from f32 only")
    bits = _INTEGER_BITS[target]
    value = block.value(instruction.operands[1], _FLOAT_BITS[source])
    if source in ("f16", "bf16"):
        value, source = block.pure(float_to_float("f32", source), value), "f32"
    op = PureOp(f"cvt_{modes[0]}{'_ftz' if ftz else ''}_{target}_{source}", (source,), f"u{bits}")
    value = block.pure(op, value)
    register = _register_bits(block, instruction)
    return value if register == bits else block.pure(extend(target, register, bits), value)


def _integer_to_float(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    _only(instruction, flags, "rn")
    operand = instruction.operands[1]
    width = _INTEGER_BITS[source]
    value = block.value(operand, _value_bits(block, operand, width))
    if value.bits != width:
        value = block.resize(value, width)
    if target not in ("f32", "f64") and (target not in ("f16", "bf16") or width > 32):
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    stored = target if target in ("f32", "f64") else "u16"
    return block.pure(PureOp(f"cvt_{target}_{source}", (source,), stored), value)


def _float_to_float(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    if (target, source) == ("tf32", "f32"):
        _only(instruction, flags, "rna", "rn")
        name = "cvt_rn_tf32" if "rn" in flags else "cvt_rna_tf32"
        return block.pure(of_one_type(name, "f32", 1), block.value(instruction.operands[1], 32))
    if target not in _FLOAT_BITS or source not in _FLOAT_BITS:
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    value = block.value(instruction.operands[1], _FLOAT_BITS[source])
    if source == "f32" and target in ("f16", "bf16"):
        return block.pure(_narrow_from_flags(instruction, flags, target), value)
    integral = [flag for flag in flags if flag in ("rni", "rzi", "rmi", "rpi")]
    if target == source == "f32" and integral:
        _only(instruction, flags, *integral, "ftz", "sat")
        if set(flags) - set(integral):
            raise instruction.refuse("cvt to an integral float with .ftz or .sat is not implemented")
        return block.pure(of_one_type(f"cvt_{integral[0]}_f32", "f32", 1), value)
    if target == source == "f32" and set(flags) in ({"sat"}, {"sat", "ftz"}):
        # .ftz changes nothing that .sat has not made a zero or a normal number but subnormals, which it flushes.
        return block.pure(of_one_type("cvt_sat_ftz_f32" if "ftz" in flags else "cvt_sat_f32", "f32", 1), value)
    _only(instruction, flags, "rn")
    if (target, source) != ("f32", "f64") and (target not in ("f32", "f64") or source == "f64"):
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    return block.pure(float_to_float(target, source), value)
