"""kvx.torch.attention beside scaled_dot_product_attention."""

import engine
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvx
import kvx.torch


def rows(queries, tokens):
    generator = torch.Generator().manual_seed(3)
    sizes = ((4, queries), (2, tokens), (2, tokens))
    return [torch.randn((2, heads, n, 64), generator=generator) for heads, n in sizes]


@pytest.mark.parametrize("recipe", engine.LIMIT)
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_sdpa_over_what_the_format_keeps(recipe, is_causal):
    q, k, v = rows(75, 75)
    found = kvx.torch.attention(q, k, v, recipe=recipe, is_causal=is_causal)
    expected = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert found.shape == expected.shape and found.is_contiguous()
    assert engine.relative_error(found, expected.double()) < engine.LIMIT[recipe]


def test_queries_are_the_last_tokens_and_scale_is_given():
    q, k, v = rows(5, 70)
    found = kvx.torch.attention(q, k, v, recipe="f32", scale=0.3)
    mask = torch.ones(5, 70, dtype=torch.bool).tril(65)
    expected = scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    assert engine.relative_error(found, expected.double()) < engine.LIMIT["f32"]


def test_what_it_cannot_compute_is_refused():
    q, k, v = rows(5, 7)
    for call, message in [
        (lambda: kvx.torch.attention(q[0], k, v, recipe="int8"), "q has the shape .* expected .b"),
        (lambda: kvx.torch.attention(q, k, v[:, :, 1:], recipe="int8"), "q, k and v have the sh"),
        (lambda: kvx.torch.attention(k, q[:, :2], v[:, :, :5], recipe="int8"), "q has 7 tokens"),
        (lambda: kvx.torch.attention(q, k, v, recipe="nvfp4:auto"), "add immediate"),
        (lambda: kvx.torch.attention(q, k, v, recipe="int5"), "int5"),
        (
            lambda: kvx.torch.attention(q.requires_grad_(), k, v, recipe="int8"),
            r"call attention under torch.no_grad\(\)",
        ),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()
    with torch.no_grad():
        assert kvx.torch.attention(q, k, v, recipe="int8").shape == q.shape
