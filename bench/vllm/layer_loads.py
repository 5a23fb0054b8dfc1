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
import json
import os
import statistics
import subprocess
import sys
import time


def measure(model, recipe, by_layer, num_tokens, num_new, rounds, load_format):
    """Seconds of each round: from host memory, and from vLLM's pages."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    length = num_tokens + num_new
    llm = LLM(
        model,
        attention_backend="CUSTOM",
        additional_config={"kvx": {"recipe": recipe}},
        dtype="bfloat16",
        load_format=load_format,
        enforce_eager=True,
        block_size=64,
        max_model_len=length + 64,
        max_num_batched_tokens=length + 64,
        kv_cache_memory_bytes=1 << 29,
        skip_tokenizer_init=True,
        kv_transfer_config={
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
        },
    )
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
    if sys.argv[1:2] == ["--engine"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
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
            done = subprocess.run(
                [sys.executable, __file__, "--engine", json.dumps(arguments)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for place, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                print(
                    f"{recipe:<8} {'by layer' if by_layer else 'whole':<9} {place:<12} median "
                    f"{1e3 * statistics.median(seconds):8.2f} ms, least {1e3 * min(seconds):8.2f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
