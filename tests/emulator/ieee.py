"""IEEE 754 arithmetic on bit patterns with exact rationals: the independent reference for arithmetic opcodes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt


@dataclass(frozen=True)
class Format:
    """A binary format with ``precision`` significant bits and ``bits - precision`` exponent bits."""

    bits: int
    precision: int

    @property
    def fraction_bits(self) -> int:
        return self.precision - 1

    @property
    def bias(self) -> int:
        return (1 << (self.bits - self.precision - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << (self.bits - self.precision)) - 1) << self.fraction_bits

    @property
    def nan(self) -> int:
        """PTX's canonical NaN: all ones but the sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    def is_nan(self, x: int) -> bool:
        return x & ~self.sign_bit > self.infinity

    def is_infinite(self, x: int) -> bool:
        return x & ~self.sign_bit == self.infinity

    def negative(self, x: int) -> bool:
        return bool(x & self.sign_bit)

    def value(self, x: int) -> Fraction:
        """Exact value of a finite pattern."""
        exponent = (x & ~self.sign_bit) >> self.fraction_bits
        fraction = x & ((1 << self.fraction_bits) - 1)
        if exponent:
            fraction |= 1 << self.fraction_bits
        scale = max(exponent, 1) - self.bias - self.fraction_bits
        magnitude = Fraction(fraction) * Fraction(2) ** scale
        return -magnitude if self.negative(x) else magnitude

    def round(self, value: Fraction, *, zero_negative: bool = False, toward_zero: bool = False) -> int:
        """Pattern nearest to an exact value, ties to even."""
        if value == 0:
            return self.sign_bit if zero_negative else 0
        sign = self.sign_bit if value < 0 else 0
        value = abs(value)
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        if Fraction(2) ** exponent > value:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        scaled = value / Fraction(2) ** (exponent - self.fraction_bits)
        whole, rest = divmod(scaled.numerator, scaled.denominator)
        if not toward_zero:
            twice = 2 * rest - scaled.denominator
            whole += twice > 0 or (twice == 0 and whole & 1)
        # A carry out of the fraction lands in the exponent, as the encoding is monotonic.
        hidden = 1 << self.fraction_bits
        pattern = whole if whole < hidden else ((exponent + self.bias) << self.fraction_bits) + whole - hidden
        if pattern >= self.infinity:
            pattern = self.infinity - 1 if toward_zero else self.infinity
        return sign | pattern

    def add(self, a: int, b: int) -> int:
        if self.is_nan(a) or self.is_nan(b):
            return self.nan
        if self.is_infinite(a) or self.is_infinite(b):
            if self.is_infinite(a) and self.is_infinite(b) and a != b:
                return self.nan
            return a if self.is_infinite(a) else b
        return self.round(self.value(a) + self.value(b), zero_negative=self.negative(a) and self.negative(b))

    def mul(self, a: int, b: int) -> int:
        if self.is_nan(a) or self.is_nan(b):
            return self.nan
        sign = (a ^ b) & self.sign_bit
        if self.is_infinite(a) or self.is_infinite(b):
            other = b if self.is_infinite(a) else a
            return self.nan if other & ~self.sign_bit == 0 else sign | self.infinity
        return self.round(self.value(a) * self.value(b), zero_negative=bool(sign))

    def fma(self, a: int, b: int, c: int) -> int:
        if self.is_nan(a) or self.is_nan(b) or self.is_nan(c):
            return self.nan
        negative = self.negative(a) != self.negative(b)
        if self.is_infinite(a) or self.is_infinite(b):
            product = self.mul(a, b)
            return self.nan if self.is_nan(product) or (self.is_infinite(c) and c != product) else product
        if self.is_infinite(c):
            return c
        exact = self.value(a) * self.value(b) + self.value(c)
        return self.round(exact, zero_negative=negative and self.negative(c))

    def div(self, a: int, b: int) -> int:
        sign = (a ^ b) & self.sign_bit
        zero = [x & ~self.sign_bit == 0 for x in (a, b)]
        if self.is_nan(a) or self.is_nan(b) or all(zero) or (self.is_infinite(a) and self.is_infinite(b)):
            return self.nan
        if self.is_infinite(a) or zero[1]:
            return sign | self.infinity
        if self.is_infinite(b) or zero[0]:
            return sign
        return self.round(self.value(a) / self.value(b), zero_negative=bool(sign))

    def sqrt(self, a: int) -> int:
        if a & ~self.sign_bit == 0:
            return a
        if self.is_nan(a) or self.negative(a):
            return self.nan
        if self.is_infinite(a):
            return a
        value = self.value(a)
        # Far more bits than the result has, and a sticky one: rounding it is rounding the root.
        shift = 2 * (self.precision + 200)
        scaled = value.numerator * (1 << shift) // value.denominator
        root = isqrt(scaled)
        sticky = root * root != scaled or scaled * value.denominator != value.numerator << shift
        return self.round(Fraction(2 * root + sticky, 1 << (shift // 2 + 1)))

    def convert(self, x: int, target: Format, *, toward_zero: bool = False) -> int:
        if self.is_nan(x):
            return target.nan
        if self.is_infinite(x):
            return target.infinity | (target.sign_bit if self.negative(x) else 0)
        return target.round(self.value(x), zero_negative=self.negative(x), toward_zero=toward_zero)

    def order(self, a: int, b: int, *, largest: bool) -> int:
        """min / max: the number if one is NaN; -0 is smaller than +0."""
        if self.is_nan(a) and self.is_nan(b):
            return self.nan
        if self.is_nan(a) or self.is_nan(b):
            return b if self.is_nan(a) else a
        rank = [(-(x & ~self.sign_bit) - 1 if self.negative(x) else x) for x in (a, b)]
        return (a if rank[0] >= rank[1] else b) if largest else (a if rank[0] <= rank[1] else b)


F16 = Format(16, 11)
BF16 = Format(16, 8)
F64 = Format(64, 53)
F32 = Format(32, 24)
