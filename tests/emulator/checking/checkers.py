"""``python -m tests.emulator.checking.checkers``: three checkers judge the same faults, docs/emulator/evidence.md.

The kernel is tests/emulator/checking/task_scheduling_program.py. Task Scheduling judges its schedule, before anything
is compiled; sentryward the PTX; the emulator a run of it. Needs sentryward
(`tests.emulator.checking.mutation.sentryward`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Recorder
from tests.emulator.checking.mutation.sentryward import input_of_launch, verify

PROGRAM = Path(__file__).with_name("task_scheduling_program.py")
PAGE = Path(__file__).parents[3] / "docs" / "emulator" / "evidence.md"
BEGIN, END = "<!-- checkers: written by `python -m tests.emulator.checking.checkers` -->\n", "<!-- end -->"
_LONGEST = 72  # characters of a message
FAULTS = (
    "none", "no acquire", "no commit", "no wait", "no release", "release before the read", "half of the bytes",
    "too many consumers", "no barrier after the initialisation", "store out of bounds",
)  # fmt: skip


def run(fault: str, *options: str) -> tuple[str, str, list[RecordedLaunch]]:
    """What the program raises before its launch (""), what the emulator reports, and its launches."""
    recorder, reported = Recorder(), []
    text = io.StringIO()
    with capture("sm_100a", recorder=recorder) as session, contextlib.redirect_stderr(text):
        with contextlib.redirect_stdout(io.StringIO()):
            run_program(str(PROGRAM), [fault, *options], session, lambda error, *_: reported.append(error))
    errors: list[EmulatorError] = reported
    found = re.findall(r"^\w+(?:Error|Exception): (.*)", text.getvalue(), re.MULTILINE)
    raised = "" if recorder.launches else found[-1]
    return raised, errors[0].kind if errors else "", recorder.launches


def by_sentryward(launch: RecordedLaunch) -> str:
    """Verdict on the PTX of a launch."""
    spans = {f"array{n}": image.span for n, image in enumerate(launch.memory)}
    found = verify(input_of_launch(launch.launch.ptx, launch.launch, spans), launch.launch.ptx, 120)
    codes = dict.fromkeys(str(each.get("code")) for each in found.get("diagnostics", []))
    return " ".join([str(found["result"]), *(f"({code})" for code in codes)])


def row(fault: str) -> str:
    """One line of the table."""
    refused, _, _ = run(fault)
    raised, kind, launches = run(fault, "--unchecked")
    scheduling = f"refuses it: {refused[:_LONGEST]}{'..' * (len(refused) > _LONGEST)}" if refused else "nothing"
    if not launches:
        return f"| {fault} | {scheduling} | no kernel is made | |"
    return f"| {fault} | {scheduling} | {f'`{kind}`' if kind else 'nothing'} | {by_sentryward(launches[0])} |"


def main() -> int:
    lines = ["| fault | Task Scheduling | emulator | sentryward |", "|---|---|---|---|"]
    for fault in FAULTS:
        lines.append(row(fault))
        print(lines[-1], flush=True)
    if PAGE.exists():
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
