"""Packed keys and values, decoded on request for the model's own attention."""

import pytest
import torch
import transformers
from conftest import CONFIGS, left_padded, passed, prompt, stock_tokens, tiny_model, tokens_of

import kvx
import kvx.hf


def decoded_tokens(name, inputs, recipe="f32", implementation="eager", **options):
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    return tokens_of(model, kvx.hf.DecodingCache(model.config, recipe), inputs, **options)


SDPAS = [name for name in CONFIGS if name not in ("gpt_oss", "gemma2")]  # no sinks, no softcap
ATTENTIONS = [(name, "eager") for name in CONFIGS] + [(name, "sdpa") for name in SDPAS]


@pytest.mark.parametrize(("model_name", "implementation"), ATTENTIONS)
def test_the_tokens_are_dynamic_caches_under_other_attentions(model_name, implementation):
    inputs = left_padded(2, 83, [0, 11])
    found = decoded_tokens(model_name, inputs, implementation=implementation)
    assert torch.equal(found, stock_tokens(model_name, inputs))


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=3, num_return_sequences=2),
        dict(do_sample=True, num_return_sequences=2),
        dict(prompt_lookup_num_tokens=3),
    ],
    ids=["beams", "sampling", "prompt lookup"],
)
def test_beams_sampling_and_crops(options):
    inputs = {"input_ids": prompt(tokens=10).repeat(1, 4)}
    found = decoded_tokens("llama", inputs, **options)
    assert torch.equal(found, stock_tokens("llama", inputs, **options))


def test_memory_follows_from_the_recipe_and_a_crop_forgets():
    model = tiny_model("llama")
    cache = kvx.hf.DecodingCache(model.config, "int4", block_size=16)
    first = tokens_of(model, cache, {"input_ids": prompt(tokens=21)})
    # 40 positions in 3 pages of 16, grown from 2 to 4; 4 layers; K and V of 2 heads of 32 codes
    # with a 2-byte scale
    assert cache.memory() == 4 * 4 * 16 * 2 * 2 * (16 + 2)
    cache.crop(20)
    assert cache.get_seq_length() == 20
    assert torch.equal(tokens_of(model, cache, {"input_ids": prompt(tokens=21)}), first)
    cache.crop(-41 + 1)
    assert cache.get_seq_length() == 0
    with pytest.raises(kvx.OutOfRangeError, match="the cache has 0"):
        cache.crop(-1)


def test_a_model_whose_attention_is_kvxs_reads_it_by_sdpa():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.DecodingCache(model.config, "f32")
    inputs = left_padded(2, 83, [0, 11])
    assert torch.equal(tokens_of(model, cache, inputs), stock_tokens("llama", inputs))


def test_what_is_refused():
    model = tiny_model("llama")
    with pytest.raises(kvx.Error, match="has no full-precision window"):
        kvx.hf.DecodingCache(model.config, "nvfp4:auto")
    cache = kvx.hf.DecodingCache(model.config, "f32")
    with pytest.raises(kvx.UnsupportedError, match="gradients are wanted"):
        model(input_ids=prompt(), **passed(cache))
    cache = kvx.hf.DecodingCache(model.config, "f32")
    with torch.no_grad():
        model(input_ids=prompt(2), **passed(cache))
        with pytest.raises(kvx.Error, match="the batch has 3 rows; the cache holds 2"):
            model(input_ids=prompt(3, 1), **passed(cache))
    with pytest.raises(kvx.UnsupportedError, match="is of the type"):
        kvx.hf.DecodingCache(transformers.JambaConfig(), "f32")
