"""LLVM IR of pure operations: what `PureOp.vector` computes with NumPy, lane by lane and bit for bit.

An operation that is not here runs as the NumPy function it is, called from native code (`native_translate`); so this
file may leave out what is rare. A uniform value is an ``iN``, a varying one a ``<32 x iN>``, a predicate ``i1`` or
``<32 x i1>``; floats are held as their bits and cast where they are computed with. No fast-math flag is ever set: LLVM
then neither reorders nor contracts, and each operation rounds as IEEE 754 says.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from cute_kernels.emulator.instructions_numerics import NAN_F16, NAN_F32

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


def _rule(pattern: str) -> Callable[[Callable[..., Emit | None]], Callable[..., Emit | None]]:
    def register(make: Callable[..., Emit | None]) -> Callable[..., Emit | None]:
        _RULES.append((re.compile(pattern), make))
        return make

    return register


# --- integers -------------------------------------------------------------------------------------------------------


@_rule(r"(add|sub|mul_lo|and|or|xor)_[sub](\d+)")
def _plain(name: str, bits: str) -> Emit:
    opcode = name.removesuffix("_lo")
    return lambda e, a, b: e.bin(opcode, int(bits), a, b)


@_rule(r"(and|or|xor)_pred")
def _predicates(name: str) -> Emit:
    return lambda e, a, b: e.bin(name, 1, a, b)


@_rule(r"not_(pred|b\d+)")
def _not(type_: str) -> Emit:
    bits = 1 if type_ == "pred" else int(type_[1:])
    return lambda e, a: e.bin("xor", bits, a, e.const(-1, bits))


@_rule(r"(min|max)_([su])(\d+)")
def _order(name: str, kind: str, bits: str) -> Emit:
    relation = f"{kind}{'lt' if name == 'min' else 'gt'}"
    return lambda e, a, b: e.select(int(bits), e.cmp(relation, int(bits), a, b), a, b)


@_rule(r"mul_(hi|wide)_([su])(\d+)")
def _long_product(half: str, kind: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, a: str, b: str) -> str:
        product = e.bin("mul", 2 * bits, *(e.resize(x, bits, 2 * bits, kind == "s") for x in (a, b)))
        if half == "wide":
            return product
        return e.resize(e.bin("lshr", 2 * bits, product, e.const(bits, 2 * bits)), 2 * bits, bits)

    return emit


@_rule(r"(div|rem)_([su])(\d+)")
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


@_rule(r"(neg|abs)_s(\d+)")
def _sign(name: str, width: str) -> Emit:
    bits = int(width)

    def emit(e: Emitter, a: str) -> str:
        negative = e.bin("sub", bits, e.const(0, bits), a)
        return negative if name == "neg" else e.select(bits, e.cmp("slt", bits, a, e.const(0, bits)), negative, a)

    return emit


@_rule(r"(shl|shr)_([sub])(\d+)(?:_by(\d+))?")
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


@_rule(r"shf_([lr])_(wrap|clamp)")
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


@_rule(r"bfe_([su])(\d+)")
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


@_rule(r"bfi_b(\d+)")
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


@_rule(r"lop3_0x([0-9a-f]+)")
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


@_rule(r"prmt_b32")
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


@_rule(r"(popc|clz|brev|bfind)_([sub])(\d+)")
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


@_rule(r"setp_(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)_([sub])(\d+)")
def _compare(relation: str, kind: str, bits: str) -> Emit:
    relation = _UNSIGNED_NAMES.get(relation, relation)
    if relation not in ("eq", "ne"):
        relation = ("s" if kind == "s" else "u") + relation
    return lambda e, a, b: e.cmp(relation, int(bits), a, b)


# --- selection and width --------------------------------------------------------------------------------------------


def _bits_of(type_: str) -> int:
    return 1 if type_ == "pred" else int(type_[1:])


@_rule(r"select_(pred|u\d+)")
def _select(type_: str) -> Emit:
    return lambda e, yes, no, p: e.select(_bits_of(type_), p, yes, no)


@_rule(r"resize_u(\d+)_u(\d+)")
def _resize(bits: str, wanted: str) -> Emit:
    return lambda e, x: e.resize(x, int(bits), int(wanted))


@_rule(r"slice(\d+)_(\d+)_(\d+)")
def _slice(bits: str, width: str, shift: str) -> Emit:
    def emit(e: Emitter, x: str) -> str:
        moved = e.bin("lshr", int(bits), x, e.const(int(shift), int(bits))) if int(shift) else x
        return e.resize(moved, int(bits), int(width))

    return emit


@_rule(r"pack(\d+)x(\d+)")
def _pack(count: str, width: str) -> Emit:
    each, total = int(width), int(count) * int(width)

    def emit(e: Emitter, *parts: str) -> str:
        result = e.resize(parts[0], each, total)
        for i, part in enumerate(parts[1:], 1):
            moved = e.bin("shl", total, e.resize(part, each, total), e.const(i * each, total))
            result = e.bin("or", total, result, moved)
        return result

    return emit


@_rule(r"extend_([su])(\d+)_(\d+)_(\d+)")
def _extend(kind: str, width: str, bits: str, source_bits: str) -> Emit:
    def emit(e: Emitter, x: str) -> str:
        narrow = e.resize(x, int(source_bits), int(width))
        return e.resize(narrow, int(width), int(bits), kind == "s")

    return emit


# --- f32 ------------------------------------------------------------------------------------------------------------


def _extreme(e: Emitter, name: str, x: str, y: str) -> str:
    """Bits of min or max of two f32, the number where one is NaN, -0 below +0."""
    a, b = e.to_float(x, 32), e.to_float(y, 32)
    chosen = e.select(32, e.fcmp("olt" if name == "min" else "ogt", 32, a, b), x, y)
    either = e.select(32, e.fcmp("uno", 32, b, b), x, chosen)
    either = e.select(32, e.fcmp("uno", 32, a, a), y, either)
    zero = e.literal(0, 32)
    zeros = e.bin("and", 1, e.fcmp("oeq", 32, a, zero), e.fcmp("oeq", 32, b, zero))
    signed_zero = e.bin("or" if name == "min" else "and", 32, x, y)
    return e.canonical(e.to_float(e.select(32, zeros, signed_zero, either), 32))


def _f32_bits(e: Emitter, name: str, args: list[str]) -> str:
    """An f32 operation on bits, NaN canonical."""
    if name in ("min", "max"):
        return _extreme(e, name, *args)
    if name in ("abs", "neg"):
        masked = e.bin("and", 32, args[0], e.const(0x7FFFFFFF, 32))
        flipped = e.bin("xor", 32, args[0], e.const(0x80000000, 32))
        return e.canonical(e.to_float(masked if name == "abs" else flipped, 32))
    x = [e.to_float(arg, 32) for arg in args]
    if name == "fma":
        result = e.intrinsic("fma", e.float_type(32), *x)
    elif name == "sqrt":
        result = e.intrinsic("sqrt", e.float_type(32), *x)
    elif name == "rcp":
        result = e.fbin("fdiv", 32, e.literal(0x3F800000, 32), x[0])
    elif name == "rsqrt":
        root = e.intrinsic("sqrt", e.float_type(64), e.fcast("fpext", x[0], 32, 64))
        result = e.fcast("fptrunc", e.fbin("fdiv", 64, e.literal(0x3FF0000000000000, 64), root), 64, 32)
    else:
        result = e.fbin(f"f{name}", 32, *x)
    return e.canonical(result)


@_rule(r"(add|sub|mul|fma|div|min|max|abs|neg|rcp|sqrt|rsqrt)_f32(_ftz)?(_sat)?")
def _f32(name: str, ftz: str | None, saturate: str | None) -> Emit:
    def emit(e: Emitter, *args: str) -> str:
        result = _f32_bits(e, name, [e.flush(x) for x in args] if ftz else list(args))
        if ftz:
            result = e.flush(result)
        if saturate:
            x = e.to_float(result, 32)
            one = e.const(0x3F800000, 32)
            below = e.select(32, e.fcmp("olt", 32, x, e.to_float(one, 32)), result, one)
            result = e.select(32, e.fcmp("ogt", 32, x, e.literal(0, 32)), below, e.const(0, 32))
        return result

    return emit


_FLOAT_RELATIONS = {
    **{name: f"o{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"num": "ord", "nan": "uno"},
}


@_rule(r"setp_(\w+)_(f32|f64|bf16)")
def _compare_floats(relation: str, type_: str) -> Emit:
    relation = _FLOAT_RELATIONS[relation]
    bits = 64 if type_ == "f64" else 32

    def emit(e: Emitter, a: str, b: str) -> str:
        x, y = (widen_bf16(e, v) if type_ == "bf16" else v for v in (a, b))
        return e.fcmp(relation, bits, e.to_float(x, bits), e.to_float(y, bits))

    return emit


# --- f16 and bf16 ---------------------------------------------------------------------------------------------------


def widen_bf16(e: Emitter, x: str) -> str:
    """Bits of bf16 to bits of f32."""
    return e.bin("shl", 32, e.resize(x, 16, 32), e.const(16, 32))


def _narrow_bf16(e: Emitter, x: str) -> str:
    """Bits of f32 to bits of bf16, to nearest even."""
    odd = e.bin("and", 32, e.bin("lshr", 32, x, e.const(16, 32)), e.const(1, 32))
    rounded = e.bin("add", 32, e.bin("add", 32, x, e.const(0x7FFF, 32)), odd)
    return _nan_f16(e, x, e.resize(e.bin("lshr", 32, rounded, e.const(16, 32)), 32, 16))


def _nan_f16(e: Emitter, x: str, narrow: str) -> str:
    """The canonical NaN of 16 bits where the f32 with bits ``x`` is NaN."""
    value = e.to_float(x, 32)
    return e.select(16, e.fcmp("uno", 32, value, value), e.const(int(NAN_F16), 16), narrow)


def _widen_f16(e: Emitter, x: str) -> str:
    """Bits of f16 to an f32."""
    return e.fcast("fpext", e.to_float(x, 16), 16, 32)


def _narrow_f16(e: Emitter, x: str) -> str:
    """Bits of f32 to bits of f16, to nearest even."""
    return _nan_f16(e, x, e.to_bits(e.fcast("fptrunc", e.to_float(x, 32), 32, 16), 16))


def _magnitude(e: Emitter, x: str) -> str:
    return e.bin("and", 64, x, e.const((1 << 63) - 1, 64))


def _sum_to_odd(e: Emitter, a: str, b: str) -> str:
    """`instructions_numerics.sum_to_odd`: f64 sum rounded to odd."""
    s = e.fbin("fadd", 64, a, b)
    bb = e.fbin("fsub", 64, s, a)
    error = e.fbin("fadd", 64, e.fbin("fsub", 64, a, e.fbin("fsub", 64, s, bb)), e.fbin("fsub", 64, b, bb))
    bits, zero = e.to_bits(s, 64), e.literal(0, 64)
    even = e.fcmp("one", 64, error, zero)
    infinite = e.const(0x7FF << 52, 64)
    for x in (bits, e.to_bits(error, 64)):
        even = e.bin("and", 1, even, e.cmp("ult", 64, _magnitude(e, x), infinite))
    even = e.bin("and", 1, even, e.cmp("eq", 64, e.bin("and", 64, bits, e.const(1, 64)), e.const(0, 64)))
    inwards = e.bin("xor", 1, e.fcmp("ogt", 64, error, zero), e.fcmp("ogt", 64, s, zero))
    step = e.select(64, inwards, e.const(-1, 64), e.const(1, 64))
    return e.to_float(e.bin("add", 64, bits, e.select(64, even, step, e.const(0, 64))), 64)


def _f64_to_f32_odd(e: Emitter, x: str) -> str:
    """`instructions_numerics.f64_to_f32_odd`: bits of f32."""
    near = e.fcast("fptrunc", x, 64, 32)
    bits, wide = e.to_bits(near, 32), e.fcast("fpext", near, 32, 64)
    inexact = e.bin("and", 1, e.fcmp("une", 64, wide, x), e.fcmp("ord", 64, x, x))
    away = e.cmp("ugt", 64, _magnitude(e, e.to_bits(wide, 64)), _magnitude(e, e.to_bits(x, 64)))
    less = e.bin("sub", 32, bits, e.const(1, 32))
    truncated = e.select(32, e.bin("and", 1, inexact, away), less, bits)
    return e.select(32, inexact, e.bin("or", 32, truncated, e.const(1, 32)), bits)


@_rule(r"(add|sub|mul|fma|min|max|abs|neg)_(bf16|f16)")
def _half(name: str, type_: str) -> Emit:
    narrow = _narrow_bf16 if type_ == "bf16" else _narrow_f16

    def widen(e: Emitter, x: str) -> str:
        return e.to_float(widen_bf16(e, x), 32) if type_ == "bf16" else _widen_f16(e, x)

    def emit(e: Emitter, *args: str) -> str:
        if name in ("min", "max", "abs", "neg"):
            wide = [e.to_bits(widen(e, x), 32) for x in args]
            return narrow(e, _f32_bits(e, name, wide))
        if name == "sub":
            args = (args[0], e.bin("xor", 16, args[1], e.const(0x8000, 16)))
        x = [e.fcast("fpext", widen(e, arg), 32, 64) for arg in args]
        if name in ("add", "sub"):
            if type_ == "bf16":  # 24 bits are more than 2 * 8 + 2: rounding the f32 sum again is rounding once
                return narrow(e, e.to_bits(e.fbin("fadd", 32, *(widen(e, arg) for arg in args)), 32))
            total = e.fbin("fadd", 64, *x)
        else:
            total = e.fbin("fmul", 64, x[0], x[1])
            if name == "fma":
                total = _sum_to_odd(e, total, x[2])
        return narrow(e, _f64_to_f32_odd(e, total))

    return emit


# --- conversions ----------------------------------------------------------------------------------------------------


@_rule(r"cvt_(f32|f64)_([su])(\d+)")
def _from_integer(target: str, kind: str, bits: str) -> Emit:
    wanted = int(target[1:])

    def emit(e: Emitter, x: str) -> str:
        name = "sitofp" if kind == "s" else "uitofp"
        value = e.code.let(f"{name} {e.type(int(bits))} {x} to {e.float_type(wanted)}")
        return e.to_bits(value, wanted)

    return emit


_ROUNDING = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@_rule(r"cvt_(rni|rzi|rmi|rpi)(_ftz)?_([su])(8|16|32)_f32")
def _to_integer(mode: str, ftz: str | None, kind: str, width: str) -> Emit:
    bits = int(width)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)

    def emit(e: Emitter, x: str) -> str:
        value = e.fcast("fpext", e.to_float(e.flush(x) if ftz else x, 32), 32, 64)
        whole = e.intrinsic(_ROUNDING[mode], e.float_type(64), value)
        top, bottom = (e.code.let(f"sitofp {e.type(64)} {e.const(v, 64)} to {e.float_type(64)}") for v in (high, low))
        inside = e.bin("and", 1, e.fcmp("olt", 64, whole, top), e.fcmp("ogt", 64, whole, bottom))
        flag, floats = e.type(1), e.float_type(64)
        safe = e.code.let(f"select {flag} {inside}, {floats} {whole}, {floats} {e.literal(0, 64)}")
        plain = e.resize(e.code.let(f"fptosi {floats} {safe} to {e.type(64)}"), 64, bits)
        above = e.select(bits, e.fcmp("oge", 64, whole, top), e.const(high, bits), plain)
        return e.select(bits, e.fcmp("ole", 64, whole, bottom), e.const(low, bits), above)

    return emit


@_rule(r"cvt_(rni|rzi|rmi|rpi)_f32")
def _integral(mode: str) -> Emit:
    return lambda e, x: e.canonical(e.intrinsic(_ROUNDING[mode], e.float_type(32), e.to_float(x, 32)))


@_rule(r"cvt_(bf16|f16)_f32_(rn|rz)(_satfinite)?(_relu)?")
def _narrow(target: str, mode: str, satfinite: str | None, relu: str | None) -> Emit | None:
    if satfinite:
        return None

    def emit(e: Emitter, x: str) -> str:
        if relu:
            value = e.to_float(x, 32)
            keep = e.bin("or", 1, e.fcmp("uno", 32, value, value), e.fcmp("ogt", 32, value, e.literal(0, 32)))
            x = e.select(32, keep, x, e.const(0, 32))
        if mode == "rz":
            return _nan_f16(e, x, e.resize(e.bin("lshr", 32, x, e.const(16, 32)), 32, 16))
        return _narrow_bf16(e, x) if target == "bf16" else _narrow_f16(e, x)

    return emit


@_rule(r"cvt_f32_(bf16|f16|f64)")
def _widen(source: str) -> Emit:
    if source == "bf16":
        return widen_bf16
    if source == "f16":
        return lambda e, x: e.canonical(_widen_f16(e, x))
    return lambda e, x: e.to_bits(e.fcast("fptrunc", e.to_float(x, 64), 64, 32), 32)


@_rule(r"cvt_f64_f32")
def _double() -> Emit:
    return lambda e, x: e.to_bits(e.fcast("fpext", e.to_float(x, 32), 32, 64), 64)


@_rule(r"cvt_rna_tf32")
def _tf32() -> Emit:
    def emit(e: Emitter, x: str) -> str:
        rounded = e.bin("and", 32, e.bin("add", 32, x, e.const(0x1000, 32)), e.const(0xFFFFE000, 32))
        magnitude = e.bin("and", 32, x, e.const(0x7FFFFFFF, 32))
        return e.select(32, e.cmp("ult", 32, magnitude, e.const(0x7F800000, 32)), rounded, x)

    return emit
