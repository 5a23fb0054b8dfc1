"""A transformers cache of kvx's packed keys and values, and the attention that reads them.

    import kvx.hf
    cache = kvx.hf.Cache(kvx.hf.enable(model).config, "nvfp4:auto")
    model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

``from_pretrained(..., attn_implementation="kvx")`` does the same as ``enable``. Without a kvx cache
the model attends by SDPA, as before.

How the two meet: transformers never passes the cache to the attention function. So ``update``
returns the new keys and values with the layer attached to them, and the function that ``enable``
registers appends them and attends in one verb. Tokens that the attention mask hides are not stored
at all.
"""

from kvx.hf.requirements import check_interface

check_interface()

from kvx.hf.cache import Cache  # noqa: E402
from kvx.hf.compare import compare  # noqa: E402
from kvx.hf.decoding import DecodingCache  # noqa: E402
from kvx.hf.encoder_decoder import (  # noqa: E402
    DecodingEncoderDecoderCache,
    EncoderDecoderCache,
)
from kvx.hf.interface import NAME, enable  # noqa: E402
from kvx.hf.scales import export_scales, import_scales  # noqa: E402
from kvx.hf.stress import DriftPart, RetrievalScore, StressReport, stress  # noqa: E402
from kvx.hf.tune import TriedOption, Tuned, tune  # noqa: E402

__all__ = [
    "NAME",
    "Cache",
    "DecodingCache",
    "DecodingEncoderDecoderCache",
    "DriftPart",
    "EncoderDecoderCache",
    "RetrievalScore",
    "StressReport",
    "TriedOption",
    "Tuned",
    "compare",
    "enable",
    "export_scales",
    "import_scales",
    "stress",
    "tune",
]
