"""IEEE 754 arithmetic in Python integers: the oracle for every rounding that the references claim."""

from __future__ import annotations

from fractions import Fraction

import torch


def nearest(value: Fraction, precision: int, min_exponent: int) -> Fraction:
    """`value` rounded to nearest even with `precision` significant bits and least unit ``2 ** min_exponent``.

    FP32: (24, -149). BF16: (8, -133). The result must be far from overflow.
    """
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, min_exponent)
    quotient, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and quotient % 2):
        quotient += 1
    return (1 if value > 0 else -1) * quotient * unit


def fp32(value: Fraction) -> Fraction:
    return nearest(value, 24, -149)


def bf16(value: Fraction) -> Fraction:
    return nearest(value, 8, -133)


def fractions(tensor: torch.Tensor) -> list:
    """The exact values of a tensor, as nested lists of fractions."""

    def convert(values):
        return [convert(v) for v in values] if isinstance(values, list) else Fraction(values)

    return convert(tensor.to(torch.float64).tolist())


def patch_embed(x, weight, bias, pos_embed, scale, epilogue: str, step: int = 32) -> list[list[Fraction]]:
    """The contracts of `cute_kernels.patch_embed`, element by element, on small tensors; x is ``[rows, K]``.

    ``scale`` is a number, or a pair of lists of numbers: of the rows and of the features. The accumulator is rounded
    after every ``step`` elements of K.
    """
    xs, ws = fractions(x), fractions(weight)
    biases = None if bias is None else fractions(bias)
    table = None if pos_embed is None else fractions(pos_embed)
    by_row, by_feature = scale if isinstance(scale, tuple) else ([float(scale)] * len(xs), [1] * len(ws))
    out = []
    for r, row in enumerate(xs):
        line = []
        for n, column in enumerate(ws):
            acc, scale = Fraction(0), fp32(Fraction(by_row[r]) * Fraction(by_feature[n]))
            for k in range(0, len(row), step):
                acc = fp32(acc + sum(a * b for a, b in zip(row[k : k + step], column[k : k + step], strict=True)))
            addends = [a for a in (biases and biases[n], table and table[r % len(table)][n]) if a is not None]
            added = fp32(sum(addends, Fraction(0)))
            if epilogue == "f32":
                line.append(bf16(fp32(acc * scale + added)))
            else:
                line.append(bf16(bf16(fp32(acc * scale)) + bf16(added)))
        out.append(line)
    return out
