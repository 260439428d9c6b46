"""Instructions that an architecture does not have are refused before anything runs, compared with ptxas."""

from __future__ import annotations

import json
import re

import pytest

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.targets import missing
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch
from tests.emulator.ptxas_operands import DATA

RECORDED = json.loads(DATA.read_text())
#: What depends on operands, which are not looked at.
OPERANDS = r"max\.f32 .*(, .*){3}|mbarrier\.arrive\.shared\.b64 _?.*, "


@pytest.mark.parametrize("target", RECORDED["targets"])
def test_what_ptxas_has_of_a_target_is_executed_and_nothing_else(target: str) -> None:
    verdicts = RECORDED["targets"][target]
    assert len(verdicts) == len(RECORDED["verdicts"])
    for form, verdict in zip(RECORDED["verdicts"], verdicts):
        if not re.match(OPERANDS, form):
            assert (missing(target, form.split()[0]) == "") == (verdict == "1"), form


@pytest.mark.parametrize(("target", "instruction", "message"), [
    ("sm_90a", "st.bulk.weak.shared::cta [%r1], %d1, 0", "sm_90a does not have it: it needs sm_100 or a later"),
    ("sm_100", "setmaxnreg.inc.sync.aligned.u32 64", "sm_100 does not have it: it needs sm_90a or a later"),
    ("sm_100a", "wgmma.fence.sync.aligned", "sm_100a does not have it: only the generation of sm_90a"),
    ("sm_120a", "tcgen05.wait::ld.sync.aligned", "only the generation of sm_100a does"),
    ("sm_80", "barrier.cluster.arrive", "sm_80 does not have it: it needs sm_90 or a later"),
])  # fmt: skip
def test_a_launch_is_refused(target: str, instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(module(f"{instruction};\nret;", parameters=0, target=target))
    assert error.value.ptx_line is not None


def test_family_targets_have_what_those_of_one_architecture_have() -> None:
    assert not missing("sm_100f", "tcgen05.wait::ld.sync.aligned")
    assert missing("sm_100", "tcgen05.wait::ld.sync.aligned")
