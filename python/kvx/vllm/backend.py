"""The attention backend CUSTOM: vLLM's pages hold kvx's bytes, and kvx attends over them.

A page is one block of one layer, all its KV heads, in kvx's own order (kvx.PagedLayer); what every
layer keeps beside its pages is in kvx.vllm.layer_pages. Layers of latent attention (MLA) have a
backend of their own, kvx.vllm.latent.

The builder hands a step's tables and bounds to kvx.torch.BatchAttention, which each layer then
runs. On a GPU a step neither waits for the device nor allocates: bounds come from what vLLM has on
the host, and the workspace was allocated while vLLM measured its memory. So a CUDA graph can hold
any step.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvx.errors import UnsupportedError
from kvx.torch import BatchAttention
from kvx.vllm.layer_pages import GPU_BLOCK_SIZE, LayerPages, RowShape, check_options, row_bytes
from kvx.vllm.recipe import CACHE_DTYPES, is_tuned, options_of
from kvx.vllm.step import StepLimits, leading_decodes
from kvx.vllm.window import StepWindow

_PAGE_TOKENS = 16  # vLLM's blocks are a multiple of it: head sections then need no padding
_OLDEST_CAPABILITY = (8, 0)


class KvxBackend(AttentionBackend):
    """Chosen by ``--attention-backend CUSTOM``; kvx.vllm.register adds it to vLLM."""

    forward_includes_kv_cache_update: bool = False  # do_kv_cache_update stores
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = CACHE_DTYPES

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return KvxImpl

    @staticmethod
    def get_builder_cls():
        return KvxMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(_PAGE_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # a layer's page is one run of bytes

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_per_head_quant_scales(cls):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        """None is the CPU. Whether this build has kernels for a GPU that is new enough is found
        when the first layer is made, where the error can say which it has."""
        return capability is None or tuple(capability)[:2] >= _OLDEST_CAPABILITY

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return False  # a step is planned from the lengths on the host

    @classmethod
    def get_preferred_block_size(cls, default_block_size):
        """vLLM asks where the user names no block size."""
        if current_platform.is_cuda():
            default_block_size = max(default_block_size, GPU_BLOCK_SIZE)
        return super().get_preferred_block_size(default_block_size)

    @classmethod
    def customize_spec(cls, spec):
        if spec.state_content_bytes is not None:  # vLLM calls this more than once
            return spec
        content = row_bytes(spec, cls.row_shape(spec))
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)

    @classmethod
    def row_shape(cls, spec) -> RowShape:
        """The rows of layers that have vLLM's spec."""
        return RowShape(spec.num_kv_heads, spec.head_size, spec.head_size_v)


@dataclass
class KvxMetadata(AttentionMetadata):
    """A step's requests; rows that CUDA graphs pad with have no queries and negative slots.

    batch: the builder's, planned for this step. The next step's plan replaces this one's.
    """

    batch: BatchAttention


class KvxMetadataBuilder(AttentionMetadataBuilder[KvxMetadata]):
    """Made once the weights are loaded, so it is where missing scales are found."""

    _cudagraph_support: ClassVar = AttentionCGSupport.ALWAYS
    window: StepWindow | None = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)  # vLLM puts requests with one query in front
        layers = vllm_config.compilation_config.static_forward_context
        options = options_of(vllm_config)
        impls = [layers[name].impl for name in layer_names]
        for name, impl in zip(layer_names, impls):
            owner = impl.kv_sharing_target_layer_name or name  # whose scales its pages have
            impl.take(owner, layers[owner], options)
        self.batch = BatchAttention()
        self.positions = None  # int64, of a step's tokens; captured graphs read this tensor
        if is_tuned(impls[0].recipe):
            most = max(StepLimits.of(vllm_config).max_queries, kv_cache_spec.block_size)
            self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        for impl in impls:
            impl.positions = self.positions
        self.window = self._new_window(layers, impls, device)
        self.workspace = None
        if torch.device(device).type == "cuda":
            workspaces = [impl.workspace_on(device) for impl in impls]
            self.workspace = max(workspaces, key=torch.Tensor.numel)
            self._warm_up(impls)

    def _new_window(self, layers, impls, device):
        """The step's window, or None; each layer gets its memory, or that of the layer whose pages
        it reads."""
        tokens = impls[0].window_tokens
        if tokens is None:
            return None
        window = StepWindow(
            tokens,
            self.vllm_config,
            layers[self.layer_names[0]],
            self.kv_cache_spec.block_size,
            device,
        )
        for impl in impls:
            impl.step_window = window
            if impl.kv_sharing_target_layer_name is None:
                impl.reserve_window(device, self.kv_cache_spec.block_size)
        for impl in impls:
            if impl.kv_sharing_target_layer_name is not None:
                impl.window_pages = layers[impl.kv_sharing_target_layer_name].impl.window_pages
        return window

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.seq_lens.shape[0] + 1]
        num_decodes = leading_decodes(starts) if common.max_query_len > 1 else 0
        return self._planned(common, common.max_seq_len, num_decodes)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        """A graph serves every batch of its shape: of any lengths, in any mixture."""
        max_seq_len = self.vllm_config.model_config.max_model_len
        return self._planned(common_attn_metadata, max_seq_len, num_decodes=0)

    def _planned(self, common, max_seq_len, num_decodes):
        if common.causal is not True:
            raise UnsupportedError("attention that is not causal")
        requests = common.seq_lens.shape[0]
        if self.positions is not None:
            self._set_positions(common, requests)
        table, starts = common.block_table_tensor[:requests], common.query_start_loc[: requests + 1]
        plan = None
        if self.window is not None:
            plan = self.window.plan_step(table, common.seq_lens, starts, common.max_query_len)
            table = plan.block_table
        self.batch.plan(
            table,
            common.seq_lens,
            starts,
            window=plan,
            max_q_len=int(min(common.max_query_len, max_seq_len)),
            max_seq_len=int(max_seq_len),
            num_decodes=num_decodes,
            num_queries=int(common.num_actual_tokens),
            workspace=self.workspace,
        )
        return self._metadata(int(common.num_actual_tokens), requests)

    def _metadata(self, num_tokens, num_requests=1):
        """What the layers are given of the step that is planned."""
        return KvxMetadata(self.batch)

    def _set_positions(self, common, requests):
        """Where each token of the step is in its sequence, of whose tokens it is one of the last."""
        tokens = torch.arange(
            int(common.num_actual_tokens), dtype=torch.int32, device=self.positions.device
        )
        ends = common.query_start_loc[1 : requests + 1].contiguous()
        request = torch.searchsorted(ends, tokens, right=True).clamp_(max=requests - 1)
        positions = common.seq_lens[request] - ends[request] + tokens
        self.positions[: len(tokens)] = positions.clamp_(min=0)  # padding has none

    def _warm_up(self, impls):
        """A decode and a prompt of one block in every layer. CUDA loads a kernel at its first
        launch and a layer reads its scales at its first call: captures allow neither."""
        spec, tokens = self.kv_cache_spec, self.kv_cache_spec.block_size
        new = functools.partial(torch.zeros, device=self.device)
        shape = (2, spec.num_kv_heads, tokens, spec.state_content_bytes)
        kv_cache = new(shape, dtype=torch.uint8)
        slots = torch.arange(tokens, device=self.device)
        for q_len in (1, tokens):
            step = (
                new((1, 1), dtype=torch.int32),
                torch.tensor([tokens], dtype=torch.int32, device=self.device),
                torch.tensor([0, q_len], dtype=torch.int32, device=self.device),
            )
            plan = None
            if self.window is not None:
                plan = self.window.plan_warm_up(len(kv_cache), *step)
                step = (plan.block_table, *step[1:])
            self.batch.plan(
                *step,
                window=plan,
                max_q_len=q_len,
                max_seq_len=tokens,
                num_queries=q_len,
                workspace=self.workspace,
            )
            for impl in impls:
                impl.warm_up(new, kv_cache, slots, self._metadata(q_len))


class KvxImpl(LayerPages, AttentionImpl):
    """One layer. Raises kvx.Error or kvx.UnsupportedError for what kvx cannot compute."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        **others,
    ):
        check_options(alibi_slopes, attn_type, others)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks  # a parameter whose numbers come later
        attention = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or 0.0,
            "window": sliding_window or 0,
        }
        shape = RowShape(num_kv_heads or num_heads, head_size, head_size)
        self.init_pages(shape, kv_cache_dtype, attention)

    def take(self, name, layer, options):
        """What only the loaded layer has: its values' size and its scales."""
        self.shape = replace(self.shape, v_head_dim=layer.head_size_v)
        super().take(name, layer, options)

    def _pages_of(self, kv_cache):
        """kv_cache: uint8 [blocks, num_kv_heads, block_size, bytes]."""
        if self.pages is None:
            self.pages = self.new_layer(kv_cache.shape[2])
            if self.sinks is not None:
                self.attention["sinks"] = self.sinks.detach().float().contiguous()
        return self.pages

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """key, value: [tokens, num_kv_heads, head_size], padding last; slot_mapping: int64."""
        self.append(self._pages_of(kv_cache), kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        """query, output: [tokens, num_heads, head_size]."""
        if attn_metadata is None:  # vLLM profiles, and measures what memory is left for pages
            if query.is_cuda:
                self.reserve_memory(query.device)
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("an output that attention quantises")
        pages = self._pages_of(kv_cache)
        return self.attend(attn_metadata.batch, pages, kv_cache, query, output)

    def warm_up(self, new, kv_cache, slots, metadata):
        """Stores and attends zeros; new(shape, dtype=...) makes them."""
        tokens, dtype = len(slots), self.config.model_config.dtype
        heads, kv_heads = self.num_heads, self.shape.num_kv_heads
        q = new((tokens, heads, self.shape.head_dim), dtype=dtype)
        out = new((tokens, heads, self.shape.v_head_dim), dtype=dtype)
        k = new((tokens, kv_heads, self.shape.head_dim), dtype=dtype)
        v = new((tokens, kv_heads, self.shape.v_head_dim), dtype=dtype)
        if self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(None, k, v, kv_cache, slots)
        self.forward(None, q, k, v, kv_cache, metadata, out)
