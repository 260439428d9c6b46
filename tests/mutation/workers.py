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
from tests.mutation.targets import BACK_ENDS, SCHEDULES, TARGETS


@functools.cache
def _prepared(name: str, strict: bool, back_end: str) -> tuple[list[Mutant], dict[str, Options], dict[str, int]]:
    """Once per worker process, target and back end."""
    target = TARGETS[name]
    schedules = {
        label: dataclasses.replace(options, strict=strict, native=BACK_ENDS[back_end])
        for label, options in SCHEDULES.items()
    }
    return list(mutants(target.ptx)), schedules, instruction_limits(target, schedules)


def _judge(name: str, number: int, back_end: str, strict: bool) -> Verdict:
    found, schedules, limits = _prepared(name, strict, back_end)
    return judge(name, TARGETS[name], found[number], schedules, limits, back_end)


def judge_all(work: list[tuple[str, int, str]], jobs: int, strict: bool = True) -> list[Verdict]:
    """Verdicts on (target, number of its mutant, name of `BACK_ENDS`), in this order; ``strict`` as in `Options`."""
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
                where = f"PTX line {verdict.line}, {verdict.place}"
                console.print(f"survives: {verdict.target}, {verdict.back_end}: {verdict.key}, {where}")
            progress.update(task, advance=1, description=f"{survivors} survive")
        return [future.result() for future in futures]
