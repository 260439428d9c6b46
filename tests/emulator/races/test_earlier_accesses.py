"""Reports of races name the instructions of both sides: the one that is executed and the earlier one."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, SharedMemoryRace
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.flow import analyse
from cute_kernels.emulator.races import earlier_accesses
from cute_kernels.emulator.races.earlier_accesses import Access, describe, instructions_of
from cute_kernels.emulator.races.happens_before import Agent
from cute_kernels.emulator.races.tensor_memory import TensorRaces
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.races.test_races import CASES, END, TWINS, TWO_WARPS, WORDS, Twin, run

EARLIER = re.compile(r"\((one of \d+ instructions in PTX lines \d+ to \d+|PTX line [^)]*)\)")


def report(name: str, broken: int, options: Options) -> str:
    twin = TWINS[name]
    with pytest.raises(EmulatorError) as found:
        run(twin, twin.variants()[broken], options)
    return str(found.value)


NOBODY = "and nothing orders the two: no synchronisation leads from one to the other"
EXACT = {
    ("write then read, named barrier", 1): (
        "a store of CTA 0 warp 0 writes the 128 bytes at shared offset 1216 of CTA 0, which the load of CTA 0 warp 1 "
        f"read before (PTX line 24 `ld.shared.b32 %r9, [%r5]`), {NOBODY} at PTX line 23 "
        "`st.shared.b32 [%r5+128], %r1`, CTA 0 warp 0"
    ),
    # Two stores of one epoch: either may be meant.
    ("lanes of one warp", 1): (
        "a load of CTA 0 warp 0 reads the 4 bytes at shared offset 1092 of CTA 0, which the store of CTA 0 warp 0 "
        "wrote before (PTX line 23 `st.shared.b32 [%r5], %r9` or PTX line 23 `st.shared.b32 [%r5], %r1`), "
        f"{NOBODY} at PTX line 24 `ld.shared.b32 %r9, [%r6+64]`, CTA 0 warp 0"
    ),
    ("bulk store: one lane has waited for it", 1): (
        "a store of CTA 0 warp 0 writes the 124 bytes at shared offset 1092 of CTA 0, which the bulk store of 128 "
        "bytes from shared offset 1088 issued by CTA 0 warp 0 read before (PTX line 24 "
        f"`cp.async.bulk.global.shared::cta.bulk_group [%d0], [dynamic+64], 128`), {NOBODY} at PTX line 25 "
        "`st.shared.b32 [%r5], %r1`, CTA 0 warp 0"
    ),
    ("bulk store: fence.proxy.async by the issuing thread", 1): (
        "bulk store of 128 bytes from shared offset 1088 issued by CTA 0 warp 0 reads the 4 bytes at shared offset "
        "1088 of CTA 0, which the store of CTA 0 warp 1 wrote through the generic proxy (PTX line 23 "
        "`st.shared.b32 [%r5+-128], %r1`), with no fence.proxy.async since at PTX line 24 "
        "`cp.async.bulk.global.shared::cta.bulk_group [%d0], [dynamic+64], 128`, CTA 0 warp 0"
    ),
    ("cp.async: read before wait_group", 1): (
        "a load of CTA 0 warp 0 reads the 128 bytes at shared offset 1088 of CTA 0, which the cp.async of CTA 0 warp 0 "
        f"wrote before (PTX line 23 `cp.async.ca.shared.global [%r5], [%d1], 4`), {NOBODY} at PTX line 24 "
        "`ld.shared.b32 %r9, [%r5]`, CTA 0 warp 0"
    ),
    ("two CTAs write one place", 1): (
        "a load of cluster 1, CTA 0 warp 0 reads the 4 bytes at byte 0 of array 0 (256 bytes), which the store of "
        "cluster 0, CTA 0 warp 0 wrote before (PTX line 22 `st.global.b32 [%d1], %r2`), and nothing orders the two: it "
        "belongs to another cluster at PTX line 21 `ld.global.b32 %r2, [%d1]`, cluster 1, CTA 0 warp 0"
    ),
    ("tensor memory freed before it was read", 1): (
        "tcgen05.dealloc frees TMEM column 0, lanes from 0 on, of CTA 0, which the tcgen05.ld of CTA 0 warp 4 read "
        "(PTX line 36 `tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r20]`): it is not known to be complete. What is "
        "missing may be tcgen05.wait::ld, tcgen05.wait::st or tcgen05.commit, a barrier, or tcgen05.fence around a "
        "relaxed one at PTX line 40 `tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32`, CTA 0 warp 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "broken"), EXACT)
def test_both_sides_are_named(name: str, broken: int):
    assert report(name, broken, Options()) == EXACT[name, broken]


class _Forgetful(dict):
    """What never holds anything: every access gets an epoch of its own."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_the_instruction_is_among_those_named(name: str, broken: int, monkeypatch: pytest.MonkeyPatch):
    """Compared with a detector that gives every access an epoch of its own, which costs too much outside of a test."""
    named = report(name, broken, Options())

    def forgetful(agent: Agent, *args: object) -> None:
        original(agent, *args)
        agent.ids = _Forgetful()

    def operation(races: TensorRaces, text: str) -> object:
        races._stream().identity = 0
        return tensor_operation(races, text)

    original, tensor_operation = Agent.__init__, TensorRaces.operation
    monkeypatch.setattr(Agent, "__init__", forgetful)
    monkeypatch.setattr(TensorRaces, "operation", operation)
    monkeypatch.setattr(
        earlier_accesses, "instructions_of", lambda flow, first, access: [flow.kernel.instructions[first]]
    )
    exact = EARLIER.search(report(name, broken, Options()))
    found = EARLIER.search(named)
    assert (exact is None) == (found is None)
    if exact is not None:
        assert exact[1] in found[1].split(" or ")


#: Lanes below 16 take one way, the others another, and both store. The second warp reads it all without waiting.
DIVERGED = f"""{WORDS} bar.sync 0; @%p1 bra READ; setp.lt.u32 %p2, %r1, 16; @%p2 bra LOW;
    st.shared.b32 [%r5], %r2;
    bra MET;
    LOW:
    st.shared.b32 [%r5], %r1;
    MET: bra END;
    READ: nanosleep.u32 20; setp.lt.u32 %p3, %r1, FIRST; @%p3 bra END; ld.shared.b32 %r9, [%r5+-128]; {END}"""


@pytest.mark.parametrize("first", [32, 48])
def test_lanes_that_took_another_way_are_named_too(first: int):
    """The epoch of a warp begins with the side that runs first; the race may be with a lane of the other one."""
    twin = Twin("", SharedMemoryRace, "", shape=TWO_WARPS)
    with pytest.raises(SharedMemoryRace, match="a load of CTA 0 warp 1 reads") as found:
        run(twin, DIVERGED.replace("FIRST", str(first)), Options())
    sides = "PTX line 24 `st.shared.b32 [%r5], %r2` or PTX line 27 `st.shared.b32 [%r5], %r1`"
    assert EARLIER.search(str(found.value))[1] == sides


def found(body: str, first: str, access: Access) -> list[str]:
    """Texts of the instructions that may have made an access, by the text of the first one of its epoch."""
    text = module(body)
    kernel = parse(text).kernels["k"]
    start = next(i.index for i in kernel.instructions if i.text == first)
    return [i.text for i in instructions_of(analyse(kernel, (64, 1, 1)), start, access)]


STORES = """st.shared.b32 [%r1], %r2; ld.shared.b32 %r3, [%r1]; st.global.b32 [%d1], %r2;
    st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2}; st.volatile.shared.b32 [%r1], %r4; st.b32 [%d2], %r5;
    @%p1 bar.warp.sync -1; st.shared.b32 [%r1], %r6;
    fence.proxy.async.shared::cta; st.shared.b32 [%r1], %r7; ret;"""


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (
            Access("shared", True),
            ["st.shared.b32 [%r1], %r2", "st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2}", "st.b32 [%d2], %r5",
             "st.shared.b32 [%r1], %r6"],
        ),
        (Access("shared", True, unit=16), ["st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2}"]),
        (Access("global", True), ["st.global.b32 [%d1], %r2", "st.b32 [%d2], %r5"]),
    ],
)  # fmt: skip
def test_stores_until_the_warp_synchronises(access: Access, expected: list[str]):
    assert found(STORES, "st.shared.b32 [%r1], %r2", access) == expected


def test_strong_stores_are_told_apart():
    first = "st.volatile.shared.b32 [%r1], %r4"
    assert found(STORES, first, Access("shared", True, strong=True)) == [first]


def test_loops_come_back_to_what_stands_before():
    body = """LOOP: ld.shared.b32 %r3, [%r1]; ld.shared.b32 %r4, [%r2]; setp.eq.u32 %p1, %r3, 0; @%p1 bra LOOP;
    bar.sync 0; ld.shared.b32 %r5, [%r1]; ret;"""
    first = "ld.shared.b32 %r4, [%r2]"
    assert found(body, first, Access("shared", False)) == ["ld.shared.b32 %r3, [%r1]", first]


MMAS = """tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;
    tcgen05.cp.cta_group::1.128x128b [%r1], %d3;
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
    tcgen05.mma.cta_group::1.kind::f16 [%r1], %d4, %d2, %r2, %p1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
    tcgen05.mma.cta_group::1.kind::f16 [%r1], %d5, %d2, %r2, %p1; ret;"""


@pytest.mark.parametrize(
    ("access", "expected"), [(Access("shared", False), "mcm"), (Access("tensor", False), "mm"),
                             (Access("tensor", True), "mcm")],
)  # fmt: skip
def test_tensor_core_operations_until_the_commit(access: Access, expected: str):
    names = found(MMAS, MMAS.split(";")[0], access)
    assert [name.split(".")[1][0] for name in names] == list(expected)
    assert not any("%d5" in name for name in names)


def test_many_are_counted():
    stores = "\n".join(f"st.shared.b32 [%r1+{4 * i}], %r2;" for i in range(5))
    kernel = parse(module(stores + " ret;")).kernels["k"]
    lines = [i.line for i in kernel.instructions[:5]]
    assert describe(kernel.instructions[:5]) == f"one of 5 instructions in PTX lines {lines[0]} to {lines[-1]}"


def test_many_instructions_of_an_unrolled_loop_have_its_source_line() -> None:
    """A loop that the compiler unrolled is one line of the program, which is what its author looks for."""
    kernel = parse(module("mov.u32 %r1, 0;\n" * 5 + "ret;")).kernels["k"]
    first, *others = kernel.instructions[:5]
    same = [dataclasses.replace(i, source="loop.py:19") for i in (first, *others)]
    assert describe(same).endswith(", loop.py:19")
    several = [dataclasses.replace(i, source=f"loop.py:{n}") for n, i in enumerate((first, *others))]
    assert describe(several).endswith(", loop.py:0, loop.py:1, loop.py:2 and 2 more lines")


#: CTA 0 fills a buffer of both CTAs. CTA 1 reads its own, and says so by a flag in p0 that orders nothing.
MULTICAST = """
    ld.param.u64 %d0, [p0]; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; mov.b32 %r3, dynamic;
    setp.ne.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0; shl.b32 %r4, %r2, 2; add.u32 %r4, %r4, %r3; mov.b16 %h1, 3;
    @%p2 mbarrier.init.shared.b64 [%r3], 1; @%p2 fence.mbarrier_init.release.cluster;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%p2 bra FILLED; @%p1 bra FILLED;
    COPY
    FILLED: mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0; @!%p4 bra FILLED;
    @%p1 bra READER;
    SPIN: ld.relaxed.gpu.global.b32 %r5, [%d0]; setp.eq.u32 %p5, %r5, 0; @%p5 bra SPIN;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
    @!%p2 bra LAST;
    COPY
    bra LAST;
    READER: ld.shared.b32 %r6, [%r4+128]; bar.warp.sync -1;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128; @%p2 st.relaxed.gpu.global.b32 [%d0], 1;
    LAST: mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 1; @!%p4 bra LAST;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;
""".replace(
    "COPY",
    """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r3+128], [%d0+128], 128, [%r3], %h1;""",
)


@pytest.mark.parametrize("completion", ["eager", "lazy"])
def test_a_stage_that_is_filled_again_names_who_reads_it(completion: str) -> None:
    """Of a multicast, in the other CTA: the first copy is not known to be over either, but its reader says more."""
    data = aligned(np.zeros(64, np.int32))
    options = Options(completion=completion)
    with pytest.raises(SharedMemoryRace) as caught:
        launch(module(MULTICAST, parameters=1), data, grid=(2, 1, 1), cluster=(2, 1, 1), options=options)
    message = str(caught.value)
    assert "CTA 0 warp 0 writes the 128 bytes at shared offset 1152 of CTA 1, which the load of CTA 1 warp 0" in message
    assert "ld.shared.b32 %r6, [%r4+128]" in message
    assert caught.value.kind == "stage-in-use"
