#!/usr/bin/env python3
"""Writes tests/golden/runner/{tokenizer_smollm,tokenizer_splits,dequantize,tiny_llama}.json.

Independent of our code: the PyPI packages gguf 0.19.0 (dequantisation, reading the model),
tokenizers 0.23.3 (tokens and splits), and a plain double-precision Llama below.

    pip install gguf==0.19.0 tokenizers==0.23.3 numpy
    make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf ../golden/runner
"""

import json
import math
import sys
from pathlib import Path

import gguf
import numpy as np
from tiny_weights import weights
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

TEXTS = [
    "", " ", "a", "Hello world", "  leading and trailing  ", "tabs\tand\x0bvertical\x0cfeeds",
    "new\nlines\n\nand\r\nreturns\n\n\n  indented", "1234567890 12 3.14159 2024-01-31",
    "I'm you're it's they'll we'd CAN'T don'T I'VE '' 'quoted'", "caf\u00e9 na\u00efve \u00dcber stra\u00dfe",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3001\u4e2d\u6587\u5b57\u7b26\u3002\ud55c\uad6d\uc5b4", "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0e20\u0e32\u0e29\u0e32", "\u0663\u0664\u0665 \u2167 \u00bd x\u00b2", "a\u00a0b\u2003c\u3000d\u0085e\u2028f",
    "e\u0301 combining a\u0308\u0323", "C++ -> a[i]+=b**2; // x<=y && z!=w | $5 ~^ <html>", "snake_case camelCase URL: https://example.org/?q=1&r=2#x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "!!!???...---===", "\u0000nul\u0001\u001f\u007f",
    "   \n   \n\t\tx", "trailing space \n", "<|im_start|>user\nhi<|im_end|>", "\ufffd replaced \ufffd\ufffd", "\ufeffbom \u200bzero",
]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENISERS = {
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [CL100K % "{1,3}"],
    "qwen2": [CL100K % ""],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def splits():
    cases = {}
    for name, patterns in PRE_TOKENISERS.items():
        sequence = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns])
        cases[name] = [{"text": t, "pieces": [p for p, _ in sequence.pre_tokenize_str(t)]} for t in TEXTS]
    return cases


def smollm_tokenizer(reader):
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    unknown = tokens[int(reader.fields["tokenizer.ggml.unknown_token_id"].contents())]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    special = [AddedToken(t, special=True, normalized=False)
               for t, kind in zip(tokens, types) if kind == 3]
    return tokenizer, special


def tokenizer_cases(reader):
    tokenizer, special = smollm_tokenizer(reader)
    as_text = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    tokenizer.add_special_tokens(special)
    parsed = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    return [{"text_hex": t.encode().hex(), "ids": a, "ids_with_special": p}
            for t, a, p in zip(TEXTS, as_text, parsed)]  # not UTF-8: see make_tokenizer_golden.py


def dequantized():
    rng = np.random.default_rng(20)
    cases = []
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (max(2, 8 // elements), size), dtype=np.uint8)
        scales = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "F32": [], "F16": [], "BF16": []}
        for at in scales.get(name, [0, 2]):  # finite half floats where a random pattern could be NaN
            numbers = rng.uniform(-2, 2, len(blocks)).astype(np.float16)
            blocks[:, at:at + 2] = numbers.view(np.uint8).reshape(-1, 2)
        if name in ("F32", "F16", "BF16"):
            blocks[:, size - 1] &= 0xBF  # exponents below 128: finite
        values = gguf.quants.dequantize(blocks, kind).astype(np.float32).ravel()
        cases.append({"type": int(kind), "name": name, "blocks_hex": blocks.tobytes().hex(),
                      "values_hex": [f"{b:08x}" for b in values.view(np.uint32)]})
    return cases


class TinyLlama:
    """A Llama in Python's doubles, token by token, straight from the definition."""

    hidden, ff, q_heads, kv_heads, head_dim, layers, vocab = 16, 24, 4, 2, 8, 2, 40

    def __init__(self, extras):
        self.extras = extras
        self.rope_dims = 4 if extras else 8
        self.k_cache = [[] for _ in range(self.layers)]
        self.v_cache = [[] for _ in range(self.layers)]

    def matmul(self, name, x, rows):
        w = weights(name + ".weight", rows * len(x))
        y = [sum(w[r * len(x) + c] * x[c] for c in range(len(x))) for r in range(rows)]
        if self.extras and name.endswith(("attn_q", "attn_k", "attn_v")):
            y = [a + b for a, b in zip(y, weights(name + ".bias", rows))]
        return y

    def norm(self, name, x):
        w = weights(name + ".weight", len(x))
        scale = 1 / math.sqrt(sum(a * a for a in x) / len(x) + 1e-5)
        return [a * scale * (1 + b) for a, b in zip(x, w)]  # norm weights are 1 + the rule's

    def rope(self, row, position):
        for i in range(self.rope_dims // 2):
            angle = position * 10000.0 ** (-2 * i / self.rope_dims)
            if self.extras:
                angle = angle / 2.0 / (1.0 + i)  # linear factor 2, rope_freqs 1 + i
            a, b = row[2 * i], row[2 * i + 1]
            row[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            row[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)

    def heads(self, x):
        return [x[i:i + self.head_dim] for i in range(0, len(x), self.head_dim)]

    def attend(self, layer, q, position):
        out = []
        for head, row in enumerate(q):
            kv = head * self.kv_heads // self.q_heads
            scores = [sum(a * b for a, b in zip(row, k[kv])) / math.sqrt(self.head_dim)
                      for k in self.k_cache[layer]]
            top = max(scores)
            p = [math.exp(s - top) for s in scores]
            total = sum(p)
            out += [sum(p[t] * self.v_cache[layer][t][kv][d] for t in range(position + 1)) / total
                    for d in range(self.head_dim)]
        return out

    def logits(self, token, position):
        table = weights("token_embd.weight", self.vocab * self.hidden)
        x = table[token * self.hidden:(token + 1) * self.hidden]
        for layer in range(self.layers):
            at = f"blk.{layer}."
            h = self.norm(at + "attn_norm", x)
            q = self.heads(self.matmul(at + "attn_q", h, self.q_heads * self.head_dim))
            k = self.heads(self.matmul(at + "attn_k", h, self.kv_heads * self.head_dim))
            v = self.heads(self.matmul(at + "attn_v", h, self.kv_heads * self.head_dim))
            for row in q + k:
                self.rope(row, position)
            self.k_cache[layer].append(k)
            self.v_cache[layer].append(v)
            attended = self.attend(layer, q, position)
            x = [a + b for a, b in zip(x, self.matmul(at + "attn_output", attended, self.hidden))]
            h = self.norm(at + "ffn_norm", x)
            gate = self.matmul(at + "ffn_gate", h, self.ff)
            up = self.matmul(at + "ffn_up", h, self.ff)
            act = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
            x = [a + b for a, b in zip(x, self.matmul(at + "ffn_down", act, self.hidden))]
        return self.matmul("output" if self.extras else "token_embd", self.norm("output_norm", x), self.vocab)


def tiny_llama():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 39, 0]
    cases = []
    for extras in (False, True):
        model = TinyLlama(extras)
        cases.append({"extras": extras, "tokens": tokens,
                      "logits": [model.logits(t, i) for i, t in enumerate(tokens)]})
    return cases


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    out = Path(sys.argv[2])
    made = "made by tests/runner/make_golden.py with gguf 0.19.0, tokenizers 0.23.3"
    for name, cases in (("tokenizer_smollm", tokenizer_cases(reader)), ("tokenizer_splits", splits()),
                        ("dequantize", dequantized()), ("tiny_llama", tiny_llama())):
        text = json.dumps({"made": made, "cases": cases}, ensure_ascii=True, indent=None)
        (out / f"{name}.json").write_text(text.replace("}, {", "},\n{") + "\n")


if __name__ == "__main__":
    main()
