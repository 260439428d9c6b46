"""Judges many mutants in worker processes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels.emulator import Options
from tests.mutation.judge import Verdict, instruction_limits, judge
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.targets import SCHEDULES, TARGETS


@functools.cache
def _prepared(name: str, strict: bool) -> tuple[list[Mutant], dict[str, Options], dict[str, int]]:
    """Once per worker process and target."""
    target = TARGETS[name]
    schedules = {label: dataclasses.replace(options, strict=strict) for label, options in SCHEDULES.items()}
    return list(mutants(target.ptx)), schedules, instruction_limits(target, schedules)


def _judge(name: str, number: int, strict: bool) -> Verdict:
    found, schedules, limits = _prepared(name, strict)
    return judge(name, TARGETS[name], found[number], schedules, limits)


def judge_all(work: list[tuple[str, int]], jobs: int, strict: bool = True) -> list[Verdict]:
    """Verdicts on (target, number of its mutant), in this order; ``strict`` as in `Options`."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # CuTe DSL has threads of its own, which a forked process would lose.
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("", total=len(work))
        futures = [pool.submit(_judge, *item, strict) for item in work]
        survivors = 0
        for future in concurrent.futures.as_completed(futures):
            verdict = future.result()
            if verdict.survived:
                survivors += 1
                console.print(f"survives: {verdict.target}: {verdict.key}, PTX line {verdict.line}, {verdict.place}")
            progress.update(task, advance=1, description=f"{survivors} survive")
        return [future.result() for future in futures]
