"""Rows of llama.cpp's own quantised caches beside those that kvx writes from the same numbers.

    python3.11 -m venv llamacpp && llamacpp/bin/pip install cyllama==0.2.18 numpy==2.4.6
    PYTHONPATH=build/dev/python llamacpp/bin/python bench/quality/llamacpp_rows.py MODEL.gguf

llama.cpp runs the same tokens with an f32 cache and with quantised ones, without its rotation. What
the first layer stores does not depend on the cache, so its f32 rows are what the quantised rows
were made of: kvx appends them to a layer of its llama.cpp adapter, and the bytes are compared.
Then kvx reads llama.cpp's own bytes, and the numbers are compared with the f32 rows.
Exits with 1 if a byte of q4_0 differs.
"""

import os
import struct
import sys

os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1"

import numpy as np
from cyllama.llama import llama_cpp

from kvx import engines

TYPES = {"f32": (0, 4), "q8_0": (8, 34 / 32), "q4_0": (2, 18 / 32)}  # ggml_type, bytes a number
TOKENS, FLASH_ATTENTION = 512, 1


def first_rows(model, name: str, row_numbers: int) -> list[np.ndarray]:
    """K's and V's bytes of the first layer, after a prompt of TOKENS tokens."""
    ggml_type, item = TYPES[name]
    options = llama_cpp.LlamaContextParams()
    options.n_ctx = options.n_batch = options.n_ubatch = TOKENS
    options.type_k = options.type_v = ggml_type
    options.flash_attn_type = FLASH_ATTENTION
    context = llama_cpp.LlamaContext(model, options)
    batch = llama_cpp.LlamaBatch(n_tokens=TOKENS, embd=0, n_seq_max=1)
    for i in range(TOKENS):
        batch.add(100 + 37 * i % 40000, i, [0], False)
    context.decode(batch)
    state = bytes(context.get_state_seq_data(0))
    row_bytes = int(row_numbers * item)
    # Of each layer K's type and bytes of a row, then its rows; likewise V's of all layers.
    header = struct.pack("<iQ", ggml_type, row_bytes)
    found, at = [], state.find(header)
    while at >= 0:
        begin = at + len(header)
        end = begin + TOKENS * row_bytes
        found.append(np.frombuffer(state[begin:end], np.uint8).copy())
        at = state.find(header, end)
    assert len(found) % 2 == 0 and found, f"{name}: {len(found)} tensors in the state"
    return [found[0], found[len(found) // 2]]


def main():
    llama_cpp.disable_logging()
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers = 0
    model = llama_cpp.LlamaModel(path_model=sys.argv[1], params=options)
    heads = model.n_head_kv
    dim = model.n_embd // model.n_head
    print(f"llama.cpp with ggml {llama_cpp.ggml_version()} ({llama_cpp.ggml_commit()}), "
          f"{heads} KV heads of {dim}, {TOKENS} tokens")
    rows = [side.view(np.float32).reshape(TOKENS, heads, dim)
            for side in first_rows(model, "f32", heads * dim)]
    table = engines.packed(np.array([[0]], np.int32), np.array([TOKENS], np.int32))
    is_equal = True
    for name in ("q8_0", "q4_0"):
        theirs = first_rows(model, name, heads * dim)
        shape = {"num_kv_heads": heads, "kv_size": TOKENS}
        ours = [np.zeros_like(side) for side in theirs]
        engines.llamacpp.layer(*ours, name, name, **shape).append(*rows, np.arange(TOKENS))
        read = engines.llamacpp.layer(*theirs, name, name, **shape).flatten(table, [(0, 0, TOKENS)])
        for side, one, other, back, row in zip("kv", theirs, ours, read, rows, strict=True):
            same = int((one == other).sum())
            error = np.linalg.norm(back[0].transpose(1, 0, 2) - row) / np.linalg.norm(row)
            print(f"{name} {side}: {same} of {one.size} bytes are equal; read back with a relative "
                  f"error of {error:.4f}")
            is_equal &= name != "q4_0" or same == one.size
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
