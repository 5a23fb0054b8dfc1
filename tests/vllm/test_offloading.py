"""Blocks that wait in host memory: they come back as they went, or are computed anew."""

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from engines import Engine, prompts, save_model
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)

import kvx
from kvx.vllm import offloading_manager
from kvx.vllm.offloading import KvxOffloadingSpec
from kvx.vllm.offloading_manager import METRICS, TIER_METRICS, KvxOffloadingManager, Tier
from kvx.vllm.offloading_worker import KvxOffloadingWorker
from kvx.vllm.shared_stores import StoreLink, StoreTiers

pytestmark = pytest.mark.usefixtures("in_this_process")


def offloading(model, recipe, megabytes=16.0, engine=None, **extra):
    budget = {} if "tiers" in extra else {"cpu_bytes_to_use": int(megabytes * 2**20)}
    transfer = {
        "kv_connector": "KvxOffloadingConnector",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.vllm.offloading",
            **budget,
            **extra,
        },
    }
    return Engine(model, recipe, kv_transfer_config=transfer, **(engine or {}))


def said(engine, prompt):
    """(tokens, how many of the prompt's were cached) once vLLM's own blocks are forgotten."""
    engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
    assert engine.llm.reset_prefix_cache()
    (output,) = engine.outputs([prompt])
    return output.outputs[0].token_ids, output.num_cached_tokens


def worker():
    return get_kv_transfer_group().connector_worker.worker


def test_blocks_come_back_from_host_memory_or_are_computed_anew(model):
    (prompt,) = prompts([120])
    with offloading(model, "int8") as engine:
        (expected,) = engine.tokens([prompt])
        assert said(engine, prompt) == (expected, 96)
        assert worker().bad_jobs == 0
        worker().tiers[0].memory[:, 7] ^= 1
        assert said(engine, prompt) == (expected, 0)
        assert worker().bad_jobs == 1
        assert said(engine, prompt) == (expected, 0)  # forgotten
        assert said(engine, prompt) == (expected, 96)  # stored anew
        assert worker().bad_jobs == 1


def test_a_step_loads_its_blocks_layer_by_layer(model, monkeypatch):
    """What was computed beside a load that was bad is stored by nobody."""
    waited = []
    wait_for_layer = KvxOffloadingWorker.wait_for_layer

    def wait(self, layer):
        if self._layers and self._layers[layer]:
            waited.append((layer, [number for number, loads in enumerate(self._layers) if loads]))
        wait_for_layer(self, layer)

    monkeypatch.setattr(KvxOffloadingWorker, "wait_for_layer", wait)
    (prompt,) = prompts([120])
    (more,) = prompts([70], seed=8)
    longer = {"prompt_token_ids": prompt["prompt_token_ids"] + more["prompt_token_ids"]}
    with Engine(model, "int8") as engine:
        expected, expected_longer = engine.tokens([prompt, longer])
    with offloading(model, "int8", load_by_layer=True) as engine:
        assert engine.tokens([prompt]) == [expected]
        assert said(engine, prompt) == (expected, 96)
        assert waited == [(i, list(range(i, 4))) for i in range(4)], "in the order of the layers"
        assert worker().bad_jobs == 0
        worker().tiers[0].memory[:, 7] ^= 1
        assert said(engine, longer)[0] == expected_longer, "computed anew"
        assert worker().bad_jobs == 1
        assert said(engine, longer)[0] == expected_longer
        assert said(engine, longer) == (expected_longer, 160)
        assert engine.llm.reset_prefix_cache()
        assert engine.tokens([prompt, longer]) == [expected, expected_longer], "both in a step"
        assert worker().bad_jobs == 1 and not worker().by_layer


def test_blocks_that_are_not_in_memory_come_as_a_whole(model, tmp_path, monkeypatch):
    begun = []
    begin_layers = KvxOffloadingWorker.begin_layers

    def begin(self):
        begun.extend(self.by_layer)
        begin_layers(self)

    monkeypatch.setattr(KvxOffloadingWorker, "begin_layers", begin)
    (prompt,) = prompts([120])
    tiers = f"host(384KiB), disk({tmp_path}, 16MiB)"  # a block has 128 KiB
    with offloading(model, "f32", tiers=tiers, load_by_layer=True) as engine:
        (expected,) = engine.tokens([prompt])
        engine.tokens(prompts([70], seed=4))
        assert said(engine, prompt) == (expected, 96) and not begun
        assert worker().bad_jobs == 0


def test_what_cannot_be_loaded_by_layer_is_refused(model, tmp_path_factory):
    with pytest.raises(kvx.Error, match="load_by_layer is 'yes'; expected true or false"):
        offloading(model, "int8", load_by_layer="yes")
    gemma = save_model("gemma2", tmp_path_factory.mktemp("gemma2"))
    with pytest.raises(kvx.UnsupportedError, match="2 groups of layers; expected 1"):
        offloading(gemma, "int8", load_by_layer=True)


@pytest.mark.parametrize("tier", ["host(16MiB)", "disk({folder}, 16MiB)"])
def test_a_tier_is_named_as_everywhere(model, tmp_path, tier):
    (prompt,) = prompts([120])
    with offloading(model, "int8", tiers=tier.format(folder=tmp_path)) as engine:
        (expected,) = engine.tokens([prompt])
        assert said(engine, prompt) == (expected, 96)
        assert worker().bad_jobs == 0
        worker().tiers[0].memory[:, 7] ^= 1
        assert said(engine, prompt) == (expected, 0), "computed anew"
        assert worker().bad_jobs == 1


def test_sliding_windows_and_two_groups_of_layers(tmp_path_factory):
    model = save_model("gemma2", tmp_path_factory.mktemp("gemma2"))
    (prompt,) = prompts([150])
    with offloading(model, "f32") as engine:
        (expected,) = engine.tokens([prompt])
        assert said(engine, prompt) == (expected, 128)


def test_a_small_budget_keeps_what_was_used_last(model):
    first, second = prompts([70, 70])
    with offloading(model, "f32", megabytes=1 / 4) as engine:  # a block has 128 KiB
        expected = engine.tokens([first]), engine.tokens([second])
        assert said(engine, second) == (expected[1][0], 64)
        assert said(engine, first)[0] == expected[0][0]


def test_what_host_memory_cannot_serve_is_refused(model):
    for options, message in [
        (dict(megabytes=0), "cpu_bytes_to_use is 0; expected at least a block's 131072"),
        (dict(blocks_per_chunk=2), "chunks of 2 blocks"),
        (dict(tiers="host(1KiB)"), r"the budget of host\(...\) is 1024; expected at least a"),
        (dict(tiers="host(1MiB), disk(/tmp, 1KiB)"), r"the budget of disk\(...\) is 1024"),
        (dict(tiers="folder(/tmp), host(1MiB)"), "redis.* and store.* behind them"),
        (dict(tiers="folder(/tmp)"), "one of them at least"),
        (dict(tiers="host(1MiB), store(mine)"), 'expected "stores": {"mine": "module:function"}'),
        (dict(tiers="host(1MiB), redis(ftp://x)"), "redis"),
        (dict(tiers="tape(1MiB)"), "tiers has a tier 'tape'"),
        (dict(tiers="disk(/dev/null, 1MiB)"), "'/dev/null' takes no files"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            offloading(model, "f32", **options)


def counts(manager):
    """What vLLM is told since the last call, by METRICS' last words (and the tier)."""
    stats = manager.get_stats()
    found = {}
    for name, values in stats._values.items() if stats is not None else ():
        for labels, count in values.items():
            found[" ".join([name.removeprefix("vllm:kvx_offload_"), *labels])] = count
    return found


def store(manager, *keys):
    """The moves that make room for these blocks, once they are stored."""
    output = manager.prepare_store(keys, None)
    assert output.keys_to_store == list(keys)
    manager.complete_store(keys, None)
    return output.store_spec.moves


def test_each_block_is_counted_once_and_every_count_has_a_metric():
    manager = KvxOffloadingManager([Tier(2)])
    assert counts(manager) == {}
    manager.prepare_store([b"a", b"b"], None)
    assert counts(manager) == {}  # under way
    manager.complete_store([b"a", b"b"], None)
    assert counts(manager) == {"blocks_stored": 2, "tier_blocks_stored 0:host": 2}
    manager.prepare_load([b"a"], None)
    manager.complete_load([b"a"], None)
    manager.prepare_store([b"c"], None)
    manager.complete_store([b"c"], None, success=False)
    assert counts(manager) == {
        "blocks_loaded": 1,
        "tier_blocks_loaded 0:host": 1,
        "blocks_evicted": 1,
    }
    manager.count("blocks_bad", 3)
    assert counts(manager) == {"blocks_bad": 3} and counts(manager) == {}
    definitions = KvxOffloadingSpec.build_metric_definitions({})
    assert set(definitions) == set(METRICS) | set(TIER_METRICS)


def test_blocks_go_down_the_tiers_and_up_when_they_are_loaded():
    manager = KvxOffloadingManager([Tier(2), Tier(2, "/folder"), Tier(1, "/folder")])
    assert store(manager, b"a", b"b") == []
    assert store(manager, b"c") == [(1, 3)], "a goes down"
    loads = manager.prepare_load([b"a"], None)
    assert loads.block_ids.tolist() == [3], "it is read where it lies"
    assert loads.moves == [(0, 2), (3, 0)], "and goes up to where b was"
    assert manager.lookup(b"b", None) == LookupResult.HIT_PENDING, "until it has moved"
    assert manager.prepare_load([b"a"], None).moves == [], "it is there"
    manager.complete_load([b"a"], None)
    assert 3 not in manager._tiers[1].free, "somebody still reads it there"
    manager.complete_load([b"a"], None)
    assert 3 in manager._tiers[1].free
    assert manager.lookup(b"b", None) == LookupResult.HIT
    assert store(manager, b"d") == [(1, 3)]
    assert store(manager, b"e") == [(2, 4), (0, 2)], "the lowest goes first"
    assert manager.prepare_store([b"f"], None).evicted_keys == [b"b"]
    assert manager.lookup(b"b", None) == LookupResult.MISS
    found = counts(manager)
    assert found["tier_blocks_moved_down 0:host"] == 5
    assert found["tier_blocks_moved_down 1:disk"] == 2
    assert found["tier_blocks_moved_up 1:disk"] == found["blocks_evicted"] == 1
    assert found["tier_blocks_loaded 1:disk"] == 2


def test_what_the_first_tier_cannot_take_goes_to_the_next():
    manager = KvxOffloadingManager([Tier(2), Tier(3, "/folder")])
    store(manager, b"x")
    output = manager.prepare_store([b"a", b"b", b"c", b"d", b"e"], None)
    assert output.keys_to_store == [b"a", b"b", b"c", b"d"], "x has gone down"
    assert output.store_spec.block_ids.tolist() == [1, 0, 3, 2]
    assert output.store_spec.moves == [(1, 4)] and output.evicted_keys == []
    manager.complete_store(output.keys_to_store, None)
    found = counts(manager)
    assert found["tier_blocks_stored 0:host"] == 3 and found["tier_blocks_stored 1:disk"] == 2


def test_a_block_that_is_read_stays_where_it_is():
    manager = KvxOffloadingManager([Tier(1), Tier(1, "/folder")])
    store(manager, b"a")
    manager.prepare_load([b"a"], None)
    assert store(manager, b"b") == []  # in the second tier
    loads = manager.prepare_load([b"b"], None)
    assert loads.block_ids.tolist() == [1] and loads.moves == [], "nobody makes room for it"
    manager.complete_load([b"a"], None)
    manager.complete_load([b"b"], None)
    manager.prepare_load([b"b"], None)
    assert b"b" in manager._tiers[0].entries
    assert manager.lookup(b"a", None) == LookupResult.MISS, "it made room, and there was none below"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def store_for(manager, params, *keys):
    context = request(manager, {"kvx": params})
    manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
    return context


def evicted(manager, *keys):
    output = manager.prepare_store(keys, None)
    manager.complete_store(output.keys_to_store, None)
    return output.evicted_keys


def test_a_priority_ends_with_its_time():
    clock = Clock()
    manager = KvxOffloadingManager([Tier(3)], clock=clock)
    store_for(manager, {"priority": 80, "seconds": 10}, b"a")
    store_for(manager, {"priority": 10, "seconds": 10}, b"b")
    store(manager, b"c")
    clock.now = 9
    assert evicted(manager, b"d") == [b"b"]
    clock.now = 10
    assert evicted(manager, b"e") == [b"a"], "of its time it was the last, now it is the first"
    store_for(manager, {"seconds": 5}, b"f")
    manager.touch([b"f"], request(manager, {"kvx": {"priority": 90}}))  # for good
    clock.now = 1000
    assert evicted(manager, b"g", b"h") == [b"d", b"e"]


def test_a_pinned_block_leaves_no_tier():
    clock = Clock()
    manager = KvxOffloadingManager([Tier(4), Tier(2, "/folder")], clock=clock)
    store_for(manager, {"pin": True, "seconds": 10}, b"a", b"b", b"c")  # two are half of the tier
    for key in (b"1", b"2", b"3", b"4", b"5", b"6"):
        store(manager, key)
    assert {b"a", b"b"} <= manager._tiers[0].entries.keys()
    assert b"c" in manager._tiers[1].entries, "half of that tier, too"
    clock.now = 10
    for key in (b"7", b"8", b"9"):
        store(manager, key)
    assert all(manager.lookup(key, None) == LookupResult.MISS for key in (b"b", b"c"))


def test_what_a_session_alone_used_goes_first_once_it_is_over():
    manager = KvxOffloadingManager([Tier(4)])
    store_for(manager, {"session": "one"}, b"a", b"b", b"c")
    store(manager, b"d")
    manager.touch([b"b"], request(manager, {"kvx": {"session": "two"}}))
    last = request(manager, {"kvx": {"session": "one", "ends_session": True}})
    manager.touch([b"a"], last)
    manager.on_request_finished(last)
    assert evicted(manager, b"e", b"f") == [b"c", b"a"]
    assert evicted(manager, b"g") == [b"d"], "session two goes on"
    manager.on_request_finished(request(manager, {"kvx": {"session": "two", "ends_session": True}}))
    assert manager.lookup(b"b", None) == LookupResult.HIT
    manager.touch([b"b"], None)  # it is of use again
    assert evicted(manager, b"h") == [b"e"]
    assert manager._sessions == {}


def test_a_session_that_ends_with_nothing_stored_is_no_error():
    manager = KvxOffloadingManager([Tier(1)])
    manager.on_request_finished(request(manager, {"kvx": {"session": "x", "ends_session": True}}))
    manager.on_request_finished(request(manager, None))
    store_for(manager, {"session": "y"}, b"a")
    evicted(manager, b"b")
    assert manager._sessions == {}


def fill(page, key):
    page.copy_(torch.arange(page.numel()).reshape(page.shape) * 3 + key)


def key_of(number):
    return make_offload_key(bytes([number]) * 32, 0)


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_brings_back_what_was_stored(seed, has_store, tmp_path):
    """Random stores and loads through three tiers and a store, some under way at once: what vLLM
    may load is what it stored, whatever moved meanwhile."""
    rng = random.Random(seed)
    tiers = [Tier(4), Tier(3, str(tmp_path)), Tier(5, str(tmp_path))]
    pages = [torch.zeros((64, 96), dtype=torch.uint8), torch.zeros((64, 32), dtype=torch.uint8)]
    refs = [SimpleNamespace(tensor_idx=i) for i in range(2)]
    tensors = [SimpleNamespace(tensor=page) for page in pages]
    text = f"host(1MiB), folder({tmp_path}, timeout=60s)"  # a machine may stall
    stores = StoreTiers(text, (1,), ("1:folder",), 128)
    manager = KvxOffloadingManager(tiers, stores=stores if has_store else None)
    manager.use_stores(["order x\n"])
    link = StoreLink(stores, "order x\n") if has_store else None
    caches = SimpleNamespace(tensors=tensors, group_data_refs=[refs])
    mover = KvxOffloadingWorker(caches, tiers, link)
    jobs, free, num_loaded = {}, list(range(64)), 0

    def poll(wait_for=None):
        nonlocal num_loaded
        if wait_for is not None:
            mover.wait(wait_for)
        results = mover.get_finished()
        bad, mover.bad_blocks = mover.bad_blocks, set()
        if bad:  # of a store, and all slots were in use: vLLM computes them
            assert has_store
            manager.doubt_loads()
        for result in results:
            verb, keys, blocks = jobs.pop(result.job_id)
            if verb == "store":
                manager.complete_store(keys, None)
            else:
                manager.complete_load(keys, None)
            free.extend(blocks)
            if verb == "store" or bad & set(blocks):
                continue
            num_loaded += len(keys)
            for key, block in zip(keys, blocks):
                for page in pages:
                    right = page[:1].clone()
                    fill(right, key[0])
                    assert torch.equal(page[block : block + 1], right), (key, block)

    for job in range(300):
        busy = {key for _, keys, _ in jobs.values() for key in keys}
        idle = [key for key in map(key_of, range(20)) if key not in busy]
        keys = rng.sample(idle, min(len(idle), rng.randint(1, 6)))
        for _ in range(60_000):
            answers = [manager.lookup(key, None) for key in keys]
            if LookupResult.RETRY not in answers:
                break
            time.sleep(0.001)
        found = [key for key, answer in zip(keys, answers) if answer == LookupResult.HIT]
        manager.touch(found, None)
        if found and rng.random() < 0.6:
            verb, keys = "load", found
            slots = manager.prepare_load(keys, None)
        else:
            verb = "store"
            output = manager.prepare_store(keys, None)
            keys, slots = output.keys_to_store, output.store_spec
        if keys and len(free) >= len(keys):
            blocks = [free.pop(0) for _ in keys]
            for key, block in zip(keys, blocks):
                for page in pages:
                    fill(page[block : block + 1], key[0] if verb == "store" else 255)
            spec = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
            jobs[job] = (verb, keys, blocks)
            if verb == "store":
                mover.submit_store(job, spec, slots)
            else:
                mover.submit_load(job, slots, spec)
        if rng.random() < 0.5 or len(free) < 12:
            poll(wait_for=set(jobs) if len(free) < 12 or rng.random() < 0.3 else None)
    poll(wait_for=set(jobs))
    assert not jobs and num_loaded > 50
    for tier, config in zip(manager._tiers, tiers):
        assert len(tier.free) + len(tier.entries) == config.num_slots
    mover.shutdown()
    manager.shutdown()
    if has_store:
        assert link.counts["fetched"] > 10 and link.counts["bad"] == link.counts["missing"] == 0


def request(manager, params):
    context = ReqContext("a request", params)
    manager.on_new_request(context)
    return context


def test_blocks_of_a_low_priority_go_first():
    manager = KvxOffloadingManager([Tier(3)])
    for key, priority in ((b"a", 80), (b"b", 10)):
        context = request(manager, {"kvx": {"priority": priority}})
        manager.complete_store(manager.prepare_store([key], context).keys_to_store, context)
    store(manager, b"c")
    assert manager.prepare_store([b"d", b"e"], None).evicted_keys == [b"b", b"c"]
    manager.complete_store([b"d", b"e"], None)
    manager.touch([b"d"], request(manager, {"kvx": {"priority": 90}}))
    manager.touch([b"a"], request(manager, {"kvx": {"priority": 0}}))
    manager.touch([b"a"], request(manager, None))
    assert manager.prepare_store([b"f", b"g"], None).evicted_keys == [b"a", b"e"]


@pytest.mark.parametrize(
    "said",
    [
        {"pin": 1},
        {"priority": 80, "seconds": 0},
        {"seconds": True},
        {"session": ""},
        {"session": "x" * 257},
        {"session": 7},
        {"ends_session": True},
        {"tokens": 80},
        {"priority": 101},
        {"priority": -1},
        {"priority": True},
        {"priority": "high"},
        {},
        [80],
        "kvx",
    ],
)
def test_a_request_that_asks_for_what_cannot_be_is_told_and_served(said, monkeypatch):
    told = []
    monkeypatch.setattr(offloading_manager._log, "warning", lambda text, *_: told.append(text))
    manager = KvxOffloadingManager([Tier(1)])
    context = request(manager, {"kvx": said})
    assert len(told) == 1 and "retains a request's blocks like others" in told[0]
    manager.complete_store(manager.prepare_store([b"a"], context).keys_to_store, context)
    assert manager.prepare_store([b"b"], None).evicted_keys == [b"a"]


def test_events_name_the_medium():
    manager = KvxOffloadingManager([Tier(1), Tier(1, "/folder")], sends_events=True)
    for key in (b"a", b"b", b"c"):
        store(manager, key)
    told = [(event.keys, event.medium.value, event.removed) for event in manager.take_events()]
    assert told == [
        ([b"a"], "CPU", False),
        ([b"a"], "CPU", True),
        ([b"a"], "STORAGE", False),
        ([b"b"], "CPU", False),
        ([b"a"], "STORAGE", True),
        ([b"b"], "CPU", True),
        ([b"b"], "STORAGE", False),
        ([b"c"], "CPU", False),
    ]
    assert list(manager.take_events()) == []
    manager.reset_cache()
    told = {(event.keys[0], event.medium.value, event.removed) for event in manager.take_events()}
    assert told == {(b"c", "CPU", True), (b"b", "STORAGE", True)}


def test_an_engines_blocks_go_to_a_disk_and_come_back(model, tmp_path):
    """A block has 128 KiB: three in memory, the others on the disk."""
    (prompt,) = prompts([120])
    tiers = f"host(384KiB), disk({tmp_path}, 16MiB)"
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with offloading(model, "f32", tiers=tiers, engine=dict(kv_events_config=events)) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        told = Counter()

        def publish(batch):
            for event in batch.events:
                if isinstance(event, (BlockStored, BlockRemoved)):
                    told[type(event).__name__, event.medium] += len(event.block_hashes)

        scheduler.kv_event_publisher.publish = publish
        (expected,) = engine.tokens([prompt])
        engine.tokens(prompts([70], seed=4))
        assert said(engine, prompt) == (expected, 96)
        assert worker().bad_jobs == 0
        assert told["BlockStored", "CPU"] >= 4 and told["BlockStored", "STORAGE"] >= 2
        assert told["BlockRemoved", "CPU"] == told["BlockStored", "STORAGE"]
        params = {"kv_transfer_params": {"kvx": {"priority": 80}}}
        engine.llm.generate(
            prompts([70], seed=5),
            SamplingParams(max_tokens=3, detokenize=False, extra_args=params),
            use_tqdm=False,
        )
        first = scheduler.connector.scheduler.manager._tiers[0]
        assert [entry.priority for entry in first.entries.values()].count(80) == 2
        for tier in worker().tiers:
            tier.memory[:, 7] ^= 1
        assert said(engine, prompt)[0] == expected, "computed anew"
        assert worker().bad_jobs == 1


def test_vllm_is_told_what_happened_to_blocks(model):
    (prompt,) = prompts([120])
    with offloading(model, "int8") as engine:
        manager = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager
        total = Counter()
        get_stats = manager.get_stats

        def count():
            manager.get_stats = get_stats
            total.update(counts(manager))
            manager.get_stats = count

        manager.get_stats = count
        engine.tokens([prompt])
        said(engine, prompt)
        assert total["blocks_stored"] >= 3
        assert total["blocks_loaded"] == 3
        assert total["blocks_bad"] == 0
        worker().tiers[0].memory[:, 7] ^= 1
        said(engine, prompt)
        assert total["blocks_bad"] == 3
