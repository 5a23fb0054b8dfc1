"""The attention backend CUSTOM: vLLM's pages hold kvx's bytes, and kvx attends over them.

A page is one block of one layer, all its KV heads, in kvx's own order (kvx.PagedLayer). vLLM asks
for a page's size in customize_spec, where its configuration is out of reach; so each layer's
recipe is chosen in KvxImpl.__init__ and remembered there.

The builder hands a step's tables and bounds to kvx.torch.BatchAttention, which each layer then
runs. On a GPU a step neither waits for the device nor allocates: bounds come from what vLLM has on
the host, and the workspace was allocated while vLLM measured its memory. So a CUDA graph can hold
any step.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
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
from vllm.v1.kv_cache_interface import KVCacheLayout, get_kv_quant_mode

from kvx.errors import Error, UnsupportedError
from kvx.paged_layer import PagedLayer
from kvx.threads import use_torch_threads
from kvx.torch import BatchAttention
from kvx.vllm.recipe import (
    CACHE_DTYPES,
    is_static,
    is_tuned,
    options_of,
    recipe_of_layer,
    sides_with_tensor_scales,
)
from kvx.vllm.step import StepLimits, leading_decodes, reserve_workspace
from kvx.vllm.window import StepWindow, check_window, new_window_pages, split_window

_log = init_logger("vllm.kvx")
_PAGE_TOKENS = 16  # vLLM's blocks are a multiple of it: head sections then need no padding
_GPU_BLOCK_SIZE = 64  # kvx's decode kernels read blocks of 64 faster than vLLM's default of 16
_OLDEST_CAPABILITY = (8, 0)


class _Remembered:
    """What the layers' __init__ chose, for customize_spec in the same process."""

    def __init__(self):
        self.recipes = {}  # by KVQuantMode: (the configuration, the recipe)

    def add(self, mode, recipe, vllm_config):
        """A process may make one engine after the other; within one, a mode is one recipe."""
        if not self.recipes and current_platform.is_cpu():
            use_torch_threads()
        config, before = self.recipes.get(mode, (None, None))
        if config is vllm_config and before != recipe:
            raise Error(
                f"layers of the mode {mode.name} are stored by '{before}' and by '{recipe}'"
            )
        if config is not vllm_config:
            _log.info("kvx stores keys and values as %s", recipe)
        self.recipes[mode] = (vllm_config, recipe)

    def of(self, mode):
        """(the configuration, the recipe)"""
        if mode not in self.recipes:
            raise UnsupportedError(
                f"vLLM requests the pages of a layer of the mode {mode.name} before any was made"
            )
        return self.recipes[mode]


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
            default_block_size = max(default_block_size, _GPU_BLOCK_SIZE)
        return super().get_preferred_block_size(default_block_size)

    @classmethod
    def customize_spec(cls, spec):
        if spec.state_content_bytes is not None:  # vLLM calls this more than once
            return spec
        config, recipe = _remembered.of(spec.kv_quant_mode)
        recipe, _ = split_window(recipe)
        # A tuned recipe may store layers unlike: vLLM has one size of pages for all of them.
        text_config = config.model_config.hf_text_config if is_tuned(recipe) else None
        num_layers = text_config.num_hidden_layers if text_config else 1
        page_bytes = max(
            PagedLayer(
                recipe,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_size,
                v_head_dim=spec.head_size_v,
                block_size=spec.block_size,
                device=_device_of_process(),
                layer=layer,
                max_tokens=spec.block_size,
            ).page_bytes
            for layer in range(num_layers)
        )
        num_rows = spec.num_kv_heads * spec.block_size
        row_bytes = -(-page_bytes // num_rows)  # rounded up
        return replace(spec, dtype=torch.uint8, state_content_bytes=row_bytes)


def _device_of_process():
    """vLLM gives each worker a GPU of its own and makes it the current one before any layer."""
    return f"cuda:{torch.cuda.current_device()}" if current_platform.is_cuda() else "cpu"


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
            workspaces = [impl.reserve_workspace(device, vllm_config) for impl in impls]
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
            plan = self.window.plan_step(table, common.seq_lens, starts)
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
                q, k, v, out = (
                    new((tokens, *row), dtype=self.vllm_config.model_config.dtype)
                    for row in impl.row_shapes()
                )
                if impl.kv_sharing_target_layer_name is None:
                    impl.do_kv_cache_update(None, k, v, kv_cache, slots)
                impl.forward(None, q, k, v, kv_cache, KvxMetadata(self.batch), out)


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
        self.given = {}  # the checkpoint's scales, as PagedLayer takes them
        self.layer_index = 0  # in the model; known once the layer is loaded
        self.positions = None  # the builder's
        self.step_window = None  # the builder's
        self.window_pages = None  # uint8 [blocks, bytes]
        self.device = _device_of_process()
        self.pages: PagedLayer | None = None
        self.config = get_current_vllm_config()
        whole_recipe = recipe_of_layer(kv_cache_dtype, self.config)
        self.recipe, self.window_tokens = split_window(whole_recipe)
        if self.window_tokens is not None:
            check_window(self.config)
        _remembered.add(get_kv_quant_mode(kv_cache_dtype), whole_recipe, self.config)

    def take(self, name, layer, options):
        """What only the loaded layer has: its values' size, and k_scale and v_scale for a recipe
        whose scales are the checkpoint's."""
        self.v_head_size = layer.head_size_v
        if is_tuned(self.recipe):
            # Importing vLLM's models takes seconds, and without a tuned recipe nothing needs them.
            from vllm.model_executor.models.utils import extract_layer_index

            self.layer_index = extract_layer_index(name)
        scales = {side: getattr(layer, f"_{side}_scale") for side in ("k", "v")}
        if not options.get("unit_scales"):
            for side in sides_with_tensor_scales(self.recipe):
                self.given[f"{side}_tensor_scales"] = self._of_heads(scales[side])
        if not is_static(self.recipe):
            return
        steps = {f"{side}_steps": self._of_heads(scale) for side, scale in scales.items()}
        has_none = all(step == 1.0 for side in steps.values() for step in side)  # vLLM's default
        if has_none and not options.get("unit_scales"):
            raise Error(
                f"{name} has no k_scale and v_scale and is stored as {self.recipe}, whose scales "
                f"are the checkpoint's; use a checkpoint that has them, a recipe that computes "
                f"its own (fp8_e4m3:source=computed, int8), or set kvx.unit_scales=true"
            )
        self.given |= steps

    def _of_heads(self, scale):
        numbers = scale.detach().float().flatten().tolist()
        if len(numbers) not in (1, self.num_kv_heads):
            raise Error(f"a scale has {len(numbers)} numbers; expected 1 or {self.num_kv_heads}")
        return numbers * (self.num_kv_heads // len(numbers))

    def row_shapes(self):
        """(heads, numbers) of a row of q, k, v and the output."""
        q, k = (self.num_heads, self.head_size), (self.num_kv_heads, self.head_size)
        v, out = (self.num_kv_heads, self.v_head_size), (self.num_heads, self.v_head_size)
        return q, k, v, out

    def _new_layer(self, block_size):
        return PagedLayer(
            self.recipe,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            v_head_dim=self.v_head_size,
            block_size=block_size,
            device=self.device,
            layer=self.layer_index,
            max_tokens=self.config.model_config.max_model_len if is_tuned(self.recipe) else 0,
            **self.given,
        )

    def _pages_of(self, kv_cache):
        """kv_cache: uint8 [blocks, num_kv_heads, block_size, bytes]."""
        if self.pages is None:
            self.pages = self._new_layer(kv_cache.shape[2])
            if self.sinks is not None:
                self.attention["sinks"] = self.sinks.detach().float().contiguous()
        return self.pages

    def reserve_workspace(self, device, config):
        """uint8 on the GPU, enough for every step of this layer; all layers share it."""
        layer = self.pages or self._new_layer(config.cache_config.block_size or _GPU_BLOCK_SIZE)
        window = self.attention["window"]
        num_bytes = StepLimits.of(config).workspace_bytes(
            layer, self.num_heads, window, has_window_pages=self.window_tokens is not None
        )
        return reserve_workspace(torch.device(device), num_bytes)

    def reserve_window(self, device, block_size):
        """The layer's memory for its full-precision window; while vLLM measures its memory, the
        block size may not be known yet."""
        if self.window_pages is not None and self._window_block_size == block_size:
            return
        self.window_pages = None  # gives the old one back first
        layer = self.pages or self._new_layer(block_size)
        self.window_pages = new_window_pages(
            layer, self.window_tokens, block_size, self.config, device
        )
        self._window_block_size = block_size

    def _window_arguments(self):
        """What append() and attend() take of the step's window."""
        if self.step_window is None:
            return {}
        return {"window_pages": self.window_pages, "plan": self.step_window.plan}

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """key, value: [tokens, num_kv_heads, head_size], padding last; slot_mapping: int64."""
        pages = self._pages_of(kv_cache)
        positions = self.positions[: len(slot_mapping)] if pages.needs_positions else None
        window = self._window_arguments()
        pages.append(kv_cache, key, value, slot_mapping, positions=positions, **window)

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
                self.reserve_workspace(query.device, self.config)
                if self.window_tokens is not None and self.kv_sharing_target_layer_name is None:
                    block_size = self.config.cache_config.block_size or _GPU_BLOCK_SIZE
                    self.reserve_window(query.device, block_size)
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("an output that attention quantises")
        return attn_metadata.batch.run(
            self._pages_of(kv_cache),
            kv_cache,
            query,
            output,
            window_pages=self.window_pages,
            **self.attention,
        )
