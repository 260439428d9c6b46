"""`cute_kernels.explore.tune`: its winners, refusals and counts are those of calls one by one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.emulator import Options
from cute_kernels.emulator.programs import capture
from cute_kernels.explore import plan_facts, tune
from cute_kernels.explore.tuning import own, search
from tests.explore.tuning import own_kernels
from tests.explore.tuning.own_kernels import doubled

X = torch.arange(256.0)
SPACE = {"per_thread": [1, 2, 3, 4], "wrong": [False, True]}


def test_counts_choose_without_a_gpu() -> None:
    found = tune(doubled, SPACE, (X, torch.zeros(256)), arch="sm_90a", cached=False)
    assert [dict(row.settings) for row in found.rows] == own.grid(**SPACE)
    counts = {}
    for row in found.rows:
        if row.settings["per_thread"] == 3:
            assert row.reason == "ValueError: per_thread = 3: must divide 8"
        elif row.settings["wrong"]:
            assert row.reason.startswith("tensor 1 of the results differs from what {'per_thread': 1, 'wrong': False}")
        else:
            with capture("sm_90a", Options(counters=True)) as session:
                own._Bench(doubled, (), "sm_90a", False, "", None, 0)._call((X.cuda(), X.cuda()), row.settings)
            counted = dict(plan_facts.counts_of([session.launches[0].report]))
            counts[row.settings["per_thread"]] = counted["warp instructions"]
            assert row.reason is None and row.counts == counted and row.measured is None and row.registers
    assert found.settings == {"per_thread": min(counts, key=counts.get), "wrong": False}
    assert found.least == min(counts.values()) and found.by == "warp instructions in the emulator (sm_90a)"
    assert "time" not in found.by and " us" not in str(found).splitlines()[-1]


def test_an_emulated_device_has_no_times() -> None:
    alone = tune(doubled, SPACE, (X, torch.zeros(256)), arch="sm_90a", cached=False)
    with capture("sm_90a"):
        inside = tune(doubled, SPACE, (X, torch.zeros(256)), cached=False)
    assert (inside.settings, inside.by, inside.least) == (alone.settings, alone.by, alone.least)
    assert all(row.measured is None for row in inside.rows)


def test_what_results_have_to_be_is_said_or_is_the_first_ones() -> None:
    given, wanted = (X, torch.zeros(256)), [X, 3 * X]
    found = tune(doubled, SPACE, given, expected=wanted, count="MMA instructions", cached=False)
    assert found.settings == {"per_thread": 1, "wrong": True} and (found.least, found.ties) == (0, 2)
    assert "; 2 others of the same" in str(found)
    near = [X, 2 * X + 1e-3]
    with pytest.raises(ValueError, match="must have a legal configuration\n(.|\n)*differs from what is expected"):
        tune(doubled, {"per_thread": [1]}, given, expected=near, cached=False)
    assert tune(doubled, {"per_thread": [1]}, given, expected=near, tolerance=1e-3, cached=False).least > 0


def test_time_chooses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulator's device, with a clock of its own: medians of all, in turn."""
    times = {1: [3.0, 1.0], 2: [2.0], 4: [2.5]}
    timed: list[int] = []

    def timer(call):
        call()
        cells = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))
        per_thread = cells["settings"].cell_contents
        values = times[per_thread["per_thread"]]
        return lambda: timed.append(per_thread["per_thread"]) or values[len(timed) % len(values)]

    monkeypatch.setattr(search, "call_timer", timer)
    monkeypatch.setattr(own.devices, "is_emulated", lambda: False)  # as if it were a GPU
    with capture("sm_90a"):
        found = tune(doubled, {"per_thread": [1, 2, 4]}, (X, torch.zeros(256)), cached=False)
        assert found.by == f"time on {torch.cuda.get_device_name()} in us"
    assert len(timed) == 3 + 3 * search.ROUNDS and timed[:3] == [1, 2, 4]
    assert {row.settings["per_thread"]: row.measured for row in found.rows}[2] == 2000.0
    assert found.least == min(row.measured for row in found.rows)


def test_an_answer_is_kept_until_the_program_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    text = Path(sys.modules[doubled.__module__].__file__).read_text()

    def answer(text: str, size: int = 256, space=None) -> own.Tuned:
        (tmp_path / "own_program.py").write_text(text)
        sys.modules.pop("own_program", None)
        importlib.invalidate_caches()
        program = importlib.import_module("own_program")
        return tune(program.doubled, space or {"per_thread": [1, 2]}, (torch.zeros(size), torch.zeros(size)))

    first, second = answer(text), answer(text)
    assert first.rows and not second.rows and second.settings == first.settings and second.least == first.least
    assert "kept from an earlier search" in str(second)
    assert answer(text, size=512).rows and answer(text, space={"per_thread": [2, 1]}).rows
    assert answer(text + "# changed\n").rows and not answer(text + "# changed\n").rows


def around(factor: int) -> Callable[..., None]:
    """A function whose text does not say with how many numbers per thread it calls another one."""

    def function(x: torch.Tensor, y: torch.Tensor, per_thread: int = 1) -> None:
        doubled(from_dlpack(x), from_dlpack(y), factor * per_thread)

    return function


def test_an_answer_is_of_what_is_expected_and_of_the_scopes_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    space, given = {"per_thread": [1], "wrong": [False, True]}, (X, torch.zeros(256))
    assert tune(doubled, space, given).settings["wrong"] is False
    for _ in range(2):
        assert tune(doubled, space, given, expected=[X, 3 * X]).settings["wrong"] is True
    for size in (256, 512):
        made = tune(doubled, {"per_thread": [1]}, lambda size=size: (torch.ones(size), torch.zeros(size)))
        assert made.rows[0].counts["warp instructions"] > 0
    one, two = (tune(around(factor), {"per_thread": [1]}, given) for factor in (1, 2))
    assert one.rows and two.rows and one.least != two.least
    assert not tune(around(2), {"per_thread": [1]}, given).rows


def test_results_of_other_shapes_and_values() -> None:
    """A number, infinite ones, and those of a configuration that launches nothing."""

    def summed(x: torch.Tensor, y: torch.Tensor, per_thread: int) -> torch.Tensor:
        if per_thread:
            doubled(from_dlpack(x), from_dlpack(y), per_thread)
        return y.sum()

    nothing, *rows = tune(summed, {"per_thread": [0, 1, 2]}, (X, torch.zeros(256)), cached=False).rows
    assert nothing.reason == "the program launched no kernel" and [row.reason for row in rows] == [None, None]
    infinite = X.clone()
    infinite[[3, 5]] = torch.tensor([torch.inf, torch.nan])
    right, wrong = tune(
        doubled, {"per_thread": [1], "wrong": [False, True]}, (infinite, torch.zeros(256)), tolerance=1e-3, cached=False
    ).rows
    assert right.reason is None and "differs" in wrong.reason
    for expected in ([], [X], X):
        with pytest.raises(ValueError, match=rf"expected has {len(expected)} tensors: must have 2"):
            tune(doubled, {"per_thread": [1]}, (X, torch.zeros(256)), expected=expected, cached=False)


def test_some_of_many_are_tried() -> None:
    """By chance, or by Optuna where it is installed: the same ones for a seed."""
    space = {"per_thread": [1, 2, 4, 8], "wrong": [False]}
    tried = [
        [dict(row.settings) for row in tune(doubled, space, (X, X.clone()), trials=2, seed=3, cached=False).rows]
        for _ in range(2)
    ]
    assert tried[0] == tried[1] and 1 <= len(tried[0]) <= 2 and all(each in own.grid(**space) for each in tried[0])


def test_a_kernels_fault_is_named_by_its_kind_and_line() -> None:
    """A result of half the size: the kernel writes behind it."""
    lines = Path(own_kernels.__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "y[first + i] =" in text)
    with pytest.raises(ValueError, match=rf"\n1  per_thread=1: out-of-bounds at own_kernels.py:{line}: "):
        tune(doubled, {"per_thread": [1]}, (X, torch.zeros(128)), arch="sm_90a", cached=False)


@pytest.mark.parametrize(
    ("space", "more", "message"),
    [
        ({"width": [1]}, {}, "space has 'width': must be parameters of the function, x, y, per_thread, wrong"),
        ({"per_thread": []}, {}, r"space\['per_thread'\] = \[\]: must have a value"),
        ({"per_thread": [1]}, {"trials": 0}, "trials = 0: must be at least 1"),
        ({"per_thread": [1]}, {"count": "speed"}, "count = 'speed': must be one of warp instructions, "),
        ({"per_thread": [1]}, {"arch": "sm_30"}, "sm_30"),
        ({"per_thread": [3]}, {}, "must have a legal configuration\n(.|\n)*per_thread = 3: must divide 8"),
    ],
)
def test_refused(space: dict, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(doubled, space, (X, torch.zeros(256)), cached=False, **more)
    with pytest.raises(ValueError, match="must have a tensor of torch"):
        tune(lambda wrong: None, {"wrong": [1]}, cached=False)
