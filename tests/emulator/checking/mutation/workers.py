"""Judges many mutants of our kernels in worker processes."""

from __future__ import annotations

import dataclasses
import functools

from cute_kernels.common.executors import Workers
from cute_kernels.common.progress import ProgressLine
from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.judge import Verdict, instruction_limits, judge
from cute_kernels.emulator.checking.mutation.mutants import Mutant, mutants
from tests.emulator.checking.mutation.targets import ROLE_FILES, SCHEDULES, TARGETS


@functools.cache
def _prepared(name: str, strict: bool) -> tuple[list[Mutant], dict[str, Options], dict[str, int]]:
    """Once per worker process and target."""
    target = TARGETS[name]
    schedules = {label: dataclasses.replace(options, strict=strict) for label, options in SCHEDULES.items()}
    return list(mutants(target.ptx)), schedules, instruction_limits(target, schedules)


def _nothing() -> None:
    """Workers keep what they know of a target in `_prepared`."""


def _judge(_: None, name: str, number: int, strict: bool) -> Verdict:
    found, schedules, limits = _prepared(name, strict)
    return judge(name, TARGETS[name], found[number], schedules, limits, ROLE_FILES)


def judge_all(work: list[tuple[str, int]], jobs: int, strict: bool = True) -> list[Verdict]:
    """Verdicts on (target, number of its mutant), in this order; ``strict`` as in `Options`."""
    counts = {"done": 0, "survive": 0}
    with ProgressLine() as line:

        def done(verdict: Verdict) -> None:
            counts["done"] += 1
            if verdict.survived:
                counts["survive"] += 1
                where = f"PTX line {verdict.line}, {verdict.place}"
                line.print(f"survives: {verdict.target}: {verdict.key}, {where}")
            line.show(f"{counts['done']}/{len(work)}, {counts['survive']} survive", counts["done"] / len(work))

        verdicts = []
        with Workers(_nothing, (), jobs=jobs) as workers:
            for verdict in workers.each(_judge, [(*item, strict) for item in work]):
                verdicts.append(verdict)
                done(verdict)
        return verdicts
