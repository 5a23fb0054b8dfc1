"""What caches cost and lose on a transformers model of your own."""

from collections.abc import Sequence
from typing import Any

import torch

from kvx import _core
from kvx.arrays import token_list
from kvx.compare import ESTIMATES, CacheFigures, Comparison, Estimate
from kvx.errors import Error
from kvx.gates import Gates
from kvx.hf.attention_errors import attention_errors
from kvx.hf.cache import Cache
from kvx.hf.interface import enable, passed
from kvx.progress import progress
from kvx.types import Tokens


def compare(
    model: Any,
    tokens: Tokens,
    recipes: Sequence[str],
    *,
    context: int = 2048,
    windows: int = 4,
    base: str = "bf16",
    attention: bool = False,
    fail_if: str | None = None,
    shows_progress: bool = True,
) -> Comparison:
    """Perplexity and KL divergence of caches against the base cache, as kvx.compare measures them.

    model:   any that kvx.hf.enable takes; it stays enabled
    tokens:  the text's token numbers, at least context * windows of them
    recipes: ``["int8", "nvfp4:auto"]``; the base comes first, whether named or not
    context: tokens of a window; its second half is scored
    attention: measures attention's outputs and logits on the first window too
    fail_if: ``"ppl>0.2%,kl>0.01,cosine<0.999"``: what no cache may lose (docs/guard.md)

    Returns a kvx.Comparison. Raises kvx.GateError, which carries it, where a condition of fail_if is
    true of a cache; kvx.Error: too few tokens, a recipe that does not exist, a condition that is
    none.
    """
    gates = Gates(fail_if)
    tokens = token_list(tokens)
    if context < 4 or windows < 1 or len(tokens) < context * windows:
        raise Error(
            f"{len(tokens)} tokens; {windows} windows of {context} need {context * windows} "
            f"(a window has at least 4)"
        )
    enable(model)
    recipes = [base, *(recipe for recipe in recipes if recipe != base)]
    qualities = [_core.CacheQuality() for _ in recipes]
    costs = {}
    counts = [None] * len(recipes)
    starts = range(0, windows * context, context)
    for start in progress(starts, "windows", shows_progress):
        window = tokens[start : start + context]
        targets = window[context // 2 + 1 :]
        base_logits = None
        for index, (recipe, quality) in enumerate(zip(recipes, qualities)):
            cache = Cache(model.config, recipe, max_tokens=context)
            logits = _logits(model, window, cache, len(targets))
            base_logits = logits if base_logits is None else base_logits
            quality.add_window(base_logits, logits, targets)
            costs[recipe] = cache.cost(context)
            counts[index] = _added(counts[index], cache)
    heads = [(None, None)] * len(recipes)
    if attention or gates.need_attention:
        caches = [Cache(model.config, recipe, max_tokens=context) for recipe in recipes]
        wants_logits = attention or gates.need_logits
        found = attention_errors(
            model, tokens[:context], context // 2, caches[0], caches[1:], wants_logits
        )
        heads[1:] = found
    comparison = Comparison(
        _figures(recipe, costs[recipe], quality.figures(), *of_heads, *of_counts)
        for recipe, quality, of_heads, of_counts in zip(recipes, qualities, heads, counts)
    )
    gates.check(comparison)
    return comparison


def _added(counts, cache):
    """Saturated and non-finite inputs so far."""
    layers = [layer.cache for layer in cache.layers]
    saturated = sum(layer.saturation().clipped for layer in layers)
    nonfinite = sum(layer.nonfinite_inputs() for layer in layers)
    if counts is None:
        return saturated, nonfinite
    return saturated + counts[0], nonfinite + counts[1]


def _logits(model, window, cache, count):
    """[count, 1, vocabulary] of the positions before the last one, in float32."""
    with torch.inference_mode():
        ids = torch.tensor([window], device=model.device)
        found = model(input_ids=ids, logits_to_keep=count + 1, **passed(model, cache)).logits
    return found[0, -count - 1 : -1, None].float().cpu().contiguous()


def _figures(recipe, cost, figures, outputs, logits, saturated, nonfinite):
    estimates = {name: Estimate._of(*figures[name]) for name in ESTIMATES}
    return CacheFigures(
        recipe,
        cost.bits_per_value,
        cost.bytes_per_token,
        cost.tokens_per_gib,
        **estimates,
        outputs=outputs,
        logits=logits,
        saturated_inputs=saturated,
        nonfinite_inputs=nonfinite,
    )
