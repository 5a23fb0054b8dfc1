"""The blocks of docs/transformers.md and of README.md, with a tiny model in the place of the reader's."""

import importlib.util
from pathlib import Path

import pytest
import transformers
from conftest import for_this_transformers, left_padded, prompt, save_tiny_model, tiny_model

import kvx


@pytest.fixture
def pages(tmp_path):
    """The pages, with this transformers' name of the argument that passes a cache."""
    path = Path(__file__).parents[1] / "python" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/transformers.md", "docs/guard.md"):
        (tmp_path / page).write_text(for_this_transformers((module.ROOT / page).read_text()))
    module.ROOT = tmp_path
    yield module
    kvx.set_num_threads(0)  # a block chose torch's


def test_the_block_of_the_readme_runs(pages):
    names = dict(model=tiny_model("qwen3"), inputs=left_padded(1, 30, [0]))
    assert pages.run_blocks("README.md", " transformers", **names) == 1


def test_every_block_of_the_guard_page_runs(pages, tmp_path):
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = dict(model=model, tokenizer=tokenizer, tokens=prompt(tokens=200)[0])
    assert pages.run_blocks("docs/guard.md", " transformers", **names) == 2


def test_every_block_of_the_transformers_page_runs(pages, tmp_path, monkeypatch):
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    for loader in ("AutoModelForCausalLM", "AutoTokenizer"):
        load = getattr(transformers, loader).from_pretrained

        def load_tiny(name, load=load, **options):
            assert "/" in name  # a model of the hub
            return load(folder, **options)

        monkeypatch.setattr(getattr(transformers, loader), "from_pretrained", load_tiny)
    assert pages.run_blocks("docs/transformers.md") == 9
