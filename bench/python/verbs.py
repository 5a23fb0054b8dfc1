"""What a verb costs from Python: whole calls of one token, the work in C++ included.

    python bench/python/verbs.py [--threads 1] [--device cuda]

The work is the smallest there is (int8, one head of 32, a few tokens), so that nearly all of a call
is the way from Python to C++ and back: an upper bound of the overhead. The best of many short runs
is printed. On a GPU each call is timed alone, while the GPU is idle: what the host spends on it,
launches included. The median is printed as well.
"""

import argparse
import time

import numpy as np

import kvx

RUNS = 200
CALLS = 200  # a run
TOKENS = 8


def best_of(call):
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - started) / (CALLS))
    return 1e6 * best


def calls(to_array):
    """Each verb's call by name, on arrays that to_array makes of NumPy's."""
    rows = np.random.default_rng(0).standard_normal((1, 1, 32)).astype(np.float32)
    q, k, v, out = (to_array(rows.copy()) for _ in range(4))
    ints = {name: np.array(x, t) for name, x, t in [
        ("slot", [TOKENS], np.int64), ("table", [[0]], np.int32), ("length", [TOKENS], np.int32),
        ("starts", [0, 1], np.int32)]}  # fmt: skip
    ints = {name: to_array(array) for name, array in ints.items()}
    layer = kvx.PagedLayer("int8", num_kv_heads=1, head_dim=32, block_size=16)
    pages = to_array(np.zeros((1, layer.page_bytes), np.uint8))
    for token in range(TOKENS):
        layer.append(pages, k, v, to_array(np.array([token], np.int64)))
    cache = kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=64)
    sequence = cache.create_sequence()

    def step():
        cache.begin_step([(sequence, 1)])
        cache.append_and_attend(0, q, k, v, out)
        cache.end_step()
        cache.truncate(sequence, 0)

    return {
        "append": lambda: layer.append(pages, k, v, ints["slot"]),
        "attend": lambda: layer.attend(
            pages, q, ints["table"], ints["length"], ints["starts"], out
        ),
        "begin_step, append_and_attend, end_step, truncate": step,
    }


def cuda_calls(to_array, **options):
    """A step's calls on a GPU, timed one by one: {name: [us]}."""
    rows = np.random.default_rng(0).standard_normal((1, 1, 64)).astype(np.float16)
    q, k, v, out = (to_array(rows.copy()) for _ in range(4))
    cache = kvx.Cache(
        num_layers=1, num_kv_heads=1, head_dim=64, recipe="int8", max_tokens=64, device="cuda"
    )
    sequence = cache.create_sequence()
    calls = {
        "begin_step": lambda: cache.begin_step([(sequence, 1)]),
        "append_and_attend": lambda: cache.append_and_attend(0, q, k, v, out, **options),
        "end_step": cache.end_step,
        "truncate": lambda: cache.truncate(sequence, 0),
    }
    times = {name: [] for name in calls}
    for _ in range(RUNS * 5):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - started))
            cache.synchronize()
    return times


def time_cuda():
    import cupy
    import torch

    kinds = {
        "torch": (lambda array: torch.from_numpy(array).cuda(), {}),
        "torch, another stream": (
            lambda array: torch.from_numpy(array).cuda(),
            {"stream": torch.cuda.Stream()},
        ),
        "CuPy": (cupy.asarray, {}),
    }
    for library, (to_array, options) in kinds.items():
        for verb, times in cuda_calls(to_array, **options).items():
            print(f"{library:21} {min(times):6.2f} {np.median(times):6.2f} us  {verb}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    kvx.set_num_threads(options.threads)
    if options.device == "cuda":
        return time_cuda()
    libraries = {"NumPy": lambda array: array}
    try:
        import torch

        libraries["torch"] = torch.from_numpy
    except ImportError:
        pass
    for library, to_array in libraries.items():
        for verb, call in calls(to_array).items():
            print(f"{library:6} {best_of(call):6.2f} us  {verb}")


if __name__ == "__main__":
    main()
