"""The cache of a decoder's own keys and values."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvx import _core
from kvx.cache import Cost, Tier
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.formats import parse_recipe
from kvx.hf import compiled, reuse
from kvx.hf.interface import NAME, check_tuned_model, checked_config, layer_windows
from kvx.hf.latent import latent_shape
from kvx.hf.layer import Layer, Run, repeated, untraced


class Cache(TransformersCache):
    """A transformers cache in the formats of a kvx recipe.

    config:     the model's, ``model.config``; its attention implementation must be kvx
                (kvx.hf.enable, or ``attn_implementation="kvx"`` when it is loaded). The model
                runs on the CPU or a CUDA GPU; a layer's cache lies where its first keys lie.
    recipe:     ``"int8"``, ``"int8/int4"``, ``"nvfp4:auto"``, ``"tuned:FILE"`` (a tuned recipe of
                this model), ...
    max_tokens: of one sequence, padding counted; the model's max_position_embeddings when None.
                Memory is mapped for all of it and used as tokens come.
    layer_recipes: other recipes for some layers, {0: "bf16"}
    max_batch:  rows of this cache, after batch_repeat_interleave() too, and of its deep copies
                together. When 0, on the CPU four times the first call's rows, of which memory is
                only mapped; on a GPU the first call's rows.
    block_size: tokens a block
    prefix_model: names what computes keys and values, such as the model and its revision, and turns
                record(), begin(), save() and load() on: tokens are found again in this cache, its
                host tier and its files
    host_tier_bytes: of host memory, all layers together, for blocks that the cache has no room for;
                needs prefix_model
    host_tier_folder: takes them from a disk instead
    tiers:      instead of these two, the tiers behind the cache, nearest first, as kvx.Cache has
                them (docs/tiers.md): ``"host(8GiB), disk(/folder, 200GiB), redis(URL)"``. Budgets
                are those of all layers together

    ``copy.deepcopy(cache)`` makes a cache that goes on from the same tokens. The two share their
    blocks until one of them writes, so a copy costs next to nothing.

    Raises kvx.Error for a recipe that does not exist or was tuned for another model, and for
    something that is no config,
    kvx.UnsupportedError for a model that kvx.hf does not support. Later calls raise
    kvx.UnsupportedError for the rest (4-D masks, gradients, another attention implementation) and
    kvx.OutOfRangeError past max_tokens.
    """

    def __init__(
        self,
        config: Any,
        recipe: str,
        *,
        max_tokens: int | None = None,
        layer_recipes: Mapping[int, str] | None = None,
        max_batch: int = 0,
        block_size: int = 64,
        prefix_model: str | None = None,
        host_tier_bytes: int = 0,
        host_tier_folder: str | PathLike[str] | None = None,
        tiers: str = "",
    ) -> None:
        if getattr(checked_config(config), "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{config.model_type} is an encoder-decoder model; use kvx.hf.EncoderDecoderCache"
            )
        if host_tier_bytes and prefix_model is None:
            raise Error(f"host_tier_bytes is {host_tier_bytes}; expected a prefix_model with it")
        _core.parse_tiers(tiers)  # what is wrong with it is said here
        if tiers and (prefix_model is None or host_tier_bytes):
            raise Error(
                f"tiers is {tiers!r}; expected a prefix_model with it, and no host_tier_bytes"
            )
        self.prefix_model = prefix_model
        self.host_tier_bytes, self.host_tier_folder = host_tier_bytes, host_tier_folder
        self.tiers_text = tiers
        self._create(config, recipe, max_tokens, layer_recipes, max_batch, block_size)

    @classmethod
    def of_decoder(cls, config, recipe, max_tokens, layer_recipes, max_batch, block_size):
        """Makes a cache of the decoder's own tokens in an encoder-decoder model."""
        cache = cls.__new__(cls)
        cache.prefix_model = None
        cache._create(config, recipe, max_tokens, layer_recipes, max_batch, block_size)
        return cache

    def _create(self, config, recipe, max_tokens, layer_recipes, max_batch, block_size):
        windows = layer_windows(config)
        self.model_config = config
        self.config = config.get_text_config(decoder=True)
        self.latent_shape = latent_shape(self.config)
        self.max_tokens = max_tokens or getattr(self.config, "max_position_embeddings", None)
        if not self.max_tokens:
            raise Error(
                f"max_tokens is {max_tokens}; {config.model_type} has no limit of its own"
            )
        self.max_batch = max_batch
        self.block_size = block_size
        self.recipe = recipe
        layer_recipes = layer_recipes or {}
        for text in (recipe, *layer_recipes.values()):
            parse_recipe(text)  # refused here rather than at the first token
            check_tuned_model(text, config, len(windows))
        unknown = sorted(set(layer_recipes) - set(range(len(windows))))
        if unknown:
            raise Error(f"layer_recipes names layer {unknown[0]}; the model has {len(windows)}")
        super().__init__(
            layers=[
                Layer(self, index, layer_recipes.get(index, recipe), window)
                for index, window in enumerate(windows)
            ]
        )
        self._waiting: Layer | None = None  # updated, and not attended yet
        self._columns = None  # bool [batch, positions]: what the sequences store; None for all
        self._rows_key = self._rows = None
        self.number = compiled.number_of(self)

    def __repr__(self) -> str:
        return f"kvx.hf.Cache({self.recipe!r}, {len(self.layers)} layers)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        fork = type(self).__new__(type(self))
        fork.__dict__.update(self.__dict__)
        fork._waiting = None
        fork.number = compiled.number_of(fork)
        fork.layers = [layer.fork(fork) for layer in self.layers]
        memo[id(self)] = fork
        return fork

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        if torch.compiler.is_compiling():
            self._refuse_other_attention()
            compiled.expect(layer)
            return key_states, value_states
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @untraced
    def _update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self._waiting is not None:
            layer, self._waiting = self._waiting.index, None
            raise UnsupportedError(
                f"the attention of layer {layer} does not read a kvx cache; call "
                f"kvx.hf.enable(model), if this model uses transformers' attention interface at all"
            )
        self._refuse_other_attention()
        if layer_idx == 0:
            self._refuse_half_a_pass()
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._waiting = self.layers[layer_idx]
        return states

    def append_and_attend(self, layer_idx, query, key, value, mask, scaling, softcap, sinks):
        """update() and the attention of a layer in one, as a compiled graph calls it."""
        layer = self.layers[layer_idx]
        if layer_idx == 0:
            self._refuse_half_a_pass()
        layer.prepare(key, value)
        value = None if layer.is_latent else value  # a latent row's value is a part of it
        return layer.attend(query, key, value, mask, scaling, softcap, sinks)

    def _refuse_other_attention(self):
        if self._implementation != NAME:
            raise UnsupportedError(
                f"the attention implementation is {self._implementation!r} and does "
                f"not read a kvx cache; call kvx.hf.enable(model)"
            )

    def _refuse_half_a_pass(self):
        """A forward pass that ended in the middle (Ctrl-C, out of memory) leaves positions in the
        first layers only."""
        lengths = [layer.length for layer in self.layers]
        if min(lengths) < max(lengths):
            raise Error(
                f"an earlier forward pass ended in the middle: the layers hold {min(lengths)} to "
                f"{max(lengths)} positions; call cache.crop({min(lengths) - max(lengths)}) or "
                f"cache.reset()"
            )

    @property
    def _implementation(self):
        """The attention implementation that the model uses now. An encoder-decoder model copies its
        configuration once for the decoder, so there the model's own configuration counts."""
        is_copy = getattr(self.model_config, "is_encoder_decoder", False)
        return (self.model_config if is_copy else self.config)._attn_implementation

    def drain_waiting(self, key):
        """The layer that these keys were appended for."""
        layer, waiting = getattr(key, "kvx_layer", None), self._waiting
        self._waiting = None
        if layer is not waiting:
            raise UnsupportedError("keys and values were changed between update() and attention")
        return layer

    def rows_of(self, mask, past, tokens, batch):
        """Which new tokens each sequence stores: its Runs, or None when all store all.

        The same for every layer of a forward pass, so it is computed once.
        """
        given = mask
        if past > 0 and self._rows_key is not None:
            earlier, *sizes = self._rows_key
            if given is earlier and sizes == [past, tokens]:
                return self._rows
        if mask is None:
            mask = torch.ones((batch, past + tokens), dtype=torch.bool)
        mask = mask.cpu()  # the host decides which tokens are stored
        if mask.shape != (batch, past + tokens):
            raise Error(
                f"attention_mask has the shape {list(mask.shape)}; expected [{batch}, "
                f"{past + tokens}], all positions of the cache and the new ones"
            )
        windows = [layer.window for layer in self.layers if layer.is_sliding]
        if windows and past + tokens > min(windows) and _has_holes(mask):
            raise UnsupportedError(
                f"attention_mask hides tokens between others, and {past + tokens} positions are "
                f"more than the sliding window of {min(windows)}, in which kvx.hf counts the tokens that "
                f"it stores and the model all positions; pad on the left, or use "
                f"kvx.hf.DecodingCache with another attention implementation"
            )
        stored = torch.ones((batch, past), dtype=torch.bool)
        if self._columns is not None:
            stored = self._columns[:, :past]
        if not torch.equal(mask[:, :past], stored):
            raise UnsupportedError(
                "attention_mask hides or shows other earlier tokens than in the call that stored "
                "them; kvx.hf does not store hidden tokens"
            )
        self._columns = None if bool(mask.all()) else mask
        self._rows = None if bool(mask[:, past:].all()) else [_runs_of(row[past:]) for row in mask]
        self._rows_key = (given, past, tokens)
        return self._rows

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last positions: a negative number of them, or (positive) all from there on.

        Raises kvx.UnsupportedError where that would cut a block that has left the full-precision
        window (a multiple of block_size can go), kvx.OutOfRangeError where the shorter sequence
        needs tokens that a sliding window has left behind.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        length = self.get_seq_length()
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if kept < 0:
            raise OutOfRangeError(
                f"{-tokens_to_remove} positions are to go; the cache has {length}"
            )
        if kept >= length:
            return
        tokens = self._stored_tokens(kept)
        # Sliding layers first: they alone may refuse what the others allow. Layers that an
        # interrupted forward pass did not reach may be shorter already.
        for layer in sorted(self.layers, key=lambda layer: not layer.is_sliding):
            layer.truncate(kept, tokens)
        self._columns = None if self._columns is None else self._columns[:, :kept]
        self._rows_key = None

    def _stored_tokens(self, length):
        if self._columns is None:
            return [length] * self.layers[0].batch_size
        return self._columns[:, :length].sum(1).tolist()

    def reset(self) -> None:
        super().reset()
        self.forget_masks()

    def forget_masks(self):
        """All rows store all their tokens, until a mask says otherwise."""
        self._waiting = self._columns = self._rows_key = None

    def reuse_options(self, index):
        """Options of a layer's kvx.Cache by which its tokens are found again."""
        if self.prefix_model is None:
            return {}
        return dict(
            prefix_model=f"{self.prefix_model}, layer {index}",
            host_tier_bytes=self.host_tier_bytes // len(self.layers),
            host_tier_folder=self.host_tier_folder if self.host_tier_bytes else None,
            tiers=self.tiers_text,
            tier_shares=len(self.layers),
        )

    def tiers(self) -> list[Tier]:
        """What the tiers hold and have done so far, of all layers together, nearest first: none
        before the first tokens. load_p99_us is the slowest layer's."""
        layers = [layer.cache.tiers() for layer in self.layers if layer.is_initialized]
        return [Tier.of_parts(parts) for parts in zip(*layers)]

    def wait_for_tiers(self) -> None:
        """Until no block is on its way to or from a tier."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.cache.wait_for_tier()

    def record(self, ids: torch.Tensor) -> None:
        """Records which tokens the cache holds, so that begin() finds them after a reset().

        ids: [rows, tokens], what generate() returned. Tokens beyond those that the cache holds are
             left out (generate() never appends its last one).
        Raises kvx.UnsupportedError: no prefix_model, or rows with hidden tokens; kvx.Error: other
        tokens than were recorded before, or fewer than the cache holds.
        """
        reuse.record(self, ids)

    def begin(self, ids: torch.Tensor, *, device: str | torch.device = "cpu") -> int:
        """Begins anew with the longest prefix of ``ids`` that is stored: how many positions it has.

        ids:    [rows, tokens] without padding. The last token is never part of the prefix, so
                model.generate(ids, cache=cache) goes on from it.
        device: where the model runs
        Raises kvx.UnsupportedError: no prefix_model; kvx.Error: another number of rows.
        """
        return reuse.begin(self, ids, device)

    def save(
        self, folder: str | PathLike[str], ids: torch.Tensor, *, zstd_level: int = 0
    ) -> None:
        """Writes all tokens to ``folder``, a checked file (docs/cache-file.md) a layer and row.

        ids: [rows, tokens], as in record(), which this calls
        What was there stays if it fails. Raises as record() does; kvx.Error: an empty cache, a
        folder of something else, or a file that cannot be written.
        """
        reuse.save(self, folder, ids, zstd_level)

    def load(
        self, folder: str | PathLike[str], *, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """Replaces what the cache holds by a saved one: its tokens, [rows, tokens].

        The cache needs the config, recipe, block_size and prefix_model of the one that was saved.
        Raises kvx.Error: a damaged file, or one of another cache (the message names the first
        difference); nothing has changed then.
        """
        return reuse.load(self, folder, device)

    def _select(self, indices):
        for layer in self.layers:
            layer.select(indices)
        if self._columns is not None:
            self._columns = self._columns[indices]
        self._rows_key = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        self._select(torch.arange(self.batch_size)[chosen].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(repeated(self.batch_size, repeats))

    def memory(self) -> int:
        """Bytes used by all layers together (whole blocks), codes and scales."""
        caches = [layer.cache for layer in self.layers if layer.cache is not None]
        return sum(cache.memory().used for cache in caches)

    def cost(self, num_tokens: int) -> Cost:
        """What the recipe costs at ``num_tokens`` tokens a row, all layers together.

        Raises kvx.Error: no keys and values have come yet, whose sizes it follows from.
        """
        if any(layer.cache is None for layer in self.layers):
            raise Error("the cache is empty; its cost follows from the first keys and values")
        costs = [layer.cache.cost(num_tokens) for layer in self.layers]
        bytes_per_token = sum(cost.bytes_per_token for cost in costs)
        bits = sum(cost.bits_per_value for cost in costs) / len(costs)
        return Cost(bits, bytes_per_token, int(2**30 / bytes_per_token))


def refuse_pickling(cache: Any) -> NoReturn:
    """copy.copy and pickle (torch.save, multiprocessing) end here."""
    name = f"kvx.hf.{type(cache).__name__}"
    raise UnsupportedError(
        f"a {name} cannot be pickled: its bytes belong to this process. Pickle its recipe, "
        f"{cache.recipe!r}, and make a {name} from it; copy.deepcopy(cache) copies it within the "
        f"process"
    )


def _has_holes(mask):
    """Whether a row shows tokens again after it has hidden some. mask: bool [rows, positions]."""
    runs = mask[:, 0].int() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    return bool((runs > 1).any())


def _runs_of(shown):
    """shown: bool [tokens]."""
    values, lengths = shown.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).tolist()
    return [
        Run(end - length, end, is_stored)
        for end, length, is_stored in zip(ends, lengths.tolist(), values.tolist())
    ]
