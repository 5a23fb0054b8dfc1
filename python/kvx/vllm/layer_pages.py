"""What a layer of vLLM's keeps of kvx beside its pages: the recipe, scales, the window, the verbs.

vLLM asks for a page's size in customize_spec, where its configuration is out of reach; so each
layer's recipe is chosen when the layer is made and remembered here.
"""

from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from kvx.errors import Error, UnsupportedError
from kvx.paged_layer import PagedLayer
from kvx.threads import use_torch_threads
from kvx.vllm.recipe import (
    is_static,
    is_tuned,
    recipe_of_layer,
    sides_with_tensor_scales,
)
from kvx.vllm.step import StepLimits, reserve_workspace
from kvx.vllm.window import check_window, new_window_pages, split_window

_log = init_logger("vllm.kvx")
GPU_BLOCK_SIZE = 64  # kvx's decode kernels read blocks of 64 faster than vLLM's default of 16


@dataclass(frozen=True)
class RowShape:
    """A token's rows in a layer. is_latent: values are the first v_head_dim numbers of the key."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    is_latent: bool = False

    def new_layer(self, recipe: str, block_size: int, **options) -> PagedLayer:
        """A kvx.PagedLayer of such rows on this process's device."""
        return PagedLayer(
            recipe,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            latent=self.is_latent,
            block_size=block_size,
            device=device_of_process(),
            **options,
        )


class _Remembered:
    """What the layers' __init__ chose, for customize_spec in the same process."""

    def __init__(self):
        self.recipes = {}  # by KVQuantMode: (the configuration, the recipe)
        self.latent_dims = {}  # by the numbers of a latent row: those that are its value

    def add(self, mode, recipe, shape, vllm_config):
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
        if shape.is_latent:
            self.latent_dims[shape.head_dim] = shape.v_head_dim

    def of(self, mode):
        """(the configuration, the recipe)"""
        if mode not in self.recipes:
            raise UnsupportedError(
                f"vLLM requests the pages of a layer of the mode {mode.name} before any was made"
            )
        return self.recipes[mode]


_remembered = _Remembered()


def latent_shape(row_dim: int) -> RowShape:
    """The shape of the latent layers whose rows have so many numbers."""
    return RowShape(1, row_dim, _remembered.latent_dims[row_dim], is_latent=True)


def row_bytes(spec, shape: RowShape) -> int:
    """Bytes that vLLM reserves for a token's row of one head, so that a page of kvx's fits.

    spec: vLLM's, of layers of this shape
    """
    config, recipe = _remembered.of(spec.kv_quant_mode)
    recipe, _ = split_window(recipe)
    # A tuned recipe may store layers unlike: vLLM has one size of pages for all of them.
    text_config = config.model_config.hf_text_config if is_tuned(recipe) else None
    num_layers = text_config.num_hidden_layers if text_config else 1
    page_bytes = max(
        shape.new_layer(
            recipe, spec.block_size, layer=layer, max_tokens=spec.block_size
        ).page_bytes
        for layer in range(num_layers)
    )
    return -(-page_bytes // (shape.num_kv_heads * spec.block_size))  # rounded up


def check_options(alibi_slopes, attn_type, others):
    """others: options by name. Raises kvx.UnsupportedError: one that kvx does not compute."""
    wanted = sorted(name for name, value in others.items() if value not in (None, False, -1))
    if alibi_slopes is not None or attn_type != AttentionType.DECODER or wanted:
        what = "ALiBi slopes" if alibi_slopes is not None else wanted or attn_type
        raise UnsupportedError(f"attention with {what}; kvx computes causal decoders")


class LayerPages:
    """A layer's part, beside vLLM's AttentionImplBase: num_heads is the latter's."""

    kv_sharing_target_layer_name = None

    def init_pages(self, shape: RowShape, kv_cache_dtype: str, attention: dict):
        """attention: options of kvx.PagedLayer.attend."""
        self.shape, self.kv_cache_dtype, self.attention = shape, kv_cache_dtype, attention
        self.device = device_of_process()
        self.given = {}  # the checkpoint's scales, as PagedLayer takes them
        self.layer_index = 0  # in the model; known once the layer is loaded
        self.positions = None  # the builder's
        self.step_window = None  # the builder's
        self.window_pages = None  # uint8 [blocks, bytes]
        self.pages: PagedLayer | None = None
        self.config = get_current_vllm_config()
        whole_recipe = recipe_of_layer(kv_cache_dtype, self.config)
        self.recipe, self.window_tokens = split_window(whole_recipe)
        if self.window_tokens is not None:
            check_window(self.config)
        _remembered.add(get_kv_quant_mode(kv_cache_dtype), whole_recipe, shape, self.config)

    def take(self, name, layer, options):
        """What only the loaded layer has: its place in the model, and k_scale and v_scale for a
        recipe whose scales are the checkpoint's."""
        if is_tuned(self.recipe):
            # Importing vLLM's models takes seconds, and without a tuned recipe nothing needs them.
            from vllm.model_executor.models.utils import extract_layer_index

            self.layer_index = extract_layer_index(name)
        sides = ("k",) if self.shape.is_latent else ("k", "v")
        scales = {side: getattr(layer, f"_{side}_scale") for side in sides}
        if not options.get("unit_scales"):
            for side in sides_with_tensor_scales(self.recipe):
                if side in sides:
                    self.given[f"{side}_tensor_scales"] = self._of_heads(scales[side])
        if not is_static(self.recipe):
            return
        steps = {f"{side}_steps": self._of_heads(scale) for side, scale in scales.items()}
        has_none = all(step == 1.0 for side in steps.values() for step in side)  # vLLM's default
        if has_none and not options.get("unit_scales"):
            raise Error(
                f"{name} has no {' and '.join(f'{side}_scale' for side in sides)} and is stored as "
                f"{self.recipe}, whose scales are the checkpoint's; use a checkpoint that has them, "
                f"a recipe that computes its own (fp8_e4m3:source=computed, int8), or set "
                f"kvx.unit_scales=true"
            )
        self.given |= steps

    def _of_heads(self, scale):
        numbers, heads = scale.detach().float().flatten().tolist(), self.shape.num_kv_heads
        if len(numbers) not in (1, heads):
            raise Error(f"a scale has {len(numbers)} numbers; expected 1 or {heads}")
        return numbers * (heads // len(numbers))

    def new_layer(self, block_size: int) -> PagedLayer:
        """The layer of this recipe, with its scales."""
        return self.shape.new_layer(
            self.recipe,
            block_size,
            layer=self.layer_index,
            max_tokens=self.config.model_config.max_model_len if is_tuned(self.recipe) else 0,
            **self.given,
        )

    def reserve_memory(self, device):
        """What a step on a GPU needs beside pages, while vLLM measures its memory."""
        self.workspace_on(device)
        if self.window_tokens is not None and self.kv_sharing_target_layer_name is None:
            self.reserve_window(device, self._block_size())

    def workspace_on(self, device):
        """uint8 on the GPU, enough for every step of this layer; all layers share it."""
        layer = self.pages or self.new_layer(self._block_size())
        window = self.attention["window"]
        num_bytes = StepLimits.of(self.config).workspace_bytes(
            layer, self.num_heads, window, has_window_pages=self.window_tokens is not None
        )
        return reserve_workspace(torch.device(device), num_bytes)

    def reserve_window(self, device, block_size):
        """The layer's memory for its full-precision window; while vLLM measures its memory, the
        block size may not be known yet."""
        if self.window_pages is not None and self._window_block_size == block_size:
            return
        self.window_pages = None  # gives the old one back first
        layer = self.pages or self.new_layer(block_size)
        self.window_pages = new_window_pages(
            layer, self.window_tokens, block_size, self.config, device
        )
        self._window_block_size = block_size

    def _block_size(self):
        return self.config.cache_config.block_size or GPU_BLOCK_SIZE

    def append(self, pages, kv_cache, key, value, slot_mapping):
        """Stores new tokens as kvx.PagedLayer.append does."""
        positions = self.positions[: len(slot_mapping)] if pages.needs_positions else None
        window = {}
        if self.step_window is not None:
            plan = self.step_window.plan
            closes = not self.step_window.closes_beside_attention
            window = {"window_pages": self.window_pages, "plan": plan, "closes": closes}
            slot_mapping = plan.slots[: len(slot_mapping)]  # those that are written at once
        pages.append(kv_cache, key, value, slot_mapping, positions=positions, **window)

    def attend(self, batch, pages, kv_cache, query, output):
        """Attention of the step that batch has planned, into output."""

        def run():
            return batch.run(
                pages, kv_cache, query, output, window_pages=self.window_pages, **self.attention
            )

        owns_pages = self.kv_sharing_target_layer_name is None
        if not (self.step_window and owns_pages and self.step_window.closes_beside_attention):
            return run()
        plan = self.step_window.plan
        with self.step_window.beside(
            lambda: pages.close_blocks(kv_cache, self.window_pages, plan)
        ):
            return run()


def device_of_process():
    """vLLM gives each worker a GPU of its own and makes it the current one before any layer."""
    return f"cuda:{torch.cuda.current_device()}" if current_platform.is_cuda() else "cpu"
