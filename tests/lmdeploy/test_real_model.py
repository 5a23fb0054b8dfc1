"""The demo's model in LMDeploy with kvx's blocks: a quantised cache says what policy 0 would."""

import os
import sys
from pathlib import Path

import pytest
import torch
from steps import Model, logits_in_steps
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[1] / "python"))
from real_model import save_real_model  # noqa: E402

TOKENS, PROMPT, BLOCK = 144, 128, 64
BLOCKS = [[3, 1, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if "KVX_TEST_MODEL" not in os.environ or "KVX_TEST_TEXT" not in os.environ:
        pytest.fail("KVX_TEST_MODEL and KVX_TEST_TEXT are not set; ./dev test --lmdeploy sets them")
    return save_real_model(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def text(folder):
    characters = Path(os.environ["KVX_TEST_TEXT"]).read_text()[20000:22000]
    return AutoTokenizer.from_pretrained(folder)(characters).input_ids[:TOKENS]


@pytest.fixture(scope="module")
def by_recipe(folder, text):
    """Log-probabilities of the text's tokens after the prompt, by recipe; each is computed once."""
    found = {}

    def compute(recipe, stored_as):
        if recipe not in found:
            stored_as(recipe)
            model = Model(folder, num_blocks=8, block_size=BLOCK, dtype=torch.float32)
            (logits,) = logits_in_steps(model, [text], [PROMPT], BLOCKS)
            found[recipe] = logits[PROMPT - 1 :].log_softmax(-1)
        return found[recipe]

    return compute


# KL in nats a token, measured with room: 4 bits lose more than 8.
@pytest.mark.parametrize("recipe, most_kl", [("int8", 0.005), ("nvfp4:hadamard", 0.15)])
def test_decoded_tokens_are_likely_as_without_quantisation(stored_as, by_recipe, recipe, most_kl):
    exact, found = by_recipe("f32", stored_as), by_recipe(recipe, stored_as)
    kl = (exact.exp() * (exact - found)).sum(-1).mean()
    agreement = (exact.argmax(-1) == found.argmax(-1)).float().mean()
    assert 0 < float(kl) < most_kl
    assert float(agreement) > 0.85
