"""latent_fp8.json: latent rows as vLLM's `fp8_ds_mla` cache and FlashMLA's fp8 cache keep them.

A record of 656 bytes: 512 E4M3 codes, an f32 scale for each 128 of them, 64 rotary numbers in BF16.
The rule is `concat_and_cache_ds_mla_kernel` of vllm-project/vllm, csrc/cache_kernels.cu: a scale is
max(amax / 448, FLT_MIN) and a code the nearest to number / scale. kvx multiplies by the scale's
reciprocal, so a quotient within an ulp of the middle of two codes may take the other one: none of
these rows has such a number.
"""

from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import Input, Options, quantize_row
from kvx_oracle.small_float import BF16, E4M3

from . import inputs
from .json_text import words

LATENT, ROTARY, GROUP = 512, 64, 128
FLT_MIN = float(Fraction(2) ** -126)


def f32_bytes(number):
    return binary32.to_bits(number).to_bytes(4, "little")


def latent_part(numbers):
    """(codes, scales, decoded) by vLLM's rule."""
    codes, scales, decoded = [], [], []
    for first in range(0, LATENT, GROUP):
        group = numbers[first : first + GROUP]
        scale = max(binary32.div(max(map(abs, group)), 448.0), FLT_MIN)
        of_group = [E4M3.encode_saturating(binary32.div(x, scale)) for x in group]
        codes += of_group
        scales.append(scale)
        decoded += [binary32.mul(E4M3.decode(code), scale) for code in of_group]
    return codes, scales, decoded


def case(numbers):
    stored = [BF16.encode(x) for x in numbers]
    row = [BF16.decode(code) for code in stored]
    codes, scales, decoded = latent_part(row[:LATENT])
    rotary = b"".join(code.to_bytes(2, "little") for code in stored[LATENT:])
    after_codes = b"".join(map(f32_bytes, scales)) + rotary
    ours = quantize_row("fp8_e4m3", Input(BF16, tuple(stored[:LATENT])), Options(group_size=GROUP))
    assert ours.codes + ours.scales + rotary == bytes(codes) + after_codes
    return {
        "row": words(map(binary32.to_bits, row)),
        "record": (bytes(codes) + after_codes).hex(),
        "decoded": words(map(binary32.to_bits, decoded + row[LATENT:])),
    }


def files():
    dim = LATENT + ROTARY
    rows = [
        inputs.normal(dim, "1.0", "fp8 latent"),
        inputs.normal(dim, "0.02", "fp8 latent small"),
        inputs.with_outliers(dim, "fp8 latent outliers"),
    ]
    yield "latent_fp8.json", {"latent": LATENT, "rotary": ROTARY, "rows": list(map(case, rows))}
