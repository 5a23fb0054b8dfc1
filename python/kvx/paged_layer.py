"""PagedLayer: one layer's keys and values in pages that belong to an engine."""

from collections.abc import Sequence

import numpy as np

from kvx import _core
from kvx.arrays import checked_array, empty_like
from kvx.errors import Error, OutOfRangeError


class PagedLayer(_core.PagedLayer):
    """The verbs of one layer over an engine's own pages, block tables and slots.

    recipe:           ``"int8"``, ``"nvfp4:auto,immediate"``; pages have no full-precision window
    num_kv_heads, head_dim: the layer's; v_head_dim when values differ from keys
    block_size:       tokens a page, 1 to 1024
    k_steps, v_steps: for a static format (source=given): a positive step for each group of each
                      head, value = code * step; fp8 has one group a head, and 1.0 without

    ``pages`` is uint8 [num_pages, ...], ``page_bytes`` or more each, contiguous; only kvx
    reads what lies in a page, and all zeros is a legal page. Slots are page * block_size + offset.

    Raises kvx.Error naming what does not fit.
    """

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
    ):
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
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, keys and values of block_size tokens, scales included."""
        return super().page_bytes

    def append(self, pages, k, v, slots) -> int:
        """Stores new tokens. Returns how many numbers have no code under given scales.

        k:     [tokens or more, num_kv_heads, head_dim], after RoPE
        v:     [tokens or more, num_kv_heads, v_head_dim]
        slots: int64 [tokens]; a negative one skips its token

        Raises kvx.OutOfRangeError, nothing written: a slot beyond the pages.
        """
        return super().append(pages, k, v, slots)

    def attend(
        self,
        pages,
        q,
        block_table,
        seq_lens,
        q_starts,
        out=None,
        *,
        softmax_scale=None,
        softcap=0.0,
        window=0,
        sinks=None,
    ):
        """Causal attention of a ragged batch, straight from the packed bytes.

        q:           [tokens or more, num_q_heads, head_dim]; num_q_heads a multiple of num_kv_heads
        block_table: int32 [sequences, pages of a sequence]
        seq_lens:    int32 [sequences], tokens stored, the queries' own included
        q_starts:    int32 [sequences + 1]; the queries of sequence s are rows q_starts[s] to
                     q_starts[s + 1], the sequence's last tokens
        out:         [tokens or more, num_q_heads, v_head_dim]; None makes one like q
        window:      a query sees its own token and the window - 1 before; 0 for all
        softmax_scale, softcap, sinks: as in kvx.Cache.append_and_attend

        Raises kvx.Error or kvx.OutOfRangeError, nothing written: lengths or pages that do not fit.
        """
        if out is None:
            out = empty_like(q, (*tuple(checked_array(q, "q").shape[:2]), self.v_head_dim))
        super().attend(
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
        )
        return out

    def gather(self, pages, block_ids, num_tokens, *, like=None):
        """The first ``num_tokens`` of a sequence, decoded: (k, v) as kvx.Cache.gather returns them.

        block_ids: whole numbers [pages of the sequence]
        Raises kvx.OutOfRangeError: more tokens than the pages hold.
        """
        given = np.asarray(block_ids)
        with np.errstate(invalid="ignore"):  # of what is no number
            ids = given.astype(np.int32)
        if ids.ndim != 1 or not np.array_equal(ids, given):
            raise Error(f"block_ids is {block_ids}; expected int32 numbers in one dimension")
        there = len(ids) * self.block_size
        if not 0 <= num_tokens <= there:
            raise OutOfRangeError(
                f"num_tokens is {num_tokens}; {len(ids)} pages of {self.block_size} hold {there}"
            )
        k = empty_like(like, (num_tokens, self.num_kv_heads, self.head_dim))
        v = empty_like(like, (num_tokens, self.num_kv_heads, self.v_head_dim))
        super().gather(pages, ids, k, v)
        return k, v
