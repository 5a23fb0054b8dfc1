"""Tokens a second of LMDeploy's PyTorch engine, with its own caches and with kvx's.

    python bench/lmdeploy/decode.py [--names own:0,own:8,own:4,int8,int4,nvfp4] [--logs DIR]

Needs a GPU, LMDeploy 0.18 and kvx that this python can import. Llama-3-8B's shape with random
weights decodes a batch of requests, CUDA graphs on. "own:8" is LMDeploy's quant_policy 8; other
names are recipes of kvx. Each engine is a process of its own. Engines of a group start together and
then run one after the other, while the others wait. Counted are the tokens from when every request
has its 16th new token until the first request ends. The result is a table in Markdown.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

NAMES = "own:0,own:8,own:4,int8,int4,nvfp4"
LLAMA_8B = dict(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
BLOCK = 64
WARM_TOKENS = 16  # of each request, before the count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default=NAMES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--at-once", type=int, default=2, help="engines that the memory takes")
    parser.add_argument("--seconds", type=float, default=300, help="for each group of engines")
    parser.add_argument("--logs", type=Path, default=Path("kvx_lmdeploy_logs"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # the name of this process's engine
    options = parser.parse_args()
    if options.engine:
        asyncio.run(run_engine(options))
        return
    options.logs = options.logs.resolve()
    save_model(options.logs / "model")
    names = options.names.split(",")
    results = {}
    for first in range(0, len(names), options.at_once):
        results.update(run_group(names[first : first + options.at_once], options))
    print(report(names, results, options), flush=True)
    missing = [name for name in names if name not in results]
    if missing:
        sys.exit(f"{', '.join(missing)}: no result, see {options.logs}")


def save_model(folder):
    """A configuration without weights, and a tokenizer of two words, which LMDeploy asks for."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(**LLAMA_8B)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def log_of(name, options, ending="log"):
    return options.logs / f"{name.replace(':', '_').replace('/', '_')}.{ending}"


def run_group(names, options):
    """What each engine of the group measured; one that failed is left out."""
    deadline = time.monotonic() + options.seconds
    processes = {}
    for name in names:
        log_of(name, options, "go").unlink(missing_ok=True)
        arguments = ["--engine", name, "--logs", str(options.logs)]
        for field in ("batch", "context", "new_tokens"):
            arguments += [f"--{field.replace('_', '-')}", str(getattr(options, field))]
        with open(log_of(name, options), "w") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, "-u", __file__, *arguments], stdout=log, stderr=subprocess.STDOUT
            )
    try:
        for name in names:
            wait(deadline, lambda: has_ended(processes[name]) or line_of(name, "READY", options))
        results = {}
        for name in names:
            log_of(name, options, "go").touch()
            wait(deadline, lambda: has_ended(processes[name]))
            if line := line_of(name, "RESULT", options):
                results[name] = json.loads(line)
        return results
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def has_ended(process):
    return process.poll() is not None


def line_of(name, word, options):
    """What stands behind the word in the engine's log, or None."""
    for line in log_of(name, options).read_text(errors="replace").splitlines():
        if line.startswith(word + " "):
            return line.removeprefix(word + " ")
    return None


def wait(deadline, is_done):
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.2)


def report(names, results, options):
    base = results.get("own:0")
    lines = [
        f"Llama-3-8B's shape, {options.batch} requests of {options.context} tokens, decode:",
        "",
        "| cache | tokens/s | ms a step | beside own:0 |",
        "|---|---:|---:|---:|",
    ]
    for name in names:
        found = results.get(name)
        if found is None:
            lines.append(f"| {name} | failed | | |")
            continue
        rate = found["tokens_per_second"]
        ratio = f"{rate / base['tokens_per_second']:.2f}" if base else ""
        lines.append(f"| {name} | {rate:.0f} | {1e3 * options.batch / rate:.2f} | {ratio} |")
    return "\n".join(lines)


# --- the process of one engine ---


def random_weights(model, *_, **__):
    """In place of LMDeploy's load_model_weights: numbers of a trained model's size."""
    import torch
    from lmdeploy.pytorch.weight_loader import model_weight_loader

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
    model.eval()
    model_weight_loader.process_weights_after_loading(model)


async def run_engine(options):
    from lmdeploy import GenerationConfig, PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine
    from lmdeploy.pytorch.engine.model_agent import agent

    agent.load_model_weights = random_weights
    blocks = options.batch * -(-(options.context + options.new_tokens) // BLOCK) + 8
    config = PytorchEngineConfig(
        dtype="bfloat16",
        block_size=BLOCK,
        num_gpu_blocks=blocks,
        max_batch_size=options.batch,
        session_len=options.context + options.new_tokens,
        quant_policy=int(options.engine[4:]) if options.engine.startswith("own:") else 0,
        enable_metrics=False,
    )
    if not options.engine.startswith("own:"):
        import kvx.lmdeploy

        kvx.lmdeploy.configure(config, options.engine)
    engine = Engine.from_pretrained(str(options.logs / "model"), engine_config=config)
    engine.start_loop()
    print("READY now", flush=True)
    while not log_of(options.engine, options, "go").exists():
        await asyncio.sleep(0.1)
    generation = GenerationConfig(
        max_new_tokens=options.new_tokens,
        min_new_tokens=options.new_tokens,
        ignore_eos=True,
        do_sample=False,
    )
    times = await asyncio.gather(
        *(request(engine, session, generation, options) for session in range(options.batch))
    )
    print("RESULT " + json.dumps(rate_of(times)), flush=True)
    engine.close()


async def request(engine, session, generation, options):
    """When each of the request's tokens came."""
    import random

    source = random.Random(session)
    prompt = [source.randrange(3, LLAMA_8B["vocab_size"]) for _ in range(options.context)]
    times = []
    instance = engine.create_instance()
    async for output in instance.async_stream_infer(session, prompt, gen_config=generation):
        times += [time.perf_counter()] * len(output.token_ids)
    if len(times) < options.new_tokens:
        raise RuntimeError(f"request {session} ended after {len(times)} tokens")
    return times


def rate_of(times):
    start = max(one[WARM_TOKENS - 1] for one in times)
    end = min(one[-1] for one in times)
    count = sum(start < t <= end for one in times for t in one)
    if end <= start or count == 0:
        raise RuntimeError("no time in which all requests decode; expected more new tokens")
    return dict(tokens_per_second=count / (end - start), counted_tokens=count)


if __name__ == "__main__":
    main()
