"""Whether torch and transformers are there, and have the interface that kvx.hf was made for."""

import inspect
import logging

OLDEST_TESTED, NEWEST_TESTED = "5.17", "5.24"  # docs/transformers.md has the whole range

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(
        f"kvx.hf needs torch and transformers {OLDEST_TESTED} or newer: pip install 'kvx[hf]' "
        f"({error})"
    ) from error

_log = logging.getLogger("kvx.hf")


def check_interface() -> None:
    """Raises ImportError: a transformers whose interface is another."""
    problem = interface_problem()
    if problem:
        raise ImportError(
            f"kvx.hf does not support the interface of transformers {transformers.__version__}: "
            f"{problem}; it was tested with {OLDEST_TESTED} to {NEWEST_TESTED}"
        )
    minor = _minor_of(transformers.__version__)
    if not _minor_of(OLDEST_TESTED) <= minor <= _minor_of(NEWEST_TESTED):
        _log.warning(
            "kvx.hf was tested with transformers %s to %s, not %s",
            OLDEST_TESTED,
            NEWEST_TESTED,
            transformers.__version__,
        )


def _minor_of(version):
    """[5, 24] of "5.24.1"."""
    return [int(number) for number in version.split(".")[:2]]


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
        from transformers.masking_utils import bidirectional_mask_function, sdpa_mask  # noqa: F401
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
