"""mma.sync with a kind, of sm_120: fragments and scales as the PTX ISA lays them out, sums as exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator import Options, UnsupportedPTX
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ieee import F16, F32
from tests.emulator.ptx_launch import launch

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
CODES = {"e4m3": 256, "e5m2": 256, "e2m3": 64, "e3m2": 64, "e2m1": 16}


def finite_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, CODES[name], shape, dtype=np.uint8)
    return np.where(np.isfinite(codes.view(TYPES[name]).astype(np.float32)), codes, 0).astype(np.uint8)


def words(codes: np.ndarray, name: str, packed: bool) -> np.ndarray:
    """uint32 [32 lanes, registers] of A [16, K], or of B's columns [8, K]; a byte of FP4 has its code from bit 2 on."""
    held = codes[:, ::2] | codes[:, 1::2] << 4 if packed else codes << 2 if name == "e2m1" else codes
    eights = len(held) // 8
    count = eights * held.shape[1] // 16
    out = np.zeros((32, count, 4), np.uint8)
    for lane in range(32):
        for register in range(count):
            row, first = lane // 4 + 8 * (register % eights), 4 * (lane % 4) + 16 * (register // eights)
            out[lane, register] = held[row, first : first + 4]
    return out.view(np.uint32)[..., 0]


def scale_words(codes: np.ndarray, byte: int, thread: int, rng: np.random.Generator) -> np.ndarray:
    """uint32 [32]: scales [16 or 8 rows, count] where they are read; noise everywhere else."""
    out = rng.integers(0, 256, (32, 4), dtype=np.uint8)
    for row, scales in enumerate(codes):
        lane = 4 * (row % 8) + (2 * thread + row // 8 if len(codes) == 16 else thread)
        out[lane, byte : byte + len(scales)] = scales
    return out.view(np.uint32)[:, 0]


def text_of(opcode: str, halves: bool, places: tuple[int, int, int, int] | None) -> str:
    """Inputs of a lane: 4 words of A, 2 of B, 4 of C, two of scales; places as registers, which compilers write too."""
    count = 2 if halves else 4
    loads = "".join(f"ld.global.u32 %r{10 + i}, [%d2+{4 * i}];" for i in range(12))
    lists = (30, count), (10, 4), (14, 2), (16, count)
    d, a, b, c = (", ".join(f"%r{first + i}" for i in range(n)) for first, n in lists)
    scales = ids = ""
    if places is not None:
        ids = "".join(f"mov.b16 %h{i}, {place};" for i, place in enumerate(places))
        scales = f", {{%r20}}, {{%h0, %h1}}, {{%r21}}, {{%h2, {places[3]}}}"
    stores = "".join(f"st.global.u32 [%d3+{4 * i}], %r{30 + i};" for i in range(count))
    return module(f"""mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
        mad.wide.u32 %d2, %r1, 48, %d0; mad.wide.u32 %d3, %r1, 16, %d1; {loads} {ids}
        mma.sync.aligned.{opcode} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}{scales}; {stores} ret;""", target="sm_120a")


def multiplied(a: np.ndarray, b: np.ndarray, c: np.ndarray, scales: tuple[np.ndarray, np.ndarray] | None) -> list:
    """Exact sums [16][8] as fractions; scales are of equal parts of K."""
    k = a.shape[1]
    found = []
    for i in range(16):
        found.append([])
        for j in range(8):
            total = Fraction(float(c[i, j]))
            for at in range(k):
                part = at * scales[0].shape[1] // k if scales else 0
                scale = Fraction(float(scales[0][i, part])) * Fraction(float(scales[1][j, part])) if scales else 1
                total += Fraction(float(a[i, at])) * Fraction(float(b[j, at])) * scale
            found[i].append(total)
    return found


_X8, _X4 = "m16n8k32.row.col.kind::mxf8f6f4.block_scale", "m16n8k64.row.col.kind::mxf4nvf4.block_scale"
FORMS = [
    ("m16n8k32.row.col.kind::f8f6f4.f32.{}.{}.f32", "e2m1", "e3m2", "", 0, None),
    ("kind::f8f6f4.m16n8k32.row.col.f32.{}.{}.f32", "e2m3", "e5m2", "", 0, None),
    ("m16n8k32.row.col.kind::f8f6f4.f16.{}.{}.f16", "e2m1", "e2m3", "", 0, None),
    (_X8 + ".scale_vec::1X.f32.{}.{}.f32.ue8m0", "e4m3", "e2m1", "ue8m0", 1, (3, 1, 2, 3)),
    (_X8 + ".f32.{}.{}.f32.ue8m0", "e3m2", "e4m3", "ue8m0", 1, (0, 0, 1, 0)),
    ("m16n8k64.row.col.kind::mxf4.block_scale.f32.{}.{}.f32.ue8m0", "e2m1", "e2m1", "ue8m0", 2, (2, 1, 0, 2)),
    (_X4 + ".scale_vec::2X.f32.{}.{}.f32.ue8m0", "e2m1", "e2m1", "ue8m0", 2, (0, 0, 2, 1)),
    (_X4 + ".scale_vec::4X.f32.{}.{}.f32.ue4m3", "e2m1", "e2m1", "ue4m3", 4, (0, 1, 0, 3)),
]  # fmt: skip


def check_product(text: str, inputs: np.ndarray, sums: list[list[Fraction]], c: np.ndarray) -> None:
    """A kernel's product in exact arithmetic is the rounded sums; as the chip adds it is nearly the same."""
    halves = c.dtype == np.float16
    out, want_type = aligned(np.zeros((32, 4), np.uint32)), np.uint16 if halves else np.uint32

    def result(dtype: np.dtype | type) -> np.ndarray:
        words = out[:, : 2 if halves else 4].copy().view(dtype)
        return words.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)

    launch(text, aligned(inputs), out, block=32, options=Options(arithmetic="exact"), hardware="sm_90 has no kinds")
    fmt = F16 if halves else F32
    want = np.array([[fmt.round(each) for each in row] for row in sums], want_type)
    np.testing.assert_array_equal(result(want_type), want)
    launch(text, aligned(inputs), out, block=32, hardware="sm_90 has no kinds")
    near = np.array([[float(each) for each in row] for row in sums])
    np.testing.assert_allclose(result(c.dtype), near, rtol=1e-2, atol=1e-2 if halves else 1e-5 * np.abs(near).max())


@pytest.mark.parametrize(("opcode", "a_type", "b_type", "scale_type", "count", "places"), FORMS)
def test_products(opcode: str, a_type: str, b_type: str, scale_type: str, count: int, places: tuple | None) -> None:
    rng = np.random.default_rng(len(opcode))
    k, halves, packed = 64 if "k64" in opcode else 32, ".f16." in opcode, "k64" in opcode
    a_codes, b_codes = finite_codes(rng, a_type, (16, k)), finite_codes(rng, b_type, (8, k))
    a, b = (codes.view(TYPES[name]).astype(np.float64) for codes, name in ((a_codes, a_type), (b_codes, b_type)))
    c = (rng.integers(-64, 64, (16, 8)) / 8).astype(np.float16 if halves else np.float32)
    inputs = np.zeros((32, 12), np.uint32)
    inputs[:, :4], inputs[:, 4:6] = words(a_codes, a_type, packed), words(b_codes, b_type, packed)
    lanes = np.stack([c[8 * high : 8 * high + 8].reshape(8, 4, 2) for high in (0, 1)], axis=2).reshape(32, 2, 2)
    cells = np.ascontiguousarray(lanes).view(np.uint32).reshape(32, -1)
    inputs[:, 6 : 6 + cells.shape[1]] = cells
    scales = None
    if count:
        low, high = (120, 134) if scale_type == "ue8m0" else (0, 127)
        codes = [rng.integers(low, high, (rows, count), dtype=np.uint8) for rows in (16, 8)]
        scales = tuple(each.view(TYPES[scale_type]).astype(np.float64) for each in codes)
        for i, each in enumerate(codes):
            inputs[:, 10 + i] = scale_words(each, *places[2 * i : 2 * i + 2], rng)
    check_product(text_of(opcode.format(a_type, b_type), halves, places), inputs, multiplied(a, b, c, scales), c)


SCALED = _X4 + ".scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


@pytest.mark.parametrize(
    ("opcode", "places", "message"),
    [(SCALED.replace("4X", "2X"), (0, 0, 0, 0), "qualifier .ue4m3"),
     (SCALED.replace("k64", "k32"), (0, 0, 0, 0), "qualifier .m16n8k32"),
     (SCALED.replace(".scale_vec::4X", ""), (0, 0, 0, 0), "a qualifier is missing, one of .scale_vec::4X"),
     (SCALED, (0, 2, 0, 0), "byte 0 and thread 2"), (SCALED, (1, 0, 0, 0), "byte 1 and thread 0 of the scales of A"),
     (SCALED, (0, 0, 0, 4), "thread 4 of the scales of B")],
)  # fmt: skip
def test_what_does_not_exist(opcode: str, places: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        launch(text_of(opcode, False, places), aligned(np.zeros(384, np.uint32)), aligned(np.zeros(128, np.uint32)))


@pytest.mark.parametrize("target", ["sm_100a", "sm_120", "sm_90a"])
def test_targets(target: str) -> None:
    with pytest.raises(UnsupportedPTX, match="needs sm_120a"):
        launch(text_of(SCALED, False, (0, 0, 0, 0)).replace("sm_120a", target), aligned(np.zeros(384, np.uint32)),
               aligned(np.zeros(128, np.uint32)))  # fmt: skip
