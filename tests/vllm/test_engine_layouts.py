"""kvx.engines' layers of vLLM's caches against views that vLLM's own code makes."""

import pytest
import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale

from kvx import engines

BLOCKS, HEADS, TOKENS, DIM = 3, 2, 16, 64


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_nvfp4_pages_have_their_codes_and_scales_where_vllm_says(order):
    full = nvfp4_kv_cache_full_dim(DIM)
    rows = (TOKENS, 2 * HEADS) if order == "NHD" else (2 * HEADS, TOKENS)
    memory = torch.zeros((BLOCKS, *rows, full), dtype=torch.uint8)
    cache = memory if order == "HND" else memory.transpose(1, 2)
    layer = engines.vllm.layer(cache, "nvfp4", head_dim=DIM)
    # A side of a page is dense: vLLM sees V as [blocks, tokens, heads] or [blocks, heads, tokens].
    dims = (TOKENS, HEADS) if order == "NHD" else (HEADS, TOKENS)
    v = memory.reshape(BLOCKS, 2, *dims, full)[:, 1]
    codes, scales = nvfp4_split_data_scale(v)
    found = engines.vllm.v_scales(cache, head_dim=DIM)
    found = found.transpose(1, 2) if order == "NHD" else found
    assert found.shape == scales.shape and found.stride() == scales.stride()
    assert found.data_ptr() == scales.data_ptr()
    address = layer.v.memory.address + layer.v.offset
    strides = layer.v.code_strides if order == "NHD" else [layer.v.code_strides[i] for i in (0, 2, 1)]
    assert address == codes.data_ptr() and tuple(strides) == codes.stride()[:3]
