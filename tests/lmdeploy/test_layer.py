"""One layer as LMDeploy's models call it: slots, sinks, shared rows, what is refused."""

from dataclasses import replace

import pytest
import torch
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec, V4AttentionBuildSpec
from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionMetadata
from lmdeploy.pytorch.backends.selector import get_backend

import kvx
from kvx.lmdeploy.attention import slots_of

BLOCK, HEADS, KV_HEADS, DIM = 16, 6, 2, 64
SPEC = PagedAttentionBuildSpec(
    num_heads=HEADS,
    head_dim=DIM,
    scale=None,
    num_kv_heads=KV_HEADS,
    v_head_dim=DIM,
    alibi=False,
    sliding_window=None,
    logit_softcapping=0.0,
    causal=True,
    use_flash_mla=False,
    mla_index_topk=None,
    learnable_sink=False,
    block_sparse_size=1,
)


def metadata(table, new, lengths, is_decoding=False):
    return TritonAttentionMetadata(
        is_decoding=is_decoding,
        block_offsets=torch.tensor(table, dtype=torch.int32),
        q_seqlens=torch.tensor(new),
        kv_seqlens=torch.tensor(lengths),
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(),
        max_q_seqlen=max(new),
        max_kv_seqlen=max(lengths),
    )


def caches(num_blocks=6, dtype=torch.float16):
    backend = get_backend()
    shapes = (
        shape(BLOCK, KV_HEADS, DIM, dtype)
        for shape in (backend.get_k_block_shape, backend.get_v_block_shape)
    )
    return tuple(torch.zeros((num_blocks, *shape), dtype=dtype) for shape in shapes)


def rows(tokens, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, DIM, generator=generator)


def test_slots_follow_the_block_table():
    found = slots_of(metadata([[3, 5, 0], [2, 0, 0]], [4, 1], [18, 7]), BLOCK, 7)
    # The last two rows are padding of a graph's.
    assert found.tolist() == [3 * 16 + 14, 3 * 16 + 15, 5 * 16, 5 * 16 + 1, 2 * 16 + 6, -1, -1]


def test_a_sequence_without_tokens_has_no_slots():
    found = slots_of(metadata([[3], [4]], [1, 1], [0, 5]), BLOCK, 2)
    assert found.tolist() == [-1, 4 * 16 + 4]


def test_sinks_and_a_window_are_attention_as_it_should_be(stored_as):
    stored_as("f32")
    layer = get_backend().build_op(replace(SPEC, sliding_window=(8, 8), learnable_sink=True))
    sinks = torch.linspace(-2, 2, HEADS).bfloat16()
    q, k, v = rows(40, HEADS, 1), rows(40, KV_HEADS, 2), rows(40, KV_HEADS, 3)
    out = layer.forward(q, k, v, *caches(), metadata([[5, 2, 4]], [40], [40]), learnable_sink=sinks)
    assert torch.allclose(out.double(), reference(q, k, v, 9, sinks), atol=1e-5)


def reference(q, k, v, window, sinks):
    """A query sees its own token and window - 1 before it."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    at = torch.arange(len(q))
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    column = sinks.double()[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def test_a_layer_without_rows_reads_those_of_another(stored_as):
    """Layers that share keys and values pass None."""
    stored_as("int8")
    layer, other = (get_backend().build_op(SPEC) for _ in range(2))
    q, k, v = rows(20, HEADS, 1), rows(20, KV_HEADS, 2), rows(20, KV_HEADS, 3)
    cache, step = caches(), metadata([[5, 2]], [20], [20])
    first = layer.forward(q, k, v, *cache, step)
    assert torch.equal(other.forward(q, None, None, *cache, step), first)


def test_a_metadata_that_changes_between_steps_is_planned_anew(stored_as):
    stored_as("f32")
    layer = get_backend().build_op(SPEC)
    q, k, v = rows(20, HEADS, 1), rows(20, KV_HEADS, 2), rows(20, KV_HEADS, 3)
    whole = layer.forward(q, k, v, *caches(), metadata([[5, 2]], [20], [20]))
    cache, step = caches(), metadata([[5, 2]], [10], [10])
    layer.forward(q[:10], k[:10], v[:10], *cache, step)
    step.kv_seqlens += 10
    tail = layer.forward(q[10:], k[10:], v[10:], *cache, step)
    assert torch.allclose(tail, whole[10:], atol=1e-6)


@pytest.mark.parametrize(
    "unlike, message",
    [
        ({"alibi": True}, "alibi True"),
        ({"causal": False}, "causal False"),
        ({"use_flash_mla": True}, "use_flash_mla True"),
        ({"block_sparse_size": 4}, "block_sparse_size 4"),
        ({"v_head_dim": 32}, "v_head_dim 32"),
    ],
)
def test_attention_that_kvx_does_not_compute_is_refused(stored_as, unlike, message):
    stored_as("int8")
    with pytest.raises(kvx.UnsupportedError, match=message):
        get_backend().build_op(replace(SPEC, **unlike))


def test_deepseek_v4_is_refused(stored_as):
    stored_as("int8")
    spec = V4AttentionBuildSpec(head_dim=64, scale=1.0, window_size=8, compress_ratio=4)
    with pytest.raises(kvx.UnsupportedError, match="DeepSeek-V4"):
        get_backend().build_op(spec)


def test_a_recipe_that_the_heads_do_not_allow_is_refused(stored_as):
    stored_as("nvfp4")
    with pytest.raises(kvx.Error, match="head_dim"):
        get_backend().get_k_block_shape(BLOCK, 2, 40, torch.float16)


def test_a_step_of_another_policy_is_refused(stored_as):
    stored_as("int8")
    layer = get_backend().build_op(SPEC)
    step = metadata([[1]], [2], [2])
    step.quant_policy = 8
    x = rows(2, HEADS, 1)
    with pytest.raises(kvx.UnsupportedError, match="quant_policy is 8"):
        layer.forward(x, x[:, :2], x[:, :2], *caches(), step)
