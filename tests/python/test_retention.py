"""How long blocks stay: priorities, pins, deadlines and sessions."""

import time

import pytest
from kv_events import add, told_cache

import kvx


def cached(cache, tokens):
    sequence = cache.create_sequence_from([*tokens, 1])
    count = cache.num_tokens(sequence)
    cache.free_sequence(sequence)
    return count


def use(cache, tokens, retain=None, **keys):
    sequence = add(cache, tokens, **keys)
    if retain is not None:
        cache.retain(sequence, **retain)
    cache.free_sequence(sequence)


@pytest.fixture
def cache():
    """Ten blocks of 16 tokens."""
    return told_cache()


def fill(cache):
    for first in range(1000, 6000, 1000):
        use(cache, list(range(first, first + 64)))


def test_a_high_priority_outlives_others(cache):
    use(cache, list(range(32)), {"priority": 80})
    fill(cache)
    assert cached(cache, range(32)) == 32


def test_a_pin_ends_with_its_time(cache):
    use(cache, list(range(32)), {"pin": True, "seconds": 3600})
    fill(cache)
    assert cached(cache, range(32)) == 32
    use(cache, list(range(32)), {"pin": True, "seconds": 0.01})
    time.sleep(0.02)
    fill(cache)
    fill(cache)
    assert cached(cache, range(32)) == 0


def test_half_of_the_pool_may_be_pinned(cache):
    sequence = add(cache, list(range(150)))
    with pytest.raises(kvx.OutOfRangeError, match="at most half may be pinned"):
        cache.retain(sequence, pin=True)


def test_a_sessions_own_blocks_are_deleted(cache):
    use(cache, list(range(32)), session="a")
    sequence = cache.create_sequence_from(list(range(17)), session="b")
    cache.free_sequence(sequence)  # shares the first block
    assert cache.delete_session("a") == 1
    assert cached(cache, range(32)) == 16
    assert cache.end_session("a") == 0


def test_refusals(cache):
    sequence = add(cache, list(range(32)), session="a")
    with pytest.raises(kvx.Error, match="session 'a' has 1 sequences in use"):
        cache.end_session("a")
    for wrong, message in [
        ({"priority": 101}, "priority is 101"),
        ({"first_token": -1}, "first_token is -1"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"seconds": 0}, "seconds is 0"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            cache.retain(sequence, **wrong)
    with pytest.raises(kvx.Error, match="session is ''"):
        cache.delete_session("")
    with pytest.raises(kvx.UnsupportedError, match="prefix_model"):
        plain = kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=64, recipe="int8", max_tokens=16)
        plain.retain(0)
