"""PTX text to tokens."""

import re
from dataclasses import dataclass

from cute_kernels.emulator.errors import UnsupportedPTX

_PATTERN = re.compile(
    r"""
    (?: (?P<space>\s+) | (?P<comment>//[^\n]*|/\*.*?\*/) |
    (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}) |
    (?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+) |
    (?P<number>WARP_SZ(?![\w$.])|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?) |
    (?P<string>"[^"\n]*") |
    (?P<name>\.(?:[\w$]|::)*|[%$_A-Za-z](?:[\w$.]|::)*) |
    (?P<sign>[-+|!@{}\[\](),;:<>=~*]) ) [ \t]*
    """,
    re.VERBOSE | re.DOTALL,
)

_INLINE_ASSEMBLY = {"// begin inline asm": True, "// end inline asm": False}
"""Comments that LLVM writes around inline assembly."""


@dataclass(slots=True)
class Token:
    """``inline``: between the comments that mark inline assembly; None where the text has no such comments at all."""

    kind: str
    text: str
    line: int
    inline: bool | None = None


def tokenize(text: str) -> list[Token]:
    result, position, line = [], 0, 1
    inline = False if any(mark in text for mark in _INLINE_ASSEMBLY) else None
    for match in _PATTERN.finditer(text):
        start, end = match.span()
        if start != position:
            break
        position, kind = end, match.lastgroup
        if kind == "space" or kind == "comment":
            chunk = match[kind]
            if kind == "comment":
                inline = _INLINE_ASSEMBLY.get(chunk.rstrip(), inline)
            line += chunk.count("\n")
        else:
            result.append(Token(kind, match[kind], line, inline))
    if position != len(text):
        raise UnsupportedPTX(f"cannot read {text[position : position + 20]!r}", ptx_line=line)
    return result


_MOST_DIGITS = 80  # of an integer: a binary one has 64, and a prefix


class Reader:
    """A cursor over the tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def line(self) -> int | None:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else None

    def take(self, expected: str | None = None) -> Token:
        if self.at >= len(self.tokens):
            raise UnsupportedPTX(f"the text ends where {expected or 'more'!r} is expected", ptx_line=self.line())
        token = self.tokens[self.at]
        if expected is not None and token.text != expected:
            raise UnsupportedPTX(f"{expected!r} expected, {token.text!r} found", ptx_line=token.line)
        self.at += 1
        return token

    def take_number(self) -> int:
        token = self.take()
        if token.kind != "number":
            raise UnsupportedPTX(f"a number is expected, {token.text!r} found", ptx_line=token.line)
        return integer(token.text, token.line)

    def take_rest_of_line(self, least: int = 0) -> list[Token]:
        """The tokens up to the end of the line; UnsupportedPTX where there are fewer than ``least``."""
        directive, line = self.tokens[self.at - 1].text, self.tokens[self.at - 1].line
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at].line == line:
            self.at += 1
        if self.at - start < least:
            raise UnsupportedPTX(f"{directive} needs {least} words or more on its line", ptx_line=line)
        return self.tokens[start : self.at]

    def take_until(self, end: str) -> list[Token]:
        tokens = self.tokens
        for at in range(self.at, len(tokens)):
            if tokens[at].text == end:
                found, self.at = tokens[self.at : at], at + 1
                return found
        self.at = len(tokens)
        self.take()  # raises
        raise AssertionError

    def take_triple(self) -> tuple[int, int, int]:
        values = [self.take_number()]
        while self.peek() == ",":
            self.take()
            values.append(self.take_number())
        values += [1] * (3 - len(values))
        return values[0], values[1], values[2]


def integer(text: str, line: int | None = None) -> int:
    """The value of an integer literal, which has 64 bits at most (PTX ISA, "Integer Constants")."""
    if text == "WARP_SZ":  # the predefined constant of PTX
        return 32
    digits = text.rstrip("U")
    base = {"0x": 16, "0b": 2}.get(digits[:2].lower(), 8 if len(digits) > 1 and digits[0] == "0" else 10)
    try:
        value = int(digits, base) if len(digits) <= _MOST_DIGITS else 1 << 64
    except ValueError:
        raise UnsupportedPTX(f"`{text}` is no integer: behind a leading 0 are octal digits", ptx_line=line) from None
    if value >> 64:
        shown = text if len(text) <= _MOST_DIGITS else f"{text[:20]}.."
        raise UnsupportedPTX(f"the integer {shown} has more than 64 bits", ptx_line=line)
    return value
