"""Latent attention (MLA) in vLLM: pages hold latent rows in kvx's bytes, and kvx attends over them.

A token's row is the latent numbers, which are its value too, and the rotary ones behind them. All
query heads read the same row, so a page is that of one head. Decodes are computed in the absorbed
form: vLLM multiplies queries by what makes keys of latent rows before it calls forward_mqa, and the
output by what makes values afterwards. Prompts are computed likewise or, where that takes fewer
operations, in the expanded form (kvx.vllm.expanded), for which vLLM calls forward_mha.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from kvx.errors import UnsupportedError
from kvx.torch import BatchAttention
from kvx.vllm.backend import KvxBackend, KvxMetadata, KvxMetadataBuilder
from kvx.vllm.expanded import ExpandedHeads, ExpandedLimits, ExpandedPrompts, HeadDims
from kvx.vllm.layer_pages import LayerPages, RowShape, check_options, latent_shape, row_bytes
from kvx.vllm.recipe import LATENT_CACHE_DTYPES, latent_prompts_of, options_of
from kvx.vllm.step import leading_decodes


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
    """What vLLM's layer reads of a step. It gives the first num_decode_tokens to forward_mqa, which
    are all but where prompts are expanded, and the others to forward_mha."""

    num_actual_tokens: int
    num_decode_tokens: int
    num_decodes: int
    num_prefills: int = 0
    prefill: ExpandedPrompts | None = None

    @property
    def decode(self):
        return self.batch


class KvxLatentMetadataBuilder(KvxMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.expanded = impls[0].expanded_limits(layers[layer_names[0]])
        self.prompts_batch = BatchAttention()
        # A graph that holds every step reads the plan of them all, in the absorbed form.
        mode = vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
        has_one_form = self.window is not None or self.expanded.wish == "absorbed"
        if has_one_form or mode.mixed_mode() == CUDAGraphMode.FULL:
            self.expanded = None
            return
        dtype = vllm_config.model_config.dtype
        heads = ExpandedHeads(self.expanded.dims, self.expanded.num_heads, dtype)
        for impl in impls:
            impl.heads = heads

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        first = self._first_expanded(common)
        if first is None:
            return super().build(common_prefix_len, common, fast_build)
        starts = common.query_start_loc_cpu.tolist()
        requests = common.seq_lens.shape[0]
        if first > 0:
            self._plan_decodes(common, first, starts[first])
        prompts = ExpandedPrompts(
            self.prompts_batch,
            self.expanded,
            common.block_table_tensor[first:requests],
            common.seq_lens[first:],
            common.query_start_loc[first : requests + 1] - starts[first],
            self._requests(common, first),
        )
        tokens = int(common.num_actual_tokens)
        if self.positions is not None:
            self._set_positions(common, requests)
        return KvxLatentMetadata(
            self.batch, tokens, starts[first], first, requests - first, prompts
        )

    def _first_expanded(self, common):
        """The first request of those behind the decodes, if they are to be expanded."""
        if self.expanded is None or common.seq_lens_cpu_upper_bound is None:
            return None
        requests = common.seq_lens.shape[0]
        first = leading_decodes(common.query_start_loc_cpu[: requests + 1])
        if first == requests or common.causal is not True:
            return None
        return first if self.expanded.takes(self._requests(common, first)) else None

    @staticmethod
    def _requests(common, first):
        """(queries, tokens at most) of each request from the first on."""
        num = common.seq_lens.shape[0]
        starts = common.query_start_loc_cpu[first : num + 1].tolist()
        tokens = common.seq_lens_cpu_upper_bound[first:num].tolist()
        return [(end - begin, t) for begin, end, t in zip(starts, starts[1:], tokens)]

    def _plan_decodes(self, common, decodes, queries):
        self.batch.plan(
            common.block_table_tensor[:decodes],
            common.seq_lens[:decodes],
            common.query_start_loc[: decodes + 1],
            max_q_len=1,
            max_seq_len=int(common.max_seq_len),
            num_decodes=decodes,
            num_queries=queries,
            workspace=self.workspace,
        )

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
        """head_size: of a latent row; the first kv_lora_rank of its numbers are the value.

        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: of a head's key, in its two parts, and value
        """
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
        self.dims = HeadDims(kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        self.layer = None  # vLLM's, whose matrices expand rows
        self.heads = None  # the builder's, where prompts may be expanded

    def take(self, name, layer, options):
        super().take(name, layer, options)
        self.layer = layer

    def expanded_limits(self, layer):
        """When prompts of this layer are expanded. vLLM has measured the memory of so many tokens'
        expanded rows."""
        dims, itemsize = self.dims, self.config.model_config.dtype.itemsize
        measured = layer.chunked_prefill_workspace_size * (dims.nope + dims.value) * itemsize
        drafts = self.config.speculative_config
        return ExpandedLimits(
            dims,
            self.num_heads,
            itemsize,
            self.num_heads * measured,
            wish=latent_prompts_of(options_of(self.config)),
            on_gpu=self.device != "cpu",
            most_drafts=drafts.num_speculative_tokens if drafts else 0,
        )

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

    def forward_mha(
        self,
        q,
        kv_c_normed,
        k_pe,
        kv_c_and_k_pe_cache,
        attn_metadata,
        k_scale,
        output,
        output_scale=None,
    ):
        """Prompts in the expanded form. q: [queries, num_heads, nope + rotary numbers]; output:
        [queries, num_heads * v_head_dim]. Rows are the pages', not kv_c_normed and k_pe."""
        if output_scale is not None:
            raise UnsupportedError("an output that attention quantises")
        prompts, kv_cache = attn_metadata.prefill, kv_c_and_k_pe_cache.view(torch.uint8)
        rows = prompts.rows_of(self._pages_of(kv_cache), kv_cache, like=q)
        out = output.view(len(q), self.num_heads, self.dims.value)
        to_keys, to_values = self.layer.W_UK_T, self.layer.W_UV
        self.heads.attend(prompts, rows, to_keys, to_values, q, out, **self.attention)

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
