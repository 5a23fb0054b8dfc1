"""TensorRT-LLM's block pools: [blocks, layers, 2 (K, V), heads * tokens_per_block * head_dim].

Written against kvCacheIndex.h and kvCacheUtils.h of 1.3 (docs/engines.md). A block of the table is
one K or V block of one layer; ``table`` takes the engine's offsets as they are.
"""

from typing import Any

from kvx.engines.layer import (
    Layer,
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
    memory = memory_of(pool, "pool")
    num_elements = num_kv_heads * tokens_per_block * head_dim
    byte_strides(memory, "pool", None, None, 2, num_elements)
    check_innermost(memory, "pool")
    if format not in FLOATS + FP8:
        raise Error(f"format is {format!r}; expected one of {', '.join(FLOATS + FP8)}")
    check_itemsize(memory, "pool", format)
    if tokens_per_block < 1 or tokens_per_block & (tokens_per_block - 1):
        raise Error(f"tokens_per_block is {tokens_per_block}; expected a power of two")
    blocks, layers = memory.shape[:2]
    if not 0 <= layer_idx_in_pool < layers:
        raise Error(f"layer_idx_in_pool is {layer_idx_in_pool}; the pool has {layers} layers")
    block_bytes = num_elements * memory.itemsize
    if memory.strides[:3] != (layers * 2 * block_bytes, 2 * block_bytes, block_bytes):
        raise Error(f"pool has strides of {memory.strides} bytes; expected a contiguous array")
    # Index i of the table is K or V block i of the pool; this layer's begin 2 * layer further on.
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
            (2 * layer_idx_in_pool + side) * block_bytes,
            (block_bytes, row, tokens_per_block * row),
            scales=scale,
        )
        for side in (0, 1)
    )
    # The last index of the table that a block of this layer has, and the one before of V.
    return Layer(
        Shape((blocks - 1) * layers * 2 + 1, tokens_per_block, num_kv_heads),
        k,
        v,
    )


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
