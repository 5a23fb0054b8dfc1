"""FlashInfer's paged caches, which SGLang, vLLM and others hand to it.

Written against flashinfer's page.cuh of 0.6 (docs/engines.md).
"""

from typing import Any

from kvx.engines.layer import Layer, byte_strides, memory_of
from kvx.engines.split import nhd
from kvx.engines.table import Table, pages
from kvx.errors import Error


def layer(
    paged_kv_cache: Any,
    format: str,
    *,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """paged_kv_cache: [pages, 2, page_size, heads, head_dim] (NHD) or [pages, 2, heads, page_size,
    head_dim] (HND), or a tuple of K and V without the second dimension.

    format: f32, f16, bf16, fp8_e4m3 or fp8_e5m2; k_scale, v_scale: of fp8
    """
    if isinstance(paged_kv_cache, tuple):
        k, v = paged_kv_cache
    else:
        memory = memory_of(paged_kv_cache, "paged_kv_cache")
        byte_strides(memory, "paged_kv_cache", None, 2, None, None, None)
        k, v = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    return nhd(k, v, format, k_scale=k_scale, v_scale=v_scale, order=kv_layout)


def table(
    kv_page_indptr: Any,
    kv_page_indices: Any,
    kv_last_page_len: Any,
    *,
    page_size: int,
    max_pages: int = 0,
) -> Table:
    """FlashInfer's arrays: int32 indptr [sequences + 1], indices and last_page_len [sequences].

    A sequence without pages has no tokens. max_pages: on a GPU the most pages of a sequence
    """
    if page_size < 1:
        raise Error(f"page_size is {page_size}; expected 1 or more")
    counts = kv_page_indptr[1:] - kv_page_indptr[:-1]
    lengths = (counts - 1) * page_size + kv_last_page_len
    lengths = lengths * (counts > 0)
    return pages(kv_page_indptr, kv_page_indices, lengths, max_blocks=max_pages)
