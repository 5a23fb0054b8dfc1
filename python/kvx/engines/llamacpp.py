"""llama.cpp's KV cache: per layer one K and one V tensor of places.

Written against llama-kv-cache.cpp of 2026 (docs/engines.md). A stream of places is a block, so
a slot is stream * kv_size + place, and a table has one column.
"""

from typing import Any

from kvx.engines.layer import Q4_0_BLOCKS, Layer, Memory, Rows, Shape, memory_of
from kvx.errors import Error, UnsupportedError

_BLOCK = 32  # values of a block: [float16 scale][codes]
_CODE_BYTES = {"q8_0": 32, "q4_0": 16}
_FORMATS = {"q8_0": f"int8:g{_BLOCK},scale=f16", "q4_0": f"int4:g{_BLOCK},scale=f16"}


def layer(
    k: Any,
    v: Any,
    type_k: str,
    type_v: str,
    *,
    num_kv_heads: int,
    kv_size: int,
    num_streams: int = 1,
    v_trans: bool = False,
) -> Layer:
    """The layer of K's and V's bytes, which are uint8 in one dimension.

    type_k, type_v: f32, f16, bf16, q8_0 or q4_0; q4_0 is written by ggml's own rule
    v_trans:        V is transposed, [embd, kv_size], as without flash attention
    Raises kvx.UnsupportedError: other types; a V in blocks that is transposed.
    """
    sides = []
    for name, array, kind in (("k", k, type_k), ("v", v, type_v)):
        memory = memory_of(array, name)
        if len(memory.shape) != 1 or memory.itemsize != 1 or memory.strides != (1,):
            raise Error(f"{name} has shape {list(memory.shape)}; expected uint8 in one dimension")
        places = num_streams * kv_size
        if places < 1 or num_kv_heads < 1 or memory.nbytes % (places * num_kv_heads):
            raise Error(
                f"{name} has {memory.nbytes} bytes; expected a multiple of num_streams * kv_size * "
                f"num_kv_heads, {places * num_kv_heads}"
            )
        head_bytes = memory.nbytes // (places * num_kv_heads)
        transposed = v_trans and name == "v"
        sides.append(_rows(name, memory, kind, head_bytes, num_kv_heads, kv_size, transposed))
    return Layer(Shape(num_streams, kv_size, num_kv_heads), *sides)


def _rows(
    name: str,
    memory: Memory,
    kind: str,
    head_bytes: int,
    num_kv_heads: int,
    kv_size: int,
    transposed: bool,
) -> Rows:
    row = num_kv_heads * head_bytes
    if kind in ("f32", "f16", "bf16"):
        item = 4 if kind == "f32" else 2
        head_dim = head_bytes // item
        if not transposed:
            return Rows(kind, head_dim, memory, 0, (kv_size * row, row, head_bytes))
        strides = (kv_size * row, item, head_bytes * kv_size)
        return Rows(kind, head_dim, memory, 0, strides, fragment=(item, item * kv_size))
    if kind in _FORMATS and not transposed:
        block_bytes = 2 + _CODE_BYTES[kind]
        if head_bytes % block_bytes:
            raise Error(f"{name} has {head_bytes} bytes a head; {kind} has blocks of {block_bytes}")
        strides = (kv_size * row, row, head_bytes)
        return Rows(
            _FORMATS[kind],
            head_bytes // block_bytes * _BLOCK,
            memory,
            2,
            strides,
            fragment=(_CODE_BYTES[kind], block_bytes),
            scales=memory,
            scale_strides=(*strides, block_bytes),
            flags=Q4_0_BLOCKS if kind == "q4_0" else 0,
        )
    raise UnsupportedError(
        f"type_{name} is {kind!r}{', transposed' if transposed else ''}; expected f32, f16, bf16, "
        f"or q8_0 or q4_0 that is not transposed"
    )
