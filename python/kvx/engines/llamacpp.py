"""llama.cpp's KV cache: per layer one K and one V tensor of places.

Written against llama-kv-cache.cpp of 2026 (docs/engines.md). A stream of places is a block, so
a slot is stream * kv_size + place, and a table has one column.
"""

from typing import Any

from kvx.engines.layer import Layer, Memory, Rows, Shape, memory_of
from kvx.errors import Error, UnsupportedError

_Q8_0_BLOCK = 32  # values; a block is [float16 scale][32 int8]
_Q8_0_BYTES = 34


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
    """k, v: the tensors' bytes, uint8 in one dimension; type_k, type_v: f32, f16, bf16 or q8_0.

    v_trans: V is transposed, [embd, kv_size], as without flash attention
    Raises kvx.UnsupportedError: q4_0 and others, whose order of nibbles kvx has not; a q8_0 V that
    is transposed.
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
    if kind == "q8_0" and not transposed:
        if head_bytes % _Q8_0_BYTES:
            raise Error(f"{name} has {head_bytes} bytes a head; q8_0 has blocks of {_Q8_0_BYTES}")
        strides = (kv_size * row, row, head_bytes)
        return Rows(
            f"int8:g{_Q8_0_BLOCK},scale=f16",
            head_bytes // _Q8_0_BYTES * _Q8_0_BLOCK,
            memory,
            2,
            strides,
            fragment=(_Q8_0_BLOCK, _Q8_0_BYTES),
            scales=memory,
            scale_strides=(*strides, _Q8_0_BYTES),
        )
    raise UnsupportedError(
        f"type_{name} is {kind!r}{', transposed' if transposed else ''}; expected f32, f16, bf16, "
        f"or q8_0 that is not transposed"
    )
