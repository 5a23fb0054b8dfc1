"""What ``--attention-backend CUSTOM`` means to vLLM's platforms.

A platform looks up one class for the name, and kvx has two: one for heads of keys and values, and
one for latent rows (MLA). The CPU's platform would ignore the name altogether.
"""

import functools

from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvx.errors import UnsupportedError

LATENT_BACKEND = "kvx.vllm.latent.KvxLatentBackend"
_CPU_BLOCK_SIZE = 128  # vLLM's own choice on a CPU, where the user names none


def honour_custom_backend() -> None:
    """Wraps methods of the platforms, once a process."""
    _wrap(CpuPlatform, "get_attn_backend_cls", _choose_kvx)
    _wrap(CpuPlatform, "check_and_update_config", _keep_what_was_wished)
    if current_platform.is_cuda():
        platform = type(current_platform)
        _wrap(platform, "get_attn_backend_cls", _choose_kvx_for_latent_rows)
        _wrap(platform, "get_mla_prefill_backend_cls", _need_no_prefill_backend)


def _wrap(platform, name, instead):
    """instead: called with the platform's own method, bound, before that one's arguments."""
    stock = getattr(platform, name).__func__
    if getattr(stock, "honours_custom", False):
        return

    @functools.wraps(stock)
    def method(cls, *args, **kwargs):
        return instead(functools.partial(stock, cls), *args, **kwargs)

    method.honours_custom = True
    setattr(platform, name, classmethod(method))


def _choose_kvx(stock, selected_backend, attn_selector_config, *args, **kwargs):
    if selected_backend != AttentionBackendEnum.CUSTOM:
        return stock(selected_backend, attn_selector_config, *args, **kwargs)
    of_heads = selected_backend.get_path()
    path = LATENT_BACKEND if attn_selector_config.use_mla else of_heads
    backend = resolve_obj_by_qualname(path)
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    reasons = backend.validate_configuration(
        device_capability=capability, **attn_selector_config._asdict()
    )
    if not backend.supports_kv_cache_dtype(attn_selector_config.kv_cache_dtype):
        reasons.append(
            f"--kv-cache-dtype is {attn_selector_config.kv_cache_dtype}; name a recipe instead: "
            f'--additional-config \'{{"kvx": {{"recipe": "int8"}}}}\''
        )
    if reasons:
        raise UnsupportedError(f"the attention backend CUSTOM (kvx): {'; '.join(reasons)}")
    return path


def _choose_kvx_for_latent_rows(stock, selected_backend, attn_selector_config, *args, **kwargs):
    if not attn_selector_config.use_mla:
        return stock(selected_backend, attn_selector_config, *args, **kwargs)
    return _choose_kvx(stock, selected_backend, attn_selector_config, *args, **kwargs)


class NoPrefillBackend:
    """Where vLLM has no kernel for a latent model's prompts. kvx computes prompts like decodes, so
    it never asks for one."""

    @classmethod
    def get_name(cls):
        return "NONE"

    def __init__(self, *_, **__):
        pass


def _need_no_prefill_backend(stock, selector_config):
    try:
        return stock(selector_config)
    except ValueError:
        if get_current_vllm_config().attention_config.backend != AttentionBackendEnum.CUSTOM:
            raise
        return NoPrefillBackend


def _keep_what_was_wished(stock, vllm_config):
    """On a CPU without AMX vLLM's own kernel of latent attention has blocks of 16 tokens, whole
    prompts and no cached prefixes, and the platform sets all of that for any backend."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    backend = vllm_config.attention_config.backend
    if backend != AttentionBackendEnum.CUSTOM or model is None or not model.use_mla:
        return stock(vllm_config)
    scheduler = vllm_config.scheduler_config
    block_size = cache.block_size if cache.user_specified_block_size else _CPU_BLOCK_SIZE
    wishes = [
        (cache, "block_size", block_size),
        (cache, "enable_prefix_caching", cache.enable_prefix_caching),
        (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
        (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
    ]
    result = stock(vllm_config)
    for config, name, wish in wishes:
        setattr(config, name, wish)
    return result
