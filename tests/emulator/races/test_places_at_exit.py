"""What a kernel has left undone when it exits is reported where it began: PTX line, source line and warp."""

from __future__ import annotations

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.text import render
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

LEFT = "// left"
SOURCE = 100  # line of the source that the first line of a body comes from
GROUP = "tcgen05.{}.cta_group::{}.sync.aligned"
#: Warp 1 allocates, and warp 2 after it; warp 0 frees what %r8 says: bit 0 the first allocation, bit 1 the other.
TWO = f"""mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r8, FREED;
    setp.ne.u32 %p1, %r2, 1; @%p1 bra SECOND;
    {GROUP.format("alloc", 1)}.shared::cta.b32 [dynamic], 32; // first
    SECOND: bar.sync 0; setp.ne.u32 %p1, %r2, 2; @%p1 bra FREE;
    {GROUP.format("alloc", 1)}.shared::cta.b32 [dynamic+4], 64; // second
    FREE: bar.sync 0; setp.ne.u32 %p1, %r2, 0; @%p1 bra END;
    ld.shared.b32 %r3, [dynamic]; ld.shared.b32 %r4, [dynamic+4];
    and.b32 %r5, %r8, 1; setp.eq.u32 %p2, %r5, 0; @%p2 bra OTHER;
    {GROUP.format("dealloc", 1)}.b32 %r3, 32;
    OTHER: and.b32 %r5, %r8, 2; setp.eq.u32 %p2, %r5, 0; @%p2 bra END;
    {GROUP.format("dealloc", 1)}.b32 %r4, 64;
    END: ret;"""
#: The first allocation is freed, and its columns are allocated anew by another warp.
AGAIN = f"""mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra SECOND;
    {GROUP.format("alloc", 1)}.shared::cta.b32 [dynamic], 32; bar.warp.sync -1; ld.shared.b32 %r3, [dynamic];
    {GROUP.format("dealloc", 1)}.b32 %r3, 32;
    SECOND: bar.sync 0; setp.ne.u32 %p1, %r2, 3; @%p1 bra END;
    {GROUP.format("alloc", 1)}.shared::cta.b32 [dynamic], 32; {LEFT}
    END: ret;"""


def located(body: str) -> str:
    """A module each of whose lines has a line of the source."""
    head, _, rest = module(body, parameters=0, head='.file 1 "kernel.py"').partition(body)
    lines = [f".loc 1 {SOURCE + number} 5\n{line}" for number, line in enumerate(body.splitlines())]
    return head + "\n".join(lines) + rest


def line_of(text: str, mark: str) -> int:
    """The first line with a mark, from 1 on."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if mark in line)


def reported(text: str, warps: int = 4, ctas: int = 1) -> list[EmulatorError]:
    """All that is reported where execution goes on; the first of it is what is raised otherwise."""
    found: list[EmulatorError] = []
    shape = {"grid": (ctas, 1, 1), "cluster": (ctas, 1, 1), "block": (32 * warps, 1, 1)}
    launch(text, **shape, options=Options(going_on=lambda error: found.append(error) or True))
    if found:
        with pytest.raises(type(found[0])) as raised:
            launch(text, **shape, options=Options())
        assert str(raised.value) == str(found[0])
        found[0] = raised.value
    return found


@pytest.mark.parametrize("freed", range(4))
def test_tensor_memory_is_reported_where_it_was_allocated(freed: int):
    text = located(TWO.replace("FREED", str(freed)))
    left = [(1, 32, "first"), (2, 64, "second")]
    expected = [
        (f"the CTA exits with {columns} TMEM columns allocated by warp {warp}", line_of(text, f"// {mark}"),
         f"kernel.py:{SOURCE - 1 + line_of(TWO, mark)}", f"CTA 0 warp {warp}", "tensor-memory-leak")
        for bit, (warp, columns, mark) in enumerate(left)
        if not freed >> bit & 1
    ]  # fmt: skip
    found = reported(text)
    assert [(e.message, e.ptx_line, e.source, e.warp, e.kind) for e in found] == expected
    assert all(isinstance(error, IllegalAccess) and "tcgen05.alloc" in error.instruction for error in found)


def test_columns_that_are_allocated_twice_are_the_last_ones():
    text = located(AGAIN)
    (error,) = reported(text)
    assert (error.ptx_line, error.warp) == (line_of(text, LEFT), "CTA 0 warp 3")


def test_each_cta_of_a_pair_is_reported():
    """Both allocate together; CTA 1 comes later, and its allocation is made by the time that CTA 0 comes back."""
    text = located(f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r2, 0; @%p1 bra GO; nanosleep.u32 100;
        GO: {GROUP.format("alloc", 2)}.shared::cta.b32 [dynamic], 128; {LEFT}
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;""")
    found = reported(text, warps=1, ctas=2)
    assert [(error.ptx_line, error.warp) for error in found] == [
        (line_of(text, LEFT), "CTA 0 warp 0"), (line_of(text, LEFT), "CTA 1 warp 0")
    ]  # fmt: skip


def test_the_report_shows_line_warp_and_columns():
    text = located(TWO.replace("FREED", "1"))
    (error,) = reported(text)
    place = f"kernel.py:{SOURCE - 1 + line_of(TWO, '// second')}"
    shown = render(diagnose(error))
    assert shown.splitlines()[0] == (
        "error[tensor-memory-leak]: the CTA exits with 64 TMEM columns allocated by warp 2"
    )
    assert f"--> {place}" in shown.splitlines()[1] and "warp 2" in shown.splitlines()[1]
    assert f"PTX line {line_of(text, '// second')}" in shown.splitlines()[1]
    assert "where: columns 32 to 95 of the tensor memory of CTA 0" in shown


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
#: A thread commits twice to each of two mbarriers, and in the end waits for the later of two commits only.
COMMITS = f"""mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra LAST;
    mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1; fence.mbarrier_init.release.cluster;
    {COMMIT} [dynamic];
    {COMMIT} [dynamic+8];
    W0: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W0;
    W1: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra W1;
    {COMMIT} [dynamic]; {LEFT}
    {COMMIT} [dynamic+8];
    W2: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], 1; @!%p3 bra W2;
    LAST: ret;"""
#: CTA 1 arrives at two mbarriers of CTA 0, which waits for the later arrival only.
ARRIVALS = f"""mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; mov.u32 %r2, %cluster_ctarank; mov.b32 %r3, dynamic;
    @%p1 bra MEET; mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1;
    MEET: barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra LAST; mapa.shared::cluster.u32 %r4, %r3, 0;
    setp.eq.u32 %p2, %r2, 0; @%p2 bra W0;
    mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r4]; {LEFT}
    mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r4+8];
    bra LAST;
    W0: mbarrier.try_wait.parity.acquire.cta.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra W0;
    LAST: ret;"""


@pytest.mark.parametrize(("body", "ctas", "warp"), [(COMMITS, 1, "CTA 0 warp 0"), (ARRIVALS, 2, "CTA 1 warp 0")])
def test_what_may_come_after_the_exit_is_reported_where_it_was_issued(body: str, ctas: int, warp: str):
    text = located(body)
    options = Options(strict=True)
    with pytest.raises(IllegalAccess, match="CTA 0 may exit before .* is over") as error:
        launch(text, grid=(ctas, 1, 1), cluster=(ctas, 1, 1), options=options)
    assert (error.value.ptx_line, error.value.warp) == (line_of(text, LEFT), warp)
    assert error.value.source == f"kernel.py:{SOURCE - 1 + line_of(body, LEFT)}"
