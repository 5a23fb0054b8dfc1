"""One engine of gpu.py, or the model that its checks share; gpu.py starts these processes.

    gpu_engine.py model FOLDER           a small random Llama and prompts for it
    gpu_engine.py check FOLDER NAME      greedy tokens of one backend, judged by the model in fp32
    gpu_engine.py decode NAME [options]  the time of a decode step of an 8B shape, dummy weights

NAME is a backend of vLLM (FLASH_ATTN), one with a --kv-cache-dtype (TRITON_ATTN/int8_per_token_head,
AUTO/turboquant_4bit_nc where vLLM is to choose the backend) or a recipe of kvx, and ":eager" behind it leaves CUDA graphs out. Each prints one line of JSON
behind the word CHECK or DECODE.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the timed steps are this process's

LLAMA_8B = dict(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=262144,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
    torch_dtype="bfloat16",
)
SMALL = dict(
    num_hidden_layers=8,
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=4096,
    initializer_range=0.05,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
PROMPT_LENGTHS = (5, 17, 64, 130, 257, 511, 700, 1000)
NEW_TOKENS = 64
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no torch.compile: it starts sooner


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True)
    model = roles.add_parser("model")
    model.add_argument("folder", type=Path)
    check = roles.add_parser("check")
    check.add_argument("folder", type=Path)
    check.add_argument("name")
    decode = roles.add_parser("decode")
    decode.add_argument("name")
    decode.add_argument("--batch", type=int, default=64)
    decode.add_argument("--context", type=int, default=4096)
    decode.add_argument("--new-tokens", type=int, default=112)
    decode.add_argument("--cache-bytes", type=int, required=True)
    for engine in (check, decode):
        engine.add_argument("--compiled", action="store_true", help="torch.compile and its graphs")
        engine.add_argument("--gpus", type=int, default=1, help="tensor-parallel ranks")
        engine.add_argument("--start-at", type=Path, help="waits for this file before it starts")
        engine.add_argument("--run-at", type=Path, help="waits for this file before it runs")
    options = parser.parse_args()
    {"model": make_model, "check": check_tokens, "decode": time_decode}[options.role](options)


def make_model(options):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16)
    model.save_pretrained(options.folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, SMALL["vocab_size"], (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]
    (options.folder / "prompts.json").write_text(json.dumps(prompts))


def new_engine(options, model, **more):
    """A vllm.LLM by options.name. Prints READY with the seconds that it took."""
    import vllm.v1.worker.gpu_worker  # noqa: F401  # the slow imports, before the wait
    from vllm import LLM

    name = options.name.removesuffix(":eager")
    backend, _, cache_dtype = name.partition("/")
    if not name.split("/")[0].isupper():  # a recipe
        import kvx.vllm

        kvx.vllm.register()  # vLLM finds an installed kvx by itself
        backend, cache_dtype = "CUSTOM", ""
        more["additional_config"] = {"kvx": {"recipe": name}}
    if name != options.name:
        more["enforce_eager"] = True
    elif not options.compiled:
        more["compilation_config"] = GRAPHS
    print("IMPORTED", flush=True)
    wait_for(options.start_at)
    started = time.perf_counter()
    llm = LLM(
        str(model),
        dtype="bfloat16",
        attention_backend=None if backend == "AUTO" else backend,
        kv_cache_dtype=cache_dtype or "auto",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.02,  # several engines share the GPU
        tensor_parallel_size=options.gpus,
        disable_log_stats=True,
        **more,
    )
    config = llm.llm_engine.vllm_config.cache_config
    print(
        "READY",
        f"{time.perf_counter() - started:.1f} s,",
        f"{config.num_gpu_blocks} blocks of {config.block_size}",
        flush=True,
    )
    wait_for(options.run_at)
    return llm


def wait_for(file):
    while file is not None and not file.exists():
        time.sleep(0.1)


def device_counters(llm):
    """What kvx's kernels counted as wrong in slots, lengths and tables, over all layers and ranks."""
    counted = {}
    for counters in llm.collective_rpc(counters_of_rank):
        for name, count in counters.items():
            counted[name] = counted.get(name, 0) + count
    return counted


def counters_of_rank(worker):
    counted = {}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        pages = getattr(getattr(layer, "impl", None), "pages", None)
        for name, count in (pages.counters() if pages is not None else {}).items():
            counted[name] = counted.get(name, 0) + int(count)
    return counted


def check_tokens(options):
    """Prompts come in chunks beside decodes; then all come again, from cached prefixes."""
    import torch
    from transformers import LlamaForCausalLM
    from vllm import SamplingParams

    llm = new_engine(
        options,
        options.folder,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 30,
    )
    prompts = json.loads((options.folder / "prompts.json").read_text())
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate():
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], outputs

    tokens, _ = generate()
    again, outputs = generate()
    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32).cuda().eval()
    not_best, worst_gap = 0, 0.0
    for prompt, generated in zip(prompts, tokens):
        with torch.inference_mode():
            ids = torch.tensor([prompt + generated[:-1]], device="cuda")
            logits = model(ids).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(generated, device="cuda")[:, None])[:, 0]
        gaps = logits.max(-1).values - chosen
        not_best += int((gaps > 0).sum())
        worst_gap = max(worst_gap, gaps.max().item())
    result = dict(
        name=options.name,
        not_argmax=not_best,
        tokens=NEW_TOKENS * len(prompts),
        worst_logit_gap=round(worst_gap, 3),
        digest=hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:8],
        same_from_cached_prefixes=sum(a == b for a, b in zip(tokens, again)),
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        counters=device_counters(llm),
    )
    print("CHECK", json.dumps(result), flush=True)
    os._exit(0)  # engines end slowly


def time_decode(options):
    import torch
    from transformers import LlamaConfig
    from vllm import SamplingParams

    batch, context, new_tokens = options.batch, options.context, options.new_tokens
    folder = Path(f"/tmp/kvx_bench_8b_{os.getpid()}")
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    budget = 8192
    llm = new_engine(
        options,
        folder,
        load_format="dummy",
        max_model_len=context + new_tokens + 32,
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        kv_cache_memory_bytes=options.cache_bytes,
        enable_prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [
        {"prompt_token_ids": torch.randint(3, 128000, (context,), generator=generator).tolist()}
        for _ in range(batch)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate(prompts[: min(4, batch)], warm, use_tqdm=False)
    ends, engine = [], llm.llm_engine
    step = engine.step

    def timed_step():
        outputs = step()
        ends.append(time.perf_counter())
        return outputs

    engine.step = timed_step
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    prefill_steps = -(-batch * context // budget) + 2
    first, last = prefill_steps + 10, new_tokens - 8  # decodes of all requests, nothing else
    assert last > first, f"{new_tokens} new tokens end before all prompts are computed"
    steps = sorted(b - a for a, b in zip(ends[first:last], ends[first + 1 : last + 1]))
    mean = sum(steps) / len(steps)
    result = dict(
        name=options.name,
        batch=batch,
        context=context,
        ms_a_step=round(mean * 1e3, 3),
        ms_median=round(steps[len(steps) // 2] * 1e3, 3),
        timed_steps=len(steps),
        tokens_a_second=round(batch / mean),
        prefill_s=round(ends[prefill_steps] - started, 2),
        gpu=torch.cuda.get_device_name(),
        counters=device_counters(llm),
    )
    print("DECODE", json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
