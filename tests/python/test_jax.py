"""JAX's arrays: read where they lie, never written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx

HEADS, DIM, TOKENS = 2, 64, 5


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Where JAX sees a GPU its arrays lie there, which tests/python/test_gpu.py is about."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def rows(seed, dtype):
    return jax.random.normal(jax.random.PRNGKey(seed), (TOKENS, HEADS, DIM), jnp.float32).astype(
        dtype
    )


def cache_of(recipe):
    return kvx.Cache(
        recipe=recipe, num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_tokens=16
    )


def attended(q, k, v):
    cache = cache_of("int8")
    sequence = cache.create_sequence()
    with cache.step([(sequence, TOKENS)]):
        return cache.append_and_attend(0, q, k, v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_the_bytes_are_those_of_the_same_numbers_in_numpy(dtype):
    x = rows(1, dtype)
    ours, numpys = (kvx.quantize(a, "nvfp4") for a in (x, np.asarray(x.astype(jnp.float32))))
    assert np.array_equal(ours.codes, numpys.codes)
    assert np.array_equal(ours.scales, numpys.scales)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_attention_gives_numpys_arrays(dtype):
    q, k, v = (rows(seed, dtype) for seed in (1, 2, 3))
    out = attended(q, k, v)
    assert isinstance(out, np.ndarray)
    assert out.dtype == (np.float32 if dtype == jnp.bfloat16 else np.dtype(dtype))
    expected = attended(*(np.asarray(x.astype(jnp.float32)) for x in (q, k, v)))
    assert np.allclose(out, expected, atol=2e-3)


def test_an_array_of_jax_is_refused_as_output_by_its_name():
    cache = cache_of("int8")
    sequence = cache.create_sequence()
    x = rows(1, jnp.float32)
    with pytest.raises(kvx.Error, match="out is a .* that cannot be written in place"):
        with cache.step([(sequence, TOKENS)]):
            cache.append_and_attend(0, x, x, x, jnp.zeros_like(x))
    assert cache.num_tokens(sequence) == 0
