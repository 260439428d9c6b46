"""What waits of cp.async wait for, against a model, in launches whose copies take effect as late as they may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.definitions.lane_copies import Event, needed
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

MOST = 12  # events
masks = st.integers(0, 15) | st.sampled_from([1, 0xFFFF0000, 2**32 - 1])
events = st.tuples(st.sampled_from(["copy", "commit"]), masks)


def guarded(instruction: str, mask: int) -> str:
    return f"shr.u32 %r5, {mask}, %r1; and.b32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0; @%p1 {instruction};"


def complete(script: list[Event], waiting: int, newest: int | None) -> list[int]:
    """Which copies lane 0 sees complete behind the wait: of each its lanes read 4 bytes that are not 0."""
    lines, copies = [], 0
    for what, mask in script:
        if what == "copy":
            target = f"[%r3+{128 * copies}]"
            lines.append(guarded(f"cp.async.ca.shared.global {target}, [%d1], 4", mask))
            copies += 1
        else:
            lines.append(guarded("cp.async.commit_group", mask))
    wait = "cp.async.wait_all" if newest is None else f"cp.async.wait_group {newest}"
    reads = "".join(
        f"ld.shared.u32 %r6, [%r3+{128 * n}]; st.global.u32 [%d2+{128 * n}], %r6;" for n in range(copies)
    )
    text = module(
        f"""
        mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r4, %r1, 2; add.u32 %r3, %r2, %r4;
        ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; cvt.u64.u32 %d3, %r4;
        add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
        {"".join(lines)}
        {guarded(wait, waiting)}
        {reads}
        ret;""",
        parameters=2,
    )
    out = aligned(np.zeros((MOST, 32), np.uint32))
    source = aligned(np.full(32, 7, np.uint32))
    options = Options(completion="lazy", detectors=False)
    launch(text, source, out, block=(32, 1, 1), dynamic_smem=128 * MOST, options=options)
    return [number for number in range(copies) if out[number].any()]


def expected(script: list[Event], waiting: int, newest: int | None) -> list[int]:
    """Late completion performs copies in order, up to the last one that the wait needs."""
    last = max(needed(script, waiting, newest), default=-1)
    copies = [mask for what, mask in script if what == "copy"]
    return [number for number in range(last + 1) if copies[number]]


@example(script=[("copy", 3), ("commit", 1), ("copy", 3), ("commit", 2)], waiting=1, newest=0)
@example(script=[("copy", 3), ("commit", 1), ("copy", 3), ("commit", 2)], waiting=2, newest=0)
@example(script=[("copy", 1), ("commit", 1), ("copy", 1)], waiting=1, newest=None)
@settings(max_examples=examples(40, 1500), deadline=None)
@given(
    script=st.lists(events, max_size=MOST), waiting=masks.filter(bool), newest=st.none() | st.integers(0, 4)
)
def test_who_has_to_wait(script: list[Event], waiting: int, newest: int | None) -> None:
    """Any lanes copy, commit and wait."""
    assert complete(script, waiting, newest) == expected(script, waiting, newest)


@pytest.mark.parametrize("newest", [0, 1, 3])
def test_a_loop_that_leaves_some_outstanding(newest: int) -> None:
    """Software pipelines: a group for each round, of which the newest may be incomplete."""
    script = [("copy", 2**32 - 1), ("commit", 2**32 - 1)] * 5
    assert complete(script, 2**32 - 1, newest) == list(range(5 - newest))
