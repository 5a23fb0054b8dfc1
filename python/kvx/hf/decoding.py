"""A cache that returns all its keys and values, decoded: for models whose attention kvx does not
compute (a position bias, another attention implementation). The caller chooses it by name.

What is kept is packed. Each layer's keys and values are decoded anew at every step, so this saves
memory and no time.
"""

import copy

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.formats import parse_recipe
from kvx.hf.cache import refuse_pickling
from kvx.hf.interface import (
    check_tuned_model,
    checked_config,
    layer_windows,
    refuse_gradients,
    refuse_other_devices,
)
from kvx.paged_layer import PagedLayer


class DecodingLayer(CacheLayerMixin):
    """One layer: pages for each row of the batch, in the order of its tokens."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # the attention applies a window
    supports_early_init = False

    def __init__(self, recipe: str, block_size: int, index: int, max_tokens: int):
        self.recipe = recipe
        self.index = index  # in the model
        self.max_tokens = max_tokens  # that a tuned recipe's block offsets reach
        self.block_size = block_size
        self.layer: PagedLayer | None = None
        self.pages: list[torch.Tensor] = []  # uint8 [pages, page_bytes] a row
        self.length = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states, value_states):
        refuse_other_devices(key_states, "kvx.hf.DecodingCache")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.layer = PagedLayer(
            self.recipe,
            num_kv_heads=key_states.shape[1],
            head_dim=key_states.shape[-1],
            v_head_dim=value_states.shape[-1],
            block_size=self.block_size,
            layer=self.index,
            max_tokens=self.max_tokens,
        )
        self.pages = [self._new_pages(0)] * len(key_states)
        self.is_initialized = True

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)  # self.layer is only a layout
        copied.pages = [pages.clone() for pages in self.pages]
        return copied

    def _new_pages(self, count):
        return torch.zeros((count, self.layer.page_bytes), dtype=torch.uint8)

    def update(self, key_states, value_states, *args, **kwargs):
        """Takes the new tokens' [rows, heads, tokens, dim]; returns those of all tokens."""
        refuse_gradients(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != len(self.pages):
            raise Error(
                f"the batch has {len(key_states)} rows; the cache holds {len(self.pages)} "
                f"(make another cache)"
            )
        slots = torch.arange(self.length, self.length + key_states.shape[2])  # and positions
        self.length += key_states.shape[2]
        wanted = -(-self.length // self.block_size)
        for b, (k, v) in enumerate(zip(key_states, value_states)):
            if wanted > len(self.pages[b]):
                grown = self._new_pages(max(wanted, 2 * len(self.pages[b])))
                grown[: len(self.pages[b])] = self.pages[b]
                self.pages[b] = grown
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            self.layer.append(self.pages[b], k, v, slots, positions=slots)
        return self._decoded()

    def _decoded(self):
        """Keys and values, [rows, heads, length, dim]."""
        like = torch.empty(0, dtype=self.dtype)
        block_ids = torch.arange(-(-self.length // self.block_size), dtype=torch.int32)
        rows = [self.layer.gather(p, block_ids, self.length, like=like) for p in self.pages]
        return tuple(torch.stack(side).transpose(1, 2) for side in zip(*rows))

    # An encoder-decoder model reads these instead of update() once the encoder's are there.
    @property
    def keys(self):
        return self._decoded()[0] if self.is_initialized else None

    @property
    def values(self):
        return self._decoded()[1] if self.is_initialized else None

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1

    def reset(self):
        self.length = 0

    def crop(self, tokens_to_remove):
        """Forgets the last positions: a negative number, or (positive) all from there on."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if kept < 0:
            raise OutOfRangeError(
                f"{-tokens_to_remove} positions are to go; the cache has {self.length}"
            )
        self.length = min(kept, self.length)

    def _select(self, indices):
        """Row i of the batch becomes what row indices[i] was."""
        self.pages = [self.pages[b].clone() for b in indices]

    def reorder_cache(self, beam_idx):
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self._select(torch.arange(len(self.pages)).repeat_interleave(repeats).tolist())

    def batch_select_indices(self, indices):
        self._select(torch.arange(len(self.pages))[indices].tolist())

    def offload(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")

    def prefetch(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")


class DecodingCache(TransformersCache):
    """Keys and values in the formats of a recipe, decoded in full for any attention.

    config:     the model's, with any attention implementation but kvx's own
    recipe:     ``"int8"``, ``"nvfp4:auto,immediate"``; there is no full-precision window.
                ``"tuned:FILE"`` is a tuned recipe of this model
    block_size: tokens a block

    Raises kvx.Error: a recipe that does not exist, or one with a full-precision window;
    kvx.UnsupportedError: layers without keys and values of their own.
    """

    def __init__(self, config: Any, recipe: str, *, block_size: int = 64) -> None:
        checked_config(config)
        if parse_recipe(recipe).full_precision_format is not None:
            raise Error(
                f"recipe is '{recipe}'; a DecodingCache has no full-precision window (add "
                f"immediate, or leave auto, sink and recent out)"
            )
        self.recipe = recipe
        num_layers = _num_layers(config)
        check_tuned_model(recipe, config, num_layers)
        max_tokens = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
        super().__init__(
            layers=[
                DecodingLayer(recipe, block_size, index, max_tokens) for index in range(num_layers)
            ]
        )

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.layers = copy.deepcopy(self.layers, memo)
        memo[id(self)] = copied
        return copied

    def __reduce__(self):
        refuse_pickling(self)

    def __repr__(self):
        return f"kvx.hf.DecodingCache({self.recipe!r}, {len(self.layers)} layers)"

    def memory(self):
        """Bytes of all layers' pages."""
        return sum(pages.nbytes for layer in self.layers for pages in layer.pages)


def _num_layers(config):
    """T5's decoder may have more layers than its encoder, and a name of its own for how many."""
    decoder = config.get_text_config(decoder=True)
    return getattr(decoder, "num_decoder_layers", None) or len(layer_windows(config))
