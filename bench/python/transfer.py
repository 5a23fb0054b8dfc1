"""Time on the wire per format: a sequence leaves one cache and enters another over a throttled link.

    python bench/python/transfer.py [--gbit 1,10] [--tokens 8192] [--recipes bf16,nvfp4:immediate]

Needs root and Linux: each rate gets a network of its own (unshare --net), whose loopback tc
throttles. The cache has SmolLM2-135M's shape: 30 layers of 3 KV heads of 64. Rounds alternate
between the recipes; the median is printed. The time is import_sequence()'s whole: handshake, wire,
checks, and the copy into the importer's pool. The exporter's server is a thread of the same process.
"""

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

import kvx

SHAPE = dict(num_layers=30, num_kv_heads=3, head_dim=64)
ROUNDS = 5
STEP = 1024


def new_cache(recipe, tokens):
    return kvx.Cache(**SHAPE, recipe=recipe, max_tokens=tokens, prefix_model="bench")


def filled(recipe, tokens):
    cache = new_cache(recipe, tokens)
    sequence = cache.create_sequence()
    rng = np.random.default_rng(0)
    for first in range(0, tokens, STEP):
        count = min(STEP, tokens - first)
        rows = rng.standard_normal((count, SHAPE["num_kv_heads"], SHAPE["head_dim"]), np.float32)
        with cache.step([(sequence, count)]):
            for layer in range(SHAPE["num_layers"]):
                cache.append_and_attend(layer, rows, rows, rows)
    cache.record_tokens(sequence, range(tokens))
    return cache, sequence


def measure(options):
    offers, importers, seconds = {}, {}, {}
    for recipe in options.recipes:
        cache, sequence = filled(recipe, options.tokens)
        offers[recipe] = cache.export_sequence(sequence)
        cache.close()
        importers[recipe] = new_cache(recipe, options.tokens)
        seconds[recipe] = []
    for _ in range(ROUNDS + 1):  # the first warms up
        for recipe, cache in importers.items():
            started = time.perf_counter()
            came = cache.import_sequence(offers[recipe].endpoint)
            seconds[recipe].append(time.perf_counter() - started)
            cache.free_sequence(came.sequence)
            cache.clear_prefixes()
    first = options.recipes[0]
    for recipe in options.recipes:
        median = statistics.median(seconds[recipe][1:])
        sent = offers[recipe].state().bytes
        values = 2 * options.tokens * SHAPE["num_layers"] * SHAPE["num_kv_heads"] * 64
        times = statistics.median(seconds[first][1:]) / median
        print(
            f"{options.measure:>6} Gbit/s  {recipe:<16} {sent / 1e6:8.1f} MB  "
            f"{8 * sent / values:6.3f} bits a value  {median:7.3f} s  "
            f"{8e-9 * sent / median:6.2f} Gbit/s  {times:5.2f} times {first}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", default="1,10")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recipes", default="bf16,nvfp4:immediate", type=lambda text: text.split(","))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # inside a throttled network
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    for rate in options.gbit.split(","):
        throttle = f"tc qdisc add dev lo root tbf rate {rate}gbit burst 1mb latency 50ms"
        again = [sys.executable, __file__, "--measure", rate, "--tokens", str(options.tokens)]
        again += ["--recipes", ",".join(options.recipes)]
        shell = f'ip link set lo up && {throttle} && exec "$@"'
        subprocess.run(["unshare", "--net", "sh", "-c", shell, "sh", *again], check=True)


if __name__ == "__main__":
    main()
