"""copy.deepcopy forks a cache; what cannot be copied or pickled says what to do."""

import copy
import gc
import pickle
import threading

import pytest
import torch
import transformers
from conftest import left_padded, passed, prompt, stock_tokens, tiny_model, tokens_of
from transformers import AutoModelForSeq2SeqLM

import kvx
import kvx.hf
from test_encoder_decoder import SIZES

RECIPES = ["f32", "f32:sink=16,recent=32,full_precision=f32", "int8"]


def continued(first, seed):
    """The inputs of the next turn: what was said, and another question."""
    ids = torch.cat([first, prompt(len(first), 5, seed=seed)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prompt_is_computed_once_and_continued_in_many_ways(model_name, recipe):
    model = kvx.hf.enable(tiny_model(model_name))
    head = prompt(2, 70)
    cache = kvx.hf.Cache(model.config, recipe)
    with torch.no_grad():
        model(input_ids=head, **passed(cache))
    for seed in range(12):  # copies are freed as the variable gets the next one
        fork = copy.deepcopy(cache)
        found = tokens_of(model, fork, continued(head, seed), max_new_tokens=9)
        fresh = kvx.hf.Cache(model.config, recipe)
        with torch.no_grad():
            model(input_ids=head, **passed(fresh))
        expected = tokens_of(model, fresh, continued(head, seed), max_new_tokens=9)
        assert torch.equal(found, expected)
        assert (fork.get_seq_length(), cache.get_seq_length()) == (70 + 5 + 8, 70)


def test_a_copy_takes_no_memory_until_it_writes():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = kvx.hf.Cache(model.config, "f32", block_size=16)
    with torch.no_grad():
        model(input_ids=prompt(2, 64), **passed(cache))
    used = cache.memory()
    fork = copy.deepcopy(cache)
    assert cache.memory() == fork.memory() == used  # of the cache and its copies together
    tokens_of(model, fork, continued(prompt(2, 64), 1), max_new_tokens=2)
    assert used < cache.memory() <= used * 5 // 4
    fork = None
    gc.collect()
    with torch.no_grad():
        model(input_ids=prompt(2, 1), **passed(cache))
    assert cache.memory() <= used * 5 // 4


def test_copies_know_their_own_padding_and_crops():
    model = kvx.hf.enable(tiny_model("llama"))
    inputs = left_padded(2, 30, [0, 11])
    cache = kvx.hf.Cache(model.config, "f32")
    fork = copy.deepcopy(cache)  # of an empty one
    expected = stock_tokens("llama", inputs)
    assert torch.equal(tokens_of(model, cache, inputs), expected)
    other = copy.deepcopy(cache)
    other.crop(-20)
    assert (cache.get_seq_length(), other.get_seq_length()) == (49, 29)
    assert torch.equal(tokens_of(model, other, inputs | {"input_ids": expected[:, :30]}), expected)
    assert torch.equal(tokens_of(model, fork, inputs), expected)


def test_copies_generate_in_two_threads():
    model = kvx.hf.enable(tiny_model("llama"))
    head = prompt(1, 40)
    cache = kvx.hf.Cache(model.config, "f32")
    with torch.no_grad():
        model(input_ids=head, **passed(cache))
    expected = [tokens_of(model, copy.deepcopy(cache), continued(head, seed)) for seed in (1, 2)]
    forks, found = [copy.deepcopy(cache) for _ in range(2)], [None, None]

    def run(i):
        found[i] = tokens_of(model, forks[i], continued(head, i + 1))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_decoding_cache_is_copied():
    model = tiny_model("llama")
    head = prompt(2, 40)
    cache = kvx.hf.DecodingCache(model.config, "int8")
    with torch.no_grad():
        model(input_ids=head, **passed(cache))
    found = []
    for seed in (1, 2, 1):
        found.append(tokens_of(model, copy.deepcopy(cache), continued(head, seed)))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("kind", [kvx.hf.EncoderDecoderCache, kvx.hf.DecodingEncoderDecoderCache])
def test_caches_of_encoder_decoder_models_are_copied(kind):
    torch.manual_seed(7)
    config = transformers.BartConfig(**SIZES)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    if kind is kvx.hf.EncoderDecoderCache:
        kvx.hf.enable(model)
    cache = kind(model.config, "f32")
    first, following = torch.full((2, 3), 5), torch.full((2, 1), 9)
    with torch.no_grad():
        model(input_ids=prompt(2), decoder_input_ids=first, **passed(cache))
        fork = copy.deepcopy(cache)
        options = dict(encoder_outputs=(torch.zeros(2, 21, 64),), decoder_input_ids=following)
        found = model(**options, **passed(fork)).logits
        assert (cache.get_seq_length(), fork.get_seq_length()) == (3, 4)
        assert torch.equal(model(**options, **passed(cache)).logits, found)


def test_pickling_says_what_to_keep_instead():
    config = tiny_model("llama").config
    for cache in (kvx.hf.Cache(config, "int8"), kvx.hf.DecodingCache(config, "int8")):
        message = r"cannot be pickled.*'int8'.*copy.deepcopy\(cache\)"
        for pickled in (pickle.dumps, copy.copy):
            with pytest.raises(kvx.UnsupportedError, match=message):
                pickled(cache)
    both = kvx.hf.EncoderDecoderCache(transformers.BartConfig(**SIZES), "int8")
    with pytest.raises(kvx.UnsupportedError, match="kvx.hf.Cache cannot be pickled"):
        pickle.dumps(both)
    with pytest.raises(kvx.UnsupportedError, match="a single layer cannot be copied"):
        copy.deepcopy(kvx.hf.Cache(config, "int8").layers[0])
