"""What an asynchronous operation meets, however late, is reported at the instruction that issued it."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

ISSUES = "// issues"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra W;"

#: (body, error); the instruction in front of `ISSUES` is at fault, and lines behind it give it the time to happen.
CASES = {
    "bulk load of more bytes than announced": (
        f"""mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+1024], [%d0], 32, [dynamic]; {ISSUES}
        {WAIT}""",
        BarrierMisuse,
    ),
    "bulk store of what nobody has written": (
        f"""cp.async.bulk.global.shared::cta.bulk_group [%d0], [dynamic+2048], 16; {ISSUES}
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;""",
        IllegalAccess,
    ),
    "copy from where no array is": (
        f"""cp.async.ca.shared.global [dynamic+1024], [64], 4; {ISSUES}
        cp.async.commit_group;
        cp.async.wait_group 0;""",
        IllegalAccess,
    ),
    "arrival behind a copy, at what is no mbarrier": (
        f"""cp.async.ca.shared.global [dynamic+1024], [%d0], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [dynamic+512]; {ISSUES}
        cp.async.wait_all;""",
        BarrierMisuse,
    ),
}


def run(case: str, options: Options) -> int:
    """Launches a case; the PTX line at fault."""
    body, _ = CASES[case]
    text = module(
        f"""ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra END;
        mbarrier.init.shared.b64 [dynamic], 1;
        {body}
        END: ret;""",
        parameters=1,
    )
    line = next(i for i, each in enumerate(text.splitlines(), 1) if ISSUES in each)
    try:
        launch(text, np.zeros(64, np.uint32), options=options)
    except EmulatorError as error:
        assert isinstance(error, CASES[case][1])
        assert (error.ptx_line, error.warp) == (line, "CTA 0 warp 0")
        raise
    return line


@pytest.mark.parametrize("completion", ["eager", "lazy", "random"])
@pytest.mark.parametrize("case", CASES)
def test_the_place_is_where_it_was_issued(case: str, completion: str):
    with pytest.raises(CASES[case][1]):
        run(case, Options(completion=completion, seed=3))


@pytest.mark.parametrize("completion", ["eager", "lazy", "random"])
def test_and_where_execution_goes_on_after_the_report(completion: str):
    found: list[EmulatorError] = []
    options = Options(
        completion=completion, seed=3, going_on=lambda error: found.append(error) or True
    )
    line = run("bulk store of what nobody has written", options)
    assert [(error.ptx_line, error.warp) for error in found] == [(line, "CTA 0 warp 0")]
