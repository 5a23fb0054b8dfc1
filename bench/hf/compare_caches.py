"""kvx beside every cache that transformers has, on one model and text: memory, speed, quality.

    python bench/hf/compare_caches.py MODEL TEXT [--context 4096] [--rounds 4] [--threads 1]

MODEL is a folder that transformers loads, or a GGUF file (needs the package gguf). QuantizedCache
needs optimum-quanto and hqq; a backend that does not run is reported with its reason.

memory:  bytes of all tensors of the cache, or of its kvx blocks, after `context` tokens
speed:   steps of one token after them, in rounds that alternate between the caches, so that a slow
         minute of the machine hits all alike; the median of wall time, its ratio to DynamicCache's,
         and the least CPU time of a step (all threads), which other processes change less
quality: the same steps, of the text's own tokens: KL divergence of the predictions from
         DynamicCache's, and how often both put the same token first
"""

import argparse
import importlib.metadata
import statistics
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    QuantizedCache,
    StaticCache,
)

import kvx.hf
from kvx.hf.interface import passed

CHUNK = 512  # tokens of the prompt at once
RECIPES = ("bf16", "int8", "int4", "int4:auto", "nvfp4:auto")
GROUPS = dict(q_group_size=64, residual_length=128)


def caches_of(config, tokens):
    """name -> how the cache is made"""
    made = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=tokens),
        "QuantizedCache fp8": lambda: QuantizedCache("fp8", config),
        "QuantizedCache quanto, 4 bits": lambda: QuantizedCache(
            "quanto", config, nbits=4, **GROUPS
        ),
    }
    for bits in (8, 4):
        made[f"QuantizedCache hqq, {bits} bits"] = lambda bits=bits: QuantizedCache(
            "hqq", config, nbits=bits, axis_key=1, axis_value=1, **GROUPS
        )
    for recipe in RECIPES:
        made[f"kvx {recipe}"] = lambda recipe=recipe: kvx.hf.Cache(
            config, recipe, max_tokens=tokens
        )
    return made


def tensor_bytes(thing, seen):
    """Bytes of every tensor inside of a cache, each once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor) and not hasattr(thing, "__tensor_flatten__"):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(tensor_bytes(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(tensor_bytes(value, seen) for value in thing)
    return tensor_bytes(vars(thing), seen) if hasattr(thing, "__dict__") else 0


class Contender:
    """A cache that holds the prompt, and what was measured of it."""

    def __init__(self, name, model, make, prompt):
        self.name, self.model = name, model
        self.seconds, self.cpu_seconds, self.kl, self.same = [], [], [], []
        self.cache = make()
        self.next(prompt)
        self.bytes = (
            self.cache.memory()
            if isinstance(self.cache, kvx.hf.Cache)
            else tensor_bytes(self.cache.layers, set())
        )

    def next(self, ids):
        """The prediction after these tokens, as log-probabilities."""
        is_kvx = isinstance(self.cache, kvx.hf.Cache)
        self.model.set_attn_implementation(kvx.hf.NAME if is_kvx else "sdpa")
        for part in ids.split(CHUNK, dim=1):
            out = self.model(input_ids=part, logits_to_keep=1, **passed(self.model, self.cache))
        return out.logits[0, -1].float().log_softmax(-1)

    def step(self, token):
        started, cpu_started = time.perf_counter(), time.process_time()
        prediction = self.next(token)
        self.cpu_seconds.append(time.process_time() - cpu_started)
        self.seconds.append(time.perf_counter() - started)
        return prediction

    def judge(self, right, found):
        self.kl.append(float((right.exp() * (right - found)).sum()))
        self.same.append(float(right.argmax() == found.argmax()))

    def row(self, base):
        step, size = statistics.median(self.seconds), self.bytes
        faster = statistics.median(base.seconds) / step
        return (
            f"| {self.name} | {size / 2**20:.1f} | {base.bytes / size:.2f} | {1000 * step:.0f} | "
            f"{faster:.2f} | {1000 * min(self.cpu_seconds):.0f} | {statistics.mean(self.kl):.4f} | "
            f"{100 * statistics.mean(self.same):.1f} |"
        )


def load(path):
    where = dict(pretrained_model_name_or_path=path)
    if path.suffix == ".gguf":
        where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def start(name, model, make, prompt):
    try:
        return Contender(name, model, make, prompt)
    except Exception as error:  # what a library lacks on this machine is its result
        words = str(error).splitlines() or [""]
        print(f"{name}: not measured: {type(error).__name__}: {words[0]}")
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16, help="steps a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, help="of torch and kvx; all cores when left out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
        kvx.set_num_threads(options.threads)
    model, tokenizer = load(options.model)
    tokens = options.context + options.steps * options.rounds
    ids = tokenizer(options.text.read_text()[: 8 * tokens], return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        parser.error(f"the text has {ids.shape[1]} tokens; {tokens} are needed")
    prompt = ids[:, : options.context]
    with torch.inference_mode():
        contenders = [
            start(name, model, make, prompt)
            for name, make in caches_of(model.config, tokens).items()
        ]
        contenders = [contender for contender in contenders if contender]
        for first in range(options.context, tokens, options.steps):
            right = None
            for contender in contenders:
                steps = range(first, first + options.steps)
                found = [contender.step(ids[:, t : t + 1]) for t in steps]
                right = right or found  # DynamicCache is the first
                for pair in zip(right, found):
                    contender.judge(*pair)
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "transformers"))
    print(f"{options.model.name}, {options.context} tokens, {tokens - options.context} steps")
    print(f"{versions}, kvx {kvx.__version__} on {kvx.num_threads()} threads")
    print(
        "| cache | MiB | times smaller | ms a step | times faster | least CPU ms | KL | "
        "same first token, % |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    print(*(contender.row(contenders[0]) for contender in contenders), sep="\n")


if __name__ == "__main__":
    main()
