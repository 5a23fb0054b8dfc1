"""Cache: paged K and V of several sequences, stored by a recipe, with attention over the bytes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvx import _core
from kvx.arrays import checked_array, new_output, token_list
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.files import path_bytes
from kvx.html import table
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, Device, Path, Stream, Tokens


@dataclass(frozen=True)
class Memory:
    """Bytes of a cache: all that is allocated, and what blocks in use take."""

    allocated: int
    used: int
    used_codes: int
    used_scales: int
    used_padding: int


@dataclass(frozen=True)
class Cost:
    """What a recipe costs at ``num_tokens`` tokens a sequence, its full-precision window included."""

    bits_per_value: float
    bytes_per_token: float
    tokens_per_gib: int


@dataclass(frozen=True)
class HostTier:
    """A host tier: bytes allocated, and bytes of blocks that can be found. Counts of blocks that
    were stored, loaded, damaged, and dropped for lack of room."""

    allocated: int
    held: int
    stored: int
    loaded: int
    bad: int
    dropped: int
    last_problem: str


@dataclass(frozen=True)
class Tier:
    """A tier behind the cache, ``"host"``, ``"disk"`` or ``"store"``: bytes allocated, and bytes of blocks that
    can be found. Counts of blocks that came, were loaded, moved to the tier below, were damaged,
    and were dropped for lack of room. Calls of a store that failed. An upper bound of what 99 % of the loads took, in
    microseconds, within a factor of 2."""

    name: str
    allocated: int
    held: int
    stored: int
    loaded: int
    moved_down: int
    bad: int
    dropped: int
    failed_calls: int
    load_p99_us: int
    last_problem: str

    @classmethod
    def of_parts(cls, parts: "Sequence[Tier]") -> "Tier":
        """The tiers of several caches as one: sums, the slowest's latency, one of the problems."""
        values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(
            name=parts[0].name,
            load_p99_us=max(values.pop("load_p99_us")),
            last_problem=next(filter(None, values.pop("last_problem")), ""),
            **{name: sum(counts) for name, counts in values.items() if name != "name"},
        )


@dataclass(frozen=True)
class LoadReport:
    """What load_prefixes did with a file's blocks. ``known`` ones were in the cache already. A bad
    block is a miss, never data."""

    blocks: int
    loaded: int
    known: int
    bad: int
    no_room: int
    first_problem: str


@dataclass(frozen=True)
class EventPublisher:
    """Where a cache's events are sent from, and counts since it began. A dropped event found the
    queue full."""

    endpoint: str
    replay_endpoint: str
    events: int
    batches: int
    dropped: int
    replays: int


@dataclass(frozen=True)
class ExportState:
    """Bytes of an offer, bytes sent to all importers, importers that took it and that were refused,
    and why the last one was. Of an offer layer by layer also the cache's layers, those that are there,
    and why the others will not come; its bytes are 0 before the step that computes them."""

    bytes: int
    bytes_sent: int
    taken: int
    refused: int
    last_refusal: str
    layers: int = 0
    layers_there: int = 0
    problem: str = ""


class Export:
    """A sequence on offer to other processes, by Cache.export_sequence or, layer by layer, by
    Cache.export_layers. It needs neither the sequence nor the cache any more, once the step that
    completes it is over; ``with`` ends it, and so does close()."""

    def __init__(self, offer: _core.Export) -> None:
        self._offer = offer
        self.endpoint: str = offer.endpoint

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def state(self) -> ExportState:
        """What became of it so far. Raises kvx.Error: it is closed."""
        return ExportState(*self._offer.state())

    def wait(self, seconds: float) -> bool:
        """Waits until an importer has taken it, at most so long: whether one has."""
        if not 0 <= seconds <= 86400:
            raise Error(f"seconds is {seconds}; expected 0 to 86400")
        return self._offer.wait(round(seconds * 1000))

    def close(self) -> None:
        """Ends the offer: importers that are not done find nobody any more."""
        self._offer.close()


@dataclass(frozen=True)
class Import:
    """A sequence that came from another process, bytes that came over the endpoint, requests that had
    no answer in time, and whether it was read from the exporter's shared memory instead."""

    sequence: int
    bytes: int
    asked_again: int
    shared: bool


@dataclass(frozen=True)
class Saturation:
    """Numbers that packed blocks could not store as they came, int64 [num_layers, num_kv_heads].

    k_clipped, v_clipped: finite, and beyond the largest code of a static scale
    k_nonfinite, v_nonfinite: NaN or infinite, without a code under given or page-shared scales
    """

    k_clipped: NDArray[np.int64]
    v_clipped: NDArray[np.int64]
    k_nonfinite: NDArray[np.int64]
    v_nonfinite: NDArray[np.int64]

    @classmethod
    def _of(cls, layers: list[Any]) -> "Saturation":
        # [layers, K and V, heads, clipped and nonfinite]
        counts = np.array(layers, np.int64)
        return cls(*(counts[:, side, :, kind] for kind in (0, 1) for side in (0, 1)))

    @property
    def clipped(self) -> int:
        """All of K and V."""
        return int(self.k_clipped.sum() + self.v_clipped.sum())


class Cache(_core.PagedCache):
    """Paged keys and values of up to ``max_sequences`` sequences, in the formats of a recipe.

    num_layers, num_kv_heads, head_dim: the model's; v_head_dim when values differ from keys
    latent:          a latent cache (MLA): values are the first v_head_dim numbers of the keys' rows,
                     which are stored once; append_and_attend takes None for v. DeepSeek-V3's has
                     num_kv_heads=1, head_dim=576, v_head_dim=512
    recipe:          ``"int8"``, ``"int8/int4"``, ``"nvfp4:auto"``; kvx.recipe_options() lists more.
                     ``"tuned:FILE"`` is a tuned recipe of this model, ``"tuned:FILE,recent=128"``
                     the same with another full-precision window
    max_tokens:      of one sequence. Memory is mapped for all of it and used as tokens come.
    block_size:      tokens a block, 1 to 1024
    layer_windows:   a sliding window in tokens for each layer, 0 for none
    layer_overrides: another recipe for some layers: ``["0-1=bf16", "29=int8"]``
    head_overrides:  for some heads: ``["2:0,2:1=int8"]`` (layer:head)
    first_layer:     of a tuned recipe, for a cache of some of the model's layers: which of its
                     layers is this cache's first; None when the cache has all of them
    memory_budget_bytes: of all blocks; 0 for what max_sequences full sequences need
    prefix_model:    names what computes K and V, and turns prefixes and files on: blocks are found
                     again by their tokens, in caches and files of the same name
    prefix_hash:     of the tokens, ``"xxh3"``, or ``"sha256"`` where tenants share a cache
    host_tier_bytes: of host memory for copies of blocks that can be found: what the cache has no
                     room for comes back from there. 0 for none; needs prefix_model
    host_tier_folder: takes them from a disk instead, in files that are gone with the process
    tiers:           instead of these two, the tiers behind the cache, nearest first:
                     ``"host(8GiB), disk(/folder, 200GiB)"``; blocks move down when room is needed
                     and come back when a sequence begins with them. ``store(NAME)`` is one of
                     kvx.register_store. Needs prefix_model
    tier_shares:     how many caches share the budgets of these tiers: each takes its part
    device:          ``"cpu"``, ``"cuda"`` or ``"cuda:1"``: where blocks lie and verbs run, and
                     where all arrays of this cache must lie
    max_step_tokens: of all entries of a step together, on a GPU; its tables pass through memory of
                     that size
    max_speculative_tokens: of a sequence in steps with a speculative mark, since the last that
                     stayed: truncate() and end_step() reach back to any of them bit for bit where
                     pages share scales, too. Costs memory for their rows
    stream:          of the GPU, which the cache's own work goes to: torch's, CuPy's or a
                     cudaStream_t as a number; the device's default stream when None

    Tokens come in steps: begin_step, append_and_attend once for every layer, end_step; ``step()``
    does the first and the last. Threads may share a cache; its calls wait for each other.

    Raises kvx.Error naming what does not fit, kvx.OutOfRangeError for a budget below one sequence
    or more memory, or room on a disk, than there is, kvx.UnsupportedError: no such GPU, or a
    build without CUDA.
    """

    @in_words
    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        recipe: str,
        max_tokens: int,
        max_sequences: int = 1,
        v_head_dim: int | None = None,
        latent: bool = False,
        block_size: int = 64,
        layer_windows: Sequence[int] = (),
        layer_overrides: Sequence[str] = (),
        head_overrides: Sequence[str] = (),
        first_layer: int | None = None,
        memory_budget_bytes: int = 0,
        prefix_model: str | None = None,
        prefix_hash: str = "xxh3",
        host_tier_bytes: int = 0,
        host_tier_folder: Path | None = None,
        tiers: str = "",
        tier_shares: int = 1,
        device: Device = "cpu",
        max_step_tokens: int = 4096,
        max_speculative_tokens: int = 0,
        stream: Stream = None,
    ) -> None:
        super().__init__(
            num_layers,
            num_kv_heads,
            head_dim,
            head_dim if v_head_dim is None else v_head_dim,
            latent,
            list(layer_windows),
            recipe,
            first_layer,
            list(layer_overrides),
            list(head_overrides),
            block_size,
            max_sequences,
            max_tokens,
            memory_budget_bytes,
            prefix_model,
            prefix_hash,
            host_tier_bytes,
            b"" if host_tier_folder is None else path_bytes(host_tier_folder, "host_tier_folder"),
            tiers,
            tier_shares,
            str(device),
            max_step_tokens,
            max_speculative_tokens,
            stream,
        )
        self.recipe = recipe
        self.prefix_model = prefix_model

    def __reduce__(self) -> NoReturn:
        """Refuses pickle and copy: the bytes belong to this process."""
        raise UnsupportedError(
            f"a kvx.Cache cannot be pickled or copied: its bytes belong to this process. Pickle "
            f"its recipe, {self.recipe!r}, and make another; save_sequence() takes tokens to "
            f"another process, and fork_sequence() copies a sequence within this one"
        )

    def _need_prefixes(self, call: str) -> None:
        if self.prefix_model is None:
            raise UnsupportedError(
                f"{call} needs a name for what computes keys and values, such as the model's; make "
                f"the cache by kvx.Cache(..., prefix_model=...)"
            )

    def __repr__(self) -> str:
        place = ", latent" if self.is_latent else ""
        place += "" if self.device == "cpu" else f", on {self.device}"
        return (
            f"kvx.Cache({self.recipe!r}, {self.num_layers} layers, {self.num_kv_heads} KV heads, "
            f"head_dim {self.k_head_dim}/{self.v_head_dim}{place})"
        )

    def _repr_html_(self) -> str:
        memory = self.memory()
        facts: list[tuple[str, str | int]] = [
            ("recipe", self.recipe),
            ("layers", self.num_layers),
            ("KV heads", self.num_kv_heads),
            ("head_dim", f"{self.k_head_dim} / {self.v_head_dim}"),
            ("bytes in use", memory.used),
            ("of these codes", memory.used_codes),
            ("of these scales", memory.used_scales),
            ("bytes allocated", memory.allocated),
        ]
        return table(("kvx.Cache", ""), facts)

    @property
    def device(self) -> str:
        """``"cpu"``, or the GPU: ``"cuda:0"``."""
        return super().device

    @in_words
    def create_sequence(self) -> int:
        """A new, empty sequence: its number.

        Raises kvx.OutOfRangeError: all max_sequences are in use.
        """
        return super().create_sequence()

    @in_words
    def free_sequence(self, sequence: int) -> None:
        """Gives a sequence's blocks back. Raises kvx.Error: no such sequence, or a step is open."""
        super().free_sequence(sequence)

    @in_words
    def fork_sequence(self, sequence: int) -> int:
        """A fork with the same tokens in the same blocks, which are shared until one of the two
        writes: its number. Raises as create_sequence and free_sequence."""
        return super().fork_sequence(sequence)

    @in_words
    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Forgets the tokens from ``num_tokens`` on.

        Raises kvx.OutOfRangeError: more than there are, or a sliding window has left tokens behind
        that the shorter sequence reads; kvx.UnsupportedError: a cut inside a block that has left
        the full-precision window, or inside a page with a shared scale.
        """
        super().truncate(sequence, num_tokens)

    @in_words
    def num_tokens(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return super().num_tokens(sequence)

    @in_words
    def max_step_tokens(self, sequence: int) -> int:
        """The most tokens of this sequence that one step takes: what is left of max_tokens, and on
        a GPU at most max_step_tokens."""
        return super().max_step_tokens(sequence)

    @in_words
    def begin_step(  # type: ignore[override]
        self, entries: Iterable[tuple[int, int]], *, speculative: Sequence[bool] = ()
    ) -> None:
        """Opens a step: entries are (sequence, num_tokens), each sequence once.

        speculative: of each entry, whether some of its tokens may go again (max_speculative_tokens)

        Raises kvx.Error or kvx.OutOfRangeError naming the entry; nothing has changed then.
        """
        entries = entries if isinstance(entries, list) else list(entries)
        super().begin_step(entries, [bool(mark) for mark in speculative])

    @in_words
    def end_step(self, kept_tokens: Sequence[int] | None = None) -> None:
        """Makes the step's tokens part of their sequences: of each entry the first kept_tokens, as
        a verification accepts them; None: all.

        Raises kvx.Error: a layer has not appended, or a count beyond the entry's tokens. The step
        stays open then.
        """
        super().end_step(None if kept_tokens is None else list(kept_tokens))

    @contextmanager
    def step(self, entries: Iterable[tuple[int, int]]) -> Iterator["Cache"]:
        """``with cache.step([(sequence, num_tokens), ...]):`` appends in every layer inside.

        The tokens are part of the sequences afterwards; an exception inside drops them.
        Raises kvx.Error as begin_step and end_step do.
        """
        self.begin_step(entries)
        try:
            yield self
        except BaseException:
            self.cancel_step()
            raise
        try:
            self.end_step()
        except Error:  # a layer has not appended
            self.cancel_step()
            raise

    @in_words
    def append_and_attend(  # type: ignore[override]
        self,
        layer: int,
        q: ArrayT,
        k: Array,
        v: Array | None,
        out: ArrayT | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        precision: Literal["accurate", "fast"] = "accurate",
        tree_mask: Array | None = None,
        stream: Stream = None,
    ) -> ArrayT:
        """Appends the step's keys and values to a layer and returns attention over all its tokens.

        Rows are the entries' tokens, one entry after the other; each query sees its own token and
        those before it, within the layer's window.

        q:   [tokens, num_q_heads, head_dim], after RoPE; num_q_heads a multiple of num_kv_heads
        k:   [tokens, num_kv_heads, head_dim], after RoPE
        v:   [tokens, num_kv_heads, v_head_dim]; None in a latent cache
        out: [tokens, num_q_heads, v_head_dim], apart from the inputs; None makes one like q
            (JAX: NumPy's, float32 for bfloat16, since JAX's own cannot be written; on a GPU JAX's
            need an out of torch or CuPy)
        softmax_scale: 1 / sqrt(head_dim) when None
        softcap: scores become softcap * tanh(score / softcap); 0 for none
        sinks: float32 [num_q_heads], logits that take part in the softmax without a value
        precision: "accurate", or "fast", which may be off by 8e-3 of the output's size (on a GPU
            both are the same)
        tree_mask: uint8 [tokens, new tokens of an entry or more], contiguous: where row i has other
            than 0 in column j, token i sees the j-th token of its entry, as in a tree of drafts; it
            sees all earlier tokens. None is causal. kvx.UnsupportedError: with a full-precision
            window, an entry that goes over a block's end
        stream: on a GPU, the stream that the verb is in order with: it runs after the earlier
            work of that stream, and later work reads a complete ``out``. None is the current stream
            of out's library (torch, CuPy). The call returns when its work is on its way.

        float32, float16 or bfloat16, in any strides but a contiguous head_dim; nothing is copied.
        Raises kvx.Error: another precision, no open step, a layer twice, another shape, dtype or
        device.
        """
        if precision not in ("accurate", "fast"):
            raise Error(f"precision is {precision!r}; expected 'accurate' or 'fast'")
        if out is None:
            heads = tuple(checked_array(q, "q").shape[:2])
            shape = (*heads, self.v_head_dim)
            out = cast(ArrayT, new_output(q, shape, self.device, "out is None and q"))
        super().append_and_attend(
            layer,
            q,
            k,
            v,
            out,
            softmax_scale,
            softcap,
            sinks,
            precision == "fast",
            tree_mask,
            stream,
        )
        return out

    @overload  # type: ignore[override]
    def gather(
        self,
        sequence: int,
        layer: int,
        first_token: int = 0,
        num_tokens: int | None = None,
        *,
        like: None = None,
        out: None = None,
        stream: Stream = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    @overload
    def gather(
        self,
        sequence: int,
        layer: int,
        first_token: int = 0,
        num_tokens: int | None = None,
        *,
        like: ArrayT | None = None,
        out: tuple[ArrayT, ArrayT] | None = None,
        stream: Stream = None,
    ) -> tuple[ArrayT, ArrayT]: ...
    @in_words
    def gather(
        self,
        sequence: int,
        layer: int,
        first_token: int = 0,
        num_tokens: int | None = None,
        *,
        like: Array | None = None,
        out: tuple[Array, Array] | None = None,
        stream: Stream = None,
    ) -> tuple[Any, Any]:
        """The stored keys and values of a sequence's tokens, decoded, rotations undone.

        Returns (k, v): [num_tokens, num_kv_heads, head_dim], float32 NumPy arrays, or arrays of
        ``like``'s library and dtype (on a GPU like is needed: a torch tensor or CuPy array there).
        num_tokens: up to the sequence's end when None.
        out:    (k, v) to write to, in any strides but a contiguous head_dim
        stream: as in append_and_attend
        Raises kvx.OutOfRangeError: tokens beyond the sequence; kvx.Error: arrays of another
        shape, dtype or device.
        """
        there = self.num_tokens(sequence)
        if num_tokens is None:
            num_tokens = there - first_token
        if first_token < 0 or not 0 <= num_tokens <= there - first_token:
            raise OutOfRangeError(
                f"tokens {first_token} to {first_token + num_tokens} are requested; the sequence "
                f"has {there}"
            )
        k_shape = (num_tokens, self.num_kv_heads, self.k_head_dim)
        if out is None:
            v_shape = (num_tokens, self.num_kv_heads, self.v_head_dim)
            new = (new_output(like, shape, self.device, "like") for shape in (k_shape, v_shape))
            k, v = new
        else:
            k, v = out
        if tuple(checked_array(k, "out's k").shape) != k_shape:
            raise Error(f"out's k has the shape {list(k.shape)}; expected {list(k_shape)}")
        super().gather(sequence, layer, first_token, k, v, stream)
        return k, v

    @in_words
    def create_sequence_from(  # type: ignore[override]
        self,
        tokens: Tokens,
        *,
        adapter: str = "",
        image: str = "",
        tenant: str = "",
        session: str = "",
        by_layer: bool = False,
    ) -> int:
        """A new sequence that begins with the longest cached prefix of ``tokens``: its number.

        num_tokens(sequence) is how many it has; the last of ``tokens`` is never among them, so that
        its logits can be computed. adapter, image and tenant set blocks of equal tokens apart;
        session names the conversation, for end_session and delete_session, and sets nothing apart.
        by_layer: do not wait for blocks of host memory and disks (docs/tiers.md): each layer of the
        sequence's first step waits for its own part of them, and until that step has ended, or
        end_loading(), nothing else is done with the sequence.
        Raises kvx.UnsupportedError: no prefix_model was given, or a tenant without sha256;
        kvx.OutOfRangeError: max_sequences are in use.
        """
        self._need_prefixes("create_sequence_from()")
        return super().create_sequence_from(
            token_list(tokens), adapter, image, tenant, session, by_layer
        )

    @in_words
    def wait_for_layer(self, sequence: int, layer: int) -> None:
        """Waits until a sequence that loads ``by_layer`` is there in layers 0 to ``layer``.

        A step's append_and_attend() does it. Raises kvx.InternalError, there too: a block did not
        come back as it went to its tier; cancel the step, and end_loading().
        """
        super().wait_for_layer(sequence, layer)

    @in_words
    def end_loading(self, sequence: int) -> int:
        """Waits for all layers of a sequence that loads ``by_layer``: the tokens that it has then.

        They are fewer than before where a block did not come back as it went to its tier. Raises
        kvx.Error: no such sequence, or it is in an open step.
        """
        return super().end_loading(sequence)

    @in_words
    def retain(  # type: ignore[override]
        self,
        sequence: int,
        first_token: int = 0,
        num_tokens: int | None = None,
        *,
        priority: int = 35,
        pin: bool = False,
        seconds: float | None = None,
    ) -> None:
        """How long blocks of these tokens stay in the pool when no sequence uses them.

        num_tokens: to the sequence's end when None, tokens that are still to come included
        priority:   0 (goes first) to 100; blocks of which nothing was said have 35
        pin:        never evicted, like all tokens before the range; half of the pool at most
        seconds:    nothing is said of the blocks any more after this time; None: never
        Of two calls the later one counts. Raises kvx.Error: no such sequence, a range or a number
        that cannot be; kvx.OutOfRangeError: too much is pinned; kvx.UnsupportedError: no
        prefix_model.
        """
        self._need_prefixes("retain()")
        if num_tokens is not None and num_tokens < 1:
            raise Error(f"num_tokens is {num_tokens}; expected None or 1 or more")
        if seconds is not None and not 0.001 <= seconds <= 3e8:
            raise Error(f"seconds is {seconds}; expected None or 0.001 to 3e8")
        milliseconds = 0 if seconds is None else round(seconds * 1000)
        super().retain(sequence, first_token, num_tokens or 0, priority, pin, milliseconds)

    @in_words
    def end_session(self, session: str) -> int:
        """The session is over: blocks that it alone used go first when room is wanted. Returns how
        many blocks of tokens. Raises kvx.Error: a sequence of it is in use."""
        self._need_prefixes("end_session()")
        return super().end_session(session)

    @in_words
    def delete_session(self, session: str) -> int:
        """Deletes the blocks that the session alone used, from every tier, and overwrites their
        bytes. Returns how many blocks of tokens. Raises as end_session."""
        self._need_prefixes("delete_session()")
        return super().delete_session(session)

    @in_words
    def erase_tenant(self, tenant: str) -> int:
        """Erases every cached block of a tenant from the cache, its tiers and their stores; how
        many of the cache and the tiers.

        What the blocks leave behind is overwritten with zeros, in all free blocks too, and a
        store's records of other caches and models go as well. Raises kvx.Error: an empty tenant, or
        one of whom a sequence or a prefetch is in use (nothing is erased); kvx.InternalError: a
        store kept its records (all else is erased; call again).
        """
        self._need_prefixes("erase_tenant()")
        return super().erase_tenant(tenant)

    @in_words
    def erase_session(  # type: ignore[override]
        self,
        tokens: Tokens,
        first_token: int = 0,
        *,
        adapter: str = "",
        image: str = "",
        tenant: str = "",
    ) -> int:
        """The same of a conversation: of the block with ``first_token`` and all that came after it.

        Blocks before it, which other conversations may share, stay. Raises kvx.OutOfRangeError:
        first_token is not in [0, len(tokens)]; kvx.Error: a sequence or a prefetch has such a
        block.
        """
        self._need_prefixes("erase_session()")
        return super().erase_session(token_list(tokens), first_token, adapter, image, tenant)

    @in_words
    def record_tokens(self, sequence: int, tokens: Tokens) -> None:
        """Records which tokens the sequence holds, in order, after the steps that added them.

        create_sequence_from finds blocks full of recorded tokens; files hold recorded tokens.
        Raises kvx.OutOfRangeError: more tokens than the sequence has.
        """
        super().record_tokens(sequence, token_list(tokens))

    @in_words
    def recorded_tokens(self, sequence: int) -> list[int]:
        """The tokens that were recorded, in order."""
        return super().recorded_tokens(sequence)

    @in_words
    def save_sequence(  # type: ignore[override]
        self, sequence: int, path: Path, *, zstd_level: int = 0
    ) -> None:
        """Writes the sequence to a checked file (docs/cache-file.md); all tokens must be recorded.

        Whatever fails, what was at ``path`` stays there. zstd_level 0 stores blocks as they are.
        Raises kvx.UnsupportedError: no prefix_model was given; kvx.Error: an open step, tokens
        that were not recorded, a file that cannot be written.
        """
        self._need_prefixes("save_sequence()")
        super().save_sequence(sequence, path_bytes(path), zstd_level)

    @in_words
    def load_sequence(self, path: Path) -> int:
        """A new sequence as it was saved: its number. All or nothing.

        Raises kvx.Error: a damaged file, or one of another cache (the message names the first
        difference); kvx.OutOfRangeError: no room.
        """
        self._need_prefixes("load_sequence()")
        return super().load_sequence(path_bytes(path))

    @in_words
    def export_sequence(  # type: ignore[override]
        self, sequence: int, endpoint: str = "tcp://127.0.0.1:*"
    ) -> Export:
        """Offers a sequence, all of whose tokens were recorded, to other processes (docs/transfer.md).

        Its bytes are copied to shared memory; it may be freed afterwards.
        endpoint: bound there, ``"tcp://ADDRESS:PORT"`` (port ``*``: any) or ``"ipc://PATH"``
        Raises kvx.Error as save_sequence, or an endpoint that cannot be bound;
        kvx.UnsupportedError: no prefix_model, or no libkvx_transfer.so.
        """
        self._need_prefixes("export_sequence()")
        return Export(super().export_sequence(sequence, endpoint))

    @in_words
    def export_layers(  # type: ignore[override]
        self, sequence: int, tokens: Tokens, endpoint: str = "tcp://127.0.0.1:*"
    ) -> Export:
        """Offers a sequence layer by layer, before the step that completes it (docs/transfer.md):
        importers get each layer while that step computes the next ones.

        tokens:   all that the sequence will have then, those that it has included
        endpoint: as export_sequence
        Raises kvx.Error: tokens that the sequence has are not recorded, or other ones, it is on its way
        already, or complete, or an endpoint that cannot be bound; kvx.OutOfRangeError: more than
        max_tokens; kvx.UnsupportedError: as export_sequence, or a recipe with order=turbomind.
        """
        self._need_prefixes("export_layers()")
        return Export(super().export_layers(sequence, token_list(tokens), endpoint))

    @in_words
    def import_sequence(  # type: ignore[override]
        self,
        endpoint: str,
        *,
        transcode: bool = False,
        seconds: float = 30.0,
        heads: tuple[int, int] | None = None,
    ) -> Import:
        """A new sequence as another process exported it. All or nothing.

        One that is offered layer by layer is taken as it is computed; this returns when all is there,
        and other threads may use the cache meanwhile.
        transcode: another format, block size or order is converted here
        seconds:   to wait without any progress
        heads:     (first, of): tensor parallelism. This cache's KV heads are those from ``first`` on
                   of an exporter's cache with ``of``; its sequence is offered layer by layer
        Raises kvx.Error: caches that differ (the message names both sides), or damaged bytes;
        kvx.OutOfRangeError: no room; kvx.UnsupportedError: nobody answers, no prefix_model, no
        libkvx_transfer.so, or heads of a sequence that is offered as a whole.
        """
        self._need_prefixes("import_sequence()")
        if not 0.001 <= seconds <= 86400:
            raise Error(f"seconds is {seconds}; expected 0.001 to 86400")
        first, of = (0, 0) if heads is None else heads
        if heads is not None and not 0 <= first <= of - self.num_kv_heads:
            raise Error(
                f"heads is {heads}; expected (first, of) with room for this cache's"
                f" {self.num_kv_heads} from first on"
            )
        milliseconds = round(seconds * 1000)
        return Import(*super().import_sequence(endpoint, transcode, milliseconds, first, of))

    @in_words
    def save_prefixes(self, path: Path, *, zstd_level: int = 0) -> None:  # type: ignore[override]
        """Writes all blocks that a new sequence could find. Errors as save_sequence."""
        self._need_prefixes("save_prefixes()")
        super().save_prefixes(path_bytes(path), zstd_level)

    @in_words
    def load_prefixes(self, path: Path) -> LoadReport:  # type: ignore[override]
        """Blocks of the file can be found from now on, as many as there is room for.

        Raises kvx.Error as load_sequence does; damaged blocks are reported instead.
        """
        self._need_prefixes("load_prefixes()")
        return LoadReport(**super().load_prefixes(path_bytes(path)))

    @in_words
    def publish_events(  # type: ignore[override]
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_batches: int = 10_000,
        high_water_mark: int = 100_000,
        queue_events: int = 16_384,
        data_parallel_rank: int = 0,
        integer_hashes: bool = False,
    ) -> EventPublisher:
        """Tells other processes which blocks the cache has, in vLLM's schema (docs/kv-events.md).

        Every block that can be found now is told at once, later ones as they come and go, from a
        thread of the library's own: no listener delays a step.
        endpoint:        a PUB socket is bound there; ``"tcp://127.0.0.1:*"`` takes a free port
        replay_endpoint: a ROUTER socket is bound there, which sends batches again
        buffer_batches:  kept for replay; high_water_mark: kept for a slow listener
        queue_events:    that may wait for the thread; more are dropped and counted
        integer_hashes:  the low 64 bits of a hash, not its 16 bytes
        Raises kvx.Error: an endpoint that cannot be bound; kvx.UnsupportedError: no prefix_model,
        or no libkvx_observe.so.
        """
        self._need_prefixes("publish_events()")
        super().publish_events(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint or "",
            topic=topic,
            buffer_batches=buffer_batches,
            high_water_mark=high_water_mark,
            queue_events=queue_events,
            data_parallel_rank=data_parallel_rank,
            integer_hashes=integer_hashes,
        )
        return self.event_publisher()

    def event_publisher(self) -> EventPublisher:  # type: ignore[override]
        """Where events are sent from, and how many were. Raises kvx.Error: none are."""
        return EventPublisher(*super().event_publisher())

    def host_tier(self) -> HostTier:
        """What the tiers together hold and have done so far; zeros without one."""
        tiers = self.tiers()
        problems = [tier.last_problem for tier in tiers if tier.last_problem]
        return HostTier(
            allocated=sum(tier.allocated for tier in tiers),
            held=sum(tier.held for tier in tiers),
            stored=sum(tier.stored for tier in tiers),
            loaded=sum(tier.loaded for tier in tiers),
            bad=sum(tier.bad for tier in tiers),
            dropped=sum(tier.dropped for tier in tiers),
            last_problem=problems[-1] if problems else "",
        )

    def tiers(self) -> list[Tier]:
        """What each tier holds and has done so far, nearest first."""
        return [Tier(**tier) for tier in super().tiers()]

    def memory(self) -> Memory:  # type: ignore[override]
        """Bytes allocated and used, of all sequences together."""
        return Memory(**super().memory())

    def saturation(self) -> Saturation:
        """What the KV heads of every layer could not store as it came, since the creation.

        On a GPU the call waits for the cache's stream.
        """
        return Saturation._of(super().head_counts())

    @in_words
    def cost(self, num_tokens: int) -> Cost:  # type: ignore[override]
        """What this cache's recipe costs at ``num_tokens`` tokens a sequence."""
        return Cost(**super().cost(num_tokens))
