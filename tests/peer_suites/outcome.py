"""What tests of others came to, whose fault a failure is, and the table of both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.peer_suites.suites import HERE, Sampled, Suite, sample

RECORD = HERE / "expected.json"
CAUSES = HERE / "causes.json"
PAGE = HERE.parents[1] / "docs" / "emulator" / "programs.md"

WHOSE = {
    "emulator": "ours: emulator",
    "stand-in": "ours: torch stand-in",
    "theirs": "theirs",
    "environment": "environment",
}
"""Whose fault a failure can be: as `CAUSES` has it, and as the table says it."""


@dataclass(frozen=True)
class Cause:
    """Why tests fail.

    Attributes:
        whose: a key of `WHOSE`.
        said: regular expression that what the test said contains.
        why: a sentence.
    """

    whose: str
    said: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """Of one test.

    Attributes:
        verdict: "passed", "failed" or, by itself, "skipped".
        cause: of a failure, a name in `CAUSES`; "" where none fits.
    """

    verdict: str
    cause: str = ""


@dataclass(frozen=True)
class Found:
    """What a run of a test came to: pytest's word for it, what the exception said, and the seconds it took."""

    verdict: str
    said: str = ""
    seconds: float = 0.0


def causes(path: Path | None = None) -> dict[str, Cause]:
    """By name, in the order in which they are looked for.

    Raises:
        ValueError: it is nobody's fault that there is a word for.
    """
    found = {name: Cause(**each) for name, each in json.loads((path or CAUSES).read_text()).items()}
    for name, cause in found.items():
        if cause.whose not in WHOSE:
            raise ValueError(f"{name}: whose = {cause.whose!r}: must be one of {', '.join(WHOSE)}")
    return found


def judge(found: Found, known: Mapping[str, Cause]) -> Outcome:
    """A failure has the first cause that fits what it said."""
    if found.verdict != "failed":
        return Outcome(found.verdict)
    fitting = (name for name, cause in known.items() if re.search(cause.said, found.said))
    return Outcome("failed", next(fitting, ""))


def run(suite: Suite, peers: Path, tests: Sequence[Sampled], seconds: float) -> dict[str, Found]:
    """Runs tests of one suite and architecture under the emulator, in a process of their own.

    Args:
        peers: the folder with the checkouts.
        seconds: for one test.

    Returns:
        By names of the record.
    """
    root = peers / suite.name / suite.root
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = folder / "results"
        lines.touch()
        command = [sys.executable, "-m", "cute_kernels", "emulate", "--quiet", "--arch", tests[0].arch]
        command += suite.options
        command += [str(HERE / "recorded_pytest.py"), str(lines), "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += ["--rootdir", str(root), "--timeout", str(seconds), *(each.test for each in tests)]
        environment = os.environ | suite.environment | _python_path(suite, peers / suite.name, folder)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=root, env=environment, timeout=seconds * (len(tests) + 1)
            )
            ended = _last(done.stdout + done.stderr)
        except subprocess.TimeoutExpired:
            ended = "the process did not end in time"
        results: dict[str, Found] = {}
        for line in lines.read_text().splitlines():
            facts = json.loads(line)
            results[facts["test"]] = Found(facts["outcome"], facts["said"], facts["seconds"])
    missing = results.get("", Found("failed", f"no result: {ended}"))
    return {each.name: results.get(each.test, missing) for each in tests}


def _python_path(suite: Suite, checkout: Path, folder: Path) -> dict[str, str]:
    """Variables by which Python finds the suite's packages in the checkout, and writes nothing there."""
    paths = []
    for package, place in suite.packages.items():
        if package:
            (folder / "packages" / package).parent.mkdir(parents=True)
            (folder / "packages" / package).symlink_to(checkout / place)
        paths.append(str(folder / "packages" if package else checkout / place))
    ours = str(HERE.parents[1])  # behind theirs: both have a package `tests`
    return {"PYTHONPATH": os.pathsep.join([*paths, ours]), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)}


def _last(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "nothing was printed")


def record() -> dict[str, Outcome]:
    """What is recorded, by the names of tests."""
    stored = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: Outcome(**each) for name, each in stored.items()}


def write_record(outcomes: Mapping[str, Outcome]) -> None:
    """Overwrites the record, a line for each test."""
    lines = (f"{json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in outcomes.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(tests: Iterable[Sampled], outcomes: Mapping[str, Outcome], known: Mapping[str, Cause]) -> list[str]:
    """Lines of two Markdown tables: how many tests of each suite passed, and why the others did not."""
    counts: dict[tuple[str, str], list[str]] = {}
    failures: dict[tuple[str, str], int] = {}
    for each in tests:
        outcome = outcomes[each.name]
        whose = known[outcome.cause].whose if outcome.cause else "nobody's yet"
        counts.setdefault((each.suite, each.arch), []).append(outcome.verdict if outcome.verdict != "failed" else whose)
        if outcome.verdict == "failed":
            failures[each.suite, outcome.cause] = failures.get((each.suite, outcome.cause), 0) + 1
    columns = {"passed": "passed", **WHOSE, "nobody's yet": "not explained", "skipped": "skipped by itself"}
    lines = [f"| {' | '.join(['suite', 'for', *columns.values()])} |", "|---" * (len(columns) + 2) + "|"]
    for (suite, arch), words in counts.items():
        lines.append(f"| {' | '.join([suite, arch, *(str(words.count(column)) for column in columns)])} |")
    ran = [word for words in counts.values() for word in words if word != "skipped"]
    lines += ["", f"{ran.count('passed')} of {len(ran)} that are not skipped pass.", ""]
    if failures:
        lines += ["| suite | tests | whose fault | why |", "|---|---|---|---|"]
    for (suite, cause), count in failures.items():
        whose, why = (WHOSE[known[cause].whose], known[cause].why) if cause else ("not explained", "")
        lines.append(f"| {suite} | {count} | {whose} | {why} |")
    return lines


def page() -> str:
    """The page with the tables of the record at its end."""
    head, heading, _ = PAGE.read_text().partition("### Results\n\n")
    return head + heading + "\n".join(table(sample(), record(), causes())) + "\n"
