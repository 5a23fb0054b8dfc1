"""kvx.hf.compare against the same measures by torch."""

import pytest
import torch
from conftest import passed, tiny_model

import kvx.hf


def test_caches_are_measured_as_torch_measures_them():
    model = kvx.hf.enable(tiny_model("llama"))
    torch.manual_seed(2)
    tokens = torch.randint(3, 97, (80,))
    figures = kvx.hf.compare(model, tokens, ["int4"], context=40, windows=2, base="f32")
    logs = {"f32": [], "int4": []}
    for start in (0, 40):
        window = tokens[start : start + 40]
        for recipe, rows in logs.items():
            cache = kvx.hf.Cache(model.config, recipe)
            with torch.no_grad():
                found = model(input_ids=window[None], **passed(cache)).logits[0, 20:39]
            rows.append((found.double().log_softmax(-1), window[21:]))
    nll = {
        recipe: torch.cat([-log[range(19), targets] for log, targets in rows])
        for recipe, rows in logs.items()
    }
    base, int4 = figures
    assert (base.name, int4.name) == ("f32", "int4") and int4.bits_per_value == 4.5
    assert base.kl.value == 0 and base.same_top_percent.value == 100
    assert int4.perplexity.value == pytest.approx(nll["int4"].mean().exp().item(), rel=1e-5)
    change = 100 * torch.expm1((nll["int4"] - nll["f32"]).mean()).item()
    assert int4.change_percent.value == pytest.approx(change, rel=1e-3)
    kl = torch.cat(
        [(p.exp() * (p - q)).sum(-1) for (p, _), (q, _) in zip(logs["f32"], logs["int4"])]
    )
    assert int4.kl.value == pytest.approx(kl.mean().item(), rel=1e-4)


def test_too_short_a_text_is_refused():
    with pytest.raises(kvx.Error, match="10 tokens; 4 windows of 2048 need 8192"):
        kvx.hf.compare(tiny_model("llama"), range(10), ["int8"])


def test_a_bar_shows_the_windows_unless_it_is_not_wanted(capsys):
    options = dict(context=8, windows=2, base="f32")
    for shown in (True, False):
        kvx.hf.compare(tiny_model("llama"), range(3, 19), [], shows_progress=shown, **options)
        assert ("windows" in capsys.readouterr().err) == shown
