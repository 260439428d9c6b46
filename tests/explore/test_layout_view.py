"""`show_layout` agrees with CuTe DSL's own layouts, and counts what lanes do one by one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.emulator import Options
from cute_kernels.emulator.programs import capture
from cute_kernels.explore import show_layout

FOUND: list = []


@cute.jit
def evaluate(
    shape: cutlass.Constexpr, stride: cutlass.Constexpr, swizzle: cutlass.Constexpr, offset: cutlass.Constexpr = 0
):
    """CuTe's place of every coordinate, the first mode fastest."""
    layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), offset, cute.make_layout(shape, stride=stride))
    for i in cutlass.range_constexpr(cute.size(layout)):
        FOUND.append(int(layout(cute.idx2crd(i, shape))))


def scaled(stride, by: int):
    return tuple(scaled(each, by) for each in stride) if isinstance(stride, tuple) else stride * by


@pytest.mark.parametrize(
    ("shape", "stride", "swizzle", "dtype", "size"),
    [
        ((8, 64), (64, 1), (3, 4, 3), "bf16", 2),
        ((16, 32), (32, 1), (2, 4, 3), "float16", 2),
        (((8, 2), (16, 4)), ((64, 1024), (1, 16)), (3, 4, 3), "f32", 4),
        ((8, (4, 8)), (4, (1, 32)), (1, 4, 3), "i8", 1),
        ((12, 5), (7, 1), (0, 4, 3), "bf16", 2),
    ],
)
def test_places_are_those_of_cute(shape, stride, swizzle, dtype: str, size: int) -> None:
    FOUND.clear()
    evaluate(shape, scaled(stride, size), swizzle)  # in bytes
    text = f"{shape}:{stride}".replace(" ", "")
    spelled = ",".join(map(str, swizzle))
    shown = show_layout(text, swizzle=spelled, dtype=dtype, lanes="(1,1):(0,0)")
    assert shown.byte.ravel(order="F").tolist() == FOUND
    assert (shown.bank == shown.byte // 4 % 32).all()
    FOUND.clear()
    evaluate(shape, stride, swizzle)  # in elements
    composed = show_layout(f"S<{spelled}> o 0 o {text}", dtype=dtype, lanes="(1,1):(0,0)")
    assert (composed.byte.ravel(order="F") // size).tolist() == FOUND
    assert (composed.byte % size == 0).all()
    FOUND.clear()
    evaluate(shape, stride, swizzle, 24)
    moved = show_layout(f"S<{spelled}> o 24 o {text}", dtype=dtype, lanes="(1,1):(0,0)")
    assert (moved.byte.ravel(order="F") // size).tolist() == FOUND


@cute.kernel
def load_columns(x: cute.Tensor, shape: cutlass.Constexpr):
    """Each lane loads a number of column 0."""
    memory = cute.arch.alloc_smem(cutlass.Float32, 1024, alignment=1024)
    layout = cute.make_layout(shape[0], stride=shape[1])
    tile = cute.make_tensor(memory, cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout))
    lane = cute.arch.thread_idx()[0]
    for column in cutlass.range_constexpr(32):
        tile[lane, column] = cutlass.Float32(column)
    cute.arch.sync_warp()
    x[lane] = tile[lane, 0]


@cute.jit
def launch(x: cute.Tensor):
    load_columns(x, ((32, 32), (32, 1))).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_conflicts_are_those_that_the_emulator_counts() -> None:
    """Of a tensor with a composed layout: 32 stores of columns, and a load of one."""
    with capture("sm_90a", Options(counters=True)) as session:
        x = torch.empty(32, device="cuda")
        launch(from_dlpack(x))
        assert (x == 0).all()
    units = session.launches[0].report.units
    shown = show_layout("S<3,4,3> o 0 o (32,32):(32,1)", dtype="f32", load=False)
    assert shown.conflicts == 15
    assert units.total("bank_conflicts", "st.shared") == 32 * shown.conflicts
    assert units.total("bank_conflicts", "ld.shared") == shown.conflicts
    in_bytes = show_layout("(32,32):(32,1)", swizzle="3,4,3", dtype="f32")
    assert in_bytes.conflicts == 3


def slowly(byte: np.ndarray, lanes: list[list[tuple[int, int]]], nbytes: int) -> int:
    """Conflicts of lanes that each access ``nbytes`` from a coordinate on: words counted one by one."""
    together, conflicts = 32 * 4 // max(nbytes, 4), 0
    for first in range(0, 32, min(together, 32)):
        words = {int(byte[at[0]] + k) // 4 for at in lanes[first : first + together] for k in range(nbytes)}
        conflicts += max(sum(word % 32 == bank for word in words) for bank in range(32)) - 1
    return conflicts


@pytest.mark.parametrize(
    ("layout", "swizzle", "dtype", "lanes", "conflicts"),
    [
        ("(32,32):(32,1)", "", "f32", "(32,1):(1,0)", 31),  # a column of a square: all in one bank
        ("(32,32):(33,1)", "", "f32", "(32,1):(1,0)", 0),  # padded
        ("(32,32):(32,1)", "", "f32", "(32,1):(32,0)", 0),  # a row
        ("(32,64):(64,1)", "", "bf16", "(32,8):(1,32)", 28),  # 16 bytes of a lane: quarters of 8, all in 4 banks
        ("(32,64):(64,1)", "3,4,3", "bf16", "(32,8):(1,32)", 0),
        ("(32,64):(64,1)", "2,4,3", "bf16", "(32,8):(1,32)", 4),
        ("(32,64):(64,1)", "", "bf16", "(32,1):(1,0)", 31),
        ("(64,32):(32,1)", "", "f32", "(32,2):(1,64)", None),
        ("(32,24):(36,1)", "", "i8", "(32,4):(1,32)", None),
    ],
)
def test_conflicts_are_those_counted_word_by_word(layout, swizzle, dtype, lanes, conflicts) -> None:
    shown = show_layout(layout, swizzle=swizzle, dtype=dtype, lanes=lanes, load=False)
    size = {"f32": 4, "bf16": 2, "i8": 1}[dtype]
    (count, values), (step, further) = (eval(part) for part in lanes.split(":"))
    rows = len(shown.byte)
    assert shown.requests == 1
    starts = [[divmod(lane * step, rows)[::-1]] for lane in range(count)]
    assert shown.conflicts == slowly(shown.byte, starts, values * size)
    assert conflicts is None or shown.conflicts == conflicts
    for lane in range(count):
        for value in range(values):
            column, row = divmod(lane * step + value * further, rows)
            assert shown.lane[row, column] == lane
    assert (shown.lane >= 0).sum() == count * values


def test_lanes_of_a_load_that_read_the_same_share_a_wavefront() -> None:
    """docs/emulator/counters.md: where pairs have one address, twice as many lanes are served together."""
    same = {"dtype": "f32", "lanes": "((2,16),4):((0,4),1)"}
    load, store = (show_layout("(64,2):(1,64)", load=load, **same) for load in (True, False))
    assert (load.requests, load.wavefronts, load.conflicts) == (1, 2, 0)
    assert (store.requests, store.wavefronts, store.conflicts) == (1, 4, 0)


@pytest.mark.parametrize("dtype", ["f32", "fp32", "tf32", torch.float32])
def test_a_type_has_the_names_that_people_give_it(dtype: str | torch.dtype) -> None:
    shown = show_layout("(2,4):(4,1)", dtype=dtype, lanes="(1,1):(0,0)")
    assert shown.byte.tolist() == [[0, 4, 8, 12], [16, 20, 24, 28]]


def test_in_a_notebook() -> None:
    html = show_layout("(8,64):(64,1)", swizzle="3,4,3", lanes="(8,8):(1,8)")._repr_html_()
    assert html.count("<td") == 512 and 'title="row 1, column 0, byte 144, bank 4, lane 1"' in html
