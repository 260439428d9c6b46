"""setmaxnreg moves registers between the warps of a CTA: what is never free is never granted."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Hang, Options
from cute_kernels.emulator.state.register_pool import at_entry
from tests.emulator.ptx_launch import aligned, launch, module

BODY = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d1, %d1, %d2;
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra $producer;
    setmaxnreg.inc.sync.aligned.u32 CONSUMER;
    AFTER
    st.global.u32 [%d1], %r1;
    ret;
$producer:
    GIVE
    st.global.u32 [%d1], %r1;
    ret;
"""


def run(directives: str, give: int | None, consumer: int, seed: int = 0, after: str = "") -> None:
    """A producer warpgroup and two consumer warpgroups, whose results are checked."""
    line = ("" if give is None else f"setmaxnreg.dec.sync.aligned.u32 {give};") + after
    text = module(
        BODY.replace("CONSUMER", str(consumer)).replace("GIVE", line).replace("AFTER", after),
        parameters=1,
        entry=directives,
    )
    out = aligned(np.zeros(384, np.int32))
    launch(text, out, block=(384, 1, 1), options=Options(seed=seed))
    assert np.array_equal(out, np.arange(384))


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
    run(".reqntid 384, 1, 1 .minnctapersm 1", give, consumer, seed, after="bar.sync 0, 384;")


@pytest.mark.parametrize(
    "directives", [".reqntid 384, 1, 1 .minnctapersm 1", ".maxntid 384 .minnctapersm 1", ".maxnreg 168"]
)
@pytest.mark.parametrize(("stay", "consumer", "wanted"), [(160, 240, "2,304"), (None, 176, "256")])
def test_what_does_not_add_up_hangs(directives: str, stay: int | None, consumer: int, wanted: str) -> None:
    """Consumer warps want 32 x 72 or 32 x 8 registers each; their producers keep theirs, waiting at a barrier."""
    with pytest.raises(Hang) as caught:
        run(directives, stay, consumer, after="bar.sync 0, 384;")
    assert "setmaxnreg.inc" in str(caught.value) and f"{wanted} registers" in str(caught.value)


def test_exited_warps_hold_none() -> None:
    run(".maxnreg 168", None, 240)


def test_a_count_that_ptxas_cannot_know_is_ignored_as_ptxas_does() -> None:
    run(".reqntid 384, 1, 1", None, 240)
    run("", None, 240)
