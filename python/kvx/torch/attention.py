"""attention(): quantised keys and values where scaled_dot_product_attention stood, for research."""

from functools import lru_cache

import torch

from kvx.errors import Error
from kvx.paged_layer import PagedLayer
from kvx.torch.operators import _define

_BLOCK_SIZE = 64


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: str,
    is_causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention whose keys and values are quantised first and read from their packed bytes.

    q:         [batch, heads, queries, head_dim]
    k, v:      [batch, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads; v's head_dim
               may differ
    recipe:    how k and v are stored, as in kvx.PagedLayer: ``"int8"``, ``"nvfp4/int4"``
    is_causal: the queries are the last tokens, and each sees those up to its own; else it sees all
    scale:     of the scores; 1 / sqrt(head_dim) when None

    Returns [batch, heads, queries, v's head_dim] of q's dtype. An operator: torch.compile traces it
    (fullgraph), and CUDA graphs capture it once it has run with these shapes.

    Raises kvx.Error: shapes that do not fit, a gradient that would be needed.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise Error(
            "q, k or v requires a gradient, and none flows through quantised bytes; call "
            "attention under torch.no_grad() or with detached tensors"
        )
    return torch.ops.kvx.attention(q, k, v, recipe, is_causal, scale)


@lru_cache(maxsize=64)
def _layer_of(recipe, num_kv_heads, head_dim, v_head_dim, device):
    return PagedLayer(
        recipe,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_size=_BLOCK_SIZE,
        device=device,
    )


def _check(q, k, v, is_causal):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise Error(
                f"{name} has the shape {list(x.shape)}; expected [batch, heads, tokens, head_dim]"
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise Error(
            f"q, k and v have the shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; "
            f"expected one batch, q's head_dim for k, and k's heads and tokens for v"
        )
    if is_causal and q.shape[2] > k.shape[2]:
        raise Error(f"q has {q.shape[2]} tokens and k {k.shape[2]}; causal queries are the last ones")


def _fake_attention(q, k, v, recipe, is_causal, scale=None):
    return q.new_empty((*q.shape[:3], v.shape[3]))


@_define(
    "attention(Tensor q, Tensor k, Tensor v, str recipe, bool is_causal, float? scale=None) "
    "-> Tensor",
    _fake_attention,
)
def _attention(q, k, v, recipe, is_causal, scale=None):
    _check(q, k, v, is_causal)
    batch, heads, queries, _ = q.shape
    kv_heads, tokens, v_head_dim = k.shape[1], k.shape[2], v.shape[3]
    layer = _layer_of(recipe, kv_heads, k.shape[3], v_head_dim, str(q.device))
    width = -(-tokens // _BLOCK_SIZE)
    pages = q.new_zeros((batch * width, layer.page_bytes), dtype=torch.uint8)

    def ints(first, end, step=1, dtype=torch.int32):
        return torch.arange(first, end, step, dtype=dtype, device=q.device)

    slots = ints(0, batch, dtype=torch.int64)[:, None] * (width * _BLOCK_SIZE)
    slots = (slots + ints(0, tokens, dtype=torch.int64)).flatten()
    layer.append(pages, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)), slots)
    table = ints(0, batch * width).view(batch, width)
    count, q_len = batch, queries
    if not is_causal:  # each query is a sequence, of which it is the last token
        table, count, q_len = table.repeat_interleave(queries, 0), batch * queries, 1
    lengths = torch.full((count,), tokens, dtype=torch.int32, device=q.device)
    out = layer.attend(
        pages,
        q.transpose(1, 2).flatten(0, 1),
        table,
        lengths,
        ints(0, count + 1) * q_len,
        softmax_scale=scale,
        max_q_len=max(q_len, 1),
        max_seq_len=max(tokens, 1),
    )
    return out.view(batch, queries, heads, v_head_dim).transpose(1, 2).contiguous()
