"""Operands of an instruction, read and resolved: registers, literals, addresses, lists."""

import re
import struct

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_scopes import Scope
from cute_kernels.emulator.isa.ptx.lexer import Reader, Token, integer
from cute_kernels.emulator.isa.ptx.program import (
    Immediate,
    Memory,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

#: Predefined registers (PTX ISA, "Special Registers").
_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)(\.[xyzw])?|%cluster_n?ctarank|%is_explicit_cluster|%laneid|%n?warpid|"
    r"%n?smid|%gridid|%lanemask_(eq|le|lt|ge|gt)|%clock(_hi|64)?|%globaltimer(_lo|_hi)?|%pm[0-7](_64)?|%envreg\d+|"
    r"%reserved_smem_offset_\w+|%(total|aggr|dynamic)_smem_size|%current_graph_exec"
)
PARTS, _COLORS = "xyzw", "rgba"
"""Suffixes of a vector register's elements (PTX ISA, "Vectors as Operands")."""
_MOST_NESTED = 8
"""Lists, addresses and negations inside of each other: PTX has two levels."""


class OperandReader(Reader):
    """Reads operands and resolves names in the scope of the statement."""

    def __init__(self, tokens: list[Token], scope: Scope, text: str) -> None:
        super().__init__(tokens)
        self.scope, self.text, self._nested = scope, text, 0

    def take(self, expected: str | None = None) -> str:  # type: ignore[override]
        if self.at >= len(self.tokens) or expected not in (None, self.peek()):
            raise self._error(f"{expected or 'more'!r} expected, {self.peek()!r} found")
        return super().take(expected).text

    def _error(self, why: str) -> UnsupportedPTX:
        line = self.tokens[0].line
        return UnsupportedPTX(f"cannot read the instruction: {why}", ptx_line=line, instruction=self.text)

    def operand(self) -> Operand:
        first = self._primary()
        if self.at < len(self.tokens) and self.tokens[self.at].text == "|":
            self.take()
            return Pair(first, self._primary())
        return first

    def moved(self) -> Operand:
        """An operand of mov, which may be the address of a variable and a number of bytes behind it."""
        operand = self.operand()
        if not isinstance(operand, Symbol) or self.peek() not in ("+", "-"):
            return operand
        return Symbol(operand.name, self._offset())

    def _offset(self) -> int:
        """Sum of the signed numbers that follow, as a signed number of 64 bits."""
        offset = 0
        while self.peek() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            if self.peek() == "-":
                self.take()
                sign = -sign
            offset += sign * self.take_number_here()
        if not -(2**63) <= offset < 2**64:
            raise self._error(f"the offset {offset} of an address has more than 64 bits")
        return (offset + 2**63) % 2**64 - 2**63

    def _primary(self) -> Operand:
        if self.at < len(self.tokens) and self.tokens[self.at].kind == "name":
            self.at += 1
            return self._name(self.tokens[self.at - 1].text)
        if self.peek() not in ("{", "(", "[", "!"):
            return self._scalar()
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise self._error(f"more than {_MOST_NESTED} lists, addresses and negations inside of each other")
        operand = self._composed(self.peek())
        self._nested -= 1
        return operand

    def _composed(self, text: str) -> Operand:
        """An operand that has others inside, by its first token."""
        if text == "{":
            return Vector(self._list("{", "}"))
        if text == "(":
            return Vector(self._list("(", ")"))
        if text == "[":
            return self._memory()
        self.take("!")
        register = self._primary()
        if not isinstance(register, Register):
            raise self._error("'!' must be followed by a predicate register")
        return Not(register)

    def _list(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.take(opening)
        items = [self.operand()]
        while self.peek() == ",":
            self.take()
            items.append(self.operand())
        self.take(closing)
        return tuple(items)

    def _memory(self) -> Memory:
        self.take("[")
        base = self._primary()
        offset = self._offset()
        extra = []
        while self.peek() == ",":
            self.take()
            extra.append(self.operand())
        self.take("]")
        return Memory(base, offset, tuple(extra))

    def take_number_here(self) -> int:
        if self.at >= len(self.tokens) or self.tokens[self.at].kind != "number":
            raise self._error(f"a number is expected, {self.peek()!r} found")
        return integer(self.take(), self.tokens[0].line)

    def _scalar(self) -> Operand:
        negative = self.peek() == "-"
        self.at += negative
        if self.at >= len(self.tokens):
            raise self._error("an operand is missing")
        token = self.tokens[self.at]
        self.at += 1
        sign = -1 if negative else 1
        if token.kind == "number":
            return Immediate(sign * integer(token.text, token.line))
        if token.kind == "float":
            bits = int(token.text[2:], 16)
            width = 32 if token.text[1] in "fF" else 64
            return Immediate(bits ^ ((1 << (width - 1)) if negative else 0), width)
        if token.kind == "decimal":
            return Immediate(struct.unpack("<Q", struct.pack("<d", sign * float(token.text)))[0], 64)
        operand = self._name(token.text) if token.kind == "name" else None
        if operand is None or negative:
            raise self._error(f"{'-' * negative + token.text!r} is not an operand")
        return operand

    def _name(self, name: str) -> Operand:
        """A name is looked up once in a scope: all scopes are complete when operands are read."""
        known = self.scope.operands
        if name not in known:
            known[name] = self._look_up(name)
        return known[name]

    def _look_up(self, name: str) -> Operand:
        if name == "_":
            return Sink()
        register = self.scope.find(name, "registers")
        if register is not None:
            return Register(register)
        elements = self.scope.elements(name)
        if elements:
            return Vector(tuple(self._name(f"{name}.{part}") for part in PARTS[:elements]))
        vector, _, color = name.rpartition(".")
        if color and color in _COLORS and self.scope.elements(vector):
            return self._name(f"{vector}.{PARTS[_COLORS.index(color)]}")
        if name.startswith("%"):
            if not _SPECIAL.fullmatch(name):
                line = self.tokens[0].line
                raise UnsupportedPTX(f"register {name} is not declared", ptx_line=line, instruction=self.text)
            return Special(name)
        return Symbol(self.scope.find(name, "labels") or name)
