"""The reference pages that ./dev docs writes: complete, and without dead links."""

import importlib.util
import re
from pathlib import Path

import pytest

import kvx


@pytest.fixture(scope="module")
def docs():
    path = Path(__file__).parents[2] / "tools" / "dev" / "python_docs.py"
    spec = importlib.util.spec_from_file_location("python_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_its_place_on_a_page(docs, tmp_path):
    assert docs.build(tmp_path, docs.MODULES) == []
    page = (tmp_path / "kvx.html").read_text()
    for name in set(kvx.__all__) - {"__version__"}:
        assert f'id="{name}"' in page, name
    for name in ("quantize", "Cache.append_and_attend", "PagedLayer.attend", "Cache.fork_sequence"):
        assert re.search(rf'id="{name}".*?class="docstring"', page, re.DOTALL), name


def test_arguments_become_a_list_and_paragraphs_stay(docs):
    text = docs.markdown(
        """Stores new tokens.

        k, v:  [tokens, heads]
               after RoPE
        slots: int64 [tokens]

        Raises kvx.Error: a slot.
        """
    )
    assert text == (
        "Stores new tokens.\n\n- **k, v**: [tokens, heads] after RoPE\n"
        "- **slots**: int64 [tokens]\n\nRaises kvx.Error: a slot."
    )


def test_a_link_that_leads_nowhere_is_found(docs, tmp_path):
    (tmp_path / "a.html").write_text('<a href="#here">x</a><p id="here"><a href="b.html#gone">')
    (tmp_path / "b.html").write_text('<a href="a.html#here">x</a><a href="c.html">x</a>')
    assert docs.dead_links(tmp_path) == ["a.html: b.html#gone", "b.html: c.html"]
