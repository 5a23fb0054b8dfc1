"""An engine's step in torch tensors: pages in a shuffled order, keys and values as slices of one
fused projection, and float64 attention beside it."""

from dataclasses import dataclass

import torch

import kvx

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16
# Relative error of attention's output that a format's own rounding explains, by random rows.
LIMIT = {"f32": 3e-6, "bf16": 8e-3, "int8": 2e-2, "int4": 0.2, "nvfp4": 0.2}


@dataclass
class Step:
    """lens: tokens of each sequence; q_lens: how many of its last ones have a query."""

    layer: kvx.PagedLayer
    pages: torch.Tensor
    q: torch.Tensor  # [rows, HEADS, DIM], padding last
    k: torch.Tensor  # [rows, KV_HEADS, DIM] of all tokens, padding last
    v: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_starts: torch.Tensor
    lens: list
    q_lens: list

    @property
    def batch(self):
        return self.block_table, self.seq_lens, self.q_starts

    @property
    def bounds(self):
        return {"max_q_len": max(self.q_lens), "max_seq_len": max(self.lens)}

    def append(self):
        return self.layer.append(self.pages, self.k, self.v, self.slots)

    def expected(self):
        """float64 [queries, HEADS, DIM], and the natural log of each softmax's sum."""
        outs, logs, first = [], [], 0
        for s, (n, queries) in enumerate(zip(self.lens, self.q_lens)):
            rows = slice(int(self.q_starts[s]), int(self.q_starts[s]) + queries)
            k, v = (
                x[first : first + n].double().repeat_interleave(HEADS // KV_HEADS, 1)
                for x in (self.k, self.v)
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].double(), k) * DIM**-0.5
            position = torch.arange(n - queries, n, device=k.device)[:, None]
            scores.masked_fill_(torch.arange(n, device=k.device)[None] > position, -torch.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            logs.append(scores.logsumexp(-1).T)
            first += n
        return torch.cat(outs), torch.cat(logs)


def new_step(recipe, lens, q_lens, *, device="cpu", dtype=torch.float32, padding=0, **options):
    """Nothing is appended yet. options: of the kvx.PagedLayer."""
    layer = kvx.PagedLayer(
        recipe, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, device=device, **options
    )
    generator = torch.Generator().manual_seed(7)
    needed = [-(-n // BLOCK) for n in lens]
    ids = (torch.randperm(sum(needed), generator=generator) + 1).tolist()  # page 0 is nobody's
    table = torch.zeros((len(lens) + padding, max(needed) + 5), dtype=torch.int32)
    slots = []
    for s, n in enumerate(lens):
        for b in range(needed[s]):
            table[s, b] = ids.pop()
        slots += [int(table[s, t // BLOCK]) * BLOCK + t % BLOCK for t in range(n)]
    rows, queries = sum(lens) + padding, sum(q_lens)
    fused = torch.randn((rows, (HEADS + 2 * KV_HEADS) * DIM), generator=generator)
    fused = fused.to(device, dtype)
    q, k, v = fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    starts = torch.tensor([0, *q_lens, *[0] * padding]).cumsum(0)
    return Step(
        layer=layer,
        pages=torch.zeros((sum(needed) + 1, layer.page_bytes), dtype=torch.uint8, device=device),
        q=q[: queries + padding].view(-1, HEADS, DIM),
        k=k.view(-1, KV_HEADS, DIM),
        v=v.view(-1, KV_HEADS, DIM),
        slots=torch.tensor(slots + [-1] * padding).to(device),
        block_table=table.to(device)[:, : max(needed) + 3],  # its rows are apart
        seq_lens=torch.tensor([*lens, *[0] * padding], dtype=torch.int32).to(device),
        q_starts=starts.int().to(device),
        lens=lens,
        q_lens=q_lens,
    )


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())
