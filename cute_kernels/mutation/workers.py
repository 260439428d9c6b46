"""Judges many mutants, in this process or in others."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from cute_kernels.mutation.judge import Verdict


def judge_each(
    judge: Callable[..., Verdict],
    work: Sequence[tuple],
    jobs: int,
    done: Callable[[Verdict], None] = lambda verdict: None,
    prepare: Callable[..., None] | None = None,
    prepared: tuple[Any, ...] = (),
) -> list[Verdict]:
    """Verdicts in the order of ``work``.

    Args:
        judge: a function of a module, called with the items of each tuple of ``work``.
        work: what other processes can be sent.
        jobs: processes; 1 is this one.
        done: called in this process with each verdict as it comes.
        prepare: called once in each process with ``prepared`` before its first verdict.
        prepared: what other processes can be sent.
    """
    if jobs == 1:
        if prepare is not None:
            prepare(*prepared)
        verdicts = []
        for item in work:
            verdicts.append(judge(*item))
            done(verdicts[-1])
        return verdicts
    # CuTe DSL has threads of its own, which a forked process would lose.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, prepare, prepared) as pool:
        futures = [pool.submit(judge, *item) for item in work]
        for future in concurrent.futures.as_completed(futures):
            done(future.result())
        return [future.result() for future in futures]
