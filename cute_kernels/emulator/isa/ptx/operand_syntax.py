"""Operands of an instruction: how many there are, of which kind and width.

The row of each opcode (``@family`` in `instructions`) says, in the notation below, what the PTX ISA's syntax of the
instruction says; here it is compared with what stands in a kernel, before anything is analysed or lowered. Operands are
separated by commas, forms by semicolons:

* ``a`` is a register or literal of the instruction's type, the last type of its opcode; ``a:u32`` of another type;
  ``:S`` of the opcode's first type, ``:2T`` an integer twice as wide as its last, ``:B`` bits as wide as its last,
  ``:b32/f64`` of either;
* ``a:T+`` may be a register that is wider than the type (PTX ISA, "Operand Size Exceeding Instruction-Type Size");
* ``[a]`` is an address, ``[a{c}]`` one with coordinates, ``{d}4:b32`` a list of four registers, ``{d}:b32`` of any
  number;
* ``d~`` is a register or a list of registers that together have the type's width;
* ``d|p`` has a predicate as a second destination, ``d|p?`` may have one;
* ``n:imm`` is an integer literal of 32 bits, ``t:label`` a label, and ``a?`` may be left out.

Which registers go with a type: PTX ISA, "Operand Type Information", and what ptxas 13.0 and 13.4 do
(tests/emulator/isa/ptx/test_operands.py).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cute_kernels.emulator.isa.ptx.program import (
    CARRY,
    TYPE_BITS,
    Immediate,
    Instruction,
    Memory,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    items_of,
)

#: Types of instructions that no register is declared with: the type of the registers that hold them.
HELD_IN = {
    **{"f32x2": "b64", "tf32": "b32", "s16x2": "b32", "u16x2": "b32"},
    **dict.fromkeys(("e4m3x2", "e5m2x2", "ue8m0x2"), "b16"),
    **dict.fromkeys(("e4m3x4", "e5m2x4"), "b32"),
    **dict.fromkeys(("e2m1x2",), "b8"),
    **dict.fromkeys(("e2m3x2", "e3m2x2", "e2m1x4"), "b16"),
    **dict.fromkeys(("e2m3x4", "e3m2x4"), "b32"),
}
_FLOATS = ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2")
_ADDRESSES = frozenset(f"{kind}{bits}" for kind in "bsu" for bits in (8, 16, 32, 64))
_ENTRY = re.compile(
    r"(?P<memory>\[)?(?P<list>\{)?(?P<name>\w+)\}?(?P<count>\d+)?(?P<coordinates>\{\w+\})?\]?(?P<pack>~)?"
    r"(?P<second>\|\w+(?P<maybe>\?)?)?(?::(?P<type>[\w/]+)(?P<wider>\+)?)?(?P<optional>\?)?"
)


@functools.cache
def registers_for(type_: str, wider: bool) -> frozenset[str]:
    """Declared types of registers that an operand of a type may have.

    Bits go with every type of their width, integers with each other, whatever their sign, and floating-point types with
    themselves. ptxas takes .f16x2 registers for 32-bit integers, and 16-bit integers for bf16.
    """
    type_ = HELD_IN.get(type_, type_)
    if type_ == "pred":
        return frozenset(("pred",))
    if type_ not in TYPE_BITS:  # twice as wide as 64 bits
        return frozenset()
    bits, kind = TYPE_BITS[type_], type_ if type_ in _FLOATS else type_[0]
    found = set()
    for name, width in TYPE_BITS.items():
        if name == "pred" or not (width >= bits if wider else width == bits):
            continue
        integer, plain_bits = name[0] in "su", name[0] == "b" and name[1:].isdecimal()
        same = name == kind or kind in "su" and (integer or name == "f16x2") or kind == "bf16" and integer
        if kind == "b" or plain_bits or same:
            found.add(name)
    return frozenset(found)


@dataclass(frozen=True)
class Slot:
    """One operand of a form."""

    name: str  # in the PTX ISA
    kind: str  # "value", "memory", "list", "imm" or "label"
    types: tuple[str, ...] = ()  # of the value, or of the elements of a list
    registers: frozenset[str] = frozenset()  # declared types that a register may have (value, list)
    count: int | None = None  # elements of a list; None: any number
    coordinates: bool = False  # an address has some
    pack: bool = False  # a list stands for the value
    second: str = ""  # a second destination: "needed", "allowed" or ""
    optional: bool = False  # may be left out
    written: bool = False  # it is a destination, so that a register or ``_`` is needed

    @property
    def simple(self) -> frozenset[str]:
        """Declared types of a register that is this operand, all by itself."""
        alone = self.second != "needed" and (self.kind != "list" or self.count in (None, 1))
        return self.registers if alone else frozenset()

    def wanted(self) -> str:
        """Operands that are allowed, in words."""
        declared = sorted(self.registers - {"bf16", "bf16x2"})  # ptxas takes no registers of these
        registers = " or ".join(", ".join(f".{name}" for name in declared).rsplit(", ", 1))
        if self.kind == "memory":
            return "an address [..]" + (" with coordinates" if self.coordinates else "")
        if self.kind == "list" and self.count != 1:
            return f"a list of {'' if self.count is None else f'{self.count} '}registers of type {registers}"
        if self.kind == "imm":
            return "an integer literal of 32 bits"
        if self.kind == "label":
            return "a label"
        extra = ", or a list of them" if self.pack else " and behind `|` a predicate" if self.second == "needed" else ""
        return f"a register of type {registers}{extra}"

    def accepts(self, operand: Operand, registers: Mapping[str, str]) -> bool:
        """Whether the operand is of this kind; ``registers`` are the declared ones with their types."""
        if self.kind == "memory":
            return _is_address(operand, self.coordinates, registers)
        if self.kind == "imm":
            return isinstance(operand, Immediate) and not operand.float_bits and -(2**31) <= operand.value < 2**32
        if self.kind == "label":
            return isinstance(operand, Symbol)
        if self.kind == "list" or self.pack and isinstance(operand, Vector):
            return self._accepts_list(operand, registers)
        if isinstance(operand, Pair) and self.second:
            return self._accepts_one(operand.value, registers) and _is_predicate(operand.predicate, registers)
        return self.second != "needed" and self._accepts_one(operand, registers)

    def culprit(self, operand: Operand, registers: Mapping[str, str]) -> Operand:
        """The element that makes a list unacceptable, or the operand itself."""
        if self.kind == "list" and isinstance(operand, Vector) and self.count in (None, len(operand.items)):
            return next((item for item in operand.items if not self._accepts_one(item, registers)), operand)
        return operand

    def _accepts_list(self, operand: Operand, registers: Mapping[str, str]) -> bool:
        items = items_of(operand)
        if not self.pack:
            fits = self.count in (None, len(items))
            return fits and all(self._accepts_one(item, registers) for item in items)
        widths = {TYPE_BITS[registers[item.name]] for item in items if isinstance(item, Register)}
        whole = TYPE_BITS[HELD_IN.get(self.types[0], self.types[0])]
        kinds = (Register, Sink) if self.written else (Register, Special, Sink, Immediate)
        plain = all(isinstance(item, kinds) for item in items)
        return plain and 1 not in widths and widths <= {whole // len(items)}

    def _accepts_one(self, operand: Operand, registers: Mapping[str, str]) -> bool:
        if isinstance(operand, Register):
            return registers[operand.name] in self.registers
        if self.written:
            return isinstance(operand, Sink)
        if isinstance(operand, Not):
            return "pred" in self.types and registers.get(operand.register.name) == "pred"
        if isinstance(operand, Immediate):
            return any(_is_literal(operand, type_) for type_ in self.types)
        return isinstance(operand, (Special, Symbol, Sink))


def _is_literal(operand: Immediate, type_: str) -> bool:
    if type_ in ("f32", "f64"):
        return bool(operand.float_bits)
    return not operand.float_bits or type_[0] == "b" or type_ in HELD_IN or type_ in _FLOATS


def _is_predicate(operand: Operand, registers: Mapping[str, str]) -> bool:
    return isinstance(operand, Sink) or isinstance(operand, Register) and registers[operand.name] == "pred"


def _is_address(operand: Operand, coordinates: bool, registers: Mapping[str, str]) -> bool:
    if not isinstance(operand, Memory) or coordinates != bool(operand.extra):
        return False
    for item in operand.extra:
        if not isinstance(item, Vector) or not all(_is_coordinate(each, registers) for each in item.items):
            return False
    base = operand.base
    if isinstance(base, Register):
        return registers[base.name] in _ADDRESSES
    return isinstance(base, (Symbol, Immediate)) and not (isinstance(base, Immediate) and base.float_bits)


def _is_coordinate(operand: Operand, registers: Mapping[str, str]) -> bool:
    if isinstance(operand, Register):
        return registers[operand.name] in registers_for("b32", False)
    return isinstance(operand, Special) or isinstance(operand, Immediate) and not operand.float_bits


# --- reading the notation ---------------------------------------------------------------------------------------------


def is_type(part: str) -> bool:
    return part in TYPE_BITS or part in HELD_IN


def _resolved(type_: str, parts: tuple[str, ...]) -> str:
    types = [part for part in parts if is_type(part)]
    if type_ == "2T":
        return f"{types[-1][0]}{2 * TYPE_BITS.get(types[-1], 16)}"
    if type_ == "B":
        return f"b{TYPE_BITS[HELD_IN.get(types[-1], types[-1])]}"
    return {"T": types[-1], "S": types[0]}[type_] if type_ in ("T", "S") else type_


def _slot(text: str, parts: tuple[str, ...]) -> Slot:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no operand in the notation of this file")
    name, optional = match["name"], bool(match["optional"])
    if match["memory"]:
        return Slot(name, "memory", coordinates=bool(match["coordinates"]), optional=optional)
    if match["type"] in ("imm", "label"):
        return Slot(name, match["type"], optional=optional)
    types = tuple(_resolved(each, parts) for each in (match["type"] or "T").split("/"))
    registers = frozenset().union(*(registers_for(each, bool(match["wider"])) for each in types))
    second = "" if not match["second"] else "allowed" if match["maybe"] else "needed"
    if match["list"]:
        count = int(match["count"]) if match["count"] else None
        return Slot(name, "list", types, registers, count, optional=optional)
    return Slot(name, "value", types, registers, pack=bool(match["pack"]), second=second, optional=optional)


def policy_operand(parts: tuple[str, ...]) -> str:
    """The cache policy at the end, of an opcode that says there is one."""
    return ", policy:b64" if "L2::cache_hint" in parts else ""


def data_operand(name: str, type_: str, parts: tuple[str, ...]) -> str:
    """One register, in loads and stores perhaps in braces, or a list of them, whose width alone matters to ptxas."""
    lengths = [part[1:] for part in parts if part in ("v2", "v4", "v8")]
    if lengths:
        return f"{{{name}}}{lengths[0]}:B{type_[1:]}"
    return f"{{{name}}}1:{type_}" if parts[0] in ("ld", "ldu", "st") else f"{name}:{type_}"


def read_forms(text: str, parts: tuple[str, ...], destinations: int) -> dict[int, list[tuple[Slot, ...]]]:
    """The forms of an opcode, by number of operands; the first operands of each are ``destinations``."""
    forms: dict[int, list[tuple[Slot, ...]]] = {}
    for form in text.split(";"):
        slots = [_slot(each.strip(), parts) for each in form.split(",") if each.strip()]
        slots[:destinations] = [dataclasses.replace(slot, written=True) for slot in slots[:destinations]]
        needed = sum(not slot.optional for slot in slots)
        for count in range(needed, len(slots) + 1):
            kept, spare = [], count - needed  # optional operands are given from the left
            for slot in slots:
                if not slot.optional or spare > 0:
                    kept.append(slot)
                    spare -= slot.optional
            forms.setdefault(count, []).append(tuple(kept))
    return forms


def describe(operand: Operand, registers: Mapping[str, str]) -> str:
    """An operand in words, for an error."""
    if isinstance(operand, Register):
        return f"{operand}, a register of type .{registers[operand.name]}"
    if isinstance(operand, Not):
        return f"!{operand.register.name}"
    if isinstance(operand, Immediate):
        return f"the {'floating-point' if operand.float_bits else 'integer'} literal {operand}"
    if isinstance(operand, Vector):
        kinds = [f".{registers[item.name]}" if isinstance(item, Register) else str(item) for item in operand.items]
        each = f", each of type {kinds[0]}" if len(set(kinds)) == 1 else f" of types {', '.join(kinds[:8])}"
        return f"a list of {len(kinds)}{each}"
    if isinstance(operand, Memory):
        return f"an address [{describe(operand.base, registers)}{', ..' * bool(operand.extra)}]"
    if isinstance(operand, Pair):
        return f"{describe(operand.value, registers)} | {describe(operand.predicate, registers)}"
    return "_" if isinstance(operand, Sink) else str(operand)


def mismatch(
    instruction: Instruction, forms: dict[int, list[tuple[Slot, ...]]], registers: Mapping[str, str]
) -> str | None:
    """Why no form takes the operands of an instruction, or None: one does."""
    operands = instruction.operands
    fitting = forms.get(len(operands), [])
    if not fitting:
        hidden = operands.count(Register(CARRY))  # decoding has added them
        counts = " or ".join(str(count - hidden) for count in sorted(forms))
        longest = ", ".join(slot.name for slot in forms[max(forms)][0] if "carry" not in slot.name) or "none"
        return f"{instruction.opcode} takes {counts} operands ({longest}); {len(operands) - hidden} are given"
    reason = None
    for slots in fitting:
        wrong = [i for i, slot in enumerate(slots) if not slot.accepts(operands[i], registers)]
        if not wrong:
            return None
        slot, operand = slots[wrong[0]], operands[wrong[0]]
        culprit = slot.culprit(operand, registers)
        given = f"{'is' if culprit is operand else 'has'} {describe(culprit, registers)}"
        reason = reason or f"operand {slot.name} of {instruction.opcode} {given}: must be {slot.wanted()}"
    return reason
