"""Timelines of whole launches: as they are frozen, and as their programs say."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.bytecode import execution
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.emulator.machine.state import events as stream
from cute_kernels.emulator.machine.state.warp import PhaseWait
from tests.emulator.observe.test_trace import Event, check_well_formed, flows, slices, thread_names
from tests.emulator.observe.timelines import (
    DAILY,
    DATA,
    PROGRAMS,
    SCHEDULES,
    digest,
    frozen,
    names,
    of_pair,
    of_program,
    of_target,
    timeline,
)
from tests.emulator.oracle import records
from tests.nightly import nightly

BY_DAY = {*DAILY, *PROGRAMS, "copies", "pair of CTAs"}


def assert_same(before: list[Event], now: list[Event]) -> None:
    for number, (expected, found) in enumerate(zip(before, now)):
        assert expected == found, f"event {number} of {len(before)}"
    assert len(before) == len(now)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DAY else nightly) for n in names()])
def test_timelines_are_as_they_were(name: str, schedule: str, tmp_path: Path) -> None:
    """The digests were recorded when each copy, phase and arrival was told to the timeline as it happened."""
    events = timeline(name, schedule, tmp_path / "trace")
    if name in PROGRAMS:
        check_well_formed(events)
        assert slices(events, "work")
    assert digest(events) == frozen()[name][schedule]


@pytest.mark.parametrize("name", ["sm100-one-cta", "sm90-one-cta"])
def test_events_are_as_they_were(name: str, tmp_path: Path) -> None:
    """The files were recorded when launches with a trace were Python's, that of sm90 again for waits of setmaxnreg."""
    recorded = json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))["traceEvents"]
    assert_same(recorded, of_target(name, tmp_path / "trace"))


def test_copies_to_several_ctas(tmp_path: Path) -> None:
    """Four rounds: a box from each CTA to both, and two lanes' of each."""
    loads = [each for each in slices(of_pair(tmp_path / "trace"), "tma") if each["name"] == "load 2048 B"]
    assert len(loads) == 4 * (2 * 2 + 2 * 2)


@pytest.mark.parametrize("name", ["arrival", "several phases", "hang"])
def test_waits_for_an_mbarrier_are_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Counted(PhaseWait):
        def __init__(self, *args: object) -> None:
            waits.append(args)
            super().__init__(*args)

    monkeypatch.setattr(execution, "PhaseWait", Counted)
    events = of_program(name, tmp_path / "trace")
    assert waits and slices(events, "wait")


@pytest.mark.parametrize("name", ["exit of the last", "exit of lanes"])
def test_an_exit_releases_whoever_waits(name: str, tmp_path: Path) -> None:
    """The arrow begins at the last instruction of the lanes that exit."""
    events = of_program(name, tmp_path / "trace")
    tracks = thread_names(events)
    ((start, end),) = flows(events)
    assert tracks[start["pid"], start["tid"]].startswith("warp 1")
    assert tracks[end["pid"], end["tid"]].startswith("warp 0")
    # Before it waits warp 0 executes 5 instructions; warp 1 executes 5, and 3 of every round of its loop, which ends in
    # a branch to the ret.
    executed = 5 + {"exit of the last": 5 + 3 * 63, "exit of lanes": 5 + 3 * 30}[name]
    assert start["ts"] == executed - 0.5


@pytest.mark.parametrize("room", [1, 2, 3, 17, 40])
@pytest.mark.parametrize("name", ["sm100-one-cta", "sm90-one-cta", "parted lanes", "bulk copies"])
@pytest.mark.parametrize("schedule", ["default", "random"])
def test_no_event_is_lost_where_there_is_little_room(
    name: str, schedule: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_ROOM", room)
    assert digest(timeline(name, schedule, tmp_path / "trace")) == frozen()[name][schedule]


@pytest.mark.parametrize("name", ["sm100-one-cta", "sm90-one-cta"])
def test_the_core_executes_what_it_does_without_a_trace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [0], Execution.call

    def counted(self: Execution, site: int, mask: int) -> int:
        calls[0] += 1
        return call(self, site, mask)

    monkeypatch.setattr(Execution, "call", counted)
    launch = records.read(name).launch
    counts = []
    for path in (None, tmp_path / "trace"):
        calls[0] = 0
        launch.execute(launch.ptx, dataclasses.replace(Options(), trace=path))
        counts.append(calls[0])
    assert counts[0] == counts[1]
