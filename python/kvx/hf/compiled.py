"""A layer of a kvx.hf.Cache as one operator, so that torch.compile traces a model's forward pass
whole (fullgraph=True).

    traced:    update() ── expects the layer ──► attention() ──► torch.ops.kvx.attend_cached
    at run time:                                 the operator appends and attends in the cache

A graph holds no cache: its operators are given the cache's number in a tensor, which they also
write, so that nothing puts them in another order or leaves one out. One graph serves every cache of
a model.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from kvx.errors import Error, UnsupportedError

_library = torch.library.Library("kvx", "FRAGMENT")
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_expected: list[Any] = []  # the layer whose keys and values a traced update() has returned last


def number_of(cache: Any) -> Tensor:
    """int64 [2], on the CPU: a new number that names the cache, and how often a layer attended."""
    number = next(_numbers)
    _caches[number] = cache
    return torch.tensor([number, 0])


def expect(layer: Any) -> None:
    """The next attention that is traced is this layer's. Raises kvx.UnsupportedError: the one
    before has not come."""
    if _expected:
        _expected.clear()
        raise UnsupportedError(
            "the model's attention does not read a kvx cache; call kvx.hf.enable(model), if this "
            "model uses transformers' attention interface at all"
        )
    _expected.append(layer)


def expects_latent() -> bool:
    """Whether a traced update() of a latent layer came last."""
    return len(_expected) > 0 and _expected[-1].is_latent  # torch 2.9 traces no bool(list)


def take_expected() -> Any:
    """The layer that is expected, None where none is."""
    return _expected.pop() if _expected else None


_library.define(
    "attend_cached(Tensor(a!) cache, int layer, Tensor q, Tensor k, Tensor v, Tensor? mask, "
    "float? softmax_scale, float softcap, Tensor? sinks) -> Tensor"
)


def _attend(cache, layer, q, k, v, mask, softmax_scale, softcap, sinks):
    owner = _caches.get(int(cache[0]))
    if owner is None:
        raise Error("the kvx.hf.Cache of this call is gone; keep it while the model runs")
    cache[1] += 1
    if mask is not None and bool(mask.all()):
        mask = None
    return owner.append_and_attend(layer, q, k, v, mask, softmax_scale, softcap, sinks)


def _fake(cache, layer, q, k, v, mask, softmax_scale, softcap, sinks):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))


for _key in ("CPU", "CUDA"):
    _library.impl("attend_cached", _attend, _key)
torch.library.register_fake("kvx::attend_cached", _fake, lib=_library)


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
    """What the layer's append_and_attend returns; options: softmax_scale, softcap, sinks.

    q [batch, heads, tokens, dim]; k, v: the new tokens' [batch, kv_heads, tokens, dim], in a latent
    layer the rows and the part of them that is the value; mask: bool [batch, all positions] or None.
    Returns [batch, tokens, heads, dim of v].
    """
    return torch.ops.kvx.attend_cached(layer.number, layer.index, q, k, v, mask, *options)
