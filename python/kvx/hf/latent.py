"""Latent attention (MLA) of transformers' models: the cache holds latent rows, not expanded heads.

Such a model passes each new token's latent numbers and its rotary ones to the cache's ``update``
and expands what comes back to keys and values of all heads, by its method ``expand_kv``. With a kvx
cache nothing is expanded: the part of ``kv_b_proj`` that makes keys is applied to the queries, the
part that makes values to the output, and attention runs over the rows as they are stored.
"""

import functools
import sys
from dataclasses import dataclass

import torch

from kvx.errors import UnsupportedError
from kvx.hf import compiled


@dataclass(frozen=True)
class LatentShape:
    """A row: ``latent_dim`` numbers, which are the value too, then ``rotary_dim``."""

    latent_dim: int
    rotary_dim: int

    @property
    def row_dim(self):
        return self.latent_dim + self.rotary_dim


def latent_shape(config):
    """The rows of a model whose attention caches latent rows; None for other models.

    config: the decoder's. Makes the model's class pass such rows on to kvx's attention.
    """
    latent_dim = getattr(config, "kv_lora_rank", None)
    rotary_dim = getattr(config, "qk_rope_head_dim", None)
    if not latent_dim or not rotary_dim:
        return None
    classes = _attention_classes(config)
    for attention in classes:
        _pass_kvx_rows(attention)
    return LatentShape(latent_dim, rotary_dim) if classes else None


def _attention_classes(config):
    """The model's classes that expand latent rows. Older versions of some models cache heads."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    found = [x for x in vars(module).values() if isinstance(x, type)] if module else []
    return [x for x in found if x.__module__ == name and hasattr(x, "expand_kv")]


def _pass_kvx_rows(attention_class):
    """Lets ``expand_kv`` return rows of a kvx cache as they are."""
    expand = attention_class.expand_kv
    if getattr(expand, "passes_kvx_rows", False):
        return

    @functools.wraps(expand)
    def expand_kv(self, kv_nope, k_rot):
        if compiled.expects_latent() or getattr(kv_nope, "kvx_layer", None) is not None:
            return kv_nope, k_rot
        return expand(self, kv_nope, k_rot)

    expand_kv.passes_kvx_rows = True
    attention_class.expand_kv = expand_kv


def attend(layer, module, query, latent, rotary, mask, scaling, softcap, sinks, is_traced):
    """Appends the new tokens' rows and attends, the expansion absorbed in query and output.

    module: the model's attention, whose ``kv_b_proj`` makes keys and values of a latent row
    query:  [batch, heads, tokens, key_dim + rotary_dim]
    latent, rotary: [batch, 1, tokens, latent_dim and rotary_dim]
    is_traced: whether torch.compile traces this call
    Returns [batch, tokens, heads, value_dim]. Raises kvx.UnsupportedError: a projection that is no
    plain linear one.
    """
    to_keys, to_values = _projections(module, query.shape[1], query.shape[-1] - rotary.shape[-1])
    key_dim = to_keys.shape[1]
    absorbed = torch.einsum("bhtk,hkl->bhtl", query[..., :key_dim], to_keys)
    query = torch.cat((absorbed, query[..., key_dim:]), dim=-1)
    rows = torch.cat((latent, rotary), dim=-1)
    if is_traced:
        out = compiled.attend(layer, query, rows, latent, mask, scaling, softcap, sinks)
    else:
        out = layer.attend(query, rows, None, mask, scaling, softcap, sinks)
    return torch.einsum("bthl,hvl->bthv", out, to_values)


def _projections(module, num_heads, key_dim):
    """What makes a head's key and its value of a latent row: [heads, key_dim, latent_dim] and
    [heads, value_dim, latent_dim]."""
    projection = module.kv_b_proj
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        raise UnsupportedError(
            f"kv_b_proj is a {type(projection).__name__}; kvx.hf reads the weight of a "
            f"torch.nn.Linear without bias there (merge adapters, and keep this layer unquantised)"
        )
    weight = projection.weight.detach()
    weight = weight.view(num_heads, -1, weight.shape[-1])
    return weight[:, :key_dim], weight[:, key_dim:]
