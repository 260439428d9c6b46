"""What became of a program: its verdict, the reports on it, and the table of all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.public_programs.cases import HERE, Case

RECORD = HERE / "expected.json"
#: Compiled kernels that quack would take from its cache hold no PTX; FlashAttention-4 is compiled by it too.
ENVIRONMENT = {"QUACK_CACHE_ENABLED": "0"}


PASSED = ("PASS on",)
"""How the programs of this folder say that their results are right."""

_WRONG = re.compile("^wrong: |Tensor-likes are not|\N{CROSS MARK}", re.MULTILINE)
"""How programs say that a result is wrong: those of this folder, torch.testing, Triton's tutorials."""


@dataclass(frozen=True)
class Outcome:
    """Of one case.

    Attributes:
        verdict: "exact": the program's check passes, and nothing is reported; "reported": something is, and the
            program's check passes all the same; "stopped": something is reported that execution cannot go on after;
            "unchecked": the program ends, and no check of its own says anything; "refused": by the emulator, with a
            message; "wrong": the program's check fails; "crashed": anything else; "slow": it did not end in time.
        reports: ``kind at module:line`` of each report, or the message of a refusal, or the last line of a crash.
    """

    verdict: str
    reports: tuple[str, ...] = ()


def execute(
    arch: str, program: Sequence[str], seconds: float, passed: Sequence[str] = PASSED, silent: bool = False
) -> Outcome:
    """Runs a program with the emulator, in a process and a folder of its own; execution goes on after reports.

    Args:
        arch: as for ``cute-kernels emulate``.
        program: its path, and its arguments.
        seconds: after which it is slow.
        passed, silent: of `judge`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "cute_kernels", "emulate", "--arch", arch, "--keep-going"]
        command += ["--report", str(report), *program]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=os.environ | ENVIRONMENT, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return Outcome("slow")
        diagnostics = json.loads(report.read_text())["diagnostics"] if report.exists() else []
    return judge(done.returncode, done.stdout + done.stderr, diagnostics, passed, silent)


def judge(
    status: int, output: str, diagnostics: list[dict], passed: Sequence[str] = PASSED, silent: bool = False
) -> Outcome:
    """The verdict.

    Args:
        status: of ``cute-kernels emulate``.
        output: what was printed.
        diagnostics: the reports.
        passed: words of which one is printed where the program's check passes.
        silent: the program asserts its results, and may say nothing where they are right.
    """
    reports = tuple(dict.fromkeys(f"{each['kind']}{_place(each)}" for each in diagnostics))
    if status == 4:
        return Outcome("refused", tuple(dict.fromkeys(each["sentence"] for each in diagnostics)) or _last(output))
    if _WRONG.search(output):
        return Outcome("wrong", reports)
    said = silent or any(word in output for word in passed)
    if status == 0 and not reports:
        return Outcome("exact" if said else "unchecked")
    if status == 3 and reports:
        ended = "Traceback" not in output and re.search("launch(es)? complete in", output) is None
        return Outcome(("reported" if said else "unchecked") if ended else "stopped", reports)
    return Outcome("crashed", reports or _last(output))


def _place(diagnostic: dict) -> str:
    source = (diagnostic.get("place") or {}).get("source")
    return f" at {Path(source['file']).stem}:{source['line']}" if source else ""


def _last(output: str) -> tuple[str, ...]:
    """The last line that is the program's own."""
    lines = [line for line in output.strip().splitlines() if not re.match("emulated: |  replay: ", line)]
    return tuple(lines[-1:])


def record() -> dict[str, Outcome]:
    """What is recorded, by the names of cases."""
    stored = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: Outcome(each["verdict"], tuple(each["reports"])) for name, each in stored.items()}


def write_record(outcomes: dict[str, Outcome]) -> None:
    """Overwrites the record, a line for each case."""
    lines = (f"{json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in outcomes.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(cases: Iterable[Case], outcomes: dict[str, Outcome]) -> list[str]:
    """Lines of a Markdown table: cases of one program and argument with one outcome share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        if case.name in outcomes:
            rows.setdefault((*case.row, _result(outcomes[case.name])), []).append(case.arch)
    lines = ["| of | what | for | result |", "|---|---|---|---|"]
    lines += [f"| {of} | {what} | {', '.join(archs)} | {result} |" for (of, what, result), archs in rows.items()]
    return lines


def _result(outcome: Outcome) -> str:
    said = ", ".join(f"`{each}`" if outcome.verdict != "refused" else each for each in outcome.reports)
    return f"{outcome.verdict}: {said}" if said else outcome.verdict
