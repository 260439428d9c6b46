"""Tensor maps in im2col mode: their bytes against CuTe DSL's encoder, copies against a walk over the pixels and conv2d.

The launches run on an sm_90 GPU too (EMULATOR_HW=1), so that it judges the encoding and the order of the pixels.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import BFloat16
from cutlass.cute.runtime import make_ptr
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Im2colMap, TensorMap
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.smem import shared_address
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, decode, encode
from cute_kernels.emulator.programs import host
from cute_kernels.testing.ptx import aligned, module
from tests.emulator import host_kernels as kernels
from tests.emulator.copies import BARRIER, DATA, Machine
from tests.emulator.ptx_launch import launch


def map_of(array: np.ndarray, lower, upper, channels: int, pixels: int, steps, swizzle: str = "none") -> Im2colMap:
    """The map of an array [N, (D, (H,)) W, C]."""
    return Im2colMap(
        address=array.ctypes.data,
        dtype={1: "u8", 2: "u16", 4: "u32"}[array.itemsize],
        extents=array.shape[::-1],
        strides=array.strides[::-1][1:],
        lower_corner=tuple(lower),
        upper_corner=tuple(upper),
        channels=channels,
        pixels=pixels,
        element_strides=(1, *steps, 1),
        swizzle=swizzle,
    )


def walked(array: np.ndarray, tensor_map: Im2colMap, coords, offsets) -> np.ndarray:
    """One copy, walking from pixel to pixel as the PTX ISA describes it: [pixels, channels]."""
    channel, *position, image = coords
    result = np.zeros((tensor_map.pixels, tensor_map.channels), array.dtype)
    spatial = array.shape[-2:0:-1]
    for pixel in range(tensor_map.pixels):
        place = [p + o for p, o in zip(position, offsets, strict=True)]
        if 0 <= image < len(array) and all(0 <= p < extent for p, extent in zip(place, spatial, strict=True)):
            for c in range(max(-channel, 0), tensor_map.channels):
                if channel + c < array.shape[-1]:
                    result[pixel, c] = array[(image, *place[::-1], channel + c)]
        for d, extent in enumerate(spatial):
            position[d] += tensor_map.element_strides[1 + d]
            if position[d] <= extent - 1 + tensor_map.upper_corner[d]:
                break
            position[d] = tensor_map.lower_corner[d]
        else:
            image += 1
    return result


def loaded(array: np.ndarray, tensor_map: Im2colMap, coords, offsets) -> np.ndarray:
    """One copy as the emulator does it: uint8 [pixels, bytes]."""
    machine = Machine(array, detectors=False)
    machine.barriers.expect_tx(BARRIER, tensor_map.box_bytes)
    machine.load(encode(tensor_map), coords, DATA, BARRIER, offsets=offsets)
    return machine.ctas[0].data[DATA : DATA + tensor_map.box_bytes].reshape(tensor_map.pixels, -1)


# --- the 128 bytes ----------------------------------------------------------------------------------------------------

ENCODED = {
    "3d": {"extents": (64, 30, 5), "lower_corner": (-300,), "upper_corner": (299,), "channels": 16, "pixels": 64,
           "steps": (3,), "swizzle": "32B"},
    "4d": {"extents": (32, 10, 6, 4), "lower_corner": (-1, -2), "upper_corner": (-3, 4), "channels": 32, "pixels": 96,
           "steps": (1, 2), "swizzle": "64B"},
    "5d": {"extents": (128, 9, 8, 7, 3), "lower_corner": (-1, -2, -3), "upper_corner": (4, -5, 6), "channels": 64,
           "pixels": 32, "steps": (2, 1, 4), "swizzle": "128B"},
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODED)
def test_tensor_map_as_cute_dsl_encodes_it(name: str, tmp_path):
    facts = dict(ENCODED[name])
    steps, extents = facts.pop("steps"), facts["extents"]
    strides = tuple(math.prod(extents[:d]) for d in range(1, len(extents)))
    address = 0x7F0012345680
    shape = (facts["pixels"], facts["channels"], facts["lower_corner"], facts["upper_corner"], steps, facts["swizzle"])
    pointer = make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    arguments = kernels.tensor_map_arguments(pointer, extents, strides)
    with host.recording_runtime():
        options = f"--gpu-arch=sm_90a --keep-ptx --dump-dir={tmp_path}"
        function = cute.compile(kernels.Im2colMapHost(*shape), *arguments, options=options)
    recorded = host.record(function, *arguments)
    (data,) = (value for value in recorded.params if len(value) >= 128)
    expected = Im2colMap(
        address=address,
        dtype="bf16",
        strides=tuple(2 * stride for stride in strides),
        element_strides=(1, *steps, 1),
        l2_promotion=2,
        **facts,
    )
    assert decode(data[:128]) == expected
    ignored = bytes(8) + struct.pack("<I", 1 << 1 | 1 << 21)  # as in tiled maps
    ours = encode(expected)
    assert bytes(b & ~m for b, m in zip(data[:64], ignored.ljust(64, b"\0"))) == ours[:64]
    assert decode(ours) == expected


BASE = Im2colMap(0x10000, "f16", (64, 9, 14, 64), (128, 1152, 16128), (-1, -1), (-1, -1), 8, 64, (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"extents": (64, 9), "strides": (128,), "element_strides": (1, 1)}, IllegalAccess, "rank 2, legal are 3 to 5"),
        ({"lower_corner": (-129, 0)}, IllegalAccess, r"legal are -128 to 127"),
        ({"upper_corner": (0, 128)}, IllegalAccess, r"legal are -128 to 127"),
        ({"lower_corner": (0,)}, IllegalAccess, "3 coordinates of corners for rank 4"),
        ({"lower_corner": (8, 0)}, IllegalAccess, r"an empty bounding box: \(0, 13\) positions"),
        ({"address": 1 << 63}, IllegalAccess, "global address 0x8000000000000000, where no device has memory"),
        ({"channels": 257}, IllegalAccess, "257 channels per pixel"),
        ({"channels": 4}, IllegalAccess, "rows of 8 bytes"),
        ({"pixels": 1025}, IllegalAccess, "1025 pixels per column"),
        ({"channels": 32, "swizzle": "32B"}, IllegalAccess, "in a swizzle span of 32"),
        ({"element_strides": (1, 1, 9, 1)}, IllegalAccess, "element strides"),
        ({"element_strides": (1, 1, 1, 2)}, UnsupportedPTX, "those of C and N are 1"),
    ],
)  # fmt: skip
def test_illegal_maps_are_named(change: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        dataclasses.replace(BASE, **change)


# --- which pixels -----------------------------------------------------------------------------------------------------


@st.composite
def copies(draw):
    """An array, a map of it, coordinates in its bounding box and offsets."""
    spatial = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)), *(draw(st.integers(1, 6)) for _ in range(spatial)), 16 * draw(st.integers(1, 3))]
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, shape, np.uint8)
    lower = [draw(st.integers(-3, 2)) for _ in range(spatial)]
    upper = [draw(st.integers(max(-3, low + 1 - extent), 3)) for low, extent in zip(lower, shape[-2:0:-1], strict=True)]
    steps = [draw(st.integers(1, 3)) for _ in range(spatial)]
    channels, pixels = 16 * draw(st.integers(1, 3)), draw(st.integers(1, 80))
    tensor_map = map_of(array, lower, upper, channels, pixels, steps)
    first = [draw(st.integers(low, low + size - 1)) for low, size in zip(lower, tensor_map.box, strict=True)]
    coords = (16 * draw(st.integers(-1, 3)), *first, draw(st.integers(-1, 3)))
    return array, tensor_map, coords, tuple(draw(st.integers(0, 4)) for _ in range(spatial))


@settings(max_examples=150, deadline=None)
@given(copies())
def test_load_moves_the_pixels_of_a_walk(copy):
    array, tensor_map, coords, offsets = copy
    data = loaded(array, tensor_map, coords, offsets)
    np.testing.assert_array_equal(data, walked(array, tensor_map, coords, offsets))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), ((1, 2), (2, 1), (2, 1)), (3, 2, 2)])
def test_convolution(stride, padding, dilation):
    """An implicit GEMM over im2col tiles is torch's conv2d."""
    (sh, sw), (ph, pw), (dh, dw) = (x if isinstance(x, tuple) else (x, x) for x in (stride, padding, dilation))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (2, 32, 9, 11), generator=generator, dtype=torch.int16)
    weight = torch.randint(-8, 9, (5, 32, 3, 2), generator=generator, dtype=torch.int16)
    expected = torch.nn.functional.conv2d(
        x.float(), weight.float(), stride=(sh, sw), padding=(ph, pw), dilation=(dh, dw)
    )
    array = aligned(x.permute(0, 2, 3, 1).contiguous().numpy().view(np.uint16))
    r, s = weight.shape[2:]
    out = expected.shape
    tensor_map = map_of(array, (-pw, -ph), (pw - (s - 1) * dw, ph - (r - 1) * dh), 16, 40, (sw, sh))
    places = [(n, p, q) for n in range(out[0]) for p in range(out[2]) for q in range(out[3])]
    result = np.zeros((len(places), out[1]), np.int64)
    for start in range(0, len(places), 40):
        n, p, q = places[start]
        for h, w, c in np.ndindex(r, s, 2):
            coords = (16 * c, q * sw - pw, p * sh - ph, n)
            tile = loaded(array, tensor_map, coords, (w * dw, h * dh)).view(np.int16)
            part = tile.astype(np.int64) @ weight[:, 16 * c : 16 * c + 16, h, w].numpy().T.astype(np.int64)
            result[start : start + 40] += part[: len(places) - start]
    np.testing.assert_array_equal(result.reshape(out[0], out[2], out[3], -1).transpose(0, 3, 1, 2), expected.numpy())


# --- instructions -----------------------------------------------------------------------------------------------------

COPY_OUT = """
mov.u32 %r2, %cluster_ctarank; mul.lo.u32 %r7, %r2, BYTES; mul.lo.u32 %r8, %r1, 4; add.u32 %r9, %r7, %r8;
cvt.u64.u32 %d4, %r9; add.u64 %d4, %d4, %d1; add.u32 %r10, %r3, %r8;
COPY: ld.shared.b32 %r12, [%r10+1024]; st.global.b32 [%d4], %r12; add.u32 %r10, %r10, 128; add.u64 %d4, %d4, 128;
add.u32 %r8, %r8, 128; setp.lt.u32 %p3, %r8, BYTES; @%p3 bra COPY;
"""
LOAD = """
mov.u32 %r1, %tid.x; mov.u32 %r3, dynamic; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], BYTES;
READY: barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra WAIT;
mov.u32 %r2, %cluster_ctarank; setp.ne.u32 %p4, %r2, 0; @%p4 bra WAIT; OFFSETS
ISSUE
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra WAIT;
""" + COPY_OUT + "barrier.cluster.arrive; barrier.cluster.wait; ret;"
CASES = {
    "3d": ((2, 11, 32), (-2,), (1,), 16, 37, (2,), (16, 0, 0), (1,)),
    "4d": ((3, 7, 9, 32), (-1, -1), (-1, -1), 16, 64, (1, 1), (0, 7, 4, 0), (2, 1)),
    "4d with steps": ((2, 7, 9, 48), (-1, -2), (0, -1), 16, 64, (2, 3), (32, 1, -2, 0), (1, 2)),
    "4d that ends behind the last image": ((2, 4, 5, 16), (0, 0), (0, 0), 16, 64, (1, 1), (0, 2, 1, 1), (0, 0)),
    "5d": ((2, 4, 5, 6, 32), (-1, -1, -1), (0, -1, 0), 32, 48, (1, 2, 1), (0, 2, 1, 0, 0), (1, 0, 2)),
}


def load_text(rank: int, coords, offsets, nbytes: int, multicast: bool = False) -> str:
    """Loads one column to dynamic + 1024 of CTA 0, or of both CTAs."""
    registers = [f"%h{i}" for i in range(rank - 2)]
    values = " ".join(f"mov.b16 {name}, {value};" for name, value in zip(registers, offsets, strict=True))
    more = ".multicast::cluster" if multicast else ""
    issue = (
        f"mov.b16 %h9, 3; cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes{more}"
        f" [%r3+1024], [%d0, {{{', '.join(map(str, coords))}}}], [dynamic], {{{', '.join(registers)}}}"
        f"{', %h9' if multicast else ''};"
    )
    return module(LOAD.replace("OFFSETS", values).replace("ISSUE", issue).replace("BYTES", str(nbytes)))


def case_of(name: str, swizzle: str = "none"):
    shape, lower, upper, channels, pixels, steps, coords, offsets = CASES[name]
    array = aligned(np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16))
    return array, map_of(array, lower, upper, channels, pixels, steps, swizzle), coords, offsets


@pytest.mark.parametrize("name", CASES)
def test_load_instruction(name: str):
    array, tensor_map, coords, offsets = case_of(name)
    out = aligned(np.zeros((tensor_map.pixels, tensor_map.channels), np.uint16))
    text = load_text(tensor_map.rank, coords, offsets, tensor_map.box_bytes)
    launch(text, tensor_map, out, reachable=(array,), dynamic_smem=8192)
    expected = walked(array, tensor_map, coords, offsets)
    assert 0 < np.count_nonzero(expected) < expected.size  # some of it is out of bounds
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
def test_pixels_are_swizzled_as_rows_of_a_tile(swizzle: str):
    array, tensor_map, coords, offsets = case_of("4d", swizzle)
    pattern = SWIZZLES[swizzle]
    out = aligned(np.zeros(tensor_map.pixels * pattern.span, np.uint8))
    text = load_text(4, coords, offsets, tensor_map.box_bytes)
    text = text.replace(f"%r8, {tensor_map.box_bytes}", f"%r8, {out.size}")
    text = text.replace("READY:", f"mov.b32 %r20, dynamic; mov.b32 %r21, 0; FILL: add.u32 %r22, %r20, %r21; "
                        f"st.shared.b32 [%r22+1024], 0; add.u32 %r21, %r21, 4; setp.lt.u32 %p7, %r21, {out.size}; "
                        "@%p7 bra FILL; fence.proxy.async; READY:")  # fmt: skip
    launch(text, tensor_map, out, reachable=(array,), dynamic_smem=16384)
    data = walked(array, tensor_map, coords, offsets).view(np.uint8)
    expected = np.zeros_like(out)
    for i, value in np.ndenumerate(data):
        address = i[0] * pattern.span + i[1]
        bits = {"32B": 1, "64B": 3, "128B": 7}[swizzle]
        expected[address ^ (address >> 7 & bits) << 4] = value
    np.testing.assert_array_equal(out, expected)


def test_multicast():
    array, tensor_map, coords, offsets = case_of("4d")
    out = aligned(np.zeros((2, tensor_map.pixels, tensor_map.channels), np.uint16))
    text = load_text(4, coords, offsets, tensor_map.box_bytes, multicast=True)
    launch(text, tensor_map, out, reachable=(array,), dynamic_smem=8192, grid=(2, 1, 1), cluster=(2, 1, 1))
    for half in out:
        np.testing.assert_array_equal(half, walked(array, tensor_map, coords, offsets))


STORE = """
mov.u32 %r1, %tid.x; mov.u32 %r3, dynamic; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
mul.lo.u32 %r8, %r1, 4; cvt.u64.u32 %d2, %r8; add.u64 %d2, %d2, %d1; add.u32 %r9, %r3, %r8;
FILL: ld.global.b32 %r10, [%d2]; st.shared.b32 [%r9], %r10; add.u64 %d2, %d2, 128; add.u32 %r9, %r9, 128;
add.u32 %r8, %r8, 128; setp.lt.u32 %p1, %r8, BYTES; @%p1 bra FILL;
fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p2, %r1, 0; @%p2 bra DONE;
INSTRUCTION [%d0, {COORDS}], [%r3]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE: ret;
"""
NO_OFFSETS = "global.shared::cta.im2col_no_offs.bulk_group"


STORES = pytest.mark.parametrize(
    ("shape", "upper", "pixels", "steps", "coords"),
    [
        ((2, 11, 32), (0,), 18, (1,), (16, 5, 0)),
        ((3, 5, 6, 48), (0, -1), 64, (1, 2), (32, 3, 2, 1)),
        ((2, 3, 4, 5, 16), (0, 0, 0), 100, (1, 1, 1), (0, 1, 1, 1, 0)),
    ],
)


@STORES
def test_a_store_reads_the_pixels_in_bounds(shape, upper, pixels: int, steps, coords):
    """What it does not store need not hold data; without one element of what it stores, it is reported."""
    array = aligned(np.zeros(shape, np.uint32))
    tensor_map = map_of(array, (0,) * len(upper), upper, 8, pixels, steps)
    numbers = np.arange(array.size, dtype=np.int64).reshape(shape) + 1
    needed = np.flatnonzero(walked(numbers, tensor_map, coords, (0,) * len(upper)).reshape(-1) > 0)
    assert 0 < len(needed) < pixels * 8
    for left_out in (-1, needed[0], needed[-1]):
        machine = Machine(array)
        for place in needed[needed != left_out].tolist():
            machine.shared.view(shared_address(0, DATA + 4 * place), 4, write=True)[...] = 1
        if left_out < 0:
            machine.store(encode(tensor_map), coords, DATA, im2col=True)
            assert array.view(np.uint32).astype(bool).sum() == len(needed)
            continue
        with pytest.raises(IllegalAccess, match="read of uninitialised shared memory"):
            machine.store(encode(tensor_map), coords, DATA, im2col=True)


@pytest.mark.parametrize("reduction", ["", "add"])
@STORES
def test_store_instruction(shape, upper, pixels: int, steps, coords, reduction: str):
    rng = np.random.default_rng(2)
    array = aligned(rng.integers(0, 1 << 32, shape, np.uint32))
    tensor_map = map_of(array, (0,) * len(upper), upper, 8, pixels, steps)
    column = aligned(rng.integers(0, 1 << 32, (pixels, 8), np.uint32))
    numbers = np.arange(array.size, dtype=np.int64).reshape(shape) + 1
    places = walked(numbers, tensor_map, coords, (0,) * len(upper))
    expected = array.copy().reshape(-1)
    inside = places > 0
    assert inside.any()
    old = expected[places[inside] - 1] if reduction else 0
    expected[places[inside] - 1] = column[inside] + old
    opcode = f"cp.{'reduce.' if reduction else ''}async.bulk.tensor.{len(shape)}d.{NO_OFFSETS}"
    if reduction:
        opcode = opcode.replace("shared::cta.", "shared::cta.add.")
    text = STORE.replace("INSTRUCTION", opcode).replace("COORDS", ", ".join(map(str, coords)))
    launch(module(text.replace("BYTES", str(column.nbytes))), tensor_map, column, reachable=(array,), dynamic_smem=8192)
    np.testing.assert_array_equal(array.reshape(-1), expected)


def test_operands_that_do_not_fit_are_named():
    array, tensor_map, coords, offsets = case_of("4d")
    out = aligned(np.zeros((tensor_map.pixels, tensor_map.channels), np.uint16))
    nbytes = tensor_map.box_bytes
    tiled = TensorMap(array.ctypes.data, "u16", array.shape[::-1], array.strides[::-1][1:], (16, 8, 4, 2), (1,) * 4)
    good = load_text(4, coords, offsets, nbytes)
    for text, map_, error, message in (
        (good, tiled, IllegalAccess, "copy in im2col mode through a tensor map in tiled mode"),
        (good.replace(".im2col", ".tile").replace("], {%h0, %h1}", "]"), tensor_map, IllegalAccess,
         "copy in tiled mode through a tensor map in im2col mode"),
        (load_text(4, (0, 9, 4, 0), offsets, nbytes), tensor_map, IllegalAccess,
         "W = 9 is outside of the bounding box, -1 to 7"),
        (load_text(4, (0, 7, -2, 0), offsets, nbytes), tensor_map, IllegalAccess, "H = -2 is outside"),
        (load_text(4, coords, (256, 0), nbytes), tensor_map, IllegalAccess, r"legal at rank 4 are 0 to 255"),
        (load_text(4, (4, *coords[1:]), offsets, nbytes), tensor_map, IllegalAccess, "no multiple of 16"),
        (good.replace("{%h0, %h1}", "{%h0}"), tensor_map, UnsupportedPTX, "must be a list of 2 registers"),
        (good.replace("], {%h0, %h1}", "]"), tensor_map, UnsupportedPTX, "takes 4 operands"),
    ):  # fmt: skip
        assert text != good or map_ is tiled
        with pytest.raises(error, match=message):
            launch(text, map_, out, reachable=(array,), dynamic_smem=8192)
    stores = STORE.replace("BYTES", "128").replace("INSTRUCTION", f"cp.async.bulk.tensor.4d.{NO_OFFSETS}")
    for first, error, message in (
        ("0, 0, 0, -1", IllegalAccess, "negative coordinates"),
        ("0, 0, 0, 0", UnsupportedPTX, r"store through a map with the lower corner \(-1, -1\)"),
    ):
        with pytest.raises(error, match=message):
            launch(module(stores.replace("COORDS", first)), tensor_map, out, reachable=(array,), dynamic_smem=8192)
