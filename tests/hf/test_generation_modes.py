"""generate() as its other options use a cache: embeddings, chunks, scores, several ends."""

import pytest
import torch
from conftest import CACHE, left_padded, passed, prompt, stock_tokens, tiny_model, tokens_of
from transformers import DynamicCache, GenerationConfig

import kvx
import kvx.hf


def both(name="llama", **options):
    """What generate() returns with DynamicCache and with kvx's."""
    results = []
    for kind in (DynamicCache, kvx.hf.Cache):
        model = tiny_model(name)
        if kind is DynamicCache:
            cache = DynamicCache(config=model.config)
        else:
            cache = kvx.hf.Cache(kvx.hf.enable(model).config, "f32")
        torch.manual_seed(5)
        with torch.no_grad():
            results.append(model.generate(**options, **passed(cache)))
    return results


@pytest.mark.parametrize(
    "options",
    [
        dict(prefill_chunk_size=8),
        dict(num_beams=3, do_sample=True),
        dict(num_beams=4, length_penalty=0.5, early_stopping=True, num_return_sequences=4),
        dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
        dict(min_new_tokens=4, eos_token_id=[5, 6, 7, 8, 9, 10]),
        dict(do_sample=True, min_p=0.05, top_p=0.9, num_return_sequences=3),
        dict(guidance_scale=1.5),
    ],
    ids=lambda options: ",".join(options),
)
def test_the_tokens_are_dynamic_caches(model_name, options):
    inputs = left_padded(2, 30, [0, 11])
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    if "guidance_scale" in options:
        inputs = {name: x[:1] for name, x in inputs.items()}
    expected, found = both(model_name, **inputs, **options)
    assert torch.equal(found, expected)


def test_embeddings_in_the_place_of_tokens(model_name):
    options = dict(max_new_tokens=12, do_sample=False, inputs_embeds=None)
    embeddings = tiny_model(model_name).get_input_embeddings()
    with torch.no_grad():
        options["inputs_embeds"] = embeddings(prompt(2, 20))
    expected, found = both(model_name, **options)
    assert torch.equal(found, expected)


def test_scores_logits_and_the_cache_come_back(model_name):
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    options |= dict(output_scores=True, output_logits=True, output_hidden_states=True)
    expected, found = both(model_name, **left_padded(2, 20, [0, 3]), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)
    assert len(found.hidden_states) == len(found.scores) == 6
    cache = getattr(found, CACHE)
    assert isinstance(cache, kvx.hf.Cache) and cache.get_seq_length() == 25


def test_a_generation_goes_on_from_the_cache_that_came_back():
    model = kvx.hf.enable(tiny_model("llama"))
    inputs = {"input_ids": prompt(1, 20)}
    whole = stock_tokens("llama", inputs, max_new_tokens=20)
    cache = kvx.hf.Cache(model.config, "f32")
    options = dict(max_new_tokens=10, return_dict_in_generate=True)
    first = tokens_of(model, cache, inputs, **options)
    mask = torch.ones_like(first.sequences)
    ids = {"input_ids": first.sequences, "attention_mask": mask}
    again = tokens_of(model, getattr(first, CACHE), ids, **options)
    assert torch.equal(again.sequences, whole)


def test_a_cache_implementation_beside_a_cache_is_refused_by_transformers():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.Cache(model.config, "f32")
    with pytest.raises(ValueError, match="cache_implementation"):
        tokens_of(model, cache, {"input_ids": prompt()}, cache_implementation="static")


def test_a_generation_config_of_ones_own():
    model = kvx.hf.enable(tiny_model("llama"))
    config = GenerationConfig(max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
    cache = kvx.hf.Cache(model.config, "f32")
    found = model.generate(prompt(), generation_config=config, **passed(cache))
    assert torch.equal(found, stock_tokens("llama", {"input_ids": prompt()}))
