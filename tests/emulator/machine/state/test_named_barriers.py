"""Named barriers, which the core counts: reports word for word, counts beyond what a CTA has, and the definition."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, Hang, SharedMemoryRace, UnsupportedPTX
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.definitions.mbarriers import Wrong
from tests.emulator.definitions.named_barriers import run
from tests.emulator.oracle import records
from tests.emulator.ptx_launch import launch

WARP = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r2, 1;"
LANE = "and.b32 %r3, %r1, 31; setp.lt.u32 %p2, %r3, 16;"
RANDOM = [Options(seed=seed, interleave="random", completion="random") for seed in range(4)]


def report(body: str, warps: int = 2, options: Options | None = None) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        launch(module(f"{WARP} {LANE} {body} ret;"), 0, 0, block=(32 * warps, 1, 1), options=options)
    return caught.value


MISUSE = {
    "bar.sync 16;": "named barrier 16; legal are 0 to 15",
    "bar.arrive 16, 64;": "named barrier 16; legal are 0 to 15",
    "bar.sync 1, 48;": "barrier 1 with 48 threads; legal are positive multiples of 32",
    "bar.arrive 1, 0;": "barrier 1 with 0 threads; legal are positive multiples of 32",
    "bar.arrive 1, 256; bar.arrive 1, 256; bar.sync 1, 128;": (
        "barrier 1 of CTA 0: CTA 0 warp 0 expects 128 threads where CTA 0 warp 0, CTA 0 warp 0 expected 256"
    ),
    "bar.arrive 1, 96; bar.sync 1;": (
        "barrier 1 of CTA 0: CTA 0 warp 0 expects 64 threads where CTA 0 warp 0 expected 96"
    ),
    # The same number of threads, but these are not those of the CTA for ever.
    "bar.arrive 1, 64; bar.sync 1;": (
        "barrier 1 of CTA 0: CTA 0 warp 0 expects 64 threads where CTA 0 warp 0 expected 64"
    ),
    "@%p2 bra A; bra B; A: bar.sync 1; B: bar.warp.sync -1;": (
        "bar.sync is executed by lanes 0x0000ffff of a warp with live lanes 0xffffffff"
    ),
    "@%p2 bra A; bra B; A: bar.arrive 1, 64; B: bar.warp.sync -1;": (
        "bar.arrive is executed by lanes 0x0000ffff of a warp with live lanes 0xffffffff"
    ),
    "@%p2 bra A; bra B; A: barrier.sync 1; B: bar.warp.sync -1;": (
        "barrier.sync without .aligned by a part of a warp (lanes 0x0000ffff of 0xffffffff) is not implemented"
    ),
}


@pytest.mark.parametrize("detectors", [True, False])
@pytest.mark.parametrize("body", MISUSE)
def test_misuse_word_for_word(body: str, detectors: bool) -> None:
    error = report(body, options=Options(detectors=detectors))
    assert str(error).splitlines()[0].startswith(MISUSE[body])
    assert isinstance(error, UnsupportedPTX if "not implemented" in MISUSE[body] else BarrierMisuse)


@pytest.mark.parametrize("detectors", [True, False])
def test_arrivals_beyond_the_warps_of_a_cta(detectors: bool) -> None:
    """One warp arrives 200 times, for more threads than there can be; who arrived is told in order."""
    body = """@%p0 bra A; bra W; A: mov.u32 %r4, 0; L: bar.arrive 3, 6464; add.u32 %r4, %r4, 1;
    setp.lt.u32 %p3, %r4, 200; @%p3 bra L; ret; W: @%p1 bra S; ret; S: bar.sync 3, 6464;"""
    error = report(body, 3, Options(detectors=detectors))
    assert isinstance(error, Hang)
    (waits,) = [wait for wait in error.facts.waits if wait.kind == "bar"]
    who = ", ".join(["CTA 0 warp 0"] * 200 + ["CTA 0 warp 1"])
    assert waits.text == f"waits at named barrier 3 of CTA 0: 6432 of 6464 threads arrived ({who})"
    assert waits.missing == ()
    text = module(f"{WARP} {LANE} {body.replace('200', '201')} ret;")
    # Then the last one is there. An H100 calls a count from 2,048 to 4,096 threads an illegal instruction.
    launch(text, 0, 0, block=(96, 1, 1), options=Options(detectors=detectors), hardware="more threads than it takes")


@pytest.mark.parametrize("options", [Options(), Options(detectors=False), *RANDOM])
def test_lanes_that_exit_take_part_no_more(options: Options) -> None:
    """The rest of a warp counts as a whole warp, and is all that there is of it."""
    out = np.zeros(64, np.uint32)
    body = """and.b32 %r3, %r1, 31; setp.lt.u32 %p2, %r3, 16; @%p2 ret; bar.sync 0; bar.sync 5, 64;
    mov.b32 %r9, 7; st.global.b32 [%d1], %r9; ret;"""
    launch(module(THREAD_OUTPUT + body, parameters=1), out, block=(64, 1, 1), options=options)
    assert out.tolist() == 2 * ([0] * 16 + [7] * 16)


@pytest.mark.parametrize("options", [Options(), *RANDOM])
def test_votes_of_many_generations(options: Options) -> None:
    """In round n the threads below n vote, of the two warps together."""
    out = np.zeros(64, np.uint32)
    body = """mov.u32 %r4, 0; mov.u32 %r9, 0; L: setp.lt.u32 %p1, %r1, %r4; bar.red.popc.u32 %r5, 2, 64, %p1;
    mad.lo.u32 %r9, %r5, %r4, %r9; add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 150; @%p2 bra L;
    st.global.b32 [%d1], %r9; ret;"""
    launch(module(THREAD_OUTPUT + body, parameters=1), out, block=(64, 1, 1), options=options)
    assert out.tolist() == [sum(min(n, 64) * n for n in range(150))] * 64


SHARED = """mov.b32 %r5, dynamic; shl.b32 %r4, %r1, 2; add.s32 %r4, %r4, %r5; and.b32 %r6, %r1, 31; shl.b32 %r6, %r6, 2;
add.s32 %r6, %r6, %r5;"""
#: Warp 0 writes, warp 1 reads what it wrote.
HAND_OVER = f"""{SHARED} @%p0 bra A; bra B; A: st.shared.b32 [%r4], %r1; SIGNAL ret;
B: WAIT ld.shared.b32 %r9, [%r6]; ret;"""
ORDERED = [
    ("bar.arrive 1, 64;", "bar.sync 1, 64;"), ("bar.sync 1, 64;", "bar.sync 1, 64;"), ("bar.sync 0;", "bar.sync 0;")
]  # fmt: skip
#: The reader is the one that goes on.
UNORDERED = [("bar.sync 1, 64;", "bar.arrive 1, 64;")]


@pytest.mark.parametrize("options", [Options(), *RANDOM])
def test_an_arrival_orders_what_is_before_it(options: Options) -> None:
    for signal, wait in ORDERED:
        body = HAND_OVER.replace("SIGNAL", signal).replace("WAIT", wait)
        launch(module(WARP + body), 0, 0, block=(64, 1, 1), options=options)
    for signal, wait in UNORDERED:
        body = HAND_OVER.replace("SIGNAL", signal).replace("WAIT", wait)
        with pytest.raises(EmulatorError) as caught:
            launch(module(WARP + body), 0, 0, block=(64, 1, 1), options=options)
        assert isinstance(caught.value, SharedMemoryRace) or "uninitialised" in str(caught.value)


@pytest.mark.parametrize("detectors", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_the_core_needs_no_python(
    traced: bool, detectors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel whose warpgroups take turns: for no barrier, and never for a wait for wgmmas."""
    calls: collections.Counter[str] = collections.Counter()
    call = Execution.call

    def counted(self: Execution, site: int, mask: int) -> int:
        instruction = self.translation.sites[site].instruction
        calls["" if instruction is None else instruction.opcode.split(".")[0] + "." + instruction.parts[1]] += 1
        return call(self, site, mask)

    monkeypatch.setattr(Execution, "call", counted)
    frozen = records.read("gemm-sm90-pingpong").launch
    path = tmp_path / "trace" if traced else None
    frozen.execute(frozen.ptx, dataclasses.replace(Options(detectors=detectors), trace=path))
    assert calls["bar.sync"] + calls["bar.arrive"] + calls["wgmma.wait_group"] == 0 < sum(calls.values())


NUMBERS = st.sampled_from([(1, 64), (2, 96), (3, None), (4, 128)])
WRONG = st.sampled_from([(1, 96), (2, None), (3, 96), (1, 33), (1, 0), (16, 64)])
KINDS = st.sampled_from(["sync", "sync", "arrive", "popc", "and", "or"])
OPERATIONS = st.tuples(KINDS, st.one_of(NUMBERS, NUMBERS, NUMBERS, NUMBERS, WRONG), st.integers(0, 32))


@pytest.mark.parametrize("options", [Options(), Options(detectors=False)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs=st.lists(st.lists(OPERATIONS, max_size=5), min_size=3, max_size=3))
def test_named_barriers_are_those_of_the_definition(
    programs: list[list[tuple[str, tuple[int, int | None], int]]], options: Options
) -> None:
    """Three warps with operations of their own: what they are told, what is refused, who waits for ever."""
    body = [f"{THREAD_OUTPUT} and.b32 %r2, %r1, 31; shr.u32 %r3, %r1, 5; mov.u32 %r9, 0;"]
    for warp, operations in enumerate(programs):
        body.append(f"setp.ne.u32 %p2, %r3, {warp}; @%p2 bra NOT{warp};")
        for place, (kind, (number, threads), votes) in enumerate(operations, 1):
            which = f"{number}" if threads is None else f"{number}, {threads}"
            if kind in ("sync", "arrive"):
                body.append(f"bar.{kind} {which};" if threads is not None or kind == "sync" else f"bar.sync {which};")
                continue
            body.append(f"setp.lt.u32 %p1, %r2, {votes};")
            if kind == "popc":
                body.append(f"bar.red.popc.u32 %r4, {which}, %p1;")
            else:
                body.append(f"bar.red.{kind}.pred %p1, {which}, %p1; selp.u32 %r4, 1, 0, %p1;")
            body.append(f"mad.lo.u32 %r9, %r4, {place}, %r9;")
        body.append(f"st.global.b32 [%d1], %r9; ret; NOT{warp}:")
    text, out = module("\n".join([*body, "ret;"]), parameters=1), np.full(96, 99, np.uint32)
    listed = [
        [("sync" if kind == "arrive" and at[1] is None else kind, *at, votes) for kind, at, votes in operations]
        for operations in programs
    ]
    try:
        expected = run(listed)
    except Wrong:
        with pytest.raises(BarrierMisuse):
            launch(text, out, block=(96, 1, 1), options=options)
        return
    if None in expected:
        with pytest.raises(Hang):
            launch(text, out, block=(96, 1, 1), options=options)
    else:
        launch(text, out, block=(96, 1, 1), options=options)
    told = out.reshape(3, 32)
    assert (told == told[:, :1]).all()
    # PTX ISA, bar: what bar.red gives together with bar.sync or bar.arrive at one barrier is undefined.
    reducing, others = (
        {number for ops in listed for kind, number, *_ in ops if (kind in ("sync", "arrive")) == plain}
        for plain in (False, True)
    )
    mixed = reducing & others
    defined = [not any(kind not in ("sync", "arrive") and at in mixed for kind, at, *_ in ops) for ops in listed]
    wanted = [99 if value is None else value for value in expected]
    assert all(got == want for got, want, known in zip(told[:, 0].tolist(), wanted, defined) if known)
