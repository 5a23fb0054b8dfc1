"""Models with latent attention (MLA): the cache holds latent rows, and the tokens are the model's."""

import copy

import pytest
import torch
from conftest import (
    CONFIGS,
    kvx_tokens,
    left_padded,
    passed,
    prompt,
    right_padded,
    stock_tokens,
    tiny_model,
    tokens_of,
)

import kvx
import kvx.hf

LATENT, ROTARY = 128, 64
# Sizes of the rows as in DeepSeek-V3, a quarter of its latent numbers.
ROWS = dict(
    kv_lora_rank=LATENT,
    qk_rope_head_dim=ROTARY,
    qk_nope_head_dim=32,
    v_head_dim=24,
    head_dim=ROTARY,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    moe_intermediate_size=48,
    n_routed_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    num_hidden_layers=3,
)
MODELS = {
    "deepseek_v3": ("DeepseekV3Config", {**ROWS, "q_lora_rank": 48}),
    "deepseek_v2": ("DeepseekV2Config", {**ROWS, "q_lora_rank": None}),
}
RECIPES = ["f32", "f32:sink=16,recent=32,full_precision=f32"]


@pytest.fixture(autouse=True)
def latent_models(monkeypatch):
    for name, model in MODELS.items():
        monkeypatch.setitem(CONFIGS, name, model)


@pytest.fixture(params=MODELS)
def latent_model(request):
    return request.param


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy(latent_model, recipe):
    inputs = {"input_ids": prompt(tokens=83)}
    expected = stock_tokens(latent_model, inputs)
    assert len(set(expected[0, -20:].tolist())) > 4  # a model that repeats itself tests nothing
    assert torch.equal(kvx_tokens(latent_model, inputs, recipe), expected)


@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_padded_batches(latent_model, padded):
    inputs = padded(3, 30, [0, 11, 29])
    assert torch.equal(kvx_tokens(latent_model, inputs), stock_tokens(latent_model, inputs))


def test_beam_search_forks_sequences(latent_model):
    inputs = left_padded(2, 40, [0, 9])
    options = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(
        kvx_tokens(latent_model, inputs, **options), stock_tokens(latent_model, inputs, **options)
    )


def test_a_row_is_stored_once_and_copies_share_it(latent_model):
    model = kvx.hf.enable(tiny_model(latent_model))
    cache = kvx.hf.Cache(model.config, "bf16")
    inputs = {"input_ids": prompt(tokens=64)}
    tokens = tokens_of(model, cache, inputs, max_new_tokens=1)
    assert cache.cost(64).bytes_per_token == 3 * (LATENT + ROTARY) * 2
    fork = copy.deepcopy(cache)
    options = dict(max_new_tokens=9)
    more = tokens_of(model, cache, {"input_ids": tokens}, **options)
    assert torch.equal(tokens_of(model, fork, {"input_ids": tokens}, **options), more)


def test_packed_rows_stay_near(latent_model):
    inputs = {"input_ids": prompt(tokens=60)}
    model = kvx.hf.enable(tiny_model(latent_model))
    logits = {}
    for recipe in ("f32", "int8", "nvfp4:search,sink=16,recent=32"):
        cache = kvx.hf.Cache(model.config, recipe)
        with torch.no_grad():
            logits[recipe] = model(**inputs, use_cache=True, **passed(cache)).logits.flatten()
    exact = logits.pop("f32")
    for recipe, near in logits.items():
        assert torch.nn.functional.cosine_similarity(exact, near, dim=0) > 0.9, recipe
        assert not torch.equal(exact, near), recipe


def test_saved_rows_are_loaded(latent_model, tmp_path):
    model = kvx.hf.enable(tiny_model(latent_model))
    cache = kvx.hf.Cache(model.config, "int8", prefix_model="m")
    tokens = tokens_of(model, cache, {"input_ids": prompt(tokens=64)}, max_new_tokens=8)
    cache.save(tmp_path / "chat", tokens)
    other = kvx.hf.Cache(model.config, "int8", prefix_model="m")
    other.load(tmp_path / "chat")
    expected = tokens_of(model, cache, {"input_ids": tokens}, max_new_tokens=8)
    assert torch.equal(tokens_of(model, other, {"input_ids": tokens}, max_new_tokens=8), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_graph_says_the_same_tokens(latent_model, backend):
    """Compiled with fullgraph=True, rows padded on the left, and another cache in the same graph."""
    inputs = left_padded(2, 30, [0, 11])
    model = kvx.hf.enable(tiny_model(latent_model))
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    caches = [kvx.hf.Cache(model.config, recipe) for recipe in ("f32", "f32", "int8")]
    found = [tokens_of(model, cache, inputs) for cache in caches]
    torch.compiler.reset()
    expected = stock_tokens(latent_model, inputs)
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    assert torch.equal(found[2], kvx_tokens(latent_model, inputs, "int8"))
    assert caches[2].cost(64).bytes_per_token < caches[0].cost(64).bytes_per_token / 3


def test_without_a_kvx_cache_the_model_is_itself(latent_model):
    inputs = {"input_ids": prompt(tokens=20)}
    stock, enabled = tiny_model(latent_model), kvx.hf.enable(tiny_model(latent_model))
    kvx.hf.Cache(enabled.config, "int8")
    with torch.no_grad():
        expected = stock(**inputs, use_cache=False).logits
        found = enabled(**inputs, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_refusals_say_what_to_do(latent_model):
    model = kvx.hf.enable(tiny_model(latent_model))
    inputs = {"input_ids": prompt(tokens=20)}
    with pytest.raises(kvx.Error, match="one row for both"):
        tokens_of(model, kvx.hf.Cache(model.config, "int8/int4"), inputs)
    with pytest.raises(kvx.UnsupportedError, match="latent rows.*recipe without tables"):
        kvx.hf.tune(model, list(range(97)) * 400, "/nowhere.kvxtune")
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    with pytest.raises(kvx.UnsupportedError, match="kv_b_proj is a Sequential"):
        tokens_of(model, kvx.hf.Cache(model.config, "int8"), inputs)
