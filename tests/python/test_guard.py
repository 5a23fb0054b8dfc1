"""Gates and saturation from Python."""

import os

import numpy as np
import pytest

import kvx
from kvx import _core
from kvx.gates import Gates


def figures(name, **changes):
    estimate = kvx.Estimate(0.0, 0.1)
    values = dict(
        name=name,
        bits_per_value=4.0,
        bytes_per_token=1.0,
        tokens_per_gib=1,
        perplexity=kvx.Estimate(10.0, 1.0),
        change_percent=estimate,
        kl=estimate,
        same_top_percent=kvx.Estimate(99.0, 0.1),
    )
    return kvx.CacheFigures(**{**values, **changes})


def heads(cosine, error):
    return kvx.HeadErrors(np.array(cosine, float), np.array(error, float))


def failures(text, **changes):
    comparison = kvx.Comparison([figures("bf16"), figures("int4", **changes)])
    try:
        Gates(text).check(comparison)
    except kvx.GateError as error:
        assert error.comparison is comparison
        return [str(failure) for failure in error.failures]
    return []


def test_gates_pass_within_their_limits_and_fail_beyond():
    kl = kvx.Estimate(0.02, 0.1)
    assert failures("kl>0.02,top1<99%,ppl>0%", kl=kl) == []
    assert failures("kl>0.019", kl=kl) == ["int4: kl is 0.02, not allowed by kl>0.019"]
    assert failures("kl>9", kl=kvx.Estimate(float("nan"), 0)) != []


def test_gates_name_the_worst_layer_and_head():
    outputs = heads([[1, 0.9], [0.8, 1]], [[0, 0.1], [0.2, 0]])
    assert failures("cosine<0.85", outputs=outputs) == [
        "int4: cosine is 0.8 in layer 1, KV head 0, not allowed by cosine<0.85"
    ]
    logits = heads([[1, 1]], [[0.5, float("nan")]])
    assert "nan in layer 0, KV head 1" in failures("logit_error>9", logits=logits)[0]


def test_what_was_not_measured_keeps_no_gate():
    assert len(failures("cosine<0.1,logit_error>9,saturated>9,nonfinite>9")) == 4
    assert failures("saturated>9,nonfinite>9", saturated_inputs=9, nonfinite_inputs=0) == []


def test_a_condition_that_is_none_is_refused_before_anything_is_measured():
    for text, message in [
        ("speed>1", "fail_if has 'speed>1'; expected a condition on one of ppl, kl"),
        ("ppl>1", "expected a percentage behind '>'"),
        ("kl<1", "expected '>' behind kl"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            kvx.compare("no.gguf", "no.txt", ["int8"], fail_if=text)


def test_a_comparison_on_the_real_model_is_gated():
    model, text = os.environ["KVX_TEST_MODEL"], os.environ["KVX_TEST_TEXT"]
    options = dict(context=64, windows=1)
    good = kvx.compare(model, text, ["int8"], fail_if="kl>0.5,cosine<0.9", **options)
    assert good[1].outputs.error.shape == (30, 3) and good[1].logits is None
    assert good[1].saturated_inputs == 0 and good[0].outputs.error.max() == 0
    with pytest.raises(kvx.GateError, match="int8: logit_cosine is .* in layer") as caught:
        kvx.compare(model, text, ["int8"], fail_if="logit_cosine<1.1", **options)
    (failure,) = caught.value.failures
    logits = caught.value.comparison[1].logits
    assert failure.value == logits.cosine.min() == logits.cosine[failure.layer, failure.kv_head]


def test_saturation_counts_what_a_static_scale_clips():
    cache = kvx.Cache(num_layers=2, num_kv_heads=2, head_dim=32, recipe="fp8_e4m3", max_tokens=8)
    sequence = cache.create_sequence()
    k = np.ones((3, 2, 32), np.float32)
    v = k.copy()
    k[2, 1, :3] = (465, -465, 464)
    v[0, 0, 7] = 1e9
    with cache.step([(sequence, 3)]):
        for layer in range(2):
            cache.append_and_attend(layer, k, k, v if layer else k)
    counts = cache.saturation()
    assert counts.k_clipped.tolist() == [[0, 2], [0, 2]]
    assert counts.v_clipped.tolist() == [[0, 2], [1, 0]]
    assert counts.k_nonfinite.sum() == counts.v_nonfinite.sum() == 0
    assert counts.clipped == 7


def test_retrieval_texts_hold_their_facts():
    assert _core.retrieval_tasks() == ("passkey", "needles", "entities")
    text, questions = _core.retrieval_text(1, 5, 300, lambda text: text.count(" "))
    assert len(questions) == 8
    assert all(question + answer + "." in text for question, answer, _ in questions)
    with pytest.raises(kvx.Error, match="9 tokens are too few"):
        _core.retrieval_text(1, 5, 9, len)


def test_the_error_of_clusters_is_that_of_a_ratio():
    mean, error = _core.clustered_mean([[1.0, 2.0], [3.0]])
    assert mean == 2 and error == pytest.approx(np.sqrt(2 * (1 + 1)) / 3)
