"""Error feedback: numbers rounded one after another, errors passed on (docs/numbers.md 8)."""

from . import binary32
from .affine import nearest_code
from .groups import reciprocal

LIMIT = 2.0**60


def applies_to(numbers):
    """False of a row with a NaN, too: it compares as not smaller."""
    return all(abs(x) < LIMIT for x in numbers)


def feed_back(numbers, weights, round_number):
    """The row's codes. weights[i][j], j > i: how much of number i's error number j takes over.
    round_number(index, number) returns the code and the value that it stands for."""
    numbers, codes = list(numbers), []
    for i, row in enumerate(weights):
        code, value = round_number(i, numbers[i])
        codes.append(code)
        error = min(max(binary32.sub(numbers[i], value), -LIMIT), LIMIT)
        for j in range(i + 1, len(numbers)):
            numbers[j] = binary32.add(numbers[j], binary32.mul(error, row[j]))
    return codes


def grouped_rounding(numbers, size, steps, element):
    """How the numbers of a row of groups are rounded: each under its group's step."""
    inverses = [reciprocal(step) if step else binary32.FLT_MAX for step in steps]
    is_zero = [
        all(x == 0 for x in numbers[first : first + size])
        for first in range(0, len(numbers), size)
    ]

    def round_number(index, number):
        group = index // size
        if is_zero[group]:
            return 0, 0.0
        code = element.encode(binary32.mul(number, inverses[group]))
        return code, binary32.mul(element.decode(code), steps[group])

    return round_number


def affine_rounding(scale_code, zero_code, param_type, bits):
    """How the numbers of an affine row are rounded; a code's value is the one attention uses."""

    def in_type(number):
        return param_type.decode(param_type.encode(number))

    scale, zero = param_type.decode(scale_code), param_type.decode(zero_code)
    inverse = in_type(binary32.div(1.0, scale))

    def round_number(_, number):
        above = in_type(binary32.sub(in_type(number), zero))
        code = nearest_code(in_type(binary32.mul(above, inverse)), (1 << bits) - 1)
        return code, binary32.add(binary32.mul(float(code), scale), zero)

    return round_number
