"""What handing a prompt on costs its prefill, and how soon another process has it.

    python bench/vllm/handing_on.py MODEL [--tokens 1024] [--rounds 7] [--recipes nvfp4,int8]
        [--load-format auto]

MODEL is a folder that vLLM loads; with `--load-format dummy` its config.json is enough. One engine
with KvxTransferConnector computes the same prompt again and again, in turns: without handing
anything on; handing on, with nobody who asks; and with another process that asks for the blocks
from the prefill's beginning. Medians of wall times; CPU time is that of the engine's process, all
threads.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from one_engine import new_engine


def fetch():
    """A process that asks: a line with endpoint, fingerprint and names in; a line out."""
    from kvx import _core

    for line in sys.stdin:
        endpoint, fingerprint, names = json.loads(line)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            report = _core.fetch_layers(endpoint, names, folder, fingerprint, 30000, 20000)
        print(json.dumps([time.monotonic(), *report]), flush=True)


def measure(model, recipe, num_tokens, rounds, load_format):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    transfer = {
        "kv_connector": "KvxTransferConnector",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"endpoint": endpoint},
    }
    llm = new_engine(model, recipe, num_tokens, load_format, 1 << 28, transfer)
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    begin_step = worker._writer.begin_step
    names = []

    def hand_on(blocks, ids):
        if blocks:  # a step after the prompt's fills none
            names[:] = [block.name for block in blocks]
        begin_step(blocks, ids)

    prompt = [{"prompt_token_ids": [3 + (j * j * 31 + j) % 40000 for j in range(num_tokens)]}]
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)

    def forget():
        for file in worker.files.folder.glob("*.kvx"):
            file.unlink()
        assert llm.reset_prefix_cache()

    def prefill(hands_on):
        worker._writer.begin_step = hand_on if hands_on else lambda blocks, ids: None
        started, cpu = time.monotonic(), time.process_time()
        llm.generate(prompt, sampling, use_tqdm=False)
        ended = time.monotonic()
        if hands_on:
            worker._writer.flush()
        return ended - started, time.process_time() - cpu, ended

    command = [sys.executable, __file__, "--fetch"]
    seconds = {"plain": [], "handed on": [], "and fetched": []}
    cpus = {name: [] for name in seconds}
    after, sent, whole = [], 0, []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        forget()
        prefill(True)  # warms up, and finds the names
        assert len(names) == num_tokens // worker.block_size, "the prompt is one step"
        for _ in range(rounds):
            for name in seconds:
                ask = json.dumps([endpoint, worker._fingerprint(range(worker._num_heads)), names])
                forget()  # before it is asked for: files of the round before would be an answer
                if name == "and fetched":
                    process.stdin.write(ask + "\n")
                    process.stdin.flush()
                wall, cpu, ended = prefill(name != "plain")
                seconds[name].append(wall)
                cpus[name].append(cpu)
                if name == "and fetched":
                    came, num_files, sent, problem = json.loads(process.stdout.readline())
                    assert num_files == len(names) and not problem
                    after.append(came - ended)
                if name == "handed on":  # asked for once all is computed
                    started = time.monotonic()
                    process.stdin.write(ask + "\n")
                    process.stdin.flush()
                    whole.append(json.loads(process.stdout.readline())[0] - started)
        process.stdin.close()
    pages = len(names) * sum(worker._page_bytes)
    plain = statistics.median(seconds["plain"])
    for name, walls in seconds.items():
        wall, cpu = statistics.median(walls), statistics.median(cpus[name])
        print(
            f"{recipe:<8} {num_tokens} tokens  {name:<12} {wall:7.3f} s  {wall / plain - 1:+7.2%}  "
            f"least {min(walls):7.3f} s {min(walls) / min(seconds['plain']) - 1:+7.2%}  CPU {cpu:7.3f} s",
            flush=True,
        )
    print(
        f"{recipe:<8} {pages / 1e6:.2f} MB of pages, {sent / pages - 1:+.2%} on the wire; all there "
        f"{1000 * statistics.median(after):.1f} ms after the prefill, "
        f"{1000 * statistics.median(whole):.1f} ms if asked for afterwards",
        flush=True,
    )


def main():
    if sys.argv[1:] == ["--fetch"]:
        fetch()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", default="nvfp4,int8")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one recipe, in a process of its own
    options = parser.parse_args()
    if options.measure:
        measure(
            options.model, options.measure, options.tokens, options.rounds, options.load_format
        )
        return
    for recipe in options.recipes.split(","):
        again = ["--measure", recipe, "--tokens", str(options.tokens)]
        again += ["--rounds", str(options.rounds), "--load-format", options.load_format]
        subprocess.run([sys.executable, __file__, options.model, *again], check=True)


if __name__ == "__main__":
    main()
