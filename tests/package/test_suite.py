"""What tests/conftest.py promises of the suite: a random order by a printed seed, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests import nightly, random_orders
from tests.processes import run_python

TESTS = """
import os

import pytest
import torch


@pytest.mark.parametrize("number", range(12))
def test_draws(number):
    print(f"number {number} drew {torch.rand(()).item()}")


def test_leaves_a_variable():
    os.environ["LEFT_BEHIND"] = "1"


def test_leaves_a_default():
    torch.set_default_dtype(torch.float64)
"""


def test_order_data_and_leaks(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        *("-m", "pytest", "-q", "-s", "--tb=line", "-p", "tests.conftest", "-p", "no:cacheprovider"),
        *("--randomly-seed=1", "--rootdir", str(tmp_path), str(tmp_path)),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    run = run_python(*command, cwd=tmp_path, env=environment)
    assert "random order: --randomly-seed=1\n" in run.stdout
    drawn = re.findall(r"number (\d+) drew (.+)", run.stdout)
    numbers = [int(number) for number, _ in drawn]
    assert sorted(numbers) == list(range(12)) != numbers
    # After the default type was left at float64, the same stream gives another number.
    assert len({value for _, value in drawn}) <= 2
    assert "left behind: environment: LEFT_BEHIND None -> '1'" in run.stdout
    assert "left behind: torch's default type: torch.float32 -> torch.float64" in run.stdout
    assert re.search(r"^seconds of all processes by part: test_some.py \d+$", run.stdout, re.MULTILINE)
    assert run.returncode == 1 and "14 passed, 2 errors" in run.stdout


@pytest.mark.parametrize(
    ("lines", "statuses", "collected", "clean", "says"),
    [
        (["a passed", "b passed"], [0, 0], 2, True, "2 of 2 tests ran, 0 findings"),
        (["a passed"], [0, 0], 2, False, "1 of 2 tests ran"),
        (["a passed", "b failed"], [0, 1], 2, False, "failed: b"),
        (["a passed", "b passed"], [0, -9], 2, False, "process 1: exit status -9"),
        ([], [0, 0], 0, False, "0 of 0 tests ran"),
    ],
)
def test_an_order_is_clean_only_if_it_was_complete(lines, statuses, collected, clean, says, tmp_path: Path) -> None:
    record = tmp_path / "1-0.jsonl"
    found = [dict(zip(("test", "found"), line.split())) for line in lines]
    record.write_text("".join(json.dumps(entry) + "\n" for entry in found) + '{"test": "cut sho')
    result = random_orders.result(1, statuses, collected, [record, tmp_path / "of a process that never began"])
    assert result[0] == clean and says in result[1]


def test_by_day_each_value_of_a_kernel_is_in_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kernels as the longest fact has values; a night draws any of them."""
    facts = {"dtype": ["fp8", "int8", "bf16"], "bias": [True, False], "stages": (2, 3, 4, 5, 6)}
    for night, count in ((False, 5), (True, 30)):
        monkeypatch.setattr(nightly, "NIGHTLY", night)
        seen: list[dict[str, object]] = []

        @settings(max_examples=500, database=None)  # hypothesis draws each of so few at least once
        @given(nightly.drawn_together(**facts))
        def draw(kernel: dict[str, object]) -> None:
            seen.append(kernel)  # noqa: B023

        draw()
        kernels = {tuple(sorted(each.items())) for each in seen}
        assert len(kernels) == count
        assert {name: {kernel[name] for kernel in seen} for name in facts} == {n: set(v) for n, v in facts.items()}


ORDERS = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(set_num_threads=lambda count: None)
from tests import random_orders
random_orders.LIBRARIES = ()
sys.exit(random_orders.main())
"""


def test_orders_at_the_same_time_each_run_every_test(tmp_path):
    """Three of 200 tests, two processes each: no order takes tests from another one's count."""
    (tmp_path / "test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('i', range(200))\ndef test_one(i): pass\n"
    )
    command = [sys.executable, "-c", ORDERS, "--seeds", "3", "--together", "3", "--processes", "2", "--folder", "logs"]
    command += ["--rootdir=.", "-p", "pytest_randomly", "test_many.py"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(random_orders.__file__).parents[1]), *sys.path]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins would miss the rest of torch
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "seed" in line] == [
        f"seed {seed}: 200 of 200 tests ran, 0 findings" for seed in (1, 2, 3)
    ]
