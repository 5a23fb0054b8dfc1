"""Affine rows: LMDeploy TurboMind's (scale, zero) per token and head (docs/numbers.md 4)."""

import math
from dataclasses import dataclass
from fractions import Fraction

from . import binary32


@dataclass
class AffineRow:
    scale_code: int
    zero_code: int
    codes: list
    decoded: list


def quantize_affine(numbers, param_type, bits):
    """`param_type` is F16 or BF16; every operation is binary32's, rounded to it once."""

    def in_type(number):
        return param_type.decode(param_type.encode(number))

    largest = (1 << bits) - 1
    row = [in_type(x) for x in numbers]
    if any(not math.isfinite(x) for x in row):
        nan = param_type.nan_code
        return AffineRow(nan, nan, [0] * len(row), [math.nan] * len(row))
    low = min(row, key=order)
    high = max(row, key=order)
    scale = in_type(binary32.div(binary32.sub(high, low), float(largest)))
    zero = low
    inverse = in_type(binary32.div(1.0, scale))
    codes = []
    for x in row:
        scaled = in_type(binary32.mul(in_type(binary32.sub(x, zero)), inverse))
        codes.append(nearest_code(scaled, largest))
    return AffineRow(
        param_type.encode(scale),
        param_type.encode(zero),
        codes,
        decode_affine(codes, scale, zero, param_type),
    )


def decode_affine(codes, scale, zero, param_type):
    """What gather returns: both operations rounded to the parameter type."""

    def in_type(number):
        return param_type.decode(param_type.encode(number))

    return [in_type(binary32.add(in_type(binary32.mul(float(c), scale)), zero)) for c in codes]


def order(number):
    """Sorts by value, and -0 before +0."""
    return number, math.copysign(1.0, number)


def nearest_code(scaled, largest):
    if math.isnan(scaled):
        return 0
    if math.isinf(scaled):
        return largest if scaled > 0 else 0
    return min(max(round(Fraction(scaled)), 0), largest)
