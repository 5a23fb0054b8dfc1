"""TensorRT-LLM's block pools: [blocks, layers, 2 (K, V), heads * tokens_per_block * head_dim].

Written against kvCacheIndex.h and kvCacheUtils.h of 1.3 (docs/engines.md). A block of the table is
one K or V block of one layer; ``table`` takes the engine's offsets as they are.
"""

from typing import Any

from kvx.engines import nvfp4
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
from kvx.engines.split import FLOATS, FP8, one_scale
from kvx.engines.table import Table, kv_offsets
from kvx.errors import Error


def layer(
    pool: Any,
    format: str,
    *,
    layer_idx_in_pool: int,
    num_kv_heads: int,
    tokens_per_block: int,
    head_dim: int,
    kv_scale: float = 1.0,
) -> Layer:
    """A layer of a pool: an array [blocks, layers, 2, heads * tokens_per_block * head_dim],
    contiguous, as get_primary_pool_data() and its secondary pool are.

    format: f32, f16, bf16, fp8_e4m3 or fp8_e5m2. kv_scale: of fp8, kv_scale_quant_orig
    Raises kvx.Error naming the pool's dimension that does not fit.
    """
    if format not in FLOATS + FP8:
        raise Error(f"format is {format!r}; expected one of {', '.join(FLOATS + FP8)}")
    memory = memory_of(pool, "pool")
    check_itemsize(memory, "pool", format)
    num_elements = num_kv_heads * tokens_per_block * head_dim
    first, block_bytes = _blocks_of_layer(
        memory, "pool", num_elements, layer_idx_in_pool, tokens_per_block
    )
    row = head_dim * memory.itemsize
    is_fp8 = format in FP8
    if is_fp8 and not 0 < kv_scale < float("inf"):
        raise Error(f"kv_scale is {kv_scale}; expected a positive finite number")
    scale = one_scale(memory, kv_scale) if is_fp8 else None
    k, v = (
        Rows(
            f"{format}:source=given,scale=f32" if is_fp8 else format,
            head_dim,
            memory,
            first + side * block_bytes,
            (block_bytes, row, tokens_per_block * row),
            scales=scale,
        )
        for side in (0, 1)
    )
    return Layer(_shape(memory, tokens_per_block, num_kv_heads), k, v)


def nvfp4_layer(
    pool: Any,
    scale_pool: Any,
    *,
    layer_idx_in_pool: int,
    num_kv_heads: int,
    tokens_per_block: int,
    head_dim: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """A layer of an NVFP4 pool and its block-scale pool.

    pool:       bytes [blocks, layers, 2, heads * tokens_per_block * head_dim / 2], two elements a
                container
    scale_pool: bytes [blocks, layers, 2, heads * tokens_per_block * head_dim / 16]
    k_scale, v_scale: the second-level scales, kv_scale_quant_orig

    The layer reads and writes linear scales of V. TensorRT-LLM swizzles them for trtllm-gen: see
    ``v_scales``. Raises kvx.Error naming the pool's dimension that does not fit.
    """
    codes, scales = memory_of(pool, "pool"), memory_of(scale_pool, "scale_pool")
    nvfp4.check(codes, "pool", head_dim)
    nvfp4.check(scales, "scale_pool", head_dim)
    places = []
    for memory, name, row in (
        (codes, "pool", head_dim // 2),
        (scales, "scale_pool", head_dim // nvfp4.GROUP),
    ):
        num_bytes = num_kv_heads * tokens_per_block * row
        first, block = _blocks_of_layer(
            memory, name, num_bytes, layer_idx_in_pool, tokens_per_block
        )
        places.append((first, block, (block, row, tokens_per_block * row)))
    if codes.shape[:2] != scales.shape[:2]:
        raise Error(f"scale_pool has {scales.shape[:2]} blocks and layers, pool {codes.shape[:2]}")
    (code_first, code_block, code_strides), (scale_first, scale_block, scale_strides) = places
    k, v = (
        nvfp4.rows(
            name,
            codes,
            code_first + side * code_block,
            code_strides,
            scales,
            scale_first + side * scale_block,
            scale_strides,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            scale=scale,
        )
        for side, (name, scale) in enumerate((("k", k_scale), ("v", v_scale)))
    )
    return Layer(_shape(codes, tokens_per_block, num_kv_heads), k, v)


def v_scales(
    scale_pool: Any, *, layer_idx_in_pool: int, num_kv_heads: int, tokens_per_block: int
) -> Any:
    """V's scales of a layer, [blocks, heads, tokens, head_dim / 16], a view of the scale pool.

    ``kvx.engines.linear_scales`` turns what TensorRT-LLM wrote to what ``nvfp4_layer`` reads, and
    ``swizzled_scales`` turns it back before the engine's next step.
    """
    blocks, _, _, num_bytes = memory_of(scale_pool, "scale_pool").shape
    groups, rest = divmod(num_bytes, num_kv_heads * tokens_per_block)
    if rest or not groups:
        raise Error(
            f"scale_pool has {num_bytes} bytes a block; expected a multiple of num_kv_heads * "
            f"tokens_per_block, {num_kv_heads} * {tokens_per_block}"
        )
    side = scale_pool[:, layer_idx_in_pool, 1]
    return side.reshape(blocks, num_kv_heads, tokens_per_block, groups)


def _blocks_of_layer(
    memory: Memory, name: str, num_elements: int, layer: int, tokens_per_block: int
) -> tuple[int, int]:
    """Where the layer's first K block begins, and a block's bytes.

    Index i of the table is K or V block i of the pool; the layer's begin 2 * layer further on.
    """
    byte_strides(memory, name, None, None, 2, num_elements)
    check_innermost(memory, name)
    if tokens_per_block < 1 or tokens_per_block & (tokens_per_block - 1):
        raise Error(f"tokens_per_block is {tokens_per_block}; expected a power of two")
    layers = memory.shape[1]
    if not 0 <= layer < layers:
        raise Error(f"layer_idx_in_pool is {layer}; the {name} has {layers} layers")
    block = num_elements * memory.itemsize
    if memory.strides[:3] != (layers * 2 * block, 2 * block, block):
        raise Error(f"{name} has strides of {memory.strides} bytes; expected a contiguous array")
    return 2 * layer * block, block


def _shape(memory: Memory, tokens_per_block: int, num_kv_heads: int) -> Shape:
    """Up to the last index of the table that a K block of a layer has; V's is the next."""
    blocks, layers = memory.shape[:2]
    return Shape((blocks - 1) * layers * 2 + 1, tokens_per_block, num_kv_heads)


def table(offsets: Any, seq_lens: Any) -> Table:
    """The engine's offsets, int32 [sequences, beams, 2, blocks] of one pool; a [sequences * beams,
    2, blocks] array of kv_cache_block_offsets is reshaped by the caller, who knows the beams."""
    return kv_offsets(offsets, seq_lens)


def block_index(block: int, *, num_layers: int) -> int:
    """The index that KVCacheManager writes for K of a block (V's is the next): setOffsets()."""
    return block * num_layers * 2


def slots(blocks: Any, tokens: Any, *, num_layers: int, tokens_per_block: int) -> Any:
    """Slots of tokens for ``append``: arrays of blocks and of offsets in them, of one shape."""
    return blocks * (num_layers * 2 * tokens_per_block) + tokens
