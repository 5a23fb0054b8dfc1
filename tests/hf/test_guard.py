"""kvx.hf.compare's gates and kvx.hf.stress against torch."""

import pytest
import torch
from conftest import passed, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvx.hf
from kvx import _core

TOKENS = torch.randint(3, 97, (100,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_attention_is_measured_beside_the_base(name):
    model = tiny_model(name)
    base, same, int8, int4 = kvx.hf.compare(
        model,
        TOKENS,
        ["bf16:immediate", "int8", "int4"],
        context=100,
        windows=1,
        attention=True,
    )
    assert base.outputs is None and base.logits is None
    for errors in (same.outputs, same.logits):
        assert errors.error.shape == (4, 2) and errors.error.max() == 0
    for kind in ("outputs", "logits"):
        small, large = getattr(int8, kind), getattr(int4, kind)
        assert 0 < small.error.min() and 4 * small.error.max() < large.error.max()
        assert large.cosine.min() < small.cosine.min() < 1


def test_outputs_and_logits_are_what_torch_says():
    model = tiny_model("llama", num_hidden_layers=1)
    _, int4 = kvx.hf.compare(
        model, TOKENS[:65], ["int4"], context=65, windows=1, base="f32", attention=True
    )
    seen = {}
    project = model.model.layers[0].self_attn

    def record(query, key, value, *options):
        seen.update(query=query[0], key=key[0], value=value[0])
        return type(layer).attend(layer, query, key, value, *options)

    cache = kvx.hf.Cache(model.config, "f32", max_tokens=65)
    layer = cache.layers[0]
    layer.attend = record
    with torch.no_grad():
        model(input_ids=TOKENS[None, :65], **passed(cache))
    packed = kvx.Cache(num_layers=1, num_kv_heads=2, head_dim=32, recipe="int4", max_tokens=65)
    sequence = packed.create_sequence()
    q, k, v = (seen[name].transpose(0, 1).contiguous() for name in ("query", "key", "value"))
    with packed.step([(sequence, 65)]):
        out = packed.append_and_attend(0, q, k, v, softmax_scale=project.scaling)
    stored, _ = packed.gather(sequence, 0, like=q)
    exact = torch.nn.functional.scaled_dot_product_attention(
        seen["query"][None],
        seen["key"][None].repeat_interleave(2, 1),
        seen["value"][None].repeat_interleave(2, 1),
        is_causal=True,
        scale=project.scaling,
    )[0].transpose(0, 1)
    # Scored tokens are 32 to 64; only the 64th from there, the last one, shows its logits.
    for head in range(2):
        queries = slice(2 * head, 2 * head + 2)
        difference = (out - exact)[32:, queries].double().norm()
        expected = (difference / exact[32:, queries].double().norm()).item()
        assert int4.outputs.error[0, head] == pytest.approx(expected, rel=1e-3)
        own, other = (q[-1, queries].double() @ x[:, head].double().T for x in (k, stored))
        expected = ((other - own).norm() / own.norm()).item()
        assert int4.logits.error[0, head] == pytest.approx(expected, rel=1e-3)


def test_gates_raise_what_was_measured():
    model = tiny_model("llama")
    options = dict(context=50, windows=2)
    figures = kvx.hf.compare(model, TOKENS, ["int8"], fail_if="kl>5,saturated>0", **options)
    assert figures[1].outputs is None and figures[1].saturated_inputs == 0
    with pytest.raises(kvx.GateError, match="int4: error is .* in layer") as caught:
        kvx.hf.compare(model, TOKENS, ["int4"], fail_if="error>0", **options)
    assert caught.value.comparison[1].logits is None
    with pytest.raises(kvx.Error, match="fail_if has 'k>1'"):
        kvx.hf.compare(model, TOKENS, ["int4"], fail_if="k>1", **options)


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_stress_scores_answers_as_one_pass_does(bytes_model):
    model, tokenizer = bytes_model
    report = kvx.hf.stress(
        model, tokenizer, ["int4"], lengths=[400], samples=1, drift_tokens=0, seed=2, base="f32"
    )
    assert [(s.task, s.cache) for s in report.retrieval[:2]] == [("passkey", "f32"), ("passkey", "int4")]
    text, [(question, answer, _)] = _core.retrieval_text(
        0, 2 * 1000003 + 400 * 101, 400, lambda text: len(text.encode())
    )
    ids = tokenizer(text + question + answer, return_tensors="pt")["input_ids"]
    count = len(answer)
    for score in report.retrieval[:2]:
        cache = kvx.hf.Cache(model.config, score.cache, max_tokens=400)
        with torch.no_grad():
            logits = model(input_ids=ids, **passed(cache)).logits[0, -count - 1 : -1]
        log = logits.double().log_softmax(-1)
        nll = -log[range(count), ids[0, -count:]].mean().item()
        assert score.nll.value == pytest.approx(nll, rel=1e-4)
    assert report.drift == [] and report.clipped == report.nonfinite == {"f32": 0, "int4": 0}


def test_drift_grows_with_the_error_and_is_none_for_the_base(bytes_model):
    model, tokenizer = bytes_model
    recipes = ["f32:immediate", "int8", "int4"]
    options = dict(lengths=[], drift_tokens=80, base="f32", shows_progress=False)
    report = kvx.hf.stress(model, tokenizer, recipes, **options)
    kl = {name: sum(p.kl.value for p in report.drift if p.cache == name) for name in recipes}
    assert kl["f32:immediate"] == 0 < kl["int8"] < kl["int4"]
    assert [p.first_token for p in report.drift if p.cache == "int8"] == list(range(0, 80, 10))
    assert kvx.hf.stress(model, tokenizer, recipes, **options).drift == report.drift


def test_stress_gates_raise_the_report(bytes_model):
    model, tokenizer = bytes_model
    recipes = ["f32:immediate", "int4"]
    options = dict(lengths=[400, 500], samples=1, drift_tokens=80, base="f32", shows_progress=False)
    kept = "nll>1000,drift>100,passkey<0%,saturated>0,nonfinite>0"
    report = kvx.hf.stress(model, tokenizer, recipes, fail_if=kept, **options)
    parts = {p.kl.value: p for p in report.drift if p.cache == "int4"}
    worst = parts[max(parts)]
    with pytest.raises(kvx.GateError, match="^int4: drift is ") as caught:
        kvx.hf.stress(model, tokenizer, recipes, fail_if="drift>0", **options)
    (failure,) = caught.value.failures  # f32:immediate drifts by nothing
    assert failure.value == worst.kl.value
    end = worst.first_token + worst.num_tokens - 1
    assert failure.where == f"from token {worst.first_token} to {end}"
    assert caught.value.comparison.drift == report.drift
    with pytest.raises(kvx.GateError, match="passkey is .* at [45]00 tokens, not allowed by"):
        kvx.hf.stress(model, tokenizer, recipes, fail_if="passkey<101%", **options)
    with pytest.raises(kvx.GateError, match="nll is .* in .* at [45]00 tokens") as caught:
        kvx.hf.stress(model, tokenizer, recipes, fail_if="nll>-1000", **options)
    assert [failure.cache for failure in caught.value.failures] == recipes


def test_stress_refuses_what_cannot_be(bytes_model):
    for options, message in [
        (dict(lengths=[5000]), "lengths has 5000; expected 16 to 4096"),
        (dict(lengths=[], drift_tokens=5000), "drift_tokens is 5000; expected 0 to 4032"),
        (dict(samples=0), "samples is 0"),
        (dict(lengths=[20]), "20 tokens are too few for the fact"),
        (dict(fail_if="kl>1"), "fail_if has 'kl>1'; expected a condition on one of saturated"),
        (dict(fail_if="drift>1", drift_tokens=0), "fail_if has drift and drift_tokens is 0"),
        (dict(fail_if="nll>1", lengths=[]), "fail_if has nll and lengths is empty"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            kvx.hf.stress(*bytes_model, ["int8"], **{"lengths": [100], **options})
