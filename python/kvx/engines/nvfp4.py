"""NVFP4 rows as vLLM and TensorRT-LLM keep them, and the order in which trtllm-gen reads V's scales.

A row is head_dim / 2 bytes of E2M1 codes, the even element in the low nibble, and head_dim / 16
E4M3 scales in a region of their own; value = code * scale * tensor scale. K's scales are [tokens,
groups] in each head. For the trtllm-gen kernels of SM100 and SM103 V's are *swizzled*: every four
tokens' scales lie group by group, as [tokens / 4, groups, 4]. No stride reaches that, so a layer of
kvx reads linear ones: ``linear_scales`` turns them, in place, and ``swizzled_scales`` turns them
back.
"""

from typing import Any

from kvx.engines.layer import Memory, Rows, check_itemsize
from kvx.engines.split import scale_of_heads
from kvx.errors import Error

CODE_BITS, GROUP = 4, 16
_TOKENS = 4  # whose scales lie together


def check(memory: Memory, name: str, head_dim: int) -> None:
    """Raises kvx.Error: elements of more than a byte, or a row that is no whole groups."""
    check_itemsize(memory, name, "nvfp4")
    if head_dim < GROUP or head_dim % GROUP:
        raise Error(f"head_dim is {head_dim}; nvfp4 needs a multiple of {GROUP}")


def rows(
    name: str,
    codes: Memory,
    code_offset: int,
    code_strides: tuple[int, int, int],
    scales: Memory,
    scale_offset: int,
    scale_strides: tuple[int, int, int],
    *,
    head_dim: int,
    num_kv_heads: int,
    scale: float,
) -> Rows:
    """K or V of a layer: offsets and strides of (block, token, head), in bytes."""
    return Rows(
        "nvfp4",
        head_dim,
        codes,
        code_offset,
        code_strides,
        scales=scales,
        scale_offset=scale_offset,
        scale_strides=(*scale_strides, 1),
        tensor_scales=scale_of_heads(codes, name, scale, num_kv_heads),
    )


def linear_scales(v_scales: Any) -> None:
    """Turns swizzled scales to linear ones, in place.

    v_scales: bytes [..., tokens of a block, head_dim / 16] of NumPy, PyTorch or CuPy, in any
              strides, what ``vllm.v_scales`` and ``trtllm.v_scales`` return
    Raises kvx.Error: tokens that are no multiple of 4.
    """
    *outer, tokens, groups = _checked(v_scales)
    _rearrange(v_scales, (*outer, tokens // _TOKENS, groups, _TOKENS))


def swizzled_scales(v_scales: Any) -> None:
    """Turns linear scales to swizzled ones, in place; the inverse of ``linear_scales``."""
    *outer, tokens, groups = _checked(v_scales)
    _rearrange(v_scales, (*outer, tokens // _TOKENS, _TOKENS, groups))


def _checked(v_scales: Any) -> tuple[int, ...]:
    shape = tuple(getattr(v_scales, "shape", ()))
    if len(shape) < 2 or shape[-2] % _TOKENS:
        raise Error(
            f"v_scales has shape {list(shape)}; expected [..., tokens of a block, groups], tokens "
            f"a multiple of {_TOKENS}"
        )
    return shape


def _rearrange(v_scales: Any, shape: tuple[int, ...]) -> None:
    """Writes the scales, seen as ``shape``, with its last two dimensions exchanged."""
    copy = v_scales.clone() if hasattr(v_scales, "clone") else v_scales.copy()
    v_scales[...] = copy.reshape(shape).swapaxes(-1, -2).reshape(v_scales.shape)
