"""Reports as SARIF 2.1.0 (OASIS standard), which code hosts and editors show at the source line."""

import os
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from cute_kernels.common.files import current_folder
from cute_kernels.emulator.reports.document import Outcome, tool_version
from cute_kernels.emulator.reports.kinds import kind as kind_of
from cute_kernels.emulator.reports.model import Diagnostic, Place, SourceLine
from cute_kernels.emulator.reports.text import short_path
from cute_kernels.emulator.reports.words import names_of_warps

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def log(outcome: Outcome, diagnostics: Sequence[Diagnostic]) -> dict[str, Any]:
    """The file as an object for `json`: one run, a rule for each kind that was found, a result for each report."""
    kinds = list(dict.fromkeys(each.kind for each in diagnostics))
    rules = [_rule(name) for name in kinds]
    driver = {"name": "cute-kernels", "version": tool_version(), "rules": rules}
    command, folder = shlex.join(outcome.arguments), current_folder()
    run = {
        "tool": {"driver": driver},
        # An exit status of 0 to 4 is a run that has come to its end, with whatever result.
        "invocations": [{"commandLine": command, "exitCode": outcome.status, "executionSuccessful": True}],
        "originalUriBaseIds": {} if folder is None else {"ROOT": {"uri": folder.as_uri() + "/"}},
        "properties": {
            "certificates": {str(each["number"]): each.get("certificate") for each in outcome.launches},
        },
        "results": [_result(each, kinds.index(each.kind)) for each in diagnostics],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    help_text = kind_of(name).help or name
    return {"id": name, "shortDescription": {"text": name.replace("-", " ")}, "help": {"text": help_text}}


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, Any]:
    parts = [diagnostic.sentence, *diagnostic.notes, diagnostic.help]
    result: dict[str, Any] = {
        "ruleId": diagnostic.kind,
        "ruleIndex": rule,
        "level": diagnostic.level,
        "message": {"text": ". ".join(part.rstrip(".") for part in parts if part) + "."},
        "locations": [_location(diagnostic.place)],
        "properties": {
            "kernel": diagnostic.kernel, "launch": diagnostic.launch, "replay": shlex.join(diagnostic.replay),
            "seed": diagnostic.seed, "schedule": list(diagnostic.schedule),
        },
    }  # fmt: skip
    others = [(each.relation, place) for each in diagnostic.related for place in each.places]
    others += [(each.what, each.place) for each in diagnostic.waiting[1:]]
    if diagnostic.barrier is not None and diagnostic.barrier.init is not None:
        others.append((f"{diagnostic.barrier.title} initialised at", diagnostic.barrier.init))
    result["relatedLocations"] = [_location(place, text, number) for number, (text, place) in enumerate(others)]
    return result


def _location(place: Place, text: str = "", number: int | None = None) -> dict[str, Any]:
    where = [names_of_warps(place.warps, place.lanes)]
    if place.ptx_line is not None:
        where.append(f"PTX line {place.ptx_line} {place.instruction}".rstrip())
    location: dict[str, Any] = {"message": {"text": ", ".join(part for part in (text, *where) if part) or "the kernel"}}
    if number is not None:
        location["id"] = number
    if place.source is not None:
        location["physicalLocation"] = _physical(place.source)
    if place.source is not None and place.source.function:
        location["logicalLocations"] = [{"name": place.source.function, "kind": "function"}]
    return location


def _physical(source: SourceLine) -> dict[str, Any]:
    path = short_path(source.path)
    if os.path.isabs(path):
        artifact = {"uri": PurePath(path).as_uri()}
    else:
        artifact = {"uri": quote(PurePath(path).as_posix()), "uriBaseId": "ROOT"}
    region: dict[str, Any] = {"startLine": max(source.line, 1)}
    if source.text:
        region["snippet"] = {"text": source.text}
    return {"artifactLocation": artifact, "region": region}
