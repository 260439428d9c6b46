"""setmaxnreg moves registers between the warps of a CTA: what is never free is never granted."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Hang, Options
from cute_kernels.emulator.machine.state.register_pool import at_entry
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

ONE = ".reqntid {threads}, 1, 1 .minnctapersm 1"
BODY = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d1, %d1, %d2;
    setp.lt.u32 %p1, %r1, PRODUCERS;
    @%p1 bra $producer;
    setmaxnreg.inc.sync.aligned.u32 CONSUMER;
    AFTER
    st.global.u32 [%d1], %r1;
    ret;
$producer:
    GIVE
    AFTER
    st.global.u32 [%d1], %r1;
    ret;
"""


def run(
    directives: str, give: int | None, consumer: int, *, threads: int = 384, producers: int = 128, seed: int = 0,
    meet: bool = True, dynamic_smem: int = 0,
) -> None:  # fmt: skip
    """Producer and consumer warps, whose results are checked; with ``meet`` none exits before all come to a barrier."""
    lines = {
        "PRODUCERS": str(producers),
        "CONSUMER": str(consumer),
        "GIVE": "" if give is None else f"setmaxnreg.dec.sync.aligned.u32 {give};",
        "AFTER": f"bar.sync 0, {threads};" if meet else "",
    }
    body = BODY
    for name, line in lines.items():
        body = body.replace(name, line)
    text = module(body, parameters=1, entry=directives.format(threads=threads))
    out = aligned(np.zeros(threads, np.int32))
    launch(text, out, block=(threads, 1, 1), dynamic_smem=dynamic_smem,
           options=Options(interleave="random", seed=seed))  # fmt: skip
    assert np.array_equal(out, np.arange(threads))


@pytest.mark.parametrize(
    ("threads", "most", "ctas_per_sm", "expected"),
    [
        (384, None, 1, 168), (384, None, 2, 80), (416, None, 1, 128), (416, None, 2, 72), (1024, None, 1, 64),
        (160, None, 3, 128), (128, None, 1, 256), (384, 160, None, 160), (384, 100, 1, 104), (384, None, None, None),
    ],
)  # fmt: skip
def test_registers_at_entry(threads: int, most: int | None, ctas_per_sm: int | None, expected: int | None) -> None:
    """What ptxas 13.0 reports for kernels with setmaxnreg and these directives, in the eights that an SM allocates."""
    assert at_entry(threads, most=most, ctas_per_sm=ctas_per_sm) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("give", "consumer"), [(24, 240), (40, 232), (168, 168)])
def test_what_adds_up_is_granted_whoever_comes_first(give: int, consumer: int, seed: int) -> None:
    run(ONE, give, consumer, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_no_more_than_at_entry_though_an_sm_has_more(seed: int) -> None:
    """384 threads enter with 168 each, 64,512; 8 x 32 x 136 + 4 x 32 x 240 is 65,536, and an H100 hangs."""
    run(ONE, 136, 232, producers=256, seed=seed)
    with pytest.raises(Hang):
        run(ONE, 136, 240, producers=256, seed=seed)


@pytest.mark.parametrize("directives", [ONE, ".maxntid 384 .minnctapersm 1", ".maxnreg 168"])
@pytest.mark.parametrize(
    ("stay", "consumer", "lacks", "free"), [(160, 240, "2,304", "1,024"), (None, 176, "256", "0")]
)
def test_what_does_not_add_up_hangs(directives: str, stay: int | None, consumer: int, lacks: str, free: str) -> None:
    """Consumers want 32 x 72 or 32 x 8 registers each; of 64,512, 4 x 32 x 160 + 8 x 32 x 168 are held, or all."""
    with pytest.raises(Hang) as caught:
        run(directives, stay, consumer)
    text = str(caught.value)
    assert f"waits at setmaxnreg.inc for {lacks} registers: it has 168 per thread and asks for {consumer}" in text
    assert f"of the CTA's 64,512 {free} are free (warps 0-" in text and f" hold {stay or 168} per thread" in text
    found = diagnose(caught.value)
    assert found.kind == "registers"
    assert f"setmaxnreg.inc for {lacks} registers" in found.sentence
    assert any("setmaxnreg.inc" in waiting.place.instruction for waiting in found.waiting)


def test_counts_for_384_threads_are_too_many_for_512() -> None:
    """4 x 128 threads have 512 registers a quarter together: 2 x 24 + 2 x 240 is 528, and 2 x 224 fits."""
    run(ONE, 24, 224, threads=512, producers=256)
    with pytest.raises(Hang, match="it has 128 per thread and asks for 240"):
        run(ONE, 24, 240, threads=512, producers=256)


def test_ctas_that_share_an_sm_have_less() -> None:
    """Of two with 32,768 registers each, 128 x 24 + 128 x 240 is more, also where shared memory leaves one alone."""
    two = ".reqntid 256, 1, 1 .minnctapersm 2"
    run(ONE, 24, 240, threads=256)
    run(two, 24, 232, threads=256)
    with pytest.raises(Hang, match="of the CTA's 32,768 "):
        run(two, 24, 240, threads=256)
    with pytest.raises(Hang):
        run(two, 24, 240, threads=256, dynamic_smem=120_000)


@pytest.mark.parametrize("directives", [ONE, ".reqntid 384, 1, 1 .maxnreg 104"])
def test_exited_warps_keep_theirs(directives: str) -> None:
    with pytest.raises(Hang, match="are free"):
        run(directives, None, 240, meet=False)


def test_a_count_that_ptxas_cannot_know_is_ignored_as_ptxas_does() -> None:
    run(".reqntid 384, 1, 1", None, 240)
    run("", None, 240)


def test_a_warp_that_keeps_its_count_asks_for_nothing() -> None:
    run(ONE, 24, 168)
    run(ONE, 24, 40)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_granted_at_once_leaves_the_schedule_as_it_is(seed: int) -> None:
    """Warps take numbers in the order in which they come by, before and behind setmaxnreg."""
    take = "@%p2 atom.global.add.u32 %r2, [%d1], 1; @%p2 st.global.u32 [%d2], %r2; add.s64 %d2, %d2, 4;"
    body = f"""
        ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
        mov.u32 %r1, %tid.x; and.b32 %r3, %r1, 31; setp.eq.u32 %p2, %r3, 0;
        shr.u32 %r4, %r1, 5; mul.wide.u32 %d3, %r4, 128; add.s64 %d2, %d2, %d3;
        mov.u32 %r5, 0;
    $again:
        {take} BEFORE {take} BEHIND {take}
        add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 10; @%p1 bra $again;
        ret;
    """
    orders = []
    for before, behind in (("", ""), ("setmaxnreg.dec.sync.aligned.u32 160;", "setmaxnreg.inc.sync.aligned.u32 168;")):
        entry = ".reqntid 384, 1, 1 .minnctapersm 1"
        text = module(body.replace("BEFORE", before).replace("BEHIND", behind), parameters=2, entry=entry)
        counter, order = aligned(np.zeros(1, np.int32)), aligned(np.zeros(12 * 32, np.int32))
        options = Options(interleave="random", seed=seed)
        launch(text, counter, order, block=(384, 1, 1), options=options, hardware="warps come by in any order")
        orders.append(order)
    assert orders[0].max() == 359 and np.array_equal(*orders)
