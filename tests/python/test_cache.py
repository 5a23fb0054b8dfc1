"""The paged cache against plain attention in float64."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import attention, random_rows, relative_error

import kvx

# How far attention over a format's bytes may be from attention over the numbers, on random rows.
TOLERANCE = {"f32": 2e-6, "bf16": 6e-3, "int8": 2e-2, "int8/int4": 0.2, "nvfp4:auto": 0.2}


def new_cache(recipe="f32", **options):
    defaults = dict(num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=512, max_sequences=3)
    return kvx.Cache(recipe=recipe, **{**defaults, **options})


def feed(cache, sequence, q, k, v, step_tokens=1000, **options):
    """Appends all rows to every layer; returns layer 0's outputs."""
    outputs = []
    first = 0
    while first < len(q):
        count = min(step_tokens, len(q) - first, cache.max_step_tokens(sequence))
        part = slice(first, first + count)
        with cache.step([(sequence, count)]):
            for layer in range(cache.num_layers):
                out = cache.append_and_attend(layer, q[part], k[part], v[part], **options)
                if layer == 0:
                    outputs.append(out)
        first += count
    return np.concatenate(outputs)


def stream(tokens, seed=0, dtype=np.float32):
    return (
        random_rows(seed, tokens, 6, 64, dtype=dtype),
        random_rows(seed + 1, tokens, 2, 64, dtype=dtype),
        random_rows(seed + 2, tokens, 2, 64, dtype=dtype),
    )


@pytest.mark.parametrize("recipe", TOLERANCE)
def test_attention_is_plain_attention(recipe):
    cache = new_cache(recipe)
    rows = stream(200)
    found = feed(cache, cache.create_sequence(), *rows, step_tokens=33)
    assert relative_error(found, attention(*rows)) < TOLERANCE[recipe]


def test_a_cache_may_be_no_longer_than_its_16_bit_ends():
    cache = new_cache("nvfp4:auto", max_tokens=100)
    rows = stream(100)
    found = feed(cache, cache.create_sequence(), *rows)
    assert relative_error(found, attention(*rows)) < 6e-3


def test_the_fast_precision_stays_near_the_accurate_one():
    rows = stream(200)
    outputs = []
    for precision in ("accurate", "fast"):
        cache = new_cache("int8")
        outputs.append(feed(cache, cache.create_sequence(), *rows, precision=precision))
    assert relative_error(*outputs) < 8e-3
    with pytest.raises(kvx.Error, match="precision is 'exact'; expected"):
        feed(cache, cache.create_sequence(), *rows, precision="exact")


def test_windows_softcap_sinks_and_scale():
    cache = new_cache(layer_windows=[24, 0], num_layers=2)
    rows = stream(90)
    sinks = np.linspace(-1, 2, 6, dtype=np.float32)
    options = dict(softcap=5.0, sinks=sinks)
    found = feed(cache, cache.create_sequence(), *rows, 7, softmax_scale=0.2, **options)
    assert relative_error(found, attention(*rows, scale=0.2, window=24, **options)) < 2e-6


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from(["f32", "int8", "nvfp4:auto"]),
    st.sampled_from([1, 16, 64]),
)
def test_how_tokens_are_cut_into_steps_changes_nothing(cuts, recipe, block_size):
    cache = new_cache(recipe, block_size=block_size)
    rows = stream(sum(cuts))
    whole = feed(cache, cache.create_sequence(), *rows)
    sequence = cache.create_sequence()
    first, parts = 0, []
    for count in cuts:
        parts.append(feed(cache, sequence, *(x[first : first + count] for x in rows)))
        first += count
    # On AMX many rows of codes are multiplied in digits of BF16, few as whole numbers: 2^-17 apart.
    assert relative_error(np.concatenate(parts), whole) < 5e-5
    assert cache.num_tokens(sequence) == sum(cuts)


def test_sequences_of_one_step_do_not_see_each_other():
    cache = new_cache()
    a, b = stream(10, seed=3), stream(4, seed=9)
    first, second = cache.create_sequence(), cache.create_sequence()
    both = [np.concatenate([x, y]) for x, y in zip(a, b)]
    with cache.step([(first, 10), (second, 4)]):
        outs = [cache.append_and_attend(layer, *both) for layer in range(2)]
    assert relative_error(outs[0][:10], attention(*a)) < 2e-6
    assert relative_error(outs[0][10:], attention(*b)) < 2e-6


def test_any_strides_but_those_of_head_dim_are_read_and_written_in_place():
    cache = new_cache(num_layers=1)
    q, k, v = stream(12)
    by_head = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]
    out = np.full((6, 12, 64), np.nan, np.float32)
    sequence = cache.create_sequence()
    with cache.step([(sequence, 12)]):
        assert cache.append_and_attend(0, *by_head, out.swapaxes(0, 1)).base is out
    assert relative_error(out.swapaxes(0, 1), attention(q, k, v)) < 2e-6


def test_half_precision_comes_back_as_it_went_in():
    cache = new_cache("f16")
    q, k, v = stream(30, dtype=np.float16)
    sequence = cache.create_sequence()
    assert feed(cache, sequence, q, k, v).dtype == np.float16
    found_k, found_v = cache.gather(sequence, 1, 5, 20, like=k)
    assert np.array_equal(found_k, k[5:25]) and np.array_equal(found_v, v[5:25])
    assert cache.gather(sequence, 0)[0].dtype == np.float32


def test_a_value_may_be_of_another_size():
    cache = new_cache(head_dim=64, v_head_dim=32)
    q, k, v = stream(9)
    v = np.ascontiguousarray(v[:, :, :32])
    found = feed(cache, cache.create_sequence(), q, k, v)
    assert found.shape == (9, 6, 32) and relative_error(found, attention(q, k, v)) < 2e-6


def test_a_truncated_sequence_goes_on():
    cache = new_cache()
    rows, other = stream(50), stream(50, seed=7)
    sequence = cache.create_sequence()
    feed(cache, sequence, *(x[:30] for x in rows))
    feed(cache, sequence, *(x[30:44] for x in other))
    cache.truncate(sequence, 30)
    tail = feed(cache, sequence, *(x[30:] for x in rows))
    assert relative_error(tail, attention(*rows)[30:]) < 2e-6


def test_a_fork_shares_the_past_and_goes_its_own_way():
    cache = new_cache("int8")
    rows, other = stream(100), stream(100, seed=5)
    one = cache.create_sequence()
    feed(cache, one, *(x[:70] for x in rows))
    used = cache.memory().used
    fork = cache.fork_sequence(one)
    assert cache.memory().used == used
    ends = [
        feed(cache, sequence, *(x[70:] for x in end))
        for sequence, end in ((one, rows), (fork, other))
    ]
    mixed = [np.concatenate([x[:70], y[70:]]) for x, y in zip(rows, other)]
    assert relative_error(ends[0], attention(*rows)[70:]) < 2e-2
    assert relative_error(ends[1], attention(*mixed)[70:]) < 2e-2


def test_an_exception_in_a_step_drops_its_tokens():
    cache = new_cache()
    rows = stream(8)
    sequence = cache.create_sequence()
    with pytest.raises(ZeroDivisionError), cache.step([(sequence, 8)]):
        cache.append_and_attend(0, *rows)
        raise ZeroDivisionError
    assert cache.num_tokens(sequence) == 0
    with pytest.raises(kvx.Error, match="layer 1 has not appended"), cache.step([(sequence, 8)]):
        cache.append_and_attend(0, *rows)
    assert cache.num_tokens(sequence) == 0
    assert relative_error(feed(cache, sequence, *rows), attention(*rows)) < 2e-6


def test_memory_follows_from_the_recipe():
    cache = new_cache("nvfp4", max_sequences=2)
    assert cache.memory().used == 0
    sequence = cache.create_sequence()
    feed(cache, sequence, *stream(64))
    memory = cache.memory()
    # 2 layers x 2 heads x (K and V) x 64 tokens x (32 bytes of codes, 4 of scales)
    assert (memory.used_codes, memory.used_scales) == (8 * 64 * 32, 8 * 64 * 4)
    assert memory.allocated >= 16 * memory.used_codes
    assert cache.cost(512).bits_per_value == 4.5
    for tokens in (0, 2**30 + 1, 2**62):
        with pytest.raises(kvx.Error, match=f"num_tokens is {tokens}; expected 1 to 1073741824"):
            cache.cost(tokens)
    cache.free_sequence(sequence)
    assert cache.memory().used == 0


def test_threads_share_a_cache():
    cache = new_cache(max_sequences=8)
    rows = stream(60)
    expected = attention(*rows)
    errors = []

    def work():
        # A step belongs to the cache: whoever finds one open tries again.
        sequence, done = cache.create_sequence(), 0
        while done < 60:
            try:
                cache.begin_step([(sequence, 20)])
            except kvx.Error:
                continue
            part = slice(done, done + 20)
            outs = [cache.append_and_attend(n, *(x[part] for x in rows)) for n in range(2)]
            cache.end_step()
            errors.append(relative_error(outs[0], expected[part]))
            done += 20

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 12 and max(errors) < 2e-6


def test_a_sequence_goes_on_before_all_layers_of_its_beginning_are_back():
    cache = kvx.Cache(
        num_layers=2, num_kv_heads=2, head_dim=64, recipe="int8", max_tokens=80, block_size=16,
        max_sequences=1, prefix_model="m", tiers="host(1MiB)",
    )  # fmt: skip
    q, k, v = stream(80)

    def step(sequence, first):
        with cache.step([(sequence, 80 - first)]):
            rows = [side[first:] for side in (q, k, v)]
            return [cache.append_and_attend(layer, *rows).copy() for layer in range(2)]

    for base in (0, 1000, 2000):
        sequence = cache.create_sequence()
        step(sequence, 0)
        cache.record_tokens(sequence, range(base, base + 80))
        cache.free_sequence(sequence)
        cache.wait_for_tier()
    outputs = []
    for by_layer in (False, True):
        sequence = cache.create_sequence_from(range(80), by_layer=by_layer)
        assert cache.num_tokens(sequence) == 64
        if by_layer:
            with pytest.raises(kvx.Error, match="still loading layer by layer"):
                cache.truncate(sequence, 16)
            cache.wait_for_layer(sequence, 1)
        outputs.append(step(sequence, 64))
        cache.free_sequence(sequence)
        step(other := cache.create_sequence(), 0)  # takes its blocks
        cache.free_sequence(other)
    assert all((a == b).all() for a, b in zip(*outputs))
    sequence = cache.create_sequence_from(range(1000, 1080), by_layer=True)
    assert cache.end_loading(sequence) == 64
    cache.truncate(sequence, 16)
    assert cache.tiers()[0].loaded > 0 and cache.tiers()[0].bad == 0
