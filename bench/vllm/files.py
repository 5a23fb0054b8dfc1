"""What KvxFileConnector costs a CPU's steps, and what bound threads do to them on busy cores.

    python bench/vllm/files.py MODEL [--requests 8] [--prompt 256] [--tokens 64] [--rounds 2]
        [--spinners 2]

MODEL is a folder that vLLM loads. Every engine is a process of its own, once a round: with and
without files, with vLLM's threads bound to cores and not ("nobind"). Rounds alternate, so that a
slow minute of the machine hits all alike. Each engine computes the prompts and decodes, all
requests at once, with another process spinning for each of `spinners`; files are new every time.

Reported of each engine: the least wall time and CPU time (all its threads) of a round, their ratio
to the same threads without files, and how many blocks were written.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from one_engine import has_answered, measure_apart


def measure(model, path, requests, prompt, tokens):
    """One engine's seconds, CPU seconds and files; runs in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    options = {}
    if path:
        options["kv_transfer_config"] = {
            "kv_connector": "KvxFileConnector",
            "kv_connector_module_path": "kvx.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": path},
        }
    llm = LLM(
        model,
        attention_backend="CUSTOM",
        additional_config={"kvx": {"recipe": "int8"}},
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=prompt + tokens + 16,
        max_num_seqs=requests,
        kv_cache_memory_bytes=1 << 28,
        skip_tokenizer_init=True,
        **options,
    )
    sampling = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens
    )

    def prompts(seed):
        ids = range(seed, seed + 1000 * requests, 1000)
        return [{"prompt_token_ids": [3 + (i * 97 + j) % 900 for j in range(prompt)]} for i in ids]

    llm.generate(prompts(1)[:1], sampling, use_tqdm=False)  # warm
    wall, cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts(2), sampling, use_tqdm=False)
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "files": 0}
    if path:
        get_kv_transfer_group().flush()
        found["files"] = len(list(Path(path).glob("*/*.kvx")))
    return found


def spin():
    while True:
        pass


def run_engine(options, is_bound, has_files):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "blocks") if has_files else ""
        arguments = [options.model, path, options.requests, options.prompt, options.tokens]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "auto" if is_bound else "nobind"}
        return measure_apart(__file__, arguments, environment)


def main():
    if has_answered(measure):
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for name, default in dict(requests=8, prompt=256, tokens=64, rounds=2, spinners=0).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    spinners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(options.spinners)]
    for process in spinners:
        process.start()
    kinds = [(is_bound, has_files) for is_bound in (True, False) for has_files in (False, True)]
    found = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(run_engine(options, *kind))
    print(f"{options.spinners} spinners, load {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores")
    print("| threads | files | seconds | ratio | CPU seconds | ratio | blocks written |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for is_bound, has_files in kinds:
        least = {x: min(run[x] for run in found[is_bound, has_files]) for x in ("wall", "cpu")}
        base = {x: min(run[x] for run in found[is_bound, False]) for x in ("wall", "cpu")}
        print(
            f"| {'bound' if is_bound else 'nobind'} | {'yes' if has_files else 'no'} | "
            f"{least['wall']:.1f} | {least['wall'] / base['wall']:.2f} | {least['cpu']:.1f} | "
            f"{least['cpu'] / base['cpu']:.2f} | {found[is_bound, has_files][-1]['files']} |"
        )


if __name__ == "__main__":
    main()
