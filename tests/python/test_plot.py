"""Pictures and tables: they show the figures that they were given."""

import importlib
import os
import runpy
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from reference import random_rows

import kvx

matplotlib.use("Agg")
import kvx.plot  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def figures():
    def cache(name, bits, kl):
        numbers = [kvx.Estimate(value, error) for value, error in kl]
        return kvx.CacheFigures(name, bits, bits * 100, 1000, *numbers)

    zero = [(9.0, 0.5), (0.0, None), (0.0, None), (100.0, None)]
    return kvx.Comparison(
        [
            cache("bf16", 16.0, zero),
            cache("int8", 8.25, [(9.1, 0.5), (1.0, 0.2), (0.002, 0.001), (99.0, 0.1)]),
            cache("<b>", 4.5, [(9.9, 0.5), (8.0, 0.3), (0.06, None), (91.0, 0.1)]),
        ]
    )


def test_a_comparison_is_a_point_a_cache():
    axes = kvx.plot.comparison(figures())
    points = [container[0].get_xydata().tolist()[0] for container in axes.containers]
    assert points == [[8.25, 0.002], [4.5, 0.06]]
    assert [text.get_text() for text in axes.texts] == ["int8", "<b>"]
    assert "bf16" in axes.get_ylabel() and axes.get_yscale() == "log"


def test_memory_is_what_caches_cost():
    sizes = dict(num_layers=2, num_kv_heads=3, head_dim=64)
    axes = kvx.plot.memory(["int8", "nvfp4:auto"], max_tokens=1000, **sizes)
    for line in axes.lines:
        cache = kvx.Cache(recipe=line.get_label(), max_tokens=1000, **sizes)
        tokens, mebibytes = line.get_xydata()[-1]
        assert tokens == 1000
        assert mebibytes * 2**20 == pytest.approx(1000 * cache.cost(1000).bytes_per_token)
    with pytest.raises(kvx.Error, match="int5"):
        kvx.plot.memory(["int5"], **sizes)


def test_errors_are_shares_of_the_numbers_on_the_axes_that_are_given():
    x = random_rows(1, 50, 64)
    own = kvx.plot.errors(x, ["int8", "int4"])
    assert kvx.plot.errors(x, ["f32"], axes=own) is own
    int8, int4, exact = (line.get_ydata() for line in own.lines)
    assert int8.sum() == pytest.approx(1) and int4.sum() == pytest.approx(1)
    assert int8[0] > int4[0] and exact[0] == 1
    error = np.square(kvx.quantize(x, "int4").dequantize() - x).mean()
    assert f"{error:.2g}" in own.lines[1].get_label()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"kvx.plot needs matplotlib: pip install 'kvx\[plot\]'"):
        importlib.reload(kvx.plot)


def test_a_comparison_prints_a_table():
    header, bf16, int8, _ = str(figures()).splitlines()
    assert header.split() == "cache bits bytes/token perplexity change % KL same top %".split()
    assert bf16.split() == ["bf16", "16", "1600", "9", "+-", "0.5", "0", "0", "100"]
    assert int8.startswith("int8") and "0.002 +- 0.001" in int8
    html = figures()._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html and html.count("<tr>") == 4


def test_what_notebooks_show():
    assert repr(kvx.quantize(random_rows(1, 10, 64), "int8")) == (
        "kvx.Rows('int8', 10 rows of 64, 660 bytes, 8.25 bits a value)"
    )
    assert kvx.formats()._repr_html_().count("<tr>") == 1 + len(kvx.formats())
    cache = kvx.Cache(num_layers=1, num_kv_heads=2, head_dim=64, recipe="int8", max_tokens=64)
    sequence = cache.create_sequence()
    with cache.step([(sequence, 1)]):
        cache.append_and_attend(0, random_rows(1, 1, 2, 64), *(random_rows(2, 1, 2, 64),) * 2)
    html = cache._repr_html_()
    assert "int8" in html and f"{cache.memory().used:,}" in html and cache.memory().used > 0


def test_the_example_compares_formats_on_a_model_of_ones_own(monkeypatch, capsys):
    words = [os.environ["KVX_TEST_MODEL"], os.environ["KVX_TEST_TEXT"], "32", "1"]
    monkeypatch.setattr(sys, "argv", ["compare_formats.py", *words])
    names = runpy.run_path(str(EXAMPLES / "compare_formats.py"))
    assert [cache.name for cache in names["figures"]] == ["bf16", *names["recipes"]]
    assert "nvfp4:auto" in capsys.readouterr().out
