"""Text Generation Inference's caches: a tuple (K, V) a layer.

Written against text_generation_server's kv_cache.py of 3.x (docs/engines.md). Its slots are block *
block_size + offset; its block tables go with ``kvx.engines.packed``, and with block size 1 (its
flashinfer backend) with ``kvx.engines.tokens``.
"""

from typing import Any

from kvx.engines.layer import Layer, Rows, Shape, check_itemsize, memory_of
from kvx.engines.split import FLOATS, FP8, nhd
from kvx.errors import Error, UnsupportedError

BACKENDS = ("flashdecoding", "flashdecoding-ipex", "flashinfer", "ipex", "paged")


def layer(
    kv_cache: tuple[Any, Any],
    backend: str,
    format: str,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """A layer of a backend: flashdecoding, flashdecoding-ipex and flashinfer keep [blocks, tokens,
    heads, head_dim]; ipex (its CPU) [blocks, heads, tokens, head_dim]; paged keeps K as [blocks,
    heads, head_dim / x, tokens, x] and V as [blocks, heads, head_dim, tokens].

    format: f32, f16, bf16, fp8_e4m3 or fp8_e5m2. scales: of fp8, as its k_scale and v_scale
    Raises kvx.UnsupportedError: fp8 with paged.
    """
    if backend not in BACKENDS:
        raise Error(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    k, v = kv_cache
    if backend != "paged":
        order = "HND" if backend == "ipex" else "NHD"
        return nhd(k, v, format, k_scale=k_scale, v_scale=v_scale, order=order)
    if format in FP8:
        raise UnsupportedError(f"format is {format}; TGI's paged backend has no fp8 cache")
    if format not in FLOATS:
        raise Error(f"format is {format!r}; expected one of {', '.join(FLOATS)}")
    return _paged(k, v, format)


def _paged(k_array: Any, v_array: Any, format: str) -> Layer:
    k, v = memory_of(k_array, "k"), memory_of(v_array, "v")
    for name, memory, num_dimensions in (("k", k, 5), ("v", v, 4)):
        check_itemsize(memory, name, format)
        if len(memory.shape) != num_dimensions:
            raise Error(f"{name} has {len(memory.shape)} dimensions; expected {num_dimensions}")
    blocks, heads, pieces, tokens, x = k.shape
    head_dim = pieces * x
    if v.shape != (blocks, heads, head_dim, tokens):
        raise Error(f"v has shape {list(v.shape)}; k's needs {[blocks, heads, head_dim, tokens]}")
    if k.strides[4] != k.itemsize:
        raise Error(f"k's last dimension has a stride of {k.strides[4]} bytes; expected "
                    f"{k.itemsize}")
    return Layer(
        Shape(blocks, tokens, heads),
        Rows(
            format,
            head_dim,
            k,
            0,
            (k.strides[0], k.strides[3], k.strides[1]),
            fragment=(x * k.itemsize, k.strides[2]),
        ),
        Rows(
            format,
            head_dim,
            v,
            0,
            (v.strides[0], v.strides[3], v.strides[1]),
            fragment=(v.itemsize, v.strides[2]),
        ),
    )
