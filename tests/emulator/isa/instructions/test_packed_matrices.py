"""ldmatrix of elements of four and six bits, with padding behind 16 of them, which become bytes."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

BITS = {"b4x16_p64": 4, "b6x16_p32": 6}


def loading(opcode: str, registers: int, nbytes: int, shift: int = 0) -> str:
    """Each lane writes as many bytes of its row as hold elements, the others stay unwritten."""
    stores = "".join(f"ld.global.u32 %r{8 + i}, [%d2+{4 * i}]; st.shared.u32 [%r2+{4 * i}], %r{8 + i};"
                     for i in range(nbytes // 4))  # fmt: skip
    names = ", ".join(f"%r{20 + i}" for i in range(registers))
    results = "".join(f"st.global.u32 [%d3+{4 * i}], %r{20 + i};" for i in range(registers))
    return module(f"""
        .shared .align 16 .b8 rows[512]; mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
        mov.u32 %r2, rows; mad.lo.u32 %r2, %r1, 16, %r2; mad.wide.u32 %d2, %r1, 16, %d0;
        mad.wide.u32 %d3, %r1, {4 * registers}, %d1; {stores} bar.warp.sync -1; add.u32 %r2, %r2, {shift};
        {opcode} {{{names}}}, [%r2]; {results} ret;""")


def rows_of(rng: np.random.Generator, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(elements [32, 16], the 16 bytes of each row) with noise in the padding."""
    elements = rng.integers(0, 1 << bits, (32, 16), dtype=np.uint8)
    image = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    for row in range(32):
        number = sum(int(each) << bits * place for place, each in enumerate(elements[row]))
        image[row, : 2 * bits] = np.frombuffer(number.to_bytes(2 * bits, "little"), np.uint8)
    return elements, image


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize(("shape", "count"), [("m8n16", 1), ("m8n16", 2), ("m8n16", 4), ("m16n16", 1), ("m16n16", 2)])
def test_every_element(shape: str, count: int, form: str) -> None:
    """As in the PTX ISA's figures: of m8n16 lane 4 r + c has columns 4 c to 4 c + 3 of row r; m16n16 is transposed."""
    elements, image = rows_of(np.random.default_rng(count), BITS[form])
    transposed = shape == "m16n16"
    registers = count * (2 if transposed else 1)
    out = aligned(np.zeros((32, registers, 4), np.uint8))
    opcode = f"ldmatrix.sync.aligned.{shape}.x{count}{'.trans' * transposed}.shared.b8x16.{form}"
    launch(loading(opcode, registers, 2 * BITS[form]), aligned(image), out, block=32, hardware="not on sm_90")
    for lane in range(32):
        for register in range(registers):
            r, c = lane // 4, 4 * (lane % 4)
            if transposed:  # rows c to c + 3 of column r, of the second register 8 columns behind
                want = elements[16 * (register // 2) :][c : c + 4, r + 8 * (register % 2)]
            else:
                want = elements[8 * register + r, c : c + 4]
            assert out[lane, register].tolist() == want.tolist()


@pytest.mark.parametrize("form", BITS)
def test_rows_are_checked(form: str) -> None:
    """Their addresses are multiples of 16; the padding holds no data, and what is in front of it has to."""
    _, image = rows_of(np.random.default_rng(0), BITS[form])
    opcode = f"ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.{form}"
    for nbytes, shift, message in ((2 * BITS[form], 8, "misaligned"), (2 * BITS[form] - 4, 0, "uninitialised"),
                                   (2 * BITS[form], 1 << 16, "leaves its")):  # fmt: skip
        with pytest.raises(IllegalAccess, match=message):
            launch(loading(opcode, 1, nbytes, shift), aligned(image), aligned(np.zeros(32, np.uint32)), block=32)


@pytest.mark.parametrize(
    "opcode",
    ["m8n16.x1.trans.shared.b8x16.b4x16_p64", "m16n16.x1.shared.b8x16.b4x16_p64", "m8n16.x1.shared.b8",
     "m8n8.x1.shared.b8x16.b4x16_p64", "m16n16.x4.trans.shared.b8x16.b6x16_p32", "m8n16.x1.shared.b4x16_p64"],
)  # fmt: skip
def test_other_forms_are_refused(opcode: str) -> None:
    text = loading(f"ldmatrix.sync.aligned.{opcode}", 1, 8)
    with pytest.raises(UnsupportedPTX, match="ldmatrix.sync.aligned.* it takes .sync.aligned"):
        launch(text, aligned(np.zeros(512, np.uint8)), aligned(np.zeros(32, np.uint32)), block=32)


def test_older_targets_do_not_have_them() -> None:
    text = loading("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64", 1, 8).replace("sm_100a", "sm_90a")
    with pytest.raises(UnsupportedPTX, match="needs sm_100a"):
        launch(text, aligned(np.zeros(512, np.uint8)), aligned(np.zeros(32, np.uint32)), block=32)
