"""A failing schedule, reduced to the fewest steps: programs whose minimal schedule is known."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.commands import cli
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.checking.reduction import fewest
from cute_kernels.emulator.checking.search import Budget, Search
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs.recorded import Recorder, Replay
from cute_kernels.emulator.steps import Step
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.reports import report_files

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {\n"

LOST_UPDATE = HEAD + """
.reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<2>;
ld.param.u64 %rd1, [p];
mov.u32 %r1, %tid.x;
and.b32 %r1, %r1, 31;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra END;
ld.relaxed.gpu.global.u32 %r2, [%rd1];
bra.uni ADD;
ADD:
add.u32 %r2, %r2, 1;
st.relaxed.gpu.global.u32 [%rd1], %r2;
END:
ret;
}
"""
"""Each warp adds one, by a load and a store: all ones arrive unless another warp comes in between."""


def write(folder: Path, ptx: str, grid: int, block: int) -> list[str]:
    """A program of one launch over an array of one number; its words on a command line."""
    folder.joinpath("k.ptx").write_text(ptx)
    arrays = {"x": {"dtype": "int32", "shape": [1]}}
    launch = {"grid": grid, "block": block, "arguments": ["x"]}
    folder.joinpath("k.json").write_text(json.dumps({"arrays": arrays, "launches": [launch]}))
    return [str(folder / "k.ptx"), str(folder / "k.json")]


def checked(folder: Path, words: list[str], *options: str) -> dict:
    """What `check` reports of the program."""
    report = folder / "report.json"
    assert cli.main(["check", "--arch", "sm_90a", "--quiet", "--report", str(report), *options, *words]) == 3
    (diagnostic,) = report_files.validated(report)["diagnostics"]
    return diagnostic


def replayed(diagnostic: dict, words: list[str], folder: Path) -> dict:
    """What `emulate` reports under the options before the steps, and the memory that it leaves."""
    options = shlex.split(re.search(r"\((.*)\)", diagnostic["steps"][0])[1])
    cli.main(["emulate", "--arch", "sm_90a", "--quiet", "--report", str(folder / "again.json"), *options, *words])
    return json.loads((folder / "again.json").read_text())


@pytest.mark.parametrize("warps", [2, 5])
def test_a_lost_update_takes_one_step(warps: int, tmp_path: Path) -> None:
    """A warp has read and not written when the others, whose turn comes first, write."""
    diagnostic = checked(tmp_path, write(tmp_path, LOST_UPDATE, 1, 32 * warps))
    assert diagnostic["kind"] == "different-result"
    head, line = diagnostic["steps"]
    assert re.fullmatch(r"in turn but for these \(--steps 0w[1-9]:3\)", head)
    assert re.fullmatch(r"CTA 0 warp [1-9] runs up to PTX line 15 `add.u32 %r2, %r2, 1`", line)


def test_one_that_the_first_warp_alone_can_lose_takes_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warp 0 has read and not written, which takes a turn; it would go on but for another warp's, which takes one."""
    atomic = "mov.u32 %r3, %tid.x;\nsetp.ne.u32 %p1, %r3, 0;\n@%p1 atom.relaxed.gpu.global.add.u32 %r2, [%rd1], 1;\n"
    ptx = LOST_UPDATE.replace("ld.relaxed", f"{atomic}@%p1 bra END;\nld.relaxed")
    diagnostic = checked(tmp_path, write(tmp_path, ptx, 1, 64))
    head, first, second = diagnostic["steps"]
    assert re.fullmatch(r"in turn but for these \(--steps 0w0:\d,0w1\)", head)
    assert first.startswith("CTA 0 warp 0 runs up to PTX line 19 `add.u32")
    assert second == "CTA 0 warp 1 runs to its end"
    printed = capsys.readouterr().err
    assert f"  steps: {head}\n      1: {first}\n      2: {second}\n" in printed


def test_a_signal_that_one_cluster_may_miss_takes_one_step(tmp_path: Path) -> None:
    """CTA 1 does something else when it comes before CTA 0."""
    ptx = HEAD + """
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.relaxed.gpu.global.u32 [%rd1], 1;
    @%p1 bra END;
    ld.relaxed.gpu.global.u32 %r2, [%rd1];
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra END;
    trap;
    END:
    ret;
    }
    """
    words = write(tmp_path, ptx, 2, 32)
    diagnostic = checked(tmp_path, words)
    assert diagnostic["kind"] == "trap"
    assert diagnostic["steps"][0] == "in turn but for these (--steps 1w0)"
    assert len(diagnostic["steps"]) == 2
    assert [each["kind"] for each in replayed(diagnostic, words, tmp_path)["diagnostics"]] == ["trap"]


def test_a_timeout_that_a_kernel_takes_for_a_phase_is_one_step(tmp_path: Path) -> None:
    """The second of three try_waits has no loop."""
    ptx = HEAD + """
    .shared .align 8 .b64 bar;
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<3>;
    mov.u32 %r1, bar;
    mbarrier.init.shared.b64 [%r1], 32;
    mbarrier.arrive.shared.b64 _, [%r1];
    FIRST:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra FIRST;
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @%p1 bra LAST;
    trap;
    LAST:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra LAST;
    mbarrier.inval.shared.b64 [%r1];
    ret;
    }
    """.replace("mbarrier.init.shared.b64 [%r1], 32;", "mov.u32 %r2, %tid.x;\nsetp.eq.u32 %p2, %r2, 0;\n"
                "@%p2 mbarrier.init.shared.b64 [%r1], 32;\nbar.warp.sync -1;")
    ptx = ptx.replace("mbarrier.inval", "bar.warp.sync -1;\n@%p2 mbarrier.inval")
    words = write(tmp_path, ptx, 1, 32)
    diagnostic = checked(tmp_path, words)
    assert diagnostic["kind"] == "trap"
    assert re.fullmatch(r"in turn but for these \(--steps 0t0:\d\)", diagnostic["steps"][0])
    assert "of a complete phase reports a timeout" in diagnostic["steps"][1] and len(diagnostic["steps"]) == 2
    assert [each["kind"] for each in replayed(diagnostic, words, tmp_path)["diagnostics"]] == ["trap"]


def test_a_refused_request_for_a_cluster_is_one_step(tmp_path: Path) -> None:
    """A kernel that takes the answer for that of the last cluster; its second request is the one that must succeed."""
    ptx = HEAD.replace("sm_90a", "sm_100a").replace("8.7", "8.8") + """
    .shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar;
    .reg .b64 %rd<3>; .reg .b32 %r<8>; .reg .pred %p<4>; .reg .b128 %q;
    mov.u32 %r1, bar; mov.u32 %r2, answer; mov.u32 %r3, 0; mov.u32 %r4, %ctaid.x;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra END;
    mbarrier.init.shared.b64 [%r1], 1;
    NEXT:
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r1];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r3;
    @!%p1 bra WAIT;
    ld.shared.b128 %q, [%r2];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
    fence.proxy.async.shared::cta;
    xor.b32 %r3, %r3, 1;
    @%p2 bra NEXT;
    mbarrier.inval.shared.b64 [%r1];
    ld.param.u64 %rd1, [p];
    atom.relaxed.gpu.global.add.u32 %r5, [%rd1], %r3;
    END:
    ret;
    }
    """
    words = write(tmp_path, ptx, 3, 1)
    report = tmp_path / "report.json"
    assert cli.main(["check", "--arch", "sm_100a", "--quiet", "--report", str(report), *words]) == 3
    (diagnostic,) = report_files.validated(report)["diagnostics"]
    assert diagnostic["kind"] == "different-result"
    head, line = diagnostic["steps"]
    assert re.fullmatch(r"in turn but for these \(--steps 0c[01]\)", head)
    assert line == "cluster 0: a try_cancel reports that no cluster is left"


def test_what_is_left_is_minimal_whatever_the_order() -> None:
    """Every pair and triple of nine items, the only ones that fail together."""
    for size in (0, 1, 2, 3):
        for needed in itertools.combinations(range(9), size):
            assert fewest(range(9), lambda items, needed=needed: set(needed) <= set(items)) == list(needed)


@pytest.mark.parametrize("text", ["0w3:14", "0w3", "12a0", "0a-1", "1t2:0", "3c0", "0h3:14-2w1:20"])
def test_steps_are_read_as_they_are_written(text: str) -> None:
    assert str(Step.of(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "w1", "0x1", "0w", "0t1", "0a1:2", "0c1:2", "0w1:", "0w1:-3", "0h1:2",
     "0h1-0w1:2", "0w1:2-0w1:2", "0h1:2-0a1:2"],
)
def test_other_texts_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="CLUSTERwWARP"):
        Step.of(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["emulate", "--steps", f"0w1,{text}", "k.ptx", "k.json"])
    assert end.value.code == 2 and "CLUSTERwWARP" in capsys.readouterr().err


def test_steps_are_the_whole_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--steps", "0w1", "--interleave", "random", __file__]) == 2
    assert "steps are the whole schedule" in capsys.readouterr().err


def test_copies_that_end_in_the_other_order_take_a_turn_and_two_steps(tmp_path: Path) -> None:
    """Two bulk stores to one place: the later one is the last to be written, unless it is read and written first."""
    ptx = HEAD + """
    .shared .align 16 .b8 buffer[32];
    .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    mov.u32 %r1, buffer;
    st.shared.v4.u32 [%r1], {1, 1, 1, 1};
    st.shared.v4.u32 [%r1+16], {2, 2, 2, 2};
    fence.proxy.async.shared::cta;
    add.u32 %r2, %r1, 16;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    END:
    ret;
    }
    """
    words = write(tmp_path, ptx, 1, 32)
    described = tmp_path / "k.json"
    described.write_text(described.read_text().replace('"shape": [1]', '"shape": [4]'))
    diagnostic = checked(tmp_path, words, "--no-detectors")
    assert diagnostic["kind"] == "different-result"
    head, turn, *effects = diagnostic["steps"]
    assert re.fullmatch(r"in turn but for these \(--completion lazy --steps 0w0,0a1,0a1\)", head)
    assert "runs until it waits for the writes of all but 0 bulk groups" in turn
    assert [re.fullmatch(r"takes effect: bulk store .* \((\w+)\)", each)[1] for each in effects] == ["read", "write"]


EARLY = """
    mov.u32 %r0, dynamic; mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0];
    setp.eq.u32 %p0, %r1, 0;
    @%p0 st.shared.u32 [%r0], 0;
    bar.sync 0;
    and.b32 %r2, %r1, 31;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra WAIT;
    atom.relaxed.cta.shared.add.u32 %r3, [%r0], 1;
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra WAIT;
    @!%p0 bra WAIT;
    st.global.u32 [%d0], 1;
    WAIT:
    griddepcontrol.wait;
    ret;
"""
"""The warp that comes first stores what the launch before has stored, without waiting for it, if it is warp 0:
in turn warp 1 does, whose arrival opens the barrier."""


def test_a_schedule_that_overlaps_launches_is_reduced() -> None:
    out, recorder = aligned(np.zeros(32, np.uint32)), Recorder()
    before = "ld.param.u64 %d0, [p0]; st.global.u32 [%d0], 1; griddepcontrol.launch_dependents; ret;"
    parameters, regions = (out.ctypes.data.to_bytes(8, "little"),), [(out.ctypes.data, out.nbytes)]
    for body, threads, programmatic in ((before, 32, False), (EARLY, 64, True)):
        text = module(body, parameters=1, target="sm_90a")
        launch = CapturedLaunch("k", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 16, parameters, text, programmatic)
        recorder.take(launch, regions, overlaps=programmatic)
        out[0] = 1  # what the first one leaves
    found = Search(recorder.launches, Budget(seconds=None, seeds=40)).run()
    assert found.kind == "GlobalMemoryRace" and found.schedule.overlap
    steps = found.fewest.schedule.steps
    assert found.fewest.schedule == Schedule(overlap=True, steps=steps) and 1 <= len(steps) <= 2
    assert found.fewest.lines[-1].startswith(f"CTA 0 warp {steps[-1].who} runs")
    replay = Replay(found.recorded)
    with pytest.raises(GlobalMemoryRace, match="launch before this one"):
        replay.run(found.fewest.schedule.options(), overlap=True)
    for less in range(len(steps)):  # none can be left out
        replay.run(Schedule(steps=steps[:less] + steps[less + 1 :]).options(), overlap=True)
