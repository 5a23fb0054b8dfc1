"""Latent caches (MLA): values are a part of the keys' rows."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error

import kvx

ROW, VALUE, HEADS = 192, 128, 4


def new_cache(recipe, **options):
    shape = dict(num_layers=1, num_kv_heads=1, head_dim=ROW, v_head_dim=VALUE, latent=True)
    return kvx.Cache(recipe=recipe, max_tokens=256, **{**shape, **options})


def rows_of(tokens, seed=3):
    return random_rows(seed, tokens, HEADS, ROW), random_rows(seed + 1, tokens, 1, ROW)


def feed(cache, sequence, q, k, step_tokens=17):
    outputs = []
    for first in range(0, len(q), step_tokens):
        part = slice(first, first + step_tokens)
        with cache.step([(sequence, len(q[part]))]):
            outputs.append(cache.append_and_attend(0, q[part], k[part], None))
    return np.concatenate(outputs)


@pytest.mark.parametrize(
    "recipe, tolerance",
    [
        ("f32", 2e-6),
        ("bf16", 6e-3),
        ("int8", 2e-2),
        ("int8+bf16", 2e-2),
        ("nvfp4:auto", 0.2),
        ("nvfp4+bf16:auto", 0.2),
    ],
)
def test_attention_reads_the_rows_first_numbers_as_values(recipe, tolerance):
    cache = new_cache(recipe)
    assert cache.is_latent
    q, k = rows_of(150)
    sequence = cache.create_sequence()
    found = feed(cache, sequence, q, k)
    assert found.shape == (150, HEADS, VALUE)
    assert relative_error(found, attention(q, k, k[:, :, :VALUE])) < tolerance
    keys, values = cache.gather(sequence, 0)
    assert np.array_equal(keys[:, :, :VALUE], values)


def test_a_row_is_stored_once():
    assert new_cache("bf16").cost(128).bytes_per_token == ROW * 2
    apart = new_cache("bf16", latent=False)
    assert not apart.is_latent
    assert apart.cost(128).bytes_per_token == (ROW + VALUE) * 2


def test_forks_and_files_keep_the_rows(tmp_path):
    cache = new_cache("int8", prefix_model="m", max_sequences=2)
    q, k = rows_of(64)
    sequence = cache.create_sequence()
    feed(cache, sequence, q, k)
    cache.record_tokens(sequence, range(64))
    fork = cache.fork_sequence(sequence)
    cache.save_sequence(sequence, tmp_path / "latent.kvx")
    other = new_cache("int8", prefix_model="m")
    loaded = other.load_sequence(tmp_path / "latent.kvx")
    more = rows_of(5, seed=9)
    expected = feed(cache, sequence, *more)
    assert np.array_equal(feed(cache, fork, *more), expected)
    assert np.array_equal(feed(other, loaded, *more), expected)


def test_refusals_say_what_to_pass():
    cache = new_cache("int8")
    q, k = rows_of(1)
    with cache.step([(cache.create_sequence(), 1)]):
        with pytest.raises(kvx.Error, match="latent cache's values are a part of its keys: pass"):
            cache.append_and_attend(0, q, k, k[:, :, :VALUE])
        cache.append_and_attend(0, q, k, None)
    with pytest.raises(kvx.Error, match="one row for both"):
        new_cache("int8/int4")
    with pytest.raises(kvx.Error, match="only a latent cache's rows"):
        new_cache("int4+bf16", latent=False)
    with pytest.raises(kvx.Error, match="v_head_dim is 200; expected 1 to 192"):
        new_cache("int8", v_head_dim=200)
