"""What the blocks that decode steps fill cost a layer of dual-scale pages on a GPU.

    python bench/python/closing.py [--recipe int3_dual:hadamard] [--sequences 64] [--tokens 4096]

One layer of a model (8 KV heads, 32 query heads, head_dim 128) in blocks of 64 beside a window
(sink=16, recent=64), in a CUDA graph of append and attention that a plan comes before, as in vLLM.
Printed are microseconds of the graph alone, the median of 50 replays, for steps that fill no block,
one sequence's block and those of all sequences: with append quantising the blocks before attention
(before), and with close_blocks() on a stream of its own beside it (beside); and of the plan.
"""

import argparse
import statistics

import torch

import kvx

BLOCK, KV_HEADS, Q_HEADS, DIM = 64, 8, 32, 128


class Layer:
    def __init__(self, options, is_beside):
        sequences, self.is_beside = options.sequences, is_beside
        torch.manual_seed(1)  # all layers have the same numbers
        width = options.tokens // BLOCK + 2
        num_pages = sequences * width
        self.layer = kvx.PagedLayer(
            options.recipe, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, device="cuda"
        )
        self.window = kvx.PagedWindow(
            num_pages,
            BLOCK,
            sink=16,
            recent=64,
            max_sequences=sequences,
            unit="block",
            device="cuda",
        )
        bytes_of = {"dtype": torch.uint8, "device": "cuda"}
        self.pages = torch.zeros(num_pages, self.layer.page_bytes, **bytes_of)
        self.window_pages = torch.zeros(
            self.window.num_blocks, self.layer.window_block_bytes, **bytes_of
        )
        self.table = torch.arange(num_pages, dtype=torch.int32, device="cuda").view(sequences, -1)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
        shape = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.randn(sequences, Q_HEADS, DIM, **shape)
        self.k, self.v = (torch.randn(sequences, KV_HEADS, DIM, **shape) for _ in range(2))
        self.out = torch.empty_like(self.q)
        self.most, self.plan, self.graph = options.tokens + BLOCK, None, None
        self.side = torch.cuda.Stream()
        self.prefill(options.tokens)

    def prefill(self, tokens):
        """Rows of all sequences but for their last tokens, a sequence at a time."""
        k = torch.randn(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        for s in range(len(self.lengths)):
            starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
            length = starts[1:]
            plan = self.window.plan(self.table[s : s + 1], length, starts, tokens)
            window = {"window_pages": self.window_pages, "plan": plan}
            self.layer.append(self.pages, k, k, plan.slots, **window)

    def set_lengths(self, lengths):
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.make_plan()

    def make_plan(self):
        self.plan = self.window.plan(
            self.table, self.lengths, self.starts, len(self.q), out=self.plan
        )

    def step(self):
        window = {"window_pages": self.window_pages, "plan": self.plan}
        closes = not self.is_beside
        self.layer.append(self.pages, self.k, self.v, self.plan.slots, closes=closes, **window)
        if self.is_beside:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.layer.close_blocks(self.pages, **window)
        self.layer.attend(
            self.pages,
            self.q,
            self.plan.block_table,
            self.lengths,
            self.starts,
            self.out,
            max_q_len=1,
            max_seq_len=self.most,
            **window,
        )
        if self.is_beside:
            torch.cuda.current_stream().wait_stream(self.side)

    def capture(self):
        self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()


def microseconds(call, runs=50):
    times = []
    for _ in range(runs + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="int3_dual:hadamard")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 64")
    options = parser.parse_args()
    if options.tokens < BLOCK or options.tokens % BLOCK != 0:
        parser.error(f"--tokens is {options.tokens}; expected a multiple of {BLOCK}")
    inside, filling = options.tokens + 20, options.tokens + BLOCK
    steps = {
        "none": [inside] * options.sequences,
        "one": [filling] + [inside] * (options.sequences - 1),
        "all": [filling] * options.sequences,
    }
    print(f"{torch.cuda.get_device_name()}, {options.recipe}, {options.sequences} x {options.tokens}")
    print("| blocks filled | before, us | beside, us |")
    print("|---|---:|---:|")
    layers = [Layer(options, is_beside) for is_beside in (False, True)]
    for layer in layers:
        layer.set_lengths(steps["none"])
        layer.capture()
    for name, lengths in steps.items():
        times = []
        for layer in layers:
            layer.set_lengths(lengths)
            times.append(microseconds(layer.graph.replay))
        print(f"| {name} | {times[0]:.1f} | {times[1]:.1f} |")
        assert torch.equal(layers[0].out, layers[1].out)
    print(f"plan: {microseconds(layers[0].make_plan):.1f} us")


if __name__ == "__main__":
    main()
