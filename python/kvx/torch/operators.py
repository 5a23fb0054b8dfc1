"""The verbs as operators ``torch.ops.kvx.*``, with what torch.compile must know of them: the shapes
of their results, and which tensors they write.

The functions of this file call them; all of a verb's rules and errors are those of kvx.PagedLayer
and kvx.quantize.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvx import _core
from kvx.errors import Error
from kvx.rows import Rows
from kvx.rows import dequantize as dequantize_rows
from kvx.rows import quantize as quantize_rows
from kvx.torch.layers import registered_layer

_library = torch.library.Library("kvx", "FRAGMENT")
_ATTENTION = (
    "float? softmax_scale=None, float softcap=0., int window=0, Tensor? sinks=None, "
    "SymInt? max_q_len=None, SymInt? max_seq_len=None, SymInt num_decodes=0, "
    "SymInt? num_queries=None, Tensor? workspace=None"
)


def _define(schema, fake):
    """Makes an operator of a function that computes on tensors of any device."""

    def decorate(function):
        name = schema.split("(", 1)[0]
        _library.define(schema)
        for key in ("CPU", "CUDA"):
            _library.impl(name, function, key)
        torch.library.register_fake(f"kvx::{name}", fake, lib=_library)
        return function

    return decorate


def _writes_only(*args, **options):
    return None


# ---- append


@_define(
    "append(Tensor(a!) pages, Tensor k, Tensor v, Tensor slots, str layer) -> ()", _writes_only
)
def _append(pages, k, v, slots, layer):
    registered_layer(layer).append(pages, k, v, slots)


def append(pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, layer: str) -> None:
    """kvx.PagedLayer.append of the layer that register_layer() calls so; pages are written."""
    torch.ops.kvx.append(pages, k, v, slots, layer)


# ---- attend


def _fake_attend(pages, q, block_table, seq_lens, q_starts, layer, **options):
    return q.new_empty((q.shape[0], q.shape[1], registered_layer(layer).v_head_dim))


@_define(
    "attend(Tensor pages, Tensor q, Tensor block_table, Tensor seq_lens, Tensor q_starts, "
    f"str layer, *, {_ATTENTION}) -> Tensor",
    _fake_attend,
)
def _attend(pages, q, block_table, seq_lens, q_starts, layer, **options):
    found = registered_layer(layer)
    out = q.new_zeros((q.shape[0], q.shape[1], found.v_head_dim))
    return found.attend(pages, q, block_table, seq_lens, q_starts, out, **options)


def attend(
    pages: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_starts: Tensor,
    layer: str,
    **options: Any,
) -> Tensor:
    """kvx.PagedLayer.attend into a new tensor, which it returns; rows of padding are zeros.

    options: softmax_scale, softcap, window, sinks, max_q_len, max_seq_len, num_decodes,
             num_queries, workspace, as there
    """
    return torch.ops.kvx.attend(pages, q, block_table, seq_lens, q_starts, layer, **options)


@_define(
    "attend_into(Tensor pages, Tensor q, Tensor block_table, Tensor seq_lens, Tensor q_starts, "
    f"Tensor(a!) out, str layer, *, Tensor(b!)? lse=None, {_ATTENTION}) -> ()",
    _writes_only,
)
def _attend_into(pages, q, block_table, seq_lens, q_starts, out, layer, **options):
    registered_layer(layer).attend(pages, q, block_table, seq_lens, q_starts, out, **options)


def attend_into(
    pages: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_starts: Tensor,
    out: Tensor,
    layer: str,
    **options: Any,
) -> None:
    """kvx.PagedLayer.attend into ``out`` and, if it is given, ``lse``; options as in attend()."""
    torch.ops.kvx.attend_into(pages, q, block_table, seq_lens, q_starts, out, layer, **options)


# ---- gather and copy_blocks


def _fake_gather(pages, block_table, seq_lens, num_tokens, layer, dtype):
    found = registered_layer(layer)
    return tuple(
        pages.new_empty((num_tokens, found.num_kv_heads, dim), dtype=dtype)
        for dim in (found.head_dim, found.v_head_dim)
    )


@_define(
    "gather(Tensor pages, Tensor block_table, Tensor seq_lens, SymInt num_tokens, str layer, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    _fake_gather,
)
def _gather(pages, block_table, seq_lens, num_tokens, layer, dtype):
    found = registered_layer(layer)
    k, v = (
        pages.new_zeros((num_tokens, found.num_kv_heads, dim), dtype=dtype)
        for dim in (found.head_dim, found.v_head_dim)
    )
    found.gather_sequences(pages, block_table, seq_lens, k, v)
    return k, v


def gather(
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    layer: str,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The tokens of several sequences, decoded, one sequence after the other: (k, v), each
    [num_tokens, num_kv_heads, dim]. Rows beyond the sequences' tokens are zeros.

    block_table, seq_lens: as in attend()
    Raises kvx.OutOfRangeError: more tokens than num_tokens or the pages hold; counted on a GPU.
    """
    return torch.ops.kvx.gather(pages, block_table, seq_lens, num_tokens, layer, dtype)


@_define(
    "copy_blocks(Tensor(a!) pages, Tensor from_blocks, Tensor to_blocks, str layer) -> ()",
    _writes_only,
)
def _copy_blocks(pages, from_blocks, to_blocks, layer):
    registered_layer(layer).copy_blocks(pages, from_blocks, to_blocks)


def copy_blocks(pages: Tensor, from_blocks: Tensor, to_blocks: Tensor, layer: str) -> None:
    """kvx.PagedLayer.copy_blocks within pages, which are written."""
    torch.ops.kvx.copy_blocks(pages, from_blocks, to_blocks, layer)


# ---- rows


def _fake_quantize(x, format, tensor_scale=1.0, steps=()):
    code_bytes, scale_bytes = _core.row_bytes(format, int(x.shape[-1]), list(steps))
    leading = x.shape[:-1]
    return tuple(
        x.new_empty((*leading, size), dtype=torch.uint8) for size in (code_bytes, scale_bytes)
    )


@_define(
    "quantize(Tensor x, str format, float tensor_scale=1., float[] steps=[]) -> (Tensor, Tensor)",
    _fake_quantize,
)
def _quantize(x, format, tensor_scale=1.0, steps=()):
    rows = quantize_rows(x.contiguous(), format, tensor_scale=tensor_scale, steps=steps)
    return rows.codes, rows.scales


def quantize(
    x: Tensor, format: str, *, tensor_scale: float = 1.0, steps: Iterable[float] = ()
) -> tuple[Tensor, Tensor]:
    """kvx.quantize as (codes, scales), two uint8 tensors where x lies."""
    return torch.ops.kvx.quantize(x, format, tensor_scale, [float(step) for step in steps])


def _fake_dequantize(codes, scales, format, head_dim, dtype, tensor_scale=1.0, steps=()):
    return codes.new_empty((*codes.shape[:-1], head_dim), dtype=dtype)


@_define(
    "dequantize(Tensor codes, Tensor scales, str format, int head_dim, ScalarType dtype, "
    "float tensor_scale=1., float[] steps=[]) -> Tensor",
    _fake_dequantize,
)
def _dequantize(codes, scales, format, head_dim, dtype, tensor_scale=1.0, steps=()):
    rows = Rows(codes, scales, format, head_dim, tensor_scale, list(steps))
    return dequantize_rows(rows, dtype)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    format: str,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    tensor_scale: float = 1.0,
    steps: Iterable[float] = (),
) -> Tensor:
    """The numbers of quantize()'s tensors, [..., head_dim]. dtype: float32, float16 or bfloat16."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Error(f"dtype is {dtype}; expected torch.float32, float16 or bfloat16")
    steps = [float(step) for step in steps]
    return torch.ops.kvx.dequantize(codes, scales, format, head_dim, dtype, tensor_scale, steps)
