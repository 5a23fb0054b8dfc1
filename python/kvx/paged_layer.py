"""PagedLayer: one layer's keys and values in pages that belong to an engine."""

from collections.abc import Sequence
from typing import Any, NoReturn, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvx import _core
from kvx.arrays import as_int64, checked_array, new_full, new_numbers, new_output
from kvx.errors import Error, OutOfRangeError, UnsupportedError
from kvx.paged_window import WindowPlan
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, Device, Stream


_NO_WINDOW = WindowPlan(None, None, None, None, None)


class PagedLayer(_core.PagedLayer):
    """The verbs of one layer over an engine's own pages, block tables and slots.

    recipe:           ``"int8"``, ``"nvfp4:auto,immediate"``; pages have no full-precision window of
                      their own, kvx.PagedWindow is one beside them.
                      ``"tuned:FILE"`` is a tuned recipe, which needs layer
    num_kv_heads, head_dim: the layer's; v_head_dim when values differ from keys
    latent:           a layer of a latent cache (MLA): values are the first v_head_dim numbers of the
                      keys' rows, which are stored once
    block_size:       tokens a page, 1 to 1024
    k_steps, v_steps: for a static format (source=given): a positive step for each group of each
                      head, value = code * step; fp8 has one group a head, and 1.0 without
    k_tensor_scales, v_tensor_scales: for nvfp4, a positive number for each head that multiplies the
                      scales of all its groups; 1.0 without. amax / (6 * 448) uses E4M3's range
    device:           ``"cpu"``, ``"cuda"`` or ``"cuda:N"``: where all arrays of all verbs lie
    layer:            which of a tuned recipe's layers this is, from 0
    max_tokens:       of a sequence; needed by a tuned recipe whose keys have block offsets

    ``pages`` is uint8 [num_pages, ...], ``page_bytes`` or more each, contiguous; only kvx
    reads what lies in a page, and all zeros is a legal page. Slots are page * block_size + offset.

    On a GPU pages begin on 16 bytes, and verbs are launched on the current stream of ``out``'s or
    ``pages``'s library, or on ``stream``. They wait for nothing, and allocate nothing but a
    workspace that grows with the first calls of a size: they may be captured into CUDA graphs,
    which the layer must outlive. The host does not see slots, lengths and tables there: what is out
    of range is skipped and counted by ``counters()``. Bytes of a page are the same as on the CPU
    unless ``order`` is ``"interleaved"``.

    Raises kvx.Error naming what does not fit; kvx.UnsupportedError: no such device.
    """

    @in_words
    def __init__(
        self,
        recipe: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        block_size: int = 64,
        k_steps: Sequence[float] = (),
        v_steps: Sequence[float] = (),
        k_tensor_scales: Sequence[float] = (),
        v_tensor_scales: Sequence[float] = (),
        device: Device = "cpu",
        layer: int | None = None,
        max_tokens: int = 0,
        latent: bool = False,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.block_size = block_size
        self.recipe = recipe
        super().__init__(
            recipe,
            num_kv_heads,
            head_dim,
            self.v_head_dim,
            block_size,
            [float(step) for step in k_steps],
            [float(step) for step in v_steps],
            [float(scale) for scale in k_tensor_scales],
            [float(scale) for scale in v_tensor_scales],
            str(device),
            layer,
            max_tokens,
            latent,
        )

    def __reduce__(self) -> NoReturn:
        """Refuses pickle and copy: tables and counters belong to this process."""
        raise UnsupportedError(
            f"a kvx.PagedLayer cannot be pickled or copied: its tables belong to this process. "
            f"Pickle its recipe, {self.recipe!r}, and its sizes, and make another"
        )

    def __repr__(self) -> str:
        rows = "latent rows" if self.is_latent else "heads"
        return (
            f"kvx.PagedLayer({self.recipe!r}, {self.num_kv_heads} {rows} of {self.head_dim}, "
            f"pages of {self.block_size} tokens and {self.page_bytes} bytes on {self.device})"
        )

    @property
    def is_latent(self) -> bool:
        """Whether values are a part of the keys' rows."""
        return super().is_latent

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, keys and values of block_size tokens, scales included."""
        return super().page_bytes

    @property
    def window_block_bytes(self) -> int:
        """Bytes of a block of a kvx.PagedWindow: bf16 keys and values of block_size tokens."""
        return super().window_block_bytes

    @property
    def order(self) -> str:
        """The order of a page's codes: ``"pool"``, or ``"interleaved"`` for 4-bit codes whose signs
        and magnitudes lie apart, which some GPUs decode faster. Pages of one order mean nothing in
        the other."""
        return super().order

    @property
    def needs_positions(self) -> bool:
        """Whether append() needs the tokens' positions: keys have block offsets."""
        return super().needs_positions

    @in_words
    def append(  # type: ignore[override]
        self,
        pages: Array,
        k: Array,
        v: Array | None,
        slots: Array,
        *,
        positions: Array | None = None,
        window_pages: Array | None = None,
        plan: WindowPlan | None = None,
        closes: bool = True,
        stream: Stream = None,
    ) -> int | None:
        """Stores new tokens. Returns how many numbers have no code under given scales; None on a
        GPU, where ``counters()`` has that number.

        k:     [tokens or more, num_kv_heads, head_dim], after RoPE; any strides of tokens and heads
        v:     [tokens or more, num_kv_heads, v_head_dim]; None in a latent layer
        slots: int64 or int32 [tokens]; a negative one skips its token
        positions: int64 or int32 [tokens], of each token in its sequence; where needs_positions
                   says so
        window_pages, plan: with a kvx.PagedWindow, this layer's blocks of it, uint8 [num_blocks,
                   window_block_bytes or more], and the step's plan, whose slots are ``slots``
        closes:    False: blocks that the step fills are left to close_blocks()

        A dual-scale format takes whole blocks, all tokens of one in order; with a window the plan's
        slots are such.

        Raises kvx.OutOfRangeError, nothing written: a slot beyond the pages; kvx.Error: a part of a
        dual-scale block. On a GPU such a slot is skipped and counted, and so is a position beyond
        max_tokens.
        """
        places = None if positions is None else as_int64(positions)
        window = plan or _NO_WINDOW
        nonfinite = _core.PagedLayer.append(
            self,
            pages,
            k,
            v,
            as_int64(slots),
            places,
            window_pages,
            window.window_slots,
            window.closing if closes else None,
            window.evicted,
            window.reopened,
            stream,
        )
        return cast(int | None, nonfinite)

    @in_words
    def close_blocks(  # type: ignore[override]
        self, pages: Array, window_pages: Array, plan: WindowPlan, *, stream: Stream = None
    ) -> None:
        """Quantises the blocks that a step filled, which ``append(closes=False)`` left: on a GPU
        beside the attention of that step where each sequence has one query. Its window has these
        blocks' rows, so attention does not read what is written here. The next step of the layer
        must come after it.

        pages, window_pages, plan: as append() took them; a plan of a window with unit "block"
        """
        _core.PagedLayer.close_blocks(self, pages, window_pages, plan.closing, stream)

    @in_words
    def attend(  # type: ignore[override]
        self,
        pages: Array,
        q: ArrayT,
        block_table: Array,
        seq_lens: Array,
        q_starts: Array,
        out: ArrayT | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Array | None = None,
        lse: Array | None = None,
        max_q_len: int | None = None,
        max_seq_len: int | None = None,
        num_decodes: int = 0,
        num_queries: int | None = None,
        workspace: Array | None = None,
        window_pages: Array | None = None,
        plan: WindowPlan | None = None,
        stream: Stream = None,
    ) -> ArrayT:
        """Causal attention of a ragged batch, straight from the packed bytes.

        q:           [tokens or more, num_q_heads, head_dim]; num_q_heads a multiple of num_kv_heads
        block_table: int32 [sequences, pages of a sequence]; its rows may be apart
        seq_lens:    int32 [sequences], tokens stored, the queries' own included
        q_starts:    int32 [sequences + 1]; the queries of sequence s are rows q_starts[s] to
                     q_starts[s + 1], the sequence's last tokens. Rows from q_starts[-1] on are
                     padding, which is neither read nor written
        out:         [tokens or more, num_q_heads, v_head_dim]; None makes one like q
        lse:         float32 [tokens or more, num_q_heads], contiguous: where the natural log of
                     each softmax's sum goes, sinks included; None: nowhere
        window:      a query sees its own token and the window - 1 before; 0 for all
        softmax_scale, softcap, sinks: as in kvx.Cache.append_and_attend
        window_pages, plan: as append() took them; block_table is then ``plan.block_table``

        What a GPU's launch is shaped by, since the host does not see the lengths there; a captured
        graph serves every batch within these. The CPU reads the lengths:

        max_q_len:   queries of a sequence, at most; None: q's rows
        max_seq_len: tokens of a sequence, at most; None: what block_table's rows hold
        num_decodes: the first sequences, so many, have one query each or none
        num_queries: rows of q that may be queries; None: all
        workspace:   uint8 [bytes] on 256 bytes, as workspace_bytes() says; None: the process's own
                     of this stream. Graphs share one: those that run side by side need their own

        Raises kvx.Error or kvx.OutOfRangeError, nothing written: lengths or pages that do not fit.
        On a GPU a sequence whose lengths do not fit gets zeros and is counted, and
        kvx.UnsupportedError says that a captured call needs a workspace that no call before it had.
        """
        if plan is not None and block_table is not plan.block_table:
            raise Error("block_table is not plan.block_table, whose ids the plan's window goes by")
        window_plan = plan or _NO_WINDOW
        if out is None:
            shape = (*tuple(checked_array(q, "q").shape[:2]), self.v_head_dim)
            out = cast(ArrayT, new_output(q, shape, self.device, "out is None and q"))
        _core.PagedLayer.attend(
            self,
            pages,
            q,
            out,
            block_table,
            seq_lens,
            q_starts,
            softmax_scale,
            softcap,
            window,
            sinks,
            max_q_len,
            max_seq_len,
            num_decodes,
            num_queries,
            workspace,
            lse,
            window_pages,
            window_plan.num_sink_blocks,
            window_plan.first_recent_blocks,
            stream,
        )
        return out

    @in_words
    def workspace_bytes(  # type: ignore[override]
        self,
        *,
        num_q_heads: int,
        max_sequences: int,
        max_queries: int,
        max_q_len: int,
        max_seq_len: int,
        window: int = 0,
        has_window_pages: bool = False,
    ) -> int:
        """Bytes of a workspace that is enough for every attend() within these bounds; 0 where none
        needs one, as on the CPU.

        max_queries: rows of q; max_q_len, max_seq_len: of a sequence, as in attend()
        has_window_pages: whether a kvx.PagedWindow's blocks are attended too
        Raises kvx.Error naming what is out of range.
        """
        return super().workspace_bytes(
            num_q_heads,
            max_sequences,
            max_queries,
            max_q_len,
            max_seq_len,
            window,
            has_window_pages,
        )

    @overload  # type: ignore[override]
    def gather(
        self,
        pages: Array,
        block_ids: Sequence[int] | Array,
        num_tokens: int,
        *,
        like: None = None,
        stream: Stream = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    @overload
    def gather(
        self,
        pages: Array,
        block_ids: Sequence[int] | Array,
        num_tokens: int,
        *,
        like: ArrayT,
        stream: Stream = None,
    ) -> tuple[ArrayT, ArrayT]: ...
    @in_words
    def gather(
        self,
        pages: Array,
        block_ids: Sequence[int] | Array,
        num_tokens: int,
        *,
        like: Array | None = None,
        stream: Stream = None,
    ) -> tuple[Any, Any]:
        """The first ``num_tokens`` of a sequence, decoded: (k, v) as kvx.Cache.gather returns them.

        block_ids: whole numbers [pages of the sequence]; on a GPU also an int32 array there
        like:      an array whose library and dtype the result has; needed on a GPU
        Raises kvx.OutOfRangeError: more tokens than the pages hold.
        """
        ids, there = self._table_of(block_ids, like)
        if not 0 <= num_tokens <= there:
            raise OutOfRangeError(
                f"num_tokens is {num_tokens}; {there // self.block_size} pages of "
                f"{self.block_size} hold {there}"
            )
        k = new_output(like, (num_tokens, self.num_kv_heads, self.head_dim), self.device, "like")
        v = new_output(like, (num_tokens, self.num_kv_heads, self.v_head_dim), self.device, "like")
        lengths = new_full(None if self.device == "cpu" else like, (1,), num_tokens, "int32")
        super().gather(pages, ids, lengths, k, v, stream)
        return k, v

    @in_words
    def gather_sequences(
        self,
        pages: Array,
        block_table: Array,
        seq_lens: Array,
        k: Array,
        v: Array,
        *,
        stream: Stream = None,
    ) -> None:
        """All tokens of several sequences, decoded, one sequence after the other.

        block_table, seq_lens: as in attend()
        k, v: [tokens, num_kv_heads, dim], which are written; rows beyond the sequences' tokens
              stay as they are

        Raises kvx.OutOfRangeError, nothing written: more tokens than k has rows or the pages hold.
        On a GPU such sequences are skipped and counted.
        """
        super().gather(pages, block_table, seq_lens, k, v, stream)

    @in_words
    def copy_blocks(  # type: ignore[override]
        self,
        pages: Array,
        from_blocks: Array,
        to_blocks: Array,
        *,
        to_pages: Array | None = None,
        stream: Stream = None,
    ) -> None:
        """Copies whole pages, as they are.

        from_blocks, to_blocks: int64 [copies]; no page is both a source and a target
        to_pages: the memory to copy to, of a layer that is stored alike; None: pages

        Raises kvx.OutOfRangeError, nothing written: a page that is not there. On a GPU such a copy
        is skipped and counted.
        """
        to_pages = pages if to_pages is None else to_pages
        super().copy_blocks(pages, to_pages, from_blocks, to_blocks, stream)

    def counters(self) -> dict[str, int]:
        """What verbs found wrong since the layer was made or reset. Waits for the device.

        out_of_range:     slots, pages and lengths that a GPU's kernels skipped
        nonfinite_inputs: numbers that have no code under given scales
        """
        return super().counters()

    def reset_counters(self) -> None:
        """Sets them to zero. Waits for the device."""
        super().reset_counters()

    def _table_of(self, block_ids: Any, like: Array | None) -> tuple[Any, int]:
        """Block ids as a table of one sequence, and how many tokens its pages hold."""
        is_array = self.device != "cpu" and hasattr(block_ids, "__dlpack_device__")
        if is_array and block_ids.__dlpack_device__()[0] != 1:
            if len(block_ids.shape) != 1:
                raise Error(f"block_ids has {len(block_ids.shape)} dimensions; expected one")
            return block_ids.reshape((1, -1)), block_ids.shape[0] * self.block_size
        given = np.asarray(block_ids)
        is_number = given.dtype.kind in "biuf"
        with np.errstate(invalid="ignore"):  # of NaN
            ids = given.astype(np.int32) if is_number else np.empty((), np.int32)
        if ids.ndim != 1 or not np.array_equal(ids, given):
            raise Error(f"block_ids is {block_ids}; expected int32 numbers in one dimension")
        ids = ids.reshape((1, -1))
        if self.device != "cpu":
            new_output(like, (0,), self.device, "like")  # refuses what makes no arrays there
            ids = new_numbers(like, ids, "int32")
        return ids, ids.shape[1] * self.block_size
