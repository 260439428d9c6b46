"""Programs around asynchronous units: tensor cores of SM100, clusters, copies with their barriers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, TensorMap, encode
from cute_kernels.testing.ptx import module
from tests.emulator import record_tma_on_gpu as recorder
from tests.emulator.cluster_launches import CTAS, PLACE
from tests.emulator.fuzz.program import Program, on_arrays
from tests.emulator.machine.state import test_pair_allocation
from tests.emulator.machine.units.copies import test_im2col
from tests.emulator.machine.units.matrix import test_shift
from tests.emulator.machine.units.matrix.test_scaled_mma import (
    INSTRUCTION,
    Case,
    operands,
    program_inputs,
    program_with,
)
from tests.emulator.machine.units.test_units import MULTICAST
from tests.emulator.oracle.launches import address_of
from tests.emulator.public_bugs import BUGS

_SCALED = (
    (".scale_vec::1X", Case("mxf8f6f4", ("e4m3", "e2m1"), n=16)),
    (".block32", Case("mxf8f6f4", ("e3m2", "e5m2"), n=16)),
    ("", Case("mxf4", ("e2m1", "e2m1"), count=2, n=16)),
    (".block16", Case("mxf4nvf4", ("e2m1", "e2m1"), "ue4m3", count=4, n=16)),
    (".scale_vec::2X", Case("mxf4nvf4", ("e2m1", "e2m1"), count=2, n=16)),
)
#: Kinds without scales, and the instruction descriptor's types of D, A and B.
_PLAIN = (
    ("f8f6f4", 1, 0, 1), ("f8f6f4", 0, 5, 4), ("f16", 1, 0, 0), ("f16", 0, 0, 0), ("tf32", 1, 2, 2), ("i8", 2, 1, 1),
)  # fmt: skip
_ROWS, _COLUMNS = 128, 16
#: %r5 = the CTA of the cluster that is next, %r6 = the thread's word there, %r7 = its word here.
_NEIGHBOUR = """mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mov.b32 %r7, dynamic; mad.lo.u32 %r7, %r1, 4, %r7;
    add.u32 %r7, %r7, 64; mapa.shared::cluster.u32 %r6, %r7, %r5;"""
_MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
_READY = f"""@!%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 128; READY: {_MEET}"""
_WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [dynamic], 0; @!%p7 bra W;"
#: Bodies of `CTAS` CTAs on 32 words each; by name, with the CTAs of a cluster.
_CLUSTERS = {
    "own words": (1, "ld.global.b32 %r9, [%d1]; add.u32 %r9, %r9, %r2; st.global.b32 [%d1], %r9; ret;"),
    "a counter": (1, "@!%p1 bra L; atom.global.add.u32 %r9, [%d0], 1; L: st.global.b32 [%d1+4], %r2; ret;"),
    "a message": (
        1, "@!%p1 bra L; @%p2 st.release.gpu.global.b32 [%d0], %r2; @%p3 ld.acquire.gpu.global.b32 %r9, [%d0]; L: ret;"
    ),
    "a chain": (1, "@!%p2 ld.global.b32 %r9, [%d1+128]; st.global.b32 [%d1], %r9; ret;"),
    "a neighbour's words": (
        2, f"""{_NEIGHBOUR} st.shared::cluster.u32 [%r6], %r1; {_MEET} ld.shared.u32 %r9, [%r7];
        st.global.b32 [%d1], %r9; ret;"""
    ),
    "st.async": (
        2, f"""{_NEIGHBOUR} {_READY} mov.b32 %r8, dynamic; mapa.shared::cluster.u32 %r8, %r8, %r5;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r1, [%r8]; {_WAIT}
        ld.shared.u32 %r9, [%r7]; st.global.b32 [%d1], %r9; {_MEET} ret;"""
    ),
    "red.async": (
        2, f"""{_NEIGHBOUR} st.shared.u32 [%r7], %r2; {_READY} mov.b32 %r8, dynamic;
        mapa.shared::cluster.u32 %r8, %r8, %r5;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6], %r1, [%r8]; {_WAIT}
        ld.shared.u32 %r9, [%r7]; st.global.b32 [%d1], %r9; {_MEET} ret;"""
    ),
    "bulk copies between CTAs": (
        2, f"""{_NEIGHBOUR} st.shared.u32 [%r7+128], %r1; fence.proxy.async.shared::cta; {_READY} @!%p1 bra W;
        mov.b32 %r8, dynamic; mapa.shared::cluster.u32 %r8, %r8, %r5;
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6], [%r7+128], 128, [%r8]; {_WAIT}
        ld.shared.u32 %r9, [%r7]; st.global.b32 [%d1], %r9; {_MEET} ret;"""
    ),
    "a bulk copy to all": (
        3, f"""{_NEIGHBOUR} {_READY} @!%p1 bra W; setp.ne.u32 %p4, %r4, 0; @%p4 bra W; mov.b16 %h1, 7;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r7], [%d0+768], 128, [dynamic], %h1; {_WAIT} ld.shared.u32 %r9, [%r7]; st.global.b32 [%d1], %r9;
        {_MEET} ret;"""
    ),
    "a remote arrival": (
        2, f"""{_NEIGHBOUR} @!%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
        fence.mbarrier_init.release.cluster; READY: {_MEET} @!%p1 bra W; mov.b32 %r8, dynamic;
        mapa.shared::cluster.u32 %r8, %r8, %r5; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8]; {_WAIT}
        st.global.b32 [%d1], %r5; {_MEET} ret;"""
    ),
}  # fmt: skip


def tensor_cores() -> Iterator[Program]:
    """tcgen05: scaled and plain products, copies, allocation by pairs of CTAs, shifts, loads and stores."""
    for number, (vector, case) in enumerate(_SCALED):
        elements, scales = operands(case)
        image, descriptors = program_inputs(case, elements, scales)
        text = program_with(INSTRUCTION.format(f"{case.kind}.block_scale{vector}", case.word()))
        yield _product(f"scaled product {number} {case.kind}{vector}", text, image, descriptors)
    case = _SCALED[0][1]
    image, descriptors = program_inputs(case, *operands(case))
    for kind, d, a, b in _PLAIN:
        word = d << 4 | a << 7 | b << 10 | case.n // 8 << 17 | case.m // 16 << 24
        text = program_with(f"tcgen05.mma.cta_group::1.kind::{kind} [%r8], %d8, %d9, {word}, %p4;")
        yield _product(f"product {kind} {d} {a} {b}", text, image, descriptors)
    pair = {"grid": (2, 1, 1), "block": (128, 1, 1), "cluster": (2, 1, 1)}
    out = np.zeros((2, _ROWS, _COLUMNS), np.uint32)
    yield on_arrays("copy of a pair", test_pair_allocation.kernel(), out[..., :4], **pair)
    for group, shape in ((1, {"block": (128, 1, 1)}), (2, pair)):
        for stores in ("x16", "x8"):
            text = test_shift.kernel(f"tcgen05.shift.cta_group::{group}.down [%r20];", group=group, stores=stores)
            yield on_arrays(f"shift {group} {stores}", text, out[:group], **shape)


def _product(name: str, text: str, image: np.ndarray, descriptors: tuple[int, int]) -> Program:
    out = np.zeros((_ROWS, _COLUMNS), np.float32)
    return on_arrays(name, text, image, out, numbers=descriptors, block=(_ROWS, 1, 1), shared=8192)


def clusters() -> Iterator[Program]:
    """Clusters that exchange data, are independent or not; copies to several CTAs; copies of pixels."""
    for name, (ctas, body) in _CLUSTERS.items():
        text = module(f"{PLACE} {body}", parameters=1)
        shape = {"grid": (CTAS, 1, 1), "cluster": (ctas, 1, 1)}
        yield on_arrays(f"clusters: {name}", text, np.arange(32 * CTAS + 32, dtype=np.uint32), **shape)
    rows = 16
    for swizzle in ("none", "32B", "64B", "128B"):
        inner = SWIZZLES[swizzle].span or 128
        tensor_map = TensorMap(address_of(1), "u8", (128, 64), (128,), (inner, rows), (1, 1), swizzle)
        text = module(MULTICAST.replace("BYTES", str(2 * rows * inner)))
        source, out = recorder.noise(77, 64 * 128), np.zeros((4, 4096), np.uint8)
        shape = {"grid": (4, 1, 1), "cluster": (4, 1, 1), "shared": 8192}
        yield _through_map(f"multicast {swizzle}", text, encode(tensor_map), source, out, **shape)
    for name in test_im2col.CASES:
        array, tensor_map, coords, offsets = test_im2col.case_of(name)
        tensor_map = dataclasses.replace(tensor_map, address=address_of(1))
        out = np.zeros((2, tensor_map.pixels, tensor_map.channels), np.uint16)
        for ctas in (1, 2):
            text = test_im2col.load_text(tensor_map.rank, coords, offsets, tensor_map.box_bytes, ctas == 2)
            shape = {"grid": (ctas, 1, 1), "cluster": (ctas, 1, 1), "shared": 8192}
            yield _through_map(f"im2col {name}, {ctas}", text, encode(tensor_map), array, out, **shape)


def _through_map(
    name: str, text: str, tensor_map: bytes, array: np.ndarray, out: np.ndarray, **shape: object
) -> Program:
    """Of parameters p0, the address of a tensor map of the second buffer, and p1, the address of the third."""
    program = on_arrays(name, text, np.frombuffer(tensor_map, np.uint8), array, out, **shape)
    return dataclasses.replace(program, params=(program.params[0], program.params[2]))


def synchronisation() -> Iterator[Program]:
    """Faults of public projects and what mends them."""
    for name, bug in BUGS.items():
        for fixed in (True, False):
            values = np.arange(100, 1124, dtype=np.uint32)
            text = bug.kernel(fixed=fixed)
            yield on_arrays(f"{name}, {'fixed' if fixed else 'faulty'}", text, values, **bug.shape)
