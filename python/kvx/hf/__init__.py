"""A transformers cache of kvx's packed keys and values, and the attention that reads them.

    import kvx.hf
    cache = kvx.hf.Cache(kvx.hf.enable(model).config, "nvfp4:auto")
    model.generate(**inputs, past_key_values=cache)

How the two meet: transformers never hands the cache to the attention function. So ``update``
returns the new keys and values with the layer attached to them, and the function that ``enable``
registers appends them and attends in one verb. Tokens that the attention mask hides are not stored
at all.
"""

from dataclasses import dataclass

from kvx.cache import Cache as PagedCache
from kvx.cache import Cost
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.formats import parse_recipe

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache as TransformersCache
    from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
except ImportError as error:
    raise ImportError(
        f"kvx.hf needs torch and transformers 5.19 or newer: pip install 'kvx[hf]' ({error})"
    ) from error

NAME = "kvx"  # of the attention implementation


def enable(model):
    """Makes ``model`` compute attention with kvx and returns it; its caches are then kvx.hf.Cache.

    Raises kvx.UnsupportedError: an encoder-decoder model, or one without transformers' attention
    interface.
    """
    _layer_windows(model.config)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface; kvx needs it"
        )
    return model


def _layer_windows(config):
    """Every layer's sliding window, 0 for none."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{config.model_type} is an encoder-decoder model; kvx.hf has no cache for it"
        )
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{config.model_type} shares keys and values between layers; kvx.hf cannot"
        )
    types, arguments = get_layer_types_and_kwargs(decoder)
    windows = []
    for index, (kind, argument) in enumerate(zip(types, arguments)):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"layer {index} is of the type {kind}; expected full_attention or sliding_attention"
            )
        windows.append(argument["sliding_window"] if kind == "sliding_attention" else 0)
    return windows


@dataclass(frozen=True)
class _Rows:
    """Which of a sequence's new tokens are stored: all from ``first`` on, or those of ``index``."""

    first: int = 0
    index: "torch.Tensor | None" = None

    def of(self, tokens):
        """tokens: [tokens, heads, head_dim]."""
        return tokens[self.first :] if self.index is None else tokens[self.index]


class Layer(CacheLayerMixin):
    """One layer's keys and values: a kvx cache of one layer, a sequence a row of the batch."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: "Cache", index: int, recipe: str, window: int):
        super().__init__()
        self.owner = owner
        self.index = index
        self.recipe = recipe
        self.window = window
        self.is_sliding = window > 0
        self.length = 0  # positions seen, hidden ones included
        self.cache: PagedCache | None = None
        self.sequences: list[int] = []

    def lazy_initialization(self, key_states, value_states):
        if key_states.device.type != "cpu":
            raise UnsupportedError(
                f"keys lie on {key_states.device}; kvx.hf works on the CPU so far"
            )
        batch, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cache = PagedCache(
            num_layers=1,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=value_states.shape[-1],
            recipe=self.recipe,
            max_tokens=self.owner.max_tokens,
            max_sequences=max(batch, self.owner.max_batch),
            block_size=self.owner.block_size,
            layer_windows=[self.window] if self.window else [],
        )
        self.sequences = [self.cache.create_sequence() for _ in range(batch)]
        self.is_initialized = True

    @property
    def batch_size(self):
        return len(self.sequences)

    def update(self, key_states, value_states, *args, **kwargs):
        """Returns the new keys and values, which carry the layer to the attention function."""
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
        carrier = key_states.view_as(key_states)
        carrier.kvx_layer = self
        return carrier, value_states

    def attend(self, query, key, value, mask, scaling, softcap, sinks):
        """query [batch, heads, tokens, dim]; key, value: the new tokens' [batch, kv_heads, tokens,
        dim]; mask: bool [batch, all positions] or None. Returns [batch, tokens, heads, dim]."""
        batch, heads, tokens, _ = query.shape
        rows = self.owner.rows_of(mask, self.length, tokens, batch)
        options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": sinks}
        shape = (batch, tokens, heads, value.shape[-1])
        if rows is None and tokens == 1:
            out = query.new_empty(shape)
            with self.cache.step([(sequence, 1) for sequence in self.sequences]):
                self.cache.append_and_attend(
                    0, query[:, :, 0], key[:, :, 0], value[:, :, 0], out[:, 0], **options
                )
        else:
            # A hidden token's output is read by nobody, but must be a number.
            out = query.new_empty(shape) if rows is None else query.new_zeros(shape)
            for b in range(batch):
                stored = _Rows() if rows is None else rows[b]
                self._append_sequence(b, stored, query[b], key[b], value[b], out[b], options)
        self.length += tokens
        return out

    def _append_sequence(self, b, stored, query, key, value, out, options):
        # [heads, tokens, dim] to the verbs' [tokens, heads, dim]: a view.
        q, k, v = (stored.of(x.transpose(0, 1)) for x in (query, key, value))
        target = stored.of(out)
        sequence = self.sequences[b]
        first = 0
        while first < len(q):
            # With wide ends a step ends where a block ends (kvx.Cache.max_step_tokens).
            count = min(len(q) - first, self.cache.max_step_tokens(sequence))
            part = slice(first, first + count)
            with self.cache.step([(sequence, count)]):
                self.cache.append_and_attend(0, q[part], k[part], v[part], target[part], **options)
            first += count
        if stored.index is not None:
            out[stored.index] = target

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

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
        for sequence, count in zip(self.sequences, tokens):
            self.cache.truncate(sequence, count)
        self.length = length

    def select(self, indices):
        """Row i of the batch becomes what row indices[i] was. A row that comes twice is forked: its
        blocks are shared until one of the two writes to them."""
        for b, sequence in enumerate(self.sequences):
            if b not in indices:
                self.cache.free_sequence(sequence)
        chosen, taken = [], set()
        for b in indices:
            sequence = self.sequences[b]
            chosen.append(self.cache.fork_sequence(sequence) if b in taken else sequence)
            taken.add(b)
        self.sequences = chosen

    def reorder_cache(self, beam_idx):
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self.select(indices.tolist())

    def batch_repeat_interleave(self, repeats):
        self.select(_repeated(len(self.sequences), repeats))

    def offload(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")

    def prefetch(self):
        raise UnsupportedError("a kvx cache cannot be offloaded")


class Cache(TransformersCache):
    """A transformers cache in the formats of a kvx recipe.

    config:     the model's; its attention implementation must be kvx (kvx.hf.enable)
    recipe:     ``"int8"``, ``"int8/int4"``, ``"nvfp4:auto"``, ...
    max_tokens: of one sequence, padding counted; the model's max_position_embeddings when None.
                Memory is mapped for all of it and used as tokens come.
    layer_recipes: other recipes for some layers, {0: "bf16"}
    max_batch:  rows that batch_repeat_interleave() may lead to; the first call's rows when 0
    block_size: tokens a block

    Raises kvx.Error for a recipe that does not exist, kvx.UnsupportedError for a model that kvx.hf
    cannot serve. Later calls raise kvx.UnsupportedError for what it cannot do (4-D masks,
    gradients, another attention implementation) and kvx.OutOfRangeError past max_tokens.
    """

    def __init__(
        self, config, recipe, *, max_tokens=None, layer_recipes=None, max_batch=0, block_size=64
    ):
        windows = _layer_windows(config)
        self.config = config.get_text_config(decoder=True)
        self.max_tokens = max_tokens or getattr(self.config, "max_position_embeddings", None)
        if not self.max_tokens:
            raise Error(
                f"max_tokens is {max_tokens}; {config.model_type} names no limit of its own"
            )
        self.max_batch = max_batch
        self.block_size = block_size
        self.recipe = recipe
        layer_recipes = layer_recipes or {}
        for text in (recipe, *layer_recipes.values()):
            parse_recipe(text)  # refused here rather than at the first token
        unknown = sorted(set(layer_recipes) - set(range(len(windows))))
        if unknown:
            raise Error(f"layer_recipes names layer {unknown[0]}; the model has {len(windows)}")
        super().__init__(
            layers=[
                Layer(self, index, layer_recipes.get(index, recipe), window)
                for index, window in enumerate(windows)
            ]
        )
        self._waiting: Layer | None = None  # updated, not yet attended
        self._columns = None  # bool [batch, positions]: what the sequences store; None for all
        self._rows_key = self._rows = None

    def __repr__(self):
        return f"kvx.hf.Cache({self.recipe!r}, {len(self.layers)} layers)"

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self._waiting is not None or self.config._attn_implementation != NAME:
            self._waiting = None
            raise UnsupportedError(
                f"the attention implementation is {self.config._attn_implementation!r} and does "
                f"not read a kvx cache; call kvx.hf.enable(model)"
            )
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._waiting = self.layers[layer_idx]
        return states

    def take_waiting(self, key):
        """The layer that these keys were appended for."""
        layer = getattr(key, "kvx_layer", None)
        if layer is not self._waiting:
            raise UnsupportedError("keys and values were changed between update() and attention")
        self._waiting = None
        return layer

    def rows_of(self, mask, past, tokens, batch):
        """Which new tokens each sequence stores: a _Rows each, or None for all of all.

        The same for every layer of a forward pass, so it is worked out once.
        """
        key = (None if mask is None else id(mask), past, tokens)
        if key == self._rows_key and past > 0:
            return self._rows
        if mask is None:
            mask = torch.ones((batch, past + tokens), dtype=torch.bool)
        if mask.shape != (batch, past + tokens):
            raise Error(
                f"attention_mask has the shape {list(mask.shape)}; expected [{batch}, "
                f"{past + tokens}], all positions of the cache and the new ones"
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
        self._rows = None if bool(mask[:, past:].all()) else [_rows_of(row[past:]) for row in mask]
        self._rows_key = key
        return self._rows

    def crop(self, tokens_to_remove):
        """Forgets the last positions: a negative number of them, or (positive) all from there on.

        Raises kvx.UnsupportedError where that would cut a block that is no longer in 16 bits (wide
        ends; a multiple of block_size can go), kvx.OutOfRangeError where a sliding window has left
        tokens behind that the shorter sequence reads.
        """
        length = self.get_seq_length()
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if kept < 0:
            raise OutOfRangeError(
                f"{-tokens_to_remove} positions are to go; the cache has {length}"
            )
        if kept >= length:
            return
        tokens = self._stored_tokens(kept)
        # Sliding layers first: they alone may refuse what the others allow.
        for layer in sorted(self.layers, key=lambda layer: not layer.is_sliding):
            layer.truncate(kept, tokens)
        self._columns = None if self._columns is None else self._columns[:, :kept]
        self._rows_key = None

    def _stored_tokens(self, length):
        if self._columns is None:
            return [length] * self.layers[0].batch_size
        return self._columns[:, :length].sum(1).tolist()

    def reset(self):
        super().reset()
        self._waiting = self._columns = self._rows_key = None

    def _select(self, indices):
        for layer in self.layers:
            layer.select(indices)
        if self._columns is not None:
            self._columns = self._columns[indices]
        self._rows_key = None

    def reorder_cache(self, beam_idx):
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self._select(torch.arange(self.batch_size)[indices].tolist())

    def batch_repeat_interleave(self, repeats):
        self._select(_repeated(self.batch_size, repeats))

    def memory(self):
        """Bytes used by all layers together (whole blocks), codes and scales."""
        caches = [layer.cache for layer in self.layers if layer.cache is not None]
        return sum(cache.memory().used for cache in caches)

    def cost(self, num_tokens) -> Cost:
        """What the recipe costs at ``num_tokens`` tokens a row, all layers together.

        Raises kvx.Error: no keys and values have come yet, whose sizes it follows from.
        """
        if any(layer.cache is None for layer in self.layers):
            raise Error("the cache is empty; its cost follows from the first keys and values")
        costs = [layer.cache.cost(num_tokens) for layer in self.layers]
        bytes_per_token = sum(cost.bytes_per_token for cost in costs)
        bits = sum(cost.bits_per_value for cost in costs) / len(costs)
        return Cost(bits, bytes_per_token, int(2**30 / bytes_per_token))


def _repeated(batch, repeats):
    return [b for b in range(batch) for _ in range(repeats)]


def _rows_of(shown):
    """shown: bool [tokens]."""
    index = shown.nonzero().squeeze(1)
    is_left_padded = len(index) == 0 or len(shown) - int(index[0]) == len(index)
    return _Rows(first=len(shown) - len(index)) if is_left_padded else _Rows(index=index)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **kwargs,
):
    """transformers' attention function: appends what update() handed over, and attends."""
    layer = getattr(key, "kvx_layer", None)
    if layer is None:
        raise UnsupportedError(
            "attention without a kvx cache; pass past_key_values=kvx.hf.Cache(model.config, "
            "recipe), or set another attention implementation"
        )
    layer.owner.take_waiting(key)
    if dropout:
        raise UnsupportedError(
            f"dropout is {dropout}; kvx.hf computes inference (call model.eval())"
        )
    if query.requires_grad or key.requires_grad or value.requires_grad:
        raise UnsupportedError("gradients are wanted; kvx.hf computes inference (torch.no_grad())")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or position_bias is not None:
        raise UnsupportedError("attention that is not causal, or has a position bias")
    if (sliding_window or 0) != layer.window:
        raise UnsupportedError(
            f"layer {layer.index} attends with a window of {sliding_window}; its cache has "
            f"{layer.window}"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask has {attention_mask.dim()} dimensions; expected the 2-D padding mask"
        )
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    out = layer.attend(query, key, value, attention_mask, scaling, softcap, sinks)
    return out, None


def padding_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    allow_is_causal_skip=True,
    use_vmap=False,
    **kwargs,
):
    """transformers' mask function: the 2-D padding mask as it is, or None when nothing is hidden.

    Raises kvx.UnsupportedError: a pattern beyond causal, window and padding (packed sequences,
    images that see each other).
    """
    if not allow_is_causal_skip or use_vmap:
        raise UnsupportedError("a mask that is more than causal, window and padding")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)

from kvx.hf.compare import compare  # noqa: E402  it needs what stands above
