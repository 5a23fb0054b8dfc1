"""The attention backend CUSTOM: vLLM's pages hold kvx's bytes, and kvx attends over them.

A page is one block of one layer, all its KV heads, in kvx's own order (kvx.PagedLayer). vLLM asks
for a page's size in customize_spec, where its configuration is out of reach; so each layer's
recipe is chosen in KvxImpl.__init__ and remembered there.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, get_kv_quant_mode

from kvx.errors import Error, UnsupportedError
from kvx.paged_layer import PagedLayer
from kvx.threads import use_torch_threads
from kvx.vllm.recipe import CACHE_DTYPES, is_static, options_of, recipe_of_layer

_log = init_logger("vllm.kvx")
_PAGE_TOKENS = 16  # vLLM's blocks are a multiple of it: head sections then need no padding


class _Remembered:
    """What the layers' __init__ chose, for customize_spec in the same process."""

    def __init__(self):
        self.recipes = {}  # by KVQuantMode: (the configuration, the recipe)

    def add(self, mode, recipe, vllm_config):
        """A process may make one engine after the other; within one, a mode is one recipe."""
        if not self.recipes:
            use_torch_threads()
        config, before = self.recipes.get(mode, (None, None))
        if config is vllm_config and before != recipe:
            raise Error(f"layers of the mode {mode.name} are stored by '{before}' and by '{recipe}'")
        if config is not vllm_config:
            _log.info("kvx stores keys and values as %s", recipe)
        self.recipes[mode] = (vllm_config, recipe)

    def recipe(self, mode):
        if mode not in self.recipes:
            raise UnsupportedError(
                f"vLLM requests the pages of a layer of the mode {mode.name} before any was made"
            )
        return self.recipes[mode][1]


_remembered = _Remembered()


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
        return capability is None  # the CPU; kvx's CUDA kernels are not reachable from torch yet

    @classmethod
    def customize_spec(cls, spec):
        if spec.state_content_bytes is not None:  # vLLM calls this more than once
            return spec
        layer = PagedLayer(
            _remembered.recipe(spec.kv_quant_mode),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            v_head_dim=spec.head_size_v,
            block_size=spec.block_size,
        )
        num_rows = spec.num_kv_heads * spec.block_size
        row_bytes = -(-layer.page_bytes // num_rows)  # rounded up
        return replace(spec, dtype=torch.uint8, state_content_bytes=row_bytes)


@dataclass
class KvxMetadata(AttentionMetadata):
    """A step's requests; rows that CUDA graphs pad with have no queries and negative slots."""

    query_start_loc: torch.Tensor  # int32 [requests + 1]
    seq_lens: torch.Tensor  # int32 [requests], this step's tokens included
    block_table: torch.Tensor  # int32 [requests, blocks]


class KvxMetadataBuilder(AttentionMetadataBuilder[KvxMetadata]):
    """Made once the weights are loaded, so it is where missing scales are found."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if torch.device(device).type != "cpu":
            raise UnsupportedError(f"the device is {device}; kvx.vllm works on the CPU so far")
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            layers[name].impl.take(name, layers[name], options_of(vllm_config))

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("attention that is not causal")
        return KvxMetadata(common.query_start_loc, common.seq_lens, common.block_table_tensor)


class KvxImpl(AttentionImpl):
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
        wanted = sorted(name for name, value in others.items() if value not in (None, False, -1))
        if alibi_slopes is not None or attn_type != AttentionType.DECODER or wanted:
            what = "ALiBi slopes" if alibi_slopes is not None else wanted or attn_type
            raise UnsupportedError(f"attention with {what}; kvx computes causal decoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.v_head_size = num_kv_heads or num_heads, head_size
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attention = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or 0.0,
            "window": sliding_window or 0,
        }
        self.sinks = sinks  # a parameter whose numbers come later
        self.steps = ((), ())
        self.pages: PagedLayer | None = None
        config = get_current_vllm_config()
        self.recipe = recipe_of_layer(kv_cache_dtype, config)
        _remembered.add(get_kv_quant_mode(kv_cache_dtype), self.recipe, config)

    def take(self, name, layer, options):
        """What only the loaded layer has: its values' size, and k_scale and v_scale for a recipe
        whose scales are the checkpoint's."""
        self.v_head_size = layer.head_size_v
        if not is_static(self.recipe):
            return
        steps = tuple(self._steps_of(getattr(layer, side)) for side in ("_k_scale", "_v_scale"))
        has_none = all(step == 1.0 for side in steps for step in side)  # vLLM's own default
        if has_none and not options.get("unit_scales"):
            raise Error(
                f"{name} has no k_scale and v_scale and is stored as {self.recipe}, whose scales "
                f"are the checkpoint's; use a checkpoint that has them, a recipe that computes "
                f"its own (fp8_e4m3:source=computed, int8), or set kvx.unit_scales=true"
            )
        self.steps = steps

    def _steps_of(self, scale):
        steps = scale.detach().float().flatten().tolist()
        if len(steps) not in (1, self.num_kv_heads):
            raise Error(f"a scale has {len(steps)} numbers; expected 1 or {self.num_kv_heads}")
        return steps * (self.num_kv_heads // len(steps))

    def _pages_of(self, kv_cache):
        """kv_cache: uint8 [blocks, num_kv_heads, block_size, bytes]."""
        if self.pages is None:
            self.pages = PagedLayer(
                self.recipe,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                v_head_dim=self.v_head_size,
                block_size=kv_cache.shape[2],
                k_steps=self.steps[0],
                v_steps=self.steps[1],
            )
            if self.sinks is not None:
                self.attention["sinks"] = self.sinks.detach().float().contiguous()
        return self.pages

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """key, value: [tokens, num_kv_heads, head_size], padding last; slot_mapping: int64."""
        self._pages_of(kv_cache).append(kv_cache, key, value, slot_mapping)

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
        if attn_metadata is None:  # vLLM profiles
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("an output that attention quantises")
        return self._pages_of(kv_cache).attend(
            kv_cache,
            query,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            output,
            **self.attention,
        )
