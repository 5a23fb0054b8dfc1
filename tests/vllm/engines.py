"""Engines on tiny random models, so small that vLLM's own start is what takes the time."""

import gc

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

import kvx.hf

SIZES = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
GEMMA = {"sliding_window": 40, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
}
# Rows of latent attention (MLA) as in DeepSeek's models, a quarter of their latent numbers, and their
# YaRN: plain RoPE would turn keys that are a view wrongly in vLLM 0.32's own operator for CPUs.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "rope_parameters": YARN,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
}
LATENT_CONFIGS = {
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 48}),
}
BLOCK = 32


def save_model(name, folder):
    """A random model in `folder`, large weights behind small embeddings: else it repeats itself."""
    config_class, options = {**CONFIGS, **LATENT_CONFIGS}[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in parameter_name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


def prompts(lengths, seed=3):
    torch.manual_seed(seed)
    return [{"prompt_token_ids": torch.randint(3, 97, (n,)).tolist()} for n in lengths]


def transformers_tokens(folder, inputs, recipe=None, count=20):
    """Greedy tokens of transformers' own model, with its cache or with kvx's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if recipe is not None:
        kvx.hf.enable(model)
    found = []
    for prompt in inputs:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None)
        if recipe is not None:
            options["past_key_values"] = kvx.hf.Cache(model.config, recipe)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


class Engine:
    """``with Engine(model, recipe) as engine``: kvx by a recipe, vLLM's own attention for None."""

    def __init__(self, model, recipe=None, **options):
        if recipe is not None:
            options["attention_backend"] = "CUSTOM"
            options.setdefault("additional_config", {"kvx": {"recipe": recipe}})
        defaults = dict(
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 24,
        )
        try:
            self.llm = LLM(model, **{**defaults, **options})
        except BaseException:
            _clean_up()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        _clean_up()

    def tokens(self, inputs, count=20):
        return [output.outputs[0].token_ids for output in self.outputs(inputs, count)]

    def outputs(self, inputs, count=20):
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        return self.llm.generate(inputs, sampling, use_tqdm=False)

    @property
    def cached_tokens(self):
        """That vLLM's memory holds."""
        config = self.llm.llm_engine.vllm_config.cache_config
        return config.num_gpu_blocks * config.block_size


def _clean_up():
    """What an engine keeps in its process, its KV connector among it."""
    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()
