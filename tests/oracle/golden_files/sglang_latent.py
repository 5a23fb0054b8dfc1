"""sglang_latent.json: latent rows as SGLang's FP4 cache keeps them, codes and scales in two buffers.

The rule is `KVFP4QuantizeUtil` of sgl-project/sglang, python/sglang/srt/layers/quantization/
kvfp4_tensor.py: E2M1 in groups of 16 under 2^e, e the least with amax <= 6 * 2^e, stored as a byte
e + 127; a number in the middle of two codes takes the larger one, where docs/numbers.md takes the
even one. So rows with such numbers are read alike and written apart: `has_ties` marks them.
"""

from fractions import Fraction

from kvx_oracle import binary32

from . import inputs
from .json_text import words

LATENT, ROTARY, GROUP = 512, 64, 16
MAGNITUDES = [Fraction(x, 2) for x in (0, 1, 2, 3, 4, 6, 8, 12)]
BOUNDS = [Fraction(x, 4) for x in (1, 3, 5, 7, 10, 14, 20)]


def exponent_of(group):
    """The reference takes log2 of at least 1e-10, so a group of zeros has -33."""
    largest = max(max(abs(Fraction(x)) for x in group) / 6, Fraction(1, 10**10))
    exponent = -40
    while Fraction(2) ** exponent < largest:
        exponent += 1
    return exponent


def code_of(number, exponent):
    scaled = Fraction(number) / Fraction(2) ** exponent
    magnitude = sum(abs(scaled) >= bound for bound in BOUNDS)
    return magnitude | (8 if scaled < 0 else 0)


def value_of(code, exponent):
    magnitude = MAGNITUDES[code & 7] * Fraction(2) ** exponent
    return float(-magnitude if code & 8 else magnitude)


def has_ties(row, exponents):
    return any(
        abs(Fraction(x)) / Fraction(2) ** exponents[d // GROUP] in BOUNDS for d, x in enumerate(row)
    )


def case(row):
    exponents = [exponent_of(row[d : d + GROUP]) for d in range(0, len(row), GROUP)]
    codes = [code_of(x, exponents[d // GROUP]) for d, x in enumerate(row)]
    packed = bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2]))
    decoded = [value_of(code, exponents[d // GROUP]) for d, code in enumerate(codes)]
    return {
        "has_ties": has_ties(row, exponents),
        "row": words(binary32.to_bits(x) for x in row),
        "kv_buffer": packed.hex(),
        "kv_scale_buffer": bytes(e + 127 for e in exponents).hex(),
        "decoded": words(binary32.to_bits(x) for x in decoded),
    }


def files():
    dim = LATENT + ROTARY
    rows = [
        inputs.normal(dim, "1.0", "sglang latent"),
        inputs.normal(dim, "0.02", "sglang latent small"),
        inputs.with_outliers(dim, "sglang latent outliers"),
    ]
    tied = inputs.normal(dim, "1.0", "sglang latent ties")
    tied[:GROUP] = [6.0] + [float(b) * (-1) ** i for i, b in enumerate(BOUNDS + BOUNDS)] + [0.0]
    cases = [case(row) for row in (*rows, tied)]
    yield "sglang_latent.json", {"latent": LATENT, "rotary": ROTARY, "rows": cases}
