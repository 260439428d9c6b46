"""The body of a kernel: statements, scopes, registers, labels.

The text is read in two passes. The first cuts it into statements and remembers the `{ ... }` scope of each, because a
scope (inline assembly opens one per call) has its own registers and labels, and a label may be used before it is
defined. The second pass resolves names: a register or label of an inner scope gets the suffix ``@n`` of its scope, so
later stages see one flat name space.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx import decode_recursion, decode_stack
from cute_kernels.emulator.isa.ptx.decode_functions import ARRAY, Call, Functions, expansion, read_call, returning
from cute_kernels.emulator.isa.ptx.decode_operands import PARTS, OperandReader
from cute_kernels.emulator.isa.ptx.decode_scopes import Scope, Statement, make_tokens
from cute_kernels.emulator.isa.ptx.decode_variables import MOST_BYTES, read_variable
from cute_kernels.emulator.isa.ptx.families import arranged
from cute_kernels.emulator.isa.ptx.lexer import Reader, Token, integer
from cute_kernels.emulator.isa.ptx.program import (
    CARRY,
    TYPE_BITS,
    Guard,
    Instruction,
    Kernel,
    Memory,
    Operand,
    Parameter,
    Register,
    Symbol,
    Variable,
    Vector,
)

_MOST_REGISTERS = 1 << 20  # of a kernel: far above what any compiler writes
_MOST_DIGITS = 19  # of a number of 64 bits
_MOST_STATEMENTS = 1 << 20  # with calls expanded: no kernel is as long
_MOST_SCOPES = 1 << 15  # likewise
_MOST_CALLERS = 100  # of a function that is expanded, one inside of the other
_TAKE_CARRY = ("addc", "subc", "madc")
_USED_BYTES = re.compile(r'"\s*used_bytes_mask\s+(\w+)\s*"')


class Body:
    """A kernel body between the two passes."""

    def __init__(self, name: str, files: dict[int, str]) -> None:
        self.name, self.files = name, files
        self.parameters: list[Parameter] = []
        self.reqntid: tuple[int, int, int] | None = None
        self.most_threads: int | None = None
        self.most_registers: int | None = None
        self.ctas_per_sm: int | None = None
        self.reqnctapercluster: tuple[int, int, int] | None = None
        self.registers: dict[str, str] = {}
        self.statements: list[Statement] = []
        self.labels: dict[str, int] = {}
        self.variables: list[Variable] = []
        self.call_parameters: set[str] = set()
        self.arrays: set[str] = set()  # registers that have the address of an array which is a call's parameter
        self.tables: dict[str, list[str]] = {}  # .branchtargets
        self.bodies: dict[str, decode_recursion.Body] = {}  # of functions that call themselves
        self._inside: decode_recursion.Body | None = None
        self.stack = False
        self._scopes = 0

    def read(self, reader: Reader, functions: Functions, stack: bool) -> None:
        """Pass 1: statements, scopes, labels and register declarations; calls of functions are expanded.

        ``stack``: whether the module allocates on the stack of a thread.
        """
        root = Scope(None, "")
        for parameter in self.parameters:
            root.declare(parameter.name, root.variables, reader.line())
        recursive = decode_recursion.calls_itself(functions.known, functions.addresses)
        self.stack = stack = stack or recursive
        if recursive:
            self.registers.update(decode_recursion.SHARED)
        if stack:
            pointer = decode_stack.pointer(0)
            root.registers.add(pointer)
            self.registers[pointer] = "b64"
            self.statements.append(Statement(make_tokens(reader.line(), "mov.b64", pointer, ",", "0"), root, ""))
        self._read(reader, root, functions, ())
        if self.bodies:
            self._read_bodies(functions)

    def _read_bodies(self, functions: Functions) -> None:
        """Functions that call themselves, behind all else; those that are called by one of them follow."""
        line, raw = self.statements[-1].tokens[0].line, Scope(None, "")
        self.statements.append(Statement(make_tokens(line, "ret"), raw, ""))
        while name := next((name for name, body in self.bodies.items() if not body.registers), ""):
            body = self._inside = self.bodies[name]
            before = set(self.registers)
            self.labels[body.own("$body")] = len(self.statements)
            self._read(Reader(list(body.function.body)), body.inside, functions, (name,))
            self.statements.append(Statement(make_tokens(line, "bra", body.own("$return")), raw, ""))
            given = {body.own(f"$given.{each}") for each, _ in body.function.results}
            others = {own for other in self.bodies.values() if other is not body for own in other.declared()}
            body.registers = sorted(({*self.registers} - before | {*body.declared()}) - given - others)
        for body in self.bodies.values():
            statements, labels = decode_recursion.surroundings(body, self.registers, line)
            self.labels.update({label: len(self.statements) + at for label, at in labels.items()})
            self.statements += statements

    def _read(self, reader: Reader, root: Scope, functions: Functions, callers: tuple[str, ...]) -> None:
        """A body from { to }. ``callers``: the functions that are being expanded, the last of which this is."""
        reader.take("{")
        scope, location, label, used_bytes = root, "", "", None
        while True:
            token = reader.take()
            following = reader.peek()
            if token.text == "{":
                scope = Scope(scope, self._new_suffix())
            elif token.text == "}":
                if scope.parent is None:
                    return
                scope = scope.parent
            elif token.text == ".reg":
                self._declare_registers(reader, scope)
            elif token.text == ".loc":
                # LLVM counts the lines of inline assembly on from the line of its call, which is the one to report.
                # Without its comments a brace level is taken for inline assembly (calls have one too, of one line).
                asm = scope is not root if token.inline is None else token.inline
                words = reader.take_rest_of_line(least=2)
                location = location if asm else _location_key(words)
            elif token.text == ".pragma":
                used_bytes = _used_bytes(reader.take_until(";"), used_bytes)
            elif token.text in (".shared", ".local"):
                reader.at -= 1
                variable = read_variable(reader)
                scope.declare(variable.name, scope.variables, token.line)
                self._add_variable(variable, token.line, scope)
            elif token.text == ".param":
                self._declare_call_parameter(reader, scope)
            elif token.text in (".callprototype", ".calltargets"):
                reader.take_until(";")  # a call by address may mean any function of its type
            elif token.text == ".branchtargets":
                self.tables[label] = [name.text for name in reader.take_until(";") if name.text != ","]
            elif token.text.startswith("."):
                raise UnsupportedPTX(f"directive {token.text!r} in a kernel is not supported", ptx_line=token.line)
            elif token.kind == "name" and following == ":":
                reader.take()
                scope.declare(token.text, scope.labels, token.line)
                label = token.text
                self.labels[token.text + scope.suffix] = len(self.statements)
            elif token.text == ";":
                continue
            else:
                reader.at -= 1
                tokens = _joined(reader.take_until(";"))
                registers = functools.partial(scope.find, names="registers")
                call = read_call(tokens, functions.known, registers)
                if call is not None:
                    for each in self._direct(call, scope, location, functions):
                        self._expand(each, scope, location, functions, callers)
                    continue
                tokens = functions.with_addresses(tokens)
                if callers:
                    tokens = returning(tokens)
                if tokens[0].text == "brx.idx":
                    statements = self._indirect(tokens, scope)
                elif self.stack and decode_stack.is_of_stack(tokens):
                    uses = {"alloca": "b64", "taken": "b64", "none": "pred"}
                    spare = [self._spare_register(use, type_, scope) for use, type_ in uses.items()]
                    statements = decode_stack.expanded(tokens, len(callers), *spare)
                else:
                    statements = [tokens]
                self.statements += [Statement(statement, scope, location, used_bytes) for statement in statements]
                if any(each.text.startswith("ld.") for each in tokens):
                    used_bytes = None

    def _new_suffix(self) -> str:
        self._scopes += 1
        return f"@{self._scopes}"

    def _direct(self, call: Call, scope: Scope, location: str, functions: Functions) -> list[Call]:
        """A call by address as one of each function that it may mean, under a guard."""
        if call.function.name in functions.known:
            return [call]
        chosen = functions.of_type(call, lambda name: self._kind_of(name, scope))
        line, found = call.line, []
        guard = [token.text for token in call.guard]
        other = self._spare_register("other", "pred", scope)

        def emit(*words: str) -> None:
            self.statements.append(Statement(make_tokens(line, *words), scope, location))

        if guard:
            emit("mov.pred", other, ",", *guard) if len(guard) == 1 else emit("not.pred", other, ",", guard[-1])
        else:
            emit("setp.eq.u32", other, ",", "0", ",", "0")
        for function in chosen:
            this = self._spare_register("this", "pred", scope)
            emit("setp.eq.u64", this, ",", call.function.name, ",", str(functions.addresses[function.name]))
            emit("and.pred", this, ",", this, ",", other)
            emit("xor.pred", other, ",", other, ",", this)
            found.append(replace(call, function=function, guard=tuple(make_tokens(line, this))))
        emit("@", other, "trap")  # an address of no function
        return found

    def _kind_of(self, name: str, scope: Scope) -> str:
        """Type of what is given to a call: bits, or `ARRAY`; "": a literal, which fits any."""
        final = scope.find(name, "registers")
        return ARRAY if final in self.arrays else str(TYPE_BITS[self.registers[final]]) if final else ""

    def _call_body(self, call: Call, scope: Scope, location: str, callers: tuple[str, ...]) -> None:
        """A call of a function that is being expanded: of the one body that it has."""
        name = call.function.name
        body = self.bodies.get(name)
        if body is None:
            body = self.bodies[name] = decode_recursion.body_of(call.function, self._new_suffix())
            self.registers.update(body.declared())
            values = (*call.function.parameters, *call.function.results)
            self.call_parameters.update(body.own(each) for each, _ in values)
            self.arrays.update(body.own(each) for each in call.function.arrays)
        kinds = [kind for _, kind, _ in call.inputs()]
        spares = [self._spare_register(f"given{number}", kind, scope) for number, kind in enumerate((*kinds, "b64"))]
        back = f"$back.{len(body.sites)}{body.inside.suffix}"
        around = Scope(scope, "", {body.own(f"$given.{each}") for each, _, _ in call.outputs()})
        words = decode_recursion.entering(body, call, spares, len(callers))
        if call.guard:
            negated = call.guard[0].text == "!"
            words.insert(0, ["@", *([] if negated else ["!"]), call.guard[-1].text, "bra", f"{back}.skipped"])
        body.sites.append(decode_recursion.Site(
            [each + scope.suffix for each in spares[:-1]], spares[-1] + scope.suffix, back, self._inside
        ))  # fmt: skip
        self.statements += [Statement(make_tokens(call.line, *each), around, location) for each in words]
        self.labels[back] = len(self.statements)
        for each, kind, token in call.outputs():
            move = make_tokens(call.line, f"mov.{kind}", token.text, ",", body.own(f"$given.{each}"))
            self.statements.append(Statement(move, around, location))
        self.labels[f"{back}.skipped"] = len(self.statements)

    def _expand(self, call: Call, scope: Scope, location: str, functions: Functions, callers: tuple[str, ...]) -> None:
        """The statements of a function in place of a call."""
        name = call.function.name
        if name in callers:
            self._call_body(call, scope, location, callers)
            return
        if len(callers) >= _MOST_CALLERS:
            raise UnsupportedPTX(f"more than {_MOST_CALLERS} functions that call one another", ptx_line=call.line)
        if self.stack:
            call = decode_stack.with_pointer(call, len(callers))
        expanded = expansion(call, scope, self._new_suffix(), location)
        self.registers.update(expanded.declared)
        self.call_parameters.update(expanded.declared)
        self.arrays.update(each + expanded.inside.suffix for each in call.function.arrays)
        self.statements += expanded.before
        self._read(Reader(list(call.function.body)), expanded.inside, functions, (*callers, name))
        if len(self.statements) > _MOST_STATEMENTS or self._scopes > _MOST_SCOPES:
            raise UnsupportedPTX(
                f"calls expanded to more than {_MOST_STATEMENTS} instructions or {_MOST_SCOPES} scopes",
                ptx_line=call.line,
            )
        behind_body, behind_moves = expanded.labels
        self.labels[behind_body] = len(self.statements)
        self.statements += expanded.after
        self.labels[behind_moves] = len(self.statements)

    def _add_variable(self, variable: Variable, line: int, scope: Scope) -> None:
        """Calls of a function one after the other share its local memory, unless it calls itself."""
        if self._inside is not None and variable.space == "local":
            self._on_stack(variable.name, variable.nbytes, variable.align, scope)
            return
        known = next((other for other in self.variables if other.name == variable.name), None)
        if known is None:
            self.variables.append(variable)
            taken = sum(each.nbytes for each in self.variables if each.space == "local")
            if taken > MOST_BYTES["local"]:
                message = f"{taken} bytes of local memory for each thread; at most {MOST_BYTES['local']}"
                raise UnsupportedPTX(message, ptx_line=line)
        elif known != variable:
            raise UnsupportedPTX(f"two variables {variable.name} that differ are not supported", ptx_line=line)

    def _on_stack(self, name: str, nbytes: int, align: int, scope: Scope) -> None:
        """An array of a function that calls itself: its name is a register with the address."""
        scope.registers.add(name)
        self.registers[name + scope.suffix] = "b64"
        self._inside.allocate(name + scope.suffix, nbytes, align)

    def _indirect(self, tokens: list[Token], scope: Scope) -> list[list[Token]]:
        """``brx.idx index, table`` as comparisons and branches; the flow analysis knows no other."""
        index, name = tokens[1], tokens[-1].text
        if len(tokens) != 4 or name not in self.tables:
            raise UnsupportedPTX("brx.idx without a table of targets before it", ptx_line=tokens[0].line)
        line = tokens[0].line
        predicate = self._spare_register("brx", "pred", scope)
        *others, last = self.tables[name]
        out = []
        for number, target in enumerate(others):
            out.append(make_tokens(line, "setp.eq.u32", predicate, ",", index.text, ",", str(number)))
            out.append(make_tokens(line, "@", predicate, "bra", target))
        return [*out, make_tokens(line, "bra", last)]

    def _spare_register(self, use: str, type_: str, scope: Scope) -> str:
        name = f"%{use}_{len(self.statements)}"
        self.registers[name + scope.suffix] = type_
        scope.registers.add(name)
        return name

    def _declare_call_parameter(self, reader: Reader, scope: Scope) -> None:
        """A parameter of a call is a register here, of an array its address: it is written, and read by the call."""
        line = reader.line()
        declaration = reader.take_until(";")
        texts = [token.text for token in declaration]
        if "[" in texts:
            name, align = texts[texts.index("[") - 1], 16
            scope.declare(name, scope.variables, line)
            nbytes = integer(texts[texts.index("[") + 1], line) * TYPE_BITS.get(texts[texts.index("[") - 2][1:], 8) // 8
            if self._inside is not None:
                self._on_stack(name, nbytes, align, scope)
            else:
                array = f"$array{scope.suffix}.{name}"
                self._add_variable(Variable(array, "local", align, nbytes), line, scope)
                scope.registers.add(name)
                self.registers[name + scope.suffix] = "b64"
                self.statements.append(Statement(make_tokens(line, "mov.b64", name, ",", array), scope, ""))
            self.arrays.add(name + scope.suffix)
            return
        kind, name = declaration[0].text[1:], declaration[-1].text
        if len(declaration) == 2 and kind in TYPE_BITS:
            scope.declare(name, scope.registers, declaration[0].line)
            self.registers[name + scope.suffix] = kind
            self.call_parameters.add(name + scope.suffix)

    def _declare_registers(self, reader: Reader, scope: Scope) -> None:
        type_token = reader.take()
        elements = int(type_token.text[2:]) if type_token.text in (".v2", ".v4") else 0
        if elements:
            type_token = reader.take()
        kind = type_token.text[1:]
        if kind not in TYPE_BITS or kind in ("bf16", "bf16x2"):
            raise UnsupportedPTX(f"registers of type .{kind} are not supported", ptx_line=type_token.line)
        while True:
            name = reader.take().text
            names = [name]
            if reader.peek() == "<":
                reader.take()
                count = reader.take_number()
                if count + len(self.registers) > _MOST_REGISTERS:
                    raise UnsupportedPTX(
                        f"{count} registers {name}<n> besides {len(self.registers)}; at most {_MOST_REGISTERS} are "
                        "supported",
                        ptx_line=type_token.line,
                    )
                names = [f"{name}{i}" for i in range(count)]
                reader.take(">")
            if elements:
                for each in names:
                    scope.declare(each, set(), type_token.line)
                scope.vectors.update(dict.fromkeys(names, elements))
                names = [f"{each}.{part}" for each in names for part in PARTS[:elements]]
            for each in names:
                scope.declare(each, scope.registers, type_token.line)
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
                if not all(word.isdecimal() and len(word) < _MOST_DIGITS for word in key.split()):
                    message = f"`.loc {key[:40]}` needs the numbers of a file and a line"
                    raise UnsupportedPTX(message, ptx_line=statement.tokens[0].line)
                sources[key] = _describe_location(key, self.files)
            instructions.append(_instruction(index, statement, sources[key], self))
            if Register(CARRY) in instructions[-1].operands:
                self.registers[CARRY] = "pred"
        # A CTA has the shared arrays that its kernel uses, as ptxas allocates them, not those of the module's others.
        used = {operand.name: each for each in instructions for operand in _symbols(each.operands)}
        for variable in module_variables:
            if variable.refused and variable.name in used:
                raise used[variable.name].refuse(f"{variable.refused} is not implemented")
        of_module = [v for v in module_variables if v.space != "shared" or v.name in used or not v.nbytes]
        return Kernel(
            self.name, tuple(self.parameters), self.registers, tuple(instructions), self.labels,
            (*of_module, *self.variables, *([decode_stack.STACK] if self.stack else ())), self.reqntid,
            self.reqnctapercluster, self.most_threads, self.most_registers, self.ctas_per_sm,
        )


def _used_bytes(strings: list[Token], before: int | None) -> int | None:
    """The mask of the bytes that the next load uses, if a pragma gives it; other ones are hints to the optimiser."""
    found = [match for each in strings if (match := _USED_BYTES.fullmatch(each.text))]
    return integer(found[-1][1], strings[0].line) if found else before


def _joined(tokens: list[Token]) -> list[Token]:
    """A statement's tokens where blanks may stand in front of the qualifiers of its opcode."""
    if not any(token.text.startswith(".") for token in tokens):
        return tokens
    found = tokens[:1]
    for token in tokens[1:]:
        if token.text.startswith("."):
            found[-1] = replace(found[-1], text=found[-1].text + token.text)
        else:
            found.append(token)
    return found


def _symbols(operands: Iterable[Operand]) -> Iterator[Symbol]:
    """The names of variables and labels among operands."""
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand
        elif isinstance(operand, Vector):
            yield from _symbols(operand.items)
        elif isinstance(operand, Memory):
            yield from _symbols((operand.base, *operand.extra))


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


def _instruction(index: int, statement: Statement, source: str, body: Body) -> Instruction:
    tokens = statement.tokens
    line = tokens[0].line
    text = _spell(tokens)
    cursor = OperandReader(tokens, statement.scope, text)
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
    moves = opcode.startswith("mov.")
    operands = []
    while cursor.at < len(tokens):
        operands.append(cursor.moved() if moves else cursor.operand())
        if cursor.at < len(tokens):
            cursor.take(",")
    parts = arranged(opcode)
    if parts[:2] in (("st", "param"), ("ld", "param")):
        if len(operands) != 2:
            raise UnsupportedPTX(f"{len(operands)} operands, not 2", ptx_line=line, instruction=text)
        place, register = operands if parts[0] == "st" else operands[::-1]
        if isinstance(place, Memory) and isinstance(place.base, Register) and place.base.name in body.arrays:
            parts = (parts[0], "local", *parts[2:])
        elif isinstance(place, Memory) and isinstance(place.base, Register) and place.base.name in body.call_parameters:
            if place.offset or place.extra:
                raise UnsupportedPTX("a part of a call parameter", ptx_line=line, instruction=text)
            operands = [place.base, register] if parts[0] == "st" else [register, place.base]
            parts = _move(parts[-1], operands, body.registers)
    if "cc" in parts or parts[0] in _TAKE_CARRY:
        given, taken = ([Register(CARRY)] * needed for needed in ("cc" in parts, parts[0] in _TAKE_CARRY))
        operands[1:] = [*given, *operands[1:], *taken]
    return Instruction(index, parts, tuple(operands), guard, line, source, text, statement.used_bytes)


def _move(type_: str, operands: list[Operand], registers: dict[str, str]) -> tuple[str, ...]:
    """Opcode that moves a value between a parameter of a call and a register, either of which may be wider than it."""
    bits = TYPE_BITS.get(type_)
    widths = [TYPE_BITS[registers[x.name]] if isinstance(x, Register) else bits for x in operands]
    if bits is None or bits > 64 or widths == [bits, bits] or widths[0] > 64:
        return "mov", f"b{bits}" if bits else type_
    kind = "s" if type_[0] == "s" else "u"
    return "cvt", f"{kind}{widths[0]}", f"{kind}{bits}"


def _spell(tokens: list[Token]) -> str:
    out = ""
    for token in tokens:
        glue = not out or out[-1] in "@!{[|-+" or token.text in ",;|]}+" or token.text == "-" and out[-1] == "+"
        out += token.text if glue else f" {token.text}"
    return out
