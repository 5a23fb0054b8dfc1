"""Static scales of checkpoints (compressed-tensors, ModelOpt, vLLM) as tuned recipes, and back."""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvx import _core
from kvx.errors import Error
from kvx.hf.interface import checked_config

# model.layers.3.self_attn.k_scale (compressed-tensors, llm-compressor), ...self_attn.attn.k_scale
# (vLLM's parameter), ...self_attn.k_proj.k_scale and .v_proj.v_scale (ModelOpt),
# ...self_attn.qkv_proj.k_scale (fused).
_NAME = re.compile(
    r"\.layers\.(\d+)\.(?:self_attn|attention|attn)"
    r"\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale$"
)


def import_scales(config, checkpoint, out, *, recipe="fp8_e4m3"):
    """Writes ``out``, a tuned recipe whose static scales are a checkpoint's.

    config:     the model's, ``model.config``
    checkpoint: a .safetensors file, or a folder of them; scales of a tensor, or of each KV head
    recipe:     formats that read given scales: ``"fp8_e4m3"``, ``"int8:source=given"``; the scales
                of nvfp4 become its tensor scales

    A scale is a step: a number is its code times the scale. Returns out. Raises kvx.Error: no
    scale, a layer without one, other numbers of heads, a scale that is not positive and finite.
    """
    decoder = checked_config(config).get_text_config(decoder=True)
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    head_dim = getattr(decoder, "head_dim", None)
    head_dim = head_dim or decoder.hidden_size // decoder.num_attention_heads
    found = _read(checkpoint)
    layers = decoder.num_hidden_layers
    steps = {
        side: [_of_heads(found, layer, side, heads, checkpoint) for layer in range(layers)]
        for side in ("k", "v")
    }
    _core.write_scales(
        path=os.fspath(out),
        recipe=recipe,
        head_dim=head_dim,
        k_steps=steps["k"],
        v_steps=steps["v"],
        model_name=str(getattr(config, "_name_or_path", "") or ""),
        architecture=str(config.model_type),
    )
    return os.fspath(out)


def export_scales(tuned, out, *, per_head=False):
    """Writes ``out``, a .safetensors file of a tuned recipe's static scales under the names that
    vLLM reads beside a model's weights (``model.layers.3.self_attn.k_scale``).

    tuned:    a .kvxtune file with given scales of fp8 or int8, one a head
    per_head: [num_kv_heads] numbers a layer; without, the largest of them, which clips nothing

    Returns out. Raises kvx.Error: a file without given scales, or with several groups a head.
    """
    scales = {}
    with safe_open(os.fspath(tuned), framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(".group_scales")]
        num_heads = _num_heads(file)
        for name in names:
            layer, side = re.fullmatch(r"layers\.(\d+)\.([kv])\.group_scales", name).groups()
            steps = file.get_tensor(name).float()
            if num_heads is not None and steps.numel() != num_heads:
                raise Error(f"{name} has {steps.numel()} scales; expected one a head, {num_heads}")
            key = f"model.layers.{layer}.self_attn.{side}_scale"
            scales[key] = steps if per_head else steps.max().reshape(1)
    if not scales:
        raise Error(f"tuned is '{tuned}'; expected a file with given scales")
    save_file(scales, os.fspath(out))
    return os.fspath(out)


def _num_heads(file):
    text = (file.metadata() or {}).get("kvx")
    return json.loads(text).get("num_kv_heads") if text else None


def _read(checkpoint):
    """{(layer, side): tensor} of all scales."""
    path = Path(checkpoint)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(one.is_file() for one in files):
        raise Error(
            f"checkpoint is '{checkpoint}'; expected a .safetensors file or a folder of them"
        )
    found = {}
    for one in files:
        with safe_open(one, framework="pt") as file:
            for name in file.keys():
                if match := _NAME.search(name):
                    found[int(match[1]), match[2]] = file.get_tensor(name).float().reshape(-1)
    if not found:
        raise Error(f"checkpoint is '{checkpoint}'; it has no k_scale or v_scale")
    return found


def _of_heads(found, layer, side, heads, checkpoint):
    steps = found.get((layer, side))
    if steps is None:
        raise Error(f"checkpoint is '{checkpoint}'; layer {layer} has no {side}_scale")
    if steps.numel() not in (1, heads):
        raise Error(
            f"{side}_scale of layer {layer} has {steps.numel()} numbers; expected 1 or {heads}, "
            f"one a KV head"
        )
    if not bool((torch.isfinite(steps) & (steps > 0)).all()):
        raise Error(f"{side}_scale of layer {layer} is {steps.tolist()}; expected positive numbers")
    return steps.expand(heads).tolist()
