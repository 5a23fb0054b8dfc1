"""Calibrates a cache for a transformers model, and keeps what makes it better."""

import datetime
import inspect
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvx import _core
from kvx.arrays import token_list
from kvx.compare import Estimate
from kvx.errors import Error, UnsupportedError
from kvx.formats import parse_recipe
from kvx.hf.compare import compare
from kvx.hf.interface import attention, enable, layer_windows, padding_mask, refuse_position_bias
from kvx.hf.latent import latent_shape
from kvx.progress import progress

_NAME = "kvx_collect"  # of the attention implementation that shows rows to statistics
_WORTHWHILE = 0.98  # below this share of the best divergence an option is kept
_TABLES = ("k_block_offset", "k_feedback", "v_mean", "k_mean", "k_factor", "tensor_scales")
_sinks = []  # what the collecting attention calls; empty while nothing is collected


@dataclass(frozen=True)
class TriedOption:
    """An option that was tried: the divergence with it, and whether it was kept. The first is the
    recipe itself."""

    name: str
    kl: Estimate
    is_kept: bool


@dataclass(frozen=True)
class Tuned:
    """What tune() chose and wrote."""

    path: str
    recipe: str
    tables: tuple[str, ...]
    tried: tuple[TriedOption, ...]


def tune(
    model,
    tokens,
    out,
    *,
    recipe="nvfp4:auto",
    num_prompts=None,
    context=2048,
    windows=2,
    tables=None,
    percentile=99.9,
    block_size=64,
    shows_progress=True,
):
    """Writes ``out``, a tuned recipe for ``kvx.hf.Cache(config, "tuned:" + out)``.

    model:       any that kvx.hf.enable takes, on the CPU or a CUDA GPU; it stays enabled
    tokens:      a text's token numbers, or a list of prompts, each a list of token numbers
    num_prompts: windows of the text to collect from (8 without), or the prompts that there must be
    context:     tokens of a window, and the most of a prompt
    windows:     windows of the text that options are chosen on; of prompts, those behind the ones
                 that are collected from, joined
    tables:      the tables to fit, of ``k_block_offset``, ``k_feedback``, ``v_mean``, ``k_mean``,
                 ``k_factor`` and ``tensor_scales``; without, each is tried and kept where it lowers
                 the divergence from a bf16 cache by more than 2 %
    percentile:  of magnitudes, at which given scales clip (``source=given``, fp8)

    Returns a kvx.hf.Tuned. Raises kvx.Error: too few tokens or prompts, a NaN in the model's
    activations (named by its layer), a recipe that does not exist; nothing is written then.
    kvx.UnsupportedError: a model that caches latent rows (MLA).
    """
    parse_recipe(recipe)
    if latent_shape(model.config.get_text_config(decoder=True)) is not None:
        raise UnsupportedError(
            f"{model.config.model_type} caches latent rows, whose tables tune() cannot fit; give "
            f"kvx.hf.Cache a recipe without tables"
        )
    prompts, judged = _corpus(tokens, num_prompts, context, 0 if tables is not None else windows)
    if tables is not None and (unknown := sorted(set(tables) - set(_TABLES))):
        raise Error(f"tables has '{unknown[0]}'; expected {', '.join(_TABLES)}")
    tuner = _Tuner(model, prompts, judged, context, percentile, block_size, shows_progress)
    if tables is None:
        recipe, tables, tried = tuner.choose(recipe)
    else:
        tried = []
    fitted = tuner.fit(recipe, tables)
    measured = [
        {"option": one.name, "kl": one.kl.value, "kept": one.is_kept} for one in tried
    ]
    tuner.write(fitted, out, {"prompts": len(prompts), "options": measured})
    return Tuned(os.fspath(out), recipe, tuple(tables), tuple(tried))


def collect(model, prompts, *, shows_progress=True):
    """The statistics of a model's keys, values and queries over prompts, lists of token numbers.
    What lies on a GPU is counted there.

    Returns a kvx._core.Statistics. Raises kvx.Error: no prompt, or a NaN, named by its layer.
    """
    if not prompts:
        raise Error("there are 0 prompts; expected at least one")
    statistics = []

    def feed(layer, position, q, k, v):
        if not statistics:
            statistics.append(_statistics_of(model, q, k, v))
        statistics[0].feed_queries(layer, position, q)
        statistics[0].feed(layer, position, k, v)

    _run(model, prompts, feed, "collecting", shows_progress)
    statistics[0].wait()
    return statistics[0]


def _statistics_of(model, q, k, v):
    rope = _rope_of(model)
    return _core.Statistics(
        num_layers=len(layer_windows(model.config)),
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        k_head_dim=k.shape[2],
        v_head_dim=v.shape[2],
        **(rope or {}),
    )


def _rope_of(model):
    """How the model rotates its keys, where one rotation in halves serves all layers; else None,
    and then K gets no block offsets."""
    modules = model.modules()
    rotaries = [m for m in modules if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    if not rotaries:
        return None
    first = rotaries[0]
    config = model.config.get_text_config(decoder=True)
    changes_with_length = getattr(first, "rope_type", "default") in ("dynamic", "longrope")
    if changes_with_length or any(not on for on in getattr(config, "no_rope_layers", None) or ()):
        return None
    if any(not torch.equal(first.inv_freq, other.inv_freq) for other in rotaries[1:]):
        return None
    names = [name for name, _ in first.named_buffers() if not name.startswith("original")]
    if any(name.endswith("_inv_freq") for name in names):
        return None  # one for each kind of layer
    rotate_half = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    if rotate_half is None or "::2" in inspect.getsource(rotate_half):
        return None
    inv_freq = first.inv_freq.double().cpu().tolist()
    return {
        "inv_freq": inv_freq,
        "interleaved": False,
        "attention_scaling": float(getattr(first, "attention_scaling", 1.0)),
    }


def _collecting_attention(module, query, key, value, attention_mask, **kwargs):
    """kvx's attention function, which shows every row to the statistics first."""
    if _sinks:
        if query.shape[0] != 1:
            raise Error(f"the batch has {query.shape[0]} rows; prompts are collected one by one")
        _sinks[-1](module.layer_idx, 0, *(_rows_of(x) for x in (query, key, value)))
    return attention(module, query, key, value, attention_mask, **kwargs)


def _rows_of(states):
    """[1, heads, tokens, head_dim] as [tokens, heads, head_dim], where they lie, in a type that
    statistics take."""
    rows = states[0].transpose(0, 1)
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        rows = rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


AttentionInterface.register(_NAME, _collecting_attention)
AttentionMaskInterface.register(_NAME, padding_mask)


@contextmanager
def _collecting(model, feed):
    before = model.config._attn_implementation
    refuse_position_bias(model.config)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        raise UnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface; kvx needs it"
        )
    _sinks.append(feed)
    try:
        yield
    finally:
        _sinks.pop()
        model.set_attn_implementation(before)


def _run(model, prompts, feed, doing, shows_progress):
    with _collecting(model, feed), torch.inference_mode():
        for prompt in progress(prompts, doing, shows_progress):
            ids = torch.tensor([prompt], device=model.device)
            model(input_ids=ids, use_cache=False, logits_to_keep=1)


def _is_list_of_prompts(tokens):
    return isinstance(tokens, (list, tuple)) and bool(tokens) and hasattr(tokens[0], "__len__")


def _corpus(tokens, num_prompts, context, windows):
    """The prompts to collect from, and the tokens that options are chosen on."""
    if context < 16 or windows < 0:
        raise Error(f"context is {context} and windows is {windows}; expected at least 16 and 1")
    if _is_list_of_prompts(tokens):
        prompts = [token_list(prompt)[:context] for prompt in tokens]
        wanted = num_prompts or max(1, len(prompts) // 2 if windows else len(prompts))
        judged = [token for prompt in prompts[wanted:] for token in prompt]
        if len(prompts) < wanted or len(judged) < windows * context:
            raise Error(
                f"{len(prompts)} prompts; {wanted} to collect from and {windows} windows of "
                f"{context} tokens behind them were expected"
            )
        return prompts[:wanted], judged
    tokens = token_list(tokens)
    wanted = num_prompts or 8
    needed = (wanted + windows) * context
    if len(tokens) < needed:
        raise Error(
            f"{len(tokens)} tokens; {wanted} prompts and {windows} windows of {context} need "
            f"{needed}"
        )
    prompts = [tokens[i * context : (i + 1) * context] for i in range(wanted)]
    return prompts, tokens[wanted * context : needed]


class _Tuner:
    def __init__(self, model, prompts, judged, context, percentile, block_size, shows_progress):
        self.model = enable(model)
        self.prompts, self.judged = prompts, judged
        self.context, self.percentile, self.block_size = context, percentile, block_size
        self.shows_progress = shows_progress
        self.statistics = collect(model, prompts, shows_progress=shows_progress)

    def fit(self, recipe, tables):
        options = _core.FitOptions()
        for name in tables:
            setattr(options, name, True)
        options.given_scales = _reads_given_scales(recipe)
        options.percentile = self.percentile
        fitted = _core.FittedCache(self.statistics, recipe, [], options)
        if fitted.wants_scales:
            self._fit_scales(fitted)
        return fitted

    def _fit_scales(self, fitted):
        transformed = []

        def feed(layer, position, q, k, v):
            if not transformed:
                transformed.append(_statistics_of(self.model, q, k, v))
            k, v = k.float().cpu(), v.float().cpu()
            fitted.feed_transformed(transformed[0], layer, position, k, v, self.block_size)

        _run(self.model, self.prompts, feed, "collecting scales", self.shows_progress)
        fitted.fit_scales(transformed[0])

    def write(self, fitted, path, measured):
        config = self.model.config
        fitted.write(
            path=os.fspath(path),
            model_name=str(getattr(config, "_name_or_path", "") or ""),
            architecture=str(config.model_type),
            date=datetime.date.today().isoformat(),
            measured=json.dumps(measured),
        )

    def judge(self, recipe, tables):
        """The divergence on the windows that options are chosen on."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trial.kvxtune")
            self.write(self.fit(recipe, tables), path, {})
            found = compare(
                self.model,
                self.judged,
                [f"tuned:{path}"],
                context=self.context,
                windows=len(self.judged) // self.context,
                shows_progress=self.shows_progress,
            )
        return found[-1].kl

    def choose(self, recipe):
        """The recipe and tables that were kept, and all that was tried."""
        tables, least = (), self.judge(recipe, ())
        tried = [TriedOption(recipe, least, True)]
        for name in ("k.hadamard", "search", *_TABLES):
            trial = self._with(recipe, tables, name)
            if trial is None:
                continue
            kl = self.judge(*trial)
            is_kept = kl.value < _WORTHWHILE * least.value
            tried.append(TriedOption(name, kl, is_kept))
            if is_kept:
                (recipe, tables), least = trial, kl
        return recipe, tables, tried

    def _with(self, recipe, tables, name):
        """The recipe and tables with one option more; None where it does not apply."""
        if name in _TABLES:
            is_offset = name == "k_block_offset" and not self.statistics.has_rope
            is_mean = name == "k_mean" and "k_block_offset" in tables
            is_scale = name == "tensor_scales" and "nvfp4" not in recipe
            return None if is_offset or is_mean or is_scale else (recipe, (*tables, name))
        if name == "search" and _reads_given_scales(recipe):
            return None
        longer = recipe + (",", ":")[":" not in recipe] + name
        try:
            before, after = parse_recipe(recipe), parse_recipe(longer)
        except Error:
            return None
        return None if (before.k, before.v) == (after.k, after.v) else (longer, tables)


def _reads_given_scales(recipe):
    parsed = parse_recipe(recipe)
    return any(side.scale_source == "given" for side in (parsed.k, parsed.v))
