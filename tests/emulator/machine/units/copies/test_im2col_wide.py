"""Copies of pixels along W alone, `.im2col::w` and `.im2col::w::128`, against lists of positions, not a walk."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Im2colMap
from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.units.copies import bulk
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, decode, encode
from cute_kernels.testing.ptx import aligned
from tests.emulator.copies import BARRIER, DATA, Machine
from tests.emulator.machine.units.copies.test_im2col import load_text, map_of
from tests.emulator.ptx_launch import launch

LEFT_OPEN = "leaves open which pixels follow"
WHERE_128 = "does not say whether the halo lies after each 32 pixels in shared memory, or after all 128"


@dataclass(frozen=True)
class Copy:
    """A copy: `shape` of the array [N, (D, (H,)) W], corners of the box along W, the step, and operands."""

    shape: tuple[int, ...]
    lower: int
    upper: int
    step: int
    coords: tuple[int, ...]  # W, (H, (D)), N
    halo: int = 0
    offset: int = 0
    pixels: int | None = None  # None: 128 of .im2col::w::128
    swizzle: str = "64B"
    first_channel: int = 0

    @property
    def rows(self) -> int:
        """Pixels in shared memory."""
        return (self.pixels or 128) + self.halo

    def array(self) -> np.ndarray:
        """Noise uint16 of the shape, 96 channels."""
        return aligned(np.random.default_rng(3).integers(1, 1 << 16, (*self.shape, 96), np.uint16))

    def tensor_map(self, array: np.ndarray) -> Im2colMap:
        """Of the array; corners in H and D do not matter, nor steps."""
        more = [0] * (len(self.shape) - 2)
        channels = SWIZZLES[self.swizzle].span // 2
        lower, upper, steps = ([first, *more] for first in (self.lower, self.upper, self.step))
        steps = [step or 3 for step in steps]
        return map_of(array, lower, upper, channels, self.pixels or 7, steps, self.swizzle)

    def positions(self, *, straight: bool = False) -> list[tuple[int, ...] | None]:
        """Index of each pixel in shared memory, or None outside of the array; `straight`: halos stay in their image."""
        w, *others, image = self.coords
        end = self.shape[-1] + self.upper  # of the box
        walk = [(image, x) for x in range(w, end, self.step)]
        while len(walk) < 128 + 512 + 1024:
            image += 1
            walk += [(image, x) for x in range(self.lower, end, self.step)]
        found, (last, x) = walk[: self.rows], walk[self.rows - self.halo - 1]
        if straight:
            found[self.rows - self.halo :] = [(last, x + (i + 1) * self.step) for i in range(self.halo)]
        places = [(n, *others[::-1], x + self.offset) for n, x in found]
        inside = [all(0 <= p < extent for p, extent in zip(place, self.shape, strict=True)) for place in places]
        return [place if ok else None for place, ok in zip(places, inside, strict=True)]

    def expected(self, array: np.ndarray) -> np.ndarray:
        """uint16 [pixels, channels], zero outside."""
        channels = SWIZZLES[self.swizzle].span // 2
        result = np.zeros((self.rows, channels), np.uint16)
        for row, place in zip(result, self.positions(), strict=True):
            if place is not None:
                have = array[place][self.first_channel : self.first_channel + channels]
                row[: len(have)] = have
        return result

    def text(self, *, multicast: bool = False) -> str:
        """Loads it to shared memory, and copies that to the second parameter."""
        rank, mode = len(self.shape) + 1, "im2col::w::128" if self.pixels is None else "im2col::w"
        coords = (self.first_channel, *self.coords)
        nbytes = self.rows * SWIZZLES[self.swizzle].span
        text = load_text(4, coords, (self.halo, self.offset), nbytes, multicast)
        return text.replace(".4d.", f".{rank}d.").replace(".im2col.", f".{mode}.")


def plain(data: np.ndarray, swizzle: str) -> np.ndarray:
    """Rows of a box as they are without the swizzle; `data` begins at a multiple of 1024 bytes."""
    chunks = data.reshape(-1).view(np.uint8).reshape(-1, 16)
    places = np.arange(len(chunks)) * 16
    bits = {"32B": 1, "64B": 3, "128B": 7}[swizzle]
    return chunks[(places ^ (places >> 7 & bits) << 4) // 16].reshape(-1).view(np.uint16).reshape(data.shape)


COPIES = {
    "w": Copy((3, 11), -2, 1, 1, (4, 0), pixels=37, swizzle="32B"),
    "w from the left of the box": Copy((2, 9), 2, -1, 2, (-1, 0), pixels=16),
    "w in a row that is outside": Copy((2, 5, 9), 0, 0, 1, (3, 5, 0), pixels=16),
    "w, the first of two buffers": Copy((64, 67, 9), -1, 0, 2, (-1, 2, 7), halo=1, pixels=128, swizzle="128B"),
    "w, the second one": Copy((64, 67, 9), -1, 0, 2, (-1, 2, 7), offset=1, pixels=128, swizzle="128B"),
    "w, 5d": Copy((3, 2, 4, 7), -1, -1, 3, (-1, 2, 1, 1), halo=1, offset=2, pixels=10, first_channel=64),
    "w behind the last image": Copy((2, 8), 0, 0, 1, (1, 1), pixels=12),
    "128": Copy((20, 9), 0, 0, 1, (7, 3)),
    "128 behind others": Copy((3, 4, 96), 0, 0, 1, (7, 2, 0), offset=3, swizzle="128B", first_channel=32),
    "128 with a step": Copy((3, 70), -3, 3, 2, (1, 1), swizzle="32B"),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_load_instruction(name: str) -> None:
    copy = COPIES[name]
    array = copy.array()
    out = aligned(np.zeros((copy.rows, SWIZZLES[copy.swizzle].span // 2), np.uint16))
    launch(copy.text(), copy.tensor_map(array), out, reachable=(array,), dynamic_smem=65536)
    np.testing.assert_array_equal(plain(out, copy.swizzle), copy.expected(array))


def test_multicast() -> None:
    copy = COPIES["128 behind others"]
    array = copy.array()
    out = aligned(np.zeros((2, copy.rows, SWIZZLES[copy.swizzle].span // 2), np.uint16))
    text = copy.text(multicast=True)
    launch(text, copy.tensor_map(array), out, reachable=(array,), dynamic_smem=65536, grid=(2, 1, 1), cluster=(2, 1, 1))
    for half in out:
        np.testing.assert_array_equal(plain(half, copy.swizzle), copy.expected(array))


@st.composite
def copies(draw) -> Copy:
    """A copy that starts left of the end of its box."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) + (draw(st.integers(1, 80)),)
    lower = draw(st.integers(-3, 2))
    upper = draw(st.integers(max(-3, lower + 1 - shape[-1]), 3))
    if len(shape) == 4:
        lower, upper = max(lower, -16), min(upper, 15)
    w = draw(st.integers(lower - 4, shape[-1] + upper - 1))
    others = [draw(st.integers(-1, extent)) for extent in shape[-2::-1]]
    wide = draw(st.booleans())
    return Copy(
        shape, lower, upper, draw(st.integers(1, 8)), (w, *others), draw(st.integers(0, 31)), draw(st.integers(0, 31)),
        None if wide else draw(st.integers(1, 90)), draw(st.sampled_from(["32B", "64B"])),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(copies())
def test_load_moves_the_listed_pixels_or_says_that_they_are_not_known(case: Copy) -> None:
    array = case.array()
    machine = Machine(array, detectors=False)
    nbytes = case.rows * SWIZZLES[case.swizzle].span
    machine.barriers.expect_tx(BARRIER, nbytes)
    copy = machine.tensor_copy(bulk.LOAD, encode(case.tensor_map(array)), (0, *case.coords), DATA)
    copy.signal, copy.mask, copy.halo, copy.offsets[0] = BARRIER, -1, case.halo, case.offset
    copy.mode = CONSTANTS["MODE_W_128" if case.pixels is None else "MODE_W"]
    if case.halo and case.pixels is None or case.positions() != case.positions(straight=True):
        with pytest.raises(UnsupportedPTX, match=WHERE_128 if case.pixels is None else LEFT_OPEN):
            machine.issue(copy)
        return
    machine.issue(copy)
    data = machine.ctas[0].data[DATA : DATA + nbytes].view(np.uint16).reshape(case.rows, -1)
    np.testing.assert_array_equal(plain(data, case.swizzle), case.expected(array))


#: What cuTensorMapEncodeIm2colWide of CUDA 13.0 made on an H200 of both modes, by the size of the tensor, and of what.
ENCODED = {
    (64, 30, 5): ("12345680 7f00 4321 8 f0 0 0 0 3f 1d 4 0 0 1f000000 12bfed4 5f", -300, 299),
    (128, 10, 6, 4): ("12345680 7f00 4331 10 a0 3c0 0 0 7f 9 5 3 0 1f000000 fe00ff 5f", -1, -2),
    (64, 9, 8, 7, 3): ("12345680 7f00 4341 8 48 240 fc0 0 3f 8 7 6 2 1f000000 20003 5f", 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("extents", ENCODED)
def test_maps_are_those_of_im2col_with_no_corners_in_h_and_d(extents: tuple[int, ...]) -> None:
    words, lower, upper = ENCODED[extents]
    data = struct.pack("<32I", *(int(word, 16) for word in words.split()), *[0] * 16)
    strides = tuple(2 * math.prod(extents[:d]) for d in range(1, len(extents)))
    more = (0,) * (len(extents) - 3)
    expected = Im2colMap(
        0x7F0012345680, "f16", extents, strides, (lower, *more), (upper, *more), 32, 96, (1,) * len(extents), "64B"
    )
    assert decode(data) == expected
    assert encode(expected) == data


LOAD = Copy((3, 4, 40), -1, -2, 1, (2, 1, 0), halo=2, offset=1, pixels=16)
REFUSED = {
    "halo": ({"halo": 512}, IllegalAccess, "wHalo 512 and wOffset 1; legal are 0 to 511, and 0 to 31"),
    "halo of 128": ({"halo": 32, "pixels": None}, IllegalAccess, "wHalo 32 and wOffset 1; legal are 0 to 31, and"),
    "any halo of 128": ({"halo": 1, "pixels": None}, UnsupportedPTX, "::128 with wHalo 1: .*" + WHERE_128),
    "offset": ({"offset": 32}, IllegalAccess, "wHalo 2 and wOffset 32; legal"),
    "right": ({"coords": (38, 1, 0)}, IllegalAccess, "W = 38 is outside of the bounding box, -1 to 37"),
    "behind": ({"coords": (22, 1, 0)}, UnsupportedPTX, LEFT_OPEN),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_operands_that_do_not_fit_are_named(name: str) -> None:
    change, error, message = REFUSED[name]
    array = LOAD.array()
    out = aligned(np.zeros((LOAD.rows, 32), np.uint16))
    text = Copy(**{**vars(LOAD), **change}).text()
    with pytest.raises(error, match=message):
        launch(text, LOAD.tensor_map(array), out, reachable=(array,), dynamic_smem=65536)


def test_maps_and_operands_of_other_modes_are_refused() -> None:
    array = LOAD.array()
    out = aligned(np.zeros((LOAD.rows, 32), np.uint16))
    without = map_of(array, (-1, 0), (-2, 0), 32, 16, (1, 1))
    with pytest.raises(IllegalAccess, match="loads along W take a tensor map with a swizzle"):
        launch(LOAD.text(), without, out, reachable=(array,), dynamic_smem=65536)
    for old, new, message in (
        ("{%h0, %h1}", "{%h0}", "must be a list of 2 registers"),
        ("sm_100a", "sm_90a", "sm_90a does not have it"),
        (".4d.", ".2d.", "2d"),
        ("::w.", "::w::64.", "im2col::w::64"),
    ):
        assert LOAD.text().replace(old, new) != LOAD.text()
        with pytest.raises(EmulatorError, match=message):
            launch(LOAD.text().replace(old, new), without, out, reachable=(array,), dynamic_smem=65536)
