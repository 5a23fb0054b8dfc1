"""Milliseconds of a latent layer's prompts in the absorbed form and in the expanded one, with
DeepSeek-V3's heads: kvx's part, and vLLM's products of queries and outputs in the absorbed form.

    python bench/vllm/latent_prompts.py [RECIPE ...] [--shapes QUERIESxTOKENS ...] [--heads 128]

Needs vLLM, whose plug-in expands; --at-once says how many heads at a time.
"""

import argparse
import time

import torch

from kvx.torch import BatchAttention
from kvx.vllm.expanded import ExpandedHeads, ExpandedLimits, ExpandedPrompts, HeadDims
from kvx.vllm.layer_pages import RowShape, device_of_process

DIMS = HeadDims(latent=512, nope=128, rotary=64, value=128)
BLOCK = 64


class FixedLimits(ExpandedLimits):
    def heads_at_once(self, tokens):
        return self.num_bytes  # heads, here


def milliseconds(run, device, seconds):
    """The least of some rounds: what disturbs a round makes it longer."""
    run()
    best, deadline = float("inf"), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if device == "cpu":
            begin = time.monotonic()
            run()
            best = min(best, (time.monotonic() - begin) * 1e3)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 3)
    return best


def forms(recipe, queries, tokens, heads, at_once, device, dtype):
    """{name: what computes it} of a request's last tokens."""
    make = dict(dtype=dtype, device=device)
    row_dim = DIMS.latent + DIMS.rotary
    layer = RowShape(1, row_dim, DIMS.latent, is_latent=True).new_layer(recipe, BLOCK)
    num_pages = -(-tokens // BLOCK)
    pages = torch.zeros((num_pages, layer.page_bytes), dtype=torch.uint8, device=device)
    slots = torch.arange(tokens, device=device)
    layer.append(pages, torch.randn(tokens, 1, row_dim, **make), None, slots)
    table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    starts = torch.tensor([0, queries], dtype=torch.int32, device=device)
    q = torch.randn(queries, heads, DIMS.nope + DIMS.rotary, **make)
    to_keys = torch.randn(heads, DIMS.nope, DIMS.latent, **make) * DIMS.latent**-0.5
    to_values = torch.randn(heads, DIMS.latent, DIMS.value, **make) * DIMS.latent**-0.5
    scale = dict(softmax_scale=(DIMS.nope + DIMS.rotary) ** -0.5)
    batch = BatchAttention()
    batch.plan(table, lengths, starts, max_q_len=queries, max_seq_len=tokens, num_queries=queries)

    def absorbed():
        nope, rotary = q.split([DIMS.nope, DIMS.rotary], dim=-1)
        latent = (nope.transpose(0, 1) @ to_keys).transpose(0, 1)
        summed = batch.run(layer, pages, torch.cat((latent, rotary), dim=-1), **scale)
        return (summed.transpose(0, 1) @ to_values).transpose(0, 1)

    def expanded(at_once):
        limits = FixedLimits(DIMS, heads, dtype.itemsize, at_once, "expanded", device != "cpu", 0)
        of_heads = ExpandedHeads(DIMS, heads, dtype)
        prompts = ExpandedPrompts(
            BatchAttention(), limits, table, lengths, starts, [(queries, tokens)]
        )

        def run():
            rows = prompts.rows_of(layer, pages, like=q)
            out = torch.empty(queries, heads, DIMS.value, **make)
            of_heads.attend(prompts, rows, to_keys, to_values, q, out, **scale)
            return out

        return run

    found = {"absorbed": absorbed}
    return found | {f"expanded, {n} heads": expanded(n) for n in at_once if heads % n == 0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipes", nargs="*", default=["bf16", "int8+bf16"])
    parser.add_argument("--shapes", nargs="*", default=["2048x2048", "8192x8192", "512x8192"])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--at-once", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    device, dtype = device_of_process(), torch.bfloat16
    torch.manual_seed(1)
    for recipe in args.recipes:
        for shape in args.shapes:
            queries, tokens = map(int, shape.split("x"))
            runs = forms(recipe, queries, tokens, args.heads, args.at_once, device, dtype)
            expected = runs["absorbed"]().float()
            for name, run in runs.items():
                error = (run().float() - expected).norm() / expected.norm()
                took = milliseconds(run, device, args.seconds)
                line = f"{recipe:12} {shape:12} {name:20} {took:9.3f} ms, error {error:.1e}"
                print(line, flush=True)
            limits = ExpandedLimits(
                DIMS, args.heads, dtype.itemsize, 1 << 40, "auto", device != "cpu", 0
            )
            says = "expanded" if limits.takes([(queries, tokens)]) else "absorbed"
            print(f"{recipe:12} {shape:12} the rule says {says}", flush=True)


if __name__ == "__main__":
    main()
