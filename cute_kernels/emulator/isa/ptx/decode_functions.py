"""Device functions (.func): each call is replaced by the statements of the function.

Registers and labels of the function are those of a scope of their own for every call. Parameters and results are
registers that are moved there and back, and ``ret`` is a branch behind the last statement. So the stages behind
decoding know of no calls. What cannot be expanded (recursion, parameters other than numbers) is refused where it is
called; a function that a kernel does not call is only skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_scopes import Scope, Statement, make_tokens
from cute_kernels.emulator.isa.ptx.lexer import Reader, Token
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS

_RETURN, _AFTER = "$return", "$after"  # labels; PTX has no such names where registers and labels are looked up


@dataclass(frozen=True)
class Function:
    """A function of the module.

    Attributes:
        name: what a call says.
        results, parameters: (name, type) of each.
        body: tokens from { to }.
        refused: why it cannot be expanded, or "".
    """

    name: str
    results: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    body: tuple[Token, ...]
    refused: str = ""


def read_function(reader: Reader) -> Function | None:
    """A function, from .func on; None for a declaration without a body."""
    reader.take(".func")
    while reader.peek().startswith("."):  # .attribute(...) and the like
        reader.take()
        if reader.peek() == "(":
            _skip(reader, "(", ")")
    refused: list[str] = []
    results = _signature(reader, refused) if reader.peek() == "(" else ()
    name = reader.take().text
    parameters = _signature(reader, refused) if reader.peek() == "(" else ()
    while reader.peek() not in ("{", ";"):
        reader.take()  # .noreturn, .unique and limits for the compiler
    if reader.peek() == ";":
        reader.take()
        return None
    return Function(name, results, parameters, tuple(_skip(reader, "{", "}")), refused[0] if refused else "")


def take_body(reader: Reader) -> list[Token]:
    """The tokens of a body from { to }."""
    return _skip(reader, "{", "}")


def _skip(reader: Reader, opening: str, closing: str) -> list[Token]:
    start, depth = reader.at, 0
    for at in range(start, len(reader.tokens)):
        text = reader.tokens[at].text
        depth += (text == opening) - (text == closing)
        if not depth:
            reader.at = at + 1
            return reader.tokens[start : reader.at]
    reader.at = len(reader.tokens)
    reader.take()  # raises
    raise AssertionError


def _signature(reader: Reader, refused: list[str]) -> tuple[tuple[str, str], ...]:
    found = []
    declaration: list[str] = []
    for token in _skip(reader, "(", ")")[1:]:
        if token.text not in (",", ")"):
            declaration.append(token.text)
            continue
        if declaration:
            kind = declaration[1][1:] if len(declaration) == 3 else ""
            if kind not in TYPE_BITS or declaration[0] not in (".param", ".reg"):
                refused.append(f"a parameter or result `{' '.join(declaration)}`")
            found.append((declaration[-1], kind))
        declaration = []
    return tuple(found)


@dataclass(frozen=True)
class Call:
    """A call: the function, what it is given and where its results go, and the guard's tokens."""

    function: Function
    results: tuple[Token, ...]
    arguments: tuple[Token, ...]
    guard: tuple[Token, ...]
    line: int


def read_call(tokens: list[Token], functions: dict[str, Function]) -> Call | None:
    """The call that a statement is; None for any other statement, and for functions outside of the module.

    Raises:
        UnsupportedPTX: the function cannot be expanded, or takes other numbers of values.
    """
    at = 0
    if tokens[0].text == "@":
        at = 3 if [token.text for token in tokens[1:2]] == ["!"] else 2
    if at >= len(tokens) or tokens[at].text.split(".")[0] != "call":
        return None
    guard, lists, name = tuple(tokens[1:at]), [], None
    at += 1
    while at < len(tokens):
        if tokens[at].text == "(":
            end = next((i for i in range(at, len(tokens)) if tokens[i].text == ")"), len(tokens))
            lists.append((name is None, tuple(token for token in tokens[at + 1 : end] if token.text != ",")))
            at = end
        elif tokens[at].text != "," and name is None:
            name = tokens[at].text
        at += 1
    function = functions.get(name or "")
    if function is None:
        return None
    results = next((found for is_result, found in lists if is_result), ())
    arguments = next((found for is_result, found in lists if not is_result), ())
    line = tokens[0].line
    if function.refused:
        raise UnsupportedPTX(f"call of {function.name}: {function.refused} is not implemented", ptx_line=line)
    lengths = (("results", results, function.results), ("arguments", arguments, function.parameters))
    for what, given, declared in lengths:
        if len(given) != len(declared):
            message = f"call of {function.name} with {len(given)} {what}, not {len(declared)}"
            raise UnsupportedPTX(message, ptx_line=line)
    return Call(function, results, arguments, guard, line)


@dataclass(frozen=True)
class Expansion:
    """Where a call is expanded.

    Attributes:
        around: scope of the moves and of the skip: names of the caller, and of the function's parameters and results.
        inside: scope of the function's body.
        before, after: statements around those of the body.
        declared: types of registers by their final name.
    """

    around: Scope
    inside: Scope
    before: list[Statement]
    after: list[Statement]
    declared: dict[str, str]

    @property
    def labels(self) -> tuple[str, str]:
        """Final names of the label behind the body, and of the one behind the moves of results."""
        return _RETURN + self.inside.suffix, _AFTER + self.inside.suffix


def expansion(call: Call, caller: Scope, suffix: str, location: str) -> Expansion:
    """The surroundings of a function's statements in place of a call."""
    function = call.function
    values = {*function.parameters, *function.results}
    names = {name for name, _ in values}
    around, inside = Scope(caller, suffix, set(names), labels={_AFTER}), Scope(None, suffix, names, labels={_RETURN})

    def move(target: Token, source: Token, kind: str) -> Statement:
        line = call.line
        tokens = [*make_tokens(line, f"mov.{kind}"), target, *make_tokens(line, ","), source]
        return Statement(tokens, around, location)

    def own(name: str) -> Token:
        return make_tokens(call.line, name)[0]

    before = []
    if call.guard:
        negated = call.guard[0].text == "!"
        words = ("@", call.guard[-1].text) if negated else ("@", "!", call.guard[-1].text)
        before.append(Statement(make_tokens(call.line, *words, "bra", _AFTER), around, location))
    before += [move(own(name), given, kind) for (name, kind), given in zip(function.parameters, call.arguments)]
    after = [move(given, own(name), kind) for (name, kind), given in zip(function.results, call.results)]
    return Expansion(around, inside, before, after, {name + suffix: kind for name, kind in values})


def returning(tokens: list[Token]) -> list[Token]:
    """A statement of a function: ``ret`` is a branch to its end."""
    if tokens[-1].text.split(".")[0] != "ret":
        return tokens
    return [*tokens[:-1], *make_tokens(tokens[-1].line, "bra", _RETURN)]
