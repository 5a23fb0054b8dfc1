"""LMDeploy on a GPU with kvx's blocks: its CUDA operators, CUDA graphs and whole engine. Skips by
name where there is no GPU (tests/python/gpu.py)."""

import sys
from pathlib import Path

import pytest
import torch
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from steps import Model, logits_in_steps, save_model

import kvx.lmdeploy
from kvx.lmdeploy.install import install, uninstall

sys.path.append(str(Path(__file__).parents[1] / "python"))
import gpu  # noqa: E402
from real_model import save_real_model  # noqa: E402

BLOCKS = [[9, 4, 17], [2, 11, 5], [20, 7]]
TOKENS = [list(range(3, 43)), list(range(50, 83)), list(range(20, 40))]
PROMPTS = [30, 7, 16]
TEXTS = ["The capital of France is", "Water boils at", "One, two, three,"]


@pytest.fixture(scope="module", autouse=True)
def needs_gpu():
    gpu.library("torch")


def logits(folder):
    model = Model(folder, block_size=64, dtype=torch.float16, device="cuda")
    return torch.cat(logits_in_steps(model, TOKENS, PROMPTS, BLOCKS)).float()


@pytest.mark.parametrize("recipe, most", [("f16", 0.01), ("int8", 0.05), ("nvfp4:hadamard", 0.5)])
def test_logits_are_near_those_of_policy_0(tmp_path, monkeypatch, recipe, most):
    save_model(tmp_path)
    expected = logits(tmp_path)
    monkeypatch.setenv(kvx.lmdeploy.RECIPE_VARIABLE, recipe)
    install()
    found = logits(tmp_path)
    assert float((found - expected).norm() / expected.norm()) < most


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_real_model(tmp_path_factory.mktemp("real"))


def answers(folder, **fields):
    """Greedy tokens of LMDeploy's engine."""
    config = PytorchEngineConfig(cache_max_entry_count=0.05, max_batch_size=4, **fields)
    with pipeline(folder, backend_config=config) as engine:
        outputs = engine(
            TEXTS,
            gen_config=GenerationConfig(max_new_tokens=12, do_sample=False),
            do_preprocess=False,
        )
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("eager_mode", [True, False], ids=["eager", "graphs"])
def test_the_engine_says_with_8_bits_what_policy_0_says(folder, eager_mode):
    expected = answers(folder, eager_mode=eager_mode)
    kvx.lmdeploy.enable()
    found = answers(folder, eager_mode=eager_mode, quant_policy=8)
    uninstall()
    agreed = [a == b for x, y in zip(expected, found) for a, b in zip(x, y)]
    assert sum(agreed) >= 0.8 * len(agreed)
