"""kvx in vLLM: an attention backend whose pages are kvx's packed bytes.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvx": {"recipe": "int4"}}'

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes; nothing changes until the backend is chosen.
"""

import logging
import os

from kvx.errors import UnsupportedError
from kvx.vllm.recipe import RECIPE_VARIABLE

try:
    import vllm
except ImportError as error:
    raise ImportError(f"kvx.vllm needs vLLM 0.32 or 0.33: pip install vllm ({error})") from error

TESTED_VERSIONS = ("0.32", "0.33")
BACKEND = "kvx.vllm.backend.KvxBackend"
_log = logging.getLogger("vllm.kvx")  # below "vllm": its handlers show it


def register() -> None:
    """Registers the attention backend CUSTOM, and makes vLLM's CPU platform honour it.

    Where vLLM's interface is another, an error is logged and nothing is registered.
    Raises kvx.UnsupportedError instead when KVX_VLLM_RECIPE requests kvx.
    """
    problem = interface_problem()
    if problem:
        message = (
            f"kvx does not support the interface of vLLM {vllm.__version__}: {problem}; it was made "
            f"for {' and '.join(TESTED_VERSIONS)}. The attention backend CUSTOM is not kvx's."
        )
        if os.environ.get(RECIPE_VARIABLE):
            raise UnsupportedError(message)
        _log.error(message)
        return
    if not vllm.__version__.startswith(tuple(version + "." for version in TESTED_VERSIONS)):
        tested = " and ".join(TESTED_VERSIONS)
        _log.warning("kvx was tested with vLLM %s, not %s", tested, vllm.__version__)

    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvx.vllm.platforms import honour_custom_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    honour_custom_backend()


def interface_problem() -> str | None:
    """What vLLM lacks of the interface that kvx uses; None if nothing."""
    import dataclasses
    import inspect

    try:
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.attention.backend import (
            AttentionBackend,
            AttentionCGSupport,
            AttentionMetadataBuilder,
            CommonAttentionMetadata,
            MLAAttentionImpl,
        )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.kv_cache_interface import (  # noqa: F401
            AttentionSpec,
            KVCacheLayout,
            MLAAttentionSpec,
            get_kv_quant_mode,
        )
    except ImportError as error:
        return str(error)
    hook = inspect.signature(CpuPlatform.get_attn_backend_cls).parameters
    needed = [
        (AttentionBackendEnum.__members__, "AttentionBackendEnum", ["CUSTOM"]),
        (KVCacheLayout.__members__, "KVCacheLayout", ["LBHNC"]),
        (
            dir(AttentionBackend),
            "AttentionBackend",
            [
                "customize_spec",
                "forward_includes_kv_cache_update",
                "get_preferred_block_size",
                "get_supported_kernel_block_sizes",
                "supported_kv_cache_layouts",
                "supports_device_cpu_query_lens_mismatch",
                "validate_configuration",
            ],
        ),
        (AttentionCGSupport.__members__, "AttentionCGSupport", ["ALWAYS"]),
        (
            dir(AttentionMetadataBuilder),
            "AttentionMetadataBuilder",
            ["_init_reorder_batch_threshold", "build", "build_for_cudagraph_capture"],
        ),
        (
            [field.name for field in dataclasses.fields(AttentionSpec)],
            "AttentionSpec",
            ["block_size", "num_kv_heads", "head_size", "head_size_v", "kv_quant_mode"]
            + ["state_content_bytes"],
        ),
        (
            [field.name for field in dataclasses.fields(CommonAttentionMetadata)],
            "CommonAttentionMetadata",
            ["query_start_loc", "query_start_loc_cpu", "seq_lens", "max_query_len", "max_seq_len"]
            + ["num_actual_tokens", "block_table_tensor", "slot_mapping", "causal"]
            + ["seq_lens_cpu_upper_bound"],
        ),
        (
            dir(MLAAttentionImpl),
            "MLAAttentionImpl",
            ["do_kv_cache_update", "forward_mha", "forward_mqa"]
            + ["process_weights_after_loading"],
        ),
        (hook, "CpuPlatform.get_attn_backend_cls", ["selected_backend", "attn_selector_config"]),
    ]
    for there, owner, names in needed:
        missing = [name for name in names if name not in there]
        if missing:
            return f"{owner} has no {', '.join(missing)}"
    return None


__all__ = ["interface_problem", "register"]
