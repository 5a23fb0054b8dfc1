"""PagedWindow: the first and the most recent tokens in 16 bits beside an engine's pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kvx import _core
from kvx.arrays import as_int64, checked_array, new_array
from kvx.errors import Error, UnsupportedError
from kvx.refusals import in_words
from kvx.types import Array, Device, Stream

_UNITS = ("row", "block")


@dataclass(eq=False)
class WindowPlan:
    """What a step's appends and attends read, the same in every layer.

    block_table: int32 [sequences, pages of a sequence], which attend() takes instead of the
                 engine's: ids of pages, and of the window's blocks where the next two say so
    num_sink_blocks, first_recent_blocks: int32 [sequences]: blocks before the first number and from
                 the second on are the window's
    slots, window_slots: int64 [tokens]: where rows go in the pages and in the window; -1: nowhere
    closing_from, closing_to, closing_tokens: int64, int64, int32 [sequences, blocks]: what append()
                 quantises whole from the window to the pages; None where rows are written at once
    evicted_from, evicted_to, evicted_tokens: the same of unfinished blocks that give up their place
                 in the window, which append() copies before the step's rows
    reopened_from, reopened_to, reopened_tokens: int64, int64, int32 [sequences]: pages whose rows
                 append() then brings back to the window, because the step continues them
    """

    block_table: Any
    num_sink_blocks: Any
    first_recent_blocks: Any
    slots: Any
    window_slots: Any
    closing_from: Any = None
    closing_to: Any = None
    closing_tokens: Any = None
    evicted_from: Any = None
    evicted_to: Any = None
    evicted_tokens: Any = None
    reopened_from: Any = None
    reopened_to: Any = None
    reopened_tokens: Any = None

    @property
    def closing(self) -> tuple[Any, Any, Any] | None:
        """The three arrays of the blocks that close, or None."""
        return _copies(self.closing_from, self.closing_to, self.closing_tokens)

    @property
    def evicted(self) -> tuple[Any, Any, Any] | None:
        """The three arrays of the unfinished blocks that leave the window, or None."""
        return _copies(self.evicted_from, self.evicted_to, self.evicted_tokens)

    @property
    def reopened(self) -> tuple[Any, Any, Any] | None:
        """The three arrays of the blocks that come back to the window, or None."""
        return _copies(self.reopened_from, self.reopened_to, self.reopened_tokens)


def _copies(sources: Any, targets: Any, tokens: Any) -> tuple[Any, Any, Any] | None:
    return None if sources is None else (sources, targets, tokens)


class PagedWindow(_core.PagedWindow):
    """A full-precision window beside an engine's pages, shared by all layers.

    num_pages:     of the engine; page ids are below it
    block_size:    tokens a page
    sink, recent:  at least the first ``sink`` tokens of a sequence and the ``recent`` ones before
                   each query are in 16 bits, in whole blocks
    max_sequences: of a step. The window has room for so many, and when a step has more, or
                   sequences skip steps while others run, windows are shorter. With
                   ``unit="block"`` a step of more sequences is refused, or counted on a GPU, and
                   the unfinished block of one that skips steps may come back quantised
    unit:          ``"row"``: a row is written to its page at once, and to the window beside it, so
                   that every page is complete. ``"block"``: a block is quantised whole when it is
                   full; until then it is in the window alone. Dual-scale formats need it
    device:        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, as the layers'

    The window follows pages, not sequences: sequences that share a page share its 16-bit copy. The
    copies of each layer are blocks in an array of the caller's, uint8 [num_blocks,
    PagedLayer.window_block_bytes]. Every append is planned; forget() is for pages that were written
    by anything else.

    Raises kvx.Error naming what does not fit; kvx.UnsupportedError: no such device.
    """

    @in_words
    def __init__(
        self,
        num_pages: int,
        block_size: int,
        *,
        sink: int = 16,
        recent: int = 64,
        max_sequences: int,
        unit: str = "row",
        device: Device = "cpu",
    ) -> None:
        if unit not in _UNITS:
            raise Error(f"unit is {unit!r}; expected one of {', '.join(map(repr, _UNITS))}")
        self.num_pages, self.block_size = num_pages, block_size
        self.sink, self.recent, self.unit = sink, recent, unit
        self.num_blocks = self.blocks_for(
            block_size, sink=sink, recent=recent, max_sequences=max_sequences
        )
        super().__init__(
            num_pages, self.num_blocks, block_size, sink, recent, unit == "block", str(device)
        )

    @staticmethod
    @in_words
    def blocks_for(block_size: int, *, sink: int, recent: int, max_sequences: int) -> int:
        """The num_blocks of a window of these sizes: how much memory each layer needs for it.

        Raises kvx.Error naming a size that is out of range.
        """
        if max_sequences < 1:
            raise Error(f"max_sequences is {max_sequences}; expected 1 or more")
        if block_size < 1:
            raise Error(f"block_size is {block_size}; expected 1 or more")
        # The open block, and the one that was open before a step, which stays until it has ended.
        return max_sequences * (-(-sink // block_size) - (-recent // block_size) + 2)

    def __reduce__(self) -> NoReturn:
        """Refuses pickle and copy: the state belongs to this process."""
        raise UnsupportedError(
            "a kvx.PagedWindow cannot be pickled or copied: its state belongs to this process; "
            "make another"
        )

    def __repr__(self) -> str:
        return (
            f"kvx.PagedWindow({self.num_pages} pages of {self.block_size} tokens, "
            f"sink={self.sink}, recent={self.recent}, {self.num_blocks} blocks on {self.device})"
        )

    @in_words
    def plan(  # type: ignore[override]
        self,
        block_table: Array,
        seq_lens: Array,
        q_starts: Array,
        num_tokens: int,
        *,
        out: WindowPlan | None = None,
        stream: Stream = None,
    ) -> WindowPlan:
        """Plans a step: moves the window, and says where all layers write and read.

        block_table, seq_lens, q_starts: the step, as PagedLayer.attend() takes it
        num_tokens: rows of the step, padding included
        out:        a plan whose arrays are written, of enough numbers each, so that a CUDA graph
                    finds them again; None: new arrays of block_table's library

        On a GPU it is two launches that wait for nothing; sequences that do not fit are counted by
        num_out_of_range() and have no window. Returns the plan, ``out`` if it was given.
        Raises kvx.Error or kvx.OutOfRangeError, nothing written: lengths or pages that do not fit,
        or, with unit="block", more sequences than the window was made for.
        """
        if out is None:
            out = self._new_plan(checked_array(block_table, "block_table"), num_tokens)
        super().plan(
            block_table,
            seq_lens,
            q_starts,
            out.block_table,
            out.num_sink_blocks,
            out.first_recent_blocks,
            out.slots,
            out.window_slots,
            out.closing,
            out.evicted,
            out.reopened,
            stream,
        )
        return out

    @in_words
    def forget(  # type: ignore[override]
        self, pages: Sequence[int] | Array, *, stream: Stream = None
    ) -> None:
        """The window's copies of these pages are no longer used: they were written without a plan
        (loaded, received, copied), or, with unit="block", their sequence has ended.

        pages: page ids; on a GPU an int64 or int32 array there
        Raises kvx.OutOfRangeError: an id beyond the pages; on a GPU it is counted.
        """
        ids: Any = pages
        if self.device == "cpu" and not hasattr(pages, "shape"):
            ids = np.asarray(pages, np.int64)
        super().forget(as_int64(ids), stream)

    def num_out_of_range(self) -> int:
        """How many lengths, pages and ids a GPU's plans skipped. Waits for the device."""
        return super().num_out_of_range()

    def _new_plan(self, like: Array, num_tokens: int) -> WindowPlan:
        if len(like.shape) != 2:
            raise Error(f"block_table has {len(like.shape)} dimensions; expected two")
        if num_tokens < 0:
            raise Error(f"num_tokens is {num_tokens}; expected 0 or more")
        sequences, width = like.shape

        def new(shape: tuple[int, ...], dtype: str) -> Any:
            return new_array(like, shape, dtype, self.device, "block_table")

        plan = WindowPlan(
            new((sequences, width), "int32"),
            new((sequences,), "int32"),
            new((sequences,), "int32"),
            new((num_tokens,), "int64"),
            new((num_tokens,), "int64"),
        )
        if self.unit == "block":
            closing = (sequences * self.closing_blocks_per_sequence,)
            for name, shape in (
                ("closing", closing),
                ("evicted", closing),
                ("reopened", (sequences,)),
            ):
                setattr(plan, f"{name}_from", new(shape, "int64"))
                setattr(plan, f"{name}_to", new(shape, "int64"))
                setattr(plan, f"{name}_tokens", new(shape, "int32"))
        return plan
