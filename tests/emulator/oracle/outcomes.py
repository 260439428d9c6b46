"""What a launch does, in a form that can be compared years later: what it left behind, or what was reported, where."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from cute_kernels.emulator import EmulatorError, Report
from cute_kernels.emulator.programs.recorded import Relocation

_LONG = 48  # characters of an instruction that words quote; the PTX line beside it says the rest


@dataclass(frozen=True)
class Outcome:
    """One launch, either executed or reported.

    Attributes:
        digest: of the buffers that the kernel writes, "" if it was reported.
        counts: what `Report` counts, without times.
        error: name of the class of what was reported, "" if nothing was.
        line: of the PTX text.
        place: source line and warp.
        words: first line of the message, long instructions cut short.
        text: digest of all lines of the message, the instruction included.
        report: all lines.
    """

    digest: str = ""
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    line: int | None = None
    place: str = ""
    words: str = ""
    text: str = ""
    report: tuple[str, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Its JSON, without what is empty."""
        return {name: list(value) if name == "report" else value for name, value in vars(self).items() if value}


# Of a report: not what was executed, but by how many, how fast, and what it says of other schedules.
_HOW = ("seconds", "processes", "one_process", "certificate")


def executed(report: Report, written: bytes) -> Outcome:
    """Of a launch that the emulator executed, and that left these bytes."""
    counts = {name: value for name, value in dataclasses.asdict(report).items() if name not in _HOW}
    for each in (counts.get("units") or {}).get("by_instruction", ()):
        del each["shared"]  # which addresses are accessed: the record is older, and the digest is of what they leave
    return Outcome(_digest(written), json.loads(json.dumps(counts)))  # as a file gives them back: tuples are lists


def reported(error: EmulatorError, moved: Relocation) -> Outcome:
    """Of a launch that was reported; ``moved``: where its buffers lie in the file and in this process."""
    lines = [_same_everywhere(line, moved) for line in (*error.message.splitlines(), (error.instruction or "").strip())]
    return Outcome(
        error=type(error).__name__,
        line=error.ptx_line,
        place=", ".join(part for part in (error.source, error.warp) if part),
        words=_shortened(lines[0]),
        text=_digest("\n".join(lines).encode()),
        report=tuple(_shortened(line) for line in lines[:-1]),
    )


def _same_everywhere(line: str, moved: Relocation) -> str:
    """With addresses of buffers as they are in the file."""

    def as_in_the_file(match: re.Match[str]) -> str:
        word = moved.words(int(match[0], 16).to_bytes(8, "little"), back=True)
        return f"{int.from_bytes(word, 'little'):#x}"

    return re.sub(r"\b0x[0-9a-f]{7,16}\b", as_in_the_file, line)


def _shortened(line: str) -> str:
    return re.sub(rf"`([^`]{{{_LONG}}})[^`]+`", r"`\1...`", line)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
