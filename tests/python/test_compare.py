"""The measures of kvx.compare: against NumPy, and by the tool on the real model."""

import os

import numpy as np
import pytest

import kvx
from kvx import _core


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_quality_is_what_numpy_says():
    rng = np.random.default_rng(4)
    base = rng.standard_normal((130, 1, 50), dtype=np.float32)
    other = base + 0.3 * rng.standard_normal(base.shape, dtype=np.float32)
    targets = rng.integers(0, 50, 130)
    quality = _core.CacheQuality()
    for part in (slice(0, 65), slice(65, 130)):
        quality.add_window(base[part], other[part], targets[part].tolist())
    found = {name: value for name, (value, _) in quality.figures().items()}

    p, q = log_softmax(base[:, 0]), log_softmax(other[:, 0])
    nll_p, nll_q = (-x[np.arange(130), targets].mean() for x in (p, q))
    assert found["perplexity"] == pytest.approx(np.exp(nll_q), rel=1e-6)
    assert found["change_percent"] == pytest.approx(100 * np.expm1(nll_q - nll_p), rel=1e-6)
    assert found["kl"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-5)
    assert found["same_top_percent"] == pytest.approx(100 * (p.argmax(-1) == q.argmax(-1)).mean())


def test_logits_that_do_not_fit_are_refused():
    quality = _core.CacheQuality()
    rows = np.zeros((3, 1, 5), np.float32)
    for bad, message in [
        ((rows, rows[:, :, :4].copy(), [0, 0, 0]), r"logits has the shape \[3, 1, 4\]"),
        ((rows, rows, [0, 0, 5]), "targets has the token 5; expected 0 to 4"),
        ((rows, rows, [0, 0]), "base_logits has the shape"),
        ((rows.astype(np.float16), rows, [0, 0, 0]), "expected float32"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            quality.add_window(*bad)


@pytest.mark.parametrize("recipes", ["int8", []])
def test_recipes_are_a_list(recipes):
    with pytest.raises(kvx.Error, match="recipes is .*; expected a list"):
        kvx.compare("model.gguf", "text.txt", recipes)


TOOL = """\
#!/bin/sh
echo '[..........]   0 %  window 1 of 2, bf16' >&2
echo 'a warning' >&2
echo '[#####.....]  50 %  window 2 of 2, int8  3 s left' >&2
echo 'kvx: the model is not there' >&2
exit 1
"""


@pytest.mark.parametrize("shows_progress", [True, False])
def test_the_tools_progress_moves_a_bar(monkeypatch, tmp_path, shows_progress):
    seen = []

    class Bar:
        def __init__(self, total, desc, leave, unit):
            self.n = 0
            seen.append((total, desc))

        def set_postfix_str(self, text, refresh):
            seen.append(text)

        def update(self, percent):
            self.n += percent
            seen.append(self.n)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen.append("closed")

    tool = tmp_path / "tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tool))
    monkeypatch.setattr("kvx.progress.tqdm", Bar)
    with pytest.raises(kvx.Error, match="^the model is not there$"):
        kvx.compare("model.gguf", "text.txt", ["int8"], shows_progress=shows_progress)
    shown = [(100, "kvx compare"), "window 1 of 2, bf16", 0, "window 2 of 2, int8  3 s left", 50]
    assert seen == ([*shown, "closed"] if shows_progress else [])


def test_a_tool_that_dies_silently_is_reported(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(kvx.Error, match="the tool kvx ended with exit code 1"):
        kvx.compare("model.gguf", "text.txt", ["int8"])


def test_caches_are_compared_on_the_real_model():
    model, text = os.environ["KVX_TEST_MODEL"], os.environ["KVX_TEST_TEXT"]
    bf16, int8, int4 = kvx.compare(model, text, ["int8", "int4:k.hadamard"], context=64, windows=1)
    assert (bf16.name, int8.name, int4.name) == ("bf16", "int8", "int4:k.hadamard")
    assert bf16.kl.value == 0 and 0 < int8.kl.value < int4.kl.value
    assert int8.bits_per_value == 8.25 and int8.perplexity.value > 1


def test_what_the_tool_refuses_is_an_error():
    with pytest.raises(kvx.Error, match="int5"):
        kvx.compare("no.gguf", "no.txt", ["int5"])
