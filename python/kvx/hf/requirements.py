"""Whether torch and transformers are there, and have the interface that kvx.hf was made for."""

import inspect
import logging

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(
        f"kvx.hf needs torch and transformers 5.19 or newer: pip install 'kvx[hf]' ({error})"
    ) from error

TESTED_VERSION = "5.19"
_log = logging.getLogger("kvx.hf")


def check_interface() -> None:
    """Raises ImportError: a transformers whose interface is another."""
    problem = interface_problem()
    if problem:
        raise ImportError(
            f"kvx.hf does not support the interface of transformers {transformers.__version__}: "
            f"{problem}; it was made for {TESTED_VERSION}"
        )
    if not transformers.__version__.startswith(TESTED_VERSION + "."):
        _log.warning("kvx.hf was tested with %s, not %s", TESTED_VERSION, transformers.__version__)


def interface_problem() -> str | None:
    """What transformers lacks of the interface that kvx.hf uses; None if nothing."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
        from transformers.cache_utils import (
            Cache,
            CacheLayerMixin,
            EncoderDecoderCache,  # noqa: F401
            get_layer_types_and_kwargs,  # noqa: F401
        )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import bidirectional_mask_function  # noqa: F401
    except ImportError as error:
        return str(error)
    layer = ["lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"]
    masks = ["allow_is_causal_skip", "attention_mask", "mask_function", "use_vmap"]
    needed = [
        (dir(CacheLayerMixin), "CacheLayerMixin", layer + ["reorder_cache", "reset"]),
        (dir(Cache), "Cache", ["update", "get_mask_sizes", "is_sliding", "is_croppable"]),
        (dir(PreTrainedConfig), "PreTrainedConfig", ["per_layer_config"]),
        (inspect.signature(Cache.__init__).parameters, "Cache.__init__", ["layers"]),
        (dir(AttentionInterface), "AttentionInterface", ["register"]),
        (dir(AttentionMaskInterface), "AttentionMaskInterface", ["register"]),
        (
            inspect.signature(AttentionMaskInterface()["sdpa"]).parameters,
            "the mask function of sdpa",
            masks,
        ),
        (
            inspect.signature(sdpa_attention_forward).parameters,
            "the attention function of sdpa",
            ["query", "key", "value", "attention_mask", "scaling", "is_causal"],
        ),
    ]
    for there, owner, names in needed:
        missing = [name for name in names if name not in there]
        if missing:
            return f"{owner} has no {', '.join(missing)}"
    return None
