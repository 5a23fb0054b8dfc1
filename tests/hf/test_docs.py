"""The blocks of docs/transformers.md and of README.md, with a tiny model in the place of the reader's."""

import importlib.util
from pathlib import Path

from conftest import left_padded, tiny_model

import kvx


def load_pages():
    path = Path(__file__).parents[1] / "python" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    return pages


def test_the_block_of_the_readme_runs():
    names = dict(model=tiny_model("qwen3"), inputs=left_padded(1, 30, [0]))
    assert load_pages().run_blocks("README.md", " transformers", **names) == 1


def test_every_block_of_the_transformers_page_runs():
    pages = load_pages()
    inputs = left_padded(1, 30, [0])
    assert pages.run_blocks("docs/transformers.md", model=tiny_model("qwen3"), inputs=inputs) == 5
    kvx.set_num_threads(0)  # a block chose torch's
