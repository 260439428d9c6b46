"""The file of a target: its launch, and what the launch did unchanged and with each mutant of its PTX.

A file has one JSON object per line: first the launch, then `Entry` objects. The PTX lies beside it in the archive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.judge import LIMIT_CONSTANT, LIMIT_FACTOR
from cute_kernels.emulator.checking.mutation.mutants import mutants
from tests.emulator.checking.mutation.targets import SCHEDULES, TARGETS
from tests.emulator.oracle.launches import ARCHIVE, FrozenLaunch, freeze, read_archive, write_archive
from tests.emulator.oracle.outcomes import Outcome

#: Under which each mutant is run, and how many of the mutants (one of ...).
_MUTANTS_RUN = {"eager": 1, "random": 5}
_COUNTERS, _FAST, _LENIENT = "counters", "no detectors", "lenient"
_PER_LAUNCH = ("by_opcode", "clusters", "shared_bytes", "units")  # the same under every schedule


@dataclass(frozen=True)
class Run:
    """What is executed: the unchanged kernel or the mutant of a key, under a name of `options_of`."""

    mutant: str
    schedule: str


@dataclass(frozen=True)
class Record:
    """A target's launch, and outcomes as JSON."""

    launch: FrozenLaunch
    outcomes: dict[Run, dict[str, Any]]

    def write(self) -> None:
        lines = [json.dumps({"launch": dataclasses.asdict(self.launch)})]
        lines += [json.dumps(vars(run) | outcome) for run, outcome in self.outcomes.items()]
        write_archive(ARCHIVE, {f"{self.launch.name}.jsonl": ("\n".join(lines) + "\n").encode()})


def names() -> list[str]:
    """Targets that there are records of."""
    return sorted(name.removesuffix(".jsonl") for name in read_archive(ARCHIVE) if name.endswith(".jsonl"))


@functools.lru_cache(maxsize=4)
def read(name: str) -> Record:
    head, *lines = map(json.loads, read_archive(ARCHIVE)[f"{name}.jsonl"].decode().splitlines())
    outcomes = {Run(line.pop("mutant"), line.pop("schedule")): line for line in lines}
    return Record(FrozenLaunch.from_json(head["launch"]), outcomes)


def options_of(schedule: str) -> Options:
    """Of a schedule that mutants are judged under, or of a variant of the first: counters, no detectors, lenient."""
    base = SCHEDULES.get(schedule, SCHEDULES["eager"])
    if schedule == _COUNTERS:
        return dataclasses.replace(base, counters=True)
    if schedule == _FAST:
        return dataclasses.replace(base, detectors=False, strict=False)
    return dataclasses.replace(base, strict=False) if schedule == _LENIENT else base


def freeze_target(name: str) -> tuple[FrozenLaunch, str]:
    """Compiles a target's kernel, and counts how many instructions its mutants may execute: the launch and its PTX."""
    launch, ptx = freeze(name, TARGETS[name])
    clean = launch.execute(ptx, options_of("eager"))
    if clean.error:
        raise AssertionError(f"the unchanged kernel of {name}: {clean}")
    limit = LIMIT_FACTOR * clean.counts["warp_instructions"] + LIMIT_CONSTANT
    return dataclasses.replace(launch, limit=limit), ptx


def runs(launch: FrozenLaunch, most: int | None = None) -> list[Run]:
    """What is recorded of a launch: every schedule, and ``most`` of its mutants, all when None.

    Mutants of a mutation and opcode that no mutant had before come first, in an order that looks random.
    """
    found = list(mutants(launch.ptx))
    drawn = sorted(found, key=lambda mutant: (mutant.ordinal, hashlib.sha256(mutant.key.encode()).hexdigest()))
    keys = {mutant.key for mutant in (drawn if most is None else drawn[:most])}
    chosen = [mutant.key for mutant in found if mutant.key in keys]
    return [Run("", schedule) for schedule in (*SCHEDULES, _COUNTERS, _FAST, _LENIENT)] + [
        Run(key, schedule) for schedule, of in _MUTANTS_RUN.items() for key in chosen[::of]
    ]


def outcome_now(name: str, run: Run) -> dict[str, Any]:
    """What a run of a target's launch does now, as JSON."""
    launch = read(name).launch
    options = dataclasses.replace(options_of(run.schedule), max_warp_instructions=launch.limit)
    repeat = 2 if run.mutant.startswith("drop griddepcontrol") else 1
    return _told(run, launch.execute(mutated(launch, run.mutant), options, repeat))


def _told(run: Run, found: Outcome) -> dict[str, Any]:
    """An outcome's JSON: of mutants no more counts than the instructions."""
    if run.mutant:
        counts = {name: value for name, value in found.counts.items() if name == "warp_instructions"}
    elif run.schedule != _COUNTERS:
        counts = {name: value for name, value in found.counts.items() if name not in _PER_LAUNCH}
    else:
        counts = found.counts
    return dataclasses.replace(found, counts=counts).entry()


def mutated(launch: FrozenLaunch, key: str) -> str:
    """The PTX of a mutant of a launch; "": unchanged."""
    return _mutants(launch.name)[key] if key else launch.ptx


@functools.lru_cache(maxsize=2)
def _mutants(name: str) -> dict[str, str]:
    return {mutant.key: mutant.ptx for mutant in mutants(read(name).launch.ptx)}


def without_repeated_reports(outcomes: Iterable[tuple[Run, dict[str, Any]]]) -> dict[Run, dict[str, Any]]:
    """All lines of a report are kept for the first of each kind of error; of the others, the first and a digest."""
    result, seen = {}, set()
    for run, entry in outcomes:
        if len(entry.get("report", ())) < 2 or entry["error"] in seen:
            entry.pop("report", None)
        seen.add(entry.get("error"))
        result[run] = entry
    return result


def differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (recorded, found) of what differs; all lines of a report are compared where they are recorded."""
    names = (expected.keys() | found.keys()) - (set() if "report" in expected else {"report"})
    different = {name: (expected.get(name), found.get(name)) for name in sorted(names)}
    return {name: pair for name, pair in different.items() if pair[0] != pair[1]}
