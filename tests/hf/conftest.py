"""Tiny random models, and how their tokens under a kvx cache are compared with DynamicCache's."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

import kvx.hf

torch.set_num_threads(1)  # the models are too small for more

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


def tokens_of(model, cache, inputs, **options):
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    torch.manual_seed(11)
    with torch.no_grad():
        return model.generate(**inputs, past_key_values=cache, **options)


def stock_tokens(name, inputs, **options):
    """What the model generates with eager attention and its own cache."""
    model = tiny_model(name)
    return tokens_of(model, DynamicCache(config=model.config), inputs, **options)


def kvx_tokens(name, inputs, recipe="f32", **options):
    model = kvx.hf.enable(tiny_model(name))
    return tokens_of(model, kvx.hf.Cache(model.config, recipe), inputs, **options)
