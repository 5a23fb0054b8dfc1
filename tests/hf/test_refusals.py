"""What kvx.hf cannot do is refused, with what to do instead."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import CACHE, left_padded, passed, prompt, tiny_model, tokens_of
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
        stock(input_ids=prompt(), **passed(cache))


def test_more_rows_than_the_cache_has_room_for():
    model, _ = enabled()
    cache = kvx.hf.Cache(model.config, "f32", max_batch=2)
    with torch.no_grad():
        model(input_ids=prompt(2), **passed(cache))
    for grow in (lambda: copy.deepcopy(cache), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(
            kvx.OutOfRangeError, match=r"all 2 sequences are in use.*kvx.hf.Cache.*max_batch="
        ):
            grow()


def test_a_model_or_a_folder_in_the_place_of_its_config():
    model = tiny_model("llama")
    caches = [kvx.hf.Cache, kvx.hf.DecodingCache, kvx.hf.EncoderDecoderCache]
    for cache in [*caches, kvx.hf.DecodingEncoderDecoderCache]:
        message = "config is a LlamaForCausalLM; expected a config: model.config"
        with pytest.raises(kvx.Error, match=message):
            cache(model, "int8")
        with pytest.raises(kvx.Error, match="config is a str; expected a config of transformers"):
            cache("meta-llama/Llama-3.2-1B", "int8")
    with pytest.raises(kvx.Error, match="model is a LlamaConfig; expected a transformers model"):
        kvx.hf.enable(model.config)


def test_attention_weights():
    model, cache = enabled()
    with torch.no_grad():
        for options in (passed(cache), {}, {"use_cache": False}):
            with pytest.raises(kvx.UnsupportedError, match="output_attentions is True.*'eager'"):
                model(input_ids=prompt(), output_attentions=True, **options)
        options = dict(output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
        with pytest.raises(kvx.UnsupportedError, match="output_attentions is True"):
            model.generate(prompt(), **options)
        with pytest.raises(kvx.UnsupportedError, match="output_attentions is True"):
            model.generate(prompt(), **passed(cache), **options)
        assert cache.get_seq_length() == 0
        model.set_attn_implementation("eager")
        assert len(model(input_ids=prompt(), output_attentions=True).attentions) == 4


def test_a_cache_under_the_name_of_another_transformers():
    model, cache = enabled()
    other = {"cache": "past_key_values", "past_key_values": "cache"}[CACHE]
    if CACHE == "cache":  # which still takes the old name, with a warning
        with torch.no_grad(), pytest.warns(FutureWarning, match="past_key_values"):
            model(input_ids=prompt(), **{other: cache})
        assert cache.get_seq_length() == 21
    else:
        message = "cache is no argument of this model.*pass past_key_values= instead"
        with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match=message):
            model(input_ids=prompt(), **{other: cache})


def test_a_forward_pass_that_ended_in_the_middle(monkeypatch):
    model, cache = enabled()
    first = tokens_of(model, cache, {"input_ids": prompt()})
    length = cache.get_seq_length()
    layer = cache.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "attend", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(input_ids=prompt(1, 3), **passed(cache))
    message = rf"ended in the middle: the layers hold {length} to {length + 3}.*cache.crop\(-3\)"
    with torch.no_grad(), pytest.raises(kvx.Error, match=message):
        model(input_ids=first[:, -1:], **passed(cache))
    cache.crop(-3)
    with torch.no_grad():
        found = model(input_ids=first[:, -1:], **passed(cache)).logits
        expected = tiny_model("llama")(input_ids=first).logits[:, -1:]
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_row_that_fails_leaves_no_row_ahead(monkeypatch):
    model, cache = enabled()
    inputs = left_padded(2, 9, [0, 2])
    whole = kvx.Cache.append_and_attend

    def attend_once(*args, **options):
        monkeypatch.setattr(kvx.Cache, "append_and_attend", interrupt)
        return whole(*args, **options)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvx.Cache, "append_and_attend", attend_once)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(**inputs, **passed(cache))
    assert [cache.layers[0].cache.num_tokens(s) for s in cache.layers[0].sequences] == [0, 0]
    monkeypatch.setattr(kvx.Cache, "append_and_attend", whole)
    with torch.no_grad():
        found = model(**inputs, **passed(cache)).logits
        expected = tiny_model("llama")(**inputs).logits
    assert torch.allclose(found[:, -1], expected[:, -1], atol=1e-4)


def test_gradients_and_dropout():
    model, cache = enabled()
    message = r"gradients are wanted.*torch.no_grad\(\).*use_cache=False.*SDPA"
    with pytest.raises(kvx.UnsupportedError, match=message):
        model(input_ids=prompt(), **passed(cache))
    for name, parameter in model.named_parameters():  # an adapter on the queries alone
        parameter.requires_grad_("layers.0.self_attn.q_proj" in name)
    with pytest.raises(kvx.UnsupportedError, match=message):
        model(input_ids=prompt(), **passed(cache))
    assert cache.get_seq_length() == 0
    model.requires_grad_(False)
    found = model(input_ids=prompt(), **passed(cache)).logits
    assert torch.allclose(found, tiny_model("llama")(input_ids=prompt()).logits, atol=1e-4)
    model, cache = enabled()
    model.train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="dropout is 0.5"):
        model(input_ids=prompt(), **passed(cache))


def test_masks():
    model, cache = enabled()
    dense = torch.ones((1, 1, 21, 21), dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="has 4 dimensions"):
        model(input_ids=prompt(), attention_mask=dense, **passed(cache))
    model, cache = enabled()
    inputs = left_padded(2, 8, [0, 3])
    with torch.no_grad():
        model(**inputs, **passed(cache))
        with pytest.raises(kvx.UnsupportedError, match="hides or shows other earlier tokens"):
            model(input_ids=prompt(2, 1), **passed(cache))
    model, cache = enabled()
    mask = torch.ones((2, 5), dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad(), pytest.raises(kvx.Error, match=r"attention_mask has the shape \[2, 5\]"):
        model(input_ids=prompt(2, 8), attention_mask=mask, **passed(cache))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_hole_before_the_sliding_window_is_full(name, caplog):
    stock = tiny_model(name, sliding_window=24)
    with caplog.at_level("INFO", "kvx.hf"):
        model = kvx.hf.enable(tiny_model(name, sliding_window=24))
    assert "hide tokens between others work up to 24 positions" in caplog.text
    cache = kvx.hf.Cache(model.config, "f32")
    inputs = {"input_ids": prompt(), "attention_mask": torch.ones((1, 21), dtype=torch.long)}
    inputs["attention_mask"][0, [3, 9]] = 0
    expected = tokens_of(stock, DynamicCache(config=stock.config), inputs, max_new_tokens=4)
    assert torch.equal(tokens_of(model, cache, inputs, max_new_tokens=4), expected)
    cache.reset()
    message = "25 positions are more than the sliding window of 24.*kvx.hf.DecodingCache"
    with pytest.raises(kvx.UnsupportedError, match=message):
        tokens_of(model, cache, inputs, max_new_tokens=5)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_hole_in_the_mask_of_a_sliding_window(name):
    model, cache = enabled(name)
    mask = torch.ones((1, 21), dtype=torch.long)
    mask[0, [3, 9]] = 0
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="hides tokens between others"):
        model(input_ids=prompt(), attention_mask=mask, **passed(cache))


def test_a_hole_in_the_mask_is_fine():
    model, cache = enabled()
    stock = tiny_model("llama")
    mask = torch.ones((1, 21), dtype=torch.long)
    mask[0, [3, 4, 9]] = 0
    with torch.no_grad():
        found = model(input_ids=prompt(), attention_mask=mask, **passed(cache)).logits
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
        model(input_ids=prompt(2), **passed(cache))
        with pytest.raises(kvx.Error, match="the batch has 3 rows; the cache was made for 2"):
            model(input_ids=prompt(3, 1), **passed(cache))


def test_a_crop_by_a_tensor():
    model, _ = enabled()
    for cache in (kvx.hf.Cache(model.config, "f32"), kvx.hf.DecodingCache(model.config, "f32")):
        first = tokens_of(model, cache, {"input_ids": prompt()})
        cache.crop(torch.tensor(-20))
        assert [layer.length for layer in cache.layers] == [20] * 4
        assert torch.equal(tokens_of(model, cache, {"input_ids": prompt()}), first)


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


def test_a_transformers_with_another_interface_is_named_at_import(monkeypatch, caplog):
    from kvx.hf import requirements

    assert requirements.interface_problem() is None
    for version in ("5.17.0", "5.24.1.dev0"):
        monkeypatch.setattr(requirements, "transformers", SimpleNamespace(__version__=version))
        requirements.check_interface()
    assert not caplog.text
    monkeypatch.setattr(requirements, "transformers", SimpleNamespace(__version__="5.99.0"))
    requirements.check_interface()
    assert "was tested with transformers 5.17 to 5.24, not 5.99.0" in caplog.text
    monkeypatch.delattr(transformers.cache_utils.CacheLayerMixin, "get_mask_sizes")
    message = "interface of transformers 5.99.0: CacheLayerMixin has no get_mask_sizes; it was tested"
    with pytest.raises(ImportError, match=message):
        requirements.check_interface()
    monkeypatch.delattr(transformers.cache_utils, "EncoderDecoderCache")
    with pytest.raises(ImportError, match="cannot import name 'EncoderDecoderCache'"):
        requirements.check_interface()
