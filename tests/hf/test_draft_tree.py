"""The example of drafts in trees: it says the model's own greedy tokens, in fewer steps."""

import runpy
from pathlib import Path

import pytest
import torch
from conftest import SIZES, prompt, stock_tokens, tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "draft_tree.py"
TOKENS = 40


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE), run_name="draft_tree")


def generated(example, num_layers, is_fitted=False, recipe="f32"):
    speculator = example["Speculator"](tiny_model("llama"), num_layers, recipe, 256)
    with torch.inference_mode():
        if is_fitted:
            speculator.fit(prompt(tokens=200, seed=5)[0])
        tokens, steps = speculator.generate(prompt()[0], TOKENS)
    held = speculator.target.cache.num_tokens(speculator.target.sequence)
    assert held == speculator.draft.cache.num_tokens(speculator.draft.sequence) >= 21 + TOKENS - 4
    return tokens, steps


@pytest.mark.parametrize("num_layers", [1, 2, SIZES["num_hidden_layers"]])
def test_the_tokens_are_the_models_own(example, num_layers):
    expected = stock_tokens("llama", {"input_ids": prompt()}, max_new_tokens=TOKENS)
    tokens, steps = generated(example, num_layers, is_fitted=num_layers == 2)
    assert tokens == expected[0, 21:].tolist()
    if num_layers == SIZES["num_hidden_layers"]:  # a draft that is the model is always right
        assert steps == TOKENS // (len(example["WIDTHS"]) + 1)


def test_one_token_is_a_prompt(example):
    speculator = example["Speculator"](tiny_model("llama"), 2, "int8", 64)
    with torch.inference_mode():
        tokens, _ = speculator.generate(torch.tensor([5]), 6)
    assert len(tokens) == 6


def test_a_path_is_the_longest_that_was_said(example):
    tree = example["Tree"].of_chain([1, 2])
    first = tree.add(5, 1)
    second = tree.add(6, 1)
    below = tree.add(7, second)
    tree.add(8, first)
    assert tree.positions(10).tolist() == [10, 11, 12, 12, 13, 13]
    assert tree.mask()[below].tolist() == [1, 1, 0, 1, 1, 0]
    assert tree.longest_path([0, 6, 8, 7, 0, 0]) == [second, below]
    assert tree.longest_path([0, 9, 0, 0, 0, 0]) == []
