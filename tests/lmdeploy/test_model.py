"""LMDeploy's own models with kvx's blocks, judged by transformers' models of the same weights."""

import json

import pytest
import torch
import transformers
from steps import BLOCK, Model, logits_in_steps, save_model

import kvx.hf

# Blocks lie in no order and are not shared; the last sequence ends inside its second block.
BLOCKS = [[9, 4, 17], [2, 11, 5], [20, 7]]
PROMPTS = [30, 7, 16]
LENGTHS = [40, 33, 20]
WINDOW = {"sliding_window": 12}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model(folder)


def tokens():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def expected_logits(model, sequences):
    return [model(torch.tensor([sequence])).logits[0].float() for sequence in sequences]


def worst_difference(found, expected):
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected))


def test_an_f32_cache_gives_transformers_logits(llama, stored_as):
    folder, reference = llama
    stored_as("f32")
    found = logits_in_steps(Model(folder), tokens(), PROMPTS, BLOCKS)
    assert worst_difference(found, expected_logits(reference, tokens())) < 1e-5


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8/int4", "nvfp4:hadamard"])
def test_a_quantised_cache_gives_the_logits_of_kvx_in_transformers(llama, stored_as, recipe):
    folder, _ = llama
    stored_as(recipe)
    found = logits_in_steps(Model(folder), tokens(), PROMPTS, BLOCKS)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvx")
    for logits, sequence, prompt in zip(found, tokens(), PROMPTS):
        cache = kvx.hf.Cache(reference.config, recipe, block_size=BLOCK)
        expected = stepwise_logits(reference, cache, sequence, prompt)
        assert worst_difference([logits], [expected]) < 0.05


@torch.inference_mode()
def stepwise_logits(model, cache, sequence, prompt):
    """Of a prompt in one step and every other token in one of its own."""
    ends = [prompt, *range(prompt + 1, len(sequence) + 1)]
    rows = [
        model(torch.tensor([sequence[start:end]]), past_key_values=cache).logits[0]
        for start, end in zip([0, *ends], ends)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize(
    "name, options",
    [
        ("Qwen3Config", {}),
        ("MistralConfig", WINDOW),
        ("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}),
    ],
)
def test_other_models(tmp_path, stored_as, name, options):
    """Normed keys; a sliding window in all layers, or in every other one beside softcaps.

    LMDeploy's operators see as many tokens before a query's own as sliding_window says, one more
    than transformers.
    """
    reference = save_model(tmp_path, getattr(transformers, name), **options)
    if "sliding_window" in options:
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        config["sliding_window"] -= 1
        file.write_text(json.dumps(config))
    stored_as("f32")
    found = logits_in_steps(Model(tmp_path), tokens(), PROMPTS, BLOCKS)
    assert worst_difference(found, expected_logits(reference, tokens())) < 1e-4


def test_a_prompt_in_chunks_and_a_shared_prefix(llama, stored_as):
    folder, reference = llama
    stored_as("f32")
    model = Model(folder)
    first, second = tokens()[0], tokens()[0][:32] + tokens()[1][:5]
    parts = [model.step([(first[a:b], a, BLOCKS[0])]) for a, b in ((0, 10), (10, 33), (33, 40))]
    shared = BLOCKS[0][:2] + [13]  # two whole blocks of the first sequence, and one of its own
    tail = model.step([(second[32:], 32, shared)])
    expected = expected_logits(reference, [first, second])
    assert worst_difference([torch.cat(parts), tail], [expected[0], expected[1][32:]]) < 1e-5


def test_a_block_has_the_bytes_of_its_pages(llama, stored_as):
    """What LMDeploy's memory budget divides by: 8 bits and 1/32 scale of 16 a number."""
    folder, _ = llama
    stored_as("int8")
    model = Model(folder, block_size=64)
    numbers = 3 * 64 * 2 * 2 * 64  # layers, tokens, K and V, heads, head_dim
    assert model.plan.logical_block_nbytes == numbers * 33 // 32
    assert all(k_cache.is_contiguous() and not v_cache.numel() for k_cache, v_cache in model.caches)


def test_copied_blocks_are_read_as_the_first_ones(llama, stored_as):
    """LMDeploy's own copy of blocks moves whole pages."""
    folder, reference = llama
    stored_as("int4")
    model = Model(folder)
    sequence = tokens()[0]
    model.step([(sequence[:-1], 0, BLOCKS[0])])
    copies = [1, 3, 6]
    for k_cache, _ in model.caches:
        k_cache[copies] = k_cache[BLOCKS[0]]
    a, b = (model.step([(sequence[-1:], 39, blocks)]) for blocks in (BLOCKS[0], copies))
    assert torch.equal(a, b)
