"""Lines of the program that PTX was made of, by its ``.loc`` directives, for whole texts at once."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_ASSEMBLY_BEGINS, _ASSEMBLY_ENDS = "// begin inline asm", "// end inline asm"


@dataclass(frozen=True)
class SourcePlace:
    """A line of a source file."""

    path: str
    line: int


@functools.lru_cache(maxsize=8)
def own_places(ptx: str) -> tuple[SourcePlace | None, ...]:
    """By line of a PTX text: the source line that it was made of, the innermost one where functions were inlined.

    None where a line has no source line of its own: before the first ``.loc``; behind one of line 0; behind one of
    column 0 in a text that has columns, which CuTe DSL gives to branches and loop counters (the line is that of the
    function that is compiled as a whole).
    """
    files = dict(_FILE.findall(ptx))
    lines = ptx.splitlines()
    columns = any((match := _LOCATION.match(text)) is not None and match[3] != "0" for text in lines)
    result: list[SourcePlace | None] = []
    place: SourcePlace | None = None
    assembly = False
    for text in lines:
        if ".entry" in text:
            place = None
        assembly = _ASSEMBLY_BEGINS in text or (assembly and _ASSEMBLY_ENDS not in text)
        # LLVM counts the lines of inline assembly on from that of the call, beyond the end of its function.
        if not assembly and (match := _LOCATION.match(text)) is not None:
            own = match[2] != "0" and not (columns and match[3] == "0")
            place = SourcePlace(files.get(match[1], f"file {match[1]}"), int(match[2])) if own else None
        result.append(place)
    return tuple(result)
