"""Reports that the same instructions repeat: one of each kind, for which Python is not asked every time."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import EmulatorError, Options
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.units.sm import Cluster
from cute_kernels.emulator.races.checks import RaceChecks
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, launch, module

ROUNDS = 1000
HEAD = f"""
    mov.u32 %r0, dynamic; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; add.u32 %r2, %r2, %r0; xor.b32 %r5, %r2, 128;
    ld.param.u64 %d0, [p0]; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d0; mov.u32 %r9, 0;
    NEXT: {{}} add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, {ROUNDS}; @%p1 bra NEXT; ret;
"""
#: Kinds of reports of a loop, by its body.
LOOPS = {
    "ld.shared.b32 %r3, [%r2+64];": {"uninitialised-read"},
    "ld.shared.b32 %r3, [%r0+64];": {"uninitialised-read"},
    "st.shared.b32 [%r2], %r9; ld.shared.b32 %r3, [%r5];": {"shared-race", "uninitialised-read"},
    "xor.b32 %r6, %r1, 32; mad.wide.u32 %d2, %r6, 4, %d0; st.global.b32 [%d1], %r9; ld.global.b32 %r3, [%d2];":
        {"global-race"},
    "st.global.b32 [%d1], %r9; ld.global.nc.b32 %r3, [%d1];": {"non-coherent-load"},
}  # fmt: skip


@pytest.mark.parametrize("body", LOOPS)
def test_python_is_asked_a_few_times(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rounds of a fault cost what a thousand rounds without one do, but for a few."""
    asked, reports = [], []
    for place, name in ((RaceChecks, "_asked"), (Cluster, "_ask")):
        original = getattr(place, name)

        def counted(self: object, what: int, *rest: object, original: object = original) -> object:
            asked.append(what)
            return original(self, what, *rest)

        monkeypatch.setattr(place, name, counted)
    text = module(HEAD.format(body), parameters=1, target="sm_90a")
    options = Options(going_on=lambda error: reports.append(diagnose(error).kind) or True)
    launch(text, aligned(np.zeros(64, np.uint32)), block=64, options=options)
    assert set(reports) == LOOPS[body]
    assert len(asked) < ROUNDS // 4


def test_other_faults_of_the_same_instructions_are_reported() -> None:
    """Behind many races of lanes come those of warps and of clusters."""
    body = """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; and.b32 %r3, %r1, 31; shr.u32 %r4, %r1, 5; mov.u32 %r9, 0;
        ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r2, 256, %d0; mad.wide.u32 %d1, %r4, 128, %d1;
        NEXT: setp.ge.u32 %p2, %r9, 40; @%p2 mov.u64 %d1, %d0;
        add.u32 %r5, %r3, %r9; and.b32 %r5, %r5, 31; mad.wide.u32 %d2, %r5, 4, %d1;
        ld.global.b32 %r6, [%d2]; st.global.b32 [%d2], %r6;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 60; @%p1 bra NEXT; ret;
    """
    reports = set()

    def note(error: EmulatorError) -> bool:
        reports.add((diagnose(error).kind, str(error).split(", which the ")[1].split(" wrote")[0]))
        return True

    text, out = module(body, parameters=1, target="sm_90a"), aligned(np.zeros(128, np.uint32))
    launch(text, out, block=64, grid=2, options=Options(going_on=note))
    warps = [f"store of cluster {cluster}, CTA 0 warp {warp}" for cluster in range(2) for warp in range(2)]
    lanes, others = {("lanes-race", warps[number]) for number in (0, 2)}, {("global-race", each) for each in warps[:2]}
    assert lanes | others <= reports


def test_repeats_of_an_initialisation_are_not_put_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lane of every CTA initialises the same mbarriers: one report of each instruction, in words once."""
    worded, reports = [], []
    original = MBarriers.describe
    monkeypatch.setattr(MBarriers, "describe", lambda self, where: worded.append(where) or original(self, where))
    body = "mov.u32 %r0, dynamic; mbarrier.init.shared.b64 [%r0], 1; mbarrier.init.shared.b64 [%r0+8], 1; ret;"
    options = Options(going_on=lambda error: reports.append(diagnose(error).kind) or True)
    launch(module(body, parameters=0, target="sm_90a"), grid=50, options=options)
    assert reports == ["barrier-init-lanes"] * 2
    assert len(worded) <= 4
