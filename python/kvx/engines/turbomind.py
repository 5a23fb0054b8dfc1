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

_ON_THE_HOST = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost, which is pinned memory


class Pool:
    """Both pools in memory of kvx's own: a data block and its scale block have one id.

    num_blocks, or budget_bytes of which a block takes block_bytes + scale_block_bytes
    device: "cpu" or "cuda:0"; the arrays of all calls lie there, too
    Raises kvx.Error naming the argument; kvx.OutOfRangeError: a budget below one block, no memory.
    """

    @in_words
    def __init__(
        self,
        *,
        mode: KvCacheMode,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_len: int = 64,
        dtype: str = "float16",
        num_blocks: int = 0,
        budget_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        self._geometry = (mode, dtype, num_layers, num_kv_heads, head_dim, block_len)
        self._core = _core.TurbomindPool(
            *self._geometry, num_blocks, budget_bytes, _index_of(device)
        )
        self.device = device
        facts = self._core.facts()
        self.num_blocks: int = facts["num_blocks"]
        self.block_bytes: int = facts["block_bytes"]
        self.scale_block_bytes: int = facts["scale_block_bytes"]

    @property
    def num_free(self) -> int:
        """Blocks that allocate() has not given, or that release() took back."""
        return int(self._core.facts()["num_free"])

    @in_words
    def allocate(self, count: int) -> Any:
        """int32 ids of free blocks. Raises kvx.OutOfRangeError, and takes none: too few."""
        return np.array(self._core.allocate(count), np.int32)

    @in_words
    def release(self, ids: Sequence[int]) -> None:
        """Takes all of the blocks back, or none. Raises kvx.Error: one that is free, or unknown."""
        self._core.release([int(one) for one in ids])

    @in_words
    def pointers(self, ids: Sequence[int]) -> tuple[Any, Any]:
        """uint64 addresses of the data blocks, and of the scale blocks (None without FP4).

        Raises kvx.Error: an id that the pool does not have.
        """
        numbers = np.asarray(ids, np.int64)
        bad = (numbers < 0) | (numbers >= self.num_blocks)
        if bad.any():
            at = int(np.argmax(bad))
            raise Error(f"ids[{at}] is {numbers[at]}; the pool has {self.num_blocks} blocks")
        facts = self._core.facts()

        def at_of(first: int, stride: int) -> Any:
            return (numbers * stride).astype(np.uint64) + np.uint64(first)

        scales = at_of(facts["scales"], self.scale_block_bytes) if self.scale_block_bytes else None
        return at_of(facts["data"], self.block_bytes), scales

    @in_words
    def layer(self, layer: int, *, search: bool = True) -> Layer:
        """A layer of the pools, which keeps them alive: write, attend and flatten are its verbs.

        Raises kvx.Error: a layer that does not exist.
        """
        facts = self._core.facts()
        pools = {"data": self._memory(facts["data"], self.block_bytes)}
        if self.scale_block_bytes:
            pools["scales"] = self._memory(facts["scales"], self.scale_block_bytes)
        return _layer_of(pools, self._geometry, layer, search)

    def _memory(self, address: int, block_bytes: int) -> Memory:
        shape = (self.num_blocks, block_bytes)
        return Memory(self._core, address, shape, (block_bytes, 1), 1, self.device)


def _index_of(device: str) -> int:
    if device == "cpu":
        return -1
    name, _, index = device.partition(":")
    if name != "cuda" or not (index or "0").isdigit():
        raise Error(f"device is {device!r}; expected 'cpu' or 'cuda:0'")
    return int(index or 0)


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
    geometry = (mode, dtype, num_layers, num_kv_heads, head_dim, block_len)
    return _layer_of(pools, geometry, layer, search)


def _layer_of(
    pools: dict[str, Memory],
    geometry: tuple[KvCacheMode, str, int, int, int, int],
    layer: int,
    search: bool,
) -> Layer:
    places = _core.turbomind_layer_places(*geometry, layer)
    _check_pools(places, pools)
    mode, _, _, num_kv_heads, head_dim, block_len = geometry
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


def block_ids(block_ptrs: Sequence[int] | Any, data: Any) -> Any:
    """int32 ids of blocks that TurboMind names by addresses in ``data`` [blocks, bytes].

    block_ptrs: addresses; of a GPU's int64 array the ids lie there too, and an address that begins
                no block has -1, which verbs count as out of range
    Raises kvx.Error: an address on the host that begins no block.
    """
    memory = memory_of(data, "data")
    if hasattr(block_ptrs, "__dlpack_device__"):
        if block_ptrs.__dlpack_device__()[0] not in _ON_THE_HOST:
            return _ids_there(block_ptrs, memory)
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


def _ids_there(block_ptrs: Any, memory: Memory) -> Any:
    stride = memory.strides[0]
    ids = (block_ptrs - memory.address) // stride
    is_block = (ids * stride + memory.address == block_ptrs) & (ids >= 0) & (ids < memory.shape[0])
    ids = (ids + 1) * is_block - 1
    return ids.int() if hasattr(ids, "int") else ids.astype(np.int32)


__all__ = ["Pool", "block_ids", "layer", "process_kv"]
