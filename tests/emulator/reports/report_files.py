"""Files of ``--report`` and ``--sarif``: as their schema says, and the same as what is printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import jsonschema

from cute_kernels.emulator.reports.document import SCHEMA


def validated(path: Path) -> dict[str, Any]:
    """The content of a file, which the published schema allows."""
    content, schema = json.loads(path.read_text()), json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    return content


def agree(diagnostic: dict[str, Any], text: str) -> None:
    """A report in a file says what the printed one does: places, lines, barriers, help, replay."""
    head, *rest = text.splitlines()
    assert head == f"error[{diagnostic['kind']}]: {diagnostic['sentence']}"
    places = [diagnostic["place"], *(place for each in diagnostic["related"] for place in each["places"])]
    places += [each["place"] for each in diagnostic["waiting"]]
    for place in places:
        source = place["source"]
        assert Path(source["file"]).read_text().splitlines()[source["line"] - 1].strip() == source["text"]
        assert any(f"{source['file']}:{source['line']} " in line for line in rest)
        assert place["instruction"] and any(re.search(rf"PTX lines? .*\b{place['ptx_line']}\b", line) for line in rest)
    barriers = [diagnostic["barrier"], *(each["barrier"] for each in diagnostic["waiting"])]
    for barrier in filter(None, barriers):
        assert any(line.startswith(f"  {barrier['name']} initialised at ") for line in rest)
    assert f"  help: {diagnostic['help']}" in rest and f"  replay: {diagnostic['replay']}" in rest
    assert shlex.split(diagnostic["replay"])[:2] == ["cute-kernels", "emulate"]


def agree_with_sarif(diagnostic: dict[str, Any], log: dict[str, Any]) -> None:
    """The same report in SARIF: what its readers need, by the names of the standard."""
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == diagnostic["kind"]
    assert result["message"]["text"].startswith(diagnostic["sentence"])
    (location,) = result["locations"]
    physical, source = location["physicalLocation"], diagnostic["place"]["source"]
    artifact = physical["artifactLocation"]
    assert re.fullmatch(r"[\w.~/-]*(%[0-9A-F]{2}[\w.~/-]*)*", artifact["uri"], re.ASCII)  # of RFC 3986
    assert artifact == {"uri": quote(source["file"]), "uriBaseId": "ROOT"}
    base = unquote(urlsplit(run["originalUriBaseIds"]["ROOT"]["uri"]).path)
    assert Path(base, unquote(artifact["uri"])).samefile(source["file"])
    assert physical["region"] == {"startLine": source["line"], "snippet": {"text": source["text"]}}
    related = [place["source"]["line"] for each in diagnostic["related"] for place in each["places"]]
    lines = [each["physicalLocation"]["region"]["startLine"] for each in result["relatedLocations"]]
    assert lines[: len(related)] == related
    assert result["properties"]["replay"] == diagnostic["replay"]
