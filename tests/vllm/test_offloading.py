"""Blocks that wait in host memory: they come back as they went, or are computed anew."""

from collections import Counter

import pytest
from engines import Engine, prompts, save_model
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import LookupResult, ReqContext

import kvx
from kvx.vllm import offloading_manager
from kvx.vllm.offloading import KvxOffloadingSpec
from kvx.vllm.offloading_manager import METRICS, TIER_METRICS, KvxOffloadingManager, Tier

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
        (dict(tiers="host(1MiB), folder(/tmp)"), "vLLM's offloading takes tiers of one engine"),
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


def test_blocks_go_down_the_tiers_and_come_back_from_where_they_lie():
    manager = KvxOffloadingManager([Tier(2), Tier(2, "/folder"), Tier(1, "/folder")])
    assert store(manager, b"a", b"b") == []
    ((a_slot, to_slot),) = store(manager, b"c")
    assert to_slot in (2, 3) and manager.prepare_load([b"a"], None).block_ids.tolist() == [to_slot]
    manager.complete_load([b"a"], None)
    store(manager, b"d")
    output = manager.prepare_store([b"e"], None)
    targets = [target for _, target in output.store_spec.moves]
    assert targets == [4, to_slot], "the lowest goes first"
    assert manager.lookup(b"a", None) == LookupResult.HIT_PENDING, "until it has moved"
    manager.complete_store([b"e"], None)
    assert manager.lookup(b"a", None) == LookupResult.HIT
    assert manager.prepare_store([b"f"], None).evicted_keys == [b"a"]
    assert manager.lookup(b"a", None) == LookupResult.MISS
    found = counts(manager)
    assert found["tier_blocks_moved_down 0:host"] == 4
    assert found["tier_blocks_moved_down 1:disk"] == 2
    assert found["tier_blocks_loaded 1:disk"] == found["blocks_evicted"] == 1


def test_a_block_that_is_read_stays_where_it_is():
    manager = KvxOffloadingManager([Tier(1), Tier(1, "/folder")])
    store(manager, b"a")
    manager.prepare_load([b"a"], None)
    assert manager.prepare_store([b"b"], None).keys_to_store == []
    manager.complete_load([b"a"], None)
    assert store(manager, b"b") == [(0, 1)]


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
        {"pin": True},
        {"priority": 80, "seconds": 10},
        {"priority": 101},
        {"priority": -1},
        {"priority": True},
        {"priority": "high"},
        {},
        [80],
        "kvx",
    ],
)
def test_a_request_that_asks_for_what_tiers_lack_is_told_and_served(said, monkeypatch):
    told = []
    monkeypatch.setattr(offloading_manager._log, "warning", lambda text, *_: told.append(text))
    manager = KvxOffloadingManager([Tier(1)])
    context = request(manager, {"kvx": said})
    assert len(told) == 1 and "expected" in told[0]
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
