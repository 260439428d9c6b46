"""Names in the body of a kernel: brace levels, and statements with the level that their names are looked up in."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.lexer import Token
from cute_kernels.emulator.isa.ptx.program import Operand


@dataclass
class Scope:
    """A brace level of a kernel body, or of a function that is expanded in it."""

    parent: Scope | None
    suffix: str
    registers: set[str] = field(default_factory=set)
    vectors: dict[str, int] = field(default_factory=dict)  # elements of registers declared as .v2 or .v4
    labels: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)  # and the parameters of the kernel
    operands: dict[str, Operand] = field(default_factory=dict)  # what names stand for, as they are looked up

    def declare(self, name: str, names: set[str], line: int | None) -> None:
        """Adds a name to those of registers, labels or variables; raises UnsupportedPTX if these braces have it."""
        if name in self.registers or name in self.labels or name in self.variables or name in self.vectors:
            raise UnsupportedPTX(f"{name!r} is declared twice in the same braces", ptx_line=line)
        names.add(name)

    def elements(self, name: str) -> int:
        """How many elements a vector register has; 0 for any other name."""
        scope: Scope | None = self
        while scope is not None and name not in scope.registers:
            if name in scope.vectors:
                return scope.vectors[name]
            scope = scope.parent
        return 0

    def find(self, name: str, names: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in getattr(scope, names):
                return name + scope.suffix
            scope = scope.parent
        return None


@dataclass
class Statement:
    """``location``: numbers of file and line, of the .loc in force; ``used_bytes``: as of `program.Instruction`."""

    tokens: list[Token]
    scope: Scope
    location: str
    used_bytes: int | None = None


def make_tokens(line: int, *texts: str) -> list[Token]:
    kinds = dict.fromkeys(",@![]+", "sign")
    return [Token(kinds.get(text) or ("number" if text.isdecimal() else "name"), text, line) for text in texts]
