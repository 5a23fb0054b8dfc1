"""torch tensors in the verbs: bfloat16, views, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kvx

GOLDEN = Path(__file__).parents[1] / "golden"


def bf16_of(text):
    bits = np.frombuffer(bytes.fromhex(text), ">u2").astype(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def test_bfloat16_rows_are_the_oracles_bytes():
    num_compared = 0
    for path in sorted(GOLDEN.glob("rows_*.json")):
        golden = json.loads(path.read_text())
        for case in golden["cases"]:
            is_plain = case.get("scale_choice", "amax") == "amax" and "tensor_scale" not in case
            defaults = case.get("scale_source", "computed") == "computed" and is_plain
            if case["input_type"] != "bf16" or not defaults:
                continue
            fmt = {f.name: f for f in kvx.formats()}[golden["format"]]
            facts = [("g{}", fmt.group_sizes, "group_size"), ("rule={}", fmt.scale_rules, "scale_rule")]
            facts += [("scale={}", fmt.scale_types, key) for key in ("scale_type", "param_type")]
            options = []
            for text, words, key in facts:
                word = str(case.get(key)).removeprefix("e8m0_")
                if len(words) > 1 and word in words:  # no word: the group is the row
                    options.append(text.format(word))
            if len(fmt.scale_sources) > 1:
                options.append("source=computed")
            recipe = ":".join(filter(None, [golden["format"], ",".join(options)]))
            rows = kvx.quantize(bf16_of(case["input"])[None], recipe)
            assert rows.codes.numpy().tobytes().hex() == case["codes"], (recipe, case["row"])
            assert rows.scales.numpy().tobytes().hex() == case["scales"], (recipe, case["row"])
            num_compared += 1
    assert num_compared >= 30


def new_cache():
    return kvx.Cache(num_layers=1, num_kv_heads=2, head_dim=32, recipe="bf16", max_tokens=64)


def rows(heads, dtype=torch.bfloat16):
    """[tokens, heads, dim] as models have them: a transposed view of [heads, tokens, dim]."""
    torch.manual_seed(heads)
    return torch.randn((heads, 9, 32)).to(dtype).transpose(0, 1)


def test_views_of_bfloat16_tensors_are_read_in_place():
    cache = new_cache()
    sequence = cache.create_sequence()
    q, k, v = rows(4), rows(2), rows(2) + 1
    with cache.step([(sequence, 9)]):
        out = cache.append_and_attend(0, q, k, v)
    assert out.dtype == torch.bfloat16 and out.shape == (9, 4, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(out.float().transpose(0, 1), expected, atol=2e-2)
    found_k, found_v = cache.gather(sequence, 0, like=k)
    assert torch.equal(found_k, k) and torch.equal(found_v, v)


def test_slices_and_parameters_are_read_where_they_lie():
    whole = torch.randn(3, 70, 40)
    for x in (whole[1, 5:25, 8:40], whole[:, ::7, 3:35].flatten(0, 1)[2:], whole[2, ::3, ::1][:, :32]):
        expected = kvx.quantize(x.numpy().copy(), "int8")
        for tensor in (x, torch.nn.Parameter(x, requires_grad=False)):
            assert np.array_equal(kvx.quantize(tensor, "int8").codes, expected.codes)


def test_a_view_of_negated_numbers_is_refused():
    x = torch.randn(3, 64)
    negated = torch._neg_view(x)  # what torch makes of z.conj().imag
    with pytest.raises(kvx.Error, match=r"x is a view of numbers that are negated.*resolve_neg"):
        kvx.quantize(negated, "int8")
    found = kvx.quantize(negated.resolve_neg(), "int8")
    assert np.array_equal(found.codes, kvx.quantize((-x).numpy(), "int8").codes)


def test_tensors_that_cannot_be_read_in_place_are_refused():
    cache = new_cache()
    sequence = cache.create_sequence()
    cache.begin_step([(sequence, 9)])
    q, k, v = rows(4), rows(2), rows(2)
    for bad, message in [
        (q.to("meta"), "q is a Tensor that cannot be read in place"),
        (q.to(torch.float64), "expected float32, float16 or bfloat16"),
        (q.to(torch.float8_e4m3fn), r"q is (float8_e4m3fn; expected float32|a Tensor that cannot be read)"),
        (q.to_sparse(), "q is a Tensor that cannot be read in place"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            cache.append_and_attend(0, bad, k, v, torch.empty((9, 4, 32)))
    assert cache.append_and_attend(0, q, k, v).isfinite().all()
    cache.end_step()
