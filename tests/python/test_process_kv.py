"""kvx.engines.turbomind.process_kv against sums and turns that are computed number by number."""

import math

import numpy as np
import pytest

import kvx
from kvx import engines
from kvx.turbomind import KvCacheMode, get_cache_block_size

HEADS, DIM, BLOCK = 2, 32, 8
GEOMETRY = dict(num_layers=2, num_kv_heads=HEADS, head_dim=DIM, block_len=BLOCK)
POSITIONS = np.array([5, 6, 7, 300, 9])
SLOTS = np.array([8, 9, 10, 3, -1])  # the last token is not stored
INV_FREQ = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)  # half of a row is turned
RNG = np.random.default_rng(11)
K, V = (RNG.standard_normal((5, HEADS, DIM)).astype(np.float32) for _ in range(2))
K_BIAS, V_BIAS = (RNG.standard_normal((HEADS, DIM)).astype(np.float32) for _ in range(2))


def new_layer(mode=KvCacheMode.kNone):
    sizes = get_cache_block_size(mode, **GEOMETRY)
    data = np.zeros((3, sizes.block_bytes), np.uint8)
    scales = np.zeros((3, sizes.scale_block_bytes), np.uint8) if sizes.scale_block_bytes else None
    return engines.turbomind.layer(data, scales, mode=mode, layer=1, **GEOMETRY), data


def turned(row, position, pairs):
    row = [float(x) for x in row]
    for i, frequency in enumerate(INV_FREQ):
        a, b = (2 * i, 2 * i + 1) if pairs == "interleaved" else (i, i + len(INV_FREQ))
        cos, sin = (f(position * float(frequency)) for f in (math.cos, math.sin))
        row[a], row[b] = row[a] * cos - row[b] * sin, row[b] * cos + row[a] * sin
    return row


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_biases_and_turns_are_those_of_the_definition(pairs):
    layer, _ = new_layer()
    before = K.copy()
    engines.turbomind.process_kv(
        layer,
        K,
        V,
        SLOTS,
        k_bias=K_BIAS,
        v_bias=V_BIAS,
        positions=POSITIONS,
        inv_freq=INV_FREQ,
        pairs=pairs,
    )
    assert np.array_equal(K, before)
    table = engines.packed(np.array([[1, 0]], np.int32), np.array([12], np.int32))
    k, v = layer.flatten(table, [(0, 0, 12)])
    for token in range(4):
        at = [0, 1, 2, BLOCK + 3][token]
        for head in range(HEADS):
            expected = turned((K + K_BIAS)[token, head], int(POSITIONS[token]), pairs)
            assert np.allclose(k[0, head, at], expected, atol=4e-3)  # stored in f16
            assert np.allclose(v[0, head, at], (V + V_BIAS)[token, head], atol=4e-3)


def test_without_biases_and_turns_it_is_append():
    (one, data), (other, expected) = (new_layer(KvCacheMode.kInt8) for _ in range(2))
    engines.turbomind.process_kv(one, K, V, SLOTS)
    other.append(K, V, SLOTS)
    assert np.array_equal(data, expected) and data.any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pairs": "both"}, "pairs is 'both'; expected one of interleaved, halves"),
        ({"positions": POSITIONS}, "positions is given and inv_freq is None"),
        ({"inv_freq": INV_FREQ}, "inv_freq is given and positions is None"),
        ({"k_bias": K_BIAS[0]}, r"k_bias is float32 \[32\]; expected float32 \[2, 32\]"),
        ({"v_bias": V_BIAS.astype(np.float16)}, r"v_bias is float16 \[2, 32\]; expected float32"),
        ({"k_bias": [1.0]}, "k_bias is a list"),
        ({"positions": 3, "inv_freq": INV_FREQ}, "positions is"),
        ({"positions": POSITIONS[1:], "inv_freq": INV_FREQ}, r"positions has shape \[4\]"),
        ({"positions": POSITIONS, "inv_freq": np.ones(17)}, r"inv_freq has shape \[17\]"),
        ({"positions": POSITIONS, "inv_freq": np.ones((2, 2))}, r"inv_freq has shape \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(options, message):
    layer, data = new_layer()
    with pytest.raises((kvx.Error, TypeError), match=message):
        engines.turbomind.process_kv(layer, K, V, SLOTS, **options)
    assert not data.any()
    with pytest.raises(TypeError, match="k is a list"):
        engines.turbomind.process_kv(layer, [1.0], V, SLOTS)


def test_biases_that_are_views_are_read_as_they_are():
    layer, data = new_layer()
    other, expected = new_layer()
    view = np.asfortranarray(K_BIAS)
    engines.turbomind.process_kv(layer, K, V, SLOTS, k_bias=view)
    engines.turbomind.process_kv(other, K, V, SLOTS, k_bias=K_BIAS)
    assert np.array_equal(data, expected) and data.any()
