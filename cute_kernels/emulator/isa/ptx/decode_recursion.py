"""Functions that call themselves: one body for all calls, whose registers are kept on the thread's stack meanwhile.

Such a call is a branch to the body, with the number of the place to come back to in a register. A call out of a body of
this kind first stores all registers of that body, and loads them behind it; its local memory is on the stack as well.
``%sp`` is where the stack ends when the body is entered, and again when it has returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_functions import ARRAY, Call, Function
from cute_kernels.emulator.isa.ptx.decode_scopes import Scope, Statement, make_tokens
from cute_kernels.emulator.isa.ptx.decode_stack import STACK, pointer
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS

STACK_END, _BASE, _WORD, _TEST = "%sp", "%spill.base", "%spill.word", "%spill.test"
#: Registers that all bodies share.
SHARED = {STACK_END: "b64", _BASE: "b64", _WORD: "b32", _TEST: "pred"}
_ALIGNED = 16  # bytes: frames


@dataclass
class Site:
    """A call: names of the registers that hold its arguments, of the one with the stack's end, and the label behind."""

    inputs: list[str]
    stack: str
    back: str
    owner: Body | None


@dataclass
class Body:
    """The body of a function that calls itself."""

    function: Function  # the function
    inside: Scope  # scope of its statements, whose suffix is that of all its names
    sites: list[Site] = field(default_factory=list)  # the calls
    # (register, offset) of its arrays in local memory; ``nbytes`` of them all
    frame: list[tuple[str, int]] = field(default_factory=list)
    nbytes: int = 0
    registers: list[str] = field(default_factory=list)  # that are kept while a call out of it runs

    def own(self, name: str) -> str:
        """The final name of a register or label."""
        return name + self.inside.suffix

    def allocate(self, register: str, nbytes: int, align: int) -> None:
        """An array on the stack, whose address a register has."""
        start = -(-self.nbytes // align) * align
        self.frame.append((register, start))
        self.nbytes = start + nbytes

    def declared(self) -> dict[str, str]:
        """Types of the registers for parameters and results, and of its own."""
        values = (*self.function.parameters, *self.function.results)
        found = {self.own(name): "b64" if kind == ARRAY else kind for name, kind in values}
        returned = {self.own(f"$given.{name}"): kind for name, kind in self.function.results if kind != ARRAY}
        return found | returned | {self.own(pointer(1)): "b64", self.own("$sp"): "b64", self.own("$site"): "b32"}


def body_of(function: Function, suffix: str) -> Body:
    """A body that nothing has been read of."""
    names = {name for name, _ in (*function.parameters, *function.results)}
    return Body(function, Scope(None, suffix, {*names, pointer(1)}, labels={"$return"}))


def entering(body: Body, call: Call, spares: list[str], depth: int) -> list[list[str]]:
    """Words of the statements of a call: arguments and the stack's pointer into ``spares``, and on to the body."""
    moves = [["mov." + kind, spare, ",", token.text] for spare, (_, kind, token) in zip(spares, call.inputs())]
    number = len(body.sites)
    return [*moves, ["mov.b64", spares[-1], ",", pointer(depth)], ["bra", f"$enter.{number}{body.inside.suffix}"]]


def surroundings(body: Body, types: dict[str, str], line: int) -> tuple[list[Statement], dict[str, int]]:
    """Statements that lead into a body and back from it, behind it, and their labels by the number of the statement."""
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    scope = Scope(None, "", {*types})

    def emit(*lines: str) -> None:
        statements.extend(Statement(make_tokens(line, *text.split()), scope, "") for text in lines)

    labels[body.own("$return")] = 0
    emit(f"mov.b64 {STACK_END} , {body.own('$sp')}")
    for name, kind in body.function.results:
        if kind != ARRAY:
            emit(f"mov.{kind} {body.own(f'$given.{name}')} , {body.own(name)}")
    for number, site in enumerate(body.sites):
        target = f"$leave.{number}{body.inside.suffix}" if site.owner else site.back
        emit(f"setp.eq.u32 {_TEST} , {body.own('$site')} , {number}", f"@ {_TEST} bra {target}")
    emit("trap")
    for number, site in enumerate(body.sites):
        labels[f"$enter.{number}{body.inside.suffix}"] = len(statements)
        nbytes, kept = _kept(site.owner, types) if site.owner else (0, [])
        emit(f"add.u64 {STACK_END} , {site.stack} , {_ALIGNED - 1}")
        emit(f"and.b64 {STACK_END} , {STACK_END} , {2**64 - _ALIGNED}")
        emit(f"mov.b64 {_BASE} , {STACK.name}", f"add.u64 {_BASE} , {_BASE} , {STACK_END}")
        for register, offset, bits in kept:
            if bits == 1:
                emit(f"selp.b32 {_WORD} , 1 , 0 , {register}")
            emit(f"st.local.{_stored(bits)} [ {_BASE} + {offset} ] , {_WORD if bits == 1 else register}")
        emit(f"add.u64 {STACK_END} , {STACK_END} , {nbytes}")
        inputs = [(name, kind) for name, kind in body.function.parameters]
        inputs += [each for each in body.function.results if each[1] == ARRAY]
        for (name, kind), given in zip(inputs, site.inputs):
            emit(f"mov.{'b64' if kind == ARRAY else kind} {body.own(name)} , {given}")
        emit(f"mov.b32 {body.own('$site')} , {number}", f"bra {body.own('$entry')}")
        if site.owner:
            labels[f"$leave.{number}{body.inside.suffix}"] = len(statements)
            emit(f"mov.b64 {_BASE} , {STACK.name}", f"add.u64 {_BASE} , {_BASE} , {STACK_END}")
            emit(f"sub.u64 {_BASE} , {_BASE} , {nbytes}")
            for register, offset, bits in kept:
                emit(f"ld.local.{_stored(bits)} {_WORD if bits == 1 else register} , [ {_BASE} + {offset} ]")
                if bits == 1:
                    emit(f"setp.ne.u32 {register} , {_WORD} , 0")
            emit(f"bra {site.back}")
    labels[body.own("$entry")] = len(statements)
    emit(f"mov.b64 {body.own('$sp')} , {STACK_END}", f"mov.b64 {body.own(pointer(1))} , {STACK_END}")
    emit(f"mov.b64 {_BASE} , {STACK.name}", f"add.u64 {_BASE} , {_BASE} , {STACK_END}")
    for register, offset in body.frame:
        emit(f"add.u64 {register} , {_BASE} , {offset}")
    emit(f"add.u64 {body.own(pointer(1))} , {STACK_END} , {body.nbytes}", f"bra {body.own('$body')}")
    return statements, labels


def _stored(bits: int) -> str:
    return f"b{bits}" if bits > 1 else "b32"


def _kept(owner: Body, types: dict[str, str]) -> tuple[int, list[tuple[str, int, int]]]:
    """(bytes, (register, offset, bits) of each) of what is stored while a call runs."""
    found, at = [], 0
    for register in owner.registers:
        bits = TYPE_BITS[types[register]]
        if bits > 64:
            raise UnsupportedPTX(f"a register of {bits} bits in {owner.function.name}, which calls itself")
        found.append((register, at, bits))
        at += 8
    return -(-at // _ALIGNED) * _ALIGNED, found


def calls_itself(functions: dict[str, Function], pointed: Iterable[str]) -> bool:
    """Whether any function of a module may, over others or by an address."""
    edges: dict[str, set[str]] = {}
    for name, function in functions.items():
        words = {token.text for token in function.body}
        edges[name] = words & functions.keys() | (set(pointed) if ".callprototype" in words else set())
    while edges:
        last = [name for name, called in edges.items() if not called & edges.keys()]
        if not last:
            return True
        for name in last:
            del edges[name]
    return False
