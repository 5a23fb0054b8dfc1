"""Latent attention (MLA) in vLLM: pages hold latent rows in kvx's bytes, and kvx attends over them.

A token's row is the latent numbers, which are its value too, and the rotary ones behind them. All
query heads read the same row, so a page is that of one head. Each step is computed in the absorbed
form: vLLM multiplies queries by what makes keys of latent rows before it calls forward_mqa, and the
output by what makes values afterwards. Prompts are computed like decodes, so chunks of them and
cached prefixes are read from the pages where they lie.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from kvx.vllm.backend import KvxBackend, KvxMetadata, KvxMetadataBuilder
from kvx.vllm.layer_pages import LayerPages, RowShape, check_options, latent_shape, row_bytes
from kvx.vllm.recipe import LATENT_CACHE_DTYPES


class KvxLatentBackend(KvxBackend):
    """What ``--attention-backend CUSTOM`` means to layers of latent attention."""

    supported_kv_cache_dtypes: ClassVar = LATENT_CACHE_DTYPES

    @classmethod
    def is_mla(cls):
        return True

    @staticmethod
    def get_impl_cls():
        return KvxLatentImpl

    @staticmethod
    def get_builder_cls():
        return KvxLatentMetadataBuilder

    @classmethod
    def row_shape(cls, spec):
        return latent_shape(spec.head_size)

    @classmethod
    def customize_spec(cls, spec):
        """vLLM gives rows of fp8_ds_mla a size itself, DeepSeek's 656 bytes whatever the model."""
        if spec.cache_dtype_str != "fp8_ds_mla":
            return super().customize_spec(spec)
        content = row_bytes(spec, cls.row_shape(spec))
        if spec.state_content_bytes == content:
            return spec
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)


@dataclass
class KvxLatentMetadata(KvxMetadata):
    """What vLLM's layer reads of a step. All tokens are its "decode" tokens: it gives those to
    forward_mqa, and none to forward_mha."""

    num_actual_tokens: int
    num_decode_tokens: int
    num_decodes: int
    num_prefills: int = 0
    prefill: None = None

    @property
    def decode(self):
        return self.batch


class KvxLatentMetadataBuilder(KvxMetadataBuilder):
    def _metadata(self, num_tokens, num_requests=1):
        return KvxLatentMetadata(self.batch, num_tokens, num_tokens, num_requests)


class KvxLatentImpl(LayerPages, MLAAttentionImpl):
    """One layer. Raises kvx.Error or kvx.UnsupportedError for what kvx cannot compute."""

    supports_pcp = False

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        *,
        kv_lora_rank,
        q_lora_rank=None,
        qk_nope_head_dim=None,
        qk_rope_head_dim=None,
        qk_head_dim=None,
        v_head_dim=None,
        kv_b_proj=None,
        **others,
    ):
        """head_size: of a latent row; the first kv_lora_rank of its numbers are the value."""
        others["kv_sharing_target_layer_name"] = kv_sharing_target_layer_name
        check_options(alibi_slopes, attn_type, others)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        attention = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or 0.0,
            "window": sliding_window or 0,
        }
        shape = RowShape(1, head_size, kv_lora_rank, is_latent=True)
        self.init_pages(shape, kv_cache_dtype, attention)

    def process_weights_after_loading(self, act_dtype):
        """vLLM calls no layer's attention while it measures its memory, but this before."""
        if self.device != "cpu":
            self.reserve_memory(self.device)

    def _pages_of(self, kv_cache):
        """kv_cache: uint8 [blocks, block_size, bytes]."""
        if self.pages is None:
            self.pages = self.new_layer(kv_cache.shape[1])
        return self.pages

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *_):
        """kv_c_normed: [tokens, kv_lora_rank]; k_pe: [tokens, 1, rotary numbers], after RoPE;
        padding last; slot_mapping: int64."""
        if kv_cache.numel() == 0:  # vLLM profiles
            return
        rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1).unsqueeze(1)
        kv_cache = kv_cache.view(torch.uint8)
        self.append(self._pages_of(kv_cache), kv_cache, rows, None, slot_mapping.flatten())

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """q: absorbed, [tokens, num_heads, kv_lora_rank + rotary numbers] or its two parts.

        Returns ([tokens, num_heads, kv_lora_rank], None): no layer needs the softmax's sums.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        kv_cache = kv_c_and_k_pe_cache.view(torch.uint8)  # vLLM calls quantised pages float8
        out = q.new_empty((*q.shape[:2], self.shape.v_head_dim))
        self.attend(attn_metadata.batch, self._pages_of(kv_cache), kv_cache, q, out)
        return out, None

    def warm_up(self, new, kv_cache, slots, metadata):
        """Stores and attends zeros; new(shape, dtype=...) makes them."""
        tokens, dtype = len(slots), self.config.model_config.dtype
        latent_dim, rotary_dim = self.shape.v_head_dim, self.head_size - self.shape.v_head_dim
        kv_cache = kv_cache.squeeze(1)
        latent = new((tokens, latent_dim), dtype=dtype)
        rotary = new((tokens, 1, rotary_dim), dtype=dtype)
        self.do_kv_cache_update(latent, rotary, kv_cache, slots)
        q = new((metadata.num_actual_tokens, self.num_heads, self.head_size), dtype=dtype)
        self.forward_mqa(q, kv_cache, metadata, None)
