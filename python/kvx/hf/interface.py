"""How a transformers model meets a kvx cache: its attention function and its mask function.

A forward pass without a kvx cache (``use_cache=False``, a loss, embeddings, transformers' own
caches) is transformers' SDPA: the mask function makes SDPA's mask, the attention function calls
SDPA's.
"""

import inspect
import logging
import sys
from typing import TypeVar

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from kvx import _core
from kvx.errors import Error, UnsupportedError
from kvx.hf import compiled, latent

NAME = "kvx"  # of the attention implementation
# The offset of the first position in a kvx cache: 0, as a bool. transformers passes it from the
# cache to the mask function, which so learns that a kvx cache is there; torch.compile can trace it.
STORED = False
_log = logging.getLogger("kvx.hf")
_Model = TypeVar("_Model")


def enable(model: _Model) -> _Model:
    """Makes ``model`` compute attention with kvx and returns it; its caches are then kvx.hf.Cache.

    What the model computes without a kvx cache (use_cache=False, a loss, generate() with
    transformers' caches) is computed by SDPA as before, gradients included. Loading a model with
    ``attn_implementation="kvx"`` does the same as enable.

    Raises kvx.UnsupportedError: layers of other kinds, a position bias, or a model without
    transformers' attention interface; kvx.Error: something that is no model.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise Error(f"model is a {type(model).__name__}; expected a transformers model")
    windows = [window for window in layer_windows(model.config) if window]
    refuse_position_bias(model.config)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface; kvx needs it"
        )
    if windows:
        _log.info(
            "%s has sliding windows: attention masks that hide tokens between others work up to %d "
            "positions and are refused beyond",
            type(model).__name__,
            min(windows),
        )
    return model


def passed(model, cache):
    """The keyword argument that passes a cache to this model's forward: ``cache`` from transformers
    5.24 on, ``past_key_values`` before."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if is_new else "past_key_values": cache}


def checked_config(config):
    """Returns the config. Raises kvx.Error: a model, or something else that is no config."""
    if hasattr(config, "get_text_config"):
        return config
    hint = ": model.config" if hasattr(getattr(config, "config", None), "get_text_config") else ""
    raise Error(
        f"config is a {type(config).__name__}; expected a config{hint or ' of transformers'}"
    )


def layer_windows(config):
    """Every layer's sliding window, 0 for none."""
    decoder = checked_config(config).get_text_config(decoder=True)
    if getattr(decoder, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{config.model_type} shares keys and values between layers; kvx.hf cannot"
        )
    types, arguments = get_layer_types_and_kwargs(decoder)
    if isinstance(arguments, dict):  # before transformers 5.19: the same for all layers
        arguments = [arguments] * len(types)
    windows = []
    for index, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"layer {index} is of the type {kind}; expected full_attention or sliding_attention"
            )
        windows.append(argument["sliding_window"] if kind == "sliding_attention" else 0)
    return windows


def check_tuned_model(recipe, config, num_layers):
    """Raises kvx.Error: the recipe was tuned for another model than the config's. Its name is what
    it was loaded by."""
    decoder = config.get_text_config(decoder=True)
    name = getattr(config, "_name_or_path", None) or getattr(decoder, "_name_or_path", None) or ""
    _core.check_tuned_model(recipe, name, config.model_type, num_layers)


def refuse_other_devices(states, what, devices=("cpu",)):
    """Refuses keys on a device where ``what`` does not work. Keys lie where their layer runs."""
    if states.device.type not in devices:
        raise UnsupportedError(
            f"keys lie on {states.device}; {what} works on {' and '.join(devices)}"
        )


def refuse_position_bias(config):
    """T5 and its family add a learned bias to every score; kvx's attention has none."""
    decoder = checked_config(config).get_text_config(decoder=True)
    if hasattr(decoder, "relative_attention_num_buckets"):
        raise UnsupportedError(
            f"{config.model_type} adds a position bias to its scores, which kvx's attention cannot; "
            f"kvx.hf.DecodingEncoderDecoderCache passes packed keys and values, decoded, to the "
            f"model's own attention"
        )


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **kwargs,
):
    """transformers' attention function: appends what update() returned, and attends. Keys of no kvx
    cache go to SDPA.

    query: [batch, heads, tokens, head_dim]; key, value: [batch, kv_heads, tokens, head_dim], in a
    latent layer the latent and the rotary part of rows
    attention_mask: what padding_mask returned
    Returns ([batch, tokens, heads, head_dim], None). Raises kvx.UnsupportedError for what the
    verbs do not compute, kvx.Error for masks and batches of other sizes; nothing is stored then.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    layer = expected = compiled.take_expected()
    if expected is None:
        layer = getattr(key, "kvx_layer", None)
        if layer is not None:
            layer.owner.drain_waiting(key)
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions is True; kvx's attention keeps no attention weights (call "
            "model.set_attn_implementation('eager') for them)"
        )
    if layer is None:
        _refuse_ignored_cache(module, kwargs)
        options = {**kwargs, "dropout": dropout, "scaling": scaling, "is_causal": causal}
        if position_bias is not None:
            options["position_bias"] = position_bias
        if attention_mask is not None and attention_mask.dim() == 2:  # of an encoder's tokens
            attention_mask = attention_mask[:, None, None, :]
        if softcap or s_aux is not None:  # which SDPA cannot
            options.update(softcap=softcap, s_aux=s_aux)
            return _attend_eagerly(module, query, key, value, attention_mask, **options)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask has {attention_mask.dim()} dimensions; expected the 2-D padding mask"
        )
    if dropout:
        raise UnsupportedError(
            f"dropout is {dropout}; kvx.hf computes inference (call model.eval())"
        )
    refuse_gradients(query, key, value)
    if causal == layer.is_cross or position_bias is not None:
        raise UnsupportedError(
            "attention whose queries see later tokens, or that has a position bias"
        )
    if (sliding_window or 0) != layer.window:
        raise UnsupportedError(
            f"layer {layer.index} attends with a window of {sliding_window}; its cache has "
            f"{layer.window}"
        )
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    is_traced = expected is not None
    options = (attention_mask, scaling, float(softcap or 0.0), sinks)
    if layer.is_latent:
        return latent.attend(layer, module, query, key, value, *options, is_traced), None
    if is_traced:
        return compiled.attend(layer, query, key, value, *options), None
    return layer.attend(query, key, value, *options), None


def refuse_gradients(*states):
    """Refuses tensors that gradients are wanted of: none flow through the packed bytes."""
    if any(x.requires_grad for x in states):
        raise UnsupportedError(
            "gradients are wanted, and none flow through a kvx cache; call the model under "
            "torch.no_grad(), or without a kvx cache (use_cache=False), where SDPA computes them"
        )


def _refuse_ignored_cache(module, kwargs):
    """An argument that a model does not have arrives here, unread, with this transformers' old
    or new name for a cache."""
    for name in ("cache", "past_key_values"):
        if isinstance(kwargs.get(name), TransformersCache):
            other = "past_key_values" if name == "cache" else "cache"
            raise UnsupportedError(
                f"{name} is no argument of this model in transformers "
                f"{transformers.__version__}; pass {other}= instead"
            )


def _attend_eagerly(module, query, key, value, mask, **options):
    """The model's own attention by products and a softmax. mask: bool, as SDPA's, or None."""
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if attend is None:
        raise UnsupportedError(
            f"{type(module).__name__} has a softcap or attention sinks, which SDPA cannot; without "
            f"a kvx cache set another attention implementation"
        )
    tokens = query.shape[2]
    if mask is None and options.get("is_causal") and tokens > 1:
        # No mask: the queries are the first tokens. A static cache has unwritten positions behind.
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, hidden
        )
    return attend(module, query, key, value, mask, **options)


def padding_mask(
    *,
    mask_function,
    kv_offset=0,
    attention_mask=None,
    allow_is_causal_skip=True,
    use_vmap=False,
    **kwargs,
):
    """transformers' mask function. For a kvx cache, and for an encoder's tokens: the 2-D padding
    mask as it is, or None when nothing is hidden. Otherwise SDPA's mask.

    Raises kvx.UnsupportedError: with a kvx cache, a pattern beyond causal, window and padding
    (images that see each other).
    """
    is_encoders = mask_function is bidirectional_mask_function
    if not is_encoders and kv_offset is not STORED:
        return sdpa_mask(
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            **kwargs,
        )
    if use_vmap or not (allow_is_causal_skip or is_encoders):
        raise UnsupportedError("a mask that is more than causal, window and padding")
    if attention_mask is None or torch.compiler.is_compiling():
        return attention_mask  # a graph does not depend on what is hidden
    return None if bool(attention_mask.all()) else attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
