"""Elements: how one scaled number becomes one code and back."""

import math
from fractions import Fraction

from .small_float import E2M1, E4M3, E5M2


class IntElement:
    """A symmetric integer, two's complement; the most negative code is never written."""

    def __init__(self, bits):
        self.name = f"int{bits}"
        self.bits = bits
        self.largest = (1 << (bits - 1)) - 1
        self.mask = (1 << bits) - 1

    def encode(self, product):
        if math.isinf(product):
            rounded = self.largest if product > 0 else -self.largest
        else:
            rounded = round(Fraction(product))  # half to even
        return min(max(rounded, -self.largest), self.largest) & self.mask

    def decode(self, code):
        sign = 1 << (self.bits - 1)
        return float((code ^ sign) - sign)

    def nonfinite_code(self, number):
        """Integers have no NaN or infinity: no code, and the caller counts the element."""
        return None


class FloatElement:
    """A small float; a product outside its range becomes its largest number."""

    def __init__(self, fmt):
        self.name = fmt.name
        self.bits = fmt.bits
        self.fmt = fmt
        self.largest = int(fmt.largest)

    def encode(self, product):
        return self.fmt.encode_saturating(product)

    def decode(self, code):
        return self.fmt.decode(code)

    def nonfinite_code(self, number):
        """What stands for a NaN or infinity when the scale is given."""
        if self.fmt is E4M3:
            return 0x7F
        if self.fmt is E5M2:
            if math.isnan(number):
                return 0x7F
            return 0x7C if number > 0 else 0xFC
        return None


INT8 = IntElement(8)
INT4 = IntElement(4)
FP4 = FloatElement(E2M1)
FP8_E4M3 = FloatElement(E4M3)
FP8_E5M2 = FloatElement(E5M2)
ELEMENTS = {element.name: element for element in (INT8, INT4, FP4, FP8_E4M3, FP8_E5M2)}
