"""kvx in vLLM on a GPU: whether its tokens are right, and how fast an 8B shape decodes.

    python bench/vllm/gpu.py [--logs DIR] [--seconds 250]

Needs a GPU, vLLM and kvx that this python can import. Checks run a small random model through
backends and recipes and judge every token by the model in fp32. Then Llama-3-8B's shape with
made-up weights decodes a batch of long requests with each, CUDA graphs for decodes.

Engines start several at a time, as many as the GPU's memory takes, and wait for each other: nothing
else runs while one is timed. Those that have not begun when the seconds are over are left out, and
said. Results are tables in Markdown; logs keep what each engine printed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import kvx

ENGINE = Path(__file__).with_name("gpu_engine.py")
CHECKS = "FLASH_ATTN,bf16,bf16:eager,int8,int8:eager,nvfp4,nvfp4:eager"
DECODES = "FLASH_ATTN,int8,nvfp4,int4,bf16"
GIB = 1 << 30
WEIGHTS_8B = 16.1 * GIB
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of gpu_engine.LLAMA_8B
TOKENS_A_STEP = 8192  # and its budget for prompts
SPARE = 3.5 * GIB  # what an engine has beside weights and cache: activations, graphs, CUDA itself
CHECK_MEMORY = 4 * GIB


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", default=CHECKS, help="names as in gpu_engine.py; '' for none")
    parser.add_argument("--decodes", default=DECODES, help="names as in gpu_engine.py; '' for none")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--cache-gb", type=float, help="as many requests as fit into it, not --batch"
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=60, help="timed steps")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile, which starts slowly"
    )
    parser.add_argument("--gpus", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.add_argument("--seconds", type=float, default=250)
    parser.add_argument("--logs", type=Path, default=Path("kvx_vllm_logs"))
    options = parser.parse_args()
    options.logs = options.logs.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    try:
        bench.run()
    finally:
        bench.end()
    print(bench.report(), flush=True)
    if bench.failed:
        sys.exit(f"{', '.join(bench.failed)}: no result, see {options.logs}")


class Engine:
    """A process of gpu_engine.py. kind: check or decode."""

    def __init__(self, kind, name, options):
        self.kind, self.name, self.memory = kind, name, CHECK_MEMORY
        self.label = f"{kind}_{name.replace('/', '_').replace(':', '_')}"
        self.log = options.logs / f"{self.label}.log"
        self._start_at = options.logs / f"{self.label}.start"
        self._run_at = options.logs / f"{self.label}.run"
        for file in (self._start_at, self._run_at):
            file.unlink(missing_ok=True)
        command = [sys.executable, "-u", str(ENGINE), kind]
        command += [str(options.logs / "model")] if kind == "check" else []
        command += [name, "--start-at", str(self._start_at), "--run-at", str(self._run_at)]
        command += ["--compiled"] if options.compiled else []
        command += ["--gpus", str(options.gpus)]
        if kind == "decode":
            batch, new_tokens, cache_bytes = shape_of(name, options)
            cache_bytes //= options.gpus  # of one GPU
            window_bytes = window_bytes_of(name, batch) / options.gpus
            self.memory = WEIGHTS_8B / options.gpus + cache_bytes + window_bytes + SPARE
            command += ["--batch", str(batch), "--context", str(options.context)]
            command += ["--new-tokens", str(new_tokens), "--cache-bytes", str(cache_bytes)]
        self.process = start(command, self.log)

    def let_start(self):
        self._start_at.touch()

    def let_run(self):
        self._run_at.touch()

    @property
    def is_ready(self):
        return self.has_ended or "READY" in self.log.read_text(errors="replace")

    @property
    def has_ended(self):
        return self.process.poll() is not None

    def result(self):
        """What the engine measured, None where it ended without."""
        for line in self.log.read_text(errors="replace").splitlines():
            word, _, content = line.partition(" ")
            if word == self.kind.upper() and content.startswith("{"):
                return json.loads(content)
        return None


def start(command, log):
    with open(log, "w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


BLOCK = 64  # tokens, also of vLLM's own caches, which round less


def shape_of(name, options):
    """(requests, new tokens of each, bytes of the cache). The first request still decodes when the
    last one's prompt has been computed and the steps have been timed."""
    block_bytes = LAYERS * bytes_of_block(name)
    batch, fitting = options.batch, None
    while fitting != batch:
        batch = fitting or batch
        prompt_steps = -(-batch * options.context // TOKENS_A_STEP)
        new_tokens = prompt_steps + options.steps + 20
        blocks = -(-(options.context + new_tokens + 32) // BLOCK)
        if options.cache_gb is None:
            break
        # More requests need more steps, so this ends: it only ever shrinks from the first guess.
        most = max(1, int(options.cache_gb * 1e9 // (block_bytes * blocks)))
        fitting = most if fitting is None else min(most, fitting)
    return batch, new_tokens, round(1.01 * block_bytes * blocks * batch) + (32 << 20)


def bytes_of_block(name):
    """Of one layer."""
    if is_vllms_own(name):  # 16 bits, or less
        return 2 * KV_HEADS * BLOCK * HEAD_DIM * 2
    return layer_of(name).page_bytes


def window_bytes_of(name, requests):
    """Of all layers: the full-precision window that the recipe names beside the pages."""
    if is_vllms_own(name):
        return 0
    recipe = kvx.parse_recipe(name.removesuffix(":eager"))
    if recipe.full_precision_format is None:
        return 0
    blocks = kvx.PagedWindow.blocks_for(
        BLOCK, sink=recipe.sink_tokens, recent=recipe.recent_tokens, max_sequences=requests
    )
    return LAYERS * blocks * layer_of(name).window_block_bytes


def is_vllms_own(name):
    return name.partition("/")[0].isupper()


def layer_of(name):
    recipe = name.removesuffix(":eager")
    if kvx.parse_recipe(recipe).full_precision_format is not None:
        recipe += ",immediate"
    return kvx.PagedLayer(recipe, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK)


def gpu_memory():
    """Bytes that are free, by nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    name, free = subprocess.check_output(query, text=True).splitlines()[0].rsplit(",", 1)
    return name.strip(), float(free) * (1 << 20)


class Bench:
    def __init__(self, options):
        self.options = options
        self.began = time.monotonic()
        self.gpu, self.memory = gpu_memory()
        self.model = start(
            [sys.executable, str(ENGINE), "model", str(options.logs / "model")],
            options.logs / "model.log",
        )
        checks, decodes = (
            list(filter(None, names.split(","))) for names in (options.checks, options.decodes)
        )
        self.engines = [Engine("check", name, options) for name in checks]
        self.engines += [Engine("decode", name, options) for name in decodes]
        self.left_out, self.failed = [], []

    def seconds(self):
        return time.monotonic() - self.began

    def say(self, text):
        print(f"[{self.seconds():5.0f} s] {text}", flush=True)

    def run(self):
        waiting = list(self.engines)
        if self.options.checks and self.model.wait() != 0:  # engines import meanwhile
            raise SystemExit(f"the checks' model was not made, see {self.options.logs}/model.log")
        while waiting:
            if self.seconds() > self.options.seconds:
                self.left_out = [engine.label for engine in waiting]
                return
            wave = self._fitting(waiting)
            waiting = [engine for engine in waiting if engine not in wave]
            self.say("starting " + ", ".join(engine.label for engine in wave))
            for engine in wave:
                engine.let_start()
            self._run_wave(wave)

    def _fitting(self, waiting):
        """The first engine, and those after it that fit beside it."""
        wave, used = [], 0
        for engine in waiting:
            if not wave or used + engine.memory <= 0.97 * self.memory:
                wave.append(engine)
                used += engine.memory
        return wave

    def _run_wave(self, wave):
        """Checks run side by side; then each decode is timed alone."""
        checks = [engine for engine in wave if engine.kind == "check"]
        for engine in checks:
            engine.let_run()
        self._wait(wave, lambda engine: engine.is_ready)
        self._wait(checks, lambda engine: engine.has_ended)
        for engine in checks:
            self._collect(engine)
        for engine in wave:
            if engine.kind == "decode":
                engine.let_run()
                self._wait([engine], lambda engine: engine.has_ended)
                self._collect(engine)

    def _wait(self, engines, has_happened):
        limit = self.options.seconds + 100
        while not all(map(has_happened, engines)):
            if self.seconds() > limit:
                for engine in engines:
                    if not has_happened(engine):
                        self.say(f"{engine.label} takes too long and is ended")
                        engine.process.kill()
                        engine.process.wait()
            time.sleep(0.1)

    def _collect(self, engine):
        result = engine.result()
        if result is None:
            self.failed.append(engine.label)
            last = engine.log.read_text(errors="replace").strip().splitlines()[-12:]
            self.say(f"{engine.label} ended without a result:\n  " + "\n  ".join(last))
        else:
            self.say(f"{engine.label}: {json.dumps(result)}")

    def end(self):
        for process in [self.model, *(engine.process for engine in self.engines)]:
            if process.poll() is None:
                process.kill()

    def report(self):
        results = [(engine.kind, engine.result()) for engine in self.engines]
        checks = [result for kind, result in results if kind == "check" and result]
        decodes = [result for kind, result in results if kind == "decode" and result]
        lines = [f"{self.gpu}, kvx {kvx.__version__}"]
        if checks:
            lines += [
                "",
                "| engine | not fp32's first choice | worst logit gap | same from cache | tokens |",
            ]
            lines += ["|---|---:|---:|---:|---|"]
        for check in checks:
            lines.append(
                f"| {check['name']} | {check['not_argmax']} of {check['tokens']} | "
                f"{check['worst_logit_gap']} | {check['same_from_cached_prefixes']} of 8 | "
                f"{check['digest']} |"
            )
        if decodes:
            first = decodes[0]
            lines += ["", f"Requests of {first['context']} tokens:", ""]
            lines += ["| cache | requests | ms a step | tokens/s | beside the first | prefill s |"]
            lines += ["|---|---:|---:|---:|---:|---:|"]
        for decode in decodes:
            times = decode["tokens_a_second"] / decodes[0]["tokens_a_second"]
            lines.append(
                f"| {decode['name']} | {decode['batch']} | {decode['ms_a_step']:.2f} | {decode['tokens_a_second']} | "
                f"{times:.2f} | {decode['prefill_s']} |"
            )
        wrong = {r["name"]: r["counters"] for _, r in results if r and any(r["counters"].values())}
        lines += ["", f"device counters that are not 0: {json.dumps(wrong) if wrong else 'none'}"]
        if self.left_out:
            lines.append(f"left out for lack of time: {', '.join(self.left_out)}")
        return "\n".join(lines)


if __name__ == "__main__":
    main()
