"""vLLM's paged caches: one tensor a layer, K and V in it.

Written against vLLM 0.32 (docs/engines.md). Block tables and slots are vLLM's own: int32
[requests, blocks] with ``kvx.engines.packed``, int64 slots with -1 for padding.
"""

from typing import Any

from kvx.engines import nvfp4
from kvx.engines.layer import (
    PREFIX_OF_K,
    Layer,
    Memory,
    Rows,
    Shape,
    byte_strides,
    check_innermost,
    check_itemsize,
    memory_of,
)
from kvx.engines.split import float_rows
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
_NVFP4 = ("nvfp4", "nvfp4_4over6")
_LATENT_DIM, _ROTARY_DIM = 512, 64  # of rows of fp8_ds_mla, whose size vLLM has fixed
_DS_MLA_GROUP = 128  # latent numbers that share a scale
_NO_STRIDES = {"int4_per_token_head": "its zero points lie in the low bits of its scales"}


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
    int8_per_token_head, fp8_per_token_head, nvfp4 or nvfp4_4over6.

    shape: "BHNC" is [blocks, heads, tokens, content], the logical shape of vLLM 0.32, whatever its
           strides (NHD, HND, or a view of a buffer of all layers); "2BNHD" is [2, blocks, tokens,
           heads, head_dim] and "B2NHD" [blocks, 2, tokens, heads, head_dim], of older releases.
           nvfp4 has twice the heads in BHNC, and a page of [K codes][K scales][V codes][V scales]
    k_scale, v_scale: of fp8 and nvfp4 caches, as the attention layer's _k_scale and _v_scale

    An nvfp4 layer reads and writes linear scales of V, as vLLM's FA2 kernels do. On SM100 and SM103
    they are swizzled: see ``v_scales``. kvx chooses a group's scale as "nvfp4" does.

    Raises kvx.UnsupportedError: "int4_per_token_head", whose zero points no stride reaches.
    Layers of latent attention (MLA) are those of ``latent_layer``.
    """
    if kv_cache_dtype in _NO_STRIDES:
        raise UnsupportedError(
            f"kv_cache_dtype is {kv_cache_dtype!r}: {_NO_STRIDES[kv_cache_dtype]}; use the plug-in "
            f"kvx.vllm, which stores such formats in pages of kvx"
        )
    memory = memory_of(kv_cache, "kv_cache")
    if kv_cache_dtype in _NVFP4:
        return _nvfp4(memory, kv_cache_dtype, shape, head_dim, (k_scale, v_scale))
    if kv_cache_dtype in _PER_TOKEN_HEAD:
        if shape != "BHNC":
            raise Error(f"shape is {shape!r}; {kv_cache_dtype} caches are BHNC")
        return _per_token_head(memory, kv_cache_dtype, head_dim)
    if kv_cache_dtype not in _FORMATS:
        known = ", ".join((*_FORMATS, *_PER_TOKEN_HEAD, *_NVFP4))
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


def latent_layer(
    kv_cache: Any,
    kv_cache_dtype: str,
    *,
    kv_lora_rank: int = _LATENT_DIM,
    k_scale: float = 1.0,
) -> Layer:
    """A layer of latent attention (MLA): kv_cache [blocks, tokens, row], one row a token for all
    heads, whose first kv_lora_rank numbers are its value too.

        layer = kvx.engines.vllm.latent_layer(kv_cache, "fp8_ds_mla")
        layer.append(rows, None, slots)  # rows [tokens, 1, 576]

    kv_cache_dtype: fp8_ds_mla, float32, float16, bfloat16, fp8, fp8_e4m3 or fp8_e5m2
    k_scale:        of fp8 caches, as the attention layer's _k_scale

    fp8_ds_mla, FlashMLA's fp8 cache too, is uint8 [blocks, tokens, 656]: 512 E4M3 codes, a float32
    scale for each 128 of them, 64 rotary numbers in bfloat16. Rows of it and of floats are in two
    segments, latent and rotary, so that ``transcode`` on a GPU takes one to the other.
    """
    memory = memory_of(kv_cache, "kv_cache")
    if kv_cache_dtype == "fp8_ds_mla":
        if kv_lora_rank != _LATENT_DIM:
            raise Error(f"kv_lora_rank is {kv_lora_rank}; rows of fp8_ds_mla have {_LATENT_DIM}")
        return _fp8_ds_mla(memory)
    if kv_cache_dtype not in _FORMATS:
        known = ", ".join(("fp8_ds_mla", *_FORMATS))
        raise Error(f"kv_cache_dtype is {kv_cache_dtype!r}; latent layers have one of {known}")
    format = _FORMATS[kv_cache_dtype]
    byte_strides(memory, "kv_cache", None, None, None)
    row_dim = memory.shape[2]
    if not 0 < kv_lora_rank < row_dim:
        raise Error(f"kv_lora_rank is {kv_lora_rank}; expected 1 to {row_dim - 1}, fewer than a "
                    f"row of kv_cache has")
    # Scaled rows stay whole: there kvx's kernels want the rotary segment in 16 bits.
    first_dim = row_dim if format.startswith("fp8") else kv_lora_rank
    axes = (0, 1, 1)  # there is one head
    k = float_rows("kv_cache", memory, axes, format, head_dim=first_dim, scale=k_scale)
    rest = None
    if first_dim < row_dim:
        rotary_dim, offset = row_dim - first_dim, first_dim * memory.itemsize
        rest = float_rows("kv_cache", memory, axes, format, head_dim=rotary_dim, offset=offset)
    return Layer(Shape(*memory.shape[:2], 1), k, _prefix(k, kv_lora_rank), rest)


def _prefix(k: Rows, dim: int) -> Rows:
    """V as the first numbers of K's rows."""
    return Rows(k.format, dim, k.memory, k.offset, k.code_strides, flags=PREFIX_OF_K)


def _fp8_ds_mla(memory: Memory) -> Layer:
    """A row is [512 E4M3 codes][4 float32 scales][64 bfloat16]."""
    scales_at = _LATENT_DIM
    rotary_at = scales_at + 4 * (_LATENT_DIM // _DS_MLA_GROUP)
    byte_strides(memory, "kv_cache", None, None, rotary_at + 2 * _ROTARY_DIM)
    if memory.itemsize != 1:
        raise Error(f"kv_cache has elements of {memory.itemsize} bytes; fp8_ds_mla has 1")
    check_innermost(memory, "kv_cache")
    strides = (memory.strides[0], memory.strides[1], memory.strides[1])
    latent = Rows(
        f"fp8_e4m3:source=computed,g{_DS_MLA_GROUP}",
        _LATENT_DIM,
        memory,
        0,
        strides,
        scales=memory,
        scale_offset=scales_at,
        scale_strides=(*strides, 4),
    )
    rotary = Rows("bf16", _ROTARY_DIM, memory, rotary_at, strides)
    return Layer(Shape(*memory.shape[:2], 1), latent, _prefix(latent, _LATENT_DIM), rotary)


def v_scales(kv_cache: Any, *, head_dim: int) -> Any:
    """V's scales of an nvfp4 cache: uint8 [blocks, heads, tokens, head_dim / 16], a view.

    Where vLLM stores them for trtllm-gen (SM100, SM103) a layer reads them between two calls:

        scales = kvx.engines.vllm.v_scales(kv_cache, head_dim=128)
        kvx.engines.linear_scales(scales)    # reads and writes of the layer come after this
        kvx.engines.swizzled_scales(scales)  # vLLM's steps after this
    """
    page = _Nvfp4Page(memory_of(kv_cache, "kv_cache"), head_dim)
    first = page.side_bytes + page.scales_at
    blocks, heads, tokens, groups = page.blocks, page.heads, page.tokens, page.groups
    rows = kv_cache if page.is_hnd else kv_cache.swapaxes(1, 2)
    scales = rows.reshape(blocks, -1)[:, first : first + heads * tokens * groups]
    if page.is_hnd:
        return scales.reshape(blocks, heads, tokens, groups)
    return scales.reshape(blocks, tokens, heads, groups).swapaxes(1, 2)


class _Nvfp4Page:
    """Where a page [K codes][K scales][V codes][V scales] has its parts, each by heads (HND) or by
    tokens (NHD)."""

    def __init__(self, memory: Memory, head_dim: int) -> None:
        nvfp4.check(memory, "kv_cache", head_dim)
        self.row_bytes, self.groups = head_dim // 2, head_dim // nvfp4.GROUP
        whole = self.row_bytes + self.groups
        strides = byte_strides(memory, "kv_cache", None, None, None, whole)
        self.blocks, sides, self.tokens, _ = memory.shape
        if sides % 2:
            raise Error(f"kv_cache has {sides} heads; expected those of K, then as many of V")
        self.heads = sides // 2
        self.is_hnd = strides[1:] == (self.tokens * whole, whole, 1)
        if not self.is_hnd and strides[1:] != (whole, sides * whole, 1):
            raise Error(f"kv_cache has strides of {strides} bytes; expected dense pages")
        self.block_stride = strides[0]
        self.side_bytes = self.heads * self.tokens * whole
        self.scales_at = self.heads * self.tokens * self.row_bytes

    def strides(self, row_bytes: int) -> tuple[int, int, int]:
        """Of block, token and head, where a row has so many bytes."""
        if self.is_hnd:
            return (self.block_stride, row_bytes, self.tokens * row_bytes)
        return (self.block_stride, self.heads * row_bytes, row_bytes)


def _nvfp4(
    memory: Memory, kv_cache_dtype: str, shape: str, head_dim: int, scales: tuple[float, float]
) -> Layer:
    if shape != "BHNC":
        raise Error(f"shape is {shape!r}; {kv_cache_dtype} caches are BHNC")
    page = _Nvfp4Page(memory, head_dim)
    k, v = (
        nvfp4.rows(
            name,
            memory,
            offset,
            page.strides(page.row_bytes),
            memory,
            offset + page.scales_at,
            page.strides(page.groups),
            head_dim=head_dim,
            num_kv_heads=page.heads,
            scale=scale,
        )
        for name, offset, scale in zip(("k", "v"), (0, page.side_bytes), scales, strict=True)
    )
    return Layer(Shape(page.blocks, page.tokens, page.heads), k, v)


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


__all__ = ["latent_layer", "layer", "v_scales"]
