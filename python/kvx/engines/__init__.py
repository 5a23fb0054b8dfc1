"""Layers of other engines' caches, in their own tensors, for kvx's verbs.

Each module makes a ``Layer`` from what its engine has: tensors, shapes, dtypes, scales. Tables make
a ``Table`` from the engine's block table. ``transcode`` copies tokens from one engine's layer to
another's. docs/engines.md lists layouts, formats and versions.
"""

from kvx.engines import flashinfer, llamacpp, lmdeploy, sglang, tgi, trtllm, turbomind, vllm
from kvx.engines.layer import Layer, Memory, Rows, Shape, transcode
from kvx.engines.nvfp4 import linear_scales, swizzled_scales
from kvx.engines.table import Table, kv_offsets, packed, pages, tokens

__all__ = [
    "Layer",
    "Memory",
    "Rows",
    "Shape",
    "Table",
    "flashinfer",
    "kv_offsets",
    "linear_scales",
    "llamacpp",
    "lmdeploy",
    "packed",
    "pages",
    "sglang",
    "swizzled_scales",
    "tgi",
    "tokens",
    "transcode",
    "trtllm",
    "turbomind",
    "vllm",
]
