"""Attention of one layer of LMDeploy's: stores a step's rows in kvx's pages, attends over them."""

import torch
from lmdeploy.pytorch.backends.attention import AttentionImpl

from kvx.errors import Error, UnsupportedError
from kvx.lmdeploy.pages import new_pages
from kvx.torch import BatchAttention


class Step:
    """What the layers of a step share: the slots of its tokens, and the planned attention.

    metadata: LMDeploy's AttentionMetadata; num_tokens: rows of the step's queries
    """

    def __init__(self, metadata, block_size: int, num_tokens: int):
        self.slots = slots_of(metadata, block_size, num_tokens)
        num_sequences = metadata.block_offsets.shape[0]
        has_one_query_each = metadata.is_decoding and num_tokens == num_sequences
        self.batch = BatchAttention()
        self.batch.plan(
            metadata.block_offsets.int(),
            metadata.kv_seqlens.int(),
            metadata.cu_seqlens_q.int(),
            max_q_len=1 if has_one_query_each else _most(metadata.max_q_seqlen, num_tokens),
            # A captured graph serves sequences of any length that the table holds.
            max_seq_len=None if metadata.is_decoding else metadata.max_kv_seqlen,
            num_decodes=num_sequences if has_one_query_each else 0,
        )

    @classmethod
    def of(cls, metadata, block_size: int, num_tokens: int, is_first: bool) -> "Step":
        """The step that the metadata describes.

        LMDeploy changes a metadata's numbers between two steps, and captures a CUDA graph with one
        that it has run before: the model's first layer plans anew.
        """
        step = getattr(metadata, "kvx_step", None)
        if step is None or is_first:
            step = metadata.kvx_step = cls(metadata, block_size, num_tokens)
        return step


def slots_of(metadata, block_size: int, num_tokens: int) -> torch.Tensor:
    """Slots of a step's tokens, int64 [num_tokens], without waiting for a GPU.

    -1 for rows behind the last query, and for those of a sequence without tokens.
    """
    starts, lengths = metadata.cu_seqlens_q.long(), metadata.kv_seqlens.long()
    rows = torch.arange(num_tokens, device=starts.device)
    sequences = torch.bucketize(rows, starts[1:], right=True)
    is_query = sequences < len(lengths)
    sequences = sequences.clamp(max=len(lengths) - 1)
    positions = lengths[sequences] - starts[sequences + 1] + rows
    is_query &= positions >= 0
    blocks = metadata.block_offsets.long()[sequences, positions.clamp(min=0) // block_size]
    return torch.where(is_query, blocks * block_size + positions % block_size, -1)


class KvxAttention(AttentionImpl):
    """One layer's attention. Raises kvx.UnsupportedError: a model whose attention is another."""

    def __init__(self, spec, recipe: str, is_first: bool):
        """spec: LMDeploy's PagedAttentionBuildSpec; is_first: of its model's layers."""
        _check(spec)
        super().__init__(
            num_heads=spec.num_heads,
            head_size=spec.head_dim,
            scale=spec.scale,
            num_kv_heads=spec.num_kv_heads,
            v_head_size=spec.v_head_dim,
            sliding_window=spec.sliding_window,
            logit_softcapping=spec.logit_softcapping,
        )
        self.recipe, self.is_first = recipe, is_first
        self.pages = None  # made with the first step, which knows the block size and the device
        self.options = {
            "softmax_scale": float(self.scale),
            "softcap": max(float(spec.logit_softcapping or 0.0), 0.0),
            "window": _window(spec.sliding_window),
        }

    def forward(
        self,
        query,
        key,
        value,
        k_cache,
        v_cache,
        attn_metadata,
        k_scales_zeros=None,
        v_scales_zeros=None,
        learnable_sink=None,
        nsa_indices=None,
        inplace=False,
        **others,
    ):
        """Attention of a step, [tokens, num_heads, head_dim]; its own rows are stored first.

        query, key, value: [tokens, heads, head_dim]; key and value None: another layer stored them
        k_cache: [blocks, tokens, numbers] of kvx's pages; v_cache is empty
        """
        if int(attn_metadata.quant_policy) != 0 or nsa_indices is not None:
            raise UnsupportedError(
                f"quant_policy is {int(attn_metadata.quant_policy)} in a step of an engine that "
                f"stores by kvx; make its configuration while kvx.lmdeploy.enable() holds"
            )
        pages = self._pages_for(k_cache)
        buffer = k_cache.view(torch.uint8).flatten(1)
        step = Step.of(attn_metadata, pages.block_size, len(query), self.is_first)
        if key is not None:
            pages.append(buffer, key, value, step.slots)
        out = query.new_empty(*query.shape[:2], self.v_head_size)
        sinks = None if learnable_sink is None else learnable_sink.detach().float()
        return step.batch.run(pages, buffer, query, out, sinks=sinks, **self.options)

    def _pages_for(self, k_cache):
        block_size = k_cache.shape[1]
        if self.pages is None:
            self.pages = new_pages(self.num_kv_heads, self.head_size, block_size, k_cache.device)
        if self.pages.block_size != block_size:
            raise Error(
                f"k_cache has blocks of {block_size} tokens; this layer's have "
                f"{self.pages.block_size}"
            )
        return self.pages


def _window(sliding_window) -> int:
    """kvx's window, which counts the query's own token: LMDeploy's number, or the left of its two,
    counts the tokens before it."""
    left = sliding_window if isinstance(sliding_window, int) else (sliding_window or (-1,))[0]
    return 0 if left is None or left < 0 else left + 1


def _most(host_number, bound: int) -> int:
    return bound if host_number is None else int(host_number)


def _check(spec) -> None:
    unlike = {
        "use_flash_mla": spec.use_flash_mla or spec.mla_index_topk is not None,
        "alibi": spec.alibi,
        "causal": not spec.causal,
        "block_sparse_size": spec.block_sparse_size != 1,
        "v_head_dim": spec.v_head_dim != spec.head_dim,
    }
    for name, is_refused in unlike.items():
        if is_refused:
            raise UnsupportedError(
                f"the model's attention has {name} {getattr(spec, name)!r}; in LMDeploy kvx "
                f"computes causal attention without ALiBi, with keys and values of one size; leave "
                f"kvx out for this model"
            )
