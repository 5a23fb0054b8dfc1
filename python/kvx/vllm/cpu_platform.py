"""vLLM's CPU platform ignores ``--attention-backend CUSTOM``; with this it does not."""

import functools

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvx.errors import UnsupportedError


def honour_custom_backend() -> None:
    """Wraps CpuPlatform.get_attn_backend_cls, once a process."""
    stock = CpuPlatform.get_attn_backend_cls.__func__
    if getattr(stock, "honours_custom", False):
        return

    @functools.wraps(stock)
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **kwargs):
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return stock(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise UnsupportedError(f"the attention backend CUSTOM (kvx): {'; '.join(reasons)}")
        return selected_backend.get_path()

    get_attn_backend_cls.honours_custom = True
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
