"""Lines of the program that PTX was made of, by its ``.loc`` directives, for whole texts at once."""

import functools
import re
from dataclasses import dataclass

from cute_kernels.common.files import printable

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+("[^"]+")', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_NUMBER = r"\s+(\d{1,18})\b"
_LOCATION = re.compile(rf"\s*\.loc{_NUMBER}{_NUMBER}{_NUMBER}(?:.*\binlined_at{_NUMBER}{_NUMBER})?")
_OURS = "/cute_kernels/dsl/"
_ASSEMBLY_BEGINS, _ASSEMBLY_ENDS = "// begin inline asm", "// end inline asm"


@dataclass(frozen=True)
class SourcePlace:
    path: str
    line: int


@dataclass(frozen=True)
class Directive:
    """One ``.loc``: a place, which is none where its line is 0; a column; the call that it was inlined at."""

    place: SourcePlace
    column: int
    inlined_at: SourcePlace | None = None


def unquoted(text: str) -> str:
    """Name of a file for a string in quotes: LLVM writes the bytes of names that are no printable ASCII in octal.

    The string may be anybody's: characters that terminals or systems take for something else are escaped.
    """

    def meant(escape: re.Match[bytes]) -> bytes:
        return bytes([int(escape[1], 8) & 0xFF]) if len(escape[1]) == 3 else _LETTERS.get(escape[1], escape[1])

    return printable(_ESCAPE.sub(meant, text[1:-1].encode(errors="replace")).decode(errors="replace"))


@functools.lru_cache(maxsize=8)
def directives(ptx: str) -> tuple[Directive | None, ...]:
    """By line of a PTX text, the ``.loc`` in force in its kernel; None before the first."""
    files = {number: unquoted(name) for number, name in _FILE.findall(ptx)}
    current: Directive | None = None
    assembly = False
    result = []
    for text in ptx.splitlines():
        if ".entry" in text:
            current = None
        assembly = _ASSEMBLY_BEGINS in text or (assembly and _ASSEMBLY_ENDS not in text)
        # LLVM counts the lines of inline assembly on from that of the call, beyond the end of its function.
        if not assembly and (match := _LOCATION.match(text)) is not None:
            inlined = SourcePlace(files.get(match[4], ""), int(match[5])) if match[4] else None
            path = files.get(match[1], f"file {match[1]}")
            # CuTe DSL takes who calls its compiler for the program, where no function of the program is under way.
            place = SourcePlace(path, 0 if _OURS in path else int(match[2]))
            current = Directive(place, int(match[3]), inlined)
        result.append(current)
    return tuple(result)


@functools.lru_cache(maxsize=8)
def own_places(ptx: str) -> tuple[SourcePlace | None, ...]:
    """By line of a PTX text: the source line that it was made of, the innermost one where functions were inlined.

    None where a line has no source line of its own: before the first ``.loc``; behind one of line 0; behind one of
    column 0 in a text that has columns, which CuTe DSL gives to branches and loop counters (the line is that of the
    function that is compiled as a whole).
    """
    found = directives(ptx)
    columns = any(each is not None and each.column for each in found)
    return tuple(
        each.place if each is not None and each.place.line and (each.column or not columns) else None for each in found
    )
