"""Decode in transformers on a GPU: transformers' own caches beside kvx's recipes, in one run.

    python bench/hf/decode_gpu.py [--recipes bf16,int8,nvfp4] [--batch 8] [--context 16384]

The model has Llama-3-8B's shape and random weights in bf16. Each cache in turn gets the same prompts,
in parts of 512 tokens, then steps of one token a sequence are timed, host work included; the median
is what counts. The memory is what torch and kvx have allocated for the cache.
"""

import argparse
import gc
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvx.hf
from kvx.hf.interface import passed

LLAMA_8B = dict(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)
WARM_STEPS = 3
PART = 512


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="bf16,int8,nvfp4,nvfp4:auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32, help="fewer for a smaller GPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_8B | {"num_hidden_layers": options.layers}, dtype=torch.bfloat16)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
    print(f"{torch.cuda.get_device_name()}, {options.batch} x {options.context} tokens")
    print("| cache | ms a step | beside the first | prompt s | GiB |")
    print("|---|---:|---:|---:|---:|")
    first = None
    for name in ["DynamicCache", "StaticCache", *options.recipes.split(",")]:
        with torch.inference_mode():
            step, prompt, bytes_held = time_one(name, model, options)
        first = first or step
        print(
            f"| {name} | {1e3 * step:.2f} | {first / step:.2f} | {prompt:.1f} | "
            f"{bytes_held / 2**30:.2f} |",
            flush=True,
        )


def new_cache(name, model, options):
    tokens = options.context + WARM_STEPS + options.steps + 1
    if name == "DynamicCache":
        return DynamicCache(config=model.config)
    if name == "StaticCache":
        return StaticCache(config=model.config, max_cache_len=tokens)
    return kvx.hf.Cache(model.config, name, max_tokens=tokens, max_batch=options.batch)


def time_one(name, model, options):
    is_stock = name.endswith("Cache")
    model.set_attn_implementation("sdpa" if is_stock else kvx.hf.NAME)
    gc.collect()
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    cache = new_cache(name, model, options)
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(
        100,
        model.config.vocab_size,
        (options.batch, options.context),
        device="cuda",
        generator=generator,
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    for part in ids.split(PART, dim=1):
        logits = model(input_ids=part, logits_to_keep=1, **passed(model, cache)).logits
    torch.cuda.synchronize()
    prompt = time.perf_counter() - began
    times, token = [], logits[:, -1:].argmax(-1)
    for _ in range(WARM_STEPS + options.steps):
        began = time.perf_counter()
        logits = model(input_ids=token, **passed(model, cache)).logits
        token = logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    del logits, ids
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    return statistics.median(times[WARM_STEPS:]), prompt, free_before - free_after


if __name__ == "__main__":
    main()
