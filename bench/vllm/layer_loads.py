"""How soon a prompt's first token comes when its beginning lies in host memory: loaded before its
step, and layer by layer beside it.

    python bench/vllm/layer_loads.py MODEL [--tokens 2048] [--new 64] [--rounds 9]
        [--recipes bf16,nvfp4] [--load-format auto]

MODEL is a folder that vLLM loads; with `--load-format dummy` its config.json is enough. Each way is
an engine in a process of its own. vLLM's own blocks are forgotten before each round, so that
`tokens` come from KvxOffloadingConnector's host tier and `new` are computed. Also the same prompt
with its blocks in vLLM's pages, which loads nothing. Medians and least wall times of a request for
one token.
"""

import argparse
import statistics
import time

from one_engine import has_answered, measure_apart, new_engine


def measure(model, recipe, by_layer, num_tokens, num_new, rounds, load_format):
    """Seconds of each round: from host memory, and from vLLM's pages."""
    length = num_tokens + num_new
    transfer = {
        "kv_connector": "KvxOffloadingConnector",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.vllm.offloading",
            "cpu_bytes_to_use": 1 << 30,
            "load_by_layer": by_layer,
        },
    }
    llm = new_engine(model, recipe, length, load_format, 1 << 29, transfer)
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
    ids = [3 + (j * j * 31 + j) % 40000 for j in range(length)]

    def ask(prompt):
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - began, output.num_cached_tokens

    ask(ids[:num_tokens])
    found = {"host memory": [], "pages": []}
    for i in range(rounds + 1):  # the first warms up
        for place, seconds in found.items():
            for _ in range(2):  # steps in which stores are made
                ask(ids[: 5 + i])
            if place == "host memory":
                assert llm.reset_prefix_cache()
            ids[num_tokens:] = [(7 * i + 3 * j + len(place)) % 40000 for j in range(num_new)]
            wall, num_cached = ask(ids)
            assert num_cached == num_tokens, f"{num_cached} tokens came from {place}"
            if i > 0:
                seconds.append(wall)
    return found


def main():
    if has_answered(measure):
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipes", default="bf16,nvfp4")
    parser.add_argument("--load-format", default="auto")
    options = parser.parse_args()
    for recipe in options.recipes.split(","):
        for by_layer in (False, True):
            arguments = [options.model, recipe, by_layer, options.tokens, options.new]
            arguments += [options.rounds, options.load_format]
            for place, seconds in measure_apart(__file__, arguments).items():
                print(
                    f"{recipe:<8} {'by layer' if by_layer else 'whole':<9} {place:<12} median "
                    f"{1e3 * statistics.median(seconds):8.2f} ms, least {1e3 * min(seconds):8.2f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
