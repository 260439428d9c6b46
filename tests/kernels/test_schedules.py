"""Our kernels under schedules that hypothesis draws and shrinks; a failure prints the command that replays it.

`make nightly` draws many, of every kernel.
"""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.plan import make_plan
from cute_kernels.testing import strategies
from tests.emulator.checking.mutation.targets import TARGETS, GatherTarget, ImagesTarget, KernelTarget
from tests.emulator.image_inputs import PATCH
from tests.emulator.schedules import Run, main
from tests.nightly import drawn, examples


def is_legal(run: Run) -> bool:
    """Whether the kernel takes these sizes: a block of 64 for each slice of K, whole patches and rows of a grid."""
    if run.kernel == "gemm-sm90-split":
        return run.k > 64
    target = TARGETS[run.kernel]
    if run.kernel == "images-sm80":
        return run.k >= PATCH**2
    if isinstance(target, ImagesTarget | GatherTarget):
        # Three stages hold a tile of one channel, and the parts of a pair's tile read them in turn.
        most = 2 * PATCH**2 if run.kernel == "images-sm100" else run.k + 1
        return PATCH**2 <= run.k < most and run.positions >= target.config.tile_patches
    return type(target) is not KernelTarget or takes(target, run)


def takes(target: KernelTarget, run: Run) -> bool:
    """Whether the patch embed of rows has a plan for these sizes with the target's configuration."""
    problem = PatchEmbedProblem(run.batch * run.positions, run.n, run.k, run.positions)
    try:
        make_plan(problem, target.config, sm_count=getattr(target.config, "cluster", 2))
    except ValueError:
        return False
    return True


RUNS = st.builds(
    Run,
    kernel=drawn(["sm90-streamed", "sm100-on-chip-one-cta", "images-sm90", "gemm-sm90-split"], sorted(TARGETS)),
    batch=st.integers(1, 6),
    positions=st.sampled_from([1, 32, 100, 128, 140]),
    n=st.sampled_from([8, 128, 200, 264]),
    k=st.sampled_from([16, 272, 640]),
    schedule=strategies.schedules(),
).filter(is_legal)


@settings(
    max_examples=examples(4, 1000),
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(run=RUNS)
def test_no_schedule_disturbs_a_kernel(run: Run) -> None:
    note(f"replay: {run.command()}")
    problem = run.execute()
    assert not problem, f"{problem}\nreplay: {run.command()}"


# The MMA warp does not wait for the epilogue to have read an accumulator before it overwrites it. With 768 inputs the
# epilogue is always done by then, unless it is held back.
UNGUARDED = Run(
    "sm100", batch=6, positions=128, n=256, k=768, schedule=Schedule(completion="random"), detectors=False,
    mutant="drop mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 #0",
)  # fmt: skip


def test_starving_a_role_finds_what_random_interleaving_does_not(capsys: pytest.CaptureFixture) -> None:
    def failures(interleave: str) -> list[Run]:
        runs = [dataclasses.replace(UNGUARDED, schedule=Schedule(seed, "random", interleave)) for seed in range(6)]
        return [run for run in runs if run.execute()]

    assert not failures("random")
    failure, *_ = failures("starve")
    # The printed command does the same again, and without the mutation it is as expected.
    _, _, module, *arguments = shlex.split(failure.command())
    assert module == "tests.emulator.schedules"
    assert main(arguments) == 1
    assert capsys.readouterr().out.strip() == failure.execute().strip()
    assert main(arguments[: arguments.index("--mutant")]) == 0
    assert capsys.readouterr().out.strip() == "as expected"


def test_the_same_seed_gives_the_same_schedule() -> None:
    """Reports of a hang name every warp's place, so that two equal reports are two equal schedules."""
    hanging = "drop mbarrier.arrive.relaxed.cluster.shared::cluster.b64 #0"
    reports = [
        Run("sm100", 6, 128, 256, 128, Schedule(seed, "random", "starve"), mutant=hanging).execute()
        for seed in (5, 5, 8)
    ]
    assert reports[0] == reports[1] and reports[0].startswith(("Hang", "TensorMemoryRace", "IllegalAccess"))
    assert len(set(reports)) > 1


def test_a_run_is_replayed_by_its_command(capsys: pytest.CaptureFixture) -> None:
    """A hang's report names every warp's place."""
    run = Run("sm100", 6, 128, 256, 128, Schedule(5), mutant="count+1 mbarrier.init.shared.b64 #0")
    assert main(shlex.split(run.command())[3:]) == 1
    report = run.execute()
    assert capsys.readouterr().out.strip() == report.strip() and report.startswith("Hang")


@pytest.mark.parametrize("arguments", [["--kernel", "sm100", "--mutant", "no such"], ["--kernel", "sm100", "--k", "3"]])
def test_what_cannot_be_replayed_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
