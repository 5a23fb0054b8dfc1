"""Dual-scale pages beside a window on a GPU: the CPU's plans and bytes, eagerly and in a graph."""

import dataclasses

import gpu
import numpy as np
import pytest
from reference import relative_error
from test_paged_dual import PAGES, RECIPES, cut, text

import kvx

SEQUENCES, WIDTH, MAX_TOKENS = 4, 6, 320


@pytest.fixture(autouse=True)
def torch():
    return gpu.library("torch")


class Side:
    """A layer with its pages and window on one device. Arrays have one size in all steps."""

    def __init__(self, torch, recipe, block, device):
        self.torch, self.device = torch, device
        shape = {"num_kv_heads": 2, "head_dim": 64, "block_size": block, "device": device}
        self.layer = kvx.PagedLayer(recipe, **shape)
        self.window = kvx.PagedWindow(
            PAGES, block, max_sequences=SEQUENCES, unit="block", device=device
        )
        self.pages = self.new((PAGES, self.layer.page_bytes), torch.uint8)
        self.window_pages = self.new(
            (self.window.num_blocks, self.layer.window_block_bytes), torch.uint8
        )
        self.table = self.new((SEQUENCES, WIDTH), torch.int32)
        self.lengths = self.new((SEQUENCES,), torch.int32)
        self.starts = self.new((SEQUENCES + 1,), torch.int32)
        self.rows = [self.new((MAX_TOKENS, heads, 64), torch.float32) for heads in (4, 2, 2)]
        self.out = self.new((MAX_TOKENS, 4, 64), torch.float32)
        self.plan = None

    def new(self, shape, dtype):
        return self.torch.zeros(shape, dtype=dtype, device=self.device)

    def set_step(self, table, lengths, starts, rows):
        for tensor, array in zip((self.table, self.lengths, self.starts), (table, lengths, starts)):
            tensor.copy_(self.torch.from_numpy(array))
        for tensor, array in zip(self.rows, rows):
            tensor[: len(array)] = self.torch.from_numpy(array).to(self.device)
        self.plan = self.window.plan(
            self.table, self.lengths, self.starts, MAX_TOKENS, out=self.plan
        )

    def run(self):
        q, k, v = self.rows
        window = {"window_pages": self.window_pages, "plan": self.plan}
        self.layer.append(self.pages, k, v, self.plan.slots, **window)
        self.layer.attend(
            self.pages,
            q,
            self.plan.block_table,
            self.lengths,
            self.starts,
            self.out,
            max_q_len=MAX_TOKENS,
            **window,
        )


def steps(block, random, count):
    """Random steps of sequences that begin, skip steps and end; a page has one sequence at once."""
    free, live, seed = list(range(PAGES)), [], 0
    for _ in range(count):
        while len(live) < 8 and len(free) >= WIDTH:
            seed += 10
            tokens = int(random.integers(1, WIDTH * block))
            table = [free.pop(0) for _ in range(-(-tokens // block))]
            live.append([table, text(tokens, seed), 0, tokens])
        most = int(random.integers(2, SEQUENCES + 1))
        picked = [live[i] for i in random.permutation(len(live))[:most]]
        table = np.zeros((SEQUENCES, WIDTH), np.int32)
        lengths, counts, rows = np.zeros(SEQUENCES, np.int32), np.zeros(SEQUENCES, np.int32), []
        for s, request in enumerate(picked):
            pages, numbers, done, tokens = request
            table[s, : len(pages)] = pages
            n = min(tokens - done, int(random.choice([1, 1, 5, 40, 75])))
            lengths[s], counts[s] = done + n, n
            rows.append(cut(numbers, done, n))
            request[2] += n
        starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        yield table, lengths, starts, [np.concatenate([r[i] for r in rows]) for i in range(3)]
        for request in [r for r in picked if r[2] == r[3]]:
            free += request[0]
            live = [r for r in live if r is not request]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_plans_and_pages_are_the_cpus(torch, recipe, block, in_graph):
    """A graph that was captured once replays every step after its plan."""
    here, there = (Side(torch, recipe, block, device) for device in ("cpu", "cuda"))
    graph, num_reopened = None, 0
    for number, step in enumerate(steps(block, np.random.default_rng(2), 120)):
        here.set_step(*step)
        here.run()
        there.set_step(*step)
        if graph is not None:
            graph.replay()
        else:
            there.run()
        if in_graph and number == 3:  # kernels are loaded, and the workspace is there
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                there.run()
        for field in dataclasses.fields(here.plan):
            a, b = (getattr(side.plan, field.name) for side in (here, there))
            assert torch.equal(a, b.cpu()), field.name
        num_reopened += int((here.plan.reopened_tokens > 0).sum())
        rows = int(step[2][-1])
        assert relative_error(there.out[:rows].cpu(), here.out[:rows]) < 2e-2
    assert torch.equal(there.pages.cpu(), here.pages)
    assert torch.equal(there.window_pages.cpu(), here.window_pages)
    assert there.layer.counters()["out_of_range"] == there.window.num_out_of_range() == 0
    assert num_reopened > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_are_quantised_beside_the_attention_of_decodes_in_a_graph(torch, recipe):
    sides = [Side(torch, recipe, 64, "cuda") for _ in range(2)]
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    rows = text(SEQUENCES * 250)

    def run_beside(side):
        q, k, v = side.rows
        window = {"window_pages": side.window_pages, "plan": side.plan}
        side.layer.append(side.pages, k, v, side.plan.slots, closes=False, **window)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            side.layer.close_blocks(side.pages, **window)
        step = (side.plan.block_table, side.lengths, side.starts)
        side.layer.attend(side.pages, q, *step, side.out, max_q_len=MAX_TOKENS, **window)
        torch.cuda.current_stream().wait_stream(beside)

    table = np.arange(SEQUENCES * WIDTH, dtype=np.int32).reshape(SEQUENCES, WIDTH)
    starts = np.arange(SEQUENCES + 1, dtype=np.int32)
    for length in range(1, 251):
        lengths = np.full(SEQUENCES, length, np.int32) - 7 * np.arange(SEQUENCES, dtype=np.int32)
        counts = (lengths > 0).astype(np.int32)
        starts[1:] = counts.cumsum()
        step = cut(rows, (length - 1) * SEQUENCES, int(starts[-1]))
        for side in sides:
            side.set_step(table, lengths.clip(0), starts, step)
        sides[0].run()
        if length == 1:  # kernels are loaded, and the workspace is there
            run_beside(sides[1])
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run_beside(sides[1])
        else:
            graph.replay()
        found, expected = (side.out[: int(starts[-1])] for side in sides)
        assert torch.equal(found, expected)
    assert torch.equal(sides[0].pages, sides[1].pages)
    assert bool(sides[0].pages.any())
