"""Every pure operation of the core's table against its definition in NumPy, bit for bit, on lanes and on one value.

The definitions (`PureOp`) are those that lowering makes of the instructions of test_instructions, and those that the
functions of the instruction files make for the rest of the table.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from cute_kernels.emulator import instructions_bits as some_bits
from cute_kernels.emulator import instructions_carry as carry
from cute_kernels.emulator import instructions_compare as compare
from cute_kernels.emulator import instructions_convert as convert
from cute_kernels.emulator import instructions_convert_narrow as narrow
from cute_kernels.emulator import instructions_float as floats
from cute_kernels.emulator import instructions_integer as integers
from cute_kernels.emulator import translate, values
from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.bytecode import operations, pure_operation
from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.instructions_move import map_address
from cute_kernels.emulator.values import DTYPES, PureOp
from tests.emulator.instruction_cases import EDGES
from tests.emulator.ptx import module
from tests.emulator.test_conversions import CONVERSION
from tests.emulator.test_instructions import FLOAT, INTEGER

FULL, LANES, ROUNDS = 0xFFFFFFFF, 32, 24
#: Operations of the core that are no functions of values: control flow, memory, units, moves.
OTHER = ("move_", "spread_", "merge_", "lane_", "put_", "get_", "branch", "guard")


def lowered() -> Iterator[PureOp]:
    """What the instructions of test_instructions become."""
    names, lines, number = {1: "%p", 16: "%h", 32: "%r", 64: "%d"}, [], 5
    for case in (*INTEGER.values(), *FLOAT.values(), *CONVERSION.values()):
        registers = []
        for bits in (*case.sources, case.out):
            number += 1
            registers.append(f"{names[bits]}{number % 40}")
        lines.append(case.text.format(*registers, d=registers[-1]))
    found: dict[str, PureOp] = {}
    pure = BlockBuilder.pure

    def recorded(self: BlockBuilder, op: PureOp, *args: values.Value) -> values.Value:
        found[op.name] = op
        return pure(self, op, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockBuilder, "pure", recorded)
        lowering = translate.lower(module("\n".join([*lines, "ret;"])), None, (32, 1, 1), check=False)
        for block in lowering.flow.blocks:
            lowering.block(block)
    yield from found.values()


KINDS = [f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)]
AMOUNTS = (0, 1, 5, 15, 16, 31, 32, 33, 63, 64, 200)
MODES = ("rni", "rzi", "rmi", "rpi")


def made() -> Iterator[PureOp]:
    """What the functions of the instruction files make, for every type that they take."""
    yield from made_of_integers()
    yield from made_of_bits()
    yield from made_of_floats()
    yield from made_of_conversions()


def made_of_integers() -> Iterator[PureOp]:
    for kind in KINDS[1:4] + KINDS[5:]:
        yield from (integers.binary(name, kind) for name in ("add", "sub", "min", "max", "mul.lo", "mul.hi"))
        yield from (integers.binary(name, kind) for name in ("div", "rem"))
        yield from (compare.integer_compare(relation, kind) for relation in compare._COMPARE)
        yield from (integers.shift_by("shr", kind, amount) for amount in AMOUNTS)
        yield integers._difference(kind)
    for bits in (16, 32, 64):
        yield from (compare.integer_compare(relation, f"b{bits}") for relation in ("eq", "ne"))
    for bits, subtract in itertools.product((32, 64), (False, True)):
        yield from carry._sum(bits, subtract)
    for name, kind in itertools.product(("min", "max"), ("s16", "s32")):
        yield integers._packed(name, kind, True)
    for a, b in itertools.product(("s32", "u32"), repeat=2):
        yield integers._dot_op("dp4a", 8, 0, a, b)
        yield from (integers._dot_op("dp2a", 16, first, a, b) for first in (0, 2))


def made_of_bits() -> Iterator[PureOp]:
    for bits in (16, 32, 64):
        yield from (integers.logic(name, f"b{bits}") for name in ("and", "or", "xor"))
        for name, amount in itertools.product(("shl", "shr"), AMOUNTS):
            yield integers.shift_by(name, f"b{bits}", amount)
        yield from (integers._shift(name, f"b{bits}") for name in ("shl", "shr"))
    yield from (integers.logic(name, "pred") for name in ("and", "or", "xor"))
    yield values.NOT_PREDICATE
    yield from (integers._lop3_op(table) for table in range(0, 256, 5))
    yield from (values.select_op(bits) for bits in (1, 8, 16, 32, 64))
    for bits, wanted in itertools.product((8, 16, 32, 64), repeat=2):
        yield values.resize_op(bits, wanted)
        yield from (convert.extend(kind, wanted, bits) for kind in KINDS)
        if wanted < bits:
            yield from (values.slice_op(bits, wanted, shift) for shift in range(0, bits, wanted))
    yield from (values.pack_op(bits) for bits in (8, 16, 32))
    yield from (convert.saturate(source, target) for source, target in itertools.product(KINDS, repeat=2))
    yield from (some_bits._FNS, *some_bits._BMSK.values(), narrow.NIBBLES)


def made_of_floats() -> Iterator[PureOp]:
    for name in floats._F32:
        saturates = name.split(".")[0] in ("add", "sub", "mul", "fma")
        for ftz, saturate in itertools.product((False, True), (False, True) if saturates else (False,)):
            yield floats.f32_op(name, ftz, saturate)
    orders = [f"{name}{nan}{xored}" for name in ("min", "max") for nan in ("", ".NaN") for xored in ("", ".xorsign")]
    for type_ in ("f16", "bf16"):
        for name in ("add", "sub", "mul", "fma", "fma.relu", *orders, "abs", "neg", "ex2", "tanh"):
            yield floats.half_op(name, type_)
    yield from (floats.f64_op(name) for name in ("add", "sub", "mul", "div", "fma", "rcp", "sqrt"))
    yield from (floats.f64_op(name) for name in ("min", "max", "abs", "neg"))
    for name, mode in itertools.product(("add", "sub", "mul", "fma"), ("rz", "rm", "rp")):
        yield floats.f64_op(f"{name}.{mode}")
    for relation, type_ in itertools.product(compare._RELATIONS, ("f16", "bf16", "f32", "f64")):
        yield compare.float_compare_op(relation, type_)


def made_of_conversions() -> Iterator[PureOp]:
    for (target, mode), satfinite, relu in itertools.product(
        (("f16", "rn"), ("bf16", "rn"), ("bf16", "rz")), (False, True), (False, True)
    ):
        yield convert._narrow_f32(target, mode, satfinite, relu)
    for mode, target in itertools.product(MODES, KINDS):
        yield from (convert.float_to_integer(mode, ftz, target, "f32") for ftz in (False, True))
        yield convert.float_to_integer(mode, False, target, "f64")
    yield from (convert.integral_float(mode) for mode in MODES)
    yield convert._ROUND_TF32
    yield from (convert.saturated_float(ftz) for ftz in (False, True))
    yield from (convert.integer_to_float(target, kind) for target, kind in itertools.product(("f32", "f64"), KINDS))
    for target, kind in itertools.product(("f16", "bf16"), KINDS):
        if not kind.endswith("64"):
            yield convert.integer_to_float(target, kind)
    for target, source in itertools.product(("f32", "f64"), ("f16", "bf16", "f32", "f64")):
        if target != source:
            yield floats.float_to_float(target, source)
    for relu in (False, True):
        yield from (convert.to_fp8(target, relu) for target in convert._FP8)
        yield from (narrow.to_code(target, relu) for target in narrow.FORMATS)
        yield from (narrow.from_code(source, relu, 0) for source in narrow.FORMATS)
        yield narrow.from_code("e2m1x2", relu, 4)
    yield from (convert.from_fp8(source) for source in convert._FP8)
    yield from (narrow.to_scale(up, finite) for up, finite in itertools.product((False, True), repeat=2))
    yield narrow.FROM_SCALE


DEFINITIONS = {op.name: op for op in (*made(), *lowered())}
DTYPE = {**DTYPES, "pred": np.bool_}


def test_every_operation_of_the_table_is_compared() -> None:
    table = {name for name, lanes in operations() if not lanes and not name.startswith(OTHER)}
    assert table - {pure_operation(name)[0] for name in DEFINITIONS} == {"map_address"}
    assert all((name, True) in operations() for name in table)


def test_every_operation_that_lowering_makes_is_in_the_table() -> None:
    assert [name for name in DEFINITIONS if pure_operation(name) is None] == []


def drawn(rng: np.random.Generator, type_: str) -> np.ndarray:
    """32 values: edges of the format, values near each other, and any patterns."""
    if type_ == "pred":
        return rng.random(LANES) < 0.5
    dtype = np.dtype(DTYPES[type_])
    bits = 8 * dtype.itemsize
    raw = f"u{dtype.itemsize}"
    raw_type = np.dtype(raw).type
    patterns = np.frombuffer(rng.bytes(LANES * dtype.itemsize), raw)
    edges = list(EDGES["i"](bits)) + (EDGES["s"](bits) if bits > 8 else [])
    if bits > 8:
        edges += EDGES["f"](bits)
    chosen = np.array([edge & ((1 << bits) - 1) for edge in edges], raw)[rng.integers(len(edges), size=LANES)]
    if rng.random() < 0.5:  # floats of about one size, positions and lengths: results that are not all zero or NaN
        near = (rng.integers(-64, 64, LANES) / rng.choice([1, 8, 128, 1024])).astype(np.float32)
        half = near.astype(np.float16).view(np.uint16) if rng.random() < 0.5 else near.view(np.uint32) >> 16
        patterns = {8: patterns, 16: half, 32: near.view(np.uint32), 64: near.astype(np.float64).view(np.uint64)}[bits]
        patterns = patterns + rng.integers(-2, 3, LANES) if rng.random() < 0.5 else rng.integers(0, 80, LANES)
    mixed = np.where(rng.random(LANES) < 0.4, chosen, patterns.astype(raw)).astype(raw)
    if bits > 8 and rng.random() < 0.3:  # half-way between two numbers of a narrower format
        dropped = int(rng.choice([size for size in (3, 8, 13, 16, 29, 45, 48) if size < bits]))
        ties = mixed >> raw_type(dropped) << raw_type(dropped) | raw_type(1 << dropped - 1)
        mixed = np.where(rng.random(LANES) < 0.5, ties, mixed)
    return mixed.view(dtype)


class Core:
    """Calls an operation as the interpreter does, with a state of five rows."""

    def __init__(self, name: str) -> None:
        base, self.constant = pure_operation(name)
        types = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 3)
        self.forms = {lanes: types(operations()[base, lanes]) for lanes in (False, True)}
        raw = np.zeros(5 * 256 + 64, np.uint8)
        self.state = raw[-raw.ctypes.data % 64 :][: 5 * 256]

    def __call__(self, arguments: list[np.ndarray], lanes: bool, result: np.dtype) -> np.ndarray:
        """Of each lane or of one element; a predicate is bool."""
        self.state[:256] = 0xA5
        for row, argument in enumerate(arguments, 1):
            place = self.state[256 * row :]
            if argument.dtype == np.bool_ or not lanes:
                word = mask_of(argument) if lanes else int(argument.view(f"u{argument.dtype.itemsize}")[0])
                place[:8].view(np.uint64)[0] = word
            else:
                place[: argument.nbytes] = argument.view(np.uint8)
        rows = [256 * row for row in range(1, 4)]
        last = 4 * 256 if len(arguments) == 4 else self.constant
        instruction = STRUCTURES["Instruction"](None, 0, *rows, last)
        following = self.forms[lanes](ctypes.addressof(instruction), self.state.ctypes.data, None)
        assert following == ctypes.addressof(instruction) + ctypes.sizeof(instruction)
        if result == np.bool_:
            word = int(self.state[:8].view(np.uint64)[0])
            assert word <= (FULL if lanes else 1)
            return np.array([word >> lane & 1 for lane in range(LANES if lanes else 1)], bool)
        if lanes:
            return self.state[: LANES * result.itemsize].view(f"u{result.itemsize}").copy()
        word = self.state[:8].view(np.uint64)
        assert word[0] < 1 << 8 * result.itemsize, "extended with zeros"
        return word.astype(f"u{result.itemsize}")


def mask_of(lanes: np.ndarray) -> int:
    return sum(1 << lane for lane in range(len(lanes)) if lanes[lane])


def expected(op: PureOp, arguments: list[np.ndarray]) -> np.ndarray:
    if op.vector is None:
        mask = eval(op.masks.format(*(mask_of(argument) for argument in arguments)))
        return np.array([mask >> lane & 1 for lane in range(LANES)], bool)
    result = np.broadcast_to(op.vector(*arguments), (LANES,))
    return np.array(result, bool) if op.output == "pred" else np.ascontiguousarray(result).view(f"u{result.itemsize}")


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_operation(name: str) -> None:
    op, core = DEFINITIONS[name], Core(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for _ in range(ROUNDS):
        arguments = [drawn(rng, type_) for type_ in op.inputs]
        want = expected(op, arguments)
        got = core(arguments, True, np.dtype(DTYPE[op.output]))
        for lane in np.flatnonzero(got != want):
            given = [argument[lane : lane + 1].tobytes()[::-1].hex() for argument in arguments]
            raise AssertionError(f"{name} of {given} is {got[lane]:#x}, not {want[lane]:#x}")
        for lane in range(0, LANES, 3):
            one = core([argument[lane : lane + 1] for argument in arguments], False, np.dtype(DTYPE[op.output]))
            assert one[0] == want[lane], f"lane {lane}"


def test_map_address() -> None:
    core, rng = Core("map_address"), np.random.default_rng(0)
    for _ in range(ROUNDS):
        arguments = [drawn(rng, "u32"), rng.integers(0, 16, LANES).astype(np.uint32)]
        want = map_address(None, FULL, *arguments)
        assert core(arguments, True, np.dtype(np.uint32)).tolist() == want.tolist()
        one = core([argument[:1] for argument in arguments], False, np.dtype(np.uint32))
        assert one.tolist() == want[:1].tolist()


def test_operations_are_found_by_name_and_constant() -> None:
    assert pure_operation("shl_b32_by5") == ("shl_b32_by", 5)
    assert pure_operation("lop3_0xca") == ("lop3", 0xCA)
    assert pure_operation("slice64_16_48") == ("slice64_16", 48)
    assert pure_operation("extend_s8_32_16") == ("extend_s_32_16", 8)
    assert pure_operation("saturate_s32_u8") == ("saturate_s_u", 32 | 8 << 8)
    assert pure_operation("cvt_f16_e2m1x2_relu_4") == ("cvt_f16_e2m1x2_relu", 4)
    assert pure_operation("no_operation") is None
