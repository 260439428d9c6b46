"""Every pure operation of the core against its definition in NumPy, bit for bit, on lanes and on one value.

The definitions are in `tests.emulator.definitions`: arithmetic that is not the core's, by the names of the operations.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.pure_operations import apply, evaluate, operations, pure_operation
from cute_kernels.emulator.machine.bytecode import lowering as translate
from cute_kernels.emulator.machine.graph import values
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.values import PureOp
from cute_kernels.testing.ptx import module
from tests.emulator.definitions.bits import bits
from tests.emulator.definitions.conversions import INTEGERS as KINDS
from tests.emulator.definitions.conversions import MODES, conversions
from tests.emulator.definitions.definition import KINDS as DTYPES
from tests.emulator.definitions.definition import Definition
from tests.emulator.definitions.floats import RELATIONS, floats
from tests.emulator.definitions.integers import integers
from tests.emulator.instruction_cases import edges
from tests.emulator.isa.instructions import test_instruction_forms as forms
from tests.emulator.isa.instructions.test_conversions import CONVERSION
from tests.emulator.isa.instructions.test_instructions import FLOAT, INTEGER

FULL, LANES, ROUNDS = 0xFFFFFFFF, 32, 24
DEFINITIONS: dict[str, Definition] = {**integers(), **bits(), **floats(), **conversions()}
#: Tables of lop3 that are compared.
LOGIC = {f"lop3_{table:#04x}" for table in range(0, 256, 5)}
NAMES = sorted(name for name in DEFINITIONS if not name.startswith("lop3") or name in LOGIC)
#: Operations of the core that are no functions of values: control flow, memory, units, moves.
OTHER = ("move_", "spread_", "merge_", "lane_", "put_", "get_", "branch", "guard")


def cases() -> Iterator[str]:
    """The instructions of test_instructions, test_conversions and test_instruction_forms."""
    names, number = {1: "%p", 16: "%h", 32: "%r", 64: "%d"}, 5
    every = (INTEGER, FLOAT, CONVERSION, forms.INTEGER, forms.FLOAT)
    for case in itertools.chain.from_iterable(cases.values() for cases in every):
        registers = []
        for width in (*case.sources, case.out):
            number += 1
            registers.append(f"{names[width]}{number % 40}")
        yield case.text.format(*registers, d=registers[-1])


def of_floats() -> Iterator[str]:
    """Forms of floating-point arithmetic by their qualifiers, and comparisons by their relations."""
    registers = {"f32": "%r1", "f64": "%d1", "f16": "%h1", "bf16": "%h1"}
    for name, mode, ftz, sat in itertools.product(
        ("add", "sub", "mul", "fma"), ("rn", "rz", "rm", "rp"), ("", ".ftz"), ("", ".sat")
    ):
        sources = ", ".join(["%r1"] * (4 if name == "fma" else 3))
        yield f"{name}.{mode}{ftz}{sat}.f32 {sources};"
        yield f"{name}.{mode}.f64 {sources.replace('r', 'd')};"
    for name, nan, xored in itertools.product(("min", "max"), ("", ".NaN"), ("", ".xorsign.abs")):
        yield from (f"{name}{ftz}{nan}{xored}.f32 %r1, %r1, %r1;" for ftz in ("", ".ftz"))
        yield from (f"{name}{nan}{xored}.{kind} %h1, %h1, %h1;" for kind in ("f16", "bf16"))
    approximate = ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt")
    for name, ftz in itertools.product(approximate, ("", ".ftz")):
        yield f"{name}.approx{ftz if name != 'tanh' else ''}.f32 %r1, %r1;"
    yield from (f"{name}{ftz}.f32 %r1, %r1;" for name in ("abs", "neg") for ftz in ("", ".ftz"))
    yield from (f"div.rn{ftz}.f32 %r1, %r1, %r1;" for ftz in ("", ".ftz"))
    yield from (f"{name}.f64 %d1, %d1;" for name in ("abs", "neg", "sqrt.rn", "rcp.rn"))
    yield from (f"{name}.f64 %d1, %d1, %d1;" for name in ("min", "max", "div.rn"))
    yield from (f"{name}.approx.{kind} %h1, %h1;" for name, kind in itertools.product(("tanh",), ("f16", "bf16")))
    yield from ("ex2.approx.f16 %h1, %h1;", "ex2.approx.ftz.bf16 %h1, %h1;", "add.f32.f16 %r1, %h1, %r1;")
    yield from (f"copysign.{kind} {r}, {r}, {r};" for kind, r in (("f32", "%r1"), ("f64", "%d1")))
    for relation, (kind, register) in itertools.product(RELATIONS, registers.items()):
        yield f"setp.{relation}.{kind} %p1, {register}, {register};"


def of_conversions() -> Iterator[str]:
    registers = {8: "%q1", 16: "%h1", 32: "%r1", 64: "%d1"}
    sources = {"f32": "%r1", "f64": "%d1", "f16": "%h1", "bf16": "%h1"}
    for kind in KINDS:
        register = registers[int(kind[1:])]
        yield from (f"cvt.{mode}.{kind}.{source} {register}, {r};" for mode in MODES for source, r in sources.items())
        yield from (f"cvt.{mode}.ftz.{kind}.f32 {register}, %r1;" for mode in MODES)
        for target, r in sources.items():
            if len(target) < 4 and not (kind.endswith("64") and target == "f16"):
                yield f"cvt.rn.{target}.{kind} {r}, {register};"
        if not kind.endswith("64"):
            yield f"cvt.rn.bf16.{kind} %h1, {register};"
    yield from (f"cvt.{mode}.f32.f32 %r1, %r1;" for mode in MODES)
    yield from (f"cvt.{flags}.f32.f32 %r1, %r1;" for flags in ("sat", "ftz.sat"))
    yield from (f"cvt.{mode}.{kind}.{kind} {r}, {r};" for mode in MODES for kind, r in sources.items())
    for mode, finite, relu in itertools.product(("rn", "rz", "rna"), ("", ".satfinite"), ("", ".relu")):
        if (mode, relu) != ("rna", ".relu"):
            yield f"cvt.{mode}{finite}{relu}.tf32.f32 %r1, %r1;"
    yield from ("cvt.f64.f16 %d1, %h1;", "cvt.f64.bf16 %d1, %h1;")
    yield from ("cvt.rn.f16.bf16 %h1, %h1;", "cvt.bf16.f16 %h1, %h1;")
    for kind, mode, relu, finite in itertools.product(("f16", "bf16"), ("rn", "rz"), ("", ".relu"), ("", ".satfinite")):
        yield f"cvt.{mode}{relu}{finite}.{kind}.f32 %h1, %r1;"
        yield f"cvt.rs{relu}{finite}.{kind}x2.f32 %r1, %r1, %r1, %r1;"
    for mode, sat in itertools.product(("rn", "rz", "rm", "rp"), ("", ".sat")):
        yield f"cvt.{mode}{sat}.f16.f64 %h1, %d1; cvt.{mode}{sat}.f16.f32 %h1, %r1;"
        yield from (f"cvt.{mode}{ftz}{sat}.f32.f64 %r1, %d1;" for ftz in ("", ".ftz"))
        for wide, kind in itertools.product(("s64", "u64"), ("f32", "f64", "f16")):
            yield f"cvt.{mode}{sat}.{kind}.{wide} {sources[kind]}, %d1;"
        yield f"cvt.{mode}.bf16.f64 %h1, %d1;"
    for relu in ("", ".relu"):
        for kind in ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2"):
            yield f"cvt.rn.satfinite{relu}.{kind}.f32 %h1, %r1, %r1; cvt.rn.satfinite{relu}.{kind}.bf16x2 %h1, %r1;"
            yield f"cvt.rn{relu}.f16x2.{kind} %r1, %h1; cvt.rn{relu}.bf16x2.{kind} %r1, %h1;"
            yield f"cvt.rs.satfinite{relu}.{kind[:-1]}4.f32 %r1, {{%r1, %r2, %r3, %r4}}, %r5;"
        yield f"cvt.rs.satfinite{relu}.e2m1x4.f32 %h1, {{%r1, %r2, %r3, %r4}}, %r5;"
        yield f"cvt.rn.satfinite{relu}.e2m1x2.f32 %q1, %r1, %r1; cvt.rn{relu}.f16x2.e2m1x2 %r1, %q1;"
    for mode, finite in itertools.product(("rz", "rp"), ("", ".satfinite")):
        yield f"cvt.{mode}{finite}.ue8m0x2.f32 %h1, %r1, %r1;"
    yield "cvt.rn.bf16x2.ue8m0x2 %r1, %h1;"


def lowered(lines: list[str]) -> dict[str, PureOp]:
    """The operations that instructions become."""
    found: dict[str, PureOp] = {}
    pure = BlockBuilder.pure

    def recorded(self: BlockBuilder, op: PureOp, *args: values.Value) -> values.Value:
        found[op.name] = op
        return pure(self, op, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockBuilder, "pure", recorded)
        text = module("\n".join([".reg .b8 %q<2>;", *lines, "ret;"]))
        lowering = translate.lower(text, None, (32, 1, 1), check=False)
        for block in lowering.flow.blocks:
            lowering.block(block)
    return found


@pytest.fixture(scope="module")
def made() -> dict[str, PureOp]:
    """What lowering makes of all of these."""
    return lowered([*cases(), *of_floats(), *of_conversions()])


def test_every_operation_of_the_table_is_compared() -> None:
    table = {name for name, lanes in operations() if not lanes and not name.startswith(OTHER)}
    assert table == {pure_operation(name)[0] for name in NAMES}
    assert all((name, True) in operations() for name in table)


def test_lowering_makes_operations_that_are_defined(made: dict[str, PureOp]) -> None:
    defined = types_of(DEFINITIONS)
    assert {name: defined[name] for name in types_of(made)} == types_of(made)
    assert len(made) > 600


def types_of(operations: Mapping[str, PureOp | Definition]) -> dict[str, tuple[tuple[str, ...], str]]:
    """By the core's names, which are without constants."""
    return {pure_operation(name)[0]: (op.inputs, op.output) for name, op in operations.items()}


def drawn(rng: np.random.Generator, type_: str) -> np.ndarray:
    """32 values: edges of the format, values near each other, and any patterns."""
    if type_ == "pred":
        return rng.random(LANES) < 0.5
    dtype = np.dtype(DTYPES[type_])
    bits = 8 * dtype.itemsize
    raw = f"u{dtype.itemsize}"
    raw_type = np.dtype(raw).type
    patterns = np.frombuffer(rng.bytes(LANES * dtype.itemsize), raw)
    ends = [end for kind in ("isf" if bits > 8 else "i") for end in edges(kind, bits)]
    chosen = np.array(ends, raw)[rng.integers(len(ends), size=LANES)]
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
        self.words, self.address = self.state.view(np.uint64), self.state.ctypes.data
        rows = [256 * row for row in range(1, 4)]
        self.instructions = [STRUCTURES["Instruction"](None, 0, *rows, last) for last in (self.constant, 4 * 256)]

    def __call__(self, arguments: list[np.ndarray], lanes: bool, result: np.dtype) -> np.ndarray:
        """Of each lane or of one element; a predicate is bool."""
        self.state[:256] = 0xA5
        for row, argument in enumerate(arguments, 1):
            if argument.dtype == np.bool_ or not lanes:
                word = mask_of(argument) if lanes else int(argument.view(f"u{argument.dtype.itemsize}")[0])
                self.words[32 * row] = word
            else:
                self.state[256 * row :][: argument.nbytes] = argument.view(np.uint8)
        instruction = self.instructions[len(arguments) == 4]
        following = self.forms[lanes](ctypes.addressof(instruction), self.address, None)
        assert following == ctypes.addressof(instruction) + ctypes.sizeof(instruction)
        if result == np.bool_:
            word = int(self.words[0])
            assert word <= (FULL if lanes else 1)
            return np.array([word >> lane & 1 for lane in range(LANES if lanes else 1)], bool)
        if lanes:
            return self.state[: LANES * result.itemsize].view(f"u{result.itemsize}").copy()
        word = self.words[:1]
        assert word[0] < 1 << 8 * result.itemsize, "extended with zeros"
        return word.astype(f"u{result.itemsize}")


def mask_of(lanes: np.ndarray) -> int:
    return sum(1 << lane for lane in range(len(lanes)) if lanes[lane])


def expected(op: Definition, arguments: list[np.ndarray]) -> np.ndarray:
    result = np.broadcast_to(op.function(*arguments), (LANES,))
    return np.array(result, bool) if op.output == "pred" else np.ascontiguousarray(result).view(f"u{result.itemsize}")


@pytest.mark.parametrize("name", NAMES)
def test_operation(name: str) -> None:
    op, core = DEFINITIONS[name], Core(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for _ in range(ROUNDS):
        arguments = [drawn(rng, type_) for type_ in op.inputs]
        want = expected(op, arguments)
        got = core(arguments, True, np.dtype(DTYPES[op.output]))
        for lane in np.flatnonzero(got != want):
            given = [argument[lane : lane + 1].tobytes()[::-1].hex() for argument in arguments]
            raise AssertionError(f"{name} of {given} is {got[lane]:#x}, not {want[lane]:#x}")
        for lane in range(0, LANES, 3):
            one = core([argument[lane : lane + 1] for argument in arguments], False, np.dtype(DTYPES[op.output]))
            assert one[0] == want[lane], f"lane {lane}"


def all_values(type_: str) -> np.ndarray:
    """Of 8 and 16 bits; of f32 those that bf16 has, among them all half-way between two codes, and their neighbours."""
    if type_ == "f32":
        exact = np.arange(1 << 16, dtype=np.uint32) << 16
        return np.concatenate([exact - 1, exact, exact + 1]).view(np.float32)
    dtype = np.dtype(DTYPES[type_])
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def one_short_operand(op: Definition) -> bool:
    return op.inputs[0] in ("u8", "s8", "u16", "s16") if len(op.inputs) == 1 else False


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if one_short_operand(DEFINITIONS[name])]
    + [name for name in NAMES if (DEFINITIONS[name].inputs, DEFINITIONS[name].output) == (("f32",), "u8")],
)
def test_operation_on_all_values(name: str) -> None:
    """One operand of 8 or 16 bits, and what becomes a byte: ties between all codes."""
    op, core = DEFINITIONS[name], Core(name)
    values = all_values(op.inputs[0])
    want = np.ascontiguousarray(op.function(values))
    dtype = np.dtype(f"u{want.itemsize}")
    got = np.concatenate([core([values[at : at + LANES]], True, dtype) for at in range(0, len(values), LANES)])
    wrong = np.flatnonzero(got != want.view(dtype))
    assert not len(wrong), f"{name} of {values[wrong[:3]]} is {got[wrong[:3]]}, not {want[wrong[:3]]}"


def test_set_bits_from_every_position() -> None:
    core = Core("fns_b32")
    base, offset = (x.ravel() for x in np.meshgrid(np.arange(34), np.arange(-40, 40)))  # 85 rows of lanes
    offset, base = offset.astype(np.int32), base.astype(np.uint32)
    for mask in (0, FULL, 0x80000001, *np.random.default_rng(0).integers(0, 1 << 32, 4).tolist()):
        masks = np.full(base.shape, mask, np.uint32)
        want = DEFINITIONS["fns_b32"].function(masks, base, offset)
        operands = [(masks[at:], base[at:], offset[at:]) for at in range(0, len(base), LANES)]
        got = [core([x[:LANES] for x in row], True, np.dtype(np.uint32)) for row in operands]
        assert np.concatenate(got).tolist() == want.tolist()


def test_operations_are_found_by_name_and_constant() -> None:
    assert pure_operation("shl_b32_by5") == ("shl_b32_by", 5)
    assert pure_operation("lop3_0xca") == ("lop3", 0xCA)
    assert pure_operation("slice64_16_48") == ("slice64_16", 48)
    assert pure_operation("extend_s8_32_16") == ("extend_s_32_16", 8)
    assert pure_operation("saturate_s32_u8") == ("saturate_s_u", 32 | 8 << 8)
    assert pure_operation("cvt_f16_e2m1x2_4") == ("cvt_f16_e2m1x2", 4)
    assert pure_operation("cvt_e2m1x2_f32_rs_relu_1") == ("cvt_e2m1x2_f32_rs_relu", 1)
    with pytest.raises(KeyError, match="the core has no operation mul_f128"):
        pure_operation("mul_f128")


def test_operations_are_evaluated() -> None:
    """As constants are folded: patterns and predicates as integers, the fourth operand and constants in names too."""
    assert evaluate("sub_u32", 3, 5) == FULL - 1
    assert evaluate("bfi_b32", 5, 0xFF00, 4, 3) == 0xFF50
    assert evaluate("slice64_16_48", 0x1234 << 48) == 0x1234
    assert evaluate("carry_u64", (1 << 64) - 1, 0, 1) == 1
    assert (evaluate("setp_lt_s32", FULL, 0), evaluate("not_pred", 1), evaluate("select_u8", 7, 9, 0)) == (1, 0, 9)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("kind", ["u16", "u32", "u64"])
def test_operations_on_arrays(kind: str, count: int) -> None:
    a, b = np.random.default_rng(count).integers(0, 1 << 16, (2, count)).astype(DTYPES[kind])
    got = apply(f"sub_{kind}", a, b)
    assert got.dtype == a.dtype and got.tolist() == (a - b).tolist()
