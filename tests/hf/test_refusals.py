"""What kvx.hf cannot do is refused, with what to do instead."""

import pytest
import torch
import transformers
from conftest import left_padded, prompt, tiny_model, tokens_of
from transformers import DynamicCache

import kvx
import kvx.hf


def enabled(name="llama"):
    model = kvx.hf.enable(tiny_model(name))
    return model, kvx.hf.Cache(model.config, "f32")


def test_another_attention_implementation():
    model = tiny_model("llama")
    cache = kvx.hf.Cache(model.config, "f32")
    with pytest.raises(kvx.UnsupportedError, match="'eager' and does not read a kvx cache"):
        tokens_of(model, cache, {"input_ids": prompt()})
    model, cache = enabled()
    model.set_attn_implementation("sdpa")
    with pytest.raises(kvx.UnsupportedError, match="'sdpa' and does not read a kvx cache"):
        tokens_of(model, cache, {"input_ids": prompt()})


def test_a_configuration_that_says_kvx_and_a_model_that_does_not():
    model, stock = enabled()[0], tiny_model("llama")
    cache = kvx.hf.Cache(model.config, "f32")
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="does not read a kvx cache"):
        stock(input_ids=prompt(), past_key_values=cache)


def test_kvx_attention_with_another_cache_or_none():
    model, _ = enabled()
    with pytest.raises(kvx.UnsupportedError, match="attention without a kvx cache"):
        tokens_of(model, DynamicCache(config=model.config), {"input_ids": prompt()})
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="without a kvx cache"):
        model(input_ids=prompt(), use_cache=False)


def test_more_rows_than_the_cache_has_room_for():
    model, cache = enabled()
    with torch.no_grad():
        model(input_ids=prompt(2), past_key_values=cache)
    with pytest.raises(kvx.OutOfRangeError, match="all 2 sequences are in use"):
        cache.batch_repeat_interleave(2)


def test_gradients_and_dropout():
    model, cache = enabled()
    with pytest.raises(kvx.UnsupportedError, match="gradients are wanted"):
        model(input_ids=prompt(), past_key_values=cache)
    model, cache = enabled()
    model.train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="dropout is 0.5"):
        model(input_ids=prompt(), past_key_values=cache)


def test_masks():
    model, cache = enabled()
    dense = torch.ones((1, 1, 21, 21), dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="has 4 dimensions"):
        model(input_ids=prompt(), attention_mask=dense, past_key_values=cache)
    model, cache = enabled()
    inputs = left_padded(2, 8, [0, 3])
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with pytest.raises(kvx.UnsupportedError, match="hides or shows other earlier tokens"):
            model(input_ids=prompt(2, 1), past_key_values=cache)
    model, cache = enabled()
    mask = torch.ones((2, 5), dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad(), pytest.raises(kvx.Error, match=r"attention_mask has the shape \[2, 5\]"):
        model(input_ids=prompt(2, 8), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_hole_in_the_mask_of_a_sliding_window(name):
    model, cache = enabled(name)
    mask = torch.ones((1, 21), dtype=torch.long)
    mask[0, [3, 9]] = 0
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="hides tokens between others"):
        model(input_ids=prompt(), attention_mask=mask, past_key_values=cache)


def test_a_hole_in_the_mask_is_fine():
    model, cache = enabled()
    stock = tiny_model("llama")
    mask = torch.ones((1, 21), dtype=torch.long)
    mask[0, [3, 4, 9]] = 0
    with torch.no_grad():
        found = model(input_ids=prompt(), attention_mask=mask, past_key_values=cache).logits
        expected = stock(input_ids=prompt(), attention_mask=mask).logits
    shown = mask[0].bool()
    assert torch.allclose(found[0, shown], expected[0, shown], atol=1e-4)


def test_too_many_tokens_and_another_batch():
    model, _ = enabled()
    cache = kvx.hf.Cache(model.config, "f32", max_tokens=25)
    with pytest.raises(kvx.OutOfRangeError, match="26 tokens; max_tokens is 25"):
        tokens_of(model, cache, {"input_ids": prompt()})
    model, cache = enabled()
    with torch.no_grad():
        model(input_ids=prompt(2), past_key_values=cache)
        with pytest.raises(kvx.Error, match="the batch has 3 rows; the cache was made for 2"):
            model(input_ids=prompt(3, 1), past_key_values=cache)


def test_a_crop_into_what_is_packed():
    model, _ = enabled()
    cache = kvx.hf.Cache(model.config, "int8:sink=16,recent=16", block_size=16)
    tokens_of(model, cache, {"input_ids": prompt(tokens=100)})
    length = cache.get_seq_length()
    with pytest.raises(kvx.UnsupportedError, match="has left the full-precision window"):
        cache.crop(40)
    assert cache.get_seq_length() == length
    cache.crop(48)  # whole blocks may go
    assert cache.get_seq_length() == 48
    with pytest.raises(kvx.OutOfRangeError, match="the cache has 48"):
        cache.crop(-49)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "is an encoder-decoder model; use"),
        (transformers.JambaConfig(), "is of the type"),
    ],
)
def test_models_without_a_kvx_cache(config, message):
    with pytest.raises(kvx.UnsupportedError, match=message):
        kvx.hf.Cache(config, "f32")


def test_arguments():
    config = tiny_model("llama").config
    for options, message in [
        ({"recipe": "f32", "layer_recipes": {9: "f32"}}, "layer_recipes names layer 9"),
        ({"recipe": "f33"}, "format is 'f33'"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            kvx.hf.Cache(config, **options)


def test_a_transformers_with_another_interface_is_named_at_import(monkeypatch):
    from kvx.hf import requirements

    assert requirements.interface_problem() is None
    monkeypatch.delattr(transformers.cache_utils.CacheLayerMixin, "get_mask_sizes")
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    message = "interface of transformers 5.99.0: CacheLayerMixin has no get_mask_sizes; it was made"
    with pytest.raises(ImportError, match=message):
        requirements.check_interface()
    monkeypatch.delattr(transformers.cache_utils, "EncoderDecoderCache")
    with pytest.raises(ImportError, match="cannot import name 'EncoderDecoderCache'"):
        requirements.check_interface()
