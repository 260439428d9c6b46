"""cvt between integer and floating-point types."""

import itertools
from collections.abc import Iterator

from cute_kernels.emulator.isa.instructions.floats import float_to_float
from cute_kernels.emulator.isa.ptx.operand_syntax import HELD_IN, is_type
from cute_kernels.emulator.isa.ptx.program import Instruction, Register
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import CANONICAL, Pack, PureOp, Value, of_one_type

_INTEGER_BITS = {f"{k}{b}": b for k in "us" for b in (8, 16, 32, 64)}
_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_TO_INTEGRAL, _ROUNDING, _INTO_HALVES = ("rni", "rzi", "rmi", "rpi"), ("rn", "rz", "rm", "rp"), ("rn", "rz", "rs")


def _operands(parts: tuple[str, ...]) -> str:
    types = [part for part in parts if is_type(part)]
    newer = any(part in HELD_IN or part in ("bf16", "bf16x2") for part in types)  # without wider registers
    wider = "" if newer else "+"
    random = ", rbits:b32" if "rs" in parts else ""
    if len(types) == 2 and types[0].endswith("x4"):
        return f"d:S, {{a}}4:T{random}"
    two = len(types) == 2 and types[0].endswith("x2") and types[1] == "f32"
    return f"d:S{wider}, a:T{wider}" + (f", b:T{wider}" if two else "") + random


_INTEGRAL, _WHOLE = "|".join(_TO_INTEGRAL), "|".join(_INTEGER_BITS)
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
    "rn satfinite relu? e4m3x2|e5m2x2|e2m1x2 f16x2", f"rn satfinite relu? {_PACKED} bf16x2",
    f"rn relu? f16x2|bf16x2 {_PACKED}", "rn satfinite relu? e2m3x2|e3m2x2 f16x2",
    "rs satfinite? relu? f16x2|bf16x2 f32", "rs satfinite relu? e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4 f32",
    "rz|rp satfinite? ue8m0x2 f32|bf16x2", "rn bf16x2 ue8m0x2",
)  # fmt: skip


def _between_integers() -> Iterator[str]:
    """.sat exists where the target does not hold all numbers of the source."""
    for target, source in itertools.product(_INTEGER_BITS, repeat=2):
        more = _INTEGER_BITS[target] - (target[0] == "s") - _INTEGER_BITS[source] + (source[0] == "s")
        yield f"{'sat? ' * (more < 0 or target[0] > source[0])}{target} {source}"


@family("cvt", operands=_operands, qualifiers="; ".join((*_FORMS, *_between_integers())))
def _cvt(block: BlockBuilder, instruction: Instruction) -> None:
    """cvt: integers, f16, bf16, f32, f64, packed f16x2/bf16x2/e4m3x2/e5m2x2/e2m3x2/e3m2x2/e2m1x2/ue8m0x2, tf32; .rs."""
    *flags, target, source = instruction.parts[1:]
    narrow = _convert_narrow(block, instruction, flags, target, source)
    if narrow is not None:
        result = narrow
    elif target in _INTEGER_BITS and source in _INTEGER_BITS:
        result = _integer_to_integer(block, instruction, flags, target, source)
    elif target in ("f16x2", "bf16x2") and source == "f32":
        result = _pair(block, instruction, flags, target)
    elif target in _INTEGER_BITS and source in _FLOAT_BITS:
        result = _float_to_integer(block, instruction, flags, target, source)
    elif target in _FLOAT_BITS and source in _INTEGER_BITS:
        result = _integer_to_float(block, instruction, flags, target, source)
    elif (target, source) == ("tf32", "f32"):
        mode = _one_of(flags, ("rn", "rz", "rna"))
        op = of_one_type(f"cvt_{mode}_tf32{_modifiers(flags)}", "f32", 1)
        result = block.pure(op, block.value(instruction.operands[1], 32))
    else:
        result = _float_to_float(block, instruction, flags, target, source)
    block.define(instruction.operands[0], result)


def _modifiers(flags: list[str]) -> str:
    return "".join(f"_{flag}" for flag in ("satfinite", "relu") if flag in flags)


def _one_of(flags: list[str], modes: tuple[str, ...]) -> str:
    return next((flag for flag in flags if flag in modes), "")


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


def _pair(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half, for which .rs takes the upper half of the random bits."""
    mode = _one_of(flags, _INTO_HALVES)
    half = target[:-2]
    name = f"cvt_{half}_f32_{mode}{_modifiers(flags)}"
    high, low = (block.value(operand, 32) for operand in instruction.operands[1:3])
    if mode != "rs":
        op = PureOp(name, ("f32",), "u16")
        return Pack([block.pure(op, low), block.pure(op, high)])
    op, (later, earlier) = PureOp(name, ("f32", "u16"), "u16"), block.split(block.value(instruction.operands[3], 32), 2)
    return Pack([block.pure(op, low, later), block.pure(op, high, earlier)])


def _float_to_integer(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    """To the nearest number of the target; NaN as the PTX ISA says. So .sat changes nothing."""
    mode = _one_of(flags, _TO_INTEGRAL)
    bits = _INTEGER_BITS[target]
    value = block.value(instruction.operands[1], _FLOAT_BITS[source])
    if source in ("f16", "bf16"):
        value, source = block.pure(float_to_float("f32", source), value), "f32"
    op = PureOp(f"cvt_{mode}{'_ftz' if 'ftz' in flags else ''}_{target}_{source}", (source,), f"u{bits}")
    value = block.pure(op, value)
    register = _register_bits(block, instruction)
    return value if register == bits else block.pure(extend(target, register, bits), value)


def _integer_to_float(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    width = _INTEGER_BITS[source]
    mode = _one_of(flags, _ROUNDING)
    operand = instruction.operands[1]
    value = block.value(operand, _value_bits(block, operand, width))
    if value.bits != width:
        value = block.resize(value, width)
    stored = target if target in ("f32", "f64") else "u16"
    if mode == "rn" and "sat" not in flags and (width < 64 or stored == target):
        return block.pure(PureOp(f"cvt_{target}_{source}", (source,), stored), value)
    # 64 bits are rounded to odd on the way to FP64, or as they are asked to, where FP64 is the target.
    way = "" if width < 64 or (mode == "rn" and target == "f64") else f"_{mode if target == 'f64' else 'odd'}"
    wide = block.pure(PureOp(f"cvt_f64_{source}{way}", (source,), "f64"), value)
    return _from_wide(block, flags, mode, target, wide, "f64")


def _from_wide(block: BlockBuilder, flags: list[str], mode: str, target: str, value: Value, wide: str) -> Value:
    """f32 or f64 to any float; 0 and 1, between which .sat limits a number, are numbers of all of them."""
    if "sat" in flags:
        value = block.pure(of_one_type(f"cvt_sat_{wide}", wide, 1), value)
    if wide == "f32" and target in ("f16", "bf16") and mode in ("rn", "rz"):
        return block.pure(PureOp(f"cvt_{target}_f32_{mode}{_modifiers(flags)}", ("f32",), "u16"), value)
    if target == wide:
        return value
    if wide == "f32":
        value = block.pure(float_to_float("f64", "f32"), value)
    if target == "f64":
        return value
    if target == "f32":
        op = float_to_float("f32", "f64") if mode == "rn" else PureOp(f"cvt_f32_f64_{mode}", ("f64",), "f32")
        value = block.pure(op, value)
        return block.pure(of_one_type("flush_f32", "f32", 1), value) if "ftz" in flags else value
    return block.pure(PureOp(f"cvt_{target}_f64_{mode}", ("f64",), "u16"), value)


def _float_to_float(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    mode = _one_of(flags, (*_TO_INTEGRAL, *_ROUNDING)) or "rn"
    value = block.resize(block.value(instruction.operands[1], _FLOAT_BITS[source]), _FLOAT_BITS[source])
    if target == source and not flags:
        return value
    wide = source
    if source in ("f16", "bf16"):
        wide = "f64" if target == "f64" else "f32"
        value = block.pure(float_to_float(wide, source), value)
    if "ftz" in flags and wide == "f32":
        value = block.pure(of_one_type("flush_f32", "f32", 1), value)
    if mode in _TO_INTEGRAL:
        value, mode = block.pure(of_one_type(f"cvt_{mode}_{wide}", wide, 1), value), "rn"
    return _from_wide(block, flags, mode, target, value, wide)


# --- elements of four, six and eight bits, and scales: e2m1x2, e2m3x2, e3m2x2, e4m3x2, e5m2x2, ue8m0x2. Two e2m1 are
# one byte; of e2m3, e3m2 and ue8m0 each lies in a byte of its own. What the PTX ISA leaves open follows the functions
# that NVIDIA's cuda_fp8.hpp (CUDA 13.0) has for hosts: scales ignore the sign ----------------------------------------

_FORMATS = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")
_SCALES = "ue8m0x2"


def _convert_narrow(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value | None:
    """The result of a cvt of one of these types; None: it has none of them."""
    fours = target.endswith("x4")
    if not fours and not {target, source} & {*_FORMATS, _SCALES}:
        return None
    if target == _SCALES:
        return _to_scales(block, instruction, flags, source)
    if source == _SCALES:
        codes = block.split(block.value(instruction.operands[1], 16), 2)
        return Pack([block.pure(PureOp("cvt_bf16_ue8m0", ("u8",), "u16"), code) for code in codes])
    if fours:
        return _by_random(block, instruction, flags, f"{target[:-1]}2")
    if target in _FORMATS:
        return _to_codes(block, instruction, flags, target, source)
    return _to_halves(block, instruction, flags, target, source)


def _joined(block: BlockBuilder, target: str, low: Value, high: Value) -> Value:
    return block.pure(of_one_type("join_nibbles", "u8", 2), low, high) if target == "e2m1x2" else Pack([low, high])


def _to_codes(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """To nearest even, what is too large to the largest number; of two operands a goes to the upper half."""
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    else:
        halves = block.split(block.value(instruction.operands[1], 32), 2)
        low, high = (block.pure(float_to_float("f32", source[:-2]), half) for half in halves)
    op = PureOp(f"cvt_{target}_f32{'_relu' if 'relu' in flags else ''}", ("f32",), "u8")
    return _joined(block, target, block.pure(op, low), block.pure(op, high))


def _by_random(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """cvt.rs of {a, b, e, f}, the last one lowest: two share 16 random bits, one of them from the lowest bit on.

    The PTX ISA says which bits a pair has; that the first of the two has them in reverse was measured on B200.
    """
    bytes_ = block.split(block.value(instruction.operands[2], 32), 4)
    order = ((0, 2), (1, 3)) if target == "e2m1x2" else ((0, 1), (2, 3))
    of_pair = [Pack([bytes_[low], bytes_[high]]) for low, high in order]
    codes = []
    for place, operand in enumerate(reversed(instruction.operands[1].items)):
        op = PureOp(f"cvt_{target}_f32_rs{'_relu' if 'relu' in flags else ''}_{place % 2}", ("f32", "u16"), "u8")
        codes.append(block.pure(op, block.value(operand, 32), of_pair[place // 2]))
    if target == "e2m1x2":
        return Pack([_joined(block, target, *codes[:2]), _joined(block, target, *codes[2:])])
    return Pack(codes)


def _to_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """Exactly: FP16 and BF16 have the numbers of all of these formats."""
    four = source == "e2m1x2"
    value = block.value(instruction.operands[1], 8 if four else 16)
    places = ((value, 0), (value, 4)) if four else ((code, 0) for code in block.split(value, 2))
    halves = [block.pure(PureOp(f"cvt_f16_{source}_{shift}", ("u8",), "u16"), code) for code, shift in places]
    if "relu" in flags or target == "bf16x2":
        op = PureOp(f"cvt_{target[:-2]}_f32_rn{'_relu' if 'relu' in flags else ''}", ("f32",), "u16")
        halves = [block.pure(op, block.pure(float_to_float("f32", "f16"), half)) for half in halves]
    return Pack(halves)


# --- scales: powers of two from 2^-127 to 2^127, and NaN ------------------------------------------------------------


def _to_scales(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    mode = "rp" if "rp" in flags else "rz"
    op = PureOp(f"cvt_ue8m0_f32_{mode}{'_satfinite' if 'satfinite' in flags else ''}", ("f32",), "u8")
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
        return Pack([block.pure(op, low), block.pure(op, high)])
    widen = float_to_float("f32", "bf16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    return Pack([block.pure(op, block.pure(widen, half)) for half in halves])
