"""Mooncake's store behind kvx.Cache: a real mooncake_master and Mooncake's own client."""

import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import time

import mooncake
import numpy as np
import pytest

import kvx
import kvx.mooncake

MASTER = pathlib.Path(list(mooncake.__path__)[0]) / "mooncake_master"
ROWS = np.random.default_rng(1).standard_normal((64, 2, 64)).astype(np.float32)
TOKENS = list(range(64))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Master:
    def __init__(self):
        self.port = free_port()
        self.process = subprocess.Popen(
            [MASTER, f"--rpc_port={self.port}", f"--metrics_port={free_port()}",
             "--rpc_address=127.0.0.1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(6000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        pytest.fail("mooncake_master does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def master():
    one = Master()
    yield one
    one.kill()


@pytest.fixture
def store(master):
    one = kvx.mooncake.MooncakeStore(f"127.0.0.1:{master.port}", segment_bytes=64 << 20)
    kvx.register_store("mooncake", one)
    yield one
    kvx.unregister_store("mooncake")
    one.close()


def cache_with(tiers="store(mooncake, timeout=60s)", recipe="nvfp4"):
    return kvx.Cache(
        num_layers=1, num_kv_heads=2, head_dim=64, recipe=recipe, max_tokens=64, block_size=16,
        prefix_model="a model", prefix_hash="sha256", tiers=tiers,
    )  # fmt: skip


def compute(cache, tokens=TOKENS, **keys):
    """How many of the tokens were found, and what attention of the last block gave."""
    sequence = cache.create_sequence_from(tokens, **keys)
    found = cache.num_tokens(sequence)
    out = None
    for first, last in ((found, 48), (48, 64)):
        if first == last:
            continue
        rows = ROWS[first:last]
        with cache.step([(sequence, last - first)]):
            out = cache.append_and_attend(0, rows, rows, rows)
    cache.record_tokens(sequence, tokens[found:])
    cache.free_sequence(sequence)
    cache.wait_for_tier()
    return found, out


@pytest.mark.parametrize("recipe", ["bf16", "int8/int4", "nvfp4", "int4:sink=10,recent=40"])
def test_what_one_cache_computed_another_begins_with(store, recipe):
    writer = cache_with(recipe=recipe)
    reader = cache_with("host(1MiB), store(mooncake, timeout=60s)", recipe)
    assert compute(writer)[0] == 0
    found, expected = compute(writer)
    assert found == 48
    found, loaded = compute(reader)
    assert found == 48
    np.testing.assert_array_equal(loaded, expected)
    facts = reader.tiers()[-1]
    assert facts.loaded >= 3 and facts.bad == facts.failed_calls == 0, facts.last_problem


def test_a_store_answers_each_call(store):
    keys = [f"kvx1/a/s/{i}-0p" for i in range(4)]
    values = [os.urandom(100_000 + i) for i in range(3)]
    assert store.put(keys[:3], values) is None
    assert store.put(keys[:1], values[:1]) is None, "again"
    assert store.exists(keys) == [True, True, True, False]
    assert store.get(keys) == [*values, None]
    store.remove(keys[:1])
    store.remove(keys[:1])
    assert store.exists(keys) == [False, True, True, False]
    store.put(["kvx1/ab/s/1-0p"], values[:1])
    store.remove_all("kvx1/a")
    assert store.exists([*keys, "kvx1/ab/s/1-0p"]) == [False] * 4 + [True]


def test_a_full_store_drops_blocks(master):
    one = kvx.mooncake.MooncakeStore(f"127.0.0.1:{master.port}", segment_bytes=16 << 20)
    try:
        keys = [f"kvx1/a/s/{i}-0p" for i in range(40)]
        stored = [one.put([key], [os.urandom(1 << 20)]) for key in keys]
        assert [False] in stored or len([1 for there in one.exists(keys) if there]) < 40
    finally:
        one.close()


def test_a_tenants_records_are_erased(store):
    cache = cache_with()
    compute(cache, tenant="me")
    compute(cache, tenant="you")
    cache.erase_tenant("me")
    assert compute(cache_with(), tenant="me")[0] == 0
    assert compute(cache_with(), tenant="you")[0] == 48
    cache.erase_session(TOKENS, 16, tenant="you")
    assert compute(cache_with(), tenant="you")[0] == 16


def test_steps_go_on_when_the_master_stops_or_dies(master, store):
    expected = compute(cache_with(""))[1]
    cache = cache_with("store(mooncake, timeout=200ms)")
    compute(cache)
    master.process.send_signal(signal.SIGSTOP)
    stopped = cache_with("store(mooncake, timeout=200ms)")
    begin = time.monotonic()
    found, out = compute(stopped)
    assert found == 0 and time.monotonic() - begin < 20
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert stopped.tiers()[0].failed_calls > 0
    master.process.send_signal(signal.SIGCONT)
    master.kill()
    dead = cache_with("store(mooncake, timeout=200ms)")
    assert compute(dead)[0] == 0
    assert dead.tiers()[0].failed_calls > 0


def test_the_block_of_the_tiers_page_runs(master):
    path = pathlib.Path(__file__).parents[1] / "python" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    shape = dict(num_layers=1, num_kv_heads=2, head_dim=64, recipe="int8", max_tokens=64)
    names = dict(address=f"127.0.0.1:{master.port}", shape=shape)
    try:
        assert pages.run_blocks("docs/tiers.md", " mooncake", **names) == 1
    finally:
        kvx.unregister_store("mooncake")


def test_a_master_that_is_not_there_is_refused():
    with pytest.raises(kvx.Error, match="expected the host:port of a mooncake_master that runs"):
        kvx.mooncake.MooncakeStore(f"127.0.0.1:{free_port()}", segment_bytes=1 << 20)
