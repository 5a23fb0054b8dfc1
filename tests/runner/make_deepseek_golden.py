#!/usr/bin/env python3
"""Writes tests/golden/runner/tiny_deepseek.json: the logits of two tiny latent models.

    make_deepseek_golden.py ../golden/runner

A DeepSeek-V2 in Python's doubles, token by token, straight from the definition: keys and values of
all heads are expanded from their latent rows, which our code never does. tests/runner/tiny_deepseek.cpp
writes the same weights into a GGUF.
"""

import json
import math
import sys
from pathlib import Path

from tiny_weights import weights


def times(w, x, first_row, rows):
    """Rows [first_row, first_row + rows) of a matrix with len(x) columns."""
    n = len(x)
    return [sum(w[r * n + c] * x[c] for c in range(n)) for r in range(first_row, first_row + rows)]


def norm(name, x):
    scale = 1 / math.sqrt(sum(a * a for a in x) / len(x) + 1e-5)
    return [a * scale * (1 + b) for a, b in zip(x, weights(name, len(x)))]  # 1 + the rule's


def silu(a):
    return a / (1 + math.exp(-a))


class TinyDeepseek:
    hidden, heads, latent, rotary, nope, value = 16, 2, 8, 4, 6, 5
    ff, vocab, layers, rank = 24, 40, 3, 12
    experts, used, expert_ff = 4, 2, 10

    def __init__(self, extras):
        self.extras = extras
        self.rows = [[] for _ in range(self.layers)]  # (latent, rotary) of each token
        self.scale = 1 / math.sqrt(self.nope + self.rotary)
        self.frequencies = [10000.0 ** (-2 * i / self.rotary) for i in range(self.rotary // 2)]
        if extras:  # YaRN: factor 4, trained with 16 positions, log multiplier 0.1
            dim = lambda turns: (
                self.rotary * math.log(16 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))
            )
            low = max(0, math.floor(dim(32)))
            high = min(self.rotary - 1, math.ceil(dim(1)))
            for i in range(self.rotary // 2):
                ramp = min(1, max(0, (i - low) / max(0.001, high - low)))
                self.frequencies[i] *= 1 - ramp + ramp / 4
            self.scale *= (1 + 0.1 * math.log(4)) ** 2

    def rope(self, row, position):
        out = list(row)
        for i, frequency in enumerate(self.frequencies):
            angle, a, b = position * frequency, row[2 * i], row[2 * i + 1]
            out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def queries(self, at, x):
        size = self.heads * (self.nope + self.rotary)
        if not self.extras:
            return times(weights(at + "attn_q.weight", size * self.hidden), x, 0, size)
        down = times(weights(at + "attn_q_a.weight", self.rank * self.hidden), x, 0, self.rank)
        down = norm(at + "attn_q_a_norm.weight", down)
        return times(weights(at + "attn_q_b.weight", size * self.rank), down, 0, size)

    def key_and_value(self, at, head, latent):
        n, v = self.nope, self.value
        if not self.extras:
            w = weights(at + "attn_kv_b.weight", self.heads * (n + v) * self.latent)
            both = times(w, latent, head * (n + v), n + v)
            return both[:n], both[n:]
        w = weights(at + "attn_k_b.weight", self.heads * self.latent * n)
        key = [
            sum(w[(head * self.latent + i) * n + d] * latent[i] for i in range(self.latent))
            for d in range(n)
        ]
        w = weights(at + "attn_v_b.weight", self.heads * v * self.latent)
        return key, times(w, latent, head * v, v)

    def attention(self, at, layer, x, position):
        w = weights(at + "attn_kv_a_mqa.weight", (self.latent + self.rotary) * self.hidden)
        row = times(w, x, 0, self.latent + self.rotary)
        latent = norm(at + "attn_kv_a_norm.weight", row[: self.latent])
        self.rows[layer].append((latent, self.rope(row[self.latent :], position)))
        queries = self.queries(at, x)
        out = []
        for head in range(self.heads):
            q = queries[head * (self.nope + self.rotary) :][: self.nope + self.rotary]
            q = q[: self.nope] + self.rope(q[self.nope :], position)
            expanded = [self.key_and_value(at, head, row[0]) for row in self.rows[layer]]
            scores = [
                sum(a * b for a, b in zip(q, key + row[1])) * self.scale
                for (key, _), row in zip(expanded, self.rows[layer])
            ]
            top = max(scores)
            p = [math.exp(s - top) for s in scores]
            out += [
                sum(w * v[d] for w, (_, v) in zip(p, expanded)) / sum(p) for d in range(self.value)
            ]
        w = weights(at + "attn_output.weight", self.hidden * len(out))
        return times(w, out, 0, self.hidden)

    def mlp(self, x, gate, up, down, ff, gate_row=0, down_row=0):
        g = times(gate, x, gate_row, ff)
        u = times(up, x, gate_row, ff)
        return times(down, [silu(a) * b for a, b in zip(g, u)], down_row, self.hidden)

    def chosen(self, at, x):
        logits = times(weights(at + "ffn_gate_inp.weight", self.experts * self.hidden), x, 0, self.experts)
        if not self.extras:
            total = sum(math.exp(a) for a in logits)
            scores = [math.exp(a) / total for a in logits]
            order = sorted(range(self.experts), key=lambda e: -scores[e])[: self.used]
            return [(e, scores[e]) for e in order]
        scores = [1 / (1 + math.exp(-a)) for a in logits]
        choice = [s + b for s, b in zip(scores, weights(at + "exp_probs_b.bias", self.experts))]
        groups = [sum(sorted(choice[g * 2 : g * 2 + 2])) for g in range(2)]  # two experts a group
        best = groups.index(max(groups))
        order = [best * 2, best * 2 + 1]
        total = sum(scores[e] for e in order)
        return [(e, 2.5 * scores[e] / total) for e in order]

    def feed_forward(self, at, layer, x):
        h, ff = self.hidden, self.ff
        if layer == 0:
            return self.mlp(
                x, weights(at + "ffn_gate.weight", ff * h), weights(at + "ffn_up.weight", ff * h),
                weights(at + "ffn_down.weight", ff * h), ff)
        ff, n = self.expert_ff, self.experts * self.expert_ff * h
        gate, up, down = (weights(at + f"ffn_{part}_exps.weight", n) for part in ("gate", "up", "down"))
        out = self.mlp(
            x, *(weights(at + f"ffn_{part}_shexp.weight", ff * h) for part in ("gate", "up", "down")), ff)
        for e, weight in self.chosen(at, x):
            y = self.mlp(x, gate, up, down, ff, e * ff, e * h)
            out = [a + weight * b for a, b in zip(out, y)]
        return out

    def step(self, token, position):
        x = weights("token_embd.weight", self.vocab * self.hidden)[token * self.hidden :][: self.hidden]
        for layer in range(self.layers):
            at = f"blk.{layer}."
            y = self.attention(at, layer, norm(at + "attn_norm.weight", x), position)
            x = [a + b for a, b in zip(x, y)]
            y = self.feed_forward(at, layer, norm(at + "ffn_norm.weight", x))
            x = [a + b for a, b in zip(x, y)]
        x = norm("output_norm.weight", x)
        return times(weights("output.weight", self.vocab * self.hidden), x, 0, self.vocab)


def main():
    tokens = [3, 17, 0, 39, 8, 8, 21, 5, 30, 12, 2]
    cases = []
    for extras in (False, True):
        model = TinyDeepseek(extras)
        logits = [model.step(token, position) for position, token in enumerate(tokens)]
        cases.append({"extras": extras, "tokens": tokens, "logits": logits})
    text = json.dumps({"made": "made by tests/runner/make_deepseek_golden.py", "cases": cases})
    (Path(sys.argv[1]) / "tiny_deepseek.json").write_text(text.replace("], [", "],\n[") + "\n")


main()
