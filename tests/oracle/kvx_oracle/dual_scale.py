"""Dual-scale blocks: whole blocks of 2, 3 or 4-bit codes (docs/numbers.md, section 9)."""

import math
from dataclasses import dataclass
from fractions import Fraction

from . import feedback
from .binary32 import FLT_MAX, add, div, mul, nearest, sqrt, sub
from .packing import pack_nibbles, pack_quarters, pack_three_bits
from .small_float import E4M3, E8M0

LIMIT = 2.0**100
NAN_SCALE = E4M3.nan_code
SIGN = 0x80


@dataclass(frozen=True)
class Dual:
    name: str
    bits: int
    covered: str  # of a channel's range by the codes
    zero_unit: float  # in steps
    pack: object

    @property
    def top(self):
        return (1 << self.bits) - 1

    def offset(self, zero):
        return zero * self.zero_unit - self.top / 2


FORMATS = {
    f.name: f
    for f in (
        Dual("int4_dual", 4, "1", 1 / 2, pack_nibbles),
        Dual("int3_dual", 3, "0.97", 1 / 4, pack_three_bits),
        Dual("int2_dual", 2, "0.85", 1 / 8, pack_quarters),
    )
}


@dataclass
class Block:
    codes: bytes  # row after row
    scales: bytes  # one a token
    channels: bytes  # steps, then zeros
    decoded: list  # [tokens][head_dim]


def sum_in_lanes(terms):
    """Sixteen running sums, then halves."""
    lanes = [0.0] * 16
    for i, term in enumerate(terms):
        lanes[i % 16] = add(lanes[i % 16], term)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [add(lanes[i], lanes[i + half]) for i in range(half)]
    return lanes[0]


def sum_in_order(terms):
    total = 0.0
    for term in terms:
        total = add(total, term)
    return total


def exponent_of(number):
    return max(math.frexp(number)[1] - 1, -126)


def spread(numbers, total, least_part):
    """The standard deviation, but at least a part of the root mean square."""
    n = len(numbers)
    mean = div(total(numbers), float(n))
    squares = total([mul(x, x) for x in numbers])
    about_mean = total([mul(d, d) for d in (sub(x, mean) for x in numbers)])
    variance = div(about_mean, float(max(n - 1, 1)))
    return sqrt(max(variance, mul(div(squares, float(n)), least_part), 2.0**-40))


def balance(rows):
    """Two rounds: the spread of every channel under the tokens' spreads, then of every token."""
    inverses = [1.0] * len(rows)
    for _ in range(2):
        divided = [[mul(x, inverse) for x in row] for row, inverse in zip(rows, inverses)]
        by_channel = [spread(list(c), sum_in_order, 2.0**-8) for c in zip(*divided)]
        shares = [div(1.0, s) for s in by_channel]
        by_token = [
            spread([mul(x, s) for x, s in zip(row, shares)], sum_in_lanes, 2.0**-6) for row in rows
        ]
        inverses = [div(1.0, s) for s in by_token]
    return by_token


def first_scales(spreads):
    squares = sum_in_order([mul(s, s) for s in spreads])
    factor = div(16.0, sqrt(div(squares, float(len(spreads)))))
    return [E4M3.encode_saturating(mul(s, factor)) for s in spreads]


@dataclass
class Channels:
    """steps and offsets in the unit of the block, and all as it is stored."""

    steps: list
    offsets: list
    stored: bytes
    factor: float  # as stored


def make_channels(fmt, ranges, exponent):
    kept = nearest(Fraction(fmt.covered))
    of_range = div(kept, float(fmt.top))
    of_middle = div(1.0, mul(127.0, fmt.zero_unit))
    middles = [mul(add(high, low), 0.5) for low, high in ranges]
    wanted = [
        max(mul(sub(high, low), of_range), mul(abs(m), of_middle))
        for (low, high), m in zip(ranges, middles)
    ]
    factor_code = max(exponent_of(max(wanted)) - 7 + exponent + 127, 0)
    factor = 2.0 ** (factor_code - 127 - exponent)
    step_codes = [E4M3.encode_saturating(mul(w, 1.0 / factor)) for w in wanted]
    steps = [mul(E4M3.decode(code), factor) for code in step_codes]
    zeros = [zero_of(fmt, m, step) for m, step in zip(middles, steps)]
    signs = [SIGN * (factor_code >> i & 1) if i < 8 else 0 for i in range(len(steps))]
    stored = bytes(c | s for c, s in zip(step_codes, signs)) + bytes(z & 0xFF for z in zeros)
    return Channels(steps, [fmt.offset(z) for z in zeros], stored, E8M0.decode(factor_code))


def zero_of(fmt, middle, step):
    if step == 0:
        return 0
    zero = div(middle, mul(step, fmt.zero_unit))
    return round(Fraction(min(max(zero, -127.0), 127.0)))


def inverse_of(step):
    return min(div(1.0, step), FLT_MAX) if step > 0 else 0.0


def nearest_code(fmt, channels, c, inverse_scale, number):
    place = sub(mul(mul(number, inverse_scale), inverse_of(channels.steps[c])), channels.offsets[c])
    return round(Fraction(min(max(place, 0.0), float(fmt.top))))


def value_of(channels, c, scale, code):
    return mul(scale, mul(channels.steps[c], add(float(code), channels.offsets[c])))


def round_row(fmt, channels, row, scale, weights):
    """The row's codes, and the code of its scale refitted to them."""
    inverse = div(1.0, scale)
    errors = []

    def round_number(c, number):
        code = nearest_code(fmt, channels, c, inverse, number)
        value = value_of(channels, c, scale, code)
        errors.append(min(max(sub(number, value), -feedback.LIMIT), feedback.LIMIT))
        return code, value

    if weights is None:
        codes = [round_number(c, x)[0] for c, x in enumerate(row)]
    else:
        codes = feedback.feed_back(row, weights, round_number)
    if weights is not None and weights[0][0] > 0:
        diagonal = [weights[c][c] for c in range(len(row))]
        sums = fold(row, weights)
        squares = sum_in_lanes([mul(mul(d, s), s) for d, s in zip(diagonal, sums)])
        lost = sum_in_lanes([mul(mul(d, s), e) for d, s, e in zip(diagonal, sums, errors)])
        products = sub(squares, lost)
    else:
        values = [value_of(channels, c, scale, code) for c, code in enumerate(codes)]
        squares = sum_in_lanes([mul(x, x) for x in row])
        products = sum_in_lanes([mul(x, v) for x, v in zip(row, values)])
    ratio = div(squares, products) if products > 0 else nearest(Fraction("1.6"))
    ratio = min(max(ratio, nearest(Fraction("0.7"))), nearest(Fraction("1.6")))
    return codes, E4M3.encode_saturating(mul(scale, ratio))


def fold(row, weights):
    """What the errors would be if every number were rounded to 0."""
    sums = list(row)
    for i, row_of_weights in enumerate(weights):
        sums[i] = min(max(sums[i], -feedback.LIMIT), feedback.LIMIT)
        for j in range(i + 1, len(sums)):
            sums[j] = add(sums[j], mul(sums[i], row_of_weights[j]))
    return sums


def quantize_block(name, rows, weights=None):
    """rows: [tokens][head_dim] numbers of binary32."""
    fmt = FORMATS[name]
    head_dim = len(rows[0])
    is_number = [all(abs(x) < LIMIT for x in row) for row in rows]
    scales = [0 if is_one else NAN_SCALE for is_one in is_number]
    codes = [[0] * head_dim for _ in rows]
    there = [t for t, row in enumerate(rows) if is_number[t] and any(x != 0 for x in row)]
    channels = Channels([0.0] * head_dim, [fmt.offset(0)] * head_dim, bytes(2 * head_dim), 0.0)
    if there:
        exponent = exponent_of(max(abs(x) for t in there for x in rows[t]))
        unit = 2.0**-exponent
        scaled = {t: [mul(x, unit) for x in rows[t]] for t in there}
        for t, code in zip(there, first_scales(balance([scaled[t] for t in there]))):
            scales[t] = code
        kept = [t for t in there if scales[t] != 0]
        inverses = {t: div(1.0, E4M3.decode(scales[t])) for t in kept}
        divided = [[mul(x, inverses[t]) for x in scaled[t]] for t in kept]
        ranges = [(min(column), max(column)) for column in zip(*divided)]
        channels = make_channels(fmt, ranges, exponent)
        for t in kept:
            codes[t], scales[t] = round_row(
                fmt, channels, scaled[t], E4M3.decode(scales[t]), weights
            )
    packed = b"".join(fmt.pack(row) for row in codes)
    decoded = decode_block(fmt, channels.stored, scales, codes)
    return Block(packed, bytes(scales), channels.stored, decoded)


def decode_block(fmt, stored, scales, codes):
    head_dim = len(stored) // 2
    factor = E8M0.decode(sum((stored[i] >> 7) << i for i in range(8)))
    steps = [mul(E4M3.decode(byte & ~SIGN & 0xFF), factor) for byte in stored[:head_dim]]
    zeros = [byte - 256 if byte >= 128 else byte for byte in stored[head_dim:]]
    channels = Channels(steps, [fmt.offset(z) for z in zeros], stored, factor)
    return [
        [value_of(channels, c, E4M3.decode(scale), code) for c, code in enumerate(row)]
        for scale, row in zip(scales, codes)
    ]
