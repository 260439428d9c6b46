"""Mutation testing of Python sources: ``python -m tests.source_mutation``. docs/mutation.md

Mutants are drawn at random by a printed seed; the score leaves out those that are reviewed as equivalent. Fails where a
survivor has no review.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.source_mutation.judge import copy_of, judge, output_of, preload
from tests.source_mutation.mutants import Mutant, mutant_at, places
from tests.source_mutation.parts import PARTS
from tests.source_mutation.reviewed import EQUIVALENT

ROOT = Path(__file__).parents[2]

Task = tuple[str, Mutant]


def work(
    tasks: multiprocessing.SimpleQueue, results: multiprocessing.SimpleQueue, limits: Mapping[str, float]
) -> None:
    """Judges mutants until there are none."""
    with copy_of(ROOT) as copy:
        while (task := tasks.get()) is not None:
            part, mutant = task
            results.put((task, judge(copy, PARTS[part], mutant, limits[part])))


def run(tasks: list[Task], jobs: int, limits: Mapping[str, float]) -> dict[Task, str]:
    """The outcome of every task. ``limits``: seconds after which a mutant of a part hangs."""
    context = multiprocessing.get_context("fork")
    queue, results = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=work, args=(queue, results, limits)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for task in [*tasks, *[None] * jobs]:
        queue.put(task)
    outcomes: dict[Task, str] = {}
    while len(outcomes) < len(tasks):
        (part, mutant), outcome = results.get()
        outcomes[part, mutant] = outcome
        print(f"{len(outcomes)}/{len(tasks)} {part} {outcome:8} {mutant}", flush=True)
    for worker in workers:
        worker.join()
    return outcomes


def equivalent(mutant: Mutant) -> bool:
    return (mutant.path, mutant.before, mutant.after) in EQUIVALENT


def summary(outcomes: dict[Task, str]) -> tuple[str, bool]:
    """A Markdown table, and whether all survivors are reviewed."""
    lines = ["| part | mutants | killed | hang | equivalent | other survivors | score |", "|---|" + "---|" * 6]
    for part in PARTS:
        found = {mutant: outcome for (of, mutant), outcome in outcomes.items() if of == part}
        if not found:
            continue
        counts = Counter(found.values())
        same = sum(outcome == "survived" and equivalent(mutant) for mutant, outcome in found.items())
        others, noticed = counts["survived"] - same, counts["killed"] + counts["hangs"]
        score = f"{noticed / (noticed + others):.1%}" if noticed + others else "-"
        numbers = (len(found), counts["killed"], counts["hangs"], same, others, score)
        lines.append(f"| {part} | {' | '.join(map(str, numbers))} |")
    unexplained = [m for (_, m), outcome in outcomes.items() if outcome == "survived" and not equivalent(m)]
    lines += ["", *(f"- {mutant}" for mutant in unexplained)]
    return "\n".join(lines), not unexplained


def is_within(path: str, sources: list[str] | None) -> bool:
    """Whether a path is one of the files or lies in one of the folders; everything is within None."""
    return sources is None or any(path == source or path.startswith(f"{source.rstrip('/')}/") for source in sources)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--source", action="append", help="only in this file or folder; may be repeated")
    parser.add_argument("--sample", type=int, default=200, help="mutants of each part; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the sample; default: a new one, which is printed")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=3600,
                        help="that a part's tests may take without a mutation (default: %(default)s)")  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON file for the outcomes")
    parser.add_argument("--again", type=Path, help="only what survived, by such a file")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    tasks: list[Task] = []
    survived = None
    if options.again is not None:
        recorded = json.loads(options.again.read_text())["survived"]
        survived = {(m["path"], m["operator"], m["occurrence"]) for m in recorded}
    for part in options.part or PARTS:
        found = [m for m in places(ROOT, PARTS[part].sources) if is_within(m.path, options.source)]
        if survived is not None:
            drawn = [m for m in found if (m.path, m.operator, m.occurrence) in survived]
        else:
            drawn = random.Random(seed).sample(found, min(options.sample or len(found), len(found)))
        print(f"{part}: {len(drawn)} of {len(found)} mutants", flush=True)
        tasks += [(part, mutant_at(ROOT, place)) for place in drawn]
    preload()
    limits: dict[str, float] = {}
    with copy_of(ROOT) as copy:
        for part in dict.fromkeys(part for part, _ in tasks):
            begin = time.monotonic()
            if (outcome := judge(copy, PARTS[part], None, options.seconds)) != "survived":
                what = f"take longer than {options.seconds} s" if outcome == "hangs" else "fail"
                print(f"{part}: its tests {what} without a mutation", file=sys.stderr)
                print("".join(output_of(copy).read_text().splitlines(keepends=True)[-60:]), file=sys.stderr)
                return 2
            # Of jobs that run side by side each has a part of the machine.
            limits[part] = 60 + 3 * options.jobs * (time.monotonic() - begin)
            print(f"{part}: a mutant hangs after {limits[part]:.0f} s", flush=True)
    outcomes = run(tasks, options.jobs, limits)
    text, explained = summary(outcomes)
    print(f"\n{text}")
    if options.output is not None:
        lists: dict[str, list] = {"killed": [], "hangs": [], "survived": []}
        for (_, mutant), outcome in outcomes.items():
            lists[outcome].append(dataclasses.asdict(mutant))
        options.output.write_text(json.dumps({"seed": seed, **lists}, indent=1) + "\n")
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
