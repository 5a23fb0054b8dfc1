"""Engines' layouts by their public definitions, element by element: the oracle of test_engines.

Each function takes K and V as [blocks, tokens, heads, dim] and returns the engine's tensors, filled
by plain indexing. Nothing here comes from kvx.
"""

import numpy as np


def vllm_bhnc(k, v, order):
    """Logical [blocks, heads, tokens, 2 * dim]; memory NHD or HND (vLLM 0.32)."""
    blocks, tokens, heads, dim = k.shape
    if order == "NHD":
        memory = np.zeros((blocks, tokens, heads, 2 * dim), k.dtype)
        cache = memory.transpose(0, 2, 1, 3)
    else:
        cache = np.zeros((blocks, heads, tokens, 2 * dim), k.dtype)
    for b in range(blocks):
        for t in range(tokens):
            for h in range(heads):
                cache[b, h, t, :dim] = k[b, t, h]
                cache[b, h, t, dim:] = v[b, t, h]
    return cache


def vllm_2bnhd(k, v):
    """[2, blocks, tokens, heads, dim], FlashAttention's before vLLM 0.20."""
    return np.stack([k, v])


def vllm_b2nhd(k, v):
    """[blocks, 2, tokens, heads, dim], FlashInfer's and Triton's before vLLM 0.20."""
    return np.ascontiguousarray(np.stack([k, v], axis=1))


def vllm_int8_per_token_head(k, v):
    """[blocks, heads, tokens, [K: dim][float32][V: dim][float32]], scale max(amax / 127, 1e-6)."""
    blocks, tokens, heads, dim = k.shape
    cache = np.zeros((blocks, heads, tokens, 2 * (dim + 4)), np.uint8)
    values = []
    for side, rows in enumerate((k, v)):
        scale = np.maximum(np.abs(rows).max(-1, keepdims=True) / 127, 1e-6).astype(np.float32)
        codes = np.clip(np.rint(rows / scale), -127, 127).astype(np.int8)
        values.append(codes.astype(np.float32) * scale)
        for b in range(blocks):
            for t in range(tokens):
                for h in range(heads):
                    at = side * (dim + 4)
                    cache[b, h, t, at : at + dim] = codes[b, t, h].view(np.uint8)
                    cache[b, h, t, at + dim : at + dim + 4] = scale[b, t, h].view(np.uint8)
    return cache, values[0], values[1]


def tgi_paged(k, v, x):
    """K [blocks, heads, dim / x, tokens, x], V [blocks, heads, dim, tokens]."""
    blocks, tokens, heads, dim = k.shape
    k_cache = np.zeros((blocks, heads, dim // x, tokens, x), k.dtype)
    v_cache = np.zeros((blocks, heads, dim, tokens), v.dtype)
    for b in range(blocks):
        for t in range(tokens):
            for h in range(heads):
                for d in range(dim):
                    k_cache[b, h, d // x, t, d % x] = k[b, t, h, d]
                    v_cache[b, h, d, t] = v[b, t, h, d]
    return k_cache, v_cache


def trtllm_pool(k, v, num_layers, layer):
    """[blocks, layers, 2, heads * tokens * dim]; inside a block [heads][tokens][dim]."""
    blocks, tokens, heads, dim = k.shape
    pool = np.zeros((blocks, num_layers, 2, heads * tokens * dim), k.dtype)
    for side, rows in enumerate((k, v)):
        for b in range(blocks):
            for t in range(tokens):
                for h in range(heads):
                    at = (h * tokens + t) * dim
                    pool[b, layer, side, at : at + dim] = rows[b, t, h]
    return pool


def llamacpp_q8_0(rows):
    """Places of blocks of 32: float16 d = amax / 127, then 32 int8 of round(x / d)."""
    blocks, tokens, heads, dim = rows.shape
    groups = rows.reshape(-1, 32)
    d = (np.abs(groups).max(-1) / 127).astype(np.float16)
    codes = np.rint(groups / d.astype(np.float32)[:, None]).astype(np.int8)
    memory = np.zeros((len(groups), 34), np.uint8)
    for i, (one, numbers) in enumerate(zip(d, codes, strict=True)):
        memory[i, :2] = np.array([one]).view(np.uint8)
        memory[i, 2:] = numbers.view(np.uint8)
    values = (codes.astype(np.float32) * d.astype(np.float32)[:, None]).reshape(rows.shape)
    return memory.reshape(-1), values


def llamacpp_q4_0(rows):
    """Blocks of 32 as ggml quantises them: float16 d = m / -8 of the number m with the largest
    magnitude, the first of several, then 16 bytes of min(15, int(x / d + 8.5)): code j in the low
    half of byte j, code j + 16 in the high half. A number is (code - 8) * d."""
    memory, values = [], []
    for group in rows.reshape(-1, 32).astype(np.float32):
        largest = group[np.argmax(np.abs(group))]
        exact = largest / np.float32(-8)
        inverse = np.float32(1) / exact if exact else np.float32(0)
        codes = np.minimum(15, (group * inverse + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
        d = exact.astype(np.float16)
        memory += [np.array([d]).view(np.uint8), codes[:16] | codes[16:] << 4]
        values.append((codes.astype(np.float32) - 8) * d.astype(np.float32))
    return np.concatenate(memory), np.stack(values).reshape(rows.shape)


def fp4_e2m1(codes):
    """The numbers of E2M1 codes."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.where(codes & 8, -1, 1) * grid[codes & 7]


def sglang_fp4(codes, exponents):
    """codes [slots, heads, dim] of E2M1 and E8M0 exponents [slots, heads, dim / 16]: uint8 [slots,
    heads, dim / 2], low nibble the even element, and [slots, heads * dim / 16]; and the numbers."""
    slots, heads, dim = codes.shape
    data = np.zeros((slots, heads, dim // 2), np.uint8)
    for d in range(dim):
        data[:, :, d // 2] |= (codes[:, :, d] << (4 * (d % 2))).astype(np.uint8)
    scale = np.exp2(exponents.astype(np.float32) - 127)
    values = fp4_e2m1(codes) * np.repeat(scale, 16, axis=-1)
    return data, exponents.reshape(slots, -1).astype(np.uint8), values.astype(np.float32)


def fp8_e4m3(codes):
    """The numbers of positive E4M3 codes below 0x7f."""
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    ).astype(np.float32)


def nvfp4_values(codes, scales, tensor_scale):
    """The numbers of E2M1 codes [..., dim] and E4M3 scales [..., dim / 16]."""
    step = fp8_e4m3(scales) * np.float32(tensor_scale)
    return fp4_e2m1(codes) * np.repeat(step, 16, axis=-1)


def vllm_nvfp4(sides, order, is_swizzled):
    """Logical [blocks, 2 * heads, tokens, dim / 2 + dim / 16]; a page is [K codes][K scales]
    [V codes][V scales], each by tokens (NHD) or heads (HND). sides: (codes [blocks, tokens, heads,
    dim], scales [blocks, tokens, heads, dim / 16]) of K and V. Swizzled: of V, the scale of (t, s)
    lies where (t / 4 * 4 + s / (S / 4), s % (S / 4) * 4 + t % 4) would."""
    blocks, tokens, heads, dim = sides[0][0].shape
    groups, row = dim // 16, dim // 2
    page = heads * tokens * (row + groups)
    memory = np.zeros((blocks, 2 * page), np.uint8)

    def place(t, h, size):
        return (t * heads + h if order == "NHD" else h * tokens + t) * size

    for side, (codes, scales) in enumerate(sides):
        for b in range(blocks):
            for t in range(tokens):
                for h in range(heads):
                    for d in range(dim):
                        at = side * page + place(t, h, row) + d // 2
                        memory[b, at] |= codes[b, t, h, d] << (4 * (d % 2))
                    for s in range(groups):
                        t_at, s_at = t, s
                        if side == 1 and is_swizzled:
                            t_at = t // 4 * 4 + s // (groups // 4)
                            s_at = s % (groups // 4) * 4 + t % 4
                        at = side * page + heads * tokens * row + place(t_at, h, groups) + s_at
                        memory[b, at] = scales[b, t, h, s]
    if order == "NHD":
        return memory.reshape(blocks, tokens, 2 * heads, -1).swapaxes(1, 2)
    return memory.reshape(blocks, 2 * heads, tokens, -1)


def trtllm_nvfp4(sides, num_layers, layer, is_swizzled):
    """A pool [blocks, layers, 2, heads * tokens * dim / 2] and its block-scale pool. Swizzled: of
    V, the scale s of row r (head * tokens + token) is number r / 4 * 4S + 4s + r % 4."""
    blocks, tokens, heads, dim = sides[0][0].shape
    groups, row = dim // 16, dim // 2
    pool = np.zeros((blocks, num_layers, 2, heads * tokens * row), np.uint8)
    scale_pool = np.zeros((blocks, num_layers, 2, heads * tokens * groups), np.uint8)
    for side, (codes, scales) in enumerate(sides):
        for b in range(blocks):
            for t in range(tokens):
                for h in range(heads):
                    r = h * tokens + t
                    for d in range(dim):
                        nibble = codes[b, t, h, d] << (4 * (d % 2))
                        pool[b, layer, side, r * row + d // 2] |= nibble
                    for s in range(groups):
                        at = r * groups + s
                        if side == 1 and is_swizzled:
                            at = r // 4 * 4 * groups + 4 * s + r % 4
                        scale_pool[b, layer, side, at] = scales[b, t, h, s]
    return pool, scale_pool


def attention(q, k, v, num_tokens):
    """Causal attention by its definition: q [queries, q_heads, dim] are the last tokens."""
    queries, q_heads, dim = q.shape
    group = q_heads // k.shape[1]
    out = np.zeros((queries, q_heads, v.shape[-1]))
    for i in range(queries):
        seen = num_tokens - queries + i + 1
        for h in range(q_heads):
            scores = k[:seen, h // group].astype(np.float64) @ q[i, h] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ v[:seen, h // group]
    return out
