"""Stores that are Python objects, and erasure: through kvx.Cache, whatever the object does."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvx

ROWS = np.ones((64, 2, 64), np.float32)
TOKENS = list(range(64))


class MapStore:
    def __init__(self):
        self.values = {}

    def put(self, keys, values):
        self.values.update(zip(keys, values))

    def get(self, keys):
        return [self.values.get(key) for key in keys]

    def exists(self, keys):
        return [key in self.values for key in keys]

    def remove(self, keys):
        for key in keys:
            self.values.pop(key, None)

    def remove_all(self, parts):
        for key in [key for key in self.values if key.startswith(parts + "/")]:
            del self.values[key]


@pytest.fixture
def registered():
    names = []

    def register(store, timeout="60s"):  # a machine may stall
        names.append(f"store-{len(names)}")
        kvx.register_store(names[-1], store)
        return f"store({names[-1]}, timeout={timeout})"

    yield register
    for name in names:
        kvx.unregister_store(name)


def cache_with(tiers):
    return kvx.Cache(
        num_layers=1, num_kv_heads=2, head_dim=64, recipe="nvfp4", max_tokens=64, block_size=16,
        prefix_model="a model", prefix_hash="sha256", tiers=tiers,
    )  # fmt: skip


def compute(cache, **keys):
    """How many of the tokens were found."""
    sequence = cache.create_sequence_from(TOKENS, **keys)
    found = cache.num_tokens(sequence)
    with cache.step([(sequence, 64 - found)]):
        cache.append_and_attend(0, ROWS[found:], ROWS[found:], ROWS[found:])
    cache.record_tokens(sequence, TOKENS[found:])
    cache.free_sequence(sequence)
    cache.wait_for_tier()
    return found


def test_a_python_object_is_a_store(registered):
    store = MapStore()
    tiers = registered(store)
    assert compute(cache_with(tiers)) == 0
    assert len(store.values) == 4
    reader = cache_with(tiers)
    assert compute(reader) == 48
    assert reader.tiers()[-1].loaded == 3 and reader.tiers()[-1].failed_calls == 0


def test_what_it_raises_is_a_failed_call(registered):
    class Raising(MapStore):
        def exists(self, keys):
            raise ConnectionError("no wires")

    cache = cache_with(registered(Raising()))
    assert compute(cache) == 0
    assert cache.tiers()[0].failed_calls > 0
    assert cache.tiers()[0].last_problem == "the store's exists raised ConnectionError: no wires"


@pytest.mark.parametrize(
    "answer, problem",
    [
        (lambda keys: [], "the store's get returned 0 answers; expected one for each of "),
        (lambda keys: 7, "the store's get raised TypeError"),
        (lambda keys: [7 for _ in keys], "the store's get raised TypeError"),
        (lambda keys: [b"no record" for _ in keys], "record"),
        (lambda keys: [b"\0" * 10**6 for _ in keys], ""),
        (lambda keys: [bytearray(100) for _ in keys], "record"),
    ],
)
def test_answers_that_make_no_sense_serve_nothing(registered, answer, problem):
    class Lying(MapStore):
        def get(self, keys):
            return answer(keys)

    tiers = registered(Lying())
    compute(cache_with(tiers))
    reader = cache_with(tiers)
    assert compute(reader) == 0
    assert reader.tiers()[0].loaded == 0
    assert problem in reader.tiers()[0].last_problem


def test_a_store_that_never_returns_holds_nobody_up(registered):
    gate = threading.Event()

    class Hanging(MapStore):
        def exists(self, keys):
            gate.wait()
            return super().exists(keys)

    begin = time.monotonic()
    cache = cache_with(registered(Hanging(), timeout="300ms"))
    assert compute(cache) == 0
    assert "has not returned from exists within 300 ms" in cache.tiers()[0].last_problem
    del cache
    assert time.monotonic() - begin < 30
    gate.set()


def test_a_store_goes_with_its_last_cache(registered):
    import weakref

    store = MapStore()
    alive = weakref.ref(store)
    kvx.register_store("weak", store)
    cache = cache_with("store(weak, timeout=60s)")
    kvx.unregister_store("weak")
    del store
    assert alive() is not None and compute(cache) == 0
    del cache
    assert alive() is None


def test_an_object_without_the_five_methods_is_refused():
    with pytest.raises(kvx.Error, match=r"store is a dict without a method put\(\); expected"):
        kvx.register_store("dict", {})
    with pytest.raises(kvx.Error, match="name is 'a b'; expected 1 to 64 letters"):
        kvx.register_store("a b", MapStore())
    with pytest.raises(kvx.Error, match="under which no store is registered"):
        kvx.unregister_store("nobody")


def test_the_interpreter_ends_with_stores_and_caches_alive():
    program = """
import sys; sys.path.insert(0, {folder!r})
from test_stores import MapStore, cache_with, compute
import kvx
kvx.register_store("late", MapStore())
cache = cache_with("store(late)")
compute(cache)
cache.create_sequence_from(range(1000, 1064))
"""
    import os

    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", program.format(folder=folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- erasure


def test_a_tenants_blocks_go_everywhere_and_nobody_elses(registered):
    store = MapStore()
    cache = cache_with("host(1MiB), " + registered(store))
    compute(cache, tenant="me")
    compute(cache, tenant="you")
    assert len(store.values) == 8
    assert cache.erase_tenant("me") >= 4
    assert len(store.values) == 4
    assert compute(cache, tenant="you") == 48
    assert cache.erase_session(TOKENS, 16, tenant="you") >= 3
    assert len(store.values) == 1
    assert compute(cache, tenant="you") == 16
    assert compute(cache, tenant="me") == 0


def test_erasure_is_refused_with_words():
    cache = cache_with("host(1MiB)")
    with pytest.raises(kvx.Error, match="tenant is ''; expected a tenant's name"):
        cache.erase_tenant("")
    with pytest.raises(kvx.OutOfRangeError, match="first_token is 65; expected 0 to num_tokens"):
        cache.erase_session(TOKENS, 65)
    sequence = cache.create_sequence_from(TOKENS, tenant="me")
    with pytest.raises(kvx.Error, match="tenant is 'me', who has sequence 0; free it first"):
        cache.erase_tenant("me")
    cache.free_sequence(sequence)
