"""Groups: one scale for some neighbours of a row, and their codes (docs/numbers.md 2 and 3)."""

import math
from dataclasses import dataclass
from fractions import Fraction

from . import binary32
from .small_float import BF16, E4M3, E8M0, F32, floor_log2

# The smallest scale that a computed one may have, as a code. F32 and BF16 stop at their smallest
# normal number so that its reciprocal is finite; F16 and E4M3 at their smallest subnormal one.
SMALLEST_SCALE_CODE = {
    "f16": 1,
    "f32": 1 << F32.mantissa_bits,
    "bf16": 1 << BF16.mantissa_bits,
    "e4m3": 1,
}


@dataclass(frozen=True)
class ScaleRule:
    """How a group's scale is made from its amax.

    kind: "amax", "tensor" (a second-level scale divides first), "e8m0_ceil", "e8m0_floor".
    """

    kind: str
    scale_type: object  # FloatFormat or E8M0
    element: object
    tensor_scale: float = 1.0

    def scale_code(self, amax):
        """The stored scale of a group whose largest magnitude is `amax`, finite and not 0."""
        if self.kind == "e8m0_ceil":
            return E8M0.code_of_exponent(smallest_exponent_that_holds(amax, self.element.largest))
        if self.kind == "e8m0_floor":
            return E8M0.code_of_exponent(floor_log2(*amax.as_integer_ratio()) - 2)
        if self.kind == "tensor":
            divisor = binary32.mul(float(self.element.largest), self.tensor_scale)
        else:
            divisor = float(self.element.largest)
        return clamped_scale_code(binary32.div(amax, divisor), self.scale_type)

    def step(self, scale_code):
        scale = self.scale_type.decode(scale_code)
        return binary32.mul(scale, self.tensor_scale) if self.kind == "tensor" else scale


def smallest_exponent_that_holds(amax, largest):
    """The smallest e with amax <= largest * 2^e."""
    exact = Fraction(amax) / largest
    exponent = floor_log2(exact.numerator, exact.denominator)
    return exponent if exact == Fraction(2) ** exponent else exponent + 1


def clamped_scale_code(scale, scale_type):
    """A positive scale rounded to its stored type, held inside [smallest, largest]. Codes of
    positive numbers are in the numbers' order."""
    code = scale_type.encode_saturating(scale) if scale_type is E4M3 else scale_type.encode(scale)
    return min(max(code, SMALLEST_SCALE_CODE[scale_type.name]), scale_type.largest_code)


@dataclass
class Group:
    scale_code: int
    codes: list
    decoded: list  # binary32 numbers
    nonfinite_count: int = 0


def reciprocal(step):
    return min(binary32.div(1.0, step), binary32.FLT_MAX)


def decode_codes(codes, element, step):
    return [binary32.mul(element.decode(code), step) for code in codes]


def quantize_with_scale(numbers, scale_code, rule):
    """Codes of finite numbers under a stored scale."""
    step = rule.step(scale_code)
    inverse = reciprocal(step)
    codes = [rule.element.encode(binary32.mul(x, inverse)) for x in numbers]
    return Group(scale_code, codes, decode_codes(codes, rule.element, step))


def quantize_computed(numbers, rule, choose):
    """A group that finds its own scale; `choose(numbers, amax, rule)` returns the best Group."""
    if any(not math.isfinite(x) for x in numbers):
        return uniform_group(rule.scale_type.nan_code, numbers, rule)
    amax = max(abs(x) for x in numbers)
    if amax == 0:
        return uniform_group(0, numbers, rule)
    return choose(numbers, amax, rule)


def uniform_group(scale_code, numbers, rule):
    codes = [0] * len(numbers)
    return Group(scale_code, codes, decode_codes(codes, rule.element, rule.step(scale_code)))


def quantize_given(numbers, scale_code, rule):
    """A group whose scale came from calibration; numbers may be NaN or infinite."""
    step = rule.step(scale_code)
    inverse = reciprocal(step)
    codes, nonfinite_count = [], 0
    for x in numbers:
        if math.isfinite(x):
            codes.append(rule.element.encode(binary32.mul(x, inverse)))
            continue
        code = rule.element.nonfinite_code(x)
        nonfinite_count += code is None
        codes.append(code or 0)
    return Group(scale_code, codes, decode_codes(codes, rule.element, step), nonfinite_count)
