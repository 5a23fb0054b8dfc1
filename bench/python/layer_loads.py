"""How soon a prompt goes on from a beginning that only a tier has: loaded as a whole, and layer by
layer beside its first step.

    python bench/python/layer_loads.py [--device cuda] [--tokens 8192] [--new 256]
        [--recipes bf16,nvfp4:immediate] [--shape 16,8,64,32] [--rounds 9] [--tiers 'host(4GiB)']

Two prompts take turns in a pool that has room for one of them, so that each is loaded anew. The
step is append_and_attend() of every layer for the new tokens and nothing else: products with
weights would give the loads more to hide behind. Medians: create_sequence_from() and the whole
step.
"""

import argparse
import statistics
import time

import kvx
from attention_rows import new_rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipes", default="bf16,nvfp4:immediate")
    parser.add_argument("--shape", default="16,8,64,32", help="layers, KV heads, head_dim, heads")
    parser.add_argument("--tiers", default="host(4GiB)")
    options = parser.parse_args()
    for recipe in options.recipes.split(","):
        measure(options, recipe)


def facts_of(cache):
    """What the tiers say of the blocks that did not come or did not go."""
    return ", ".join(
        f"{tier.name}: held {tier.held}, stored {tier.stored}, loaded {tier.loaded}, "
        f"dropped {tier.dropped}, bad {tier.bad}"
        for tier in cache.tiers()
    )


def measure(options, recipe):
    layers, kv_heads, head_dim, heads = map(int, options.shape.split(","))
    sizes = dict(
        num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, recipe=recipe,
        max_tokens=options.tokens + options.new, max_sequences=1, prefix_model="bench",
        tiers=options.tiers,
    )  # fmt: skip
    if options.device != "cpu":
        sizes["max_step_tokens"] = options.tokens
    cache = kvx.Cache(**sizes, device=options.device)
    prompt = new_rows(options.device, options.tokens, heads, kv_heads, head_dim)
    more = new_rows(options.device, options.new, heads, kv_heads, head_dim)

    def step(sequence, rows):
        with cache.step([(sequence, len(rows[0]))]):
            for layer in range(layers):
                cache.append_and_attend(layer, *rows)
        cache.synchronize()

    prompts = [list(range(first, first + options.tokens + options.new)) for first in (0, 10**6)]
    for tokens in prompts:
        sequence = cache.create_sequence()
        step(sequence, prompt)
        cache.record_tokens(sequence, tokens[: options.tokens])
        cache.free_sequence(sequence)
        cache.wait_for_tier()
    seconds = {way: [] for way in ("whole", "layer by layer")}
    created = {way: [] for way in seconds}
    turn = 0
    for number in range(options.rounds + 1):  # the first warms up
        for way in seconds:
            tokens, turn = prompts[turn], 1 - turn
            loaded = sum(tier.loaded for tier in cache.tiers())
            began = time.perf_counter()
            sequence = cache.create_sequence_from(tokens, by_layer=way != "whole")
            there = time.perf_counter()
            step(sequence, more)
            ended = time.perf_counter()
            found = cache.num_tokens(sequence) - options.new
            cache.free_sequence(sequence)
            loaded = sum(tier.loaded for tier in cache.tiers()) - loaded
            if found != options.tokens or loaded == 0:
                raise SystemExit(
                    f"{recipe}, {way}, round {number}: {found} of {options.tokens} tokens were "
                    f"found, {loaded} blocks came from tiers; {facts_of(cache)}"
                )
            if number > 0:
                seconds[way].append(ended - began)
                created[way].append(there - began)
    began = time.perf_counter()
    sequence = cache.create_sequence_from(prompts[1 - turn])  # the pool has it
    step(sequence, more)
    cached = time.perf_counter() - began
    cache.free_sequence(sequence)
    for way, walls in seconds.items():
        print(
            f"{recipe:<16} {way:<15} {1e3 * statistics.median(walls):9.2f} ms, of these "
            f"{1e3 * statistics.median(created[way]):8.2f} ms before the step; the pool has it: "
            f"{1e3 * cached:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
