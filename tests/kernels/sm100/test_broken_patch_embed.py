"""Kernels broken on purpose: every fault must be reported or change the result, and the whole kernel must not.

The first two are the historic bugs of the CUDA original, which constant test data hid.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import (
    BarrierMisuse,
    EmulatorError,
    GlobalMemoryRace,
    Hang,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    TensorMemoryRace,
)
from cute_kernels.kernels.graph import sm100_graph
from cute_kernels.kernels.sm100.patch_embed import Sm100PatchEmbedEpilogue
from cute_kernels.operations.compile import compile_plan, compile_uncached
from cute_kernels.plan import patch_embed_sm100 as plan_module
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case


def _case():
    return make_case(batch=2, positions=196, n=256, k=256, sm_count=2, seed=11)


def _without(ptx: str, pattern: str, *, which: int | None = None) -> str:
    """PTX with the lines that match ``pattern`` commented out: all of them, or the one at index ``which``."""
    lines = ptx.splitlines()
    hits = [i for i, line in enumerate(lines) if re.match(rf"\s*(@!?%p\d+\s+)?{pattern}", line)]
    assert hits, f"no line matches {pattern}"
    for i in hits if which is None else [hits[which]]:
        lines[i] = "// " + lines[i]
    return "\n".join(lines)


def _changed(case, pattern: str, **kwargs):
    artifact = compile_plan(case.plan, emulated=True)
    return dataclasses.replace(artifact, ptx=_without(artifact.ptx, pattern, **kwargs))


@pytest.mark.parametrize("strict", [False, True])
def test_the_whole_kernel_is_clean(strict: bool) -> None:
    case = _case()
    emulate(case.plan, case.tensors, Options(strict=strict), repeat=2)
    assert not case.mismatches().any()


def test_staging_not_aligned_to_the_swizzle_period(monkeypatch) -> None:
    """TMA XORs absolute address bits: with staging 128 bytes off, each row's 16-byte chunks land permuted."""

    def shifted(plan):
        *regions, staging = whole(plan)
        return (*regions, dataclasses.replace(staging, offset=staging.offset + 128))

    whole = plan_module.Sm100PatchEmbedPlan.smem.func
    monkeypatch.setattr(plan_module.Sm100PatchEmbedPlan, "smem", property(shifted))
    case = _case()
    emulate(case.plan, case.tensors, artifact=compile_uncached(case.plan, emulated=True))
    assert case.mismatches().float().mean() > 0.5
    # Nothing is lost, only moved: each row of each 64-column region holds the right values in a wrong order.
    got = case.tensors.out.float().view(-1, 4, 64).sort(dim=-1).values
    assert got.equal(case.expected.float().view(-1, 4, 64).sort(dim=-1).values)


def test_missing_proxy_fence_before_the_tma_store() -> None:
    case = _case()
    with pytest.raises(ProxyFenceMissing, match=r"fence\.proxy\.async"):
        emulate(case.plan, case.tensors, artifact=_changed(case, r"fence\.proxy\.async"))


def test_illegal_lane_quarter(monkeypatch) -> None:
    """Rows by epilogue index instead of hardware warp id, as the CUDA original did."""
    monkeypatch.setattr(Sm100PatchEmbedEpilogue, "lane_quarter", staticmethod(lambda warp: (warp - 2) % 4))
    case = _case()
    with pytest.raises(IllegalAccess, match="quarter"):
        emulate(case.plan, case.tensors, artifact=compile_uncached(case.plan, emulated=True))


def test_missing_arrive_is_reported_as_a_hang() -> None:
    """Without the epilogue's release the MMA warp waits for an accumulator at the third tile."""
    case = make_case(batch=4, positions=196, n=256, k=128, sm_count=2, seed=12)
    assert case.plan.tiles >= 3
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=_changed(case, r"mbarrier\.arrive\.relaxed\.cluster"))
    report = error.value.report
    mma = next(line for line in report.splitlines() if line.startswith("CTA 0 warp 1 (mma)"))
    offset = 1024 + barrier_offset(case.plan, "accumulator_empty")
    arrivals = 2 * case.plan.config.epilogue_warps
    assert f"({offset:#x}) of CTA 0" in mma
    assert "waits for parity" in mma and f"{arrivals} of {arrivals} arrivals pending" in mma
    assert "0 transaction bytes pending" in mma and "initialised by CTA 0 warp 0 (load)" in mma
    assert "PTX line" in mma and "mbarrier.try_wait" in mma and ".py:" in mma
    waiting = {role for role in ("load", "mma", "epilogue") if f"({role}) waits for parity" in report}
    assert waiting == {"load", "mma", "epilogue"}


@pytest.mark.parametrize("instruction", ["mbarrier.arrive", "mbarrier.try_wait.parity"])
def test_accumulators_handed_to_the_other_cta_at_the_scope_of_one(instruction: str) -> None:
    """Epilogue warps of both CTAs release an accumulator to the leader: relaxed, tcgen05.fence around it."""
    case = make_case(batch=4, positions=196, n=256, k=128, sm_count=2, seed=12)
    artifact = compile_plan(case.plan, emulated=True)
    narrow = artifact.ptx.replace(f"{instruction}.relaxed.cluster", f"{instruction}.relaxed.cta")
    assert narrow != artifact.ptx
    with pytest.raises(TensorMemoryRace, match="mma.* writes TMEM column .* which the tcgen05.ld of CTA 1 .* read"):
        emulate(case.plan, case.tensors, artifact=dataclasses.replace(artifact, ptx=narrow))


def test_a_launch_that_does_not_wait_for_the_one_before() -> None:
    """Both write the output; the first launch alone has nothing to wait for."""
    case = _case()
    artifact = _changed(case, r"griddepcontrol\.wait")
    emulate(case.plan, case.tensors, artifact=artifact)
    with pytest.raises(GlobalMemoryRace, match="which the launch before this one wrote before"):
        emulate(case.plan, case.tensors, artifact=artifact, repeat=2)


def barrier_offset(plan, name: str) -> int:
    return 8 * next(b.slot for b in sm100_graph(plan).barriers() if b.name == name)


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (
            r"mbarrier\.arrive\.expect_tx",
            Hang,
            r"\(mma\) waits for parity 0 .* 1 of 1 arrivals pending, -65536 transaction bytes pending",
        ),
        (
            r"cp\.async\.bulk\.tensor\.[23]d\.shared::cluster",
            Hang,
            r"\(mma\) waits for parity 0 .* 0 of 1 arrivals pending, 65536 transaction bytes pending",
        ),
        (
            r"tcgen05\.commit",
            Hang,
            r"\(load\) waits for parity 0 .* 1 of 1 arrivals pending, 0 transaction bytes pending.* by nobody",
        ),
        (r"barrier\.cluster\.arrive", BarrierMisuse, r"barrier\.cluster\.wait without barrier\.cluster\.arrive"),
    ],
)
def test_other_missing_signals(pattern: str, error: type[EmulatorError], message: str) -> None:
    case = _case()
    with pytest.raises(error, match=message):
        emulate(case.plan, case.tensors, artifact=_changed(case, pattern))


def test_writing_staging_before_tma_has_read_it() -> None:
    """Without wait_group.read the next tile's values go where a TMA store may not have read this tile's yet."""
    case = make_case(batch=6, positions=196, n=128, k=128, sm_count=2, seed=13)
    artifact = _changed(case, r"cp\.async\.bulk\.wait_group\.read")
    with pytest.raises(SharedMemoryRace, match=r"a store of .*writes .* which the TMA store .*read before.*st\.shared"):
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=artifact)


def test_writing_staging_too_early_gives_wrong_results() -> None:
    """Detectors off: a lazy TMA store sends the next tile's values."""
    case = make_case(batch=6, positions=196, n=128, k=128, sm_count=2, seed=13)
    artifact = _changed(case, r"cp\.async\.bulk\.wait_group\.read")
    emulate(case.plan, case.tensors, Options(completion="lazy", detectors=False), artifact=artifact)
    assert case.mismatches().float().mean() > 0.2


# --- faults that no eager schedule shows in results -----------------------------------------------------------------


def _dropped(case, pattern: str, *, after: str = "", before: str = "", first: int = 0):
    """The kernel without the matches (from the ``first`` on) whose neighbouring instructions match, too."""
    artifact = compile_plan(case.plan, emulated=True)
    lines = artifact.ptx.splitlines()
    code = [i for i, line in enumerate(lines) if not re.match(r"\s*(//|\.loc|$)", line)]
    hits = []
    for place, i in enumerate(code[1:-1], 1):
        previous, following = lines[code[place - 1]], lines[code[place + 1]]
        if re.search(pattern, lines[i]) and re.search(after, previous) and re.search(before, following):
            hits.append(i)
    assert hits[first:], f"nothing matches {pattern}"
    for i in hits[first:]:
        lines[i] = "// " + lines[i]
    return dataclasses.replace(artifact, ptx="\n".join(lines))


def _not_waiting(case):
    """The MMA warp takes every accumulator as free without looking."""
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(
        r"mbarrier\.try_wait\.parity\.relaxed\.cluster\.shared::cta\.b64 complete,[^;]*;",
        "setp.eq.u32 complete, 0, 0;",
        artifact.ptx,
    )
    assert count == 1
    return dataclasses.replace(artifact, ptx=ptx)


def _long_case():
    """Three tiles and K = 768: the MMA warp is far behind the epilogue, so overwriting accumulators does no harm."""
    return make_case(batch=4, positions=192, n=256, k=768, sm_count=2, seed=14)


def _never_wait(complete: str, scope: str) -> tuple[str, str]:
    """An edit that turns every try_wait of one kind into "complete" without looking."""
    return rf"mbarrier\.try_wait\.parity{scope}\.b64\s+{complete},[^;]*;", f"setp.eq.u32 {complete}, 0, 0;"


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        pytest.param(
            _not_waiting,
            TensorMemoryRace,
            r"tcgen05\.mma.* writes TMEM column .* tcgen05\.ld of CTA \d warp \d \(epilogue\) read",
            id="accumulators overwritten without waiting",
        ),
        pytest.param(
            lambda case: _dropped(case, r"tcgen05\.fence::before_thread_sync", before=r"bar\.warp\.sync"),
            TensorMemoryRace,
            r"tcgen05\.mma.* writes TMEM column .* tcgen05\.ld of .* read .*: it is not known to be complete",
            id="accumulator released without tcgen05.fence",
        ),
        pytest.param(
            lambda case: _dropped(case, r"tcgen05\.fence::after_thread_sync", after=r"\}"),
            TensorMemoryRace,
            r"tcgen05\.mma.* writes TMEM column .* tcgen05\.ld of .* read .*: it is not known to be complete",
            id="accumulator taken without tcgen05.fence",
        ),
        pytest.param(
            lambda case: _dropped(case, r"tcgen05\.wait::ld"),
            TensorMemoryRace,
            r"tcgen05\.mma.* writes TMEM column .* tcgen05\.ld of .* read .*: it is not known to be complete",
            id="accumulator released without tcgen05.wait::ld",
        ),
        pytest.param(
            lambda case: _dropped(case, r"bar\.warp\.sync", after=r"fence\.proxy\.async"),
            SharedMemoryRace,
            r"TMA store .* reads .* which the store of CTA \d warp \d \(epilogue\) wrote before",
            id="TMA store before the warp agrees",
        ),
        pytest.param(
            lambda case: _dropped(case, r"barrier\.cluster\.", first=2),
            (IllegalAccess, TensorMemoryRace),
            r"tcgen05\.dealloc frees|is not allocated",
            id="no cluster barrier at the end",
        ),
    ],
)
def test_found_by_happens_before_under_the_eager_schedule(broken, error, message: str) -> None:
    case = _long_case()
    with pytest.raises(error, match=message):
        emulate(case.plan, case.tensors, artifact=broken(case))


def test_the_long_case_is_clean() -> None:
    case = _long_case()
    for options in (Options(), Options(seed=3, completion="random", interleave="starve")):
        emulate(case.plan, case.tensors, options)
        assert not case.mismatches().any()
