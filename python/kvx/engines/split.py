"""Layers whose K and V are two tensors, or two halves of one, with one stride a dimension."""

from typing import Any

import numpy as np

from kvx.engines.layer import (
    Layer,
    Memory,
    Rows,
    Shape,
    check_innermost,
    check_itemsize,
    memory_of,
)
from kvx.errors import Error

FLOATS = ("f32", "f16", "bf16")
FP8 = ("fp8_e4m3", "fp8_e5m2")


def float_rows(
    name: str,
    memory: Memory,
    axes: tuple[int, int, int],
    format: str,
    *,
    head_dim: int,
    offset: int = 0,
    scale: float = 1.0,
) -> Rows:
    """Rows of floats. axes: which dimensions of the array are block, token and head.

    scale: of an fp8 tensor: value = code * scale
    Raises kvx.Error: another format, an element of another size, a scale that is not positive.
    """
    if format not in FLOATS + FP8:
        raise Error(f"format is {format!r}; expected one of {', '.join(FLOATS + FP8)}")
    check_itemsize(memory, name, format)
    check_innermost(memory, name)
    strides = tuple(memory.strides[axis] for axis in axes)
    if format in FLOATS:
        if scale != 1.0:
            raise Error(f"{name} has a scale of {scale}; {format} has none")
        return Rows(format, head_dim, memory, offset, strides)
    if not 0 < scale < float("inf"):
        raise Error(f"{name} has a scale of {scale}; expected a positive finite number")
    return Rows(
        f"{format}:source=given,scale=f32",
        head_dim,
        memory,
        offset,
        strides,
        scales=one_scale(memory, scale),
    )


def one_scale(memory: Memory, scale: float) -> Memory:
    """One float32 where the array lies, which all tokens and heads share."""
    return memory_of(_filled(memory, scale, 1), "scale")


def scale_of_heads(memory: Memory, name: str, scale: float, num_kv_heads: int) -> Any:
    """float32 [num_kv_heads] where the array lies, each the same tensor scale.

    Raises kvx.Error: a scale that is not positive.
    """
    if not 0 < scale < float("inf"):
        raise Error(f"{name} has a scale of {scale}; expected a positive finite number")
    return _filled(memory, scale, num_kv_heads)


def _filled(memory: Memory, scale: float, count: int) -> Any:
    if hasattr(memory.array, "new_full"):  # PyTorch
        import torch

        return torch.full((count,), scale, dtype=torch.float32, device=memory.array.device)
    if memory.device == "cpu":
        return np.full((count,), scale, np.float32)
    import cupy

    with memory.array.device:
        return cupy.full((count,), scale, "float32")


def nhd(
    k: Any,
    v: Any,
    format: str,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    order: str = "NHD",
) -> Layer:
    """Two arrays [blocks, tokens, heads, head_dim], or with order "HND" [blocks, heads, tokens,
    head_dim]; K and V may have different head_dims and strides."""
    axes = axes_of(order)
    sides = []
    for name, array, scale in (("k", k, k_scale), ("v", v, v_scale)):
        memory = memory_of(array, name)
        if len(memory.shape) != 4:
            raise Error(f"{name} has {len(memory.shape)} dimensions; expected 4")
        sides.append(
            float_rows(name, memory, axes, format, head_dim=memory.shape[3], scale=scale)
        )
    shapes = [tuple(side.memory.shape[axis] for axis in axes) for side in sides]
    if shapes[0] != shapes[1]:
        raise Error(
            f"k has {shapes[0]} blocks, tokens and heads, v {shapes[1]}; expected the same"
        )
    return Layer(Shape(*shapes[0]), sides[0], sides[1])


def axes_of(order: str) -> tuple[int, int, int]:
    """Dimensions of block, token and head. Raises kvx.Error: neither NHD nor HND."""
    if order not in ("NHD", "HND"):
        raise Error(f"order is {order!r}; expected NHD or HND")
    return (0, 1, 2) if order == "NHD" else (0, 2, 1)
