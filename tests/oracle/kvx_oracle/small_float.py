"""FloatFormat: what the codes of a binary floating point type mean, and the nearest code.

Numbers travel as Python floats, which hold every binary32 number exactly, signed zeros and
infinities included; every rounding is decided on `fractions.Fraction`, never by float arithmetic.
"""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

NAN = math.nan
INFINITY = math.inf


@dataclass(frozen=True)
class FloatFormat:
    """Sign, exponent, mantissa (high bit to low); subnormals as in IEEE-754.

    `specials` is what the largest exponent field holds:
    "ieee" infinity and NaNs; "one_nan" numbers and a NaN at mantissa all ones (OFP8 E4M3);
    "none" numbers only (OCP MX E2M1).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str

    @cached_property
    def bits(self):
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self):
        return self.bits // 8

    @cached_property
    def sign_bit(self):
        return 1 << (self.bits - 1)

    @cached_property
    def min_exponent(self):
        """Exponent of the smallest normal number; subnormals share its spacing."""
        return 1 - self.bias

    @cached_property
    def largest_code(self):
        """Code of the largest finite number; the codes 0 to this are the non-negative ones."""
        all_ones = self.sign_bit - 1
        infinity = all_ones - ((1 << self.mantissa_bits) - 1)
        return {"none": all_ones, "one_nan": all_ones - 1, "ieee": infinity - 1}[self.specials]

    @cached_property
    def infinity_code(self):
        assert self.specials == "ieee", f"{self.name} has no infinity"
        return self.largest_code + 1

    @cached_property
    def nan_code(self):
        """The NaN that an encoder writes: mantissa's top bit set, or E4M3's only one."""
        if self.specials == "one_nan":
            return self.sign_bit - 1
        return self.infinity_code | 1 << (self.mantissa_bits - 1)

    @cached_property
    def largest(self):
        return self.magnitude(self.largest_code)

    @property
    def smallest(self):
        """The smallest positive number, a subnormal one."""
        return self.magnitude(1)

    @property
    def smallest_normal(self):
        return Fraction(2) ** self.min_exponent

    @cached_property
    def magnitudes(self):
        """Every non-negative finite value; the index is the code. For types of 8 bits or less."""
        assert self.bits <= 8
        return [self.magnitude(code) for code in range(self.largest_code + 1)]

    def magnitude(self, code):
        """The exact value of a non-negative finite code."""
        significand, exponent = self._split(code)
        return significand * Fraction(2) ** exponent

    def _split(self, code):
        """Whole numbers (s, e): a non-negative finite code means s * 2^e."""
        field = code >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if field == 0:
            return mantissa, self.min_exponent - self.mantissa_bits
        return mantissa + (1 << self.mantissa_bits), field - self.bias - self.mantissa_bits

    def decode(self, code):
        """The number a code stands for."""
        unsigned = code & (self.sign_bit - 1)
        sign = -1.0 if code & self.sign_bit else 1.0
        if unsigned <= self.largest_code:
            return sign * math.ldexp(*self._split(unsigned))  # binary64 holds it
        if self.specials == "ieee" and unsigned == self.infinity_code:
            return sign * INFINITY
        return NAN

    def round(self, exact):
        """`exact` (a Fraction) to the nearest number of this IEEE type, ties to even."""
        return self.decode(self.code_of_rounded(exact.numerator, exact.denominator))

    def code_of_rounded(self, numerator, denominator):
        """The code of the nearest number to numerator / denominator, whole numbers of which the
        second is positive. Codes of one sign count upwards through all numbers, so a mantissa that
        rounds up to a power of two carries into the exponent by itself."""
        assert self.specials == "ieee"
        sign = self.sign_bit if numerator < 0 else 0
        numerator = abs(numerator)
        if numerator == 0:
            return sign
        exponent = max(floor_log2(numerator, denominator), self.min_exponent)
        steps = rounded_quotient(
            *times_power_of_two(numerator, denominator, self.mantissa_bits - exponent)
        )
        code = steps + ((exponent - self.min_exponent) << self.mantissa_bits)
        return sign | min(code, self.infinity_code)

    def encode(self, number):
        """IEEE conversion of a binary32 number: nearest even, overflow to infinity."""
        if math.isnan(number):
            return self.nan_code
        sign = self.sign_bit if math.copysign(1.0, number) < 0 else 0
        if math.isinf(number):
            return sign | self.infinity_code
        return sign | self.code_of_rounded(*abs(number).as_integer_ratio())

    def encode_saturating(self, number):
        """The nearest code of the finite grid; a tie goes to the code whose last bit is 0."""
        assert not math.isnan(number)
        sign = self.sign_bit if math.copysign(1.0, number) < 0 else 0
        if math.isinf(number):
            return sign | self.largest_code
        magnitude = Fraction(abs(number))
        above = bisect.bisect_left(self.magnitudes, magnitude)
        if above == 0:
            return sign
        if above > self.largest_code:
            return sign | self.largest_code
        below = above - 1
        to_below = magnitude - self.magnitudes[below]
        to_above = self.magnitudes[above] - magnitude
        if to_below == to_above:
            return sign | (below if below % 2 == 0 else above)
        return sign | (below if to_below < to_above else above)


def floor_log2(numerator, denominator):
    """The largest e with 2^e <= numerator / denominator, exactly; both are positive."""
    estimate = numerator.bit_length() - denominator.bit_length()
    scaled, unit = times_power_of_two(numerator, denominator, -estimate)
    return estimate if scaled >= unit else estimate - 1


def times_power_of_two(numerator, denominator, exponent):
    if exponent >= 0:
        return numerator << exponent, denominator
    return numerator, denominator << -exponent


def rounded_quotient(numerator, denominator):
    """The nearest whole number, ties to even; neither is negative."""
    quotient, rest = divmod(numerator, denominator)
    is_above = 2 * rest > denominator or (2 * rest == denominator and quotient % 2 == 1)
    return quotient + is_above


E2M1 = FloatFormat("e2m1", 2, 1, 1, "none")  # OCP MX 1.0, table 5
E4M3 = FloatFormat("e4m3", 4, 3, 7, "one_nan")  # OCP OFP8 1.0
E5M2 = FloatFormat("e5m2", 5, 2, 15, "ieee")  # OCP OFP8 1.0
F16 = FloatFormat("f16", 5, 10, 15, "ieee")  # IEEE-754 binary16
BF16 = FloatFormat("bf16", 8, 7, 127, "ieee")  # the upper half of binary32
F32 = FloatFormat("f32", 8, 23, 127, "ieee")  # IEEE-754 binary32


class E8M0:
    """OCP MX 1.0, 5.4.1: a byte b means 2^(b - 127); 0xFF is NaN. No sign, no zero."""

    name = "e8m0"
    bytes = 1
    nan_code = 0xFF
    min_exponent = -127
    max_exponent = 127

    @staticmethod
    def decode(code):
        return NAN if code == 0xFF else math.ldexp(1.0, code - 127)

    @classmethod
    def code_of_exponent(cls, exponent):
        return min(max(exponent, cls.min_exponent), cls.max_exponent) + 127


FLOAT_TYPES = {fmt.name: fmt for fmt in (F32, F16, BF16, E4M3, E5M2, E2M1, E8M0)}
