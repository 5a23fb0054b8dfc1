"""A model that kvx.hf.enable has changed computes all else as before: without a kvx cache attention
is SDPA's, gradients included."""

import pytest
import torch
from conftest import (
    CONFIGS,
    kvx_tokens,
    left_padded,
    passed,
    prompt,
    stock_tokens,
    tiny_model,
    tokens_of,
)
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

import kvx
import kvx.hf

CLOSE = dict(atol=2e-4, rtol=1e-4)


def pair(name, **sizes):
    """The model with its own attention, and with kvx's."""
    return tiny_model(name, **sizes), kvx.hf.enable(tiny_model(name, **sizes))


def with_holes():
    """Two rows of 30 tokens, the first with hidden tokens between others and at its end."""
    inputs = left_padded(2, 30, [0, 11])
    inputs["attention_mask"][0, [4, 5, 20, 29]] = 0
    return inputs


@pytest.mark.parametrize("inputs", [left_padded(2, 30, [0, 11]), with_holes()])
def test_a_forward_pass_without_any_cache(model_name, inputs):
    stock, ours = pair(model_name)
    with torch.no_grad():
        expected = stock(**inputs, use_cache=False).logits
        found = ours(**inputs, use_cache=False).logits
    shown = inputs["attention_mask"].bool()
    assert torch.allclose(found[shown], expected[shown], **CLOSE)


def test_the_loss_and_its_gradients(model_name):
    stock, ours = pair(model_name)
    for model in (stock, ours):
        model(input_ids=prompt(2), labels=prompt(2)).loss.backward()
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters()):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            scale = expected.grad.norm()
            assert (found.grad - expected.grad).norm() <= 1e-4 * scale, name


def test_training_with_dropout_and_packed_sequences():
    stock, ours = pair("llama")
    ids = prompt(1, 24)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]  # two texts in one row
    with torch.no_grad():
        options = dict(position_ids=positions, use_cache=False)
        expected, found = (m(input_ids=ids, **options).logits for m in (stock, ours))
        alone = ours(input_ids=ids[:, 10:], use_cache=False).logits
    assert torch.allclose(found, expected, **CLOSE)
    assert torch.allclose(found[:, 10:], alone, **CLOSE)
    for layer in ours.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    losses = [ours(input_ids=ids, labels=ids).loss for _ in range(2)]
    assert losses[0] != losses[1] and all(loss.isfinite() for loss in losses)


def test_generate_with_transformers_caches(model_name):
    inputs = left_padded(2, 30, [0, 11])
    expected = stock_tokens(model_name, inputs)
    ours = kvx.hf.enable(tiny_model(model_name))
    options = dict(max_new_tokens=20, do_sample=False)
    for implementation in (None, "static"):
        kind = {} if implementation is None else {"cache_implementation": implementation}
        with torch.no_grad():
            found = ours.generate(**inputs, **options, **kind, disable_compile=True)
        assert torch.equal(found, expected), implementation
    assert torch.equal(tokens_of(ours, DynamicCache(config=ours.config), inputs), expected)


def test_a_prompt_in_parts_with_transformers_own_cache(model_name):
    stock, ours = pair(model_name)
    logits = []
    for model in (stock, ours):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [model(input_ids=x, **passed(cache)).logits for x in prompt(2).split(7, 1)]
        logits.append(torch.cat(parts, 1))
    assert torch.allclose(logits[1], logits[0], **CLOSE)


def test_a_kvx_cache_and_none_by_turns(model_name):
    inputs = left_padded(2, 30, [0, 11])
    ours = kvx.hf.enable(tiny_model(model_name))
    cache = kvx.hf.Cache(ours.config, "f32")
    expected = stock_tokens(model_name, inputs)
    for _ in range(2):
        assert torch.equal(tokens_of(ours, cache, inputs), expected)
        with torch.no_grad():
            ours(**inputs, use_cache=False)
        cache.reset()


def test_embeddings_of_a_headless_model():
    config = tiny_model("qwen3").config
    torch.manual_seed(4)
    stock = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    inputs = left_padded(2, 30, [0, 11])
    with torch.no_grad():
        expected = stock(**inputs).last_hidden_state
        found = kvx.hf.enable(stock)(**inputs).last_hidden_state
    assert torch.equal(found, expected)


def test_a_mask_of_the_callers_own():
    ours = kvx.hf.enable(tiny_model("llama"))
    dense = torch.ones((1, 1, 21, 21), dtype=torch.bool).tril()
    with torch.no_grad():
        found = ours(input_ids=prompt(), attention_mask=dense, use_cache=False).logits
        expected = ours(input_ids=prompt(), use_cache=False).logits
    assert torch.allclose(found, expected, **CLOSE)


def test_the_implementation_is_chosen_at_load(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvx").eval()
    inputs = left_padded(2, 30, [0, 11])
    assert torch.equal(
        tokens_of(ours, kvx.hf.Cache(ours.config, "f32"), inputs), stock_tokens("qwen3", inputs)
    )


def test_transformers_has_no_registry_of_cache_implementations():
    """What docs/transformers.md says; where this fails, "kvx" can be registered."""
    ours = kvx.hf.enable(tiny_model("llama"))
    with pytest.raises(Exception, match="Invalid `cache_implementation` .kvx."):
        ours.generate(prompt(), cache_implementation="kvx", max_new_tokens=2)


def test_every_model_of_this_suite_reads_kvx_caches_and_none():
    for name in CONFIGS:
        inputs = {"input_ids": prompt()}
        assert torch.equal(kvx_tokens(name, inputs), stock_tokens(name, inputs)), name
