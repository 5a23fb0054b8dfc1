"""What caches cost and lose on a transformers model of your own."""

import torch

from kvx import _core
from kvx.arrays import token_list
from kvx.compare import ESTIMATES, CacheFigures, Comparison, Estimate
from kvx.errors import Error
from kvx.hf.cache import Cache
from kvx.hf.interface import enable, passed
from kvx.progress import progress


def compare(model, tokens, recipes, *, context=2048, windows=4, base="bf16", shows_progress=True):
    """Perplexity and KL divergence of caches against the base cache, as kvx.compare measures them.

    model:   any that kvx.hf.enable takes; it stays enabled
    tokens:  the text's token numbers, at least context * windows of them
    recipes: ``["int8", "nvfp4:auto"]``; the base comes first, whether named or not
    context: tokens of a window; its second half is scored

    Returns a kvx.Comparison. Raises kvx.Error: too few tokens, a recipe that does not exist.
    """
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
    starts = range(0, windows * context, context)
    for start in progress(starts, "windows", shows_progress):
        window = tokens[start : start + context]
        targets = window[context // 2 + 1 :]
        base_logits = None
        for recipe, quality in zip(recipes, qualities):
            cache = Cache(model.config, recipe, max_tokens=context)
            logits = _logits(model, window, cache, len(targets))
            base_logits = logits if base_logits is None else base_logits
            quality.add_window(base_logits, logits, targets)
            costs[recipe] = cache.cost(context)
    return Comparison(
        _figures(recipe, costs[recipe], quality.figures())
        for recipe, quality in zip(recipes, qualities)
    )


def _logits(model, window, cache, count):
    """[count, 1, vocabulary] of the positions before the last one, in float32."""
    with torch.inference_mode():
        ids = torch.tensor([window], device=model.device)
        found = model(input_ids=ids, logits_to_keep=count + 1, **passed(model, cache)).logits
    return found[0, -count - 1 : -1, None].float().cpu().contiguous()


def _figures(recipe, cost, figures):
    estimates = {name: Estimate(*figures[name]) for name in ESTIMATES}
    return CacheFigures(
        recipe, cost.bits_per_value, cost.bytes_per_token, cost.tokens_per_gib, **estimates
    )
