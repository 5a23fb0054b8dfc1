"""Decode throughput of vLLM on the CPU: its own attention beside kvx's recipes, in one run.

    python bench/vllm/decode.py MODEL [--recipes int8,int4,nvfp4] [--context 4096] [--batch 8]

MODEL is a folder that vLLM loads. Each engine gets `batch` requests of `context` tokens; then the
steps that decode one token of each are timed. Rounds alternate between the engines, so that a slow
minute of the machine hits all alike. Prompts are not computed, which would take most of the time:
every block of the cache is a copy of one that a real prompt filled. With --prompts N each engine then
computes N whole prompts of `context` tokens, which are timed as well.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # all cores, one process

import torch
from vllm import LLM, SamplingParams

WARM_STEPS = 2
SPARE_TOKENS = 64


class Decoder:
    """An engine whose prompts are in the cache."""

    def __init__(self, recipe, options):
        kvx = {"attention_backend": "CUSTOM", "additional_config": {"kvx": {"recipe": recipe}}}
        self.name = recipe or "vLLM's own"
        self.batch, self.steps, self.prompts = options.batch, [], []
        # The first requests decode while the last ones come.
        tokens = options.context + options.rounds * options.steps + SPARE_TOKENS
        self.llm = LLM(
            options.model,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=tokens,
            max_num_seqs=options.batch,
            kv_cache_memory_bytes=1 << 30,
            skip_tokenizer_init=True,
            **(kvx if recipe else {}),
        )
        config = self.llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        block = config.cache_config.block_size
        prompt = (torch.arange(block + 1) * 97 % config.model_config.get_vocab_size()).tolist()
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
        sampling.max_tokens = 1
        self.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        filled = [layer.kv_cache[1].clone() for layer in layers]  # block 0 is nobody's
        assert all(bytes_of_block.any() for bytes_of_block in filled), "block 1 was not the first"

        (model,) = self.llm.apply_model(lambda model: model)
        hidden = config.model_config.get_hidden_size()
        model.forward = lambda input_ids, *_, **__: torch.zeros(
            len(input_ids), hidden, dtype=torch.bfloat16
        )
        prompt = (prompt * (options.context // len(prompt) + 1))[: options.context]
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
        sampling.max_tokens = tokens - options.context
        for request in range(options.batch):
            self.llm.llm_engine.add_request(str(request), {"prompt_token_ids": prompt}, sampling)
        first_tokens = set()
        while len(first_tokens) < options.batch:
            first_tokens |= {output.request_id for output in self.llm.llm_engine.step()}
        del model.forward
        for layer, bytes_of_block in zip(layers, filled):
            layer.kv_cache.copy_(bytes_of_block[None].expand_as(layer.kv_cache))
        self.cached_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        for _ in range(WARM_STEPS):
            self.llm.llm_engine.step()

    def decode(self, count):
        for _ in range(count):
            started = time.perf_counter()
            outputs = self.llm.llm_engine.step()
            self.steps.append(time.perf_counter() - started)
            assert len(outputs) == self.batch, "a step decoded fewer requests than there are"

    def prompt(self, count, context):
        """Ends the requests; then times prompts, a new one each time."""
        self.llm.llm_engine.abort_request([str(request) for request in range(self.batch)])
        vocabulary = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        for _ in range(count):
            tokens = torch.randint(100, vocabulary, (context,)).tolist()
            started = time.perf_counter()
            self.llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
            self.prompts.append(time.perf_counter() - started)

    def report(self, stock):
        step = statistics.median(self.steps)
        prompts = ", ".join(f"{seconds:.1f}" for seconds in self.prompts)
        return (
            f"{self.name:12} {self.cached_tokens:8} tokens/GiB {self.cached_tokens / stock.cached_tokens:5.2f}x"
            f"   {1000 * step:8.1f} ms/step {self.batch / step:7.1f} tokens/s "
            f"{statistics.median(stock.steps) / step:5.2f}x"
            + (f"   prompts {prompts} s" if prompts else "")
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--recipes", default="int8,int4,nvfp4")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=0, help="timed prompts an engine")
    parser.add_argument("--wait", action="store_true", help="wait for Enter before timing")
    options = parser.parse_args()
    decoders = [Decoder(recipe, options) for recipe in [None, *options.recipes.split(",")]]
    if options.wait:
        input("filled; press Enter to time\n")
    for _ in range(options.rounds):
        for decoder in decoders:
            decoder.decode(options.steps)
    if options.prompts:
        if options.wait:
            input("press Enter to time prompts\n")
        for decoder in decoders:
            decoder.prompt(options.prompts, options.context)
    for decoder in decoders:
        print(decoder.report(decoders[0]), flush=True)


if __name__ == "__main__":
    main()
