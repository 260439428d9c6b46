"""What campaigns do on any cluster of two worker processes; a test file of each cluster has the fixture ``address``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.common import executors
from cute_kernels.common.executors import Workers
from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation import campaign
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import Recorder
from tests.common.executor_tasks import State, dies_once, fails, square
from tests.emulator.checking.planted import EXAMPLE, planted


class Campaigns:
    """Tests with the ``address`` of a cluster, as `executors.connect` takes it."""

    def test_results_come_in_order_from_two_processes(self, address: str) -> None:
        with executors.connect(address) as executor, Workers(State, (5,), executor) as workers:
            assert executor.width == 2
            found = list(workers.each(square, [(number,) for number in range(40)]))
            results = workers.each(fails, [(number,) for number in range(5)])
            assert [next(results) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(KeyError, match="task 3"):
                next(results)
        assert [value for value, _, _ in found] == [number * number + 5 for number in range(40)]
        assert len({process for _, process, _ in found}) == len({made for _, _, made in found}) == 2

    def test_tasks_of_a_lost_worker_run_again(self, address: str, tmp_path: Path) -> None:
        items = [(number, str(tmp_path / "mark")) for number in range(12)]
        with executors.connect(address) as executor, Workers(State, (5,), executor) as workers:
            assert list(workers.each(dies_once, items)) == [number + 5 for number in range(12)]
        assert len(list(tmp_path.iterdir())) == 2

    def test_mutants_are_judged_the_same(self, address: str) -> None:
        recorder = Recorder()
        with capture("sm_90a", Options(), recorder=recorder) as session:
            assert run_program(str(EXAMPLE), [], session, pytest.fail) == 0
        (kernel,) = campaign.kernels(recorder.launches, 3)
        numbers = list(range(0, len(kernel.mutants), 4))
        here = campaign.judge_mutants(kernel, numbers, {})
        with executors.connect(address) as executor:
            there = campaign.judge_mutants(kernel, numbers, {}, executor=executor)
        assert [(v.key, v.killer, v.schedule, v.line) for v in here] == [
            (v.key, v.killer, v.schedule, v.line) for v in there
        ]

    def test_commands(self, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """`check` finds the same schedule, `mutate` the same verdicts."""
        program = planted("one try to wait", tmp_path)
        outputs = []
        for where in ([], ["--executor", address]):
            assert cli.main(["check", "--arch", "sm_90a", "--seeds", "2", *where, str(program)]) == 3
            out, error = capsys.readouterr()
            outputs.append((out.splitlines()[-1], [line for line in error.splitlines() if "replay" in line]))
        assert outputs[0] == outputs[1] and outputs[0][1]
        file = tmp_path / "out.json"
        arguments = ["--arch", "sm_90a", "--match", "fence", "--executor", address, "--output", str(file)]
        assert cli.main(["mutate", *arguments, str(EXAMPLE)]) == 0
        verdicts = json.loads(file.read_text())["mutants"]
        assert {(v["opcode"], bool(v["killer"])) for v in verdicts} == {
            ("fence.mbarrier_init.release.cluster", False), ("fence.proxy.async.shared::cta", True),
        }  # fmt: skip
