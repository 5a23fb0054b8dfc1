"""Published rules of quantised KV caches, as functions from rows to the rows that are read back.

Each rule is written from its published description or from llama.cpp's format, for rows of one
block: a tensor [heads, blocks, tokens, head_dim] of K (after RoPE) or V. It returns what attention
would read, in float32, and nothing is packed. `bits` counts every scale and zero that the rule
stores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    name: str
    bits: Callable[[int, int], float]  # of a number, by (head_dim, tokens of a block)
    quantise_k: Callable[[torch.Tensor], torch.Tensor]
    quantise_v: Callable[[torch.Tensor], torch.Tensor]


def f16(x):
    return x.half().float()


def hadamard(n):
    """Sylvester's, normalised: its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(n)


def min_max(x, bits, dim):
    """Asymmetric rounding to nearest between the smallest and the largest along `dim`; the step and
    the zero are stored in 16 bits."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step, zero = f16((high - low) / (2**bits - 1)).clamp_min(1e-8), f16(low)
    return ((x - zero) / step).round().clamp(0, 2**bits - 1) * step + zero


def in_groups(x, length, rule):
    """The rule on runs of `length` numbers of a row."""
    return rule(x.unflatten(-1, (-1, length))).flatten(-2)


# --- llama.cpp: blocks of 32 numbers of a row -------------------------------------------------


def llama_q8_0(x):
    """Halves are rounded away from zero, as C's roundf does; codes follow from the exact step."""
    step = x.abs().amax(-1, keepdim=True) / 127
    scaled = torch.where(step == 0, 0.0, x / step)
    return scaled.sign() * (scaled.abs() + 0.5).floor() * f16(step)


def llama_symmetric(x, bits):
    """q4_0 and q5_0: the number of the largest magnitude, with its sign, is the lowest code."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step = largest / -(2 ** (bits - 1))
    inverse = torch.where(step == 0, 0.0, 1 / step)
    codes = (x * inverse + 2 ** (bits - 1) + 0.5).floor().clamp(0, 2**bits - 1)
    return (codes - 2 ** (bits - 1)) * f16(step)


def llama_affine(x, bits):
    """q4_1 and q5_1: a step and the minimum."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    inverse = torch.where(step == 0, 0.0, 1 / step)
    codes = ((x - low) * inverse + 0.5).floor().clamp(0, 2**bits - 1)
    return codes * f16(step) + f16(low)


def llama(name, bits, quantise):
    def rows(x):
        return in_groups(x, 32, quantise)

    return Rule(f"llama.cpp {name}", lambda head_dim, block: bits, rows, rows)


# --- KIVI (Liu et al. 2024): K by channel over tokens, V by token -----------------------------


def kivi(bits, group):
    """K: groups of `group` tokens of one channel; V: groups of `group` numbers of one token."""

    def keys(x):
        tokens = x.transpose(-1, -2)
        return in_groups(tokens, group, lambda g: min_max(g, bits, -1)).transpose(-1, -2)

    def values(x):
        return in_groups(x, group, lambda g: min_max(g, bits, -1))

    name = f"KIVI, {bits} bits, groups of {group}"
    return Rule(name, lambda head_dim, block: bits + 32 / group, keys, values)


# --- KVarN: rotation, variance normalisation along both axes, min/max rounding ----------------

_LOG_SCALES = (-0.3, 10.0)
_DEVIATIONS = (1e-3, 1e3)


def _imbalance(x):
    rows, columns = x.std(-1), x.std(-2)
    return sum(s.amax(-1) / s.amin(-1).clamp_min(1e-8) for s in (rows, columns))[..., None, None]


def _log_deviation(x, dim):
    return x.std(dim, keepdim=True).clamp(*_DEVIATIONS).log()


def _normalised(x, iterations):
    """(row scales, column scales) of the iterate with the least imbalance."""
    rows, columns = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    best_rows, best_columns = rows, columns
    now, least = x, _imbalance(x)
    for _ in range(iterations):
        columns = (columns + _log_deviation(now, -2)).clamp(*_LOG_SCALES)
        now = x / columns.exp() / rows.exp()
        rows = (rows + _log_deviation(now, -1)).clamp(*_LOG_SCALES)
        now = x / columns.exp() / rows.exp()
        found = _imbalance(now)
        is_better = found <= least
        best_rows = torch.where(is_better, rows, best_rows)
        best_columns = torch.where(is_better, columns, best_columns)
        least = torch.minimum(found, least)
    return best_rows.exp(), best_columns.exp()


def _kvarn_rows(x, bits, iterations):
    """Rows are rounded between their extremes; their step and zero take the row's scale in."""
    row_scale, column_scale = _normalised(x, iterations)
    balanced = x / row_scale / column_scale
    low, high = balanced.amin(-1, keepdim=True), balanced.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-10)
    codes = ((balanced - low) / step).round().clamp(0, 2**bits - 1)
    return (codes * f16(step * row_scale) + f16(low * row_scale)) * f16(column_scale)


def kvarn(k_bits, v_bits, iterations=8):
    """K: rows are channels, columns the block's tokens. V: rows are tokens."""

    def keys(x):
        turn = hadamard(x.shape[-1])
        found = _kvarn_rows((x @ turn).transpose(-1, -2), k_bits, iterations)
        return found.transpose(-1, -2) @ turn

    def values(x):
        turn = hadamard(x.shape[-1])
        return _kvarn_rows(x @ turn, v_bits, iterations) @ turn

    def bits(head_dim, block):
        of_k = k_bits + 32 / block + 16 / head_dim
        of_v = v_bits + 32 / head_dim + 16 / block
        return (of_k + of_v) / 2

    return Rule(f"KVarN, K {k_bits} bits, V {v_bits} bits", bits, keys, values)


# --- TurboQuant's shape (Zandieh et al. 2025): random rotation, a norm, a codebook ------------

# Lloyd and Max's levels of a normal distribution of variance 1 (Max 1960, table I), positive half.
_LEVELS = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def turboquant_like(bits):
    """Its variant for the least squared error: random signs, a Hadamard rotation, each row's norm
    in 16 bits, each number to the nearest level. The published 1-bit sketch of the rest is left
    out."""
    half = torch.tensor(_LEVELS[bits])
    levels = torch.cat([-half.flip(0), half])
    middles = (levels[1:] + levels[:-1]) / 2

    def rows(x):
        head_dim = x.shape[-1]
        signs = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(1)) * 2 - 1
        turn = signs[:, None] * hadamard(head_dim)
        turned = x @ turn
        scale = f16(turned.pow(2).mean(-1, keepdim=True).sqrt()).clamp_min(1e-6)
        return levels[torch.bucketize((turned / scale).contiguous(), middles)] * scale @ turn.T

    return Rule(
        f"TurboQuant-like, {bits} bits", lambda head_dim, block: bits + 16 / head_dim, rows, rows
    )


RULES = (
    llama("q8_0", 8.5, llama_q8_0),
    llama("q5_1", 6.0, lambda x: llama_affine(x, 5)),
    llama("q5_0", 5.5, lambda x: llama_symmetric(x, 5)),
    llama("q4_1", 5.0, lambda x: llama_affine(x, 4)),
    llama("q4_0", 4.5, lambda x: llama_symmetric(x, 4)),
    kvarn(4, 2),
    kvarn(3, 3),
    kivi(3, 64),
    turboquant_like(3),
    kvarn(2, 2),
    kivi(2, 32),
    kivi(2, 64),
    turboquant_like(2),
)
