"""Instructions of a kernel's machine code, with their control words, from the text that `compile.disassemble` gives."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SCOREBOARDS = range(6)
"""A warp has these; an instruction of unknown latency sets one or two, and a later one awaits it."""

_CONTROL = 41
"""First bit of the control word in the upper half of an instruction's 16 bytes, on every target from SM80 on."""

_CODE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_PTX_LINE = re.compile(r'^\s*//## File "\.nv_debug_ptx_txt", line (\d+)')
_LABELLED = re.compile(r"[.$][.$\w]+")


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    address: int  # byte offset in its kernel
    predicate: str  # under which it executes, e.g. ``"!P0"``; "" for always
    opcode: str  # with modifiers, e.g. ``"LDG.E.64"``
    operands: str  # as the disassembler writes them
    ptx_line: int  # line of the PTX text that it was made of; 0 if the code does not say
    stall: int  # clocks until the warp may issue the next one
    # written, read: scoreboards that it holds until its results are written, and until its operands are read; None
    # where it holds none
    written: int | None
    read: int | None
    awaits: tuple[int, ...]  # scoreboards that must be free before it is issued
    targets: tuple[int, ...] = ()  # addresses that its operands name

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        predicate = f"@{self.predicate} " if self.predicate else ""
        return f"{predicate}{self.opcode} {self.operands}".rstrip()


def kernels(listing: str) -> dict[str, tuple[Instruction, ...]]:
    """The instructions of every kernel of a listing, by the kernel's name. Raises ValueError: the listing has none, or
    not the bytes of each instruction."""
    found = {name: tuple(_instructions(lines)) for name, lines in _sections(listing).items()}
    if not any(found.values()):
        raise ValueError("the listing has no instructions with their bytes: nvdisasm -hex writes them")
    return found


def _sections(listing: str) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            lines = sections.setdefault(line[len(".text.") : -1], [])
        elif line.startswith("//-----"):  # of the next section, whatever it holds
            lines = []
        else:
            lines.append(line)
    return sections


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    places = _labels(lines)
    ptx_line, code = 0, None
    for line in lines:
        if (match := _PTX_LINE.match(line)) is not None:
            ptx_line = int(match[1])
        elif (match := _CODE.match(line)) is not None:
            code = match
        elif code is not None and (match := _UPPER_HALF.match(line)) is not None:
            address, predicate, opcode, operands = code.groups()
            control = int(match[1], 16) >> _CONTROL
            yield Instruction(
                address=int(address, 16),
                predicate=predicate or "",
                opcode=opcode,
                operands=operands,
                ptx_line=ptx_line,
                stall=control & 15,
                written=_scoreboard(control >> 5),
                read=_scoreboard(control >> 8),
                awaits=tuple(number for number in SCOREBOARDS if control >> 11 + number & 1),
                targets=tuple(places[name] for name in _LABELLED.findall(operands) if name in places),
            )
            code = None


def _scoreboard(field: int) -> int | None:
    number = field & 7
    return number if number in SCOREBOARDS else None


def _labels(lines: list[str]) -> dict[str, int]:
    """Address of the instruction behind each label."""
    places, waiting = {}, []
    for line in lines:
        if (match := _LABEL.match(line)) is not None:
            waiting.append(match[1])
        elif waiting and (match := _CODE.match(line)) is not None:
            places.update(dict.fromkeys(waiting, int(match[1], 16)))
            waiting = []
    return places
