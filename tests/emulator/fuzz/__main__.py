"""``python -m tests.emulator.fuzz --inputs N --seed S``: damaged programs, each of which has to end as it should.

Every program ends in success or in an error of the emulator that names what is wrong. Exits with 1 if one ends
otherwise: with another exception, a crash, or not at all. Programs run in processes of their own, so that a crash ends
one of them and is reported with its input, and a process has only so much memory. ``--first N --inputs 1`` repeats
input N of a seed, and ``--show`` prints its text; ``--repeat FILE`` runs findings that ``--findings`` has written.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from cute_kernels.emulator.core.library import library
from tests.emulator.fuzz.damage import DAMAGE, draw_program
from tests.emulator.fuzz.judge import Verdict, judge
from tests.emulator.fuzz.program import Program, from_json, to_json
from tests.emulator.fuzz.programs import kind_of, program_of, programs
from tests.emulator.fuzz.workers import INPUT_SECONDS, Input, verdicts

_EVERY = 60.0  # seconds between lines that say how far it is


class Counts:
    """How inputs ended: by kind of program, and by kind of damage, of which an input may have several."""

    def __init__(self) -> None:
        self.kinds: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in programs()}
        self.damage: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in DAMAGE}
        self.outcomes: collections.Counter[str] = collections.Counter()

    def add(self, program: Program, verdict: Verdict) -> None:
        end = "finding" if verdict.finding else "success" if verdict.outcome == "success" else "error"
        self.outcomes[verdict.outcome] += 1
        self.kinds[kind_of(program.name)].update((end, "tried"))
        for name in sorted(set(program.damage)):
            self.damage[name].update((end, "tried"))

    @property
    def tried(self) -> int:
        return self.outcomes.total()

    def __str__(self) -> str:
        ends = ("tried", "success", "error", "finding")
        lines = [f"{'program':16s}  " + " ".join(f"{end:>7s}" for end in ends)]
        for title, table in (("", self.kinds), ("damage", self.damage)):
            lines += [title] * bool(title)
            for name, row in table.items():
                lines.append(f"{name:16s}  " + " ".join(f"{row[end]:7d}" for end in ends))
        return "\n".join(lines)


def seeds_of(text: str) -> range:
    """``7`` or ``3-9``.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    seeds = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number such as 7, or a range such as 3-9")
    return seeds


def inputs_of(seeds: range, first: int, count: int) -> Iterator[Input]:
    """(seed, number) of so many inputs, which the seeds share."""
    for i in range(count):
        yield seeds[i % len(seeds)], first + i // len(seeds)


def write_finding(folder: Path, name: str, program: Program, verdict: Verdict) -> Path:
    """Writes an input to a file of its own, as JSON; ``--repeat`` runs it again. Beside it the text alone."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"finding": verdict.finding, "place": verdict.place}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**found, **to_json(program, program_of(program.name))}, indent=1))
    path.with_suffix(".ptx").write_text(program.text)
    return path


def read_finding(path: Path) -> Program:
    """The input of a file."""
    data = json.loads(path.read_text())
    return from_json(data, program_of(data["name"]))


class Findings:
    """Inputs that ended otherwise, by place and kind; the first of each place is said at once.

    Args:
        folder: where they are written, or None.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.places: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, program: Program, verdict: Verdict) -> None:
        if not verdict.finding:
            return
        key = verdict.place, verdict.finding.split(":")[0]
        if key not in self.places:
            print(f"input {name}: {verdict.finding} ({verdict.place})", flush=True)
        self.places.setdefault(key, []).append(name)
        if self._folder is not None:
            write_finding(self._folder, name, program, verdict)

    def __str__(self) -> str:
        lines = [
            f"{len(names)} times {kind} at {place or 'no place'}: inputs {', '.join(names[:8])}"
            for (place, kind), names in sorted(self.places.items(), key=lambda item: -len(item[1]))
        ]
        return "\n".join(lines or ["no findings"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=seeds_of, default=range(1), help="or a range A-B that share the inputs (0)")
    parser.add_argument("--first", type=int, default=0, help="number of each seed's first (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all inputs together (none)")
    parser.add_argument(
        "--input-seconds", type=float, default=INPUT_SECONDS, help="limit of one input (default: %(default)s)"
    )
    parser.add_argument("--findings", type=Path, metavar="FOLDER", help="where to write inputs that end otherwise")
    parser.add_argument("--repeat", type=Path, nargs="+", metavar="FILE", help="findings to run again, here")
    parser.add_argument("--show", action="store_true", help="print the inputs as well")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("inputs", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1 is needed")
    library()  # compiled here where it has to be, not within the time of an input
    counts, found = Counts(), Findings(options.findings)
    start = last = time.monotonic()
    for name, program, verdict in _results(options):
        counts.add(program, verdict)
        found.add(name, program, verdict)
        if options.show:
            print(program, verdict, sep="\n")
        if time.monotonic() - last > _EVERY:
            last = time.monotonic()
            print(f"{counts.tried} inputs after {last - start:.0f} s", flush=True)
    print(counts)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in counts.outcomes.most_common())
    print(f"{counts.tried} inputs in {time.monotonic() - start:.0f} s: {ended}")
    print(found)
    return 1 if found.places else 0


def _results(options: argparse.Namespace) -> Iterator[tuple[str, Program, Verdict]]:
    """(name, program, verdict) of each input."""
    if options.repeat:
        for path in options.repeat:
            program = read_finding(path)
            yield path.stem, program, judge(program)
        return
    inputs = list(inputs_of(options.seed, options.first, options.inputs))
    for (seed, number), verdict in verdicts(inputs, options.jobs, options.input_seconds, options.seconds):
        yield f"{seed}-{number}", draw_program(seed, number), verdict


if __name__ == "__main__":
    raise SystemExit(main())
