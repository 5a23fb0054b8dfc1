"""generate() with a kvx cache of f32: the tokens are DynamicCache's in every mode."""

import pytest
import torch
from conftest import (
    SIZES,
    kvx_tokens,
    left_padded,
    passed,
    prompt,
    right_padded,
    stock_tokens,
    tiny_model,
    tokens_of,
)
from transformers import DynamicCache

import kvx
import kvx.hf

# A full-precision window splits a prefill into several steps. One of f32 around f32 blocks changes
# no number.
RECIPES = ["f32", "f32:sink=16,recent=32,full_precision=f32"]


def test_greedy_says_something(model_name):
    tokens = stock_tokens(model_name, {"input_ids": prompt()})
    assert len(set(tokens[0, -20:].tolist())) > 4  # a model that repeats itself tests nothing


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy(model_name, recipe):
    inputs = {"input_ids": prompt(tokens=83)}
    assert torch.equal(kvx_tokens(model_name, inputs, recipe), stock_tokens(model_name, inputs))


@pytest.mark.parametrize("recipe", RECIPES)
def test_left_padded_batches(model_name, recipe):
    inputs = left_padded(3, 30, [0, 11, 29])
    assert torch.equal(kvx_tokens(model_name, inputs, recipe), stock_tokens(model_name, inputs))


def test_sampling_and_several_sequences_of_a_prompt(model_name):
    inputs = left_padded(2, 17, [0, 5])
    options = dict(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2)
    assert torch.equal(
        kvx_tokens(model_name, inputs, **options), stock_tokens(model_name, inputs, **options)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_beam_search_forks_sequences(model_name, recipe):
    inputs = left_padded(2, 70, [0, 9])
    options = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(
        kvx_tokens(model_name, inputs, recipe, **options),
        stock_tokens(model_name, inputs, **options),
    )


def test_assisted_generation_crops_what_was_not_accepted(model_name):
    inputs = {"input_ids": prompt(tokens=30)}
    options = dict(assistant_model=tiny_model("llama"))
    assert torch.equal(
        kvx_tokens(model_name, inputs, **options), stock_tokens(model_name, inputs, **options)
    )


def test_prompt_lookup_crops_what_was_not_accepted(model_name):
    ids = prompt(tokens=10).repeat(1, 4)
    options = dict(prompt_lookup_num_tokens=3)
    assert torch.equal(
        kvx_tokens(model_name, {"input_ids": ids}, **options),
        stock_tokens(model_name, {"input_ids": ids}, **options),
    )


def two_turns(model, cache, crop):
    """A turn, perhaps some tokens taken back, and a second turn that goes on from the cache."""
    first = left_padded(2, 20, [0, 7])
    said = tokens_of(model, cache, first)
    mask = torch.cat([first["attention_mask"], torch.ones((2, 20), dtype=torch.long)], 1)
    if crop:
        said, mask = said[:, :-crop], mask[:, :-crop]
        cache.crop(-(crop - 1))  # generate() never appends the last token
    ids = torch.cat([said, prompt(2, 6, seed=5)], 1)
    mask = torch.cat([mask, torch.ones((2, 6), dtype=torch.long)], 1)
    return tokens_of(model, cache, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("crop", [0, 9])
def test_a_second_turn_goes_on_from_the_cache(name, crop):
    stock, ours = tiny_model(name), kvx.hf.enable(tiny_model(name))
    expected = two_turns(stock, DynamicCache(config=stock.config), crop)
    assert torch.equal(two_turns(ours, kvx.hf.Cache(ours.config, "f32"), crop), expected)


def test_a_second_turn_of_sliding_layers(model_name):
    stock, ours = tiny_model(model_name), kvx.hf.enable(tiny_model(model_name))
    expected = two_turns(stock, DynamicCache(config=stock.config), 0)
    assert torch.equal(two_turns(ours, kvx.hf.Cache(ours.config, "f32"), 0), expected)


def test_a_reset_cache_begins_anew(model_name):
    model = kvx.hf.enable(tiny_model(model_name))
    cache = kvx.hf.Cache(model.config, "f32")
    inputs = left_padded(2, 25, [3, 0])
    once = tokens_of(model, cache, inputs)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(tokens_of(model, cache, inputs), once)


def test_rows_in_another_order_and_left_out():
    model = kvx.hf.enable(tiny_model("llama"))
    inputs = left_padded(3, 12, [0, 4, 2])
    logits = []
    for order in ([0, 1, 2], [2, 0]):
        cache = kvx.hf.Cache(model.config, "f32")
        with torch.no_grad():
            model(**inputs, **passed(cache))
            cache.batch_select_indices(torch.tensor(order))
            mask = torch.cat([inputs["attention_mask"], torch.ones((3, 1), dtype=torch.long)], 1)
            next_ids = torch.tensor([[5], [6], [7]])[order]
            out = model(input_ids=next_ids, attention_mask=mask[order], **passed(cache))
        logits.append(out.logits)
    assert torch.allclose(logits[1], logits[0][[2, 0]], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_differ_at_near_ties_only(model_name, dtype):
    stock, ours = tiny_model(model_name, dtype), kvx.hf.enable(tiny_model(model_name, dtype))
    inputs = {"input_ids": prompt(tokens=40)}
    recipe = "bf16" if dtype == torch.bfloat16 else "f16"
    expected = tokens_of(stock, DynamicCache(config=stock.config), inputs)
    found = tokens_of(ours, kvx.hf.Cache(ours.config, recipe), inputs)
    differ = (expected != found).nonzero()
    if len(differ) == 0:
        return
    at = int(differ[0, 1])
    with torch.no_grad():
        logits = stock(input_ids=expected[:, :at]).logits[0, -1].float()
    gap = logits[expected[0, at]] - logits[found[0, at]]
    spread = logits.max() - logits.min()
    assert gap.abs() < 0.03 * spread, f"token {at}: {gap} of {spread}"


@pytest.mark.parametrize("recipe", ["int8", "nvfp4:auto", "int8/int4"])
def test_quantised_logits_stay_near(recipe):
    stock, ours = tiny_model("qwen3"), kvx.hf.enable(tiny_model("qwen3"))
    ids = prompt(tokens=200)
    cache = kvx.hf.Cache(ours.config, recipe)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        found = ours(input_ids=ids, **passed(cache)).logits
    error = (found - expected).norm() / expected.norm()
    assert error < {"int8": 0.05}.get(recipe, 0.3)
    if recipe == "int8":
        # 4 layers, 2 heads, K and V, whole blocks of 64 tokens of 32 bytes and a scale of 2
        assert cache.memory() == 4 * 2 * 2 * 256 * 34


def test_repeated_rows_go_on_apart():
    model = kvx.hf.enable(tiny_model("llama"))
    caches = kvx.hf.Cache(model.config, "f32", max_batch=4), kvx.hf.Cache(model.config, "f32")
    ids, next_ids = prompt(2, 9), torch.tensor([[5], [6], [7], [8]])
    with torch.no_grad():
        model(input_ids=ids, **passed(caches[0]))
        caches[0].batch_repeat_interleave(2)
        found = model(input_ids=next_ids, **passed(caches[0])).logits
        model(input_ids=ids.repeat_interleave(2, 0), **passed(caches[1]))
        expected = model(input_ids=next_ids, **passed(caches[1])).logits
    assert torch.allclose(found, expected, atol=1e-4)


def test_hidden_tokens_take_no_memory():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.Cache(model.config, "f32")
    with torch.no_grad():
        model(**left_padded(2, 130, [0, 129]), **passed(cache))
    assert [layer.cache.num_tokens(1) for layer in cache.layers] == [1] * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_right_padded_batches(name, recipe):
    """generate() goes on from a hidden token here: its query sees the stored tokens before it."""
    inputs = right_padded(3, 150, [0, 11, 149])
    assert torch.equal(kvx_tokens(name, inputs, recipe), stock_tokens(name, inputs))


@pytest.mark.parametrize("recipe", ["int8", "int8:source=page,immediate"])
def test_hidden_tokens_leave_stored_bytes_alone(recipe):
    model = kvx.hf.enable(tiny_model("llama"))
    inputs = right_padded(1, 30, [8])
    padded, alone = kvx.hf.Cache(model.config, recipe), kvx.hf.Cache(model.config, recipe)
    with torch.no_grad():
        model(**inputs, **passed(padded))
        model(inputs["input_ids"][:, :22], **passed(alone))
    for one, two in zip(padded.layers, alone.layers, strict=True):
        stored = [layer.cache.gather(0, 0) for layer in (one, two)]
        assert one.cache.num_tokens(0) == 22
        assert all((a == b).all() for a, b in zip(*stored, strict=True))


def test_a_layer_may_have_a_recipe_of_its_own():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.Cache(model.config, "int4", layer_recipes={0: "f32"})
    tokens_of(model, cache, {"input_ids": prompt()})
    bits = [layer.cache.cost(64).bits_per_value for layer in cache.layers]
    assert bits[0] == 32 and all(4 <= b < 5 for b in bits[1:])
