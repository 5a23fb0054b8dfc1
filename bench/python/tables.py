"""Block tables of every kind beside PACKED, on the same bytes: attention of a batch that decodes.

    python bench/python/tables.py [--device cuda] [--sequences 32] [--tokens 2048]

K and V of a block lie behind each other, so that TensorRT-LLM's offsets name them, FlashInfer's
pages and a PACKED table in 32 and 64 bits. SGLang's slots, one a token, are compared with a PACKED
table of blocks of one token, over other bytes. The kinds take turns, call by call on the CPU and in
runs of calls on a GPU (which needs PyTorch); printed are the median of a kind's times and the
median of its ratios to PACKED's time of the same turn. Outputs must be equal to the bit.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from kvx import _core, engines
from kvx.engines.layer import Layer, Rows, Shape, memory_of

KV_HEADS, Q_HEADS, DIM = 8, 32, 128


class Arrays:
    """The arrays of one device, made from NumPy's, and its clock."""

    def __init__(self, device, calls):
        self.torch = None
        self.calls = calls
        if device != "cpu":
            import torch

            self.torch = torch

    def make(self, array):
        return array if self.torch is None else self.torch.from_numpy(array).cuda()

    def numpy(self, array):
        return array if self.torch is None else array.cpu().numpy()

    def seconds(self, call):
        if self.torch is None:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device is kept busy while the host queues the calls, so that it alone is timed.
        self.torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(self.calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.calls


def filled_layer(arrays, recipe, num_blocks, block_size):
    """Blocks [num_blocks, K and V], and in each half codes [heads, tokens, row] and behind them
    scales [heads, tokens, groups]. A block of the layer is one half, so that block 2 i is K's and
    V's begins a half behind it. Filled with random rows."""
    facts = _core.format_bytes(recipe, DIM)
    code_bytes = facts["code_bytes"]
    scale_bytes = facts["num_groups"] * facts["group_bytes"]
    num_rows = KV_HEADS * block_size
    half = -(-num_rows * (code_bytes + scale_bytes) // 16) * 16  # fast kernels read 16 bytes
    memory = memory_of(arrays.make(np.zeros(2 * num_blocks * half, np.uint8)), "blocks")

    def side(offset):
        codes = (half, code_bytes, block_size * code_bytes)
        if not scale_bytes:
            return Rows(recipe, DIM, memory, offset, codes)
        scales = (half, scale_bytes, block_size * scale_bytes, facts["group_bytes"])
        return Rows(recipe, DIM, memory, offset, codes, scales=memory,
                    scale_offset=offset + num_rows * code_bytes, scale_strides=scales)  # fmt: skip

    layer = Layer(Shape(2 * num_blocks - 1, block_size, KV_HEADS), side(0), side(half))
    random = np.random.default_rng(3)
    step = 4096
    slots = (np.arange(num_blocks) * 2 * block_size)[:, None] + np.arange(block_size)[None, :]
    slots = slots.reshape(-1).astype(np.int64)
    rows = random.standard_normal((2, step, KV_HEADS, DIM)).astype(np.float16)
    k, v = arrays.make(rows[0]), arrays.make(rows[1])  # the same again and again
    for first in range(0, slots.size, step):
        part = slots[first : first + step]
        layer.append(k[: part.size], v[: part.size], arrays.make(part))
    return layer


def tables_of_blocks(arrays, sequences, blocks):
    """Tables of the same blocks, `blocks` for each sequence; ids are those of K's halves."""
    order = np.random.default_rng(5).permutation(sequences * blocks).astype(np.int32) * 2
    ids = order.reshape(sequences, blocks)
    lengths = np.full(sequences, blocks, np.int32)
    indptr = np.arange(sequences + 1, dtype=np.int32) * blocks
    offsets = np.stack([ids, ids + 1], axis=1)[:, None]

    def tables(block_size):
        held = arrays.make(lengths * block_size)
        flat = arrays.make(ids.reshape(-1).copy())
        found = {
            "PACKED": engines.packed(arrays.make(ids), held),
            "PACKED, S64": engines.packed(
                arrays.make(ids.astype(np.int64)), arrays.make(lengths.astype(np.int64) * block_size)
            ),
            "RAGGED pages": engines.pages(arrays.make(indptr), flat, held, max_blocks=blocks),
            "KV_OFFSETS": engines.kv_offsets(arrays.make(offsets.copy()), held),
        }
        if block_size == 1:
            found["RAGGED tokens"] = engines.tokens(arrays.make(indptr), flat, held,
                                                    max_tokens=blocks)  # fmt: skip
        return found

    return tables


def measure(arrays, layer, tables, sequences, tokens, runs):
    """Median seconds of each kind, and its ratio to PACKED."""
    random = np.random.default_rng(7)
    q = arrays.make(random.standard_normal((sequences, Q_HEADS, DIM)).astype(np.float16))
    out = arrays.make(np.zeros((sequences, Q_HEADS, DIM), np.float16))
    starts = arrays.make(np.arange(sequences + 1, dtype=np.int32))

    def call(table):
        layer.attend(q, table, starts, out=out, max_tokens=tokens, max_q_len=1)

    expected = None
    for name, table in tables.items():
        call(table)
        found = arrays.numpy(out).copy()
        expected = found if expected is None else expected
        if not np.array_equal(found, expected):
            sys.exit(f"{name}: its output is not PACKED's")
    times = {name: [] for name in tables}
    for run in range(runs):
        turn = list(tables) if run % 2 == 0 else list(tables)[::-1]
        for name in turn:
            times[name].append(arrays.seconds(lambda: call(tables[name])))
    base = times["PACKED"]
    return {
        name: (statistics.median(one), statistics.median(a / b for a, b in zip(one, base)))
        for name, one in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence")
    parser.add_argument("--recipes", default="f16,int8,nvfp4:source=computed")
    parser.add_argument("--blocks", default="64,16,1", help="tokens of a block")
    parser.add_argument("--runs", type=int, default=41)
    parser.add_argument("--calls", type=int, default=20, help="in a run on a GPU")
    options = parser.parse_args()
    arrays = Arrays(options.device, options.calls)
    print(f"| recipe | tokens of a block | table | ms | beside PACKED |\n|{'---|' * 5}")
    worst = 0.0
    for recipe in options.recipes.split(","):
        for block_size in map(int, options.blocks.split(",")):
            blocks = options.tokens // block_size
            layer = filled_layer(arrays, recipe, options.sequences * blocks, block_size)
            tables = tables_of_blocks(arrays, options.sequences, blocks)(block_size)
            found = measure(arrays, layer, tables, options.sequences, options.tokens, options.runs)
            for name, (seconds, ratio) in found.items():
                print(f"| {recipe} | {block_size} | {name} | {1e3 * seconds:.3f} | {ratio:.3f} |")
                worst = max(worst, ratio)
    print(f"\nworst ratio: {worst:.3f}")


if __name__ == "__main__":
    main()
