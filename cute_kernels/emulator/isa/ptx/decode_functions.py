"""Device functions (.func): each call is replaced by the statements of the function.

Registers and labels of the function are those of a scope of their own for every call. Parameters and results are
registers that are moved there and back, and ``ret`` is a branch behind the last statement. So the stages behind
decoding know of no calls. Of an array (a structure) the address is handed over: it lies in the caller's local memory.
A function that calls itself has one body (`decode_recursion`); a call by address is one call for each function that it
may mean. A function that a kernel does not call is only skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_scopes import Scope, Statement, make_tokens
from cute_kernels.emulator.isa.ptx.lexer import Reader, Token
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS

ARRAY = "array"
_FIRST_ADDRESS = 1 << 12
_RETURN, _AFTER = "$return", "$after"  # labels; PTX has no such names where registers and labels are looked up


@dataclass(frozen=True)
class Function:
    """A function of the module."""

    name: str  # what a call says
    # results, parameters: (name, type) of each; of an array the type is `ARRAY`
    results: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    body: tuple[Token, ...]  # tokens from { to }
    refused: str = ""  # why it cannot be expanded, or ""

    @property
    def arrays(self) -> list[str]:
        """Names of parameters and results that are arrays."""
        return [name for name, kind in (*self.parameters, *self.results) if kind == ARRAY]

    def signature(self) -> list[list[str]]:
        """Types of results and parameters: what a call by address has to fit."""
        kinds = ([kind for _, kind in each] for each in (self.results, self.parameters))
        return [[kind if kind == ARRAY else str(TYPE_BITS[kind]) for kind in each] for each in kinds]


class Functions:
    """The functions of a module, and the addresses of those that may be called by one: numbers of nothing else."""

    def __init__(self, known: dict[str, Function], texts: Iterable[Sequence[Token]], named: Iterable[str]) -> None:
        """``texts``: of all bodies, ``named``: what initialisers of variables name."""
        self.known = known
        fours = (four for words in texts if known for four in zip(words, words[1:], words[2:], words[3:]))
        moved = (name.text for opcode, _, comma, name in fours
                 if name.text in known and comma.text == "," and opcode.text.startswith("mov."))  # fmt: skip
        pointed = dict.fromkeys((*moved, *(name for name in named if name in known)))
        self.addresses = {name: _FIRST_ADDRESS + 16 * number for number, name in enumerate(pointed)}

    def with_addresses(self, tokens: list[Token]) -> list[Token]:
        """A statement with numbers in place of functions' names."""
        if not self.addresses or not any(token.text in self.addresses for token in tokens):
            return tokens
        return [Token("number", str(self.addresses[token.text]), token.line) if token.text in self.addresses else token
                for token in tokens]  # fmt: skip

    def of_type(self, call: Call, kind_of: Callable[[str], str]) -> list[Function]:
        """The functions that a call by address may mean."""
        given = [[kind_of(token.text) for token in each] for each in (call.results, call.arguments)]

        def fits(function: Function) -> bool:
            kinds = function.signature()
            return [*map(len, kinds)] == [*map(len, given)] and all(
                mine in (wanted, "") for own, needed in zip(given, kinds) for mine, wanted in zip(own, needed)
            )

        return [function for name in self.addresses if not (function := self.known[name]).refused and fits(function)]


def read_function(reader: Reader) -> Function | None:
    """A function, from .func on; None for a declaration without a body."""
    reader.take(".func")
    while reader.peek().startswith("."):  # .attribute(...) and the like
        reader.take()
        if reader.peek() == "(":
            take_within(reader, "(", ")")
    refused: list[str] = []
    results = _signature(reader, refused) if reader.peek() == "(" else ()
    name = reader.take().text
    parameters = _signature(reader, refused) if reader.peek() == "(" else ()
    while reader.peek() not in ("{", ";"):
        reader.take()  # .noreturn, .unique and limits for the compiler
    if reader.peek() == ";":
        reader.take()
        return None
    return Function(name, results, parameters, tuple(take_within(reader)), refused[0] if refused else "")


def take_within(reader: Reader, opening: str = "{", closing: str = "}") -> list[Token]:
    """The tokens from an opening brace to its closing one."""
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
    for token in take_within(reader, "(", ")")[1:]:
        if token.text not in (",", ")"):
            declaration.append(token.text)
            continue
        if declaration:
            kind = declaration[1][1:] if len(declaration) == 3 else ""
            name = declaration[-1]
            if "[" in declaration and declaration[0] == ".param":
                kind, name = ARRAY, declaration[declaration.index("[") - 1]
            if kind not in (*TYPE_BITS, ARRAY) or declaration[0] not in (".param", ".reg"):
                refused.append(f"a parameter or result `{' '.join(declaration)}`")
            found.append((name, kind))
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

    def inputs(self) -> list[tuple[str, str, Token]]:
        """(name, type, what is given) of parameters, and of results that are arrays: their addresses."""
        given = [*zip(self.function.parameters, self.arguments), *zip(self.function.results, self.results)]
        count = len(self.function.parameters)
        return [(name, "b64" if kind == ARRAY else kind, token) for number, ((name, kind), token) in enumerate(given)
                if number < count or kind == ARRAY]  # fmt: skip

    def outputs(self) -> list[tuple[str, str, Token]]:
        """(name, type, where it goes) of results that are numbers."""
        pairs = zip(self.function.results, self.results)
        return [(name, kind, token) for (name, kind), token in pairs if kind != ARRAY]


def read_call(
    tokens: list[Token], functions: dict[str, Function], is_register: Callable[[str], bool]
) -> Call | None:  # fmt: skip
    """The call that a statement is; None for any other statement, and for functions outside of the module.

    By a register it is one of a `Function` without a body. Raises UnsupportedPTX: the function cannot
    be expanded, or takes other numbers of values."""
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
    if function is None and not (name and is_register(name)):
        return None
    results = next((found for is_result, found in lists if is_result), ())
    arguments = next((found for is_result, found in lists if not is_result), ())
    line = tokens[0].line
    if function is None:
        return Call(Function(name, (), (), ()), results, arguments, guard, line)
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
    """Where a call is expanded."""

    # scope of the moves and of the skip: names of the caller, and of the function's parameters and results
    around: Scope
    inside: Scope  # scope of the function's body
    # before, after: statements around those of the body
    before: list[Statement]
    after: list[Statement]
    declared: dict[str, str]  # types of registers by their final name

    @property
    def labels(self) -> tuple[str, str]:
        """Final names of the label behind the body, and of the one behind the moves of results."""
        return _RETURN + self.inside.suffix, _AFTER + self.inside.suffix


def expansion(call: Call, caller: Scope, suffix: str, location: str) -> Expansion:
    """The surroundings of a function's statements in place of a call."""
    function = call.function
    every = (*function.parameters, *function.results)
    values = {(name, "b64" if kind == ARRAY else kind) for name, kind in every}
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
    before += [move(own(name), given, kind) for name, kind, given in call.inputs()]
    after = [move(given, own(name), kind) for name, kind, given in call.outputs()]
    return Expansion(around, inside, before, after, {name + suffix: kind for name, kind in values})


def returning(tokens: list[Token]) -> list[Token]:
    """A statement of a function: ``ret`` is a branch to its end."""
    if tokens[-1].text.split(".")[0] != "ret":
        return tokens
    return [*tokens[:-1], *make_tokens(tokens[-1].line, "bra", _RETURN)]
