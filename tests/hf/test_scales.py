"""Scales of checkpoints as tuned recipes, and tuned recipes' scales under vLLM's names."""

import pytest
import torch
from conftest import tiny_model
from safetensors import safe_open
from safetensors.torch import save_file

import kvx.hf

NAMES = {
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "ModelOpt": "model.layers.{}.self_attn.{}_proj.{}_scale",
    "vLLM": "model.layers.{}.self_attn.attn.{}_scale",
}


def checkpoint(path, name, k, v):
    tensors = {"model.layers.0.self_attn.k_proj.weight_scale": torch.ones(1)}
    for layer in range(4):
        tensors[name.format(layer, "k", "k")] = torch.tensor(k) * (layer + 1)
        tensors[name.format(layer, "v", "v")] = torch.tensor(v) * (layer + 1)
    save_file(tensors, path)


def group_scales(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).tolist() for name in file.keys()}


@pytest.mark.parametrize("kind", NAMES)
def test_scales_of_a_tensor_and_of_heads_are_read(tmp_path, kind):
    config = tiny_model("llama").config
    checkpoint(tmp_path / "c.safetensors", NAMES[kind], [0.25], [0.5, 1.0])
    path = kvx.hf.import_scales(config, tmp_path, tmp_path / "m.kvxtune")
    scales = group_scales(path)
    assert scales["layers.2.k.group_scales"] == [0.75, 0.75]
    assert scales["layers.2.v.group_scales"] == [1.5, 3.0]


def test_what_was_exported_is_imported(tmp_path):
    config = tiny_model("llama").config
    checkpoint(tmp_path / "c.safetensors", NAMES["vLLM"], [0.25, 0.5], [0.5, 1.0])
    first = kvx.hf.import_scales(config, tmp_path / "c.safetensors", tmp_path / "a.kvxtune")
    out = kvx.hf.export_scales(first, tmp_path / "s.safetensors", per_head=True)
    second = kvx.hf.import_scales(config, out, tmp_path / "b.kvxtune")
    assert group_scales(first) == group_scales(second)
    kvx.hf.export_scales(first, tmp_path / "t.safetensors")
    assert group_scales(tmp_path / "t.safetensors")["model.layers.1.self_attn.k_scale"] == [1.0]


def test_a_cache_uses_imported_scales(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    tokens = torch.arange(3, 83).tolist()
    found = []
    for step in (1e-4, 0.05):  # the first clips
        checkpoint(tmp_path / "c.safetensors", NAMES["vLLM"], [step], [step])
        path = kvx.hf.import_scales(model.config, tmp_path, tmp_path / "m.kvxtune")
        figures = kvx.hf.compare(
            model, tokens, [f"tuned:{path}"], context=40, windows=2, shows_progress=False
        )
        found.append(figures[1].kl.value)
    assert found[0] > 10 * found[1]


@pytest.mark.parametrize(
    "k, v, message",
    [
        ([0.5, 0.5, 0.5], [0.5], "k_scale of layer 0 has 3 numbers; expected 1 or 2"),
        ([0.5], [-1.0], "v_scale of layer 0 is"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, k, v, message):
    checkpoint(tmp_path / "c.safetensors", NAMES["vLLM"], k, v)
    with pytest.raises(kvx.Error, match=message):
        kvx.hf.import_scales(
            tiny_model("llama").config, tmp_path / "c.safetensors", tmp_path / "m.kvxtune"
        )
    assert not (tmp_path / "m.kvxtune").exists()


def test_a_checkpoint_without_scales_is_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "c.safetensors")
    with pytest.raises(kvx.Error, match="it has no k_scale or v_scale"):
        kvx.hf.import_scales(tiny_model("llama").config, tmp_path, tmp_path / "m.kvxtune")
