"""Writers of their own: threads append side by side what one thread would append alone."""

import pickle
import threading

import numpy as np
import pytest
from reference import random_rows

import kvx

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 3


def new_cache(recipe="int8", **options):
    return kvx.Cache(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, recipe=recipe, max_tokens=256,
        max_sequences=4, block_size=16, **options,
    )  # fmt: skip


def rows_of(seed, tokens):
    return (
        random_rows(seed, tokens, HEADS, DIM),
        random_rows(seed + 100, tokens, KV_HEADS, DIM),
        random_rows(seed + 200, tokens, KV_HEADS, DIM),
    )


def fed(writer, begin, sequence, seed, lengths=(40, 1, 1, 17, 1)):
    """What each step of a sequence returns in its last layer."""
    outs = []
    for i, tokens in enumerate(lengths):
        q, k, v = rows_of(seed + i, tokens)
        with begin([(sequence, tokens)]):
            for layer in range(LAYERS):
                out = writer.append_and_attend(layer, q, k, v)
        outs.append(out)
    return outs


@pytest.mark.parametrize("recipe", ["int8", "nvfp4:auto", "bf16"])
def test_threads_with_steps_of_their_own_write_what_one_thread_writes(recipe):
    alone = new_cache(recipe)
    expected = {}
    for i in range(4):
        expected[i] = fed(alone, alone.step, alone.create_sequence(), 10 * i)
    cache = new_cache(recipe)
    sequences = [cache.create_sequence() for _ in range(4)]
    found, start = {}, threading.Barrier(4)

    def work(i):
        step = kvx.Step(cache)
        start.wait(60)
        found[i] = fed(step, step.begin, sequences[i], 10 * i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, sequence in enumerate(sequences):
        assert cache.num_tokens(sequence) == 60
        for out, before in zip(found[i], expected[i], strict=True):
            assert np.array_equal(out, before)


def test_two_steps_are_open_at_once():
    """Each other layer; the cache's own step is a third."""
    cache = new_cache("f32")
    a, b, c = (cache.create_sequence() for _ in range(3))
    first, second = kvx.Step(cache), kvx.Step(cache)
    q, k, v = rows_of(1, 5)
    with first.begin([(a, 5)]), second.begin([(b, 5)]), cache.step([(c, 5)]):
        assert first.is_open and "open" in repr(first)
        for layer in range(LAYERS):
            outs = [writer.append_and_attend(layer, q, k, v) for writer in (first, second, cache)]
            assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
        assert cache.num_tokens(a) == 0
    assert [cache.num_tokens(s) for s in (a, b, c)] == [5, 5, 5]
    assert not first.is_open and "not open" in repr(first)


def test_a_sequence_is_in_one_step_at_a_time():
    cache = new_cache()
    sequence = cache.create_sequence()
    step, other = kvx.Step(cache), kvx.Step(cache)
    step.begin([(sequence, 3)])
    with pytest.raises(kvx.Error, match="another step"):
        other.begin([(sequence, 1)])
    with pytest.raises(kvx.Error, match="step is open"):
        step.begin([(sequence, 1)])
    step.cancel()
    other.begin([(sequence, 1)])
    other.cancel()
    assert cache.num_tokens(sequence) == 0


def test_drafts_are_taken_back_at_the_end():
    cache = new_cache("bf16")
    a, b = cache.create_sequence(), cache.create_sequence()
    step = kvx.Step(cache)
    q, k, v = rows_of(1, 8)
    step.begin([(a, 5), (b, 3)])
    for layer in range(LAYERS):
        step.append_and_attend(layer, q, k, v)
    with pytest.raises(kvx.Error, match="kept_tokens has 1 counts; the step has 2 entries"):
        step.end([2])
    with pytest.raises(kvx.Error, match=r"kept_tokens\[1\] is 4; expected 0 to 3"):
        step.end([2, 4])
    step.end([2, 3])
    assert [cache.num_tokens(s) for s in (a, b)] == [2, 3]
    assert np.array_equal(cache.gather(a, 0)[0], kvx_bf16(k[:2]))


def kvx_bf16(x):
    """Rounded to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def test_what_a_step_refuses_changes_nothing():
    cache = new_cache()
    sequence = cache.create_sequence()
    step = kvx.Step(cache)
    q, k, v = rows_of(1, 3)
    for call, message in [
        (lambda: step.append_and_attend(0, q, k, v), "no step is open; call begin"),
        (step.end, "no step is open"),
        (step.cancel, "no step is open"),
        (lambda: step.begin([(9, 1)]), "9"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()
    with pytest.raises(kvx.Error, match="layer 1 has no rows"), step.begin([(sequence, 3)]):
        step.append_and_attend(0, q, k, v)
    with step.begin([(sequence, 3)]):
        for bad, message in [
            ((9, q, k, v), "layer is 9"),
            ((0, q[:2], k, v), "k has"),
            ((0, q[:2], k[:2], v[:2]), "q has 2 tokens; the open step has 3"),
            ((0, q[:, :3], k, v), "q has 3 heads; expected a multiple of num_kv_heads, 2"),
        ]:
            with pytest.raises(kvx.Error, match=message):
                step.append_and_attend(*bad)
        with pytest.raises(kvx.Error, match="precision is 'exact'"):
            step.append_and_attend(0, q, k, v, precision="exact")
        with pytest.raises(kvx.Error, match="stream is given"):
            step.append_and_attend(0, q, k, v, stream=1)
        for layer in range(LAYERS):
            step.append_and_attend(layer, q, k, v)
    assert cache.num_tokens(sequence) == 3
    with pytest.raises(TypeError, match="cache is 3 .an int.; expected a Cache"):
        kvx.Step(3)
    with pytest.raises(kvx.UnsupportedError, match="kvx.Step cannot be pickled"):
        pickle.dumps(step)


def test_an_exception_inside_drops_the_tokens():
    cache = new_cache()
    sequence = cache.create_sequence()
    step = kvx.Step(cache)
    with pytest.raises(ZeroDivisionError), step.begin([(sequence, 3)]):
        raise ZeroDivisionError
    assert cache.num_tokens(sequence) == 0 and not step.is_open


def test_a_step_outlives_its_caches_close():
    cache = new_cache()
    sequence = cache.create_sequence()
    step = kvx.Step(cache)
    step.begin([(sequence, 3)])
    cache.close()
    del cache
    step.append_and_attend(0, *rows_of(1, 3))
    step.cancel()
    closed = new_cache()
    closed.close()
    with pytest.raises(kvx.Error, match="the cache is closed"):
        kvx.Step(closed)
