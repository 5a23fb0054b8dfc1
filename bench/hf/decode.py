"""Decode in transformers on the CPU: DynamicCache with SDPA beside kvx's recipes, in one run.

    python bench/hf/decode.py MODEL [--recipes int8,int4] [--context 4096] [--rounds 3]

With --torch-threads each recipe is there twice, on kvx's own threads and on torch's.

MODEL is a folder that transformers loads. Each cache gets the same prompt of `context` tokens; then
steps of one token are timed, in rounds that alternate between the caches, so that a slow minute of
the machine hits all alike. Afterwards each cache is dropped: what the process's resident memory
loses by that is the cache's, and tracemalloc measures its Python objects.
"""

import argparse
import gc
import statistics
import time
import tracemalloc

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvx.hf
from kvx.hf.interface import passed
from kvx.threads import use_torch_threads

WARM_STEPS = 2


class Decoder:
    """A cache that holds the prompt, and the attention that reads it."""

    def __init__(self, model, recipe, on_torch_threads, options):
        self.model, self.recipe, self.steps = model, recipe, []
        self.name = recipe or "DynamicCache, SDPA"
        if on_torch_threads:
            self.name += ", torch's threads"
            use_torch_threads()
        else:
            kvx.set_num_threads(0)
        self.token = torch.tensor([[17]])
        tokens = options.context + WARM_STEPS + options.rounds * options.steps + 1
        torch.manual_seed(1)
        prompt = torch.randint(100, model.config.vocab_size, (1, options.context))
        tracemalloc.start()
        self.use()
        self.cache = (
            kvx.hf.Cache(model.config, recipe, max_tokens=tokens)
            if recipe
            else DynamicCache(config=model.config)
        )
        started = time.perf_counter()
        for part in prompt.split(512, dim=1):
            model(input_ids=part, logits_to_keep=1, **passed(model, self.cache))
        self.prompt_seconds = time.perf_counter() - started
        gc.collect()
        self.python_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.decode(WARM_STEPS)
        self.steps.clear()

    def use(self):
        self.model.set_attn_implementation(kvx.hf.NAME if self.recipe else "sdpa")

    def decode(self, count):
        self.use()
        for _ in range(count):
            started = time.perf_counter()
            logits = self.model(input_ids=self.token, **passed(self.model, self.cache)).logits
            self.token = logits[:, -1:].argmax(-1)
            self.steps.append(time.perf_counter() - started)

    def counted_bytes(self):
        """Bytes that the cache reports to hold."""
        if self.recipe:
            return self.cache.memory()
        return sum(t.nbytes for layer in self.cache.layers for t in (layer.keys, layer.values))

    def drop(self):
        """Resident bytes that are freed with the cache."""
        self.counted = self.counted_bytes()
        gc.collect()
        before = resident_bytes()
        self.cache = None
        gc.collect()
        self.resident = before - resident_bytes()

    def report(self, stock):
        step, prompt = statistics.median(self.steps), self.prompt_seconds
        return (
            f"{self.name:28} {1000 * step:7.1f} ms/step {1 / step:6.1f} tokens/s "
            f"{statistics.median(stock.steps) / step:5.2f}x   prompt {prompt:6.1f} s   "
            f"{self.counted / 2**20:7.1f} MiB counted {self.resident / 2**20:7.1f} resident "
            f"{self.python_bytes / 2**20:5.2f} Python"
        )


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--recipes", default="int8,int4,nvfp4:auto")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch-threads", action="store_true", help="measure torch's threads too")
    parser.add_argument("--wait", action="store_true", help="wait for Enter before timing")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        pools = [False, True] if options.torch_threads else [False]
        decoders = [Decoder(model, None, False, options)] + [
            Decoder(model, recipe, on_torch_threads, options)
            for recipe in options.recipes.split(",")
            for on_torch_threads in pools
        ]
        if options.wait:
            input("filled; press Enter to time\n")
        for _ in range(options.rounds):
            for decoder in decoders:
                decoder.decode(options.steps)
    for decoder in decoders:
        decoder.drop()
    for decoder in decoders:
        print(decoder.report(decoders[0]), flush=True)


if __name__ == "__main__":
    main()
