"""One layer of kvx.hf.Cache: a kvx cache of one layer, whose sequences are the rows of the batch."""

import gc
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from kvx.cache import Cache as PagedCache
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.hf.interface import STORED, refuse_gradients, refuse_other_devices

if TYPE_CHECKING:
    from kvx.hf.cache import Cache

_MAX_STEP_TOKENS = 1024  # tokens of a prompt at once on a GPU: each layer has a workspace for them
_DEFAULT_COPIES = 4  # caches, deep copies counted, that there is room for on the CPU


untraced = torch.compiler.disable(reason="the verbs of a kvx cache run outside of a graph")


@dataclass
class _Shared:
    """A kvx cache of one layer, which a kvx.hf.Cache and its deep copies share.

    unused: sequences of copies that are gone. Python may collect a copy while a step is open, so
            they are freed later, before the next use.
    """

    cache: PagedCache
    lock: threading.Lock = field(default_factory=threading.Lock)
    unused: deque = field(default_factory=deque)

    def free_unused(self):
        while self.unused:
            self.cache.free_sequence(self.unused.popleft())

    def fork(self, sequence):
        """The number of a fork. Raises kvx.OutOfRangeError: all sequences are in use."""
        self.free_unused()
        try:
            return self.cache.fork_sequence(sequence)
        except OutOfRangeError:
            gc.collect()  # copies that nothing refers to but their own cycles
            self.free_unused()
        try:
            return self.cache.fork_sequence(sequence)
        except OutOfRangeError as error:
            raise OutOfRangeError(
                f"{error} (kvx.hf.Cache(..., max_batch=...): rows of the cache and of its deep "
                f"copies together)"
            ) from None


@dataclass(frozen=True)
class Run:
    """New tokens of a sequence, one after the other, that are all stored or all hidden."""

    first: int
    end: int
    is_stored: bool

    def of(self, tokens):
        """tokens: [heads, tokens, dim]; the run's, as the verbs have them: [tokens, heads, dim], a
        view."""
        return tokens.transpose(0, 1)[self.first : self.end]


class Layer(CacheLayerMixin):
    """One layer's keys and values: a kvx cache of one layer, a sequence a row of the batch."""

    is_compileable = False
    is_croppable = True
    is_cross = False
    supports_early_init = False

    def __init__(self, owner: "Cache", index: int, recipe: str, window: int):
        super().__init__()
        self._owner = weakref.ref(owner)  # no cycle: a cache is gone when nobody refers to it
        self.index = index
        self.recipe = recipe
        self.window = window
        self.is_sliding = window > 0
        self.length = 0  # positions so far, hidden ones included
        self.shared: _Shared | None = None
        self.sequences: list[int] = []  # changed in place only: the finalizer has it too

    @property
    def owner(self) -> "Cache":
        owner = self._owner()
        if owner is None:
            raise Error("the kvx.hf.Cache of this layer is gone; keep the cache, not its layers")
        return owner

    @property
    def cache(self) -> PagedCache | None:
        return self.shared and self.shared.cache

    def lazy_initialization(self, key_states, value_states):
        refuse_other_devices(key_states, "kvx.hf.Cache", ("cpu", "cuda"))
        batch, heads, _, head_dim = key_states.shape
        if self.is_latent:
            self._initialize_latent(batch, key_states.device)
        else:
            self._initialize(batch, heads, head_dim, value_states.shape[-1], key_states.device)

    def initialize_for(self, batch, device):
        """Makes the cache before keys come, of the config's sizes."""
        if self.is_latent:
            self._initialize_latent(batch, device)
            return
        config = self.owner.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        self._initialize(batch, heads, head_dim, head_dim, device)

    @property
    def is_latent(self):
        """Whether a token has one row for all heads, of which the values are a part (MLA)."""
        return self.owner.latent_shape is not None

    def _initialize_latent(self, batch, device):
        shape = self.owner.latent_shape
        self._initialize(batch, 1, shape.row_dim, shape.latent_dim, device)

    def _initialize(self, batch, heads, head_dim, v_head_dim, device):
        owner = self.owner
        self.device = device
        options = dict(
            num_layers=1,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            latent=self.is_latent,
            recipe=self.recipe,
            first_layer=self.index,
            max_tokens=owner.max_tokens,
            block_size=owner.block_size,
            layer_windows=[self.window] if self.window else [],
            device=device,
            **owner.reuse_options(self.index),
        )
        self.shared = _Shared(self._new_cache(batch, options))
        self._own([self.cache.create_sequence() for _ in range(batch)])

    def _new_cache(self, batch, options):
        rows = max(batch, self.owner.max_batch)
        room = rows
        if not self.owner.max_batch and self.device.type == "cpu":
            room = _DEFAULT_COPIES * rows  # only mapped, until a copy writes
        try:
            return self._cache_of(room, options)
        except OutOfRangeError:  # more than this machine maps
            if room == rows:
                raise
        return self._cache_of(rows, options)

    def _cache_of(self, rows, options):
        return PagedCache(
            max_sequences=rows, max_step_tokens=max(rows, _MAX_STEP_TOKENS), **options
        )

    def _own(self, sequences):
        """Takes sequences, which are freed when this layer is gone."""
        self.sequences[:] = sequences
        weakref.finalize(self, self.shared.unused.extend, self.sequences).atexit = False
        self.is_initialized = True

    def fork(self, owner: "Cache") -> "Layer":
        """This layer in a deep copy of its cache: blocks are shared until one of the two writes."""
        fork = Layer(owner, self.index, self.recipe, self.window)
        if self.is_initialized:
            fork.device = self.device
            fork.shared, fork.length = self.shared, self.length
            fork._own([])
            for sequence in self.sequences:
                fork.sequences.append(self.shared.fork(sequence))
        return fork

    def begin(self, rows):
        """Begins each sequence with the longest prefix of its tokens that is stored; returns their
        lengths. rows: a list of token numbers each."""
        with self.shared.lock:
            self.shared.free_unused()
            for b, tokens in enumerate(rows):
                self.cache.free_sequence(self.sequences[b])
                self.sequences[b] = self.cache.create_sequence_from(tokens)
        counts = [self.cache.num_tokens(sequence) for sequence in self.sequences]
        self.length = max(counts)
        return counts

    def keep(self, length):
        """Takes all sequences back to ``length`` tokens, which they all have."""
        self._truncate_sequences([length] * len(self.sequences))
        self.length = length

    def take(self, sequences, length):
        """Holds these sequences, of ``length`` tokens each, from now on."""
        for sequence in self.sequences:
            self.cache.free_sequence(sequence)
        self.sequences[:] = sequences
        self.length = length

    def __deepcopy__(self, memo):
        raise UnsupportedError("a single layer cannot be copied; copy.deepcopy the kvx.hf.Cache")

    @property
    def batch_size(self):
        return len(self.sequences)

    @property
    def number(self):
        return self.owner.number

    def prepare(self, key_states, value_states):
        """Makes the cache where there is none. Raises what speaks against storing these."""
        refuse_gradients(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.sequences):
            raise Error(
                f"the batch has {key_states.shape[0]} rows; the cache was made for "
                f"{len(self.sequences)} (call reset(), or make another cache)"
            )
        if self.length + key_states.shape[2] > self.owner.max_tokens:
            raise OutOfRangeError(
                f"{self.length + key_states.shape[2]} tokens; max_tokens is "
                f"{self.owner.max_tokens} (kvx.hf.Cache(..., max_tokens=...) makes a larger cache)"
            )

    def update(self, key_states, value_states, *args, **kwargs):
        """Returns the new keys and values, which carry the layer to the attention function."""
        self.prepare(key_states, value_states)
        carrier = key_states.view_as(key_states)
        carrier.kvx_layer = self
        return carrier, value_states

    @untraced
    def attend(self, query, key, value, mask, scaling, softcap, sinks):
        """query [batch, heads, tokens, dim]; key, value: the new tokens' [batch, kv_heads, tokens,
        dim], value None in a latent layer; mask: bool [batch, all positions] or None. Returns
        [batch, tokens, heads, v_dim]."""
        batch, heads, tokens, _ = query.shape
        rows = self.owner.rows_of(mask, self.length, tokens, batch)
        with self.shared.lock:  # a step at a time, also where copies run in other threads
            self.shared.free_unused()
            counts = [self.cache.num_tokens(sequence) for sequence in self.sequences]
            try:
                out = self._append_rows(rows, query, key, value, scaling, softcap, sinks)
            except BaseException:  # Ctrl-C too: rows must not differ in what they store
                self._truncate_sequences(counts)
                raise
        self.length += tokens
        return out

    def _append_rows(self, rows, query, key, value, scaling, softcap, sinks):
        batch, heads, tokens, _ = query.shape
        options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": sinks}
        shape = (batch, tokens, heads, self.cache.v_head_dim)
        if rows is None and tokens == 1:
            out = query.new_empty(shape)
            with self.cache.step([(sequence, 1) for sequence in self.sequences]):
                v = None if value is None else value[:, :, 0]
                self.cache.append_and_attend(
                    0, query[:, :, 0], key[:, :, 0], v, out[:, 0], **options
                )
        else:
            # Hidden tokens that have none before them get zeros: nothing reads these.
            out = query.new_empty(shape) if rows is None else query.new_zeros(shape)
            for b in range(batch):
                for run in [Run(0, tokens, True)] if rows is None else rows[b]:
                    v = None if value is None else run.of(value[b])
                    states = (run.of(query[b]), run.of(key[b]), v, out[b, run.first : run.end])
                    if run.is_stored:
                        self._append(self.sequences[b], *states, options)
                    elif self.cache.num_tokens(self.sequences[b]):
                        self._attend_hidden(self.sequences[b], *states, options)
        return out

    def _append(self, sequence, query, key, value, out, options):
        first = 0
        while first < len(query):
            # On a GPU a step takes a limited number of tokens (kvx.Cache.max_step_tokens).
            part = slice(first, first + self.cache.max_step_tokens(sequence))
            with self.cache.step([(sequence, len(query[part]))]):
                v = None if value is None else value[part]
                self.cache.append_and_attend(0, query[part], key[part], v, out[part], **options)
            first = part.stop

    def _attend_hidden(self, sequence, query, key, value, out, options):
        """The queries of hidden tokens see the stored ones before them. The verbs append as they
        attend, so rows of zeros are appended, seen by none, and dropped; a page's scale does not
        grow by them."""
        room = self.owner.block_size - self.cache.num_tokens(sequence) % self.owner.block_size
        count = min(room, self.cache.max_step_tokens(sequence))  # within a block, as trees need it
        for first in range(0, len(query), count):
            part = slice(first, first + count)
            tokens = len(query[part])
            unseen = torch.zeros((tokens, tokens), dtype=torch.uint8, device=query.device)
            k, v = (None if x is None else torch.zeros_like(x[part]) for x in (key, value))
            self.cache.begin_step([(sequence, tokens)])
            try:
                self.cache.append_and_attend(
                    0, query[part], k, v, out[part], tree_mask=unseen, **options
                )
            finally:
                self.cache.cancel_step()

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, STORED

    def get_max_length(self):
        return self.window or self.owner.max_tokens

    def reset(self):
        for position, sequence in enumerate(self.sequences):
            self.cache.free_sequence(sequence)
            self.sequences[position] = self.cache.create_sequence()
        self.length = 0

    def crop(self, tokens_to_remove):
        raise UnsupportedError("a single layer cannot be cropped; crop the kvx.hf.Cache")

    def truncate(self, length, tokens):
        """Keeps ``length`` positions, of which sequence b stores tokens[b]."""
        if length >= self.length:
            return
        self._truncate_sequences(tokens)
        self.length = length

    def _truncate_sequences(self, counts):
        for sequence, count in zip(self.sequences, counts):
            self.cache.truncate(sequence, count)

    def select(self, indices):
        """Row i of the batch becomes what row indices[i] was. A row that comes twice is forked: its
        blocks are shared until one of the two writes to them."""
        if not self.is_initialized:
            return
        for b, sequence in enumerate(self.sequences):
            if b not in indices:
                self.cache.free_sequence(sequence)
        chosen, taken = [], set()
        for b in indices:
            sequence = self.sequences[b]
            chosen.append(self.shared.fork(sequence) if b in taken else sequence)
            taken.add(b)
        self.sequences[:] = chosen

    def reorder_cache(self, beam_idx):
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self.select(indices.tolist())

    def batch_repeat_interleave(self, repeats):
        self.select(repeated(len(self.sequences), repeats))

    def offload(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")

    def prefetch(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")


def repeated(batch, repeats):
    return [b for b in range(batch) for _ in range(repeats)]
