"""One layer as vLLM drives it: scales of checkpoints, sinks, windows, what is refused."""

from types import SimpleNamespace

import pytest
import torch
from test_registration import config
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvx
from kvx.torch import BatchAttention
from kvx.vllm import backend as kvx_backend
from kvx.vllm import layer_pages

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 64, 16


def new_layer(monkeypatch, recipe, kv_cache_dtype="auto", **options):
    """(impl, kv_cache) as vLLM makes them."""
    impl, spec = new_impl(monkeypatch, recipe, kv_cache_dtype, **options)
    shape = (8, KV_HEADS, BLOCK, spec.state_content_bytes)
    return impl, torch.zeros(shape, dtype=torch.uint8)


def new_impl(monkeypatch, recipe, kv_cache_dtype="auto", **options):
    """(impl, the layer's spec)."""
    vllm_config = config(recipe)
    monkeypatch.setattr(layer_pages, "get_current_vllm_config", lambda: vllm_config)
    impl = kvx_backend.KvxImpl(
        HEADS, DIM, DIM**-0.5, KV_HEADS, kv_cache_dtype=kv_cache_dtype, **options
    )
    spec = kvx_backend.KvxBackend.customize_spec(
        FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_size=DIM,
            dtype=torch.bfloat16,
            kv_quant_mode=impl.kv_quant_mode,
        )
    )
    assert kvx_backend.KvxBackend.customize_spec(spec) is spec
    return impl, spec


def run(impl, kv_cache, tokens=40):
    """Stores and attends `tokens` tokens in blocks 5, 2, 7; returns (q, k, v, out)."""
    torch.manual_seed(1)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    q, k, v = (
        part.unflatten(-1, (-1, DIM)) for part in qkv.split([HEADS * DIM] + 2 * [KV_HEADS * DIM], 1)
    )
    table = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, t // BLOCK]) * BLOCK + t % BLOCK for t in range(tokens)])
    impl.do_kv_cache_update(None, k, v, kv_cache, slots)
    batch = BatchAttention()
    batch.plan(table, torch.tensor([tokens]).int(), torch.tensor([0, tokens]).int())
    metadata = kvx_backend.KvxMetadata(batch)
    out = impl.forward(None, q, k, v, kv_cache, metadata, torch.empty_like(q))
    return q, k, v, out


def reference(q, k, v, window=0, sinks=None):
    tokens = len(q)
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    at = torch.arange(tokens)
    hidden = at[None] > at[:, None]
    if window:
        hidden |= at[None] <= at[:, None] - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, tokens, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :tokens]
    return torch.einsum("hqk,khd->qhd", weights, v)


def test_sinks_and_a_sliding_window_are_attention_as_it_should_be(monkeypatch):
    sinks = torch.nn.Parameter(torch.zeros(HEADS))
    impl, kv_cache = new_layer(monkeypatch, "f32", sliding_window=9, sinks=sinks)
    with torch.no_grad():
        sinks.copy_(torch.linspace(-2, 2, HEADS))  # weights come after __init__
    q, k, v, out = run(impl, kv_cache)
    assert torch.allclose(out.double(), reference(q, k, v, 9, sinks.detach()), atol=1e-5)


def layer_with_scales(k_scale, v_scale):
    return SimpleNamespace(
        head_size_v=DIM, _k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale)
    )


def test_a_checkpoints_scales_are_used(monkeypatch):
    impl, kv_cache = new_layer(monkeypatch, None, "fp8")
    impl.take("layer 0", layer_with_scales(0.5, [0.25, 0.125]), {})
    _, k, v, _ = run(impl, kv_cache)
    found = impl.pages.gather(kv_cache, [5, 2, 7], 40, like=k)
    for side, steps, rows in ((k, [0.5, 0.5], found[0]), (v, [0.25, 0.125], found[1])):
        for head in range(KV_HEADS):
            stored = kvx.quantize(side[:, head].numpy(), "fp8_e4m3", steps=[steps[head]])
            assert torch.equal(rows[:, head], torch.from_numpy(stored.dequantize()))


def test_a_static_format_without_scales_is_refused_loudly(monkeypatch):
    impl, _ = new_layer(monkeypatch, "fp8_e4m3")
    with pytest.raises(kvx.Error, match="layer 0 has no k_scale and v_scale.*fp8_e4m3"):
        impl.take("layer 0", layer_with_scales(1.0, 1.0), {})
    impl.take("layer 0", layer_with_scales(1.0, 1.0), {"unit_scales": True})
    with pytest.raises(kvx.Error, match="a scale has 3 numbers; expected 1 or 2"):
        impl.take("layer 0", layer_with_scales([0.5] * 3, 1.0), {})


def test_a_checkpoints_tensor_scales_are_used(monkeypatch):
    impl, kv_cache = new_layer(monkeypatch, "nvfp4")
    impl.take("layer 0", layer_with_scales(0.01, [0.02, 0.05]), {})
    _, k, v, _ = run(impl, kv_cache)
    found = impl.pages.gather(kv_cache, [5, 2, 7], 40, like=k)
    for side, scales, rows in ((k, [0.01, 0.01], found[0]), (v, [0.02, 0.05], found[1])):
        for head in range(KV_HEADS):
            stored = kvx.quantize(
                side[:, head].numpy(), "nvfp4", tensor_scale=float(torch.tensor(scales[head]))
            )
            assert torch.equal(rows[:, head], torch.from_numpy(stored.dequantize()))


def test_unit_scales_leave_a_checkpoints_tensor_scales_out(monkeypatch):
    impl, _ = new_layer(monkeypatch, "nvfp4")
    impl.take("layer 0", layer_with_scales(0.01, 0.02), {"unit_scales": True})
    assert not impl.given


def test_profiling_and_padding_touch_nothing(monkeypatch):
    impl, kv_cache = new_layer(monkeypatch, "int8")
    x = torch.ones(4, HEADS, DIM)
    assert not impl.forward(None, x, x, x, kv_cache, None, x.clone()).any()
    rows = torch.ones(4, KV_HEADS, DIM)
    impl.do_kv_cache_update(None, rows, rows, kv_cache, torch.full((4,), -1))
    assert not kv_cache.any()


def test_what_kvx_does_not_compute_is_refused(monkeypatch):
    for options, message in [
        (dict(alibi_slopes=[1.0]), "ALiBi"),
        (dict(attn_type="encoder_only"), "encoder_only"),
        (dict(chunk_lookback=3), "chunk_lookback"),
    ]:
        with pytest.raises(kvx.UnsupportedError, match=message):
            new_layer(monkeypatch, "int8", **options)
