"""What handing a sequence on layer by layer costs the step that computes it, and how soon another
process has it.

    python bench/python/handing_on.py [--device cuda] [--tokens 8192] [--recipes bf16,nvfp4:immediate]
        [--shape 16,8,64,32] [--rounds 9] [--importer-device cuda:1] [--schemes tcp,ipc]

The step is append_and_attend() of every layer and nothing else: of a whole prefill, whose products
with weights come on top, handing on costs a smaller part. Rounds alternate between no offer, an offer
that nobody takes, and offers that a process takes over TCP and over ipc:// (which on a GPU is CUDA
IPC). Medians, and how long after the step's end the importer's sequence is there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import kvx
from attention_rows import new_rows

IMPORTER = """
import json, sys, time
import kvx
options = json.loads(sys.argv[1])
if options["device"] != "cpu":
    import torch
    torch.zeros(1, device=options["device"])
cache = kvx.Cache(**options)
print("ready", flush=True)
for endpoint in sys.stdin:
    came = cache.import_sequence(endpoint.strip())
    done = time.monotonic()
    cache.free_sequence(came.sequence)
    cache.clear_prefixes()
    print(json.dumps([done, came.bytes, came.shared]), flush=True)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--importer-device")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipes", default="bf16,nvfp4:immediate")
    parser.add_argument("--schemes", default="tcp,ipc")
    parser.add_argument("--shape", default="16,8,64,32", help="layers, KV heads, head_dim, heads")
    options = parser.parse_args()
    for recipe in options.recipes.split(","):
        measure(options, recipe)


def measure(options, recipe):
    layers, kv_heads, head_dim, heads = map(int, options.shape.split(","))
    sizes = dict(
        num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, recipe=recipe,
        max_tokens=options.tokens, prefix_model="bench",
    )  # fmt: skip
    if options.device != "cpu":
        sizes["max_step_tokens"] = options.tokens
    cache = kvx.Cache(**sizes, device=options.device)
    q, k, v = new_rows(options.device, options.tokens, heads, kv_heads, head_dim)
    there = dict(sizes, device=options.importer_device or options.device)
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTER, json.dumps(there)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    schemes = options.schemes.split(",")
    ways = ["no offer", "nobody takes it", *schemes]
    seconds = {way: [] for way in ways}
    after = {way: [] for way in schemes}
    came = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):  # the first warms up
            for way in ways:
                sequence = cache.create_sequence()
                offer = None
                if way != "no offer":
                    endpoint = f"ipc://{folder}/{number}" if way == "ipc" else "tcp://127.0.0.1:*"
                    offer = cache.export_layers(sequence, range(options.tokens), endpoint)
                if way in after:
                    process.stdin.write(offer.endpoint + "\n")
                    process.stdin.flush()
                    time.sleep(0.02)  # it has asked by then
                began = time.perf_counter()
                with cache.step([(sequence, options.tokens)]):
                    for layer in range(layers):
                        cache.append_and_attend(layer, q, k, v)
                cache.synchronize()
                ended = time.monotonic()
                taken = time.perf_counter() - began
                if way in after:
                    done, num_bytes, shared = json.loads(process.stdout.readline())
                    came[way] = num_bytes, shared
                if number > 0:
                    seconds[way].append(taken)
                    if way in after:
                        after[way].append(done - ended)
                if offer is not None:
                    offer.close()
                cache.free_sequence(sequence)
    process.stdin.close()
    process.wait(30)
    plain = statistics.median(seconds["no offer"])
    packed = 2 * options.tokens * layers * kv_heads * head_dim
    for way in ways:
        median = statistics.median(seconds[way])
        line = f"{recipe:<16} {way:<16} {1e3 * median:9.2f} ms  {100 * (median / plain - 1):+6.2f} %"
        if way in after:
            num_bytes, shared = came[way]
            line += f"  there {1e3 * statistics.median(after[way]):+8.2f} ms after its end"
            line += f"  {num_bytes / 1e6:8.2f} MB on the wire"
            line += f" ({8 * num_bytes / packed:.3f} bits a value)" if not shared else " (mapped)"
        print(line, flush=True)


if __name__ == "__main__":
    main()
