"""Engines' scales in torch's tensors, which is where engines have them."""

import engine_layouts as oracle
import numpy as np
import pytest
import torch

import kvx.turbomind
from kvx import engines

BLOCKS, TOKENS, HEADS, DIM = 3, 8, 2, 64


def sides():
    generator = np.random.default_rng(3)
    shape = (BLOCKS, TOKENS, HEADS)
    return [
        (
            generator.integers(0, 16, (*shape, DIM), np.uint8),
            generator.integers(0x34, 0x40, (*shape, DIM // 16), np.uint8),
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_vllms_swizzled_scales_are_turned_and_turned_back(order):
    rows = sides()
    swizzled, linear = (
        torch.from_numpy(oracle.vllm_nvfp4(rows, order, is_swizzled)) for is_swizzled in (True, False)
    )
    cache = swizzled.clone()
    scales = engines.vllm.v_scales(cache, head_dim=DIM)
    engines.linear_scales(scales)
    assert torch.equal(cache, linear) and not torch.equal(cache, swizzled)
    layer = engines.vllm.layer(cache, "nvfp4", head_dim=DIM, v_scale=2.0)
    table = engines.packed(np.array([[1]], np.int32), np.array([TOKENS], np.int32))
    _, v = layer.flatten(table, [(0, 0, TOKENS)])
    expected = oracle.nvfp4_values(*rows[1], 2.0)[1].transpose(1, 0, 2)
    np.testing.assert_array_equal(v[0], expected)
    engines.swizzled_scales(scales)
    assert torch.equal(cache, swizzled)


def test_biases_and_turns_are_numpys():
    """TurboMind's write on torch's rows, in the engine's own dtype; its angles may differ by an ulp."""
    generator = np.random.default_rng(5)
    rows = generator.standard_normal((4, HEADS, DIM)).astype(np.float16)
    bias = generator.standard_normal((HEADS, DIM)).astype(np.float16)
    slots, positions = np.arange(4), np.arange(90, 94)
    inv_freq = (10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)
    mode, pools = kvx.turbomind.KvCacheMode.kNone, []
    sizes = dict(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, block_len=TOKENS)
    num_bytes = kvx.turbomind.get_cache_block_size(mode, **sizes).block_bytes
    for to in (np.asarray, torch.from_numpy):
        data = np.zeros((1, num_bytes), np.uint8)
        engines.turbomind.process_kv(
            engines.turbomind.layer(data, mode=mode, layer=0, **sizes),
            to(rows),
            to(rows),
            to(slots),
            k_bias=to(bias),
            v_bias=to(bias),
            positions=to(positions),
            inv_freq=to(inv_freq),
        )
        pools.append(data.view(np.float16).astype(np.float32))
    assert np.allclose(*pools, atol=4e-3) and pools[0].any()
