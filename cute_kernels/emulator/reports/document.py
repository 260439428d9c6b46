"""Reports as JSON for programs: the file of ``--report``, which `schema.json` describes."""

import dataclasses
import importlib.metadata
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.facts import WarpName
from cute_kernels.emulator.machine.launch.run import Report
from cute_kernels.emulator.races.certificate import Certificate
from cute_kernels.emulator.reports.model import Barrier, Diagnostic, Related, SourceLine
from cute_kernels.emulator.reports.text import short_path

VERSION = 1
"""Version of the format: it changes when a field changes its meaning or goes away, not when one is added."""
SCHEMA = Path(__file__).with_name("schema.json")


@dataclass
class Outcome:
    """Outcome of a command, as the file says it beside the reports."""

    command: str  # its name
    arguments: Sequence[str]  # the whole command as words
    # program, arch: what ran, and for which architecture
    program: str
    arch: str
    status: int = 0  # the exit status
    # seed, schedule: under which the program ran, options of the command
    seed: int = 0
    schedule: Sequence[str] = ()
    launches: list[dict[str, Any]] = field(default_factory=list)  # `launch_facts` of each
    summary: dict[str, Any] = field(default_factory=dict)  # numbers of the command as a whole, by name
    suppressed: dict[str, int] = field(default_factory=dict)  # how often a report was left out, by suppression


def document(outcome: Outcome, diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """The file as an object for `json`."""
    head = {"format": "cute-kernels-report", "version": VERSION}
    tool = {"name": "cute-kernels", "version": tool_version()}
    facts = dataclasses.asdict(outcome)
    facts["arguments"], facts["schedule"] = list(outcome.arguments), list(outcome.schedule)
    return {**head, "tool": tool, **facts, "diagnostics": list(map(_diagnostic, diagnostics))}


def tool_version() -> str:
    """Version of the installed package, "unknown" where it runs from its folder."""
    try:
        return importlib.metadata.version("cute-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def dumps(content: dict[str, Any]) -> str:
    """Text of a file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def launch_facts(
    number: int,
    kernel: str,
    launch: CapturedLaunch,
    report: Report | None = None,
    certificate: Certificate | None = None,
) -> dict[str, Any]:
    """A launch of a program. ``number``: from 1 on. ``kernel``: short name. ``launch``: as its host code made it.
    ``report``: of a launch that is complete, None otherwise. ``certificate``: of a launch without a report here."""
    shape = {name: list(getattr(launch, name)) for name in ("grid", "block", "cluster")}
    facts = {"number": number, "kernel": kernel, "kernel_name": launch.kernel_name, **shape}
    facts |= {"dynamic_shared_bytes": launch.dynamic_smem, "complete": report is not None}
    if report is not None:
        counts = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name != "units"}
        plain = {name: value for name, value in counts.items() if isinstance(value, (int, float, dict)) and value != {}}
        facts["report"] = {name: value for name, value in plain.items() if _is_json(value)}
        facts["counters"] = dataclasses.asdict(report.units) if report.units is not None else None
        certificate = report.certificate
    if certificate is not None:
        facts["certificate"] = certificate.facts()
    return facts


def _is_json(value: object) -> bool:
    return not isinstance(value, dict) or all(isinstance(n, str) and isinstance(v, int) for n, v in value.items())


def _diagnostic(diagnostic: Diagnostic) -> dict[str, Any]:
    return _plain(diagnostic) | {"replay": shlex.join(diagnostic.replay)}


#: Fields of a report that the format calls otherwise, or ("") leaves out.
_NAMES = {
    Related: {"what": "operation"}, SourceLine: {"path": "file"}, WarpName: {"index": "warp", "several": ""},
    Barrier: {"tx": "pending_bytes", "init": "initialised"},
}  # fmt: skip


def _plain(value: object) -> Any:
    """Parts of a report as objects for `json`."""
    if isinstance(value, SourceLine):
        value = dataclasses.replace(value, path=short_path(value.path))
    if dataclasses.is_dataclass(value):
        names = {each.name: _NAMES.get(type(value), {}).get(each.name, each.name) for each in dataclasses.fields(value)}
        return {name: _plain(getattr(value, field)) for field, name in names.items() if name}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
