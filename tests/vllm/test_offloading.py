"""Blocks that wait in host memory: they come back as they went, or are computed anew."""

import pytest
from engines import Engine, prompts, save_model
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvx
import kvx.vllm.offloading as offloading_spec


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def offloading(model, recipe, megabytes=16, **extra):
    transfer = {
        "kv_connector": "KvxOffloadingConnector",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.vllm.offloading",
            "cpu_bytes_to_use": int(megabytes * 2**20),
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
    ]:
        with pytest.raises(kvx.Error, match=message):
            offloading(model, "f32", **options)


def test_on_a_gpu_vllms_own_spec_is_named(monkeypatch):
    monkeypatch.setattr(offloading_spec.current_platform, "is_cpu", lambda: False)
    with pytest.raises(kvx.UnsupportedError, match="set kv_connector to OffloadingConnector"):
        offloading_spec.KvxOffloadingSpec(None)
