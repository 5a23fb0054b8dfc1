"""Prompts of latent layers in the expanded form: the heads' keys and values are made of the latent
rows for one step, and attended like any model's.

A head's query then meets a token in 2 x (192 + 128) operations, where the absorbed form takes
2 x (576 + 512); but each token of the sequence has to be expanded, cached ones as well. So the form
pays where many queries meet a token.

Rows are read from the pages, the step's own too: the forms differ in rounding alone. Heads are
expanded so many at a time as fit the memory that vLLM has measured for it, whatever the length.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from kvx.paged_layer import PagedLayer
from kvx.torch import BatchAttention
from kvx.vllm.layer_pages import GPU_BLOCK_SIZE, RowShape
from kvx.vllm.recipe import recipe_of_dtype

_PAGE_TOKENS = GPU_BLOCK_SIZE  # of the pages that hold a step's expanded keys and values
# On a GPU, expanding takes the memory's time as well: keys and values are written, and moved by
# append. On a CPU the products hide it.
_EXPANSION_ON_GPU = 2.0
# What the calls for some of a layer's heads cost, as so many operations of products. An H200 does
# 5e10 of them in a tenth of a millisecond.
_CALLS_OPERATIONS = 1e8
_CALLS_OPERATIONS_ON_GPU = 5e10
# What each head's query costs in the absorbed form on a GPU beside its products: with 128 heads an
# H200 takes 0.6 us for a query however few its tokens are.
_ABSORBED_QUERY_ON_GPU = 2e6


@dataclass(frozen=True)
class HeadDims:
    """Numbers of a head: its key is nope ones, expanded from a row's latent ones, and the row's
    rotary ones; its value is expanded from the latent ones, too."""

    latent: int
    nope: int
    rotary: int
    value: int

    def absorbed_operations(self, queries: int, tokens: int) -> float:
        """Of a head and a request, whose last tokens the queries are."""
        return 2.0 * _pairs(queries, tokens) * (self.latent + self.rotary + self.latent)

    def expanded_operations(self, queries: int, tokens: int) -> float:
        return 2.0 * _pairs(queries, tokens) * (self.nope + self.rotary + self.value)

    def projections(self, tokens: int) -> float:
        """Operations that expand tokens, or that absorb as many queries and their outputs."""
        return 2.0 * tokens * self.latent * (self.nope + self.value)

    def bytes_of_rows(self, itemsize: int) -> int:
        """A token's row, and its value, as they are gathered."""
        return (self.latent + self.rotary + self.latent) * itemsize

    def bytes_of_head(self, itemsize: int) -> int:
        """A token's key and value: its products, the whole key, and the pages'."""
        return (3 * self.nope + 2 * self.rotary + 2 * self.value) * itemsize


def _pairs(queries, tokens):
    """Each query meets its own token and those before it."""
    return queries * (tokens - (queries - 1) / 2)


def _divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class ExpandedLimits:
    """What decides over the form of a step's prompts. num_bytes: for all that a layer expands."""

    dims: HeadDims
    num_heads: int
    itemsize: int
    num_bytes: int
    wish: str  # "auto", "absorbed" or "expanded"
    on_gpu: bool
    most_drafts: int  # tokens that a decode has beside its own

    def takes(self, requests: list[tuple[int, int]]) -> bool:
        """requests: (queries, tokens) each."""
        if self.wish == "absorbed" or max(q for q, _ in requests) <= 1 + self.most_drafts:
            return False
        if self.heads_at_once(sum(tokens for _, tokens in requests)) == 0:
            return False
        return self.wish == "expanded" or self.is_faster(requests)

    def is_faster(self, requests: list[tuple[int, int]]) -> bool:
        """Whether the expanded form is, by its operations."""
        if self.on_gpu and self.itemsize > 2:
            return False  # no tensor core kernel multiplies binary32
        dims, weight, of_query, of_calls = self.dims, 1.0, 0.0, _CALLS_OPERATIONS
        if self.on_gpu:
            weight, of_query = _EXPANSION_ON_GPU, _ABSORBED_QUERY_ON_GPU
            of_calls = _CALLS_OPERATIONS_ON_GPU
        saved = sum(
            dims.absorbed_operations(queries, tokens)
            - dims.expanded_operations(queries, tokens)
            + dims.projections(queries)
            + of_query * queries
            - weight * dims.projections(tokens)
            for queries, tokens in requests
        )
        at_once = self.heads_at_once(sum(tokens for _, tokens in requests))
        return at_once * saved > of_calls

    def heads_at_once(self, tokens: int) -> int:
        """The most heads that fit, of which the layer has a multiple; 0 where not one does."""
        rows = tokens * self.dims.bytes_of_rows(self.itemsize)
        of_head = max(tokens * self.dims.bytes_of_head(self.itemsize), 1)
        fit = (self.num_bytes - rows) // of_head
        return max((n for n in _divisors(self.num_heads) if n <= fit), default=0)


class ExpandedPrompts:
    """What the layers share of a step's prompts."""

    chunked_context = "inside"  # None would tell vLLM that outputs may be quantised here

    def __init__(
        self,
        batch: BatchAttention,
        limits: ExpandedLimits,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        q_starts: torch.Tensor,
        requests: list[tuple[int, int]],
    ):
        """batch: planned here, for pages that hold the step's expanded rows alone.

        block_table, seq_lens, q_starts: of these requests in the layers' own pages, as
        kvx.PagedLayer.attend takes them; requests: (queries, tokens at most) each
        """
        self.batch, self.block_table, self.seq_lens = batch, block_table, seq_lens
        self.num_tokens = sum(tokens for _, tokens in requests)
        self.heads_at_once = limits.heads_at_once(self.num_tokens)
        pages = [-(-tokens // _PAGE_TOKENS) for _, tokens in requests]
        self.num_pages = sum(pages)
        firsts = [0, *accumulate(pages)][:-1]
        on_gpu = seq_lens.is_cuda
        first_pages = torch.tensor(firsts, dtype=torch.int32, pin_memory=on_gpu).to(
            seq_lens.device, non_blocking=True
        )
        self.slots = self._slots(first_pages)
        at = torch.arange(max(pages), dtype=torch.int32, device=seq_lens.device)
        batch.plan(
            (first_pages[:, None] + at).clamp_(max=self.num_pages - 1),
            seq_lens,
            q_starts,
            max_q_len=max(queries for queries, _ in requests),
            max_seq_len=max(tokens for _, tokens in requests),
            num_queries=sum(queries for queries, _ in requests),
        )

    def _slots(self, first_pages):
        """Where each of the gathered rows goes; behind the sequences' tokens, nowhere."""
        ends = self.seq_lens.cumsum(0)
        at = torch.arange(self.num_tokens, device=self.seq_lens.device)
        request = torch.searchsorted(ends, at, right=True)
        of = request.clamp(max=len(first_pages) - 1)
        in_request = at - (ends - self.seq_lens)[of]
        slots = first_pages[of] * _PAGE_TOKENS + in_request
        return torch.where(request < len(first_pages), slots, -1)

    def rows_of(self, layer: PagedLayer, pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[num_tokens, numbers of a row]: the sequences' latent rows, one behind the other."""
        rows = like.new_empty((self.num_tokens, 1, layer.head_dim))
        values = like.new_empty((self.num_tokens, 1, layer.v_head_dim))
        layer.gather_sequences(pages, self.block_table, self.seq_lens, rows, values)
        return rows[:, 0]


class ExpandedHeads:
    """Heads as layers of their own, whose pages live for a step; all latent layers share them.

    They are made here: a layer on a GPU waits for it when it is made, which no step is to do.
    """

    def __init__(self, dims: HeadDims, num_heads: int, dtype: torch.dtype):
        self.dims, recipe = dims, recipe_of_dtype(dtype)
        key_dim = dims.nope + dims.rotary
        self.layers = {
            n: RowShape(n, key_dim, dims.value).new_layer(recipe, _PAGE_TOKENS)
            for n in _divisors(num_heads)
        }

    def attend(self, prompts, rows, to_keys, to_values, q, out, **attention):
        """Attention of all heads, into out.

        rows: [tokens, latent + rotary]; to_keys: [heads, nope, latent]; to_values: [heads, latent,
        value]; q: [queries, heads, nope + rotary]; out: [queries, heads, value]
        """
        at_once = prompts.heads_at_once
        layer = self.layers[at_once]
        latent, rotary = rows.split([self.dims.latent, self.dims.rotary], dim=-1)
        pages = torch.empty(
            (prompts.num_pages, layer.page_bytes), dtype=torch.uint8, device=rows.device
        )
        for first in range(0, q.shape[1], at_once):
            heads = slice(first, first + at_once)
            of_heads = latent.expand(at_once, -1, -1)
            keys = rows.new_empty((at_once, len(rows), layer.head_dim))
            keys[..., : self.dims.nope] = of_heads @ to_keys[heads].transpose(1, 2)
            keys[..., self.dims.nope :] = rotary
            values = of_heads @ to_values[heads]
            layer.append(pages, keys.transpose(0, 1), values.transpose(0, 1), prompts.slots)
            prompts.batch.run(layer, pages, q[:, heads], out[:, heads], **attention)
