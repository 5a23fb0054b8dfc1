"""vLLM's engine on kvx's pages: the tokens of vLLM's own attention, and many more of them."""

import pytest
from engines import CONFIGS, Engine, prompts, save_model

import kvx

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_f32_cache_says_the_tokens_of_vllms_own_attention(models, name):
    """Prompts in chunks of 48 tokens, several requests in a step; Gemma's windows and softcaps."""
    inputs = prompts([5, 70, 131, 33])
    chunks = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=4)
    with Engine(models[name], **chunks) as stock:
        expected = stock.tokens(inputs)
        stock_tokens = stock.cached_tokens
    with Engine(models[name], "f32", **chunks) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.cached_tokens == stock_tokens
        assert len(set(expected[2])) >= 4  # no stutter


def test_cached_prefixes_are_read_from_kvxs_pages(models):
    first, second = prompts([120, 120])
    second["prompt_token_ids"][:90] = first["prompt_token_ids"][:90]
    with Engine(models["llama"], "f32", enable_prefix_caching=False) as engine:
        expected = engine.tokens([second])
    with Engine(models["llama"], "f32", enable_prefix_caching=True) as engine:
        engine.tokens([first])
        (output,) = engine.outputs([second])
        assert output.num_cached_tokens == 64  # whole blocks
        assert [output.outputs[0].token_ids] == expected


@pytest.mark.parametrize("recipe, times", [("int8", 3.87), ("int4", 7.5), ("nvfp4", 7.1)])
def test_the_same_memory_holds_more_tokens(models, recipe, times):
    with Engine(models["llama"]) as stock:
        stock_tokens = stock.cached_tokens
    with Engine(models["llama"], recipe) as engine:
        assert engine.cached_tokens >= times * stock_tokens
        assert all(len(tokens) == 20 for tokens in engine.tokens(prompts([5, 70])))


def test_vllms_own_words_name_formats_and_layers_can_be_left_out(models):
    options = dict(
        kv_cache_dtype="int8_per_token_head",
        kv_cache_dtype_skip_layers=["0", "1"],
        additional_config={},
    )
    with Engine(models["llama"], "", **options) as engine:
        layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert [layer.impl.recipe for layer in layers.values()] == ["f32", "f32", "int8", "int8"]
        assert all(len(tokens) == 20 for tokens in engine.tokens(prompts([5, 70])))


def test_a_static_format_without_scales_ends_the_start(models):
    with pytest.raises(kvx.Error, match="has no k_scale and v_scale"):
        Engine(models["llama"], "fp8_e4m3")


@pytest.mark.parametrize("eager", [True, False])
def test_several_processes_and_torch_compile(models, monkeypatch, eager):
    """The engine's core and its worker are processes of their own, as they are by default."""
    inputs = prompts([5, 70])
    with Engine(models["llama"], "f32") as engine:
        expected = engine.tokens(inputs)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traced by Dynamo, not compiled by g++
    with Engine(models["llama"], "f32", enforce_eager=eager) as engine:
        assert engine.tokens(inputs) == expected
