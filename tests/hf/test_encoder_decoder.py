"""Encoder-decoder models: the tokens of DynamicCache, both caches in kvx's bytes."""

import pytest
import torch
import transformers
from conftest import passed
from transformers import AutoModelForSeq2SeqLM, DynamicCache

import kvx
import kvx.hf

SIZES = dict(
    vocab_size=97,
    d_model=64,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    forced_eos_token_id=None,
    decoder_start_token_id=2,
    tie_word_embeddings=False,  # else a random model repeats its last token
)
RECIPES = ["f32", "f32:sink=16,recent=32,full_precision=f32"]


@pytest.fixture(params=["BartConfig", "MBartConfig", "PegasusConfig"])
def config_class(request):
    return getattr(transformers, request.param)


def random_model(config, unscaled=()):
    """Large weights, so that attention matters; but not where a word of ``unscaled`` is in the name."""
    torch.manual_seed(7)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(word in name for word in unscaled):
                parameter.mul_(8)
    return model


def new_model(config_class, **options):
    return random_model(config_class(**{**SIZES, **options}))


def prompt(hidden=(0, 0)):
    """Two rows of 90 tokens, the last hidden[b] of them padding."""
    torch.manual_seed(5)
    ids = torch.randint(3, 97, (len(hidden), 90))
    mask = torch.ones_like(ids)
    for b, count in enumerate(hidden):
        ids[b, 90 - count :] = 0
        mask[b, 90 - count :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens_of(model, cache, inputs, **options):
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": 1, **options}
    with torch.no_grad():
        return model.generate(**inputs, **passed(cache), **options)


def stock_tokens(config_class, inputs, **options):
    model = new_model(config_class)
    cache = transformers.EncoderDecoderCache(
        DynamicCache(config=model.config), DynamicCache(config=model.config)
    )
    return tokens_of(model, cache, inputs, **options)


def kvx_cache(config_class, recipe):
    model = kvx.hf.enable(new_model(config_class))
    return model, kvx.hf.EncoderDecoderCache(model.config, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hidden", [(0, 0), (0, 37)])
def test_greedy(config_class, recipe, hidden):
    expected = stock_tokens(config_class, prompt(hidden))
    assert len(set(expected[0].tolist())) > 4
    model, cache = kvx_cache(config_class, recipe)
    assert torch.equal(tokens_of(model, cache, prompt(hidden)), expected)


def test_beams_share_the_encoders_pages(config_class):
    options = dict(num_beams=3, num_return_sequences=2)
    expected = stock_tokens(config_class, prompt((0, 5)), **options)
    model, cache = kvx_cache(config_class, "f32")
    assert torch.equal(tokens_of(model, cache, prompt((0, 5)), **options), expected)


def test_a_decoder_prompt_of_several_tokens(config_class):
    inputs = {**prompt(), "decoder_input_ids": torch.tensor([[2, 5, 6, 7], [2, 9, 8, 7]])}
    expected = stock_tokens(config_class, inputs)
    model, cache = kvx_cache(config_class, "f32")
    assert torch.equal(tokens_of(model, cache, inputs), expected)


def test_both_caches_are_packed_and_can_begin_anew(config_class):
    model, cache = kvx_cache(config_class, "int8")
    first = tokens_of(model, cache, prompt())
    used = cache.cross_attention_cache.memory()
    # 3 layers, 2 rows, 2 pages of 64 tokens, K and V, 4 heads of 16 numbers with a 2-byte scale
    assert used == 3 * 2 * 2 * 64 * 2 * 4 * (16 + 2) and cache.memory() > used
    cache.reset()
    assert torch.equal(tokens_of(model, cache, prompt()), first)


def test_what_cannot_be_served_is_refused(config_class):
    model, cache = kvx_cache(config_class, "f32")
    with pytest.raises(kvx.UnsupportedError, match="use kvx.hf.EncoderDecoderCache"):
        kvx.hf.Cache(model.config, "f32")
    model.set_attn_implementation("eager")
    with pytest.raises(kvx.UnsupportedError, match="does not read a kvx cache"):
        tokens_of(model, cache, prompt())
    with pytest.raises(kvx.Error, match="int5"):
        kvx.hf.EncoderDecoderCache(model.config, "int5")


@pytest.mark.parametrize(
    ("recipe", "packed"),
    [
        ("int8", "int8"),
        ("nvfp4:auto", "nvfp4:auto,immediate"),
        ("f32:sink=16,recent=32,full_precision=f32", "f32:immediate"),
        ("int4:k.hadamard,recent=64", "int4:k.hadamard,immediate"),
    ],
)
def test_the_encoders_keys_have_no_16_bit_ends(recipe, packed):
    cache = kvx.hf.EncoderDecoderCache(transformers.BartConfig(**SIZES), recipe)
    assert cache.cross_attention_cache.recipe == packed
    kvx.parse_recipe(packed)


def test_rows_are_repeated_and_chosen_in_both_caches(config_class):
    model, cache = kvx_cache(config_class, "f32")
    with torch.no_grad():
        model(**prompt(), decoder_input_ids=torch.full((2, 3), 5), **passed(cache))
    cache = kvx.hf.EncoderDecoderCache(model.config, "f32", max_batch=4)
    with torch.no_grad():
        model(**prompt(), decoder_input_ids=torch.full((2, 3), 5), **passed(cache))
        cache.batch_repeat_interleave(2)
        assert cache.cross_attention_cache.layers[0].num_rows == 4
        cache.batch_select_indices(torch.tensor([0, 3]))
    assert cache.cross_attention_cache.layers[0].num_rows == 2


T5_SIZES = dict(
    vocab_size=97,
    d_model=64,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=4,
    decoder_start_token_id=0,
    eos_token_id=None,
    tie_word_embeddings=False,
)


def new_t5():
    return random_model(transformers.T5Config(**T5_SIZES), unscaled=("shared", "embed"))


def test_t5_is_refused_by_its_position_bias():
    model = new_t5()
    with pytest.raises(kvx.UnsupportedError, match="t5 adds a position bias"):
        kvx.hf.enable(model)
    with pytest.raises(kvx.UnsupportedError, match="DecodingEncoderDecoderCache"):
        kvx.hf.EncoderDecoderCache(model.config, "f32", max_tokens=64)


@pytest.mark.parametrize("hidden", [(0, 0), (0, 37)])
@pytest.mark.parametrize("options", [{}, dict(num_beams=3, num_return_sequences=2)])
def test_t5_on_decoded_keys_and_values(hidden, options):
    model = new_t5()
    stock = transformers.EncoderDecoderCache(DynamicCache(), DynamicCache())
    expected = tokens_of(model, stock, prompt(hidden), **options)
    assert len(set(expected.flatten().tolist())) > 4
    cache = kvx.hf.DecodingEncoderDecoderCache(model.config, "f32")
    assert torch.equal(tokens_of(model, cache, prompt(hidden), **options), expected)


def test_t5_from_int8():
    model = new_t5()
    cache = kvx.hf.DecodingEncoderDecoderCache(model.config, "int8")
    first = tokens_of(model, cache, prompt())
    # 2 rows; 3 layers; K and V of 4 heads of 16 numbers with a 2-byte scale; 90 of the encoder's
    # tokens in 2 pages of 64 and 30 of the decoder's in 1
    assert cache.memory() == 2 * 3 * 2 * 4 * (16 + 2) * 64 * (2 + 1)
    cache.reset()
    assert torch.equal(tokens_of(model, cache, prompt()), first)
