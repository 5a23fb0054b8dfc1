"""Two tensor-parallel workers: each has heads of its own, so files and host memory of its own."""

import time

import pytest
from engines import BLOCK, Engine, prompts
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvx
from kvx.vllm import shared_stores
from kvx.vllm.offloading_manager import KvxOffloadingManager, Tier

WORKERS = 2
CACHED = 96  # of 120 tokens: whole blocks, less the last token


@pytest.fixture(autouse=True)
def on_one_machine(monkeypatch):
    """The scheduler in this process, a core a worker: vLLM wants a NUMA node for each otherwise."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(WORKERS))))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions for workers


def two_workers(model, connector, **extra):
    module = "connector" if connector == "KvxFileConnector" else "offloading"
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": f"kvx.vllm.{module}",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return Engine(model, "int8", tensor_parallel_size=WORKERS, kv_transfer_config=transfer)


def said(engine, prompt):
    """(tokens, how many of the prompt's were cached) once vLLM's own blocks are forgotten."""
    engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
    assert engine.llm.reset_prefix_cache()
    (output,) = engine.outputs([prompt])
    return output.outputs[0].token_ids, output.num_cached_tokens


def written(folder, count):
    """The files of a folder, once there are as many: a worker writes beside the engine's steps."""
    for _ in range(600):
        files = sorted(folder.glob("*.kvx"))
        if len(files) == count:
            break
        time.sleep(0.1)
    assert len(files) == count
    return files


def sound_again(sound):
    """Files that have what they had, once there are some: as above."""
    for _ in range(600):
        files = [file for file, content in sound.items() if file.read_bytes() == content]
        if files:
            break
        time.sleep(0.1)
    return files


def test_each_worker_has_files_of_its_own(model, tmp_path):
    (prompt,) = prompts([120])
    with two_workers(model, "KvxFileConnector", path=str(tmp_path)) as engine:
        (expected,) = engine.tokens([prompt])
        folders = sorted(tmp_path.iterdir())
        assert len(folders) == WORKERS
        files = [written(folder, 139 // BLOCK) for folder in folders]
        facts = [kvx.inspect(of_worker[0]).fingerprint.splitlines() for of_worker in files]
        assert {*facts[0]} ^ {*facts[1]} == {"worker 0 of 2", "worker 1 of 2"}
        for one, other in zip(*files):
            assert one.name == other.name and one.read_bytes() != other.read_bytes()
        assert said(engine, prompt) == (expected, CACHED)

        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
        for of_worker in files:  # one worker's file is enough to make a block a miss
            sound = {file: file.read_bytes() for file in of_worker}
            for file, content in sound.items():
                file.write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
            scheduler.counts.clear()
            assert said(engine, prompt) == (expected, 0)
            assert scheduler.counts["bad"] == 1  # the first; those after it are of no use
            assert len(sound_again(sound)) == 1
            for file, content in sound.items():
                file.write_bytes(content)
        assert said(engine, prompt) == (expected, CACHED)


def _damage_workers_memory(worker, rank):
    if worker.rank == rank:
        get_kv_transfer_group().connector_worker.worker.tiers[0].memory[:, 7] ^= 1


def _bad_jobs(worker):
    return get_kv_transfer_group().connector_worker.worker.bad_jobs


def test_each_worker_has_host_memory_of_its_own(model):
    (prompt,) = prompts([120])
    extra = {
        "spec_name": "KvxOffloadingSpec",
        "spec_module_path": "kvx.vllm.offloading",
        "cpu_bytes_to_use": 1 << 24,
    }
    with two_workers(model, "KvxOffloadingConnector", **extra) as engine:
        (expected,) = engine.tokens([prompt])
        assert said(engine, prompt) == (expected, CACHED)
        for rank in range(WORKERS):
            before = engine.llm.collective_rpc(_bad_jobs)
            engine.llm.collective_rpc(_damage_workers_memory, args=(rank,))
            assert said(engine, prompt) == (expected, 0)
            after = engine.llm.collective_rpc(_bad_jobs)
            assert [b - a for a, b in zip(before, after)] == [
                int(w == rank) for w in range(WORKERS)
            ]
            assert said(engine, prompt) == (expected, 0)  # forgotten
            assert said(engine, prompt) == (expected, CACHED)  # stored anew


def test_each_process_makes_a_store_of_its_own(model, tmp_path, monkeypatch):
    (prompt,) = prompts([120])
    monkeypatch.setattr(shared_stores, "_made", {})
    extra = {
        "spec_name": "KvxOffloadingSpec",
        "spec_module_path": "kvx.vllm.offloading",
        "tiers": "host(1MiB), store(workers, timeout=60s)",
        "stores": {"workers": {"make": "store_of_ours:make", "options": {"folder": str(tmp_path)}}},
    }
    try:
        with two_workers(model, "KvxOffloadingConnector", **extra) as engine:
            (expected,) = engine.tokens([prompt])
            engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
            for _ in range(600):  # a record a worker and block, beside the engine's steps
                if len(list(tmp_path.iterdir())) >= 2 * CACHED // BLOCK:
                    break
                time.sleep(0.1)
        with two_workers(model, "KvxOffloadingConnector", **extra) as engine:
            (output,) = engine.outputs([prompt])
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, CACHED)
    finally:
        kvx.unregister_store("workers")


def test_a_bad_block_is_forgotten_though_another_worker_ends_later():
    manager = KvxOffloadingManager([Tier(4)])
    stored = manager.prepare_store([b"a", b"b"], None)
    manager.complete_store(stored.keys_to_store, None)
    manager.prepare_load([b"a"], None)
    manager.doubt_loads()  # worker 0 has ended its part; a step later worker 1 ends its own
    assert manager.lookup(b"a", None).name == "MISS"
    manager.complete_load([b"a"], None)
    assert manager.prepare_store([b"a", b"b"], None).keys_to_store == [b"a"]
    assert manager.lookup(b"b", None).name == "HIT"
