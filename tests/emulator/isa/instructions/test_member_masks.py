"""Instructions whose lanes name different member masks: each lane executes them with those that its own mask names."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch

LANES = range(32)
ALL = 0xFFFFFFFF
RNG = np.random.default_rng(5)
VALUES = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
FEW = RNG.integers(0, 3, 32).astype(np.uint32)
FLOATS = RNG.normal(size=32).astype(np.float32).view(np.uint32)


def partition(groups: list[list[int]]) -> list[list[int]]:
    """For every lane its group."""
    return [next(group for group in groups if lane in group) for lane in LANES]


def tiles(size: int) -> list[list[int]]:
    return partition([list(range(start, start + size)) for start in range(0, 32, size)])


PARTITIONS = {
    **{f"tiles of {size}": tiles(size) for size in (1, 2, 4, 8, 16, 32)},
    "even and odd lanes": partition([list(range(0, 32, 2)), list(range(1, 32, 2))]),
    "at random": partition([[lane for lane in LANES if FEW[lane] == kind] for kind in range(3)]),
    "one lane alone": partition([[13], [lane for lane in LANES if lane != 13]]),
}


def masks(groups: list[list[int]]) -> np.ndarray:
    return np.array([sum(1 << lane for lane in group) for group in groups], np.uint32)


def votes(mode: str, group: list[int]) -> int:
    odd = [int(VALUES[lane]) & 1 for lane in group]
    if mode == "ballot":
        return sum(1 << lane for lane, vote in zip(group, odd) if vote)
    return int({"all": all(odd), "any": any(odd), "uni": len(set(odd)) == 1}[mode])


def floats(group: list[int], name: str) -> int:
    return int(getattr(np, f"f{name}").reduce(FLOATS.view(np.float32)[group]).view(np.uint32))


def reduction(group: list[int], name: str, signed: bool) -> int:
    numbers = [int(np.int32(VALUES[lane].astype(np.int32))) if signed else int(VALUES[lane]) for lane in group]
    combine = {"add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
               "xor": lambda a, b: a ^ b}[name]  # fmt: skip
    return functools.reduce(combine, numbers) & ALL


PREDICATE = "and.b32 %r7, %r2, 1; setp.ne.u32 %p2, %r7, 0;"
#: PTX that makes %r4 of the value %r2 with the mask %r3, the values, and what lane i of a group has to get.
CASES = {
    "bar.warp.sync": ("bar.warp.sync %r3; mov.u32 %r4, %r2;", VALUES, lambda i, group: VALUES[i]),
    **{
        f"vote.{mode}": (
            f"{PREDICATE} vote.sync.{mode}.pred %p3, %p2, %r3; selp.u32 %r4, 1, 0, %p3;",
            VALUES,
            lambda i, group, mode=mode: votes(mode, group),
        )
        for mode in ("all", "any", "uni")
    },
    "vote.ballot": (
        f"{PREDICATE} vote.sync.ballot.b32 %r4, %p2, %r3;", VALUES, lambda i, group: votes("ballot", group)
    ),
    **{
        f"redux.{name}.{kind}": (
            f"redux.sync.{name}.{kind} %r4, %r2, %r3;",
            VALUES,
            lambda i, group, name=name, kind=kind: reduction(group, name, kind == "s32"),
        )
        for name, kind in [*((n, k) for n in ("add", "min", "max") for k in ("u32", "s32")),
                           *((n, "b32") for n in ("and", "or", "xor"))]
    },
    **{
        f"redux.{name}.f32": (
            f"redux.sync.{name}.f32 %r4, %r2, %r3;", FLOATS, lambda i, group, name=name: floats(group, name)
        )
        for name in ("min", "max")
    },
    "match.any": (
        "match.any.sync.b32 %r4, %r2, %r3;",
        FEW,
        lambda i, group: sum(1 << lane for lane in group if FEW[lane] == FEW[i]),
    ),
    "match.all": (
        "match.all.sync.b32 %r4|%p2, %r2, %r3; selp.u32 %r5, 7, 0, %p2; xor.b32 %r4, %r4, %r5;",
        FEW,
        lambda i, group: (sum(1 << lane for lane in group) ^ 7) if len({FEW[lane] for lane in group}) == 1 else 0,
    ),
    "shfl.bfly of itself": ("shfl.sync.bfly.b32 %r4, %r2, 0, 0x1f, %r3;", VALUES, lambda i, group: VALUES[i]),
    "shfl.idx of the next": (  # the next lane of the group, around
        "neg.s32 %r5, 1; shl.b32 %r5, %r5, %r1; shl.b32 %r5, %r5, 1; setp.eq.u32 %p4, %r1, 31; "
        "selp.u32 %r5, 0, %r5, %p4; and.b32 %r5, %r5, %r3; setp.eq.u32 %p4, %r5, 0; selp.u32 %r5, %r3, %r5, %p4; "
        "brev.b32 %r5, %r5; clz.b32 %r5, %r5; shfl.sync.idx.b32 %r4|%p5, %r2, %r5, 0x1f, %r3;",
        VALUES,
        lambda i, group: VALUES[group[(group.index(i) + 1) % len(group)]],
    ),
    "elect": (
        "elect.sync %r4|%p2, %r3; selp.u32 %r5, 64, 0, %p2; or.b32 %r4, %r4, %r5;",
        VALUES,
        lambda i, group: min(group) | (64 if i == min(group) else 0),
    ),
    "activemask": ("bar.warp.sync %r3; activemask.b32 %r4;", VALUES, lambda i, group: ALL),
}


def execute(body: str, data: np.ndarray, of_lanes: np.ndarray, **more: object) -> np.ndarray:
    """%r2 and %r3: the data and the mask of each lane; %r4 is the result."""
    out, data, of_lanes = (aligned(np.asarray(each, np.uint32)) for each in (np.zeros(32), data, of_lanes))
    load = (
        "ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mul.wide.u32 %d4, %r1, 4; add.s64 %d2, %d2, %d4; "
        "add.s64 %d3, %d3, %d4; ld.global.u32 %r2, [%d2]; ld.global.u32 %r3, [%d3]; mov.u32 %r4, 0xdead;"
    )
    text = module(f"{THREAD_OUTPUT} {load} {body} st.global.u32 [%d1], %r4; ret;", parameters=3)
    why = "which lanes are together is open" if "activemask" in body else None
    launch(text, out, data, of_lanes, hardware="sm_100" if "f32" in body else why, **more)
    return out


def expected(of: object, groups: list[list[int]]) -> list[int]:
    return [int(of(lane, groups[lane])) for lane in LANES]


@pytest.mark.parametrize("groups", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("name", CASES)
def test_each_lane_with_its_own_group(name: str, groups: list[list[int]]) -> None:
    text, data, of = CASES[name]
    assert execute(text, data, masks(groups)).tolist() == expected(of, groups)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in CASES if name != "activemask"])
def test_groups_on_two_sides_of_a_branch(name: str, size: int) -> None:
    """Groups of even and of odd number execute the instruction at two places; several groups at each."""
    text, data, of = CASES[name]
    body = (
        f"div.u32 %r8, %r1, {size}; and.b32 %r8, %r8, 1; setp.ne.u32 %p1, %r8, 0; @%p1 bra ODD; {text} bra END; "
        f"ODD: {text} END:"
    )
    assert execute(body, data, masks(tiles(size))).tolist() == expected(of, tiles(size))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("activemask", "elect")])
def test_a_guard_turns_whole_groups_off(name: str) -> None:
    text, data, of = CASES[name]
    groups = tiles(4)
    guarded = "; ".join(f"@%p1 {part}" for part in text.split("; ")) if ":" not in text else text
    body = f"and.b32 %r8, %r1, 4; setp.ne.u32 %p1, %r8, 0; {guarded}"
    wanted = [value if lane & 4 else 0xDEAD for lane, value in enumerate(expected(of, groups))]
    assert execute(body, data, masks(groups)).tolist() == wanted


@pytest.mark.parametrize(("mode", "width"), [(m, w) for m in ("up", "down", "bfly", "idx") for w in (2, 4, 8, 16)])
def test_shuffles_inside_of_tiles(mode: str, width: int) -> None:
    """As cooperative groups do: the tile is the segment, and what is out of range is the lane's own."""
    step = 1
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %r4|%p2, %r2, {step}, {clamp}, %r3; @%p2 add.u32 %r4, %r4, 1;"
    wanted = []
    for lane in LANES:
        base, at = lane - lane % width, lane % width
        source = {"up": at - step, "down": at + step, "bfly": at ^ step, "idx": step % width}[mode]
        inside = 0 <= source < width
        wanted.append(int(VALUES[base + source]) + 1 & ALL if inside else int(VALUES[lane]))
    assert execute(body, VALUES, masks(tiles(width))).tolist() == wanted


NAMES = {
    "bar.warp.sync": "bar.warp.sync %r3;",
    "shfl": "shfl.sync.idx.b32 %r4, %r2, %r1, 0x1f, %r3;",
    "vote": "vote.sync.ballot.b32 %r4, %p2, %r3;",
    "redux": "redux.sync.add.u32 %r4, %r2, %r3;",
    "match": "match.any.sync.b32 %r4, %r2, %r3;",
    "elect": "elect.sync %r4|%p2, %r3;",
}


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({3: 0xFFFF0000}, "is executed by lanes 0x00000008|other lanes that are in it name"),  # not in its own mask
        ({3: 0x00000008}, r"lanes 0x0000fff7 name the membermask 0x0000ffff, and other lanes that are in it"),
        ({3: 0}, "membermask 0x00000000 is executed by|other lanes that are in it name"),
        ({20: 0xFFFFFFFF}, "other lanes that are in it name"),
    ],
)
def test_masks_that_do_not_agree_are_reported(text: str, changed: dict[int, int], message: str) -> None:
    of_lanes = masks(tiles(16))
    for lane, mask in changed.items():
        of_lanes[lane] = mask
    with pytest.raises(BarrierMisuse, match=message):
        execute(f"setp.ne.u32 %p2, %r1, 9; {text}", VALUES, of_lanes)


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
def test_a_group_whose_lanes_are_elsewhere_is_reported(text: str) -> None:
    """Lanes 4 to 7 take another path, and are named by lanes 0 to 3: a chip would wait for them."""
    body = f"setp.ne.u32 %p2, %r1, 9; and.b32 %r8, %r1, 4; setp.ne.u32 %p1, %r8, 0; @%p1 bra END; {text} END:"
    execute(body, VALUES, masks(tiles(4)))
    with pytest.raises((BarrierMisuse, UnsupportedPTX), match="membermask 0x000000ff"):
        execute(body, VALUES, masks(tiles(8)))


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
def test_lanes_that_have_exited_are_not_waited_for(text: str) -> None:
    """Lanes 4 to 7 have exited (PTX ISA: all non-exited threads of the mask)."""
    body = f"setp.ne.u32 %p2, %r1, 9; and.b32 %r8, %r1, 28; setp.eq.u32 %p1, %r8, 4; @%p1 ret; {text}"
    out = execute(body, VALUES, masks(tiles(8)))
    assert not out[4:8].any() and (out != 0).sum() >= (text != NAMES["elect"])
    with pytest.raises(BarrierMisuse, match="membermask|other lanes"):
        execute(body, VALUES, np.where(np.arange(32) == 2, 0x0F, masks(tiles(8))))


def test_a_shuffle_from_another_group_is_reported() -> None:
    """PTX ISA: what comes from a lane that the mask does not name is undefined."""
    for text in ("shfl.sync.idx.b32 %r4, %r2, 3, 0x1f, %r3;", "shfl.sync.bfly.b32 %r4, %r2, 16, 0x1f, %r3;"):
        with pytest.raises(EmulatorError, match=re.escape("which does not execute it")):
            execute(text, VALUES, masks(tiles(16)))
        execute(text, VALUES, masks(tiles(32)))
