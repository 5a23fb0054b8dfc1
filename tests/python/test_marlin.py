"""metal-marlin's API: what update() returns, positions, memory, rings, overflow."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error

import kvx
from kvx.marlin import CacheConfig, KVCache

CONFIG = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_seq_len=48)


def new_tokens(seed, tokens, heads=2, batch=2, dtype=np.float32):
    return random_rows(seed, batch, heads, tokens, 64, dtype=dtype)


def test_update_returns_all_tokens_and_leaves_the_position():
    cache = KVCache(CacheConfig(**CONFIG, dtype="float32"), batch_size=2)
    k, v = new_tokens(1, 10), new_tokens(2, 10)
    for layer in range(2):
        k_full, v_full = cache.update(layer, k[:, :, :7], v[:, :, :7])
        assert k_full.shape == (2, 2, 7, 64) and np.array_equal(v_full, v[:, :, :7])
        assert cache.seq_len == 0
    cache.advance(7)
    assert cache.seq_len == 7
    k_full, v_full = cache.update(0, k[:, :, 7:], v[:, :, 7:])
    assert np.array_equal(k_full, k) and np.array_equal(v_full, v)
    with pytest.raises(kvx.Error, match="layer"):
        cache.advance(3)  # layer 1 has not appended
    cache.reset()
    assert cache.seq_len == 0 and cache.memory_usage_mb() == 0


@pytest.mark.parametrize(
    ("quantize", "bytes_per_row"),
    [(False, 128), (True, 34), ("fp4", 34), ("int4", 34), ("int8", 66), ("fp8", 68)],
)
def test_memory_is_used_and_allocated_to_the_byte(quantize, bytes_per_row):
    cache = KVCache(CacheConfig(**CONFIG, quantize=quantize), batch_size=2)
    k, v = new_tokens(3, 5, dtype=np.float16), new_tokens(4, 5, dtype=np.float16)
    for layer in range(2):
        k_full, _ = cache.update(layer, k, v)
        assert k_full.dtype == np.float16 and relative_error(k_full, k) < 0.2
    cache.advance(5)
    rows = 2 * 2 * 2 * 2  # layers, K and V, batch, heads
    assert cache.memory_usage_mb() * 2**20 == rows * 5 * bytes_per_row
    assert cache.memory_allocated_mb() * 2**20 == rows * 48 * bytes_per_row
    assert cache.read_mb_per_step() == cache.memory_usage_mb()


def test_attention_reads_the_packed_bytes():
    cache = KVCache(CacheConfig(**CONFIG, dtype="float32"), batch_size=2)
    k, v, q = new_tokens(5, 12), new_tokens(6, 12), new_tokens(7, 12, heads=4)
    cache.append(0, k, v)
    found = cache.attention(0, q)
    for b in range(2):
        expected = attention(*(x[b].swapaxes(0, 1) for x in (q, k, v)))
        assert relative_error(found[b].swapaxes(0, 1), expected) < 2e-6


def test_past_max_seq_len_is_an_error_unless_eviction_is_asked_for():
    k, v = new_tokens(8, 48), new_tokens(9, 48)
    for evict in (False, True):
        cache = KVCache(CacheConfig(**{**CONFIG, "num_layers": 1}, evict=evict), batch_size=2)
        cache.update(0, k, v)
        cache.advance(48)
        if not evict:
            with pytest.raises(kvx.OutOfRangeError):
                cache.update(0, k[:, :, :1], v[:, :, :1])
            assert cache.seq_len == 48
            continue
        k_full, _ = cache.update(0, k[:, :, :1].astype(np.float16), v[:, :, :1])
        assert k_full.shape[2] == 48
        assert np.array_equal(k_full[:, :, :-1], k[:, :, 1:].astype(np.float16))


def test_a_ring_holds_its_window():
    config = CacheConfig(**{**CONFIG, "num_layers": 1}, dtype="float32", window=16)
    cache = KVCache(config, batch_size=1)
    k, v, q = (new_tokens(n, 40, heads=h, batch=1) for n, h in ((1, 2), (2, 2), (3, 4)))
    for t in range(40):
        k_full, _ = cache.update(0, k[:, :, t : t + 1], v[:, :, t : t + 1])
        found = cache.attention(0, q[:, :, t : t + 1])
        cache.advance()
    assert np.array_equal(k_full, k[:, :, -16:])
    expected = attention(*(x[0].swapaxes(0, 1) for x in (q, k, v)), window=16)
    assert relative_error(found[0].swapaxes(0, 1), expected[-1:]) < 2e-6
    assert cache.memory_allocated_mb() * 2**20 == 2 * 2 * 16 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantize": "int5"}, "quantize is 'int5'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"head_dim": 60, "quantize": True}, "head_dim is 60"),
        ({"num_heads": 3}, "^num_heads is 3; expected a multiple of num_kv_heads, 2"),
        ({"num_heads": 0}, "^num_heads is 0"),
        ({"head_dim": 0}, "^head_dim is 0"),
        ({"window": -1}, "^window is -1; expected 0 or more"),
        ({"window": 8, "evict": True}, "^evict is True and window is 8"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(change, message):
    with pytest.raises(kvx.Error, match=message):
        KVCache(CacheConfig(**{**CONFIG, **change}))


def test_arrays_of_another_shape_are_refused():
    cache = KVCache(CacheConfig(**CONFIG), batch_size=2)
    k = new_tokens(1, 3)
    for bad, message in [
        (k[:1], r"k_new has the shape \[1, 2, 3, 64\]; expected \[2, 2, 3, 64\]"),
        (k[0], r"k_new has the shape \[2, 3, 64\]"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            cache.update(0, bad, k)
    with pytest.raises(kvx.Error, match=r"v_new has the shape \[2, 2, 2, 64\]; expected"):
        cache.update(0, k, k[:, :, :2])
    with pytest.raises(kvx.Error, match=r"q has the shape \[2, 2, 3, 64\]; expected \[2, 4, 3"):
        cache.attention(0, k)
    with pytest.raises(kvx.Error, match="layer"):
        cache.update(2, k, k)
