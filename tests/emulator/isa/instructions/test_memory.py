"""Loads and stores of lanes against their definition: what they move, and the kind of every fault."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import GlobalMemoryRace, IllegalAccess, SharedMemoryRace
from cute_kernels.emulator.programs.recorded import guarded
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.definitions.memory import Memory
from tests.emulator.ptx_launch import launch

FILLED, BARRIER, END = 256, 256, 512
"""Of the memory the bytes that are filled before, those of an mbarrier from there on, and all."""
WIDTHS = {1: ("u8", ["%h1"]), 2: ("u16", ["%h1"]), 4: ("u32", ["%r10"]), 8: ("u64", ["%d10"]),
          16: ("v4.u32", ["%r10", "%r11", "%r12", "%r13"])}  # fmt: skip
BASES = {"shared": "dynamic", "global": "%d3", "local": "depot"}


@functools.cache
def text(space: str, generic: bool, width: int, write: bool) -> str:
    """A lane has a row of 32 bytes in p0: offset, whether it accesses, 8 bytes to fill with, 16 to store.

    Its results in p1: what was loaded, behind a store from where it went; 8 bytes of the memory afterwards.
    """
    kind, names = WIDTHS[width]
    group = f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]
    dot = "" if generic else f".{space}"
    into = f"cvta.{space}.u64 %d4, %d4;" if generic and space != "global" else ""
    barrier = f"@%p2 mbarrier.init.shared.b64 [dynamic+{BARRIER}], 1;" if space == "shared" else ""
    move = f"@%p1 st{dot}.{kind} [%d4], {group}; bar.warp.sync -1;" if write else ""
    return module(
        f""".local .align 16 .b8 depot[{END}];
        mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0; {barrier}
        ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r1, 32, %d0; ld.param.u64 %d1, [p1]; mad.wide.u32 %d1, %r1, 32, %d1;
        ld.param.u64 %d3, [p2]; ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d0]; setp.ne.u32 %p1, %r3, 0;
        ld.global.{kind} {group}, [%d0+16]; mov.u64 %d2, {BASES[space]};
        mad.wide.u32 %d5, %r1, 8, %d2; st.{space}.v2.u32 [%d5], {{%r4, %r5}}; bar.warp.sync -1;
        cvt.u64.u32 %d4, %r2; add.s64 %d4, %d4, %d2; {into}
        {move}
        @%p1 ld{dot}.{kind} {group}, [%d4]; st.global.{kind} [%d1], {group};
        bar.warp.sync -1; ld.{space}.v2.u32 {{%r4, %r5}}, [%d5]; st.global.v2.u32 [%d1+16], {{%r4, %r5}}; ret;""",
        parameters=3,
    )


def memory(space: str, rows: np.ndarray) -> list[Memory]:
    """The memory that each lane sees, filled: of its own or one for all."""
    made = Memory(dict.fromkeys(range(END), 0))
    if space == "shared":
        made.opaque = set(range(BARRIER, BARRIER + 8))
        made.unwritten = set(range(FILLED, END)) - made.opaque
    of_lanes = [copy.deepcopy(made) for _ in range(32)] if space == "local" else [made] * 32
    for lane, row in enumerate(rows):
        of_lanes[lane].store(8 * lane, row[8:16].tolist())
    return of_lanes


@st.composite
def accesses(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """Bytes of each, and the rows of the lanes; one lane may be somewhere else."""
    width, seed = draw(st.sampled_from(list(WIDTHS))), draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (32, 32)).astype(np.uint8)
    words = rows.view(np.uint32)
    items = rng.integers(0, FILLED // width, 32) if draw(st.booleans()) else np.arange(32) % (FILLED // width)
    words[:, 0] = width * items
    words[:, 1] = rng.integers(0, 4, 32) > 0 if draw(st.booleans()) else 1
    if draw(st.booleans()):
        words[draw(st.integers(0, 31)), :2] = draw(st.integers(0, END + 16)) // draw(st.sampled_from([1, width])), 1
    return width, rows


@settings(max_examples=400)
@given(access=accesses(), space=st.sampled_from(list(BASES)), generic=st.booleans(), write=st.booleans(),
       detectors=st.booleans(), counters=st.booleans())  # fmt: skip
def test_as_defined(
    access: tuple[int, np.ndarray], space: str, generic: bool, write: bool, detectors: bool, counters: bool
) -> None:
    width, rows = access
    rows = aligned(rows.reshape(-1))
    table = rows.reshape(32, 32)
    array, out = guarded(END, 16), aligned(np.zeros((32, 32), np.uint8))
    array[:] = 0
    offsets = {lane: int(row.view(np.uint32)[0]) for lane, row in enumerate(table) if row.view(np.uint32)[1]}
    seen = memory(space, table)
    if not detectors:
        for each in seen:
            each.opaque, each.unwritten = set(), set()
    together = {seen[lane].fault([offset], width, write) for lane, offset in offsets.items()}
    if space != "local":
        together = {seen[0].fault(offsets.values(), width, write)} if offsets else {None}
    kind = next(filter(None, sorted(filter(None, together))), None)
    options = Options(detectors=detectors, counters=counters)
    run = functools.partial(
        launch, text(space, generic, width, write), rows, out, array, dynamic_smem=END, options=options,
        hardware="faults are reported",
    )  # fmt: skip
    if kind is not None:
        with pytest.raises(IllegalAccess) as caught:
            run()
        assert caught.value.kind == ("out-of-bounds" if space == "local" else kind)
        return
    run()
    for lane, offset in offsets.items():  # of equal addresses the last lane's value stays
        if write:
            seen[lane].store(offset, table[lane, 16 : 16 + width].tolist())
    for lane in range(32):
        expected = table[lane, 16 : 16 + width].tolist()
        if lane in offsets:
            expected = seen[lane].load(offsets[lane], width)
        assert out[lane, :width].tolist() == expected
        assert out[lane, 16:24].tolist() == seen[lane].load(8 * lane, 8)


# --- st.bulk ----------------------------------------------------------------------------------------------------------

BULK = 4096
"""Bytes of shared memory, all of them filled with ones before."""


def bulk(form: str, address: str, read: str) -> str:
    """Lanes whose size, the second of their two words in p0, is none keep away; the first is an offset."""
    return module(
        f"""mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, 8, %d0; ld.param.u64 %d2, [p1];
        ld.global.v2.u32 {{%r2, %r3}}, [%d1]; setp.ne.u32 %p1, %r3, 0; cvt.u64.u32 %d3, %r3;
        mov.u32 %r4, dynamic; mad.lo.u32 %r5, %r1, {BULK // 32}, %r4; mov.u32 %r6, -1; mov.u32 %r7, 0;
        L: st.shared.u32 [%r5], %r6; add.u32 %r5, %r5, 4; add.u32 %r7, %r7, 4; setp.lt.u32 %p2, %r7, {BULK // 32};
        @%p2 bra L;
        bar.warp.sync -1; add.u32 %r8, %r4, %r2; cvt.u64.u32 %d4, %r8; cvta.shared.u64 %d4, %d4;
        @%p1 st.bulk{form} [{address}], %d3, 0; {read}
        mad.lo.u32 %r5, %r1, {BULK // 32}, %r4; mad.wide.u32 %d5, %r1, {BULK // 32}, %d2; mov.u32 %r7, 0;
        M: ld.shared.u32 %r6, [%r5]; st.global.u32 [%d5], %r6; add.u32 %r5, %r5, 4; add.s64 %d5, %d5, 4;
        add.u32 %r7, %r7, 4; setp.lt.u32 %p2, %r7, {BULK // 32}; @%p2 bra M; ret;""",
        parameters=2,
    )


FORMS = [(".weak.shared::cta", "%r8"), (".weak", "%d4"), (".shared::cta", "%r8"), ("", "%d4")]


@pytest.mark.parametrize(("form", "address"), FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_bulk_stores_write_zeros(form: str, address: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = 8 * rng.integers(0, 17, 32)
    offsets = 128 * rng.permutation(32) + rng.integers(0, 128 - sizes + 1) // 8 * 8
    given_, out = aligned(np.stack([offsets, sizes], 1).astype(np.uint32)), aligned(np.zeros(BULK, np.uint8))
    launch(bulk(form, address, "bar.warp.sync -1;"), given_, out, dynamic_smem=BULK)
    expected = np.full(BULK, 0xFF, np.uint8)
    for offset, size in zip(offsets, sizes):
        expected[offset : offset + size] = 0
    assert (out == expected).all()


@pytest.mark.parametrize(("offset", "size", "words"), [
    (4, 8, "st.bulk of 8 bytes at"), (8, 12, "st.bulk of 12 bytes at"), (BULK - 8, 16, "leaves its"),
])  # fmt: skip
def test_bulk_stores_that_are_illegal(offset: int, size: int, words: str) -> None:
    given_ = aligned(np.array([[offset, size]] + [[0, 0]] * 31, np.uint32))
    with pytest.raises(IllegalAccess, match=words):
        launch(bulk(*FORMS[0], "bar.warp.sync -1;"), given_, aligned(np.zeros(BULK, np.uint8)), dynamic_smem=BULK)


def test_bulk_stores_race_with_what_follows() -> None:
    """Without bar.warp.sync another lane must not load what a lane has cleared."""
    given_ = aligned(np.array([[0, BULK]] + [[0, 0]] * 31, np.uint32))
    with pytest.raises(SharedMemoryRace):
        launch(bulk(*FORMS[0], ""), given_, aligned(np.zeros(BULK, np.uint8)), dynamic_smem=BULK)


def test_lanes_may_clear_the_same_bytes() -> None:
    """What several lanes of one instruction write to one place is taken to be equal, and here it is."""
    ranges = np.array([[8 * (lane % 3), 64 + 8 * (lane % 5)] for lane in range(32)], np.uint32)
    out = aligned(np.zeros(BULK, np.uint8))
    launch(bulk(*FORMS[0], "bar.warp.sync -1;"), aligned(ranges), out, dynamic_smem=BULK)
    end = int(ranges.sum(1).max())
    assert (out[:end] == 0).all() and (out[end:] == 0xFF).all()


# --- loads of which not all bytes are used ----------------------------------------------------------------------------

#: Type of a load of 16 bytes or less, of shared memory, and the mask of the bytes that are used.
USED = [
    *(("v4.b32", 0xFFF), ("v4.b32", 0xF0F), ("v2.b64", 0x0FFF), ("v2.b32", 0x3F)),
    *(("b64", 0x7F), ("b32", 0x6), ("v4.b16", 0xC3)),
]


@pytest.mark.parametrize(("form", "mask"), USED)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("space", ["shared", "global"])
def test_only_used_bytes_are_loaded(form: str, mask: int, uniform: bool, space: str) -> None:
    """The others are not initialised, or (of a load of one address by all lanes) written at the same time."""
    size = {"b16": 2, "b32": 4, "b64": 8}[form.split(".")[-1]]
    count = int(form[1]) if form[0] == "v" else 1
    kind = {2: "%h", 4: "%r", 8: "%d"}[size]
    names = [f"{kind}{10 + i}" for i in range(count)]
    total, stride = size * count, 0 if uniform else 16
    stores = "".join(f"st.{space}.u8 [{{at}}+{byte}], %h{20 + byte};" for byte in range(total) if mask >> byte & 1)
    at = "%r5" if space == "shared" else "%d4"
    body = f"""mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d3, [p1]; mov.u32 %r4, dynamic;
        mad.lo.u32 %r5, %r1, {stride}, %r4; mad.wide.u32 %d4, %r1, {stride}, %d3; mad.wide.u32 %d1, %r1, 16, %d0;
        setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
        {"".join(f"mov.u16 %h{20 + byte}, {byte + 1};" for byte in range(total))}
        {stores.format(at=at)} bar.sync 0;
        .pragma "used_bytes_mask {mask:#x}";
        ld.{space}.{form} {{{", ".join(names)}}}, [{at}];
        {"".join(f"st.global.b{8 * size} [%d1+{size * i}], {name};" for i, name in enumerate(names))} ret;"""
    out = aligned(np.zeros((32, 16), np.uint8))
    launch(module(body, parameters=2), out, aligned(np.zeros((32, 16), np.uint8)))
    used = [byte for byte in range(total) if mask >> byte & 1]
    assert (out[:, used] == [byte + 1 for byte in used]).all()


@pytest.mark.parametrize("pragma", ['.pragma "used_bytes_mask 0xfff";', ""])
def test_unused_bytes_do_not_race(pragma: str) -> None:
    """The other warp writes the word that the mask leaves out; without the pragma that is a race, and out of bounds."""
    body = f"""mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; setp.ge.u32 %p1, %r1, 32; and.b32 %r2, %r1, 31;
        mad.wide.u32 %d1, %r2, 16, %d0; @%p1 bra L; {pragma} ld.global.v4.u32 {{%r3, %r4, %r5, %r6}}, [%d1]; bra M;
        L: st.global.u32 [%d1+12], %r1; M: ret;"""
    data = aligned(np.zeros((32, 4), np.uint32))
    if pragma:
        launch(module(body, parameters=1), data, block=64)
        assert (data[:, 3] == np.arange(32, 64)).all()
        launch(module(body, parameters=1), data.reshape(-1)[:-1])
        return
    with pytest.raises(GlobalMemoryRace):
        launch(module(body, parameters=1), data, block=64)
    with pytest.raises(IllegalAccess, match="outside"):
        launch(module(body, parameters=1), data.reshape(-1)[:-1])
