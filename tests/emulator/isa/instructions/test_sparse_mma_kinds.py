"""mma.sp with a kind, of sm_120: sums as exact fractions of A with its zeros, which random metadata places."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.isa.instructions.test_mma_kinds import (
    CODES,
    TYPES,
    check_product,
    finite_codes,
    multiplied,
    scale_words,
    words,
)
from tests.emulator.machine.units.matrix.test_mma_forms import drawn_places, expand, metadata
from tests.emulator.ptx_launch import launch

WORDS = 16  # of a lane: four each of A, B and C, metadata, two of scales


def text_of(opcode: str, places: tuple[int, int, int, int] | None, selector: int = 0, form: str = "{%r22}") -> str:
    """Registers of a lane come from memory; places of scales are literals."""
    count = 2 if ".f16" in opcode else 4
    loads = "".join(f"ld.global.u32 %r{10 + i}, [%d2+{4 * i}];" for i in range(WORDS - 1))
    lists = (30, count), (10, 4), (14, 4), (18, count)
    d, a, b, c = (", ".join(f"%r{first + i}" for i in range(n)) for first, n in lists)
    scales = ", {{%r23}}, {{{}, {}}}, {{%r24}}, {{{}, {}}}".format(*places) if places else ""
    stores = "".join(f"st.global.u32 [%d3+{4 * i}], %r{30 + i};" for i in range(count))
    return module(
        f"""mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
        mad.wide.u32 %d2, %r1, {4 * WORDS}, %d0; mad.wide.u32 %d3, %r1, 16, %d1; {loads}
        mma.sp::ordered_metadata.sync.aligned.{opcode} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}, {form}, {selector}{scales};
        {stores} ret;""",
        target="sm_120a",
    )


_X8, _X4 = "m16n8k64.row.col.kind::mxf8f6f4.block_scale", "m16n8k128.row.col.kind::mxf4nvf4.block_scale"
FORMS = [
    ("m16n8k64.row.col.kind::f8f6f4.f32.{}.{}.f32", "e2m1", "e3m2", "", 0, None),
    ("kind::f8f6f4.m16n8k64.row.col.f32.{}.{}.f32", "e5m2", "e2m3", "", 0, None),
    ("m16n8k64.row.col.kind::f8f6f4.f16.{}.{}.f16", "e2m3", "e2m1", "", 0, None),
    (_X8 + ".scale_vec::1X.f32.{}.{}.f32.ue8m0", "e4m3", "e2m1", "ue8m0", 1, (3, 1, 2, 3)),
    (_X8 + ".f32.{}.{}.f32.ue8m0", "e3m2", "e5m2", "ue8m0", 1, (0, 0, 1, 0)),
    ("m16n8k128.row.col.kind::mxf4.block_scale.f32.{}.{}.f32.ue8m0", "e2m1", "e2m1", "ue8m0", 2, (2, 1, 0, 2)),
    (_X4 + ".scale_vec::2X.f32.{}.{}.f32.ue8m0", "e2m1", "e2m1", "ue8m0", 2, (0, 0, 2, 1)),
    (_X4 + ".scale_vec::4X.f32.{}.{}.f32.ue4m3", "e2m1", "e2m1", "ue4m3", 4, (0, 1, 0, 3)),
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("opcode", "a_type", "b_type", "scale_type", "count", "places"), FORMS)
def test_products(
    opcode: str, a_type: str, b_type: str, scale_type: str, count: int, places: tuple | None, seed: int
) -> None:
    rng = np.random.default_rng(100 * seed + len(opcode))
    k, halves = int(re.search(r"k(\d+)", opcode)[1]), ".f16." in opcode
    packed = k == 128
    stored, b_codes = finite_codes(rng, a_type, (16, k // 2)), finite_codes(rng, b_type, (8, k))
    grouping = "s4" if packed else "e4m3"  # pairs of elements are placed, or elements
    where = drawn_places(rng, grouping, k, ordered=True)
    a_codes = expand(stored, where, grouping, k)
    a, b = (codes.view(TYPES[name]).astype(np.float64) for codes, name in ((a_codes, a_type), (b_codes, b_type)))
    c = (rng.integers(-64, 64, (16, 8)) / 8).astype(np.float16 if halves else np.float32)
    inputs = np.zeros((32, WORDS), np.uint32)
    inputs[:, :4], inputs[:, 4:8] = words(stored, a_type, packed), words(b_codes, b_type, packed)
    lanes = np.stack([c[8 * high : 8 * high + 8].reshape(8, 4, 2) for high in (0, 1)], axis=2).reshape(32, 2, 2)
    cells = np.ascontiguousarray(lanes).view(np.uint32).reshape(32, -1)
    inputs[:, 8 : 8 + cells.shape[1]] = cells
    inputs[:, 12] = metadata(where, grouping, k, 0, rng)[0]
    scales = None
    if count:
        low, high = (120, 134) if scale_type == "ue8m0" else (0, 127)
        codes = [rng.integers(low, high, (rows, count), dtype=np.uint8) for rows in (16, 8)]
        scales = tuple(each.view(TYPES[scale_type]).astype(np.float64) for each in codes)
        for i, each in enumerate(codes):
            inputs[:, 13 + i] = scale_words(each, *places[2 * i : 2 * i + 2], rng)
    text = text_of(opcode.format(a_type, b_type), places, form="%r22" if seed else "{%r22}")
    check_product(text, inputs, multiplied(a, b, c, scales), c)


SCALED = _X4 + ".scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
BYTES = "m16n8k64.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32"


@pytest.mark.parametrize(
    ("opcode", "places", "selector", "change", "message"),
    [(SCALED, (0, 0, 0, 0), 1, ("", ""), "sparsity selector 1; of this shape and type 0 are legal"),
     (SCALED, (0, 2, 0, 0), 0, ("", ""), "byte 0 and thread 2"),
     (SCALED.replace("k128", "k64"), (0, 0, 0, 0), 0, ("", ""), "qualifier .m16n8k64"),
     (BYTES.replace("k64", "k32"), None, 0, ("", ""), "qualifier .m16n8k32"),
     (BYTES, None, 0, ("sp::ordered_metadata", "sp"), "kind::f8f6f4"),
     (BYTES, None, 0, ("{%r14, %r15, %r16, %r17}", "{%r14, %r15}"), "4 registers"),
     (BYTES, None, 0, ("sm_120a", "sm_100a"), "needs sm_120a")],
)  # fmt: skip
def test_what_does_not_exist(opcode: str, places: tuple | None, selector: int, change: tuple, message: str) -> None:
    text = text_of(opcode, places, selector).replace(*change)
    inputs = np.zeros((32, WORDS), np.uint32)
    inputs[:, 12] = 0x44444444
    with pytest.raises(EmulatorError, match=message):
        launch(text, aligned(inputs), aligned(np.zeros(128, np.uint32)), block=32)


@pytest.mark.parametrize(("opcode", "padding"), [(BYTES, 0xC3C3C3C3), (SCALED, 0)])
def test_metadata_that_means_nothing_is_reported_unless_it_places_zeros(opcode: str, padding: int) -> None:
    """Bits of a byte that an element of four bits does not have are no element."""
    places = (0, 0, 0, 0) if opcode is SCALED else None
    inputs, out = np.zeros((32, WORDS), np.uint32), aligned(np.zeros(128, np.uint32))
    inputs[:, :4], inputs[:, 12] = padding, 0x44444441
    launch(text_of(opcode, places), aligned(inputs), out, block=32, hardware="sm_90 has no kinds")
    inputs[12, 0] |= 1 << 2  # row 3
    with pytest.raises(EmulatorError, match="metadata 0b0001 of mma.sp in row 3, chunk 0"):
        launch(text_of(opcode, places), aligned(inputs), out, block=32)


def test_codes_of_all_types_are_drawn() -> None:
    assert {form[1] for form in FORMS} | {form[2] for form in FORMS} == set(CODES)
