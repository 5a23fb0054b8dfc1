"""binary32 arithmetic: the exact result of one operation, rounded once (nearest even).

A NaN result is always the positive quiet NaN 0x7FC00000: IEEE-754 leaves its sign and payload to
the machine, so nothing compared by bytes may depend on them.
"""

import math
import struct
from fractions import Fraction

from .small_float import F32, INFINITY, NAN

FLT_MAX = float(F32.largest)


def from_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_bits(number):
    """The bits of a number that binary32 holds exactly (struct refuses others only by rounding, so
    that is asserted)."""
    if math.isnan(number):
        return F32.nan_code
    packed = struct.pack("<f", number)
    assert struct.unpack("<f", packed)[0] == number
    return struct.unpack("<I", packed)[0]


def nearest(exact):
    """An exact Fraction (or int) as the nearest binary32 number."""
    return F32.round(Fraction(exact))


def _nearest_ratio(numerator, denominator):
    return F32.decode(F32.code_of_rounded(numerator, denominator))


def add(a, b):
    # A Python float sum of two binary32 numbers is never a wrong zero, infinity or NaN: binary64
    # holds its magnitude. Those cases are taken from it, all others are rounded here.
    special = a + b
    if _is_special(special):
        return special
    (x, x_unit), (y, y_unit) = a.as_integer_ratio(), b.as_integer_ratio()
    return _nearest_ratio(x * y_unit + y * x_unit, x_unit * y_unit)


def sub(a, b):
    return add(a, -b)


def mul(a, b):
    special = a * b
    if _is_special(special):
        return special
    (x, x_unit), (y, y_unit) = a.as_integer_ratio(), b.as_integer_ratio()
    return _nearest_ratio(x * y, x_unit * y_unit)


def div(a, b):
    if b == 0:
        if a == 0 or math.isnan(a):
            return NAN
        return math.copysign(INFINITY, a) * math.copysign(1.0, b)
    special = a / b
    return special if _is_special(special) else nearest(Fraction(a) / Fraction(b))


def sqrt(x):
    """Of a number that is not negative."""
    if _is_special(x):
        return x
    exact = Fraction(x)
    # 2^k times the root with k large: its integer part has more digits than binary32, and what
    # is cut off counts as a half of the last one, which no tie can have.
    k = 64 + max(0, -math.frexp(x)[1])
    squared = exact * 4**k
    root = math.isqrt(int(squared))
    is_exact = root * root == squared
    return nearest(Fraction(2 * root + (0 if is_exact else 1), 2 ** (k + 1)))


def _is_special(number):
    return number == 0 or not math.isfinite(number)
