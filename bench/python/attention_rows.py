"""Random queries, keys and values of a step, where a cache's device takes them."""

import numpy as np


def new_rows(device, num_tokens, heads, kv_heads, head_dim):
    """[q, k, v], each [num_tokens, its heads, head_dim]: float32 of NumPy's on the CPU, torch's
    bfloat16 on a GPU."""
    shapes = [(num_tokens, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    if device == "cpu":
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape, np.float32) for shape in shapes]
    import torch

    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
