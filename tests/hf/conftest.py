"""Tiny random models, and how their tokens under a kvx cache are compared with DynamicCache's."""

import inspect

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

import kvx.hf

torch.set_num_threads(1)  # the models are too small for more

# What transformers calls the argument: 5.24 has "cache", and warns of the older name.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:.*past_key_values.*:FutureWarning")


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers at every run."""
    torch.manual_seed(0)


def passed(cache):
    """The keyword argument that passes a cache to a model or to generate()."""
    return {CACHE: cache}


def for_this_transformers(text):
    """Documented code, written for the newest transformers, with this one's name of the argument."""
    return text.replace("cache=", f"{CACHE}=")


SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,  # else a random model repeats its last token
    attn_implementation="eager",
)
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def tiny_model(name, dtype=torch.float32, **sizes):
    config_class, options = CONFIGS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**SIZES, **options, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else a random model repeats one token for ever
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def save_tiny_model(folder, name):
    """Writes a tiny model of 4096 positions and a tokenizer of bytes; returns the folder's name."""
    model = tiny_model(name, vocab_size=256, max_position_embeddings=4096)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=CONFIGS)
def model_name(request):
    return request.param


def prompt(rows=1, tokens=21, seed=3):
    torch.manual_seed(seed)
    return torch.randint(3, 97, (rows, tokens))


def left_padded(rows, tokens, hidden):
    """Input ids and mask; row b begins with hidden[b] pads."""
    ids = prompt(rows, tokens)
    mask = torch.ones_like(ids)
    for b, count in enumerate(hidden):
        ids[b, :count] = 0
        mask[b, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def right_padded(rows, tokens, hidden):
    """Input ids and mask; row b ends with hidden[b] pads."""
    return {name: states.flip(1) for name, states in left_padded(rows, tokens, hidden).items()}


def tokens_of(model, cache, inputs, **options):
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    torch.manual_seed(11)
    with torch.no_grad():
        return model.generate(**inputs, **passed(cache), **options)


def stock_tokens(name, inputs, **options):
    """What the model generates with eager attention and its own cache."""
    model = tiny_model(name)
    return tokens_of(model, DynamicCache(config=model.config), inputs, **options)


def kvx_tokens(name, inputs, recipe="f32", **options):
    model = kvx.hf.enable(tiny_model(name))
    return tokens_of(model, kvx.hf.Cache(model.config, recipe), inputs, **options)
