"""codes.json: single numbers and single codes of every element and scale type."""

import math
from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.elements import ELEMENTS
from kvx_oracle.groups import ScaleRule
from kvx_oracle.small_float import BF16, E4M3, E8M0, F16, F32

from .inputs import Random
from .json_text import words

INFINITE_BITS = (0x7F800000, 0xFF800000)
NAN_BITS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FA12345, 0xFF9ABCDE)


def with_neighbours(numbers):
    """Bits of each positive number, its two binary32 neighbours, and all their negatives."""
    found = {}
    for number in numbers:
        bits = binary32.to_bits(number)
        for near in (bits - 1, bits, bits + 1):
            if 0 <= near < INFINITE_BITS[0]:
                found[near] = None
                found[near | 1 << 31] = None
    return list(found)


def encode_points(element):
    """Every code's value and every middle between two, what lies just beside them, and extremes."""
    if element.name.startswith("int"):
        values = [Fraction(n) for n in range(element.largest + 1)]
    else:
        values = element.fmt.magnitudes
    middles = [(a + b) / 2 for a, b in zip(values, values[1:])]
    beyond = [element.largest * Fraction(n, 16) for n in (17, 18, 24, 32)] + [F32.largest]
    beyond.append(values[-1] + (values[-1] - values[-2]) / 2)  # 464 in E4M3, 61440 in E5M2
    tiny = [F32.smallest, F32.smallest_normal]
    return with_neighbours([binary32.nearest(x) for x in (*values, *middles, *beyond, *tiny)])


def element_case(element):
    points = encode_points(element) + list(INFINITE_BITS)
    encoded = [element.encode(binary32.from_bits(bits)) for bits in points]
    decoded = [binary32.to_bits(element.decode(code)) for code in range(1 << element.bits)]
    return {
        "type": element.name,
        "bits": element.bits,
        "decode": words(decoded),
        "encode_input": words(points),
        "encode_code": words(encoded, element.bits),
    }


def given_nonfinite_case(element):
    """What an element that is NaN or infinite becomes when its scale is given."""
    points = INFINITE_BITS + NAN_BITS[:2]
    codes = [element.nonfinite_code(binary32.from_bits(bits)) for bits in points]
    return {
        "type": element.name,
        "input": words(points),
        "code": words([code or 0 for code in codes], element.bits),
        "counted": codes[0] is None,
    }


def sixteen_bit_case(fmt):
    """F16 and BF16: every binade's ends and ties as binary32, NaNs with payloads, all decoded."""
    random = Random(fmt.name)
    patterns = {0, 1, 2, 3, fmt.largest_code, fmt.largest_code - 1}
    for field in range(1 << fmt.exponent_bits):
        first = field << fmt.mantissa_bits
        patterns |= {first, first + 1, first + (1 << fmt.mantissa_bits) - 1, first + random.bits(7)}
    finite = sorted(code for code in patterns if code <= fmt.largest_code)
    values = [fmt.magnitude(code) for code in finite]
    middles = [(v + fmt.magnitude(c + 1)) / 2 for c, v in zip(finite, values) if v != fmt.largest]
    spacing = fmt.largest - fmt.magnitude(fmt.largest_code - 1)
    overflow = [fmt.largest + spacing / 2] if fmt is F16 else []  # 65520; beyond binary32 in BF16
    inside = [x for x in (*values, *middles, *overflow) if x <= F32.largest]
    points = with_neighbours(
        [binary32.nearest(x) for x in (*inside, F32.smallest, F32.smallest_normal, F32.largest)]
    )
    points += [*INFINITE_BITS, *NAN_BITS]
    codes = [encode_bits(fmt, bits) for bits in points]
    samples = [*finite, fmt.infinity_code, fmt.nan_code]
    samples += [code | fmt.sign_bit for code in samples]
    return {
        "type": fmt.name,
        "bits": 16,
        "encode_input": words(points),
        "encode_code": words(codes, 16),
        "decode_code": words(samples, 16),
        "decode": words([decode_bits(fmt, code) for code in samples]),
    }


def encode_bits(fmt, bits):
    return fmt.encode(binary32.from_bits(bits))


def decode_bits(fmt, code):
    number = fmt.decode(code)
    if math.isnan(number):
        return F32.nan_code | (1 << 31 if code & fmt.sign_bit else 0)
    return binary32.to_bits(number)


def e8m0_case():
    """Every byte decoded, and both rules around 6 * 2^e, 2^e and 1.5 * 2^e for every e."""
    amaxes = {}
    for exponent in range(-149, 128):
        for significand in (1, Fraction(5, 4), Fraction(3, 2), Fraction(7, 4)):
            exact = significand * Fraction(2) ** exponent
            bits = binary32.to_bits(binary32.nearest(exact))
            for near in (bits - 1, bits, bits + 1):
                if 0 < near < INFINITE_BITS[0]:
                    amaxes[near] = None
    rules = {}
    for kind in ("e8m0_ceil", "e8m0_floor"):
        rule = ScaleRule(kind, E8M0, ELEMENTS["e2m1"])
        rules[kind] = words([rule.scale_code(binary32.from_bits(bits)) for bits in amaxes], 8)
    decoded = [binary32.to_bits(E8M0.decode(code)) for code in range(256)]
    return {"type": "e8m0", "bits": 8, "decode": words(decoded), "amax": words(amaxes), **rules}


def computed_scale_case(element, scale_type, tensor_scale=1.0):
    """The stored scale of a group from its amax, for ordinary and extreme amaxes."""
    random = Random(f"{element.name} {scale_type.name}")
    kind = "tensor" if scale_type is E4M3 else "amax"
    rule = ScaleRule(kind, scale_type, element, tensor_scale)
    edges = [element.largest * Fraction(2) ** e for e in range(-30, 30, 3)]
    edges += [element.largest * Fraction(x) for x in (scale_type.largest, scale_type.smallest)]
    numbers = [binary32.nearest(min(max(x, F32.smallest), F32.largest)) for x in edges]
    positive = [bits for bits in with_neighbours(numbers) if 0 < bits < INFINITE_BITS[0]]
    positive += [1, 0x00800000, 0x7F7FFFFF]
    positive += [0x30000000 + random.bits(28) for _ in range(40)]
    codes = [rule.scale_code(binary32.from_bits(bits)) for bits in positive]
    return {
        "element": element.name,
        "scale_type": scale_type.name,
        "tensor_scale": words([binary32.to_bits(tensor_scale)]),
        "amax": words(positive),
        "scale_code": words(codes, 8 * scale_type.bytes),
    }


def files():
    e2m1, int8, int4 = ELEMENTS["e2m1"], ELEMENTS["int8"], ELEMENTS["int4"]
    scales = [(e, t) for e in (int8, int4, e2m1) for t in (F16, F32)]
    scales += [(ELEMENTS["e4m3"], F32), (ELEMENTS["e5m2"], F32), (e2m1, E4M3)]
    computed = [computed_scale_case(element, fmt) for element, fmt in scales]
    for text in ("0.01", "3e-6", "1e30", "1e-44"):
        computed.append(computed_scale_case(e2m1, E4M3, binary32.nearest(Fraction(text))))
    yield "codes.json", {
        "elements": [element_case(element) for element in ELEMENTS.values()],
        "given_nonfinite": [given_nonfinite_case(element) for element in ELEMENTS.values()],
        "sixteen_bit": [sixteen_bit_case(fmt) for fmt in (F16, BF16)],
        "e8m0": e8m0_case(),
        "computed_scales": computed,
    }
