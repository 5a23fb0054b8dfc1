"""What benchmarks of one engine at a time share: the engine, and a process of its own for it."""

import json
import os
import subprocess
import sys

ENGINE = "--engine"


def new_engine(model, recipe, length, load_format, cache_bytes, transfer):
    """vLLM's LLM in this process. length: tokens of the longest prompt; transfer: vLLM's
    kv_transfer_config."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    return LLM(
        model,
        attention_backend="CUSTOM",
        additional_config={"kvx": {"recipe": recipe}},
        dtype="bfloat16",
        load_format=load_format,
        enforce_eager=True,
        block_size=64,
        max_model_len=length + 64,
        max_num_batched_tokens=length + 64,
        kv_cache_memory_bytes=cache_bytes,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    )


def measure_apart(program, arguments, environment=None):
    """What the program's measure(*arguments) returns in a process of its own; both pass JSON."""
    done = subprocess.run(
        [sys.executable, program, ENGINE, json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def has_answered(measure):
    """Whether measure_apart() has started this process; then measure() has run and answered."""
    if sys.argv[1:2] != [ENGINE]:
        return False
    print(json.dumps(measure(*json.loads(sys.argv[2]))))
    return True
