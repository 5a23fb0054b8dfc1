"""kvx.engines.turbomind.Pool: data and scale blocks under one id, one budget, and the verbs on it."""

import numpy as np
import pytest

import kvx
from kvx import engines
from kvx.turbomind import get_cache_block_size, get_kv_cache_mode

GEOMETRY = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "block_len": 16}
POLICIES = [0, 4, 8, 16]


def pool_of(policy, **options):
    return engines.turbomind.Pool(mode=get_kv_cache_mode(policy, 0), **GEOMETRY, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_holds_the_bytes_of_an_engines_pools(policy):
    mode = get_kv_cache_mode(policy, 0)
    pool = pool_of(policy, num_blocks=6)
    ids = pool.allocate(2)
    slots = np.concatenate([one * 16 + np.arange(16) for one in ids]).astype(np.int64)[:20]
    rows = np.random.default_rng(0).standard_normal((20, 2, 64)).astype(np.float16)
    layer = pool.layer(1)
    layer.append(rows, rows, slots)

    sizes = get_cache_block_size(mode, **GEOMETRY)
    data = np.zeros((6, sizes.block_bytes), np.uint8)
    scales = np.zeros((6, sizes.scale_block_bytes), np.uint8) if sizes.scale_block_bytes else None
    other = engines.turbomind.layer(data, scales, mode=mode, layer=1, **GEOMETRY)
    other.append(rows, rows, slots)

    table = engines.packed(ids[None], np.array([20], np.int32))
    query = np.ones((1, 4, 64), np.float32)
    starts = np.array([0, 1], np.int32)
    np.testing.assert_array_equal(
        layer.attend(query, table, starts), other.attend(query, table, starts)
    )
    for found, expected in zip(
        layer.flatten(table, [(0, 3, 9)]), other.flatten(table, [(0, 3, 9)]), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_counts_both_pools(policy):
    sizes = get_cache_block_size(get_kv_cache_mode(policy, 0), **GEOMETRY)
    pool = pool_of(policy, budget_bytes=4 * sizes.bytes_per_block + sizes.bytes_per_block - 1)
    assert (pool.num_blocks, pool.num_free) == (4, 4)
    with pytest.raises(kvx.OutOfRangeError, match="budget_bytes is .* a block takes"):
        pool_of(policy, budget_bytes=sizes.bytes_per_block - 1)


def test_blocks_are_given_once_and_taken_back_together():
    pool = pool_of(16, num_blocks=6)
    ids = pool.allocate(4)
    assert len(set(ids.tolist())) == 4
    assert pool.num_free == 2
    with pytest.raises(kvx.OutOfRangeError):
        pool.allocate(3)
    with pytest.raises(kvx.Error, match="users"):
        pool.release([ids[0], ids[0]])
    assert pool.num_free == 2
    pool.release(ids)
    assert pool.num_free == 6


def test_pointers_name_data_and_scale_blocks():
    pool = pool_of(16, num_blocks=6)
    data, scales = pool.pointers([0, 5])
    assert int(data[1] - data[0]) == 5 * pool.block_bytes
    assert int(scales[1] - scales[0]) == 5 * pool.scale_block_bytes
    assert pool_of(8, num_blocks=2).pointers([1])[1] is None
    with pytest.raises(kvx.Error, match=r"ids\[1\] is 6; the pool has 6 blocks"):
        pool.pointers([0, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_blocks is 0 and budget_bytes 0; expected one of the two"),
        ({"num_blocks": 2, "budget_bytes": 9}, "expected one of the two"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"num_blocks": 2, "device": "tpu"}, "device is 'tpu'; expected 'cpu' or 'cuda:0'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(kvx.Error, match=message):
        pool_of(8, **options)


def test_a_layer_keeps_its_pool():
    layer = pool_of(0, num_blocks=2).layer(0)
    rows = np.ones((1, 2, 64), np.float16)
    layer.append(rows, rows, np.array([17], np.int64))
    table = engines.packed(np.array([[1]], np.int32), np.array([2], np.int32))
    np.testing.assert_array_equal(layer.flatten(table, [(0, 1, 1)])[0].reshape(-1), np.ones(128))
