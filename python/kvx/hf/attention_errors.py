"""Attention of caches beside the base cache's, on the same queries, keys and values."""

import numpy as np
import torch

from kvx.gates import HeadErrors
from kvx.hf.interface import passed

_LOGIT_STRIDE = 64  # of the measured tokens, every 64th shows its logits


class _Sums:
    """What cosine similarity and relative error are made of, [layers, kv_heads] each."""

    def __init__(self):
        self._layers = {}

    def add(self, layer, base, other):
        """base, other: [tokens, kv_heads, numbers]."""
        base, other = base.double().cpu(), other.double().cpu()
        products = [(base * other), base * base, other * other, (other - base) ** 2]
        sums = torch.stack([x.sum((0, 2)) for x in products])  # [4, kv_heads]
        self._layers[layer] = self._layers.get(layer, 0) + sums

    def errors(self):
        if not self._layers:
            return None
        sums = torch.stack([self._layers[layer] for layer in sorted(self._layers)]).numpy()
        product, base, other, error = np.moveaxis(sums, 1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return HeadErrors(product / np.sqrt(base * other), np.sqrt(error / base))


def attention_errors(model, window, first_measured, base, others, measure_logits):
    """(outputs, logits) of each of the others, kvx.HeadErrors; logits are None unless measured.

    window: token numbers; base, others: empty kvx.hf.Cache, which are full of them afterwards
    first_measured: tokens before it are stored, and not compared
    """
    outputs = [_Sums() for _ in others]
    logits = [_Sums() for _ in others]
    queries = {}
    position = 0

    def shadowed(layer):
        attend = layer.attend

        def attend_all(query, key, value, *options):
            out = attend(query, key, value, *options)
            queries[layer.index] = query[0, :, -1]
            measured = slice(max(0, first_measured - position), None)
            kv_heads = key.shape[1]
            for cache, sums in zip(others, outputs):
                shadow = cache.layers[layer.index]
                if not shadow.is_initialized:
                    shadow.lazy_initialization(key, value)
                theirs = shadow.attend(query, key, value, *options)
                # [tokens, heads, dim] to [tokens, kv_heads, the numbers of its queries]
                split = (x[0, measured].unflatten(1, (kv_heads, -1)).flatten(2) for x in (out, theirs))
                sums.add(layer.index, *split)
            return out

        layer.attend = attend_all

    for layer in base.layers:
        shadowed(layer)
    for part in _parts(window, first_measured, measure_logits):
        with torch.inference_mode():
            ids = torch.tensor([part], device=model.device)
            model(input_ids=ids, logits_to_keep=1, **passed(model, base))
        position += len(part)
        if measure_logits and position > first_measured:
            for cache, sums in zip(others, logits):
                _add_logits(base, cache, queries, sums)
    return [(o.errors(), l.errors()) for o, l in zip(outputs, logits)]


def _parts(window, first_measured, measure_logits):
    if not measure_logits:
        return [window]
    starts = range(first_measured, len(window), _LOGIT_STRIDE)
    head = [window[:first_measured]] if first_measured else []
    return [*head, *(window[start : start + _LOGIT_STRIDE] for start in starts)]


def _add_logits(base, other, queries, sums):
    """Of the last query, against all keys as both caches store them now."""
    for index, query in queries.items():
        both = []
        for cache in (base, other):
            layer = cache.layers[index]
            sequence = layer.sequences[0]
            first = max(0, layer.length - layer.window) if layer.window else 0
            keys, _ = layer.cache.gather(sequence, 0, first, like=query.float())
            # [kv_heads, queries of one, dim] and [tokens, kv_heads, dim]
            grouped = query.double().unflatten(0, (keys.shape[1], -1))
            both.append(torch.einsum("hqd,thd->thq", grouped, keys.double()))
        sums.add(index, *both)
