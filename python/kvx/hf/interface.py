"""How a transformers model meets a kvx cache: its attention function and its mask function."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from kvx.errors import UnsupportedError

NAME = "kvx"  # of the attention implementation


def enable(model):
    """Makes ``model`` compute attention with kvx and returns it; its caches are then kvx.hf.Cache.

    Raises kvx.UnsupportedError: layers of other kinds, a position bias, or a model without
    transformers' attention interface.
    """
    layer_windows(model.config)
    refuse_position_bias(model.config)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface; kvx needs it"
        )
    return model


def layer_windows(config):
    """Every layer's sliding window, 0 for none."""
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{config.model_type} shares keys and values between layers; kvx.hf cannot"
        )
    types, arguments = get_layer_types_and_kwargs(decoder)
    windows = []
    for index, (kind, argument) in enumerate(zip(types, arguments)):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"layer {index} is of the type {kind}; expected full_attention or sliding_attention"
            )
        windows.append(argument["sliding_window"] if kind == "sliding_attention" else 0)
    return windows


def refuse_other_devices(states, what, devices=("cpu",)):
    """Refuses keys on a device where ``what`` does not work. Keys lie where their layer runs."""
    if states.device.type not in devices:
        raise UnsupportedError(
            f"keys lie on {states.device}; {what} works on {' and '.join(devices)}"
        )


def refuse_position_bias(config):
    """T5 and its family add a learned bias to every score; kvx's attention has none."""
    if hasattr(config.get_text_config(decoder=True), "relative_attention_num_buckets"):
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
    """transformers' attention function: appends what update() returned, and attends."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask has {attention_mask.dim()} dimensions; expected the 2-D padding mask"
        )
    layer = getattr(key, "kvx_layer", None)
    if layer is None and not causal:  # an encoder: nothing is cached
        if softcap or sliding_window or s_aux is not None or position_bias is not None:
            raise UnsupportedError("an encoder with a softcap, window, sinks or position bias")
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": False}
        return sdpa_attention_forward(module, query, key, value, mask, **arguments)
    if layer is None:
        raise UnsupportedError(
            "attention without a kvx cache; pass past_key_values=kvx.hf.Cache(model.config, "
            "recipe), or set another attention implementation"
        )
    layer.owner.drain_waiting(key)
    if dropout:
        raise UnsupportedError(
            f"dropout is {dropout}; kvx.hf computes inference (call model.eval())"
        )
    if query.requires_grad or key.requires_grad or value.requires_grad:
        raise UnsupportedError("gradients are wanted; kvx.hf computes inference (torch.no_grad())")
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
    out = layer.attend(query, key, value, attention_mask, scaling, softcap, sinks)
    return out, None


def padding_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    allow_is_causal_skip=True,
    use_vmap=False,
    **kwargs,
):
    """transformers' mask function: the 2-D padding mask as it is, or None when nothing is hidden.

    Raises kvx.UnsupportedError: a pattern beyond causal, window and padding (packed sequences,
    images that see each other).
    """
    is_encoders = mask_function is bidirectional_mask_function
    if use_vmap or not (allow_is_causal_skip or is_encoders):
        raise UnsupportedError("a mask that is more than causal, window and padding")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
