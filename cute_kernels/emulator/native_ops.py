"""LLVM IR of pure operations: what `PureOp.vector` computes with NumPy, lane by lane and bit for bit.

Integers are here, floats in `native_floats`.

An operation that is not here runs as the NumPy function it is, called from native code (`native_translate`); so this
file may leave out what is rare. A uniform value is an ``iN``, a varying one a ``<32 x iN>``, a predicate ``i1`` or
``<32 x i1>``; floats are held as their bits and cast where they are computed with. No fast-math flag is ever set: LLVM
then neither reorders nor contracts, and each operation rounds as IEEE 754 says.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from cute_kernels.emulator.instructions_numerics import NAN_F32

LANES = 32


class Code:
    """Lines of one function body, and the intrinsics that they declare."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declarations: set[str] = set()
        self._names = 0

    def put(self, text: str) -> None:
        self.lines.append(text)

    def fresh(self, prefix: str = "v") -> str:
        self._names += 1
        return f"%{prefix}{self._names}"

    def let(self, text: str) -> str:
        """Assigns an instruction to a new name."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name


class Emitter:
    """Instructions over all lanes (``lanes``) or on one scalar."""

    def __init__(self, code: Code, lanes: bool) -> None:
        self.code, self.lanes = code, lanes

    def type(self, bits: int) -> str:
        return f"<{LANES} x i{bits}>" if self.lanes else f"i{bits}"

    def float_type(self, bits: int) -> str:
        name = {16: "half", 32: "float", 64: "double"}[bits]
        return f"<{LANES} x {name}>" if self.lanes else name

    def const(self, value: int, bits: int) -> str:
        value &= (1 << bits) - 1
        return f"splat (i{bits} {value})" if self.lanes else str(value)

    # --- integers ---------------------------------------------------------------------------------------------------

    def bin(self, name: str, bits: int, a: str, b: str) -> str:
        return self.code.let(f"{name} {self.type(bits)} {a}, {b}")

    def cmp(self, relation: str, bits: int, a: str, b: str) -> str:
        return self.code.let(f"icmp {relation} {self.type(bits)} {a}, {b}")

    def select(self, bits: int, condition: str, yes: str, no: str) -> str:
        type_ = self.type(bits)
        return self.code.let(f"select {self.type(1)} {condition}, {type_} {yes}, {type_} {no}")

    def resize(self, x: str, bits: int, wanted: int, signed: bool = False) -> str:
        if bits == wanted:
            return x
        name = "trunc" if wanted < bits else "sext" if signed else "zext"
        return self.code.let(f"{name} {self.type(bits)} {x} to {self.type(wanted)}")

    def intrinsic(self, name: str, type_: str, *args: str, extra: str = "") -> str:
        """A call of ``llvm.<name>`` whose arguments and result all have one type."""
        suffix = {"half": "f16", "float": "f32", "double": "f64"}
        element = type_.split(" x ")[1].rstrip(">") if self.lanes else type_
        mangled = f"llvm.{name}.{f'v{LANES}' if self.lanes else ''}{suffix.get(element, element)}"
        extra_type = f", {extra.split()[0]}" if extra else ""
        self.code.declarations.add(f"declare {type_} @{mangled}({', '.join([type_] * len(args))}{extra_type})")
        given = ", ".join(f"{type_} {arg}" for arg in args) + (f", {extra}" if extra else "")
        return self.code.let(f"call {type_} @{mangled}({given})")

    # --- floats -----------------------------------------------------------------------------------------------------

    def to_float(self, x: str, bits: int) -> str:
        return self.code.let(f"bitcast {self.type(bits)} {x} to {self.float_type(bits)}")

    def to_bits(self, x: str, bits: int) -> str:
        return self.code.let(f"bitcast {self.float_type(bits)} {x} to {self.type(bits)}")

    def literal(self, pattern: int, bits: int) -> str:
        return self.to_float(self.const(pattern, bits), bits)

    def fbin(self, name: str, bits: int, a: str, b: str) -> str:
        return self.code.let(f"{name} {self.float_type(bits)} {a}, {b}")

    def fcmp(self, relation: str, bits: int, a: str, b: str) -> str:
        return self.code.let(f"fcmp {relation} {self.float_type(bits)} {a}, {b}")

    def fcast(self, name: str, x: str, bits: int, wanted: int) -> str:
        return self.code.let(f"{name} {self.float_type(bits)} {x} to {self.float_type(wanted)}")

    def canonical(self, x: str) -> str:
        """Bits of an f32 with every NaN replaced."""
        nan = self.fcmp("uno", 32, x, x)
        return self.select(32, nan, self.const(int(NAN_F32), 32), self.to_bits(x, 32))

    def flush(self, bits: str) -> str:
        """.ftz on bits of f32."""
        magnitude = self.bin("and", 32, bits, self.const(0x7FFFFFFF, 32))
        tiny = self.cmp("ult", 32, magnitude, self.const(0x00800000, 32))
        return self.select(32, tiny, self.bin("and", 32, bits, self.const(0x80000000, 32)), bits)


Emit = Callable[..., str]  # (Emitter, *operands) -> result
_RULES: list[tuple[re.Pattern[str], Callable[..., Emit | None]]] = []


def emitter_of(name: str) -> Emit | None:
    """How the operation with this name (`PureOp.name`) is emitted; None where it has to be called."""
    for pattern, make in _RULES:
        match = pattern.fullmatch(name)
        if match:
            return make(*match.groups())
    return None


def rule(pattern: str) -> Callable[[Callable[..., Emit | None]], Callable[..., Emit | None]]:
    """Registers ``make(*groups)`` for the operations whose whole name matches."""

    def register(make: Callable[..., Emit | None]) -> Callable[..., Emit | None]:
        _RULES.append((re.compile(pattern), make))
        return make

    return register


# --- integers -------------------------------------------------------------------------------------------------------


@rule(r"(add|sub|mul_lo|and|or|xor)_[sub](\d+)")
def _plain(name: str, bits: str) -> Emit:
    opcode = name.removesuffix("_lo")
    return lambda e, a, b: e.bin(opcode, int(bits), a, b)


@rule(r"(and|or|xor)_pred")
def _predicates(name: str) -> Emit:
    return lambda e, a, b: e.bin(name, 1, a, b)


@rule(r"not_(pred|b\d+)")
def _not(type_: str) -> Emit:
    bits = 1 if type_ == "pred" else int(type_[1:])
    return lambda e, a: e.bin("xor", bits, a, e.const(-1, bits))


@rule(r"(min|max)_([su])(\d+)")
def _order(name: str, kind: str, bits: str) -> Emit:
    relation = f"{kind}{'lt' if name == 'min' else 'gt'}"
    return lambda e, a, b: e.select(int(bits), e.cmp(relation, int(bits), a, b), a, b)


@rule(r"mul_(hi|wide)_([su])(\d+)")
def _long_product(half: str, kind: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, a: str, b: str) -> str:
        product = e.bin("mul", 2 * bits, *(e.resize(x, bits, 2 * bits, kind == "s") for x in (a, b)))
        if half == "wide":
            return product
        return e.resize(e.bin("lshr", 2 * bits, product, e.const(bits, 2 * bits)), 2 * bits, bits)

    return emit


@rule(r"(div|rem)_([su])(\d+)")
def _quotient(name: str, kind: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, a: str, b: str) -> str:
        zero = e.cmp("eq", bits, b, e.const(0, bits))
        one, ones = e.const(1, bits), e.const(-1, bits)
        safe = e.select(bits, zero, one, b)
        if kind == "s":  # -2^(n-1) / -1 traps on x86
            negated = e.cmp("eq", bits, b, ones)
            safe = e.select(bits, negated, one, safe)
        result = e.bin(f"{kind}{name}", bits, a, safe)
        if kind == "s" and name == "div":
            result = e.select(bits, negated, e.bin("sub", bits, e.const(0, bits), a), result)
        return e.select(bits, zero, ones, result)

    return emit


@rule(r"(neg|abs)_s(\d+)")
def _sign(name: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, a: str) -> str:
        negative = e.bin("sub", bits, e.const(0, bits), a)
        return negative if name == "neg" else e.select(bits, e.cmp("slt", bits, a, e.const(0, bits)), negative, a)

    return emit


@rule(r"(shl|shr)_([sub])(\d+)(?:_by(\d+))?")
def _shift(name: str, kind: str, width: str, amount: str | None) -> Emit:
    bits = int(width)
    signed = name == "shr" and kind == "s"
    opcode = "shl" if name == "shl" else "ashr" if signed else "lshr"

    def emit(e: Emitter, x: str, n: str | None = None) -> str:
        if n is None:
            if int(amount) >= bits and not signed:
                return e.bin("and", bits, x, e.const(0, bits))
            return e.bin(opcode, bits, x, e.const(min(int(amount), bits - 1), bits))
        far = e.cmp("ugt", 32, n, e.const(bits - 1, 32))
        count = e.resize(e.select(32, far, e.const(bits - 1, 32), n), 32, bits)
        shifted = e.bin(opcode, bits, x, count)
        return shifted if signed else e.select(bits, far, e.const(0, bits), shifted)

    return emit


@rule(r"shf_([lr])_(wrap|clamp)")
def _funnel(direction: str, mode: str) -> Emit:
    def emit(e: Emitter, low: str, high: str, n: str) -> str:
        if mode == "wrap":
            n = e.bin("and", 32, n, e.const(31, 32))
        else:
            n = e.select(32, e.cmp("ugt", 32, n, e.const(32, 32)), e.const(32, 32), n)
        upper = e.bin("shl", 64, e.resize(high, 32, 64), e.const(32, 64))
        word = e.bin("or", 64, upper, e.resize(low, 32, 64))
        shifted = e.bin("lshr" if direction == "r" else "shl", 64, word, e.resize(n, 32, 64))
        if direction == "l":
            shifted = e.bin("lshr", 64, shifted, e.const(32, 64))
        return e.resize(shifted, 64, 32)

    return emit


def _low_mask(e: Emitter, length: str, bits: int) -> str:
    """Ones in the low ``length`` bits; ``length`` may be anything up to 255."""
    far = e.cmp("ugt", bits, length, e.const(bits - 1, bits))
    power = e.bin("shl", bits, e.const(1, bits), e.bin("and", bits, length, e.const(bits - 1, bits)))
    return e.select(bits, far, e.const(-1, bits), e.bin("sub", bits, power, e.const(1, bits)))


def _field(e: Emitter, start: str, length: str, bits: int) -> tuple[str, str]:
    return tuple(e.resize(e.bin("and", 32, x, e.const(255, 32)), 32, bits) for x in (start, length))


@rule(r"bfe_([su])(\d+)")
def _extract(kind: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, x: str, start: str, length: str) -> str:
        start, length = _field(e, start, length, bits)
        last = e.const(bits - 1, bits)
        beyond = e.cmp("ugt", bits, start, last)
        count = e.select(bits, beyond, last, start)
        mask = _low_mask(e, length, bits)
        zero = e.const(0, bits)
        if kind == "u":
            shifted = e.select(bits, beyond, zero, e.bin("lshr", bits, x, count))
            return e.bin("and", bits, shifted, mask)
        shifted = e.bin("ashr", bits, x, count)
        # The sign is the field's highest bit, or the register's where the field leaves the register.
        end = e.bin("sub", bits, e.bin("add", bits, start, length), e.const(1, bits))
        top = e.select(bits, e.cmp("ugt", bits, end, last), last, end)
        sign = e.bin("and", bits, e.bin("lshr", bits, x, top), e.const(1, bits))
        above = e.bin("xor", bits, mask, e.const(-1, bits))
        fill = e.select(bits, e.cmp("ne", bits, sign, zero), above, zero)
        field = e.bin("or", bits, e.bin("and", bits, shifted, mask), fill)
        return e.select(bits, e.cmp("eq", bits, length, zero), zero, field)

    return emit


@rule(r"bfi_b(\d+)")
def _insert(width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, field: str, base: str, start: str, length: str) -> str:
        start, length = _field(e, start, length, bits)
        inside = e.cmp("ule", bits, start, e.const(bits - 1, bits))
        count = e.bin("and", bits, start, e.const(bits - 1, bits))
        zero = e.const(0, bits)
        mask = e.select(bits, inside, e.bin("shl", bits, _low_mask(e, length, bits), count), zero)
        moved = e.bin("and", bits, e.bin("shl", bits, field, count), mask)
        return e.bin("or", bits, e.bin("and", bits, base, e.bin("xor", bits, mask, e.const(-1, bits))), moved)

    return emit


@rule(r"lop3_0x([0-9a-f]+)")
def _lop3(table: str) -> Emit:
    def emit(e: Emitter, a: str, b: str, c: str) -> str:
        inverted = {x: e.bin("xor", 32, x, e.const(-1, 32)) for x in (a, b, c)}
        result = e.const(0, 32)
        for i in range(8):
            if int(table, 16) >> i & 1:
                x, y, z = (v if i >> k & 1 else inverted[v] for v, k in ((a, 2), (b, 1), (c, 0)))
                result = e.bin("or", 32, result, e.bin("and", 32, x, e.bin("and", 32, y, z)))
        return e.bin("or", 32, result, e.const(0, 32))

    return emit


@rule(r"prmt_b32")
def _permute() -> Emit:
    def emit(e: Emitter, a: str, b: str, selector: str) -> str:
        upper = e.bin("shl", 64, e.resize(b, 32, 64), e.const(32, 64))
        source = e.bin("or", 64, upper, e.resize(a, 32, 64))
        result = e.const(0, 32)
        for i in range(4):
            nibble = e.bin("lshr", 32, selector, e.const(4 * i, 32))
            shift = e.bin("shl", 32, e.bin("and", 32, nibble, e.const(7, 32)), e.const(3, 32))
            byte = e.resize(e.bin("lshr", 64, source, e.resize(shift, 32, 64)), 64, 8)
            sign = e.bin("ashr", 8, byte, e.const(7, 8))
            replicate = e.cmp("ne", 32, e.bin("and", 32, nibble, e.const(8, 32)), e.const(0, 32))
            chosen = e.resize(e.select(8, replicate, sign, byte), 8, 32)
            result = e.bin("or", 32, result, e.bin("shl", 32, chosen, e.const(8 * i, 32)))
        return result

    return emit


@rule(r"dp[24]a_(\d+)_(\d)_([su])32_([su])32")
def _dot(bits: str, first: str, a_kind: str, b_kind: str) -> Emit:
    def piece(e: Emitter, x: str, low: int, width: int, kind: str) -> str:
        raised = e.bin("shl", 32, x, e.const(32 - low - width, 32))
        return e.bin("ashr" if kind == "s" else "lshr", 32, raised, e.const(32 - width, 32))

    def emit(e: Emitter, a: str, b: str, c: str) -> str:
        width = int(bits)
        for i in range(32 // width):
            x = piece(e, a, width * i, width, a_kind)
            c = e.bin("add", 32, c, e.bin("mul", 32, x, piece(e, b, 8 * (int(first) + i), 8, b_kind)))
        return c

    return emit


@rule(r"(popc|clz|brev|bfind)_([sub])(\d+)")
def _bits(name: str, kind: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, x: str) -> str:
        type_ = e.type(bits)
        if name == "brev":
            return e.intrinsic("bitreverse", type_, x)
        if name == "popc":
            return e.resize(e.intrinsic("ctpop", type_, x), bits, 32)
        if kind == "s":
            x = e.bin("xor", bits, x, e.bin("ashr", bits, x, e.const(bits - 1, bits)))
        zeros = e.resize(e.intrinsic("ctlz", type_, x, extra="i1 false"), bits, 32)
        return zeros if name == "clz" else e.bin("sub", 32, e.const(bits - 1, 32), zeros)

    return emit


_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@rule(r"setp_(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)_([sub])(\d+)")
def _compare(relation: str, kind: str, bits: str) -> Emit:
    relation = _UNSIGNED_NAMES.get(relation, relation)
    if relation not in ("eq", "ne"):
        relation = ("s" if kind == "s" else "u") + relation
    return lambda e, a, b: e.cmp(relation, int(bits), a, b)


# --- selection and width --------------------------------------------------------------------------------------------


def _bits_of(type_: str) -> int:
    return 1 if type_ == "pred" else int(type_[1:])


@rule(r"select_(pred|u\d+)")
def _select(type_: str) -> Emit:
    return lambda e, yes, no, p: e.select(_bits_of(type_), p, yes, no)


@rule(r"resize_u(\d+)_u(\d+)")
def _resize(bits: str, wanted: str) -> Emit:
    return lambda e, x: e.resize(x, int(bits), int(wanted))


@rule(r"slice(\d+)_(\d+)_(\d+)")
def _slice(bits: str, width: str, shift: str) -> Emit:
    def emit(e: Emitter, x: str) -> str:
        moved = e.bin("lshr", int(bits), x, e.const(int(shift), int(bits))) if int(shift) else x
        return e.resize(moved, int(bits), int(width))

    return emit


@rule(r"pack(\d+)x(\d+)")
def _pack(count: str, width: str) -> Emit:
    each, total = int(width), int(count) * int(width)

    def emit(e: Emitter, *parts: str) -> str:
        result = e.resize(parts[0], each, total)
        for i, part in enumerate(parts[1:], 1):
            moved = e.bin("shl", total, e.resize(part, each, total), e.const(i * each, total))
            result = e.bin("or", total, result, moved)
        return result

    return emit


@rule(r"extend_([su])(\d+)_(\d+)_(\d+)")
def _extend(kind: str, width: str, bits: str, source_bits: str) -> Emit:
    def emit(e: Emitter, x: str) -> str:
        narrow = e.resize(x, int(source_bits), int(width))
        return e.resize(narrow, int(width), int(bits), kind == "s")

    return emit
