"""From prefill to decode: an engine in another process computes the prompt, this one goes on."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import BLOCK, Engine, prompts
from ports import reserved_ports
from vllm import SamplingParams

import kvx
from kvx.vllm.layer_writer import LayerWriter
from kvx.vllm.transfer import Slice, heads_of_worker, slices_of

pytestmark = pytest.mark.usefixtures("in_this_process")

HERE = Path(__file__).parent
CACHED = 96  # of 120 tokens: whole blocks, less the last token


class Producer:
    """An engine in a process of its own."""

    def __init__(self, process):
        self._process = process
        while (line := process.stdout.readline()).strip() != "ready":
            assert line, "the producer did not start"

    def prefill(self, prompt):
        """The parameters for the consumer."""
        self._process.stdin.write(json.dumps(prompt["prompt_token_ids"]) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "the producer ended"
        return json.loads(line)


@contextmanager
def producer(model, recipe, **options):
    with reserved_ports(2) as port, subprocess.Popen(  # a port a worker
        [
            *(sys.executable, str(HERE / "producer.py"), model, recipe),
            *(f"tcp://127.0.0.1:{port}", json.dumps(options)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ) as process:
        yield Producer(process)
        process.stdin.close()
        assert process.wait(240) == 0


def consumer(model, recipe, **options):
    transfer = {
        "kv_connector": "KvxTransferConnector",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options.pop("extra", {}),
    }
    return Engine(model, recipe, kv_transfer_config=transfer, **options)


def connector(engine):
    """The scheduler's."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector


def decode(engine, prompt, params, count=20):
    sampling = SamplingParams(
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params},
    )
    (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
    return output.outputs[0].token_ids


def files_of(engine):
    return list(connector(engine).root.glob("*/*.kvx"))


@pytest.mark.parametrize("recipe", ["nvfp4", "int8"])
def test_the_consumer_goes_on_as_if_it_had_computed_the_prompt(model, recipe):
    first, second, third = prompts([120, 70, 40])
    with Engine(model, recipe) as alone:
        expected = alone.tokens([first, second, third])
    soon = {"wait_seconds": 10}
    with producer(model, recipe) as prefill, consumer(model, recipe, extra=soon) as engine:
        params = prefill.prefill(first)
        assert decode(engine, first, params) == expected[0]
        counts = connector(engine).counts
        assert counts["fetched"] == counts["found"] == CACHED // BLOCK
        assert decode(engine, second, prefill.prefill(second)) == expected[1]
        assert counts["fetched"] == counts["found"] == CACHED // BLOCK + 2
        # what the producer has not computed is computed here
        assert decode(engine, third, params) == expected[2]
        assert counts["fetched"] == CACHED // BLOCK + 2 and counts["missed"] == 1
        assert len(files_of(engine)) == 0, "what was loaded is not kept"


def test_each_layer_leaves_when_its_attention_is_done(model, monkeypatch):
    handed_on = []

    def end_step(writer, end=LayerWriter.end_step):
        if writer._step is not None:
            handed_on.append(set(writer._step.handed_on))
        end(writer)

    monkeypatch.setattr(LayerWriter, "end_step", end_step)
    transfer = {
        "kv_connector": "KvxTransferConnector",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_role": "kv_producer",
    }
    with reserved_ports() as port:
        transfer["kv_connector_extra_config"] = {"endpoint": f"tcp://127.0.0.1:{port}"}
        with Engine(model, "int8", kv_transfer_config=transfer) as engine:
            engine.tokens(prompts([120]), count=20)
    # the prompt's three blocks, and the one that the eighth token of the answer fills
    assert handed_on == [{0, 1, 2, 3}] * 2


@pytest.mark.parametrize("producers, consumers", [(1, 2), (2, 1)])
def test_workers_take_the_heads_that_they_have(model, producers, consumers, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    (prompt,) = prompts([120])
    with Engine(model, "int8") as alone:
        (expected,) = alone.tokens([prompt])
    options = {"extra": {"wait_seconds": 30}, "tensor_parallel_size": consumers}
    with producer(model, "int8", tensor_parallel_size=producers) as prefill:
        with consumer(model, "int8", **options) as engine:
            assert decode(engine, prompt, prefill.prefill(prompt)) == expected
            counts = connector(engine).counts
            assert counts["found"] == CACHED // BLOCK and counts["missed"] == 0
            assert counts["fetched"] == 2 * CACHED // BLOCK  # two slices of each


def test_slices_cover_each_workers_heads():
    assert slices_of(1, 2, 2, 8) == [Slice(1, 4, 8, range(4, 8))]
    assert slices_of(1, 2, 2, 8)[0].heads == []
    assert slices_of(1, 2, 1, 8)[0].heads == [4, 8, 8]
    assert slices_of(0, 1, 2, 8) == [Slice(0, 0, 4, range(4)), Slice(1, 4, 8, range(4, 8))]
    assert [one.heads for one in slices_of(0, 1, 2, 8)] == [[], []]
    assert slices_of(3, 4, 16, 8)[0] == Slice(12, 6, 7, range(6, 7))  # two workers have head 6
    for num_heads in (1, 2, 3, 6, 8):
        for num_workers in (1, 2, 3, 4, 8, 16):
            for num_producers in (1, 2, 3, 4, 8, 16):
                if any(
                    num_heads % n and n % num_heads for n in (num_workers, num_producers)
                ):
                    continue
                for worker in range(num_workers):
                    slices = slices_of(worker, num_workers, num_producers, num_heads)
                    heads = [head for one in slices for head in range(one.first, one.end)]
                    assert heads == list(heads_of_worker(worker, num_workers, num_heads))
    with pytest.raises(kvx.UnsupportedError, match="8 KV heads cannot lie on 3 workers"):
        slices_of(0, 1, 3, 8)


def test_a_producer_that_is_gone_or_lies_costs_a_computation(model, tmp_path):
    (prompt,) = prompts([120])
    with Engine(model, "int8") as alone:
        (expected,) = alone.tokens([prompt])
    with producer(model, "int4") as prefill:
        of_another_recipe = prefill.prefill(prompt)
        with consumer(model, "int8", extra={"wait_seconds": 3}) as engine:
            for params in (
                of_another_recipe,
                {"do_remote_prefill": True},
                {"do_remote_prefill": True, "kvx_endpoints": "tcp://127.0.0.1:1"},
                {"do_remote_prefill": True, "kvx_endpoints": ["here"]},
                {"do_remote_prefill": True, "kvx_endpoints": [1, 2]},
            ):
                engine.llm.reset_prefix_cache()
                assert decode(engine, prompt, params) == expected, params
            # the producer's files name another recipe, so none was fetched
            assert connector(engine).counts["fetched"] == connector(engine).counts["found"] == 0


def test_refuses_options_that_cannot_be(model):
    def message(role, extra):
        transfer = {
            "kv_connector": "KvxTransferConnector",
            "kv_connector_module_path": "kvx.vllm.transfer",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        with pytest.raises(kvx.Error) as error:
            Engine(model, "int8", kv_transfer_config=transfer)
        return str(error.value)

    assert "endpoint is ''" in message("kv_producer", {})
    assert "endpoint is 'tcp://here'" in message("kv_producer", {"endpoint": "tcp://here"})
    assert "wait_seconds is -1" in message("kv_consumer", {"wait_seconds": -1})
