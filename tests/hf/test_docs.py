"""The blocks of docs/transformers.md, with a tiny model in the place of the reader's."""

import importlib.util
from pathlib import Path

from conftest import left_padded, tiny_model

import kvx


def test_every_block_of_the_transformers_page_runs():
    path = Path(__file__).parents[1] / "python" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    inputs = left_padded(1, 30, [0])
    assert pages.run_blocks("docs/transformers.md", model=tiny_model("qwen3"), inputs=inputs) == 5
    kvx.set_num_threads(0)  # a block chose torch's
