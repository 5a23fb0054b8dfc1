"""A transformers cache of kvx's packed keys and values, and the attention that reads them.

    import kvx.hf
    cache = kvx.hf.Cache(kvx.hf.enable(model).config, "nvfp4:auto")
    model.generate(**inputs, past_key_values=cache)

How the two meet: transformers never hands the cache to the attention function. So ``update``
returns the new keys and values with the layer attached to them, and the function that ``enable``
registers appends them and attends in one verb. Tokens that the attention mask hides are not stored
at all.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvx.hf needs torch and transformers 5.19 or newer: pip install 'kvx[hf]' ({error})"
    ) from error

from kvx.hf.cache import Cache
from kvx.hf.compare import compare
from kvx.hf.encoder_decoder import EncoderDecoderCache
from kvx.hf.interface import NAME, enable

__all__ = ["NAME", "Cache", "EncoderDecoderCache", "compare", "enable"]
