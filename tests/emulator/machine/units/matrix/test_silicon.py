"""Products with the sums of tensor cores: against integers, against published results of a B200, and by mmasim."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.machine.units.matrix import operands as matrix_operands
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACT, GENERATIONS, Arithmetic, Sums, generation
from cute_kernels.emulator.machine.units.matrix.products import Kind, multiply_rows
from tests.emulator.aligned_sums import Rules, dot
from tests.emulator.core_variants import of_every_variant
from tests.emulator.sum_inputs import STYLES, operands

ELEMENTS = {element.name: element for kind in matrix_operands.KINDS.values() for element in kind.values()}

#: Unit, target, whether of FP8 -> rules for FP32 and for FP16. Written down a second time, from the papers.
RULES = {
    ("tcgen05", "sm_100a", False): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
    ("tcgen05", "sm_100a", True): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
    ("wgmma", "sm_90a", False): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
    ("wgmma", "sm_90a", True): (Rules(13, 10, 32, -133), Rules(13, 0, 32, -21)),
    ("mma", "sm_80", False): (Rules(24, 0, 16, -132), Rules(24, 0, 16, -20)),
    ("mma", "sm_89", False): (Rules(24, 0, 16, -132), Rules(24, 0, 16, -20)),
    ("mma", "sm_89", True): (Rules(13, 10, 16, -132), Rules(13, 0, 16, -20)),
    ("mma", "sm_90", False): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
    ("mma", "sm_100a", False): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
    ("mma", "sm_120a", True): (Rules(25, 0, 32, -133), Rules(25, 0, 32, -21)),
}
FP8 = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")]
OTHERS = [("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32")]
CASES = [
    (unit, target, types, d_type)
    for unit, target, eight_bits in RULES
    for types in (FP8 if eight_bits else OTHERS)
    for d_type in (("f32", "f16") if eight_bits or types[0] == "f16" else ("f32",))
]


def rules_of(unit: str, target: str, types: tuple[str, str], d_type: str) -> Rules:
    return RULES[unit, target, types[0] in ("e4m3", "e5m2")][d_type == "f16"]


def products(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, types: tuple[str, str], d_type: str, sums: Sums,
    negated: tuple[bool, bool] = (False, False),
) -> np.ndarray:
    """D [count, m, n] of the core, in each of its variants."""
    count, m, n = len(a), a.shape[1], b.shape[1]
    kinds = tuple(Kind(ELEMENTS[name], sign) for name, sign in zip(types, negated))

    def compute() -> np.ndarray:
        cells = np.full((count, n, m), 0x7FC00BAD, np.uint32)  # never read without C
        if c is not None:
            cells[...] = c.transpose(0, 2, 1)
        multiply_rows(a.view(np.uint8), b.view(np.uint8), cells, kinds, d_type, add=c is not None, sums=sums)
        return cells.transpose(0, 2, 1)

    return of_every_variant(compute)


def expected(a, b, c, types, d_type, rules) -> np.ndarray:
    """The same, one by one, in integers."""
    result = np.empty(c.shape, np.uint32)
    for index in np.ndindex(c.shape):
        which, i, j = index
        result[index] = dot(a[which, i].tolist(), b[which, j].tolist(), int(c[index]), types, d_type, rules)
    return result


def check(a, b, c, types, d_type, sums, rules) -> None:
    got, want = products(a, b, c, types, d_type, sums), expected(a, b, c, types, d_type, rules)
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{len(wrong)} of {got.size}, first {wrong[0]}: {got[tuple(wrong[0])]:#x}, not " + (
        f"{want[tuple(wrong[0])]:#x}"
    )


@pytest.mark.parametrize(("unit", "target", "types", "d_type"), CASES)
def test_against_integers(unit: str, target: str, types: tuple[str, str], d_type: str) -> None:
    sums = Arithmetic("silicon", target).sums(unit, types[0], d_type)
    rng = np.random.default_rng(sum(map(ord, f"{unit}{target}{types}{d_type}")))
    for number, style in enumerate(STYLES):
        m, n = (48, 8) if number == 0 else (16, 8)
        check(*operands(rng, types, d_type, style, 1, m, n), types, d_type, sums, rules_of(unit, target, types, d_type))


@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("bf16", "bf16")])
@pytest.mark.parametrize("unit", [("tcgen05", "sm_100a"), ("wgmma", "sm_90a")])
def test_without_an_accumulator(unit: tuple[str, str], types: tuple[str, str]) -> None:
    """As with one of zeros; what its cells hold is not looked at."""
    sums = Arithmetic("silicon", unit[1]).sums(unit[0], types[0], "f32")
    rng = np.random.default_rng(7)
    for style in STYLES:
        a, b, c = operands(rng, types, "f32", style, 1, 16, 8)
        got = products(a, b, None, types, "f32", sums)
        np.testing.assert_array_equal(got, expected(a, b, 0 * c, types, "f32", rules_of(*unit, types, "f32")))


@pytest.mark.parametrize("negated", [(True, False), (False, True), (True, True)])
def test_negated_operands(negated: tuple[bool, bool]) -> None:
    types, sums = ("f16", "f16"), Arithmetic("silicon", "sm_90a").sums("wgmma", "f16", "f32")
    a, b, c = operands(np.random.default_rng(8), types, "f32", "near", 1, 16, 8)
    got = products(a, b, c, types, "f32", sums, negated)
    flipped = [x ^ np.uint16(0x8000 * sign) for x, sign in zip((a, b), negated)]
    np.testing.assert_array_equal(got, expected(*flipped, c, types, "f32", rules_of("wgmma", "sm_90a", types, "f32")))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("unit", [("tcgen05", "sm_100a"), ("wgmma", "sm_90a")])
def test_whole_instructions(unit: tuple[str, str], style: str) -> None:
    """All rows and columns that an instruction can have, of which some are compared."""
    types, rng = ("e4m3", "e4m3"), np.random.default_rng(9)
    sums, rules = Arithmetic("silicon", unit[1]).sums(unit[0], "e4m3", "f32"), rules_of(*unit, types, "f32")
    for m, n in ((128, 256), (64, 24)):
        a, b, c = operands(rng, types, "f32", style, 1, m, n)
        got = products(a, b, c, types, "f32", sums)[0]
        for i, j in zip(rng.integers(0, m, 150).tolist(), rng.integers(0, n, 150).tolist()):
            assert got[i, j] == dot(a[0, i].tolist(), b[0, j].tolist(), int(c[0, i, j]), types, "f32", rules)


@pytest.mark.parametrize("size", [127.0, 255.0, 257.0, 600.0])
@pytest.mark.parametrize("codes", [(0x57, 0x57), (0x5F, 0x57), (0x5F, 0x5F), (0x67, 0x4F), (0x67, 0x67)])
def test_where_small_products_begin_to_be_cut(codes: tuple[int, int], size: float) -> None:
    """Magnitudes up to 15, 30 or 60 beside subnormal ones, whose products are odd multiples of 2^-18, and D around 2^8:
    on both sides of the exponent from which on those are cut. D is on the grid of the products, or not."""
    types, rng = ("e4m3", "e4m3"), np.random.default_rng(12)
    sums = Arithmetic("silicon", "sm_100a").sums("tcgen05", "e4m3", "f32")
    rules = rules_of("tcgen05", "sm_100a", types, "f32")
    a, b = (rng.integers(1, 8, (1, rows, 32), dtype=np.uint8) for rows in (48, 24))
    for x, code in zip((a, b), codes):
        x[..., ::9] = code
        x ^= rng.choice(np.array([0, 0x80], np.uint8), x.shape)
    b[:, :8, ::9] = 0  # products of the largest ones are not everywhere
    c = np.round(rng.uniform(-size, size, (1, 48, 24)) * 2.0**14) / 2.0**14
    if size == 127:
        c[:, :16, ::5] *= 2.0**-12  # off the grid, between numbers that are on it
    check(a, b, c.astype(np.float32).view(np.uint32), types, "f32", sums, rules)


@pytest.mark.parametrize("digit", [1.0, 2.0**-3, 2.0**-4])
@pytest.mark.parametrize("unit", [("tcgen05", "sm_100a"), ("wgmma", "sm_90a")])
def test_where_coarse_products_begin_to_be_cut(unit: tuple[str, str], digit: float) -> None:
    """Numbers up to 15 whose last digits are above the type's. Blocks of results have D beyond the exponent that cuts
    products of them, or below it; on the grid of the products, and off it. 2^-4 is where wgmma cuts without D, too."""
    types, rng = ("e4m3", "e4m3"), np.random.default_rng(13)
    sums, rules = Arithmetic("silicon", unit[1]).sums(unit[0], "e4m3", "f32"), rules_of(*unit, types, "f32")
    values = np.array([0, digit, 3 * digit, 13, 15, -digit, -3 * digit, -14])
    a, b = (rng.choice(values, (1, rows, 32)).astype(float8_e4m3fn).view(np.uint8) for rows in (64, 24))
    limit = 2.0 ** (sums.fraction + 1) * digit**2
    beyond, below = rng.uniform(limit, 2 * limit, (1, 32, 24)), rng.uniform(0, min(99, limit), (1, 32, 24))
    c = np.concatenate([beyond, below], axis=1) * rng.choice([-1.0, 1.0], (1, 64, 24))
    c[..., :8] = np.trunc(c[..., :8] / digit**2) * digit**2  # beside them: off the grid, and integers
    c[..., 16:] = np.trunc(c[..., 16:])
    check(a, b, c.astype(np.float32).view(np.uint32), types, "f32", sums, rules)


CHANGED = [
    ("fraction", 1), ("fraction", -1), ("result", -1), ("step", 16), ("lowest", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_each_parameter_shows(name: str, change: int) -> None:
    """The operands of these tests tell each parameter from its neighbours: with another one, results differ."""
    types = ("bf16", "bf16")
    sums = Arithmetic("silicon", "sm_90a").sums("wgmma", "bf16", "f32")
    other = dataclasses.replace(sums, **{name: 16 if name == "step" else getattr(sums, name) + change})
    rng = np.random.default_rng(3)
    differ = 0
    for style in STYLES:
        a, b, c = operands(rng, types, "f32", style, 4, 64, 8)
        if name == "lowest":  # it is for the smallest of all numbers: around 2^-149, and without C
            a, b = a & 0x8FFF | 0x2000, b & 0x8FFF | 0x1400
            c = 0 * c
        differ += int((products(a, b, c, types, "f32", sums) != products(a, b, c, types, "f32", other)).sum())
    assert differ > 0


def test_sums_of_products_that_are_exact_are_those_of_exact_arithmetic() -> None:
    """Small integers: every chip agrees with the exact contract."""
    rng = np.random.default_rng(4)
    for name, k, codes in (("e4m3", 32, [0, 0x38, 0x40, 0x44, 0x48, 0xB8, 0xC0]), ("f16", 16, [0, 0x3C00, 0xC000])):
        a, b = (rng.choice(codes, (2, rows, k)).astype(np.uint8 if k == 32 else np.uint16) for rows in (64, 16))
        c = rng.integers(-50, 50, (2, 64, 16)).astype(np.float32).view(np.uint32)
        exact = products(a, b, c, (name, name), "f32", EXACT)
        for sums in (Sums(25, 23, 32, -133), Sums(13, 13, 32, -133), Sums(24, 23, 16, -132)):
            np.testing.assert_array_equal(products(a, b, c, (name, name), "f32", sums), exact)


# --- a B200's results -------------------------------------------------------------------------------------------------


def _finite(rng: random.Random) -> int:
    bits = rng.getrandbits(32)
    return bits & 0x807FFFFF if bits & 0x7F800000 == 0x7F800000 else bits


#: Format -> elements of K, seed, what draws an element, two results of a B200; operands are drawn as A, B, C, A, B, C.
#: Published by github.com/sf-tensor/tcgen05 (tcgen05_model/validation.py) as recorded on the chip.
B200 = {
    "tf32": (8, 104, _finite, (0xFF800000, 0xFC347E7C)),
    "bf16": (16, 104, _finite, (0x7F800000, 0x7F800000)),
    "f16": (16, 103, lambda rng: rng.getrandbits(16), (0x7FFFFFFF, 0x49776BBA)),
    "e4m3": (32, 104, lambda rng: rng.randrange(0x7F), (0xEC63D12A, 0x452AF963)),
    "e5m2": (32, 300, lambda rng: rng.randrange(0x7C), (0x4D92B09A, 0x4C9C1102)),
}


def one(name: str, a: list[int], b: list[int], c: int, d_type: str = "f32") -> int:
    """One result of tcgen05: A and B are bit patterns, of which BF16 is the upper half of 32 bits."""
    dtype, places = {"tf32": (np.uint32, 0), "bf16": (np.uint16, 16), "f16": (np.uint16, 0)}.get(name, (np.uint8, 0))
    rows = [np.zeros((1, size, len(a)), dtype) for size in (16, 8)]
    for row, values in zip(rows, (a, b)):
        row[0, 0] = [value >> places for value in values]
    start = np.zeros((1, 16, 8), np.uint32)
    start[0, 0, 0] = c
    sums = Arithmetic("silicon", "sm_100a").sums("tcgen05", name, d_type)
    return int(products(*rows, start, (name, name), d_type, sums)[0, 0, 0])


@pytest.mark.parametrize("name", B200)
def test_published_results_of_a_b200(name: str) -> None:
    k, seed, element, results = B200[name]
    rng = random.Random(seed)
    for result in results:
        a, b = ([element(rng) for _ in range(k)] for _ in range(2))
        assert one(name, a, b, _finite(rng)) == result


#: Format -> K, 1, the least subnormal number, NaN, infinity or None, and what the least number times 1 is.
EDGES = {
    "tf32": (8, 0x3F800000, 0x00002000, 0x7FC00000, 0x7F800000, 0x00002000),
    "bf16": (16, 0x3F800000, 0x00010000, 0x7FC00000, 0x7F800000, 0x00010000),
    "f16": (16, 0x3C00, 0x0001, 0x7E00, 0x7C00, 0x33800000),
    "e4m3": (32, 0x38, 0x01, 0x7F, None, 0x3B000000),
    "e5m2": (32, 0x3C, 0x01, 0x7F, 0x7C, 0x37800000),
}


@pytest.mark.parametrize("name", EDGES)
def test_published_edges_of_a_b200(name: str) -> None:
    """From the same source."""
    k, unit, least, nan, infinity, result = EDGES[name]

    def single(x: int, y: int, c: int = 0) -> int:
        return one(name, [x, *[0] * (k - 1)], [y, *[0] * (k - 1)], c)

    assert single(0, 0, 0x80000000) == 0
    assert single(least, unit) == result
    assert single(nan, unit) == 0x7FFFFFFF
    if infinity is not None:
        assert single(infinity, unit) == 0x7F800000
        assert single(infinity, 0) == 0x7FFFFFFF
    if name in ("tf32", "bf16"):  # the digits of this NaN are not those of the operand
        assert single(0x7F800001, unit) == 0x7F800000


# --- what is known ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "target", "types", "d_type"), CASES)
def test_parameters_are_those_of_the_papers(unit: str, target: str, types: tuple[str, str], d_type: str) -> None:
    rules, sums = rules_of(unit, target, types, d_type), Arithmetic("silicon", target).sums(unit, types[0], d_type)
    assert (sums.fraction, sums.step, sums.lowest) == (rules.fraction, rules.together, rules.floor)
    assert d_type == "f16" or sums.result == 23 - rules.cut


def test_integers_and_the_exact_choice_are_exact() -> None:
    assert Arithmetic("silicon", "sm_90a").sums("wgmma", "s8", "s32") is EXACT
    assert Arithmetic("exact", "sm_70").sums("mma", "f16", "f32") is EXACT


def test_generations() -> None:
    assert [generation(f"sm_{number}") for numbers in GENERATIONS.values() for number in numbers] == [
        name for name, numbers in GENERATIONS.items() for _ in numbers
    ]
    assert generation("sm_100a") == generation("sm_103f") == "blackwell"


@pytest.mark.parametrize("target", ["sm_70", "sm_130a", "", "compute_90"])
def test_unknown_targets_are_refused(target: str) -> None:
    with pytest.raises(UnsupportedPTX, match="arithmetic='exact'"):
        Arithmetic("silicon", target).sums("mma", "f16", "f32")


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match="how mma of e4m3 adds on sm_80 is not known"):
        Arithmetic("silicon", "sm_80").sums("mma", "e4m3", "f32")
