"""Stores that engines share, behind the tiers of vLLM's offloading."""

import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import store_of_ours
from engines import prompts
from ports import reserved_ports
from test_offloading import key_of, offloading, said, worker

import kvx
from kvx import _core
from kvx.vllm import shared_stores
from kvx.vllm.shared_stores import StoreLink, StoreLookups, StoreTiers, make_stores

pytestmark = pytest.mark.usefixtures("in_this_process")


@contextmanager
def redis():
    """A server and its URL."""
    assert shutil.which("redis-server"), "expected Debian's redis-server"
    with reserved_ports() as port:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                for _ in range(600):
                    try:
                        socket.create_connection(("127.0.0.1", port), 10).close()
                        break
                    except OSError:
                        time.sleep(0.1)
                yield server, f"redis://127.0.0.1:{port}/0"
            finally:
                server.kill()


@contextmanager
def store(kind, folder):
    """A store's text. A machine may stall for longer than an answer may take else."""
    if kind == "folder":
        yield f"folder({folder}, timeout=60s)"
        return
    with redis() as (_, url):
        yield f"redis({url}, timeout=60s)"


def put_all(engine):
    """Once all that was stored is in the stores, too."""
    engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
    engine.outputs(prompts([5], seed=9), count=3)  # ... and end
    worker()._mover.submit(int).result()
    worker().link.flush()
    return worker().link.counts


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_another_engine_begins_with_what_one_has_stored(model, tmp_path, kind):
    (prompt,) = prompts([120])
    with store(kind, tmp_path) as text:
        tiers = f"host(1MiB), disk({tmp_path}, 1MiB), {text}"
        with offloading(model, "int8", tiers=tiers) as engine:
            (expected,) = engine.tokens([prompt])
            counts = put_all(engine)
            assert counts["put"] >= 3 and counts["unsent"] == 0
        with offloading(model, "int8", tiers=tiers) as engine:
            (output,) = engine.outputs([prompt])
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, 96)
            assert worker().link.counts["fetched"] == 3 and worker().bad_jobs == 0
            assert said(engine, prompt) == (expected, 96)  # by now from host memory
            assert worker().link.counts["fetched"] == 3
        with offloading(model, "int4", tiers=tiers) as engine:  # has records of its own
            (output,) = engine.outputs([prompt])
            assert output.num_cached_tokens == 0


def own_store(folder, name="mine"):
    """The extra config of a registered store."""
    recipe = {"make": "store_of_ours:make", "options": {"folder": str(folder)}}
    return dict(tiers=f"host(1MiB), store({name}, timeout=60s)", stores={name: recipe})


@pytest.fixture
def forgets_stores():
    yield
    for name in list(shared_stores._made):
        kvx.unregister_store(name)
        del shared_stores._made[name]


def test_a_store_of_ones_own_is_made_by_a_function(model, tmp_path, forgets_stores):
    (prompt,) = prompts([120])
    made = store_of_ours.NUM_MADE
    with offloading(model, "int8", **own_store(tmp_path)) as engine:
        (expected,) = engine.tokens([prompt])
        assert put_all(engine)["put"] >= 3
    assert list(tmp_path.iterdir())
    with offloading(model, "int8", **own_store(tmp_path)) as engine:
        (output,) = engine.outputs([prompt])
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, 96)
        assert worker().link.counts["fetched"] == 3
    assert store_of_ours.NUM_MADE == made + 1, "once a process"


def test_stores_that_nobody_can_make_are_refused(tmp_path, forgets_stores):
    for wanted, stores, message in [
        (["mine"], {}, r'store\(mine\), .* processes of their own, expected "stores": {"mine"'),
        (["mine"], ["mine"], "expected a dict"),
        (["mine"], {"other": "a:b"}, r"stores has \['other'\]"),
        (["mine"], {"mine": "nowhere"}, "expected 'module:function'"),
        (["mine"], {"mine": {"make": "a:b", "address": 1}}, "and options"),
        (["mine"], {"mine": "no_such_module:f"}, "cannot be had: No module named"),
        (["mine"], {"mine": "store_of_ours:no_such"}, "cannot be had: module"),
        (["mine"], {"mine": "store_of_ours:NOT_A_STORE"}, r"store is a dict without a method put"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            make_stores(wanted, stores)
    first, second = own_store(tmp_path)["stores"], own_store("/elsewhere")["stores"]
    make_stores(["mine"], first)
    make_stores(["mine"], first)
    with pytest.raises(kvx.Error, match="this process has it as"):
        make_stores(["mine"], second)


def test_a_damaged_record_is_computed_anew_and_replaced(model, tmp_path):
    (prompt,) = prompts([120])
    tiers = f"host(1MiB), folder({tmp_path}, timeout=60s)"
    with offloading(model, "int8", tiers=tiers) as engine:
        (expected,) = engine.tokens([prompt])
        put_all(engine)
    records = sorted(tmp_path.rglob("*-0p"))
    sound = [record.read_bytes() for record in records]
    for record, content in zip(records, sound):
        record.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    with offloading(model, "int8", tiers=tiers) as engine:
        (output,) = engine.outputs([prompt])
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, 0)
        assert worker().link.counts["bad"] == 3
        assert said(engine, prompt) == (expected, 0), "nobody asks for it again"
        put_all(engine)
        found = sorted(tmp_path.rglob("*-0p"))
        assert [record.read_bytes() for record in found if record in records] == sound
    with offloading(model, "int8", tiers=tiers) as engine:
        (output,) = engine.outputs([prompt])
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, 96)


def test_a_store_that_fails_costs_a_computation(model):
    first, second = prompts([120, 70])
    with redis() as (server, url), offloading(
        model, "int8", tiers=f"host(1MiB), redis({url}, timeout=60s)"
    ) as engine:
        (expected,) = engine.tokens([first])
        assert put_all(engine)["put"] >= 3
        server.kill()
        server.wait()
        engine.tokens([second])
        assert put_all(engine)["unsent"] >= 2
        assert said(engine, first) == (expected, 96), "host memory has it"
        worker().tiers[0].memory[:, 7] ^= 1
        assert said(engine, first) == (expected, 0)


def answer(lookups, key):
    for _ in range(6000):
        is_known, place = lookups.find(key)
        if is_known:
            return place
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_lookups_ask_once(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_stores, "_KEPT_MISS_SECONDS", 3600)
    tiers = StoreTiers(f"host(1MiB), folder({tmp_path}, timeout=60s)", (1,), ("1:folder",), 64)
    link = StoreLink(tiers, "worker 0 of 2\n")
    other = StoreLink(tiers, "worker 1 of 2\n")
    lookups = StoreLookups(tiers, ["worker 0 of 2\n", "worker 1 of 2\n"])
    assert answer(lookups, key_of(1)) is None
    link.put([(key_of(1), b"x" * 64)])
    link.flush()
    assert answer(lookups, key_of(1)) is None, "for a while nobody asks again"
    lookups.is_stored(key_of(1))
    assert answer(lookups, key_of(1)) is None, "one worker of two has it"
    other.put([(key_of(1), b"y" * 64)])
    other.flush()
    lookups.is_stored(key_of(1))
    assert answer(lookups, key_of(1)) == 0
    lookups.distrust(key_of(1))
    assert answer(lookups, key_of(1)) is None
    lookups.close()
    for one in (link, other):
        one.close()


def test_a_store_that_is_down_is_asked_again_when_it_is_back(monkeypatch):
    monkeypatch.setattr(shared_stores, "_SHORTEST_PAUSE", 0)
    monkeypatch.setattr(shared_stores, "_KEPT_MISS_SECONDS", 0.01)
    with redis() as (server, url):
        tiers = StoreTiers(f"host(1MiB), redis({url}, timeout=60s)", (1,), ("1:redis",), 64)
        link, lookups = StoreLink(tiers, "order x\n"), StoreLookups(tiers, ["order x\n"])
        server.kill()
        server.wait()
        assert answer(lookups, key_of(1)) is None
        link.put([(key_of(1), b"x" * 64)])
        link.flush()
        blocks, written = [(key_of(1), 0, 64)], []
        assert not link.fetch(blocks, [], lambda *block: written.append(block)).result()
        assert (link.counts["unsent"], link.counts["missing"], written) == (1, 1, [])
        with subprocess.Popen(server.args, stdout=subprocess.DEVNULL) as again:
            for _ in range(600):
                link.put([(key_of(1), b"x" * 64)])
                link.flush()
                lookups.is_stored(key_of(1))
                if answer(lookups, key_of(1)) == 0:
                    break
                time.sleep(0.1)
            assert answer(lookups, key_of(1)) == 0
            again.kill()
        lookups.close()
        link.close()


def test_lookups_wait_no_longer_than_the_timeout(tmp_path, monkeypatch):
    tiers = StoreTiers(f"host(1MiB), folder({tmp_path}, timeout=300ms)", (1,), ("1:folder",), 64)
    lookups = StoreLookups(tiers, ["order x\n"])
    may_end = threading.Event()
    monkeypatch.setattr(lookups, "_ask", lambda keys: may_end.wait(300) and {})
    started = time.monotonic()
    assert lookups.find(key_of(2)) == (False, None)
    assert answer(lookups, key_of(2)) is None
    assert time.monotonic() - started >= 0.3 and not may_end.is_set()
    may_end.set()
    lookups.close()


def test_a_slow_store_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_stores, "_MOST_WAITING_BYTES", 100)
    tiers = StoreTiers(f"host(1MiB), folder({tmp_path}, timeout=60s)", (1,), ("1:folder",), 64)
    link = StoreLink(tiers, "order x\n")
    may_begin = threading.Event()
    link._putters[0].submit(may_begin.wait, 300)
    link.put([(key_of(1), b"x" * 64)])
    link.put([(key_of(2), b"x" * 64)])
    may_begin.set()
    link.flush()
    assert link.counts["put"] == 1 and link.counts["unsent"] == 1
    found = {}
    blocks = [(key_of(1), 0, 64), (key_of(2), 0, 64)]
    fetched = link.fetch(blocks, [], lambda i, content: found.update({i: content}) or True)
    assert fetched.result() is False and found == {0: b"x" * 64}
    assert link.counts["missing"] == link.counts["fetched"] == 1
    link.close()


def test_names_that_cannot_be_are_refused(tmp_path):
    store = _core.BlockStore(f"host(1MiB), folder({tmp_path})", 1, "order x\n", 64)
    for call, message in [
        (lambda: store.exists([b""], [0]), "name has 0 bytes"),
        (lambda: store.exists([b"x" * 33], [0]), "name has 33 bytes"),
        (lambda: store.exists([b"x"], [0, 1]), "groups has 2 entries; expected 1"),
        (lambda: store.put([b"x"], [0], []), "payloads has 0 entries"),
        (lambda: store.get([b"x"], [0], []), "num_bytes has 0 entries"),
        (lambda: _core.BlockStore("host(1MiB)", 0, "", 64), "tier 0 of .* is no store"),
    ]:
        with pytest.raises(Exception, match=message):
            call()
