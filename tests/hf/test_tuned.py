"""Tuned recipes in transformers caches: each layer has its own tables, and the model is checked."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import passed, prompt, tiny_model

import kvx
import kvx.hf

sys.path.append(str(Path(__file__).parents[1] / "python"))
from tuned_file import all_tables, write_tuned  # noqa: E402

SHAPE = dict(layers=4, heads=2, head_dim=32)


def tuned_file(path, recipe, **fields):
    tables, ropes = all_tables(**SHAPE)
    return write_tuned(path / "m.kvxtune", recipe, tables, ropes=ropes, **SHAPE, **fields)


def logits(model, cache):
    with torch.no_grad():
        return model(input_ids=prompt(), **passed(cache)).logits


@pytest.mark.parametrize("kind", ["Cache", "DecodingCache"])
def test_tables_change_nothing_where_nothing_is_quantised(tmp_path, kind):
    tuned = tuned_file(tmp_path, "f32:hadamard", layer_overrides=["2=f32"])
    model = tiny_model("llama")
    if kind == "Cache":
        model = kvx.hf.enable(model)
    plain, found = (
        logits(model, getattr(kvx.hf, kind)(model.config, recipe)) for recipe in ("f32", tuned)
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_each_layer_has_its_own_tables(tmp_path):
    """Another layer's given scales would give other numbers: 1 in one layer, 2 in the next."""
    tables = {
        f"layers.{layer}.{side}.group_scales": [2.0**layer] * 2
        for layer in range(4)
        for side in "kv"
    }
    tuned = write_tuned(tmp_path / "m.kvxtune", "int8:source=given", tables, **SHAPE)
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.Cache(model.config, tuned)
    logits(model, cache)
    for index, layer in enumerate(cache.layers):
        k, v = layer.cache.gather(layer.sequences[0], 0)
        for rows in (k, v):
            assert (rows % 2.0**index == 0).all()


def test_another_model_is_refused_by_name_and_by_shape(tmp_path):
    config = tiny_model("llama").config
    config._name_or_path = "someone/Tiny-Llama"
    named = dict(model_name="Tiny-Llama", model_architecture="llama")
    kvx.hf.Cache(config, tuned_file(tmp_path, "int8", **named))
    for field, value in (("model_name", "Other-Llama"), ("model_architecture", "qwen2")):
        tuned = tuned_file(tmp_path, "int8", **{**named, field: value})
        for kind in (kvx.hf.Cache, kvx.hf.DecodingCache):
            with pytest.raises(kvx.Error, match=rf"tuned for the model .*{value}.*this model is"):
                kind(config, tuned)
    fewer = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(kvx.Error, match="num_layers 4; the model has 3"):
        kvx.hf.Cache(fewer.config, tuned_file(tmp_path, "int8"))
    wider = kvx.hf.enable(tiny_model("llama", num_key_value_heads=4))
    with pytest.raises(kvx.Error, match="num_kv_heads 2; the cache has 4"):
        logits(wider, kvx.hf.Cache(wider.config, tuned_file(tmp_path, "int8")))
