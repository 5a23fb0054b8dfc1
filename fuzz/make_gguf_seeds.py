#!/usr/bin/env python3
"""Writes the seeds of gguf_fuzz: small GGUF files with every value type and tensor type.

    make_gguf_seeds.py corpus/gguf
"""

import struct
import sys
from pathlib import Path

BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
          12: (256, 144), 13: (256, 176), 14: (256, 210)}
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


def strings(key, values):
    return value(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values)))


def numbers(key, kind, values):
    return value(key, 9, struct.pack("<IQ", kind, len(values)) + b"".join(struct.pack(SCALARS[kind], v) for v in values))


def gguf(values, tensors):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    data = b""
    for name, kind, dims in tensors:
        elements, size = BLOCKS[kind]
        count = 1
        for dim in dims:
            count *= dim
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += bytes(range(256)) * (count // elements * size // 256) + bytes(count // elements * size % 256)
        data += bytes(-len(data) % 32)
    return out + bytes(-len(out) % 32) + data


def llama(pre):
    values = [value("general.architecture", 8, text("llama"))]
    sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "attention.head_count": 2,
             "attention.head_count_kv": 1, "context_length": 64, "rope.dimension_count": 16}
    values += [value(f"llama.{key}", 4, struct.pack("<I", size)) for key, size in sizes.items()]
    values += [value("llama.rope.scaling.type", 8, text("linear")),
               value("llama.rope.scaling.factor", 6, struct.pack("<f", 2.0)),
               value("tokenizer.ggml.model", 8, text("gpt2")), value("tokenizer.ggml.pre", 8, text(pre)),
               strings("tokenizer.ggml.tokens", ["a", "b", "ab", "\u0120", "<|im_end|>"]),
               numbers("tokenizer.ggml.token_type", 5, [1, 1, 1, 1, 3]),
               strings("tokenizer.ggml.merges", ["a b"]),
               value("tokenizer.ggml.unknown_token_id", 4, struct.pack("<I", 0))]
    return gguf(values, [("token_embd.weight", 8, (32, 5)), ("rope_freqs.weight", 0, (8,))])


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    scalars = [value(f"s{kind}", kind, struct.pack(form, 1)) for kind, form in SCALARS.items()]
    arrays = [numbers(f"a{kind}", kind, [1, 0]) for kind in SCALARS]
    files = {"empty": gguf([], []), "values": gguf(scalars + arrays, []),
             "tensors": gguf([], [(f"t{kind}", kind, (max(n, 2),)) for kind, (n, _) in BLOCKS.items()])}
    files |= {f"llama_{pre}": llama(pre) for pre in ("smollm", "llama-bpe", "qwen2", "default")}
    for name, data in files.items():
        (folder / f"{name}.gguf").write_bytes(data)


if __name__ == "__main__":
    main()
