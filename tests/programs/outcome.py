"""What became of a program: its verdict, the reports on it, and the table of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.programs.cases import HERE, Case, cases

RECORD = HERE / "expected.json"
#: Compiled kernels that quack would take from its cache hold no PTX; FlashAttention-4 is compiled by it too.
ENVIRONMENT = {"QUACK_CACHE_ENABLED": "0"}


@dataclass(frozen=True)
class Outcome:
    """Of one case.

    Attributes:
        verdict: "exact": the program's check passes, and nothing is reported; "reported": something is, and the
            program's check passes all the same; "refused": by the emulator, with a message; "wrong": the program's
            check fails; "crashed": anything else; "slow": it did not end in time.
        reports: ``kind at module:line`` of each report, or the message of a refusal, or the last line of a crash.
    """

    verdict: str
    reports: tuple[str, ...] = ()


def execute(case: Case, seconds: float) -> Outcome:
    """Runs a case with the emulator, in a process of its own; execution goes on after reports."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(str(Path(sys.executable).with_name("cute-kernels")), "emulate", "--arch", case.arch, "--keep-going"),
            *("--report", str(report), str(HERE / case.program), case.argument),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=os.environ | ENVIRONMENT
            )
        except subprocess.TimeoutExpired:
            return Outcome("slow")
        diagnostics = json.loads(report.read_text())["diagnostics"] if report.exists() else []
    return judge(done.returncode, done.stdout + done.stderr, diagnostics)


def judge(status: int, output: str, diagnostics: list[dict]) -> Outcome:
    """The verdict of an exit status of ``cute-kernels emulate``, what was printed, and the reports."""
    reports = tuple(dict.fromkeys(f"{each['kind']}{_place(each)}" for each in diagnostics))
    passed = "PASS on" in output
    if status == 0 and passed and not reports:
        return Outcome("exact")
    if status == 4:
        return Outcome("refused", tuple(dict.fromkeys(each["sentence"] for each in diagnostics)) or _last(output))
    if status == 3 and passed:
        return Outcome("reported", reports)
    if "wrong:" in output:
        return Outcome("wrong", reports)
    return Outcome("crashed", reports or _last(output))


def _place(diagnostic: dict) -> str:
    source = (diagnostic.get("place") or {}).get("source")
    return f" at {Path(source['file']).stem}:{source['line']}" if source else ""


def _last(output: str) -> tuple[str, ...]:
    return tuple(output.strip().splitlines()[-1:])


def record() -> dict[str, Outcome]:
    """What is recorded, by the names of cases."""
    stored = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: Outcome(each["verdict"], tuple(each["reports"])) for name, each in stored.items()}


def write_record(outcomes: dict[str, Outcome]) -> None:
    """Overwrites the record."""
    RECORD.write_text(json.dumps({name: asdict(each) for name, each in outcomes.items()}, indent=1) + "\n")


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """Lines of a Markdown table: cases of one program and argument with one outcome share a row."""
    rows: dict[tuple[str, str, Outcome], list[str]] = {}
    for case in _with_outcome(cases(), outcomes):
        rows.setdefault((case.origin, case.argument, outcomes[case.name]), []).append(case.arch)
    lines = ["| of | what | for | result |", "|---|---|---|---|"]
    for (origin, argument, outcome), archs in rows.items():
        said = ", ".join(f"`{each}`" if outcome.verdict == "reported" else each for each in outcome.reports)
        result = f"{outcome.verdict}: {said}" if said else outcome.verdict
        lines.append(f"| {origin} | `{argument}` | {', '.join(archs)} | {result} |")
    return lines


def _with_outcome(all_cases: Iterable[Case], outcomes: dict[str, Outcome]) -> list[Case]:
    return [case for case in all_cases if case.name in outcomes]
