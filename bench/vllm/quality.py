"""How close vLLM's next tokens are with kvx's pages to those with pages of 16 bits: KL on a text.

    python bench/vllm/quality.py MODEL TEXT [--recipes nvfp4:auto,int3_dual:auto] [--tokens 2048]

MODEL is a folder or a name as vLLM takes it, TEXT a file. The text's first tokens are one prompt,
computed in chunks of a block, so that every query has the recent tokens that its recipe promises.
KL is of the 20 likeliest tokens under 16 bits and one for all others, in nats, averaged over the
second half of the text. Each recipe runs in an engine of its own, one after the other.
"""

import argparse
import json
import math
import multiprocessing
import os
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process has kvx's backend
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

LIKELY = 20  # vLLM's own limit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipes", default="nvfp4:auto,int3_dual:auto,int2_dual:auto")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    reference = distributions_of("bf16", options)
    print("| recipe | KL | perplexity, % |\n|---|---:|---:|")
    for recipe in options.recipes.split(","):
        found = distributions_of(recipe, options)
        pairs = list(zip(reference, found))[options.tokens // 2 :]
        kl = sum(divergence(a["likely"], b["likely"]) for a, b in pairs) / len(pairs)
        change = sum(a["token"] - b["token"] for a, b in pairs) / len(pairs)
        print(f"| {recipe} | {kl:.4f} | {100 * math.expm1(change):+.2f} |", flush=True)


def divergence(reference, found):
    """Both are log probabilities by token. Tokens that are not in both are among the others."""
    shared = [token for token in reference if token in found]
    p = [math.exp(reference[token]) for token in shared]
    q = [math.exp(found[token]) for token in shared]
    p.append(max(1 - sum(p), 1e-9))
    q.append(max(1 - sum(q), 1e-9))
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def distributions_of(recipe, options):
    """Of each token of the text behind the first, in a process of its own."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=compute, args=(recipe, options, sender)
    )
    process.start()
    sender.close()
    try:
        return json.loads(receiver.recv(), object_hook=with_numbers)
    finally:
        process.join()


def with_numbers(entry):
    return {int(k) if k.isdecimal() else k: v for k, v in entry.items()}


def compute(recipe, options, sender):
    import kvx.vllm
    from vllm import LLM, SamplingParams

    kvx.vllm.register()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        attention_backend="CUSTOM",
        additional_config={"kvx": {"recipe": recipe}},
        block_size=options.block_size,
        max_num_batched_tokens=options.block_size,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        max_model_len=options.tokens + options.block_size,
        max_num_seqs=1,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
    )
    tokens = llm.get_tokenizer().encode(options.text.read_text())[: options.tokens]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=LIKELY, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    found = []
    for token, entries in zip(tokens[1:], output.prompt_logprobs[1:]):
        likely = sorted(entries.items(), key=lambda item: item[1].rank)[:LIKELY]
        likely = {other: entry.logprob for other, entry in likely}
        found.append({"token": entries[token].logprob, "likely": likely})
    sender.send(json.dumps(found))


if __name__ == "__main__":
    main()
