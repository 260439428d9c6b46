"""PTX text to typed instructions.

The text is read in two passes. The first cuts it into statements and remembers the `{ ... }` scope of each, because a
scope (inline assembly opens one per call) has its own registers and labels, and a label may be used before it is
defined. The second pass resolves names: a register or label of an inner scope gets the suffix ``@n`` of its scope, so
later stages see one flat name space.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.lexer import Reader, Token, integer, tokenize

#: Width in bits of the fundamental types; ``pred`` counts as 1.
TYPE_BITS = {
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    **{"f16": 16, "f32": 32, "f64": 64, "bf16": 16, "f16x2": 32, "bf16x2": 32, "b128": 128, "pred": 1},
}


@dataclass(frozen=True)
class Register:
    """A declared register; ``name`` carries the scope suffix."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register, e.g. ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. ``value`` is the integer, or the bit pattern when ``float_bits`` (32 or 64) is not 0."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, kernel parameter or label (labels carry the scope suffix)."""

    name: str


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Memory:
    """``[base + offset, extra...]``; ``extra`` holds the coordinate vectors of tensor copies."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """``value|predicate``, the two destinations of e.g. ``elect.sync``."""

    value: Operand
    predicate: Operand


@dataclass(frozen=True)
class Not:
    """``!p``."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """``_``: a destination that is thrown away."""


Operand = Register | Special | Immediate | Symbol | Vector | Memory | Pair | Not | Sink


@dataclass(frozen=True)
class Guard:
    """``@p`` or ``@!p`` in front of an instruction."""

    register: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel.

    Attributes:
        index: position in ``Kernel.instructions``.
        parts: the opcode split at its dots, e.g. ``("ld", "shared", "v4", "b32")``; ``::`` stays inside a part.
        operands: in PTX order.
        guard: predicate of execution, or None.
        line: 1-based line of the PTX text.
        source: ``"file:line"`` of the ``.loc`` in force, or "".
        text: the instruction as written, white space collapsed.
    """

    index: int
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    source: str
    text: str

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    def refuse(self, why: str) -> UnsupportedPTX:
        """An error to raise that says where this instruction stands."""
        return UnsupportedPTX(why, ptx_line=self.line, instruction=self.text, source=self.source or None)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter; ``offset`` is where it starts in the parameter block."""

    name: str
    align: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A variable in some state space. ``nbytes`` is 0 for the unsized (dynamic) shared array."""

    name: str
    space: str
    align: int
    nbytes: int
    initial: bytes = b""


@dataclass(frozen=True)
class Kernel:
    """One ``.entry``.

    Attributes:
        registers: type (e.g. ``"b32"``) per register name.
        labels: index of the instruction that follows the label.
        reqntid: block shape the kernel was compiled for, or None.
        reqnctapercluster: cluster shape the kernel was compiled for, or None.
    """

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    variables: tuple[Variable, ...]
    reqntid: tuple[int, int, int] | None = None
    reqnctapercluster: tuple[int, int, int] | None = None

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.parameters), default=0)


@dataclass(frozen=True)
class Module:
    """A PTX text."""

    target: str
    version: str
    kernels: dict[str, Kernel]
    variables: tuple[Variable, ...]


@dataclass
class _Scope:
    """A brace level of a kernel body."""

    parent: _Scope | None
    suffix: str
    registers: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)

    def find(self, name: str, names: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in getattr(scope, names):
                return name + scope.suffix
            scope = scope.parent
        return None


@dataclass
class _Statement:
    tokens: list[Token]
    scope: _Scope
    location: str


# --- module level ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Decodes a PTX module (cached by its text).

    Raises:
        UnsupportedPTX: a construct that is not read here (functions, calls, debug sections with code, ...).
    """
    reader = Reader(tokenize(text))
    target = version = ""
    kernels: dict[str, Kernel] = {}
    variables: list[Variable] = []
    files: dict[int, str] = {}
    pending: list[_Body] = []
    while reader.peek():
        token = reader.take()
        if token.text == ".version":
            version = reader.take().text
        elif token.text == ".target":
            target = reader.take_rest_of_line()[0].text
        elif token.text in (".address_size",):
            reader.take_rest_of_line()
        elif token.text == ".file":
            _read_file(reader.take_rest_of_line(), files)
        elif token.text == ".section":
            _skip_section(reader)
        elif token.text in (".visible", ".extern", ".weak", ".entry", ".shared", ".global", ".const"):
            reader.at -= 1
            item = _declaration(reader, files)
            if isinstance(item, Variable):
                variables.append(item)
            else:
                pending.append(item)
        else:
            raise UnsupportedPTX(f"{token.text!r} at module level is not supported", ptx_line=token.line)
    for body in pending:  # after the loop: LLVM may write the .file table behind the code
        kernels[body.name] = body.finish(tuple(variables))
    return Module(target, version, kernels, tuple(variables))


def _read_file(tokens: list[Token], files: dict[int, str]) -> None:
    files[integer(tokens[0].text)] = tokens[1].text.strip('"')


def _skip_section(reader: Reader) -> None:
    """Debug sections hold data for debuggers only."""
    while reader.take().text != "{":
        pass
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(reader.take().text, 0)


def _declaration(reader: Reader, files: dict[int, str]) -> Variable | _Body:
    linkage = []
    while reader.peek() in (".visible", ".extern", ".weak"):
        linkage.append(reader.take().text)
    if reader.peek() == ".entry":
        return _entry(reader, files)
    return _variable(reader)


def _variable(reader: Reader) -> Variable:
    line = reader.line()
    space = reader.take().text[1:]
    if space not in ("shared", "global", "const", "local"):
        raise UnsupportedPTX(f".{space} declarations are not supported", ptx_line=line)
    align = None
    while reader.peek() in (".align", ".attribute"):
        directive = reader.take().text
        if directive == ".attribute":
            raise UnsupportedPTX(".attribute is not supported", ptx_line=line)
        align = reader.take_number()
    element = reader.take().text[1:]
    if element not in TYPE_BITS:
        raise UnsupportedPTX(f"variables of type .{element} are not supported", ptx_line=line)
    size = TYPE_BITS[element] // 8
    name = reader.take().text
    count = 1
    while reader.peek() == "[":
        reader.take()
        count *= reader.take_number() if reader.peek() != "]" else 0
        reader.take("]")
    initial = b""
    if reader.peek() == "=":
        reader.take()
        initial = _initialiser(reader, size)
    reader.take(";")
    return Variable(name, space, align or size, size * count, initial)


def _initialiser(reader: Reader, size: int) -> bytes:
    values, braces = [], reader.peek() == "{"
    line = reader.line()
    if braces:
        reader.take()
    while True:
        sign = -1 if reader.peek() == "-" else 1
        if sign < 0:
            reader.take()
        values.append(sign * reader.take_number())
        if reader.peek() != ",":
            break
        reader.take()
    if braces:
        if reader.peek() != "}":
            raise UnsupportedPTX("initialisers other than numbers are not supported", ptx_line=line)
        reader.take("}")
    return b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values)


def _entry(reader: Reader, files: dict[int, str]) -> _Body:
    reader.take(".entry")
    body = _Body(reader.take().text, files)
    if reader.peek() == "(":
        reader.take()
        while reader.peek() != ")":
            body.parameters.append(_parameter(reader, body.parameters))
            if reader.peek() == ",":
                reader.take()
        reader.take(")")
    while reader.peek() != "{":
        token = reader.take()
        if token.text == ".reqntid":
            body.reqntid = reader.take_triple()
        elif token.text == ".reqnctapercluster":
            body.reqnctapercluster = reader.take_triple()
        elif token.text in (".maxntid", ".minnctapersm", ".maxnreg", ".maxclusterrank"):
            reader.take_triple()  # limits for the compiler's register allocation
        elif token.text in (".explicitcluster", ".blocksareclusters"):
            if token.text == ".blocksareclusters":
                raise UnsupportedPTX(".blocksareclusters is not supported", ptx_line=token.line)
        else:
            raise UnsupportedPTX(f"{token.text!r} is not a known directive of an entry", ptx_line=token.line)
    body.read(reader)
    return body


def _parameter(reader: Reader, before: list[Parameter]) -> Parameter:
    line = reader.line()
    reader.take(".param")
    align = None
    element = ""
    pointer = False
    while reader.peek().startswith("."):
        directive = reader.take().text
        pointer = pointer or directive == ".ptr"
        if directive == ".align":
            number = reader.take_number()
            align = align if pointer else number  # behind .ptr it is the alignment of what is pointed to
        elif directive[1:] in TYPE_BITS:
            element = directive[1:]
        elif directive not in (".ptr", ".global", ".shared"):
            raise UnsupportedPTX(f"{directive!r} of a parameter is not supported", ptx_line=line)
    size = TYPE_BITS[element] // 8
    align = align or size
    name = reader.take().text
    if reader.peek() == "[":
        reader.take()
        size *= reader.take_number()
        reader.take("]")
    end = before[-1].offset + before[-1].nbytes if before else 0
    return Parameter(name, align, size, -(-end // align) * align)


# --- kernel bodies --------------------------------------------------------------------------------------------------


class _Body:
    """A kernel body between the two passes."""

    def __init__(self, name: str, files: dict[int, str]) -> None:
        self.name, self.files = name, files
        self.parameters: list[Parameter] = []
        self.reqntid: tuple[int, int, int] | None = None
        self.reqnctapercluster: tuple[int, int, int] | None = None
        self.registers: dict[str, str] = {}
        self.statements: list[_Statement] = []
        self.labels: dict[str, int] = {}
        self.variables: list[Variable] = []

    def read(self, reader: Reader) -> None:
        """Pass 1: statements, scopes, labels and register declarations."""
        reader.take("{")
        scope, scopes, location = _Scope(None, ""), 0, ""
        while True:
            token = reader.take()
            following = reader.peek()
            if token.text == "{":
                scopes += 1
                scope = _Scope(scope, f"@{scopes}")
            elif token.text == "}":
                if scope.parent is None:
                    return
                scope = scope.parent
            elif token.text == ".reg":
                self._declare_registers(reader, scope)
            elif token.text == ".loc":
                location = _location_key(reader.take_rest_of_line())
            elif token.text == ".pragma":
                reader.take_until(";")  # hints to the optimiser (loop unrolling)
            elif token.text in (".shared", ".local"):
                reader.at -= 1
                self.variables.append(_variable(reader))
            elif token.text.startswith("."):
                raise UnsupportedPTX(f"directive {token.text!r} in a kernel is not supported", ptx_line=token.line)
            elif token.kind == "name" and following == ":":
                reader.take()
                if token.text in scope.labels:
                    raise UnsupportedPTX(f"label {token.text!r} is defined twice", ptx_line=token.line)
                scope.labels.add(token.text)
                self.labels[token.text + scope.suffix] = len(self.statements)
            elif token.text == ";":
                continue
            else:
                reader.at -= 1
                self.statements.append(_Statement(reader.take_until(";"), scope, location))

    def _declare_registers(self, reader: Reader, scope: _Scope) -> None:
        type_token = reader.take()
        kind = type_token.text[1:]
        if kind not in TYPE_BITS:
            raise UnsupportedPTX(f"registers of type .{kind} are not supported", ptx_line=type_token.line)
        while True:
            name = reader.take().text
            names = [name]
            if reader.peek() == "<":
                reader.take()
                names = [f"{name}{i}" for i in range(reader.take_number())]
                reader.take(">")
            for each in names:
                scope.registers.add(each)
                self.registers[each + scope.suffix] = kind
            if reader.take().text == ";":
                return

    def finish(self, module_variables: tuple[Variable, ...]) -> Kernel:
        """Pass 2: operands and names."""
        sources: dict[str, str] = {}
        instructions = []
        for index, statement in enumerate(self.statements):
            key = statement.location
            if key not in sources:
                sources[key] = _describe_location(key, self.files)
            instructions.append(_instruction(index, statement, sources[key]))
        return Kernel(
            self.name,
            tuple(self.parameters),
            self.registers,
            tuple(instructions),
            self.labels,
            module_variables + tuple(self.variables),
            self.reqntid,
            self.reqnctapercluster,
        )


def _location_key(tokens: list[Token]) -> str:
    """``.loc file line column [, function_name label, inlined_at file line column]`` as "file line [file line]"."""
    words = [token.text for token in tokens if token.text != ","]
    key = f"{words[0]} {words[1]}"
    if "inlined_at" in words:
        at = words.index("inlined_at")
        key += f" {words[at + 1]} {words[at + 2]}"
    return key


def _describe_location(key: str, files: dict[int, str]) -> str:
    numbers = [int(word) for word in key.split()]
    places = [f"{files.get(f, f'file {f}').rsplit('/', 1)[-1]}:{line}" for f, line in zip(numbers[::2], numbers[1::2])]
    return " inlined at ".join(places)


def _instruction(index: int, statement: _Statement, source: str) -> Instruction:
    tokens = statement.tokens
    line = tokens[0].line
    text = _spell(tokens)
    cursor = _OperandReader(tokens, statement.scope, text)
    guard = None
    if tokens[0].text == "@":
        cursor.at = 1
        negated = cursor.peek() == "!"
        cursor.at += negated
        operand = cursor.operand()
        if not isinstance(operand, Register):
            raise UnsupportedPTX("a guard must be a predicate register", ptx_line=line, instruction=text)
        guard = Guard(operand.name, negated)
    opcode = cursor.take()
    operands = []
    while cursor.at < len(tokens):
        operands.append(cursor.operand())
        if cursor.at < len(tokens):
            cursor.take(",")
    return Instruction(index, tuple(opcode.split(".")), tuple(operands), guard, line, source, text)


def _spell(tokens: list[Token]) -> str:
    out = ""
    for token in tokens:
        glue = not out or out[-1] in "@!{[|-+" or token.text in ",;|]}+" or token.text == "-" and out[-1] == "+"
        out += token.text if glue else f" {token.text}"
    return out


class _OperandReader(Reader):
    """Reads operands and resolves names in the scope of the statement."""

    def __init__(self, tokens: list[Token], scope: _Scope, text: str) -> None:
        super().__init__(tokens)
        self.scope, self.text = scope, text

    def take(self, expected: str | None = None) -> str:  # type: ignore[override]
        if self.at >= len(self.tokens) or expected not in (None, self.peek()):
            raise self._error(f"{expected or 'more'!r} expected, {self.peek()!r} found")
        return super().take(expected).text

    def _error(self, why: str) -> UnsupportedPTX:
        line = self.tokens[0].line
        return UnsupportedPTX(f"cannot read the instruction: {why}", ptx_line=line, instruction=self.text)

    def operand(self) -> Operand:
        first = self._primary()
        if self.peek() == "|":
            self.take()
            return Pair(first, self._primary())
        return first

    def _primary(self) -> Operand:
        text = self.peek()
        if text == "{":
            return Vector(self._list("{", "}"))
        if text == "[":
            return self._memory()
        if text == "!":
            self.take()
            register = self._primary()
            if not isinstance(register, Register):
                raise self._error("'!' must be followed by a predicate register")
            return Not(register)
        return self._scalar()

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
        offset = 0
        while self.peek() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            if self.peek() == "-":
                self.take()
                sign = -sign
            offset += sign * self.take_number_here()
        extra = []
        while self.peek() == ",":
            self.take()
            extra.append(self.operand())
        self.take("]")
        return Memory(base, offset, tuple(extra))

    def take_number_here(self) -> int:
        if self.tokens[self.at].kind != "number":
            raise self._error(f"a number is expected, {self.peek()!r} found")
        return integer(self.take())

    def _scalar(self) -> Operand:
        if self.at >= len(self.tokens):
            raise self._error("an operand is missing")
        negative = self.peek() == "-"
        if negative:
            self.take()
        token = self.tokens[self.at]
        self.at += 1
        sign = -1 if negative else 1
        if token.kind == "number":
            return Immediate(sign * integer(token.text))
        if token.kind == "float":
            bits = int(token.text[2:], 16)
            width = 32 if token.text[1] in "fF" else 64
            return Immediate(bits ^ ((1 << (width - 1)) if negative else 0), width)
        if token.kind == "decimal":
            return Immediate(struct.unpack("<Q", struct.pack("<d", sign * float(token.text)))[0], 64)
        if token.kind != "name" or negative:
            raise self._error(f"{token.text!r} is not an operand")
        return self._name(token.text)

    def _name(self, name: str) -> Operand:
        if name == "_":
            return Sink()
        register = self.scope.find(name, "registers")
        if register is not None:
            return Register(register)
        if name.startswith("%"):
            return Special(name)
        return Symbol(self.scope.find(name, "labels") or name)
