"""dual.json: blocks of the dual-scale formats (docs/numbers.md 9)."""

from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.dual_scale import FORMATS, quantize_block

from .fed import weights_of
from .inputs import Random
from .json_text import words

INFINITY, NAN = float("inf"), float("nan")


def normal_block(tokens, head_dim, seed, magnitude="1"):
    """Numbers of channels that differ in size and mean, in tokens that differ in size."""
    random = Random(f"dual {tokens} {head_dim} {seed}")
    sizes = [1 + abs(random.normal()) for _ in range(head_dim)]
    means = [random.normal() for _ in range(head_dim)]
    rows = []
    for _ in range(tokens):
        size = (Fraction(1, 4) + abs(random.normal())) * Fraction(magnitude)
        rows.append([binary32.nearest(size * (m + s * random.normal())) for m, s in zip(means, sizes)])
    return rows


def with_tokens(rows, changed):
    return [changed.get(t, row) for t, row in enumerate(rows)]


def special_blocks(head_dim):
    """Tokens and blocks that no model has."""
    rows = normal_block(5, head_dim, "special")
    zeros = [0.0] * head_dim
    spike = [1.0] + [0.0] * (head_dim - 1)
    yield "all_zero", [zeros] * 4
    yield "zero_tokens", with_tokens(rows, {0: zeros, 3: zeros})
    yield "one_token", rows[:1]
    yield "equal_tokens", [rows[0]] * 3
    yield "constant", [[0.75] * head_dim] * 3
    yield "constant_channel", [[5.0] + row[1:] for row in rows]
    yield "spike", with_tokens(rows, {3: spike})
    yield "large_spike", with_tokens(rows, {3: [2.0**20 * x for x in spike]})
    yield "nan_and_infinity", with_tokens(
        rows, {1: [NAN] + rows[1][1:], 4: rows[4][:-1] + [-INFINITY]}
    )
    yield "all_nan", [[NAN] * head_dim] * 2
    yield "beyond_the_limit", with_tokens(rows, {2: [2.0**100] + rows[2][1:]})
    yield "large", normal_block(3, head_dim, "large", 2**95)
    yield "tiny", normal_block(3, head_dim, "tiny", Fraction(1, 2**120))
    yield "denormal", normal_block(3, head_dim, "denormal", Fraction(1, 2**140))


def weights_with_diagonal(head_dim):
    """Those of feedback.json, with weights of the errors on the diagonal."""
    random = Random(f"error weights {head_dim}")
    weights = weights_of(head_dim)
    for i in range(head_dim):
        weights[i][i] = binary32.nearest(Fraction(1, 8) + abs(random.normal()))
    return weights


def named_weights(head_dim):
    return {"none": None, "above": weights_of(head_dim), "whole": weights_with_diagonal(head_dim)}


def blocks():
    """(name, rows, names of weights, names of formats)"""
    every = tuple(FORMATS)
    for name, rows in special_blocks(64):
        yield name, rows, ("none",), ("int2_dual",)
    yield "normal", normal_block(64, 64, "whole"), ("none",), ("int2_dual",)
    yield "normal", normal_block(6, 128, "wide"), ("none",), every
    yield "normal", normal_block(5, 64, "few"), ("above", "whole"), every
    yield "normal", normal_block(3, 128, "fed"), ("whole",), ("int3_dual",)
    special = dict(special_blocks(64))
    yield "nan_and_infinity", special["nan_and_infinity"][:3], ("whole",), ("int2_dual",)


def bits_of(rows):
    return words(binary32.to_bits(x) for row in rows for x in row)


def cases():
    for name, rows, used, formats in blocks():
        head_dim = len(rows[0])
        for weights in used:
            for format_name in formats:
                block = quantize_block(format_name, rows, named_weights(head_dim)[weights])
                yield {
                    "format": format_name,
                    "block": name,
                    "head_dim": head_dim,
                    "num_tokens": len(rows),
                    "weights": weights,
                    "input": bits_of(rows),
                    "codes": block.codes.hex(),
                    "scales": block.scales.hex(),
                    "channels": block.channels.hex(),
                    "decoded": bits_of(block.decoded) if len(rows) < 9 else "",
                }


def files():
    shared = [
        {
            "head_dim": d,
            "weights": words(binary32.to_bits(x) for row in weights_with_diagonal(d) for x in row),
        }
        for d in (64, 128)
    ]
    yield "dual.json", {"weights": shared, "cases": list(cases())}
