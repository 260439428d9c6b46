"""tcgen05.mma with elements of four and six bits and with block scaling: where they lie, and what is refused.

Elements and scales are such that FP32 has all sums exactly; how sums are rounded is in test_scaled_products.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess, TensorMemoryRace, UnsupportedPTX
from cute_kernels.emulator.machine.state.tmem import rectangle, tensor_address
from cute_kernels.emulator.machine.units.matrix.operands import decode_scaled
from cute_kernels.emulator.machine.units.matrix.tensor_copy import copy_to_tensor_memory
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.machine.units.matrix.test_tensor_core import A, B, Layout, Machine, accumulator
from tests.emulator.ptx_launch import launch

TYPES = {
    "e4m3": (0, 8, ml_dtypes.float8_e4m3fn),
    "e5m2": (1, 8, ml_dtypes.float8_e5m2),
    "e2m3": (3, 6, ml_dtypes.float6_e2m3fn),
    "e3m2": (4, 6, ml_dtypes.float6_e3m2fn),
    "e2m1": (5, 4, ml_dtypes.float4_e2m1fn),
}
SCALE_TYPES = {"ue4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}
SFA, SFB, SOURCE = 300, 320, 180 * 1024  # columns of scales, shared offset of what is copied there


def codes(rng: np.random.Generator, name: str, rows: int, k: int) -> np.ndarray:
    """Of small numbers."""
    values = rng.choice(np.array([-2, -1.5, -1, -0.5, 0, 0, 0.5, 1, 1.5, 2]), (rows, k))
    return values.astype(TYPES[name][2]).view(np.uint8)


def values_of(given: np.ndarray, name: str) -> np.ndarray:
    return given.view(TYPES[name][2]).astype(np.float64)


def rows_of(given: np.ndarray, name: str, padding: int = 0xA5) -> np.ndarray:
    """Codes [rows, K] -> the 32 bytes of each row in shared memory, element by element."""
    bits, k = TYPES[name][1], given.shape[1]
    result = np.zeros((len(given), 32), np.uint8)
    for row, column in np.ndindex(given.shape):
        word = int(given[row, column])
        if k == 64:  # pairs
            result[row, column // 2] |= word << 4 * (column % 2)
            continue
        first = column // 16 * 128 + column % 16 * bits
        for bit in range(bits):
            result[row, (first + bit) // 8] |= (word >> bit & 1) << (first + bit) % 8
    if k == 32 and bits < 8:
        result.reshape(-1, 16)[:, 2 * bits :] = padding
    return result


def put_rows(machine: Machine, rank: int, base: int, rows: np.ndarray, held: int = 16) -> int:
    """Writes K-major rows of 32 bytes, of which the last bytes of each 16 hold nothing; returns the descriptor."""
    layout = Layout("64B", False, 1, len(rows))
    machine.write(rank, base, layout.place(rows))
    starts = [base + layout.offset(row, k) for row in range(len(rows)) for k in (0, 16)]
    empty = np.add.outer(starts, np.arange(held, 16)).reshape(-1).astype(np.int64)
    machine.shared.ctas[rank].states[empty] = 0
    return layout.descriptor(base)


def put_scales(machine: Machine, rank: int, scales: np.ndarray, first: int, column: int, quarters: range) -> None:
    """Codes [rows, count] to bytes from ``first`` on; all other bytes are noise."""
    memory = machine.tmem[rank]
    noise = np.random.default_rng(column).integers(0, 1 << 32, (8, 32), dtype=np.uint64).astype(np.uint32)
    columns = -(-len(scales) // 32)
    for quarter in quarters:
        lanes = slice(32 * quarter, 32 * quarter + 32)
        memory.cells[column : column + columns, lanes] = noise[:columns]
        for (row, which), code in np.ndenumerate(scales):
            place = column + row // 32, 32 * quarter + row % 32
            shift = 8 * (first + which)
            memory.cells[place] = memory.cells[place] & ~np.uint32(255 << shift) | np.uint32(int(code) << shift)
        memory.check(32 * quarter, 32, column, columns, write=True)


@dataclass(frozen=True)
class Case:
    kind: str
    types: tuple[str, str]
    scale: str = "ue8m0"
    count: int = 1
    ids: tuple[int, int] = (0, 0)
    group: int = 1
    m: int = 128
    n: int = 40
    negate: int = 0

    @property
    def k(self) -> int:
        return 32 if self.kind == "mxf8f6f4" else 64

    def word(self) -> int:
        """The instruction descriptor, after the tables of the PTX ISA."""
        types = [TYPES[name][0] if self.k == 32 else 1 for name in self.types]
        word = self.ids[1] << 4 | types[0] << 7 | types[1] << 10 | self.negate << 13 | self.n // 8 << 17
        return word | (self.scale == "ue8m0") << 23 | self.m // 128 << 27 | self.ids[0] << 29


CASES = [
    Case("mxf8f6f4", ("e4m3", "e5m2"), ids=(1, 3)),
    Case("mxf8f6f4", ("e2m3", "e2m1"), ids=(2, 0), n=256, negate=1),
    Case("mxf8f6f4", ("e3m2", "e4m3"), group=2, m=256, n=80, negate=2),
    Case("mxf4", ("e2m1", "e2m1"), count=2, ids=(2, 0)),
    Case("mxf4nvf4", ("e2m1", "e2m1"), count=2, ids=(0, 2), group=2, m=128, n=96),
    Case("mxf4nvf4", ("e2m1", "e2m1"), "ue4m3", count=4, n=136),
    Case("mxf4nvf4", ("e2m1", "e2m1"), "ue4m3", count=4, group=2, m=128, n=256),
    Case("mxf4nvf4", ("e2m1", "e2m1"), "ue8m0", count=4, group=2, m=256, n=16, negate=3),
]


def issue(machine: Machine, case: Case, a: int, b: int, **changes) -> None:
    arguments = {
        "kind": case.kind, "cta_group": case.group, "rank": 0, "d": 0, "a": a, "b": b, "instruction": case.word(),
        "accumulate": False, "scales": (SFA | case.ids[0] << 30, SFB, case.count),
    }  # fmt: skip
    machine.mma(**(arguments | changes))


def operands(case: Case, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Codes of A and B, and of their scales."""
    rng = np.random.default_rng(seed)
    elements = [codes(rng, name, rows, case.k) for name, rows in zip(case.types, (case.m, case.n))]
    numbers = np.array([0.5, 1, 2, 4] if case.scale == "ue8m0" else [0.5, 1.25, 3, 14])
    scales = [rng.choice(numbers, (rows, case.count)).astype(SCALE_TYPES[case.scale]).view(np.uint8)
              for rows in (case.m, case.n)]  # fmt: skip
    return elements, scales


def expected(case: Case, elements: list[np.ndarray], scales: list[np.ndarray]) -> np.ndarray:
    scaled = [
        values_of(x, name) * np.repeat(y.view(SCALE_TYPES[case.scale]).astype(np.float64), case.k // case.count, axis=1)
        for x, y, name in zip(elements, scales, case.types)
    ]
    return (scaled[0] @ scaled[1].T * (-1) ** (case.negate.bit_count())).astype(np.float32)


def prepare(machine: Machine, case: Case, elements: list[np.ndarray], scales: list[np.ndarray]) -> tuple[int, int]:
    """Puts operands and scales in place; the descriptors."""
    rows, columns = case.m // case.group, case.n // case.group
    for rank in range(case.group):
        held = [2 * TYPES[name][1] if case.k == 32 else 16 for name in case.types]
        own = slice(rank * rows, rank * rows + rows)
        a = put_rows(machine, rank, A, rows_of(elements[0][own], case.types[0]), held[0])
        part = elements[1][rank * columns : rank * columns + columns]
        b = put_rows(machine, rank, B, rows_of(part, case.types[1]), held[1])
        put_scales(machine, rank, scales[0][own], case.ids[0], SFA, range(4))
        if rows == 64:  # lanes from 64 on have the upper half of the columns
            half = case.n // 2
            put_scales(machine, rank, scales[1][:half], case.ids[1], SFB, range(2))
            put_scales(machine, rank, scales[1][half:], case.ids[1], SFB, range(2, 4))
        else:
            put_scales(machine, rank, scales[1], case.ids[1], SFB, range(4))
    return a, b


@pytest.mark.parametrize("case", CASES)
def test_scaled_products(case: Case) -> None:
    """Every element and every scale is where the PTX ISA has it; bytes that hold nothing are not read."""
    machine = Machine(case.group)
    elements, scales = operands(case)
    a, b = prepare(machine, case, elements, scales)
    issue(machine, case, a, b)
    want = expected(case, elements, scales)
    np.testing.assert_array_equal(accumulator(machine, case.group, case.m, case.n), want)
    issue(machine, case, a, b, accumulate=True)
    np.testing.assert_array_equal(accumulator(machine, case.group, case.m, case.n), 2 * want)


@pytest.mark.parametrize(("group", "m", "types", "d_type"), [
    (1, 128, ("e2m1", "e2m3"), 1), (1, 64, ("e3m2", "e5m2"), 1), (2, 128, ("e4m3", "e2m1"), 0),
])  # fmt: skip
def test_narrow_elements_without_scales(group: int, m: int, types: tuple[str, str], d_type: int) -> None:
    case = Case("mxf8f6f4", types, group=group, m=m, n=48)
    machine = Machine(group)
    elements, scales = operands(case)
    rows, columns = m // group, case.n // group
    for rank in range(group):
        held = [2 * TYPES[name][1] for name in types]
        a = put_rows(machine, rank, A, rows_of(elements[0][rank * rows : rank * rows + rows], types[0]), held[0])
        part = elements[1][rank * columns : rank * columns + columns]
        b = put_rows(machine, rank, B, rows_of(part, types[1]), held[1])
    word = d_type << 4 | TYPES[types[0]][0] << 7 | TYPES[types[1]][0] << 10 | case.n // 8 << 17 | m // 16 << 24
    issue(machine, case, a, b, kind="f8f6f4", instruction=word, scales=(0, 0, 0))
    got = accumulator(machine, group, m, case.n)
    if d_type == 0:
        got = got.view(np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)
    ones = [np.full_like(x, 127) for x in scales]
    np.testing.assert_array_equal(got, expected(case, elements, ones))


@pytest.mark.parametrize("name", ["e2m1", "e3m2"])
def test_a_in_tensor_memory_is_in_the_middle_of_its_bytes(name: str) -> None:
    """As `tcgen05.cp` with decompression leaves it."""
    case = Case("mxf8f6f4", (name, "e4m3"))
    machine = Machine(1)
    elements, scales = operands(case)
    a, b = prepare(machine, case, elements, scales)
    held = "b4x16_p64" if name == "e2m1" else "b6x16_p32"
    copy_to_tensor_memory(
        machine.core, shape="128x256b", multicast="", cta_group=1, rank=0, address=256, matrix=a, held=held
    )
    raw = machine.tmem[0].cells[256:264].T.copy().view(np.uint8)
    np.testing.assert_array_equal(raw, elements[0] << (2 if name == "e2m1" else 1))
    issue(machine, case, 256, b, a_in_tmem=True)
    np.testing.assert_array_equal(accumulator(machine, 1, 128, case.n), expected(case, elements, scales))


def test_scales_by_copies_are_ordered_with_the_mma_and_others_are_not() -> None:
    """Copies and MMAs of one thread run one after the other; a store of scales has to be waited for."""
    case = Case("mxf4", ("e2m1", "e2m1"), count=2)
    machine = Machine(1, policy="lazy")
    elements, scales = operands(case)
    a, b = prepare(machine, case, elements, scales)
    image = np.zeros((2, 32, 16), np.uint8)  # 32 lanes, four columns of four bytes
    for which, each in enumerate(scales):
        for (row, i), code in np.ndenumerate(each):
            image[which, row % 32, row // 32 * 4 + i] = code
    layout = Layout("none", False, 1, 32)
    for number, column in enumerate((SFA, SFB)):
        base = SOURCE + 4096 * number
        machine.write(0, base, layout.place(image[number]))
        copy_to_tensor_memory(
            machine.core, shape="32x128b", multicast="warpx4", cta_group=1, rank=0, address=column,
            matrix=layout.descriptor(base),
        )  # fmt: skip
    issue(machine, case, a, b)
    machine.engine.drain()
    np.testing.assert_array_equal(accumulator(machine, 1, 128, case.n), expected(case, elements, scales))
    other = Machine(1)
    a, b = prepare(other, case, elements, scales)
    issue(other, case, a, b)
    with pytest.raises(TensorMemoryRace, match="tcgen05.st .* writes TMEM column 303.*tcgen05.mma.*warp 0 read"):
        other.crew.tracker.tensor.store(other.crew[0].agent, rectangle(tensor_address(0, SFA + 3), "32x32b", 1))
    other = Machine(1)
    a, b = prepare(other, case, elements, scales)
    other.crew.tracker.tensor.store(other.crew[0].agent, rectangle(tensor_address(0, SFB), "32x32b", 1))
    with pytest.raises(TensorMemoryRace, match="tcgen05.mma.* reads TMEM column 320.*tcgen05.st .* wrote"):
        issue(other, case, a, b)


def test_scales_that_are_missing_or_differ_between_quarters_are_reported() -> None:
    case = CASES[0]
    machine = Machine(1)
    elements, scales = operands(case)
    a, b = prepare(machine, case, elements, scales)
    with pytest.raises(IllegalAccess, match="read of uninitialised TMEM: lane 0, column 400"):
        issue(machine, case, a, b, scales=(400, SFB, 1))
    with pytest.raises(IllegalAccess, match="scales of B at lane 32"):
        issue(machine, case, a, b, scales=(SFA, SFB | 32 << 16, 1))
    machine.tmem[0].cells[SFA + 1, 64 + 5] ^= 0x0100
    with pytest.raises(IllegalAccess, match="scale 0 of row 37 of A is .* in one quarter of the lanes and .* in an"):
        issue(machine, case, a, b)
    machine.tmem[0].cells[SFA + 1, 64 + 5] ^= 0x0101  # another byte than the one that counts
    issue(machine, case, a, b)
    machine.tmem[0].dealloc(0, 512)
    machine.tmem[0].alloc(256)
    with pytest.raises(IllegalAccess, match="not allocated"):
        issue(machine, case, a, b)


GOOD = CASES[3].word()


@pytest.mark.parametrize(("kind", "count", "word", "error", "message"), [
    ("mxf4", 2, GOOD | 1 << 2, UnsupportedPTX, "sparsity"),
    ("mxf4", 2, GOOD | 1 << 31, UnsupportedPTX, "K of 96"),
    ("mxf4", 2, GOOD | 1 << 24, UnsupportedPTX, "reserved"),
    ("mxf4", 2, GOOD | 1 << 15, UnsupportedPTX, "A of e2m1x2 MN-major"),
    ("mxf4", 2, GOOD & ~(1 << 23), UnsupportedPTX, "scales of type ue4m3; 2 for each row are ue8m0"),
    ("mxf4", 2, GOOD | 1 << 29, IllegalAccess, "scales of A begin in byte 3; 2 begin in a multiple of 2"),
    ("mxf4nvf4", 4, GOOD, IllegalAccess, "scales of A begin in byte 2"),
    ("mxf4", 2, GOOD ^ 3 << 10, UnsupportedPTX, "B type 2; implemented are 1"),
    ("mxf8f6f4", 1, CASES[0].word() | 2 << 7, UnsupportedPTX, "A type 2; implemented are"),
    ("mxf8f6f4", 1, CASES[0].word() & ~(1 << 27), IllegalAccess, "shape 0x40 with cta_group::1; legal are M 128"),
])  # fmt: skip
def test_descriptors_that_are_refused(kind: str, count: int, word: int, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        decode_scaled(kind, count, 1, word)


def test_the_version_of_sparsity_does_not_matter() -> None:
    assert decode_scaled("mxf4", 2, 1, GOOD) == decode_scaled("mxf4", 2, 1, GOOD | 1 << 12)


BYTES = 128 * 32 + 16 * 32 + 2 * 512
#: Copies the image to shared memory, its scales to tensor memory, and stores D.
PROGRAM = f"""
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d5, [p2]; ld.param.u64 %d6, [p3];
    mov.u32 %r0, %tid.x; mov.u32 %r20, dynamic; shl.b32 %r1, %r0, 4; mov.u32 %r9, 0;
    COPY: cvt.u64.u32 %d2, %r1; add.u64 %d2, %d0, %d2; ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d2];
    add.u32 %r6, %r20, %r1; add.u32 %r6, %r6, 1024; st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
    add.u32 %r1, %r1, 2048; setp.lt.u32 %p0, %r1, {BYTES}; @%p0 bra COPY;
    fence.proxy.async.shared::cta;
    setp.ge.u32 %p1, %r0, 32; @%p1 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 64;
    elect.sync _|%p2, -1;
    add.u32 %r7, %r20, 8; @%p2 mbarrier.init.shared.b64 [%r7], 1; fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    ld.shared.b32 %r8, [%r20]; add.u32 %r7, %r20, 8;
    setp.ne.u32 %p3, %r0, 0; @%p3 bra WAIT;
    shr.u32 %r10, %r20, 4; cvt.u64.u32 %d3, %r10;
    add.u32 %r11, %r8, 16; add.u32 %r12, %r8, 24;
    add.u64 %d4, %d3, %d6; add.u64 %d7, %d4, 32;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r11], %d4;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r12], %d7;
    add.u64 %d8, %d3, %d5; add.u64 %d9, %d8, 256; setp.ne.u32 %p4, %r9, 0;
    MMA
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r7];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r7], 0; @!%p5 bra WAIT;
    tcgen05.fence::after_thread_sync;
    shr.u32 %r13, %r0, 5; shl.b32 %r13, %r13, 21; add.u32 %r13, %r13, %r8;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%r{i}" for i in range(30, 46))}}}, [%r13];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d10, %r0, 64; add.u64 %d10, %d1, %d10;
    {" ".join(f"st.global.b32 [%d10+{4 * i}], %r{30 + i};" for i in range(16))}
    bar.sync 0; @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    END: ret;"""
INSTRUCTION = "tcgen05.mma.cta_group::1.kind::{} [%r8], %d8, %d9, {}, [%r11], [%r12], %p4;"


def program_inputs(
    case: Case, elements: list[np.ndarray], scales: list[np.ndarray]
) -> tuple[np.ndarray, tuple[int, int]]:
    """The image in global memory, and PROGRAM's descriptors of elements and of scales, for an address of 0."""
    image = np.zeros(BYTES, np.uint8)
    layout = Layout("32B", False, 1, 0)
    for start, x, name in zip((0, 4096), elements, case.types):
        rows = layout.place(rows_of(x, name, 0))
        image[start : start + len(rows)] = rows
    for start, x in zip((4608, 5120), scales):
        for (row, i), code in np.ndenumerate(x):
            image[start + row % 32 * 16 + row // 32 * 4 + i] = code
    scale_words = Layout("none", False, 1, 0).descriptor(1024 + 4608) & ~(0x3FFF << 32) | 128 >> 4 << 32
    return image, (layout.descriptor(1024), scale_words)


def program_with(text: str, issuers: int = 1) -> str:
    """PTX of PROGRAM with these MMAs, by so many lanes."""
    program = PROGRAM.replace("MMA\n", text + "\n", 1)
    if issuers > 1:
        commits = f"mbarrier.init.shared.b64 [%r7], {issuers};"
        program = program.replace("setp.ne.u32 %p3, %r0, 0;", f"setp.ge.u32 %p3, %r0, {issuers};")
        program = program.replace("mbarrier.init.shared.b64 [%r7], 1;", commits)
    return module(program, parameters=4)


def run_program(text: str, case: Case, options: Options, issuers: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """D of a launch with these MMAs, and what one has to make of it."""
    elements, scales = operands(case)
    image, descriptors = program_inputs(case, elements, scales)
    out = aligned(np.zeros((128, 16), np.float32))
    launch(
        program_with(text, issuers), aligned(image), out, *descriptors, block=(128, 1, 1), dynamic_smem=8192,
        options=options,
    )  # fmt: skip
    return out, expected(case, elements, scales)


@pytest.mark.parametrize("options", [Options(arithmetic="exact"), Options(arithmetic="silicon")])
@pytest.mark.parametrize(("vector", "case"), [
    (".scale_vec::1X", Case("mxf8f6f4", ("e4m3", "e2m1"), n=16)),
    ("", Case("mxf4", ("e2m1", "e2m1"), count=2, n=16)),
    (".block16", Case("mxf4nvf4", ("e2m1", "e2m1"), "ue4m3", count=4, n=16)),
])  # fmt: skip
def test_a_kernel(vector: str, case: Case, options: Options) -> None:
    """Scales come by tcgen05.cp, which runs before the MMA without a wait; nothing is reported."""
    got, want = run_program(INSTRUCTION.format(f"{case.kind}.block_scale{vector}", case.word()), case, options)
    np.testing.assert_array_equal(got, want)


def test_a_kernel_without_scales() -> None:
    """Two equal MMAs, of which the second one adds."""
    case = Case("mxf8f6f4", ("e2m1", "e3m2"), n=16)
    word = 1 << 4 | 5 << 7 | 4 << 10 | 16 // 8 << 17 | 128 // 16 << 24
    one = f"tcgen05.mma.cta_group::1.kind::f8f6f4 [%r8], %d8, %d9, {word}, %p4;"
    got, _ = run_program(f"{one} setp.eq.u32 %p4, %r9, 0; {one}", case, Options())
    elements, scales = operands(case)
    np.testing.assert_array_equal(got, 2 * expected(case, elements, [np.full_like(x, 127) for x in scales]))


@pytest.mark.parametrize(("vector", "message"), [
    (".scale_vec::4X", r"it takes .*{.scale_vec::2X|.block32}"),
    (".scale_vec::2X.sp", r"\.sp"),
])  # fmt: skip
def test_what_a_kind_does_not_have_is_refused(vector: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        case = Case("mxf4", ("e2m1", "e2m1"), count=2, n=16)
        run_program(INSTRUCTION.format(f"mxf4.block_scale{vector}", case.word()), case, Options())
