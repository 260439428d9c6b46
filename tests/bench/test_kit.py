"""The kit for a rented GPU, rehearsed: the benches take its commands, and it survives what cuts it off."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from bench import gemm, images, kit, mma_sync, patch_embed
from bench.configs import BENCHED, parse_first, rows_type
from cute_kernels.config import PatchEmbedProblem
from cute_kernels.plan import PLANNERS, make_plan


def headline(arch: str) -> PatchEmbedProblem:
    return PatchEmbedProblem(4736 * 196, 768, 768, 196, in_dtype=rows_type(arch))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("arch", BENCHED)
@pytest.mark.parametrize(("steps", "minutes"), [(kit.steps, 30), (kit.brief_steps, 12)])
def test_benches_take_the_commands(arch, steps, minutes, tmp_path):
    """Arguments are parsed by the benches' own parsers, and every module is there."""
    parsers = {"patch_embed": patch_embed, "images": images, "gemm": gemm, "mma_sync": mma_sync}
    parsed = 0
    for step in steps(arch, tmp_path):
        assert step.command[0] == "-m" and step.seconds <= 420
        module = step.command[1]
        if module.startswith("bench."):
            assert (kit.ROOT / f"{module.replace('.', '/')}.py").exists()
        if module.removeprefix("bench.") in parsers:
            arguments = parsers[module.removeprefix("bench.")].parse_arguments(step.command[2:])
            assert arguments.name == step.name and arguments.output == tmp_path / "results"
            parsed += 1
    assert parsed == (4 if arch in kit.DESIGNS else 5)
    assert sum(step.seconds for step in steps(arch, tmp_path)) <= minutes * 60


@pytest.mark.parametrize("arch", BENCHED)
def test_a_rehearsal_has_every_step_and_less_of_it(arch, tmp_path):
    steps, brief = (
        {step.name: step for step in make(arch, tmp_path)} for make in (kit.steps, kit.brief_steps)
    )
    assert list(brief) == list(steps)
    for name in ("designs", "tunables"):
        words = brief[name].command
        assert words == steps[name].command[: len(words)]
        assert len(words) == words.index("--configs") + 3
    words = brief["tests"].command
    assert "tests/gpu" not in words and all((kit.ROOT / word).exists() for word in words if word.endswith(".py"))
    words = brief["images"].command
    assert words[words.index("--batches") + 1 : words.index("--peers")] == ("64",)
    assert "8192" not in brief["gemm"].command and "4096" in brief["gemm"].command
    assert brief["tune"].command[-1] == "--brief"
    if arch not in kit.DESIGNS:
        assert not any("ncu" in step.needs for step in steps.values())


def test_a_brief_call_runs_the_brief_steps(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(kit, "architecture", lambda: "sm_90a")
    monkeypatch.setattr(kit, "run_all", lambda todo, output, minutes: ran.append((todo, minutes)) or {})
    monkeypatch.setattr(kit, "pack", lambda output: output)
    for arguments, expected in (
        (["--brief"], (kit.brief_steps("sm_90a", tmp_path), kit.BRIEF_MINUTES)),
        ([], (kit.steps("sm_90a", tmp_path), 30)),
        (["--brief", "--minutes", "3"], (kit.brief_steps("sm_90a", tmp_path), 3)),
    ):
        kit.main(["--output", str(tmp_path), *arguments])
        assert ran.pop() == expected


@pytest.mark.parametrize("arch", BENCHED)
def test_configurations_are_legal_and_differ(arch):
    kinds = [kernel.config for kernel in PLANNERS["patch_embed"].of(arch)]
    plans = [make_plan(headline(arch), arch=arch)]
    texts = (*kit.designs(arch), *kit.tunables(arch))
    assert len(kit.designs(arch)) >= 3 and len(kit.tunables(arch)) >= 3
    for text in texts:
        plans.append(make_plan(headline(arch), parse_first(text, kinds), arch))
    assert len(plans[1:]) == len(set(plans[1:]))


def steps_of(*names: str, needs: str = "") -> list[kit.Step]:
    return [kit.Step(name, ("-c", "pass"), 100, needs) for name in names]


def test_a_run_that_was_cut_off_goes_on(tmp_path, capsys):
    """100 s steps in calls of 150 s: the second step is stopped by the limit and begins again in the second call."""
    clock, calls = Clock(), []

    def runner(step: kit.Step, log: Path, seconds: float) -> int:
        calls.append((step.name, round(seconds)))
        taken = 90
        clock.now += min(taken, seconds)
        return 0 if seconds >= taken else 124

    todo = steps_of("first", "second", "third")
    state = kit.run_all(todo, tmp_path, 2.5, runner, clock)
    assert list(state) == ["first"] and calls == [("first", 100), ("second", 60)]
    assert "begins it again" in capsys.readouterr().out
    state = kit.run_all(todo, tmp_path, 30, runner, clock)
    assert list(state) == ["first", "second", "third"] and [name for name, _ in calls[2:]] == ["second", "third"]
    assert all(entry["status"] == 0 for entry in state.values())
    assert json.loads((tmp_path / "state.json").read_text()) == state
    assert kit.run_all(todo, tmp_path, 30, runner, clock) == state and len(calls) == 4


def test_what_fails_or_hangs_does_not_stop_the_rest(tmp_path):
    statuses = {"fails": 1, "hangs": 124, "works": 0}
    todo = [*steps_of(*statuses), *steps_of("profiles", needs="a-program-that-nobody-has")]
    state = kit.run_all(todo, tmp_path, 30, lambda step, log, seconds: statuses[step.name], Clock())
    assert [entry["text"] for entry in state.values()] == [
        "failed with status 1", "stopped after 100 s", "done", "left out: no a-program-that-nobody-has on this machine"
    ]  # fmt: skip


def test_processes_write_logs_and_are_stopped(tmp_path):
    log = tmp_path / "log"
    step = kit.Step("speaks", ("-c", "import sys; print('spoke'); sys.exit(3)"), 100)
    assert kit.run_step(step, log, 60) == 3 and log.read_text() == "spoke\n"
    step = kit.Step("sleeps", ("-c", "import time; time.sleep(60)"), 100)
    assert kit.run_step(step, log, 0.5) == 124 and "stopped after" in log.read_text()


def test_everything_is_packed(tmp_path):
    output = tmp_path / "kit"
    kit.run_all(steps_of("first"), output, 1, lambda step, log, seconds: log.write_text("found") and 0, Clock())
    with tarfile.open(kit.pack(output)) as tar:
        assert {"kit/state.json", "kit/first.log"} <= set(tar.getnames())
        assert tar.extractfile("kit/first.log").read() == b"found"


def test_tuned_sizes_are_problems():
    for arch in BENCHED:
        for images_, positions, n, k in kit.TUNED_ROWS:
            problem = PatchEmbedProblem(images_ * positions, n, k, positions, in_dtype=rows_type(arch))
            assert make_plan(problem, arch=arch).arch.name == arch


def test_without_a_device_there_is_no_kit(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        kit.main([])
