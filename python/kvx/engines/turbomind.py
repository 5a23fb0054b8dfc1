"""TurboMind's pools (LMDeploy): data blocks, and scale blocks of FP4 under the same ids.

Written against LMDeploy 0.16 (docs/engines.md). kvx.turbomind has policies and sizes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvx import _core
from kvx.engines.layer import Layer, Memory, Rows, Shape, memory_of
from kvx.engines.process_kv import process_kv
from kvx.errors import Error
from kvx.refusals import in_words
from kvx.turbomind import KvCacheMode


@in_words
def layer(
    data: Any,
    scales: Any = None,
    *,
    mode: KvCacheMode,
    layer: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_len: int = 64,
    dtype: str = "float16",
    search: bool = True,
) -> Layer:
    """A layer of pools: data uint8 [blocks, block_bytes], and scales uint8 [blocks,
    scale_block_bytes] in FP4 modes, as kvx.turbomind.get_cache_block_size counts them.

    search: FP4 scales that append makes are the best of eight candidates; no layout changes
    Raises kvx.Error: a pool that is missing or too small, or a layer that does not exist.
    """
    pools = {"data": memory_of(data, "data")}
    if scales is not None:
        pools["scales"] = memory_of(scales, "scales")
    for name, memory in pools.items():
        if len(memory.shape) != 2 or memory.itemsize != 1 or memory.strides[1] != 1:
            raise Error(f"{name} has shape {list(memory.shape)}; expected uint8 [blocks, bytes]")
    places = _core.turbomind_layer_places(
        mode, dtype, num_layers, num_kv_heads, head_dim, block_len, layer
    )
    _check_pools(places, pools)
    num_blocks = pools["data"].shape[0]
    is_fp4 = mode in (KvCacheMode.kFp4Mx, KvCacheMode.kFp4Nv)
    recipe = places["recipe"] + (":search" if is_fp4 and search else "")
    sides = [_rows(places[side], recipe, head_dim, pools, is_fp4) for side in ("k", "v")]
    return Layer(Shape(num_blocks, block_len, num_kv_heads), *sides)


def _check_pools(places: dict[str, Any], pools: dict[str, Memory]) -> None:
    if pools["data"].shape[1] < places["block_bytes"]:
        raise Error(
            f"data has blocks of {pools['data'].shape[1]} bytes; expected {places['block_bytes']}"
        )
    needed = places["scale_block_bytes"]
    if needed and "scales" not in pools:
        raise Error("scales is None; FP4 modes keep them in a pool of their own")
    if not needed and "scales" in pools:
        raise Error("scales is given; only FP4 modes have a scale pool")
    if needed:
        blocks, have = pools["scales"].shape
        if have < needed or blocks != pools["data"].shape[0]:
            raise Error(
                f"scales is [{blocks}, {have}]; expected [{pools['data'].shape[0]}, {needed}]"
            )


def _rows(
    place: dict[str, Any], recipe: str, head_dim: int, pools: dict[str, Memory], is_fp4: bool
) -> Rows:
    data = pools["data"]
    of_scales = pools["scales"] if is_fp4 else data
    has_scales = place["scale_strides"] is not None
    return Rows(
        recipe,
        head_dim,
        data,
        place["codes"],
        (data.strides[0], *place["code_strides"]),
        scales=of_scales if has_scales else None,
        scale_offset=place["scales"],
        scale_strides=(of_scales.strides[0], *place["scale_strides"]) if has_scales else (0,) * 4,
    )


def block_ids(block_ptrs: Sequence[int], data: Any) -> Any:
    """int32 ids of blocks that TurboMind names by addresses in ``data`` [blocks, bytes].

    Raises kvx.Error: an address that begins no block.
    """
    memory = memory_of(data, "data")
    offsets = np.asarray(block_ptrs, np.uint64).astype(np.int64) - memory.address
    ids, rest = np.divmod(offsets, memory.strides[0])
    bad = (rest != 0) | (ids < 0) | (ids >= memory.shape[0])
    if bad.any():
        at = int(np.argmax(bad))
        raise Error(
            f"block_ptrs[{at}] is {block_ptrs[at]:#x}, which begins no block of data, at "
            f"{memory.address:#x} with {memory.shape[0]} blocks of {memory.strides[0]} bytes"
        )
    return ids.astype(np.int32)


__all__ = ["block_ids", "layer", "process_kv"]
