"""vLLM on a GPU with kvx's pages. Skips by name where there is no GPU (tests/python/gpu.py).

An f32 cache in an f32 model gives the tokens of transformers' own model: steps of prompts and
decodes, CUDA graphs, cached prefixes, sliding windows and softcaps. (vLLM's Triton attention is not
as exact: on an H100 it missed two of eight prompts' tokens by a logit's gap of 0.002 and 0.005.)
Quantised caches are judged by bench/vllm/gpu.py.
"""

import sys
from pathlib import Path

import pytest
from engines import BLOCK, Engine, prompts, save_model, transformers_tokens
from test_transfer import connector, consumer, decode, producer
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvx
from kvx import _core
from kvx.vllm import latent
from kvx.vllm.connector import Block
from kvx.vllm.layer_writer import LayerWriter

sys.path.append(str(Path(__file__).parents[1] / "python"))
import gpu  # noqa: E402

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
ALL_STEPS_IN_GRAPHS = {**GRAPHS, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 4, 48]}
CHUNKS = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=4)


@pytest.fixture(autouse=True)
def needs_gpu(monkeypatch):
    gpu.library("torch").backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    names = ("llama", "gemma2", "gemma3")
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in names}


def kvx_engine(model, recipe="f32", **options):
    return Engine(model, recipe, gpu_memory_utilization=0.05, **options)


def counters(engine):
    """All layers' device counters, summed."""
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sum(sum(layer.impl.pages.counters().values()) for layer in layers)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize(
    "graphs", [None, GRAPHS, ALL_STEPS_IN_GRAPHS], ids=["eager", "decodes", "all"]
)
def test_an_f32_cache_says_the_tokens_of_transformers(models, name, graphs):
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(models[name], inputs)
    options = {} if graphs is None else dict(enforce_eager=False, compilation_config=graphs)
    with kvx_engine(models[name], **CHUNKS, **options) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.tokens(inputs) == expected  # from cached prefixes
        assert counters(engine) == 0
        assert len(set(expected[2])) >= 4  # no stutter


@pytest.mark.parametrize("recipe", ["f32", "int8"])
def test_two_ranks_say_what_one_says(models, recipe):
    gpu.second()
    inputs = prompts([5, 70, 131, 33])
    graphs = dict(enforce_eager=False, compilation_config=GRAPHS)
    with kvx_engine(models["llama"], recipe, **CHUNKS, **graphs) as engine:
        expected = engine.tokens(inputs)
    ranks = dict(tensor_parallel_size=2, distributed_executor_backend="mp")
    with kvx_engine(models["llama"], recipe, **CHUNKS, **graphs, **ranks) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.tokens(inputs) == expected  # from cached prefixes


def test_torch_compile_and_the_older_model_runner(models, monkeypatch):
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(models["llama"], inputs)
    with kvx_engine(models["llama"], enforce_eager=False, **CHUNKS) as engine:
        assert engine.tokens(inputs) == expected
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with kvx_engine(models["llama"], **CHUNKS) as engine:
        assert engine.tokens(inputs) == expected


def test_drafts_by_prompt_lookup_leave_the_tokens_as_they_are(models):
    """Steps with several queries a request, some of which are taken back."""
    inputs = prompts([40, 64])
    for prompt in inputs:
        prompt["prompt_token_ids"] *= 2
    expected = transformers_tokens(models["llama"], inputs)
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with kvx_engine(models["llama"], speculative_config=drafts) as engine:
        assert engine.tokens(inputs) == expected
        assert counters(engine) == 0


# All tokens of these prompts are in the window.
DUAL = "int3_dual:sink=64,recent=192"


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "decodes"])
def test_dual_scale_pages_beside_a_window_say_the_tokens_of_a_16_bit_cache(models, graphs):
    """Requests that end and begin while others run, in eager steps and in graphs."""
    inputs = prompts([5, 40, 133, 21, 160, 17, 90, 64, 63])
    options = dict(block_size=64, max_num_batched_tokens=96, max_num_seqs=4)
    options["enable_chunked_prefill"] = True
    if graphs is not None:
        options |= dict(enforce_eager=False, compilation_config=graphs)
    with kvx_engine(models["llama"], "bf16", **options) as engine:
        expected = engine.tokens(inputs)
    with kvx_engine(models["llama"], DUAL, **options) as engine:
        found = engine.tokens(inputs)
        again = engine.tokens(inputs)
        assert counters(engine) == 0
    # Other kernels add in another order: a near tie may fall the other way.
    same = [a == b for a, b in zip(found, expected)]
    assert sum(same) >= len(inputs) - 1
    assert len(again) == len(inputs)


def test_blocks_quantised_beside_attention_say_what_eager_steps_say(models):
    """Decodes fill blocks and, 64 tokens later, read them: before attention in eager steps, in
    graphs on a stream of their own."""
    inputs = prompts([100, 120, 70, 90])
    options = dict(block_size=64, max_num_seqs=4)
    with kvx_engine(models["llama"], "int3_dual:sink=0,recent=64", **options) as engine:
        expected = engine.tokens(inputs, 160)
    options |= dict(enforce_eager=False, compilation_config=GRAPHS)
    with kvx_engine(models["llama"], "int3_dual:sink=0,recent=64", **options) as engine:
        found = engine.tokens(inputs, 160)
        assert counters(engine) == 0
    assert sum(a == b for a, b in zip(found, expected)) >= len(inputs) - 1


@pytest.mark.parametrize("recipe, times", [("int3_dual:auto", 8.2), ("int2_dual:auto", 11)])
def test_dual_scale_pages_hold_more_tokens(models, recipe, times):
    options = dict(block_size=64, max_num_seqs=4)
    with kvx_engine(models["llama"], **options) as engine:
        f32_tokens = engine.cached_tokens
    with kvx_engine(models["llama"], recipe, **options) as engine:
        assert engine.cached_tokens >= times * f32_tokens
        assert all(len(tokens) == 20 for tokens in engine.tokens(prompts([5, 70, 200])))
        assert counters(engine) == 0


@pytest.mark.parametrize("recipe, times", [("int8", 3.7), ("int4", 7.0), ("nvfp4", 6.7)])
def test_the_same_memory_holds_more_tokens(models, recipe, times):
    with kvx_engine(models["llama"]) as engine:
        f32_tokens = engine.cached_tokens
    with kvx_engine(models["llama"], recipe) as engine:
        assert engine.cached_tokens >= times * f32_tokens
        assert all(len(tokens) == 20 for tokens in engine.tokens(prompts([5, 70])))
        assert counters(engine) == 0


def test_files_hold_a_gpus_blocks(models, tmp_path):
    transfer = {
        "kv_connector": "KvxFileConnector",
        "kv_connector_module_path": "kvx.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(tmp_path)},
    }
    (prompt,) = prompts([150])
    with kvx_engine(models["llama"], "int8", kv_transfer_config=transfer) as engine:
        expected = engine.tokens([prompt])
    files = sorted(tmp_path.glob("*/*.kvx"))
    assert files and all(kvx.verify(file) for file in files)
    with kvx_engine(models["llama"], "int8", kv_transfer_config=transfer) as engine:
        (output,) = engine.outputs([prompt])
        assert output.num_cached_tokens == 128  # whole blocks, less the last token
        assert [output.outputs[0].token_ids] == expected


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "decodes"])
def test_a_prompt_goes_layer_by_layer_to_another_engine(models, graphs):
    (prompt,) = prompts([150])
    options = {} if graphs is None else dict(enforce_eager=False, compilation_config=graphs)
    options["gpu_memory_utilization"] = 0.05
    with Engine(models["llama"], "int8", **options) as engine:
        (expected,) = engine.tokens([prompt])
    with producer(models["llama"], "int8", **options) as prefill:
        params = prefill.prefill(prompt)
        extra = {"wait_seconds": 30}
        with consumer(models["llama"], "int8", extra=extra, **options) as engine:
            assert decode(engine, prompt, params) == expected
            counts = connector(engine).counts
            assert counts["fetched"] == counts["found"] == 128 // BLOCK and not counts["bad"]


def test_layers_are_copied_beside_what_computes_the_next(tmp_path):
    torch = gpu.library("torch")
    layers = [torch.zeros((64, 2, 4096), dtype=torch.uint8, device="cuda") for _ in range(8)]
    files = _core.BlockFiles("order x\n", 4)
    names = [f"{i:03}" for i in range(40)]
    blocks = [Block(name, [1, 2, 3, i], []) for i, name in enumerate(names)]
    page_bytes = [8192] * 8

    def begin(block):
        return files.begin(str(tmp_path / block.name), block.name, block.tokens, page_bytes)

    writer = LayerWriter(layers, page_bytes, begin, lambda block: None)
    for step in range(3):
        writer.begin_step(blocks, [[(i + 7 * step) % 64] * 8 for i in range(40)])
        for layer, pages in enumerate(layers):
            torch.cuda._sleep(200_000)  # the layer's kernels
            pages.copy_(torch.arange(64, device="cuda")[:, None, None] + layer + step)
            writer.hand_on(layer)
        writer.end_step()
        for pages in layers:
            pages.zero_()  # the engine gives the pages to others
        writer.flush()
        for i, block in enumerate(blocks):
            pages = [torch.zeros((1, 8192), dtype=torch.uint8) for _ in layers]
            opened = files.open(str(tmp_path / block.name), block.name, block.tokens)
            for layer, page in enumerate(pages):
                assert _core.read_layer([opened], layer, page, [0]) == [""]
            expected = [(i + 7 * step) % 64 + layer + step for layer in range(8)]
            assert [int(page.min()) for page in pages] == expected
            assert [int(page.max()) for page in pages] == expected
    assert writer.take_outcomes() == {"saved": 120}
    writer.close()


def test_vllms_own_offloading_carries_kvxs_pages(models):
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
    }
    (prompt,) = prompts([150])
    with kvx_engine(models["llama"], "int8", kv_transfer_config=transfer) as engine:
        (expected,) = engine.tokens([prompt])
        engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
        assert engine.llm.reset_prefix_cache()
        (output,) = engine.outputs([prompt])
        assert output.num_cached_tokens == 128
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize(
    "graphs", [None, GRAPHS, ALL_STEPS_IN_GRAPHS], ids=["eager", "decodes", "all"]
)
def test_kvxs_offloading_sees_a_block_that_has_changed(models, by_layer, graphs):
    transfer = {
        "kv_connector": "KvxOffloadingConnector",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.vllm.offloading",
            "cpu_bytes_to_use": 1 << 26,
            "load_by_layer": by_layer,
        },
    }
    (prompt,) = prompts([150])
    options = {} if graphs is None else dict(enforce_eager=False, compilation_config=graphs)
    with kvx_engine(models["llama"], "int8", kv_transfer_config=transfer, **options) as engine:

        def said():
            engine.outputs(prompts([5], seed=9), count=3)  # steps in which stores are made
            assert engine.llm.reset_prefix_cache()
            (output,) = engine.outputs([prompt])
            return output.outputs[0].token_ids, output.num_cached_tokens

        (expected,) = engine.tokens([prompt])
        assert said() == (expected, 128)
        worker = get_kv_transfer_group().connector_worker.worker
        assert worker.bad_jobs == 0
        worker.tiers[0].memory[:, 7] ^= 1
        tokens, num_cached = said()
        # vLLM still counts what a step began with when its load turns out to be bad.
        assert tokens == expected and (by_layer or num_cached == 0)
        assert worker.bad_jobs == 1
        assert said()[0] == expected  # forgotten
        assert said() == (expected, 128)  # stored anew
        assert worker.bad_jobs == 1


@pytest.mark.parametrize(
    "graphs", [None, GRAPHS, ALL_STEPS_IN_GRAPHS], ids=["eager", "decodes", "all"]
)
def test_latent_rows(tmp_path, graphs):
    """MLA: an f32 cache gives the tokens of transformers' own model."""
    model = save_model("deepseek_v3", tmp_path)
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(model, inputs)
    options = {} if graphs is None else dict(enforce_eager=False, compilation_config=graphs)
    with kvx_engine(model, **CHUNKS, **options) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.tokens(inputs) == expected  # from cached prefixes
        assert counters(engine) == 0


@pytest.mark.parametrize(
    "graphs", [None, GRAPHS, ALL_STEPS_IN_GRAPHS], ids=["eager", "decodes", "all"]
)
def test_expanded_prompts_of_latent_rows(tmp_path, monkeypatch, graphs):
    """As above, in the form of which no captured graph has a part."""
    steps = []
    forward_mha = latent.KvxLatentImpl.forward_mha

    def counted(self, q, *args, **options):
        steps.append(len(q))
        return forward_mha(self, q, *args, **options)

    monkeypatch.setattr(latent.KvxLatentImpl, "forward_mha", counted)
    model = save_model("deepseek_v3", tmp_path)
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(model, inputs)
    options = {} if graphs is None else dict(enforce_eager=False, compilation_config=graphs)
    wishes = {"kvx": {"recipe": "f32", "latent_prompts": "expanded"}}
    with kvx_engine(model, **CHUNKS, **options, additional_config=wishes) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.tokens(inputs) == expected  # from cached prefixes
        assert counters(engine) == 0
    assert bool(steps) == (graphs is not ALL_STEPS_IN_GRAPHS)


@pytest.mark.parametrize("recipe", ["int8+bf16", "nvfp4+bf16", "int4+bf16:sink=16,recent=32"])
def test_quantised_latent_rows_count_nothing_out_of_range(tmp_path, recipe):
    with kvx_engine(save_model("deepseek_v3", tmp_path), recipe, **CHUNKS) as engine:
        assert all(len(tokens) == 20 for tokens in engine.tokens(prompts([5, 70, 131, 33])))
        assert counters(engine) == 0


def test_fp8_ds_mla_says_what_its_recipe_says(tmp_path):
    model, inputs = save_model("deepseek_v3", tmp_path), prompts([5, 70, 131, 33])
    with kvx_engine(model, "fp8_e4m3+bf16:source=computed,g128", **CHUNKS) as engine:
        expected = engine.tokens(inputs)
    options = dict(attention_backend="CUSTOM", kv_cache_dtype="fp8_ds_mla", **CHUNKS)
    with kvx_engine(model, None, **options) as engine:
        assert engine.tokens(inputs) == expected
        assert counters(engine) == 0
