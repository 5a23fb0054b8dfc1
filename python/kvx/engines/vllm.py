"""vLLM's paged caches: one tensor a layer, K and V in it.

Written against vLLM 0.32 (docs/engines.md). Block tables and slots are vLLM's own: int32
[requests, blocks] with ``kvx.engines.packed``, int64 slots with -1 for padding.
"""

from typing import Any

from kvx.engines.layer import (
    Layer,
    Memory,
    Rows,
    Shape,
    byte_strides,
    check_innermost,
    check_itemsize,
    memory_of,
)
from kvx.engines.split import FLOATS, FP8, float_rows, one_scale
from kvx.errors import Error, UnsupportedError

_FORMATS = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
_PER_TOKEN_HEAD = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8_e4m3"}
_NO_STRIDES = {
    "nvfp4": "its V scales are swizzled",
    "int4_per_token_head": "its zero points lie in the low bits of its scales",
}


def layer(
    kv_cache: Any,
    kv_cache_dtype: str,
    *,
    head_dim: int,
    shape: str = "BHNC",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """A layer of ``kv_cache_dtype``: float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2,
    int8_per_token_head or fp8_per_token_head.

    shape: "BHNC" is [blocks, heads, tokens, content], the logical shape of vLLM 0.32, whatever its
           strides (NHD, HND, or a view of a buffer of all layers); "2BNHD" is [2, blocks, tokens,
           heads, head_dim] and "B2NHD" [blocks, 2, tokens, heads, head_dim], of older releases
    k_scale, v_scale: of fp8 caches, as the attention layer's _k_scale and _v_scale

    Raises kvx.UnsupportedError: "nvfp4" and "int4_per_token_head", whose scales no stride reaches.
    """
    if kv_cache_dtype in _NO_STRIDES:
        raise UnsupportedError(
            f"kv_cache_dtype is {kv_cache_dtype!r}: {_NO_STRIDES[kv_cache_dtype]}; use the plug-in "
            f"kvx.vllm, which stores such formats in pages of kvx"
        )
    memory = memory_of(kv_cache, "kv_cache")
    if kv_cache_dtype in _PER_TOKEN_HEAD:
        if shape != "BHNC":
            raise Error(f"shape is {shape!r}; {kv_cache_dtype} caches are BHNC")
        return _per_token_head(memory, kv_cache_dtype, head_dim)
    if kv_cache_dtype not in _FORMATS:
        known = ", ".join((*_FORMATS, *_PER_TOKEN_HEAD))
        raise Error(f"kv_cache_dtype is {kv_cache_dtype!r}; expected one of {known}")
    format = _FORMATS[kv_cache_dtype]
    halves = _halves(memory, shape, head_dim)
    k, v = (
        float_rows(
            "kv_cache", memory, halves.axes, format, head_dim=head_dim, offset=offset, scale=scale
        )
        for offset, scale in ((0, k_scale), (halves.v_offset, v_scale))
    )
    return Layer(Shape(*(memory.shape[axis] for axis in halves.axes)), k, v)


class _Halves:
    """Which dimensions are block, token and head, and where V begins."""

    def __init__(self, axes: tuple[int, int, int], v_offset: int) -> None:
        self.axes = axes
        self.v_offset = v_offset


def _halves(memory: Memory, shape: str, head_dim: int) -> _Halves:
    if shape == "BHNC":
        byte_strides(memory, "kv_cache", None, None, None, 2 * head_dim)
        return _Halves((0, 2, 1), head_dim * memory.itemsize)
    if shape == "2BNHD":
        strides = byte_strides(memory, "kv_cache", 2, None, None, None, head_dim)
        return _Halves((1, 2, 3), strides[0])
    if shape == "B2NHD":
        strides = byte_strides(memory, "kv_cache", None, 2, None, None, head_dim)
        return _Halves((0, 2, 3), strides[1])
    raise Error(f"shape is {shape!r}; expected BHNC, 2BNHD or B2NHD")


def _per_token_head(memory: Memory, kv_cache_dtype: str, head_dim: int) -> Layer:
    """A row is [K: head_dim bytes][scale: float32][V: head_dim bytes][scale: float32]."""
    side_bytes = head_dim + 4
    byte_strides(memory, "kv_cache", None, None, None, 2 * side_bytes)
    check_itemsize(memory, "kv_cache", "int8")
    check_innermost(memory, "kv_cache")
    format = _PER_TOKEN_HEAD[kv_cache_dtype]
    if format == "int8" and head_dim not in (32, 64, 128):
        raise UnsupportedError(
            f"head_dim is {head_dim}; kvx's int8 shares a scale by 32, 64 or 128 numbers"
        )
    recipe = (
        f"int8:g{head_dim},scale=f32" if format == "int8" else f"{format}:source=computed,scale=f32"
    )
    strides = (memory.strides[0], memory.strides[2], memory.strides[1])
    k, v = (
        Rows(
            recipe,
            head_dim,
            memory,
            offset,
            strides,
            scales=memory,
            scale_offset=offset + head_dim,
            scale_strides=(*strides, 4),
        )
        for offset in (0, side_bytes)
    )
    return Layer(Shape(memory.shape[0], memory.shape[2], memory.shape[1]), k, v)


__all__ = ["FLOATS", "FP8", "layer", "one_scale"]
