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


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"])
def test_a_dtype_is_numpys_or_its_name(dtype):
    cache = KVCache(CacheConfig(**CONFIG, dtype=dtype))
    assert cache.config.recipe == "f16" and cache.k_packed[0].dtype == np.float16
    with pytest.raises(kvx.Error, match="dtype is .*int8.*; expected one of float16, bfloat16"):
        CacheConfig(**CONFIG, dtype=np.int8)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = {"fp4": np.array([*E2M1, *(-x for x in E2M1)]), "int4": np.arange(16) - 16 * (np.arange(16) > 7)}


@pytest.mark.parametrize("quantize", ["fp4", "int4"])
def test_packed_words_and_scales_are_what_update_decodes(quantize):
    cache = KVCache(CacheConfig(**CONFIG, quantize=quantize), batch_size=2)
    k, v = new_tokens(11, 5), new_tokens(12, 5)
    for layer in range(2):
        k_full, v_full = cache.update(layer, k, v)
    for words, scales, full in (
        (cache.k_packed[1], cache.k_scales[1], k_full),
        (cache.v_packed[1], cache.v_scales[1], v_full),
    ):
        assert words.shape == (2, 2, 48, 8) and words.dtype == np.uint32
        assert scales.shape == (2, 2, 48, 1) and scales.dtype == np.float16
        codes = (words[..., :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
        numbers = VALUES[quantize][codes.reshape(2, 2, 48, 64)] * scales.astype(np.float32)
        assert np.array_equal(numbers[:, :, :5].astype(np.float32), full)
        assert not words[:, :, 5:].any()
        with pytest.raises(ValueError, match="read-only"):
            words[0, 0, 0, 0] = 1


@pytest.mark.parametrize(
    ("options", "dtype", "numbers", "scale_dtype"),
    [
        ({"quantize": "int8"}, np.int8, 64, np.float16),
        ({"quantize": "fp8"}, np.uint8, 64, np.float32),
        ({"dtype": "float32"}, np.float32, 64, None),
        ({"dtype": "bfloat16"}, np.uint16, 64, None),
    ],
)
def test_other_codes_have_their_own_numbers(options, dtype, numbers, scale_dtype):
    cache = KVCache(CacheConfig(**CONFIG, **options))
    k = new_tokens(1, 3, batch=1)
    k_full, _ = cache.update(0, k, k)
    codes, scales = cache.k_packed[0], cache.k_scales[0]
    assert codes.dtype == dtype and codes.shape == (1, 2, 48, numbers)
    if scale_dtype is None:
        assert scales is None
    else:
        assert scales.dtype == scale_dtype and scales.shape[:3] == (1, 2, 48)
    if dtype == np.float32:
        assert np.array_equal(codes[:, :, :3], k_full)
    if dtype == np.int8:
        steps = np.repeat(scales[:, :, :3].astype(np.float32), 64 // scales.shape[-1], axis=-1)
        assert np.array_equal(k_full, codes[:, :, :3] * steps)


def test_the_words_outlive_the_cache_that_wrote_them():
    cache = KVCache(CacheConfig(**CONFIG, quantize="fp4"))
    k = new_tokens(1, 3, batch=1)
    cache.append(0, k, k)
    words = cache.k_packed[0]
    before = words.copy()
    del cache
    assert np.array_equal(words, before) and before.any()


@pytest.mark.parametrize("window", [0, 9])
def test_attention_that_is_not_causal_sees_every_token(window):
    config = {**CONFIG, "num_layers": 1}
    cache = KVCache(
        CacheConfig(**config, dtype="float32", window=window, max_append=6), batch_size=2
    )
    k, v, q = new_tokens(5, 12), new_tokens(6, 12), new_tokens(7, 6, heads=4)
    for part in (slice(0, 6), slice(6, 12)):
        cache.append(0, k[:, :, part], v[:, :, part])
        if part.stop < 12:
            cache.advance(6)
    for _ in range(2):  # the mask is made once
        found = cache.attention(0, q, causal=False)
        for b in range(2):
            for i in range(6):
                first = max(0, 6 + i - window + 1) if window else 0
                one = attention(
                    q[b, :, i : i + 1].swapaxes(0, 1),
                    k[b, :, first:].swapaxes(0, 1),
                    v[b, :, first:].swapaxes(0, 1),
                )
                assert relative_error(found[b, :, i : i + 1].swapaxes(0, 1), one) < 2e-6
    assert relative_error(cache.attention(0, q), found) > 1e-3
    one = cache.attention(0, q[:, :, -1:], causal=False)
    assert np.array_equal(one, cache.attention(0, q[:, :, -1:]))


def test_a_step_has_a_time_and_the_least_it_can_take():
    cache = KVCache(CacheConfig(**CONFIG), batch_size=2)
    assert cache.last_step_ms() == 0
    k = new_tokens(1, 4)
    for layer in range(2):
        cache.append(layer, k, k)
        cache.attention(layer, new_tokens(2, 4, heads=4))
    assert cache.last_step_ms() == 0  # the step is not over
    cache.advance(4)
    assert cache.last_step_ms() > 0
    assert cache.read_ms_per_step(100) == pytest.approx(cache.read_mb_per_step() * 2**20 / 1e8)
    with pytest.raises(kvx.Error, match="gb_per_s is 0; expected more than 0"):
        cache.read_ms_per_step(0)
    cache.reset()
    assert cache.last_step_ms() == 0


def test_a_device_that_is_not_there_is_named():
    for device, message in [("gpu", "device is 'gpu'|device is gpu"), ("cuda:99", "cuda|CUDA")]:
        with pytest.raises(kvx.Error, match=message):
            KVCache(CacheConfig(**CONFIG), device=device)
