"""llama.cpp's flash attention beside kvx's: one token of several sequences, on one CPU thread.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    touch llama_cpp_python-0.3.36/vendor/llama.cpp/ggml/ggml.pc.in   # the archive lacks it
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp/ggml -B ggml -DCMAKE_BUILD_TYPE=Release
    cmake --build ggml --target ggml-cpu
    python bench/cpu/ggml_decode.py ggml/src build/release/bench [--sequences 8] [--tokens 8192]

The first folder has libggml-base.so and libggml-cpu.so, compiled for this processor; the second
kvx_prompt_bench. K and V lie as llama.cpp's cache has them: [sequences, tokens, heads, head_dim],
in huge pages, which llama.cpp does not ask for and kvx does.
Formats of both take turns, and a time is the least CPU time of all rounds. Printed: milliseconds of
a call, and for each of kvx's formats the time of ggml's format of as many bits over kvx's.
"""

import argparse
import ctypes
import mmap
import re
import subprocess
import time
from pathlib import Path

import numpy as np

HEADS, Q_HEADS, HEAD_DIM = 8, 32, 128
# ggml_type's number, and kvx's recipes that have as many bits or a few less
TYPES = {
    "bf16": (30, ["bf16"]),
    "f16": (1, ["f16"]),
    "q8_0": (8, ["int8", "fp8_e4m3"]),
    "q4_0": (2, ["int4"]),
    "mxfp4": (39, ["mxfp4"]),
    "nvfp4": (40, ["nvfp4"]),
}


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def load(folder):
    """The functions of both libraries, with their results' types."""
    base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(next(folder.rglob("libggml-cpu.so"))), ctypes.RTLD_GLOBAL)
    pointers = "init new_tensor_4d permute flash_attn_ext new_graph get_data"
    for name in pointers.split():
        getattr(base, f"ggml_{name}").restype = ctypes.c_void_p
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_nbytes.restype = ctypes.c_size_t
    cpu.ggml_cpu_init()
    return base, cpu


class Decode:
    """One call of ggml_flash_attn_ext, over K and V of its own."""

    def __init__(self, base, cpu, kind, sequences, tokens):
        self.cpu = cpu
        size = sequences * tokens * HEADS * HEAD_DIM * 4 + (64 << 20)
        self.memory = mmap.mmap(-1, size)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.context = ctypes.c_void_p(base.ggml_init(InitParams(size, at, False)))
        self.best = float("inf")
        random = np.random.default_rng(0)

        def tensor(number, *shape):
            sizes = [ctypes.c_int64(n) for n in shape]
            made = base.ggml_new_tensor_4d(self.context, ctypes.c_int(number), *sizes)
            return ctypes.c_void_p(made)

        def fill(one, number, count, times):
            rows = random.standard_normal((count // HEAD_DIM, HEAD_DIM), np.float32)
            first = base.ggml_get_data(one)
            num_bytes = base.ggml_quantize_chunk(
                ctypes.c_int(number),
                rows.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_void_p(first),
                *(ctypes.c_int64(n) for n in (0, *rows.shape)),
                None,
            )
            assert num_bytes * times == base.ggml_nbytes(one), "the tensor is not full"
            for i in range(1, times):
                ctypes.memmove(first + i * num_bytes, first, num_bytes)

        def side():
            one = tensor(TYPES[kind][0], HEAD_DIM, HEADS, tokens, sequences)
            fill(one, TYPES[kind][0], HEAD_DIM * HEADS * tokens, sequences)
            return ctypes.c_void_p(
                base.ggml_permute(self.context, one, *map(ctypes.c_int, (0, 2, 1, 3)))
            )

        q = tensor(0, HEAD_DIM, 1, Q_HEADS, sequences)
        fill(q, 0, HEAD_DIM * Q_HEADS * sequences, 1)
        mask = tensor(1, tokens, 1, 1, 1)
        ctypes.memset(base.ggml_get_data(mask), 0, base.ggml_nbytes(mask))
        k, v = side(), side()
        floats = [ctypes.c_float(x) for x in (HEAD_DIM**-0.5, 0, 0)]
        self.out = ctypes.c_void_p(base.ggml_flash_attn_ext(self.context, q, k, v, mask, *floats))
        self.graph = ctypes.c_void_p(base.ggml_new_graph(self.context))
        base.ggml_build_forward_expand(self.graph, self.out)

    def run(self):
        start = time.thread_time()
        status = self.cpu.ggml_graph_compute_with_ctx(self.context, self.graph, ctypes.c_int(1))
        self.best = min(self.best, time.thread_time() - start)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute_with_ctx returned {status}")


def kvx_times(options, fast):
    """Milliseconds of each recipe."""
    command = [options.kvx / "kvx_prompt_bench", "--decode", options.sequences, "--rounds", 4]
    command += ["--tokens", options.tokens, "--heads", HEADS, "--q-heads", Q_HEADS]
    command += ["--head-dim", HEAD_DIM, *(["--fast"] if fast else [])]
    command += [recipe for _, recipes in TYPES.values() for recipe in recipes]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return {m[1]: float(m[2]) for m in re.finditer(r"^\| (\w+) \| ([\d.]+) \|", done.stdout, re.M)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ggml", type=Path, help="the folder of ggml's libraries")
    parser.add_argument("kvx", type=Path, help="the folder of kvx_prompt_bench")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    base, cpu = load(options.ggml)
    calls = {k: Decode(base, cpu, k, options.sequences, options.tokens) for k in TYPES}
    best = {}  # of kvx, by mode and recipe
    for _ in range(options.rounds):
        for call in calls.values():
            call.run()
        for fast in (False, True):
            for recipe, ms in kvx_times(options, fast).items():
                best[fast, recipe] = min(best.get((fast, recipe), ms), ms)
    print("| ggml | ms | kvx | accurate, ms | ggml / it | fast, ms | ggml / it |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for kind, (_, recipes) in TYPES.items():
        theirs = calls[kind].best * 1e3
        for recipe in recipes:
            ours = [best[fast, recipe] for fast in (False, True)]
            columns = " | ".join(f"{ms:.1f} | {theirs / ms:.2f}" for ms in ours)
            print(f"| {kind} | {theirs:.1f} | {recipe} | {columns} |")


if __name__ == "__main__":
    main()
