"""Plain attention in float64, and random rows."""

import numpy as np


def random_rows(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attention(q, k, v, *, scale=None, window=0, softcap=0.0, sinks=None):
    """q: [queries, heads, dim], the last tokens of k, v: [tokens, kv_heads, dim]; causal."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    queries, heads, dim = q.shape
    tokens, kv_heads, _ = k.shape
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position = np.arange(tokens - queries, tokens)[:, None]
    key = np.arange(tokens)[None]
    hidden = key > position
    if window:
        hidden |= key <= position - window
    scores[:, hidden] = -np.inf
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (heads, queries, 1))
        scores = np.concatenate([scores, extra], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights[:, :, :tokens], v)


def relative_error(found, expected):
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
