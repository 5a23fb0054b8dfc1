"""Caches of encoder-decoder models: the decoder's own tokens, and what it reads of the encoder's."""

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from kvx.errors import Error, UnsupportedError
from kvx.formats import parse_recipe
from kvx.hf.cache import Cache, refuse_pickling
from kvx.hf.decoding import DecodingCache
from kvx.hf.interface import (
    NAME,
    layer_windows,
    refuse_other_devices,
    refuse_position_bias,
)
from kvx.hf.layer import repeated
from kvx.paged_layer import PagedLayer


class CrossLayer(CacheLayerMixin):
    """One layer's keys and values of the encoder's output, stored once.

    All tokens are visible to a query, later ones too. The verbs attend causally, so each query is a
    sequence of its own here, and its last token. All queries of a row share the row's pages.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    is_cross = True
    is_latent = False
    window = 0

    def __init__(self, owner: "CrossCache", index: int):
        super().__init__()
        self.owner = owner
        self.index = index
        self.reset()

    def reset(self):
        self.keys = self.values = None  # what models pass to attention once is_updated is set
        self.waiting = None  # keys and values that attention has not stored yet
        self.pages = self.layer = None
        self.tables = self.lengths = None  # int32 [rows, pages], [rows]
        self.mask = None
        self.length = 0
        self.is_initialized = False

    def fork(self, owner: "CrossCache") -> "CrossLayer":
        """This layer in a copy of its cache. Pages are written once, so the two share them."""
        fork = type(self).__new__(type(self))
        fork.__dict__.update(self.__dict__)
        fork.owner = owner
        if self.keys is not None:
            fork.keys, fork.values = fork._carrier(self.keys), fork._carrier(self.values)
        return fork

    def lazy_initialization(self, key_states, value_states):
        refuse_other_devices(key_states, "kvx.hf.EncoderDecoderCache")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if self.length > 0:
            raise UnsupportedError("the encoder's keys and values came twice; call reset()")
        self.lazy_initialization(key_states, value_states)
        self.waiting = (key_states, value_states)
        self.length = key_states.shape[2]
        self.keys = self._carrier(key_states)
        self.values = self._carrier(value_states)
        return self.keys, self.values

    def _carrier(self, states):
        """An empty tensor [rows, heads, 0, dim] that carries this layer from update() to attention."""
        carrier = states[:, :, :0]
        carrier.kvx_layer = self
        return carrier

    def _store(self, mask):
        """mask: bool [rows, length] or None; tokens that it hides are not stored."""
        keys, values = self.waiting
        rows, heads, length, head_dim = keys.shape
        size = self.owner.block_size
        self.layer = PagedLayer(
            self.owner.recipe,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=values.shape[-1],
            block_size=size,
        )
        shown = torch.ones((rows, length), dtype=torch.bool) if mask is None else mask
        self.lengths = shown.sum(1, dtype=torch.int32)
        pages = -(-length // size)
        self.pages = torch.zeros((rows * pages, self.layer.page_bytes), dtype=torch.uint8)
        self.tables = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        for b in range(rows):
            k, v = (x[b].transpose(0, 1)[shown[b]] for x in (keys, values))
            slots = torch.arange(len(k)) + b * pages * size
            self.layer.append(self.pages, k, v, slots)
        self.mask, self.waiting = mask, None

    def attend(self, query, key, value, mask, scaling, softcap, sinks):
        """query [rows, heads, tokens, dim]; mask: bool [rows, length] or None.
        Returns [rows, tokens, heads, dim]."""
        if self.waiting is not None:
            self._store(mask)
        elif not _same(mask, self.mask):
            raise UnsupportedError(
                "the encoder's attention_mask has changed since its keys were stored"
            )
        rows, heads, tokens, dim = query.shape
        if rows != len(self.tables):
            raise Error(f"the batch has {rows} rows; the encoder's output had {len(self.tables)}")
        out = self.layer.attend(
            self.pages,
            query.transpose(1, 2).reshape(rows * tokens, heads, dim),
            self.tables.repeat_interleave(tokens, 0),
            self.lengths.repeat_interleave(tokens),
            torch.arange(rows * tokens + 1, dtype=torch.int32),
            softmax_scale=scaling,
            softcap=softcap or 0.0,
            sinks=sinks,
        )
        return out.view(rows, tokens, heads, -1)

    @property
    def num_rows(self):
        return len(self.tables if self.waiting is None else self.waiting[0])

    def select(self, indices):
        """Rows share pages: nothing is copied."""
        if self.waiting is not None:
            self.waiting = tuple(x[indices] for x in self.waiting)
        if self.tables is not None:
            self.tables, self.lengths = self.tables[indices], self.lengths[indices]
        if self.mask is not None:
            self.mask = self.mask[indices]

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length, 0

    def get_max_length(self):
        return -1

    def offload(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")

    def prefetch(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")

    def crop(self, tokens_to_remove):
        raise UnsupportedError("the encoder's keys and values cannot be cropped")


class CrossCache(TransformersCache):
    """The encoder's output in the formats of a recipe."""

    def __init__(self, config, recipe, layer_count, block_size):
        self.model_config = config
        self.recipe = recipe
        self.block_size = block_size
        super().__init__(layers=[CrossLayer(self, index) for index in range(layer_count)])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.model_config._attn_implementation != NAME:
            raise UnsupportedError(
                f"the attention implementation is {self.model_config._attn_implementation!r} and "
                f"does not read a kvx cache; call kvx.hf.enable(model)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __deepcopy__(self, memo):
        fork = type(self).__new__(type(self))
        fork.__dict__.update(self.__dict__)
        fork.layers = [layer.fork(fork) for layer in self.layers]
        memo[id(self)] = fork
        return fork

    def __reduce__(self):
        refuse_pickling(self)

    def drain_waiting(self, key):
        """Attention reads it as often as it likes."""

    def select(self, indices):
        """Row i of the batch becomes what row indices[i] was."""
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx):
        self.select(beam_idx)

    def batch_select_indices(self, indices):
        self.select(indices)

    def batch_repeat_interleave(self, repeats):
        self.select(torch.tensor(repeated(self.layers[0].num_rows, repeats)))

    def memory(self):
        """Bytes of all layers together."""
        return sum(layer.pages.nbytes for layer in self.layers if layer.pages is not None)


class _TwoCaches(TransformersEncoderDecoderCache):
    """The decoder's own tokens, and what it reads of the encoder's. transformers' class allows what
    follows to its own caches alone."""

    def memory(self):
        """Bytes used by both caches, all layers."""
        return self.self_attention_cache.memory() + self.cross_attention_cache.memory()

    def crop(self, tokens_to_remove):
        """Forgets the decoder's last tokens, as the cache of a decoder does."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats):
        self.self_attention_cache.batch_repeat_interleave(repeats)
        self.cross_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices):
        self.self_attention_cache.batch_select_indices(indices)
        self.cross_attention_cache.batch_select_indices(indices)


class EncoderDecoderCache(_TwoCaches):
    """For generate() with an encoder-decoder model (BART, mBART): both caches by a recipe.

    Arguments as in kvx.hf.Cache; one recipe for all layers. The encoder's keys and values have no
    full-precision window. Raises as kvx.hf.Cache does; a position bias (T5) needs
    DecodingEncoderDecoderCache.
    """

    def __init__(
        self,
        config: Any,
        recipe: str,
        *,
        max_tokens: int | None = None,
        max_batch: int = 0,
        block_size: int = 64,
    ) -> None:
        refuse_position_bias(config)
        _refuse_tuned(recipe)
        own = Cache.of_decoder(config, recipe, max_tokens, None, max_batch, block_size)
        layer_count = len(layer_windows(config))
        super().__init__(own, CrossCache(config, _without_ends(recipe), layer_count, block_size))


class DecodingEncoderDecoderCache(_TwoCaches):
    """The same decoded in full at every step, for any attention implementation, T5's among them:
    two of kvx.hf.DecodingCache, with its arguments and errors."""

    def __init__(self, config: Any, recipe: str, *, block_size: int = 64) -> None:
        _refuse_tuned(recipe)
        super().__init__(
            DecodingCache(config, recipe, block_size=block_size),
            DecodingCache(config, recipe, block_size=block_size),
        )


def _refuse_tuned(recipe):
    """A tuned recipe has the tables of one stack of layers; here are two, and the encoder's."""
    if recipe.startswith("tuned:"):
        raise UnsupportedError(f"recipe is '{recipe}'; a tuned recipe is a decoder-only model's")


def _without_ends(recipe):
    """The recipe for tokens that are all quantised when they come."""
    if parse_recipe(recipe).full_precision_format is None:
        return recipe
    formats, _, options = recipe.partition(":")
    window = ("sink=", "recent=", "full_precision=")
    kept = [option for option in options.split(",") if not option.startswith(window)]
    return f"{formats}:{','.join([*kept, 'immediate'])}"


def _same(a, b):
    return a is b or (a is not None and b is not None and torch.equal(a, b))
