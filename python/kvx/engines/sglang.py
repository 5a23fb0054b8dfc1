"""SGLang's token pools: separate K and V buffers of slots a layer.

Written against sglang's memory_pool.py of August 2026 (docs/engines.md). Slot 0 of page 0 is its
dummy. A request's slots go with ``kvx.engines.tokens`` where page_size is 1, its page table with
``kvx.engines.packed`` otherwise.
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
from kvx.engines.split import float_rows
from kvx.errors import Error


def layer(
    k_buffer: Any,
    v_buffer: Any,
    format: str,
    *,
    page_size: int = 1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """k_buffer, v_buffer: [slots, heads, head_dim], slots a multiple of page_size.

    format: f32, f16, bf16, fp8_e4m3 or fp8_e5m2; k_scale, v_scale: of fp8
    """
    k, v = memory_of(k_buffer, "k_buffer"), memory_of(v_buffer, "v_buffer")
    sides = []
    for name, memory, scale in (("k_buffer", k, k_scale), ("v_buffer", v, v_scale)):
        strides = byte_strides(memory, name, k.shape[0], k.shape[1], None)
        rows = float_rows(name, memory, (0, 0, 1), format, head_dim=memory.shape[2], scale=scale)
        sides.append(_in_pages(rows, strides, page_size))
    return Layer(_shape(k.shape, page_size), *sides)


def fp4_layer(
    k_buffer: Any,
    v_buffer: Any,
    k_scale_buffer: Any,
    v_scale_buffer: Any,
    *,
    head_dim: int,
    page_size: int = 1,
) -> Layer:
    """SGLang's FP4 pool: uint8 [slots, heads, head_dim / 2] and E8M0 scales, uint8 [slots, heads *
    head_dim / 16]. What kvx writes rounds ties to even, where SGLang's own kernel rounds them up.
    """
    k = memory_of(k_buffer, "k_buffer")
    if len(k.shape) != 3:
        raise Error(f"k_buffer has {len(k.shape)} dimensions; expected 3")
    sides = []
    for name, codes, scales in (
        ("k", k_buffer, k_scale_buffer),
        ("v", v_buffer, v_scale_buffer),
    ):
        memory, of_scales = memory_of(codes, f"{name}_buffer"), memory_of(
            scales, f"{name}_scale_buffer"
        )
        strides = byte_strides(memory, f"{name}_buffer", *k.shape[:2], head_dim // 2)
        groups = head_dim // 16
        by_slot, _ = byte_strides(
            of_scales, f"{name}_scale_buffer", k.shape[0], k.shape[1] * groups
        )
        for what in (memory, of_scales):
            check_itemsize(what, f"{name}_buffer", "mxfp4_g16")
            check_innermost(what, f"{name}_buffer")
        sides.append(
            Rows(
                "mxfp4_g16",
                head_dim,
                memory,
                0,
                (strides[0] * page_size, strides[0], strides[1]),
                scales=of_scales,
                scale_strides=(by_slot * page_size, by_slot, groups, 1),
            )
        )
    return Layer(_shape(k.shape, page_size), *sides)


def _in_pages(rows: Rows, strides: tuple[int, ...], page_size: int) -> Rows:
    return Rows(
        rows.format,
        rows.head_dim,
        rows.memory,
        0,
        (strides[0] * page_size, strides[0], strides[1]),
        scales=rows.scales,
    )


def _shape(buffer: tuple[int, ...], page_size: int) -> Shape:
    if page_size < 1 or buffer[0] % page_size:
        raise Error(f"page_size is {page_size}; expected a divisor of the {buffer[0]} slots")
    return Shape(buffer[0] // page_size, page_size, buffer[1])
