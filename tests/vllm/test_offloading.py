"""Blocks that wait in host memory: they come back as they went, or are computed anew."""

from collections import Counter

import pytest
from engines import Engine, prompts, save_model
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvx
from kvx.vllm.offloading import METRICS, KvxOffloadingManager, KvxOffloadingSpec

pytestmark = pytest.mark.usefixtures("in_this_process")


def offloading(model, recipe, megabytes=16.0, **extra):
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
    return Engine(model, recipe, kv_transfer_config=transfer)


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
        worker().blocks.memory[:, 7] ^= 1
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
        worker().blocks.memory[:, 7] ^= 1
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
        (dict(tiers="host(1MiB), disk(/tmp, 1MiB)"), "vLLM's offloading takes one tier"),
        (dict(tiers="folder(/tmp)"), "vLLM's offloading takes one tier"),
        (dict(tiers="tape(1MiB)"), "tiers has a tier 'tape'"),
        (dict(tiers="disk(/dev/null, 1MiB)"), "'/dev/null' takes no files"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            offloading(model, "f32", **options)


def counts(manager):
    """What vLLM is told since the last call, by METRICS' last words."""
    stats = manager.get_stats()
    found = {} if stats is None else stats.reduce()
    return {name.removeprefix("vllm:kvx_offload_blocks_"): count for name, count in found.items()}


def test_each_block_is_counted_once_and_every_count_has_a_metric():
    manager = KvxOffloadingManager(2)
    assert counts(manager) == {}
    manager.prepare_store([b"a", b"b"], None)
    assert counts(manager) == {}  # under way
    manager.complete_store([b"a", b"b"], None)
    assert counts(manager) == {"stored": 2}
    manager.prepare_load([b"a"], None)
    manager.complete_load([b"a"], None)
    manager.prepare_store([b"c"], None)
    manager.complete_store([b"c"], None, success=False)
    assert counts(manager) == {"loaded": 1, "evicted": 1}
    manager.count("bad", 3)
    assert counts(manager) == {"bad": 3} and counts(manager) == {}
    definitions = KvxOffloadingSpec.build_metric_definitions({})
    assert set(definitions) == set(METRICS)


def test_vllm_is_told_what_happened_to_blocks(model):
    (prompt,) = prompts([120])
    with offloading(model, "int8") as engine:
        manager = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager
        total = Counter()
        manager.get_stats = lambda: total.update(manager._new_counts) or manager._new_counts.clear()
        engine.tokens([prompt])
        said(engine, prompt)
        assert total["vllm:kvx_offload_blocks_stored"] >= 3
        assert total["vllm:kvx_offload_blocks_loaded"] == 3
        assert total["vllm:kvx_offload_blocks_bad"] == 0
        worker().blocks.memory[:, 7] ^= 1
        said(engine, prompt)
        assert total["vllm:kvx_offload_blocks_bad"] == 3
