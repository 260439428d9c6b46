"""Tensor copies of four rows that coordinates name: .tile::gather4 and .tile::scatter4."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import IllegalAccess, Im2colMap, TensorMap, UnsupportedPTX
from cute_kernels.emulator.errors import EmulatorError, GlobalMemoryRace
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

ROWS, COLUMNS, WIDTH = 16, 96, 64
GATHER = """
.shared .align 1024 .b8 box[512]; .shared .align 8 .b64 bar;
mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, box; mov.u32 %r3, bar;
setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], [%d1, {COORDS}], [%r3];
WAIT: bar.sync 0;
L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra L;
shl.b32 %r8, %r1, 4; add.u32 %r9, %r2, %r8; ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r9];
cvt.u64.u32 %d3, %r8; add.u64 %d4, %d2, %d3; st.global.v4.u32 [%d4], {%r4, %r5, %r6, %r7}; ret;
"""
SCATTER = """
.shared .align 1024 .b8 box[512];
mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mov.u32 %r2, box; shl.b32 %r8, %r1, 4; add.u32 %r9, %r2, %r8;
mul.lo.u32 %r4, %r1, 0x01010101; st.shared.v4.u32 [%r9], {%r4, %r4, %r4, %r4};
fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
COPY.tile::scatter4.bulk_group [%d1, {COORDS}], [%r2];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;
"""


def tensor() -> np.ndarray:
    return aligned(np.arange(1, ROWS * COLUMNS + 1, dtype=np.uint16).reshape(ROWS, COLUMNS))


def map_of(x: np.ndarray, swizzle: str = "none", rows: int = 1) -> TensorMap:
    return TensorMap(x.ctypes.data, "u16", x.shape[::-1], (x.strides[0],), (WIDTH, rows), (1, 1), swizzle)


def gathered(x: np.ndarray, column: int, rows: list[int]) -> np.ndarray:
    """Rows and columns that the tensor has not are zeros."""
    padded = np.zeros((ROWS + 1, COLUMNS + WIDTH), np.uint16)
    padded[:ROWS, :COLUMNS] = x
    return padded[[row if 0 <= row < ROWS else ROWS for row in rows], column : column + WIDTH]


@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize(("column", "rows"), [(0, [5, 2, 11, 0]), (32, [3, 3, 15, 3]), (64, [16, 1, -1, 9000])])
def test_gather(column: int, rows: list[int], swizzle: str) -> None:
    x, out = tensor(), aligned(np.zeros((4, 8, 8), np.uint16))  # rows, chunks of 16 bytes
    text = module(GATHER.replace("COORDS", ", ".join(map(str, [column, *rows]))))
    launch(text, map_of(x, swizzle), out, block=32, reachable=[x], hardware="sm_90 has no gather")
    if swizzle != "none":  # chunks of row r are exchanged by r
        out = np.stack([out[r, np.arange(8) ^ r] for r in range(4)])
    np.testing.assert_array_equal(out.reshape(4, WIDTH), gathered(x, column, rows))


@pytest.mark.parametrize("adds", [False, True])
def test_scatter(adds: bool) -> None:
    """What is stored, or added, to a row that the tensor has not is lost."""
    x, rows = tensor(), [7, 1, 40, 6]
    given = np.repeat(np.arange(32, dtype=np.uint32) * 0x01010101, 4)
    x, given = (x.view(np.uint32), given.reshape(4, -1)) if adds else (x, given.view(np.uint16).reshape(4, -1))
    want = x.copy()
    for row, values in zip(rows, given):
        if row < ROWS:
            want[row, 8 : 8 + len(values)] = values + (want[row, 8 : 8 + len(values)] if adds else 0)
    body = SCATTER.replace("COORDS", ", ".join(map(str, [8, *rows])))
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta"
    if adds:
        opcode = opcode.replace(".async", ".reduce.async") + ".add"
    text = module(body.replace("COPY", opcode), parameters=1)
    bits = 8 * x.itemsize
    tensor_map = TensorMap(x.ctypes.data, f"u{bits}", x.shape[::-1], (x.strides[0],), (1024 // bits, 1), (1, 1))
    launch(text, tensor_map, block=32, reachable=[x], hardware="sm_90 has no scatter")
    np.testing.assert_array_equal(x, want)


def test_two_copies_to_one_row_race() -> None:
    """Rows between those that are named are nobody's."""
    copies = "".join(
        f"COPY.tile::scatter4.bulk_group [%d1, {{0, {rows}}}], [%r2];\n"
        for rows in ("1, 5, 9, 13", "2, 6, 10, {}")
    )
    body = SCATTER[: SCATTER.index("COPY")] + copies + SCATTER[SCATTER.index("cp.async.bulk.commit") :]
    for last, races in ((14, False), (9, True)):
        x = tensor()
        opcode = "cp.async.bulk.tensor.2d.global.shared::cta"
        text = module(body.replace("COPY", opcode).replace("{}", str(last)), parameters=1)
        if not races:
            launch(text, map_of(x), block=32, reachable=[x], hardware="sm_90 has no scatter")
            continue
        with pytest.raises(GlobalMemoryRace):
            launch(text, map_of(x), block=32, reachable=[x])


@pytest.mark.parametrize(
    ("coords", "rows", "message"),
    [("0, 1, 2, 3, 4", 2, r"take a tensor map whose box is one row, not \(64, 2\)"),
     ("0, 1", 1, "2 coordinates for a 2-dimensional copy"), ("4, 1, 2, 3, 4", 1, "the first is 8 bytes, no multiple")],
)  # fmt: skip
def test_other_copies_are_refused(coords: str, rows: int, message: str) -> None:
    x = tensor()
    with pytest.raises(EmulatorError, match=message):
        launch(module(GATHER.replace("COORDS", coords)), map_of(x, rows=rows), x, block=32, reachable=[x])


def test_other_modes_and_targets_are_refused() -> None:
    x = aligned(np.zeros((2, 8, 8, 16), np.uint16))
    tensor_map = Im2colMap(x.ctypes.data, "u16", (16, 8, 8, 2), x.strides[2::-1], (0, 0), (0, 0), 16, 4, (1, 1, 1, 1))
    text = module(GATHER.replace("COORDS", "0, 1, 2, 3, 4"))
    with pytest.raises(IllegalAccess, match="a tensor copy in tiled mode through a tensor map in im2col mode"):
        launch(text, tensor_map, x, block=32, reachable=[x])
    with pytest.raises(UnsupportedPTX, match="needs sm_100"):
        launch(text.replace("sm_100a", "sm_90a"), map_of(tensor()), tensor(), block=32)
