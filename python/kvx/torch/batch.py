"""BatchAttention: what a step's layers share is read once, and each layer is then a launch."""

from typing import cast

import torch

from kvx import _core
from kvx.arrays import checked_array, new_output
from kvx.errors import Error
from kvx.paged_layer import PagedLayer
from kvx.paged_window import WindowPlan
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, Stream


class BatchAttention(_core.BatchAttention):
    """Attention of a step over an engine's own pages, planned once and run for every layer.

    plan() takes the step's arrays; run() takes a layer with its pages and queries. The first run of
    layers that are stored alike plans how they are launched, and the others only launch. Nothing is
    allocated or waited for in run() but as kvx.PagedLayer.attend says, so that it may be captured
    into a CUDA graph: plan() before the capture, and write a later step's numbers into the same
    arrays before each replay.

    The arrays' libraries and places are those of kvx.PagedLayer.attend.
    """

    @in_words
    def plan(  # type: ignore[override]
        self,
        block_table: Array,
        seq_lens: Array,
        q_starts: Array,
        *,
        max_q_len: int | None = None,
        max_seq_len: int | None = None,
        num_decodes: int = 0,
        num_queries: int | None = None,
        workspace: Array | None = None,
        window: WindowPlan | None = None,
    ) -> None:
        """Takes a step's arrays and bounds, all as in kvx.PagedLayer.attend, and of a
        kvx.PagedWindow its plan, whose block_table is then ``block_table``. The arrays are kept
        until the next plan() and must stay as they are until the step's work is done.

        Raises kvx.Error naming what does not fit; the plan before stays then.
        """
        if window is not None and block_table is not window.block_table:
            raise Error("block_table is not window.block_table, whose ids the window goes by")
        super().plan(
            block_table,
            seq_lens,
            q_starts,
            max_q_len,
            max_seq_len,
            num_decodes,
            num_queries,
            workspace,
            None if window is None else window.num_sink_blocks,
            None if window is None else window.first_recent_blocks,
        )

    @in_words
    def run(  # type: ignore[override]
        self,
        layer: PagedLayer,
        pages: Array,
        q: ArrayT,
        out: ArrayT | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Array | None = None,
        lse: Array | None = None,
        window_pages: Array | None = None,
        stream: Stream = None,
    ) -> ArrayT:
        """Attention of one layer, a kvx.PagedLayer. Arguments, result and errors are those of its
        attend(); kvx.Error also says that nothing is planned, or on another device."""
        if out is None:
            shape = (*tuple(checked_array(q, "q").shape[:2]), layer.v_head_dim)
            out = cast(ArrayT, new_output(q, shape, layer.device, "out is None and q"))
        _core.BatchAttention.run(
            self,
            layer,
            pages,
            q,
            out,
            softmax_scale,
            softcap,
            window,
            sinks,
            lse,
            window_pages,
            stream,
        )
        return out


class BatchDecode(BatchAttention):
    """BatchAttention of sequences with one query each, whose rows of q are in their order."""

    @in_words
    def plan(  # type: ignore[override]
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        max_seq_len: int | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """As BatchAttention.plan. block_table and seq_lens are torch tensors."""
        n = checked_array(seq_lens, "seq_lens").shape[0]
        q_starts = torch.arange(n + 1, dtype=torch.int32, device=seq_lens.device)
        super().plan(
            block_table,
            seq_lens,
            q_starts,
            max_q_len=1,
            max_seq_len=max_seq_len,
            num_queries=n,
            workspace=workspace,
        )


class BatchPrefill(BatchAttention):
    """BatchAttention of sequences with several queries each: prompts, or drafts to verify."""
