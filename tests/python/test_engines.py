"""Engines' layers against layouts that were filled element by element from public definitions."""

import numpy as np
import pytest

import kvx
from kvx import engines
from kvx.turbomind import get_cache_block_size, get_kv_cache_mode
import engine_layouts as oracle

BLOCKS, TOKENS, HEADS, DIM = 6, 8, 2, 32
Q_HEADS = 4
IDS = [4, 1, 5]
LENGTH = 21


def random_rows(seed, shape=(BLOCKS, TOKENS, HEADS, DIM), dtype=np.float16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Case:
    """An engine's layer, what its rows are, its table, and its slots."""

    def __init__(self, layer, k, v, table=None, slots=None):
        self.layer, self.k, self.v = layer, k.astype(np.float32), v.astype(np.float32)
        ids = np.array([IDS], np.int32)
        self.table = table or engines.packed(ids, np.array([LENGTH], np.int32))
        tokens = np.arange(LENGTH)
        block, offset = np.array(IDS)[tokens // TOKENS], tokens % TOKENS
        self.blocks, self.offsets = block, offset
        self.slots = block * TOKENS + offset if slots is None else slots

    def rows(self):
        """K and V of the sequence, [tokens, heads, dim]."""
        return (side[self.blocks, self.offsets] for side in (self.k, self.v))


def tables_per_token():
    """For layers whose block is one token: a slot each."""
    tokens = np.arange(LENGTH)
    slots = (np.array(IDS)[tokens // TOKENS] * TOKENS + tokens % TOKENS).astype(np.int32)
    indptr = np.array([0, LENGTH], np.int32)
    return engines.tokens(indptr, slots, np.array([LENGTH], np.int32))


SIDE_SCALES = {"k_scale": 0.5, "v_scale": 2.0}
TRTLLM = {
    "layer_idx_in_pool": 1, "num_kv_heads": HEADS, "tokens_per_block": TOKENS, "head_dim": DIM,
}


def nvfp4_sides(dim):
    """(codes, scales) of K and V, scales of about 1."""
    generator = np.random.default_rng(3)
    shape = (BLOCKS, TOKENS, HEADS)
    return [
        (
            generator.integers(0, 16, (*shape, dim), np.uint8),
            generator.integers(0x34, 0x40, (*shape, dim // 16), np.uint8),
        )
        for _ in range(2)
    ]


def trtllm_case(layer, k, v):
    """A layer of three in a pool."""
    index = engines.trtllm.block_index(np.array(IDS), num_layers=3)
    offsets = np.stack([index, index + 1])[None, None].astype(np.int32)
    case = Case(layer, k, v, engines.trtllm.table(offsets, np.array([LENGTH], np.int32)))
    case.slots = engines.trtllm.slots(
        case.blocks, case.offsets, num_layers=3, tokens_per_block=TOKENS
    )
    return case


def make(name):
    k, v = random_rows(1), random_rows(2)
    flat = (BLOCKS * TOKENS, HEADS, DIM)
    if name.startswith("vllm BHNC"):
        cache = oracle.vllm_bhnc(k, v, name.split()[-1])
        return Case(engines.vllm.layer(cache, "float16", head_dim=DIM), k, v)
    if name == "vllm 2BNHD":
        cache = oracle.vllm_2bnhd(k, v)
        return Case(engines.vllm.layer(cache, "float16", head_dim=DIM, shape="2BNHD"), k, v)
    if name == "vllm B2NHD":
        cache = oracle.vllm_b2nhd(k, v)
        return Case(engines.vllm.layer(cache, "float16", head_dim=DIM, shape="B2NHD"), k, v)
    if name == "vllm int8_per_token_head":
        cache, k, v = oracle.vllm_int8_per_token_head(k.astype(np.float32), v.astype(np.float32))
        return Case(engines.vllm.layer(cache, "int8_per_token_head", head_dim=DIM), k, v)
    if name.endswith("nvfp4"):
        sides = nvfp4_sides(DIM)
        k, v = (
            oracle.nvfp4_values(*side, scale)
            for side, scale in zip(sides, SIDE_SCALES.values(), strict=True)
        )
        if name.startswith("vllm"):
            cache = oracle.vllm_nvfp4(sides, name.split()[1], is_swizzled=False)
            return Case(engines.vllm.layer(cache, "nvfp4", head_dim=DIM, **SIDE_SCALES), k, v)
        pools = oracle.trtllm_nvfp4(sides, num_layers=3, layer=1, is_swizzled=False)
        return trtllm_case(engines.trtllm.nvfp4_layer(*pools, **TRTLLM, **SIDE_SCALES), k, v)
    if name == "tgi flashdecoding":
        return Case(engines.tgi.layer((k.copy(), v.copy()), "flashdecoding", "f16"), k, v)
    if name == "tgi ipex":
        hnd = [np.ascontiguousarray(side.transpose(0, 2, 1, 3)) for side in (k, v)]
        return Case(engines.tgi.layer(tuple(hnd), "ipex", "f16"), k, v)
    if name == "tgi flashinfer":
        sides = tuple(side.reshape(BLOCKS * TOKENS, 1, HEADS, DIM).copy() for side in (k, v))
        return Case(engines.tgi.layer(sides, "flashinfer", "f16"), k, v, tables_per_token())
    if name == "tgi paged":
        return Case(engines.tgi.layer(oracle.tgi_paged(k, v, 8), "paged", "f16"), k, v)
    if name == "trtllm":
        pool = oracle.trtllm_pool(k, v, num_layers=3, layer=1)
        return trtllm_case(engines.trtllm.layer(pool, "f16", **TRTLLM), k, v)
    if name.startswith("lmdeploy"):
        policy = int(name.split()[-1])
        if policy == 0:  # rows of one tensor of all layers, as its cache engine makes them
            k_caches, v_caches = (np.stack([np.zeros_like(x), x]) for x in (k, v))
            return Case(engines.lmdeploy.layer(k_caches[1], v_caches[1]), k, v)
        codes = np.random.default_rng(5).integers(0x30, 0x40, (2, *k.shape), np.uint8)
        layer = engines.lmdeploy.layer(codes[0], codes[1], policy, v_scale=0.5)
        return Case(layer, oracle.fp8_e4m3(codes[0]), oracle.fp8_e4m3(codes[1]) / 2)
    if name == "sglang":
        layer = engines.sglang.layer(k.reshape(flat).copy(), v.reshape(flat).copy(), "f16")
        return Case(layer, k, v, tables_per_token())
    if name == "sglang pages":
        layer = engines.sglang.layer(
            k.reshape(flat).copy(), v.reshape(flat).copy(), "f16", page_size=TOKENS
        )
        return Case(layer, k, v)
    if name == "sglang fp4":
        generator = np.random.default_rng(3)
        sides = [
            oracle.sglang_fp4(
                generator.integers(0, 16, flat), generator.integers(120, 130, (*flat[:2], 2))
            )
            for _ in range(2)
        ]
        layer = engines.sglang.fp4_layer(
            sides[0][0], sides[1][0], sides[0][1], sides[1][1], head_dim=DIM, page_size=TOKENS
        )
        shape = (BLOCKS, TOKENS, HEADS, DIM)
        return Case(layer, sides[0][2].reshape(shape), sides[1][2].reshape(shape))
    if name.startswith("flashinfer"):
        order = name.split()[-1]
        sides = [side if order == "NHD" else side.transpose(0, 2, 1, 3) for side in (k, v)]
        cache = np.ascontiguousarray(np.stack(sides, axis=1))
        table = engines.flashinfer.table(
            np.array([0, 3], np.int32),
            np.array(IDS, np.int32),
            np.array([LENGTH - 16], np.int32),
            page_size=TOKENS,
        )
        return Case(engines.flashinfer.layer(cache, "f16", kv_layout=order), k, v, table)
    if name.startswith("llama.cpp"):
        kind = name.split()[-1]
        kv_size = BLOCKS * TOKENS
        places = [side.reshape(kv_size, HEADS * DIM) for side in (k, v)]
        v_trans = kind == "transposed"
        if kind in ("q8_0", "q4_0"):
            blocks_of = {"q8_0": oracle.llamacpp_q8_0, "q4_0": oracle.llamacpp_q4_0}[kind]
            memory, values = zip(*(blocks_of(side.astype(np.float32)) for side in (k, v)),
                                 strict=True)
            k, v = values
        else:
            memory = [
                np.ascontiguousarray(one.T if v_trans and i else one).view(np.uint8).reshape(-1)
                for i, one in enumerate(places)
            ]
            kind = "f16"
        layer = engines.llamacpp.layer(
            *memory, kind, kind, num_kv_heads=HEADS, kv_size=kv_size, v_trans=v_trans
        )
        # The places of one stream in order: the sequence is its first tokens.
        case = Case(layer, k, v)
        case.table = engines.packed(np.array([[0]], np.int32), np.array([LENGTH], np.int32))
        tokens = np.arange(LENGTH)
        case.blocks, case.offsets, case.slots = tokens // TOKENS, tokens % TOKENS, tokens
        return case
    assert name.startswith("turbomind")
    mode = get_kv_cache_mode(int(name.split()[-1]), 0)
    geometry = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": DIM, "block_len": TOKENS}
    sizes = get_cache_block_size(mode, **geometry)
    data = np.zeros((BLOCKS, sizes.block_bytes), np.uint8)
    scales = (
        np.zeros((BLOCKS, sizes.scale_block_bytes), np.uint8) if sizes.scale_block_bytes else None
    )
    layer = engines.turbomind.layer(data, scales, mode=mode, layer=1, **geometry)
    case = Case(layer, k, v)
    layer.append(
        k.reshape(-1, HEADS, DIM), v.reshape(-1, HEADS, DIM), np.arange(BLOCKS * TOKENS)
    )
    every = engines.packed(np.arange(BLOCKS, dtype=np.int32)[None],
                           np.array([BLOCKS * TOKENS], np.int32))
    stored = layer.flatten(every, [(0, 0, BLOCKS * TOKENS)])
    case.k, case.v = (
        side[0].transpose(1, 0, 2).reshape(BLOCKS, TOKENS, HEADS, DIM) for side in stored
    )
    if name.endswith(" 0"):
        np.testing.assert_array_equal(case.k, k)
    return case


NAMES = [
    "vllm BHNC NHD",
    "vllm BHNC HND",
    "vllm 2BNHD",
    "vllm B2NHD",
    "vllm int8_per_token_head",
    "vllm NHD nvfp4",
    "vllm HND nvfp4",
    "tgi flashdecoding",
    "tgi ipex",
    "tgi flashinfer",
    "tgi paged",
    "trtllm",
    "trtllm nvfp4",
    "lmdeploy pytorch 0",
    "lmdeploy fp8 16",
    "sglang",
    "sglang pages",
    "sglang fp4",
    "flashinfer NHD",
    "flashinfer HND",
    "llama.cpp f16",
    "llama.cpp transposed",
    "llama.cpp q8_0",
    "llama.cpp q4_0",
    "turbomind 0",
    "turbomind 4",
    "turbomind 8",
    "turbomind 16",
]


@pytest.mark.parametrize("name", NAMES)
def test_flatten_reads_the_engines_rows(name):
    case = make(name)
    ranges = [(0, 3, 11), (0, 16, 5), (0, 0, LENGTH)]
    k, v = case.layer.flatten(case.table, ranges)
    assert k.shape == (3, HEADS, LENGTH, DIM)
    for found, expected in zip((k, v), case.rows(), strict=True):
        for i, (_, first, count) in enumerate(ranges):
            rows = expected[first : first + count].transpose(1, 0, 2)
            np.testing.assert_array_equal(found[i, :, :count], rows)
            assert not found[i, :, count:].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_queries", [1, 5])
def test_attend_is_attention_over_the_engines_rows(name, num_queries):
    case = make(name)
    q = random_rows(7, (num_queries, Q_HEADS, DIM), np.float32)
    out = case.layer.attend(q, case.table, np.array([0, num_queries], np.int32))
    k, v = case.rows()
    expected = oracle.attention(q, k, v, LENGTH)
    np.testing.assert_allclose(out, expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_append_writes_where_the_engine_reads(name):
    case = make(name)
    before = [side.copy() for side in case.rows()]
    k, v = (random_rows(seed, (2, HEADS, DIM)) for seed in (11, 12))
    case.layer.append(k, v, np.array([case.slots[9], -1, case.slots[20]])[[0, 2]])
    found = case.layer.flatten(case.table, [(0, 0, LENGTH)])
    for side, new, old in zip(found, (k, v), before, strict=True):
        rows = side[0].transpose(1, 0, 2)
        untouched = [t for t in range(LENGTH) if t not in (9, 20)]
        np.testing.assert_array_equal(rows[untouched], old[untouched])
        error = np.abs(rows[[9, 20]] - new.astype(np.float32)).max()
        limits = {"4": 0.4, "16": 0.6, "fp4": 0.6, "nvfp4": 0.4, "q4_0": 0.4}
        assert error <= limits.get(name.split()[-1], 0.03)


ROUNDING = ("4", "8", "16", "fp4", "nvfp4", "q8_0", "q4_0", "int8_per_token_head")


@pytest.mark.parametrize("source", NAMES)
def test_transcode_reads_one_engine_and_writes_another(source):
    for target in NAMES:
        one, other = make(source), make(target)
        engines.transcode(one.layer, other.layer, np.array(one.slots, np.int64),
                          np.array(other.slots, np.int64))
        copied = other.layer.flatten(other.table, [(0, 0, LENGTH)])
        if target.split()[-1] in ROUNDING:
            continue  # its own format rounds the rows again
        for found, expected in zip(copied, one.rows(), strict=True):
            rows = found[0].transpose(1, 0, 2)
            np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-6)


def test_append_writes_vllms_bytes():
    k, v = random_rows(1), random_rows(2)
    cache = np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), np.float16)
    layer = engines.vllm.layer(cache, "float16", head_dim=DIM)
    layer.append(k.reshape(-1, HEADS, DIM), v.reshape(-1, HEADS, DIM), np.arange(BLOCKS * TOKENS))
    np.testing.assert_array_equal(cache, oracle.vllm_bhnc(k, v, "HND"))


def q4_0_rows():
    """Rows with what ggml's rule is particular about: signs, ties, zeros, small and large groups."""
    rows = random_rows(1, (BLOCKS * TOKENS, HEADS, 2 * DIM), np.float32)
    rows[0] = 0
    rows[1, 0, :32] = -np.abs(rows[1, 0, :32])
    rows[1, 1, 5], rows[1, 1, 9] = -9.0, 9.0  # the first of the two decides the sign
    rows[2] *= np.float32(1e-6)  # scales below f16's normal numbers
    rows[3] *= np.float32(1e-12)  # and below all of them
    rows[4] *= np.float32(1e4)
    rows[5, :, :32] = np.arange(-16, 16, dtype=np.float32) / 2  # numbers between two codes
    return rows


def q4_0_layer(memory, head_dim=2 * DIM):
    assert memory[0].size == BLOCKS * TOKENS * HEADS * head_dim // 32 * 18
    return engines.llamacpp.layer(
        *memory, "q4_0", "q4_0", num_kv_heads=HEADS, kv_size=BLOCKS * TOKENS
    )


def test_append_writes_ggmls_q4_0_bytes():
    k, v = q4_0_rows(), q4_0_rows()[::-1].copy()
    expected = [oracle.llamacpp_q4_0(side)[0] for side in (k, v)]
    memory = [np.zeros_like(side) for side in expected]
    q4_0_layer(memory).append(k, v, np.arange(BLOCKS * TOKENS))
    for found, wanted in zip(memory, expected, strict=True):
        np.testing.assert_array_equal(found.reshape(-1, 18), wanted.reshape(-1, 18))


def test_a_q4_0_group_with_a_nan_decodes_to_nan_and_the_others_stay():
    k = random_rows(1, (BLOCKS * TOKENS, HEADS, 2 * DIM), np.float32)
    expected, values = oracle.llamacpp_q4_0(k)
    memory = [np.zeros_like(expected) for _ in range(2)]
    layer = q4_0_layer(memory)
    k[3, 1, 40], k[4, 0, 2] = np.nan, np.inf
    layer.append(k, k, np.arange(BLOCKS * TOKENS))
    table = engines.packed(np.array([[0]], np.int32), np.array([BLOCKS * TOKENS], np.int32))
    found = layer.flatten(table, [(0, 0, BLOCKS * TOKENS)])[0][0].transpose(1, 0, 2)
    values[3, 1, 32:] = values[4, 0, :32] = np.nan
    np.testing.assert_array_equal(found, values)


def test_q4_0_goes_to_q4_0_and_to_int4_and_back():
    slots = np.arange(BLOCKS * TOKENS)
    rows = q4_0_rows()
    original = oracle.llamacpp_q4_0(rows)[0]
    # The scales of two tokens lie where f16 rounds them to zero or loses their digits.
    kept = np.delete(original.reshape(BLOCKS * TOKENS, -1), [2, 3], axis=0)
    source = q4_0_layer([original.copy(), original.copy()])
    copies = [np.zeros_like(original) for _ in range(2)]
    engines.transcode(source, q4_0_layer(copies), slots, slots)
    for copy in copies:
        found = np.delete(copy.reshape(BLOCKS * TOKENS, -1), [2, 3], axis=0)
        np.testing.assert_array_equal(found, kept)
    blocks = [np.zeros_like(original) for _ in range(2)]
    source.copy_blocks(q4_0_layer(blocks), np.array([0]), np.array([0]))
    np.testing.assert_array_equal(blocks[0], original)
    # kvx's own int4 has the same groups and another order and rule: numbers are rounded again.
    memory = engines.layer.memory_of(np.zeros((BLOCKS * TOKENS, HEADS, 72), np.uint8), "pages")
    strides = (BLOCKS * TOKENS * HEADS * 72, HEADS * 72, 72)
    sides = [
        engines.layer.Rows("int4:g32,scale=f16", 2 * DIM, memory, at, strides, scales=memory,
                           scale_offset=at + 32, scale_strides=(*strides, 2))
        for at in (0, 36)
    ]
    shape = engines.layer.Shape(1, BLOCKS * TOKENS, HEADS)
    for copy in ("transcode", "copy_blocks"):
        memory.array[:] = 0
        own = engines.layer.Layer(shape, *sides)
        if copy == "transcode":
            engines.transcode(source, own, slots, slots)
        else:
            source.copy_blocks(own, np.array([0]), np.array([0]))
        table = engines.packed(np.array([[0]], np.int32), np.array([BLOCKS * TOKENS], np.int32))
        one, other = (
            layer.flatten(table, [(0, 0, BLOCKS * TOKENS)])[0].reshape(-1, 32)
            for layer in (source, own)
        )
        step = np.abs(one).max(-1, keepdims=True) / 7
        assert (np.abs(one - other) <= 0.51 * step + 1e-7).all()
        assert np.abs(one - other).max() > 0


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_vllms_swizzled_scales_are_turned_and_turned_back(order):
    sides = nvfp4_sides(128)
    cache = oracle.vllm_nvfp4(sides, order, is_swizzled=True)
    linear = oracle.vllm_nvfp4(sides, order, is_swizzled=False)
    engines_own = cache.copy()
    scales = engines.vllm.v_scales(cache, head_dim=128)
    assert scales.shape == (BLOCKS, HEADS, TOKENS, 8)
    engines.linear_scales(scales)
    np.testing.assert_array_equal(cache, linear)
    engines.swizzled_scales(scales)
    np.testing.assert_array_equal(cache, engines_own)
    some = engines.vllm.v_scales(cache[2:4], head_dim=128)
    engines.linear_scales(some)
    np.testing.assert_array_equal(cache[2:4], linear[2:4])
    np.testing.assert_array_equal(cache[:2], engines_own[:2])


def test_trtllms_swizzled_scales_are_turned_and_turned_back():
    sides = nvfp4_sides(64)
    _, scale_pool = oracle.trtllm_nvfp4(sides, num_layers=3, layer=1, is_swizzled=True)
    _, linear = oracle.trtllm_nvfp4(sides, num_layers=3, layer=1, is_swizzled=False)
    engines_own = scale_pool.copy()
    scales = engines.trtllm.v_scales(
        scale_pool, layer_idx_in_pool=1, num_kv_heads=HEADS, tokens_per_block=TOKENS
    )
    engines.linear_scales(scales)
    np.testing.assert_array_equal(scale_pool, linear)
    engines.swizzled_scales(scales)
    np.testing.assert_array_equal(scale_pool, engines_own)


def test_fp8_scales_multiply_the_codes():
    cache = np.full((2, HEADS, TOKENS, 2 * DIM), 0x38, np.uint8)  # E4M3's 1
    layer = engines.vllm.layer(cache, "fp8", head_dim=DIM, k_scale=0.25, v_scale=3.0)
    table = engines.packed(np.array([[1]], np.int32), np.array([TOKENS], np.int32))
    k, v = layer.flatten(table, [(0, 0, TOKENS)])
    assert (k == 0.25).all() and (v == 3.0).all()


def test_trtllms_beams_are_rows_of_the_table():
    case = make("trtllm")
    offsets = np.repeat(case.table.indices.reshape(1, 1, 2, 3), 2, axis=1)
    table = engines.trtllm.table(np.ascontiguousarray(offsets), np.array([LENGTH], np.int32))
    q = np.repeat(random_rows(7, (1, Q_HEADS, DIM), np.float32), 2, axis=0)
    out = case.layer.attend(q, table, np.array([0, 1, 2], np.int32))
    np.testing.assert_array_equal(out[0], out[1])


def test_turbominds_pointers_name_blocks():
    data = np.zeros((4, 640), np.uint8)
    address = data.__array_interface__["data"][0]
    ids = engines.turbomind.block_ids([address + 640, address + 1920], data)
    assert ids.tolist() == [1, 3]
    with pytest.raises(kvx.Error, match=r"block_ptrs\[0\] is .* begins no block"):
        engines.turbomind.block_ids([address + 1], data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f16: engines.vllm.layer(f16, "float16", head_dim=9), "expected \\[n, n, n, 18\\]"),
        (lambda f16: engines.vllm.layer(f16, "nvfp4", head_dim=DIM), "elements of 2 bytes"),
        (lambda f16: engines.vllm.layer(f16.view(np.uint8), "nvfp4", head_dim=DIM),
         "expected \\[n, n, n, 18\\]"),
        (lambda f16: engines.vllm.layer(f16.view(np.uint8), "nvfp4", head_dim=24), "multiple of 16"),
        (lambda f16: engines.vllm.layer(np.zeros((2, 3, 8, 18), np.uint8), "nvfp4", head_dim=DIM),
         "3 heads; expected those of K, then as many"),
        (lambda f16: engines.vllm.layer(np.zeros((2, 4, 8, 18), np.uint8), "nvfp4", head_dim=DIM,
                                        k_scale=0.0), "k has a scale of 0.0"),
        (lambda f16: engines.linear_scales(np.zeros((6, 4), np.uint8)), "a multiple of 4"),
        (lambda f16: engines.trtllm.v_scales(np.zeros((2, 3, 2, 33), np.uint8), layer_idx_in_pool=0,
                                             num_kv_heads=2, tokens_per_block=8), "33 bytes a block"),
        (lambda f16: engines.trtllm.nvfp4_layer(
            np.zeros((2, 3, 2, 256), np.uint8), np.zeros((2, 2, 2, 32), np.uint8), **TRTLLM),
         "scale_pool has"),
        (lambda f16: engines.vllm.layer(f16, "int3", head_dim=DIM), "kv_cache_dtype is 'int3'"),
        (lambda f16: engines.vllm.layer(f16, "fp8", head_dim=DIM), "elements of 2 bytes"),
        (lambda f16: engines.vllm.layer([1], "fp8", head_dim=DIM), "kv_cache is a list"),
        (lambda f16: engines.lmdeploy.layer(f16, f16, 4), "quant_policy is 4: a token has a scale"),
        (lambda f16: engines.lmdeploy.layer(f16, f16, 42), "TurboQuant"),
        (lambda f16: engines.lmdeploy.layer(f16, f16, 5), "quant_policy is 5; expected 0, 16 or"),
        (lambda f16: engines.lmdeploy.layer(f16, f16.view(np.uint8)), "v_cache uint8"),
        (lambda f16: engines.tgi.layer((f16, f16), "xla", "f16"), "backend is 'xla'"),
        (lambda f16: engines.flashinfer.layer((f16, f16), "f16", kv_layout="X"), "order is 'X'"),
        (lambda f16: engines.sglang.layer(f16[0], f16[0], "f16", page_size=3), "page_size is 3"),
        (lambda f16: engines.llamacpp.layer(f16.view(np.uint8).reshape(-1),
                                            f16.view(np.uint8).reshape(-1), "q5_0", "f16",
                                            num_kv_heads=2, kv_size=16), "type_k is 'q5_0'"),
        (lambda f16: engines.llamacpp.layer(f16.view(np.uint8).reshape(-1),
                                            f16.view(np.uint8).reshape(-1), "q4_0", "f16",
                                            num_kv_heads=2, kv_size=16), "q4_0 has blocks of 18"),
    ],
)
def test_errors_name_the_engines_field(call, message):
    with pytest.raises(kvx.Error, match=message):
        call(np.zeros((2, 4, 8, 2 * DIM), np.float16))


def test_a_slot_beyond_the_cache_is_refused_and_nothing_is_written():
    case = make("vllm BHNC NHD")
    rows = random_rows(5, (2, HEADS, DIM))
    with pytest.raises(kvx.OutOfRangeError, match="slot"):
        case.layer.append(rows, rows, np.array([0, BLOCKS * TOKENS]))
    found = case.layer.flatten(case.table, [(0, 0, LENGTH)])
    np.testing.assert_array_equal(found[0][0].transpose(1, 0, 2), next(iter(case.rows())))


def test_read_only_arrays_are_refused():
    cache = np.zeros((2, HEADS, TOKENS, 2 * DIM), np.float16)
    cache.flags.writeable = False
    with pytest.raises(kvx.Error, match="read-only"):
        engines.vllm.layer(cache, "float16", head_dim=DIM)
