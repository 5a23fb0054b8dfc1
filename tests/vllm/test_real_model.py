"""The demo's model: how many tokens a GiB holds, what it generates, the documentation's blocks."""

import functools
import importlib.util
from pathlib import Path

import pytest
import vllm
from engines import Engine
from real_model import save_real_model

pytestmark = pytest.mark.usefixtures("in_this_process")

ROOT = Path(__file__).parents[2]
PROMPT = {"prompt": "The capital of France is"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_real_model(tmp_path_factory.mktemp("model"))


def engine(model, recipe=None):
    options = dict(skip_tokenizer_init=False, block_size=128, max_model_len=1024)
    return Engine(model, recipe, dtype="bfloat16", kv_cache_memory_bytes=1 << 30, **options)


@pytest.fixture(scope="module")
def stock_tokens(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with engine(model) as stock:
            return stock.cached_tokens


@pytest.mark.parametrize("recipe, times", [("int8", 1.85), ("int4", 3.4), ("nvfp4", 3.4)])
def test_a_gib_holds_more_tokens_and_france_keeps_its_capital(model, stock_tokens, recipe, times):
    with engine(model, recipe) as kvx_engine:
        assert kvx_engine.cached_tokens >= times * stock_tokens
        (tokens,) = kvx_engine.tokens([PROMPT], count=1)
        assert kvx_engine.llm.get_tokenizer().decode(tokens) == " Paris"


def load_pages():
    path = ROOT / "tests" / "python" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    return pages


def test_every_block_of_the_vllm_page_runs(model):
    assert load_pages().run_blocks("docs/vllm.md", model=model) == 1


def test_the_block_of_the_readme_runs(model, capsys, monkeypatch):
    """Without vLLM's default of 92 % of the machine's memory, some of which others may use."""
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, kv_cache_memory_bytes=1 << 30))
    assert load_pages().run_blocks("README.md", " vllm", model=model) == 1
    assert "Paris" in capsys.readouterr().out
