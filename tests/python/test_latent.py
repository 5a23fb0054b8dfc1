"""Latent caches (MLA): values are a part of the keys' rows."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error

import kvx

ROW, VALUE, HEADS = 192, 128, 4


def new_cache(recipe, **options):
    shape = dict(num_layers=1, num_kv_heads=1, head_dim=ROW, v_head_dim=VALUE, latent=True)
    return kvx.Cache(recipe=recipe, max_tokens=256, **{**shape, **options})


def rows_of(tokens, seed=3):
    return random_rows(seed, tokens, HEADS, ROW), random_rows(seed + 1, tokens, 1, ROW)


def feed(cache, sequence, q, k, step_tokens=17):
    outputs = []
    for first in range(0, len(q), step_tokens):
        part = slice(first, first + step_tokens)
        with cache.step([(sequence, len(q[part]))]):
            outputs.append(cache.append_and_attend(0, q[part], k[part], None))
    return np.concatenate(outputs)


@pytest.mark.parametrize(
    "recipe, tolerance",
    [
        ("f32", 2e-6),
        ("bf16", 6e-3),
        ("int8", 2e-2),
        ("int8+bf16", 2e-2),
        ("nvfp4:auto", 0.2),
        ("nvfp4+bf16:auto", 0.2),
    ],
)
def test_attention_reads_the_rows_first_numbers_as_values(recipe, tolerance):
    cache = new_cache(recipe)
    assert cache.is_latent
    q, k = rows_of(150)
    sequence = cache.create_sequence()
    found = feed(cache, sequence, q, k)
    assert found.shape == (150, HEADS, VALUE)
    assert relative_error(found, attention(q, k, k[:, :, :VALUE])) < tolerance
    keys, values = cache.gather(sequence, 0)
    assert np.array_equal(keys[:, :, :VALUE], values)


def test_a_row_is_stored_once():
    assert new_cache("bf16").cost(128).bytes_per_token == ROW * 2
    apart = new_cache("bf16", latent=False)
    assert not apart.is_latent
    assert apart.cost(128).bytes_per_token == (ROW + VALUE) * 2


def test_forks_and_files_keep_the_rows(tmp_path):
    cache = new_cache("int8", prefix_model="m", max_sequences=2)
    q, k = rows_of(64)
    sequence = cache.create_sequence()
    feed(cache, sequence, q, k)
    cache.record_tokens(sequence, range(64))
    fork = cache.fork_sequence(sequence)
    cache.save_sequence(sequence, tmp_path / "latent.kvx")
    other = new_cache("int8", prefix_model="m")
    loaded = other.load_sequence(tmp_path / "latent.kvx")
    more = rows_of(5, seed=9)
    expected = feed(cache, sequence, *more)
    assert np.array_equal(feed(cache, fork, *more), expected)
    assert np.array_equal(feed(other, loaded, *more), expected)


def test_refusals_say_what_to_pass():
    cache = new_cache("int8")
    q, k = rows_of(1)
    with cache.step([(cache.create_sequence(), 1)]):
        with pytest.raises(kvx.Error, match="latent cache's values are a part of its keys: pass"):
            cache.append_and_attend(0, q, k, k[:, :, :VALUE])
        cache.append_and_attend(0, q, k, None)
    with pytest.raises(kvx.Error, match="one row for both"):
        new_cache("int8/int4")
    with pytest.raises(kvx.Error, match="only a latent cache's rows"):
        new_cache("int4+bf16", latent=False)
    with pytest.raises(kvx.Error, match="v_head_dim is 200; expected 1 to 192"):
        new_cache("int8", v_head_dim=200)


def new_layer(recipe, **options):
    shape = dict(num_kv_heads=1, head_dim=ROW, v_head_dim=VALUE, latent=True, block_size=16)
    return kvx.PagedLayer(recipe, **{**shape, **options})


# Of three sequences, pages as an engine hands them out; the last one shares the first one's page.
TABLE = np.array([[4, 9, 2], [7, 1, 0], [4, 5, 0]], np.int32)
LENGTHS = np.array([40, 20, 17], np.int32)


def slots_of(sequence, tokens):
    return [TABLE[sequence, at // 16] * 16 + at % 16 for at in tokens]


@pytest.mark.parametrize(
    "recipe, tolerance",
    [
        ("f32", 2e-6),
        ("bf16", 6e-3),
        ("int8+bf16", 2e-2),
        ("nvfp4", 0.2),
        ("nvfp4+bf16", 0.2),
        ("int4+bf16:hadamard", 0.2),
    ],
)
def test_an_engines_pages_hold_latent_rows(recipe, tolerance):
    layer = new_layer(recipe)
    assert layer.is_latent and not new_layer("f32", latent=False).is_latent
    pages = np.zeros((10, layer.page_bytes + 32), np.uint8)[:, : layer.page_bytes]
    _, k = rows_of(40)
    other = rows_of(20, seed=8)[1]
    branch = np.concatenate([k[:16], rows_of(1, seed=12)[1]])
    written = np.concatenate([k, other, branch[16:]])
    slots = slots_of(0, range(40)) + slots_of(1, range(20)) + slots_of(2, [16])
    order = np.random.default_rng(1).permutation(len(slots))
    layer.append(pages, written[order], None, np.array(slots, np.int64)[order])

    q = rows_of(40 + 3 + 1, seed=20)[0]
    starts = np.array([0, 40, 43, 44], np.int32)
    found = np.split(layer.attend(pages, q, TABLE, LENGTHS, starts, window=30), starts[1:-1])
    for rows, queries, keys in zip(found, np.split(q, starts[1:-1]), (k, other, branch)):
        expected = attention(queries, keys, keys[:, :, :VALUE], window=30)
        assert rows.shape == expected.shape
        assert relative_error(rows, expected) < tolerance

    keys, values = layer.gather(pages, [4, 9, 2], 40)
    assert np.array_equal(keys[:, :, :VALUE], values)
    assert relative_error(keys, k) < max(tolerance, 1e-6)
    copies = np.zeros_like(pages)
    layer.copy_blocks(pages, np.array([4, 9, 2]), np.array([0, 1, 2]), to_pages=copies)
    assert all(map(np.array_equal, layer.gather(copies, [0, 1, 2], 40), (keys, values)))


def test_two_latent_heads_in_two_formats_with_scales():
    layer = new_layer("nvfp4+int8", num_kv_heads=2)
    pages = np.zeros((10, layer.page_bytes), np.uint8)
    k = random_rows(3, 40, 2, ROW)
    layer.append(pages, k, None, np.array(slots_of(0, range(40)), np.int64))
    keys, _ = layer.gather(pages, [4, 9, 2], 40)
    for head in range(2):
        one = new_layer("nvfp4+int8")
        alone = np.zeros((10, one.page_bytes), np.uint8)
        one.append(alone, k[:, head : head + 1], None, np.array(slots_of(0, range(40)), np.int64))
        assert np.array_equal(keys[:, head], one.gather(alone, [4, 9, 2], 40)[0][:, 0])


def test_a_latent_rows_page_holds_each_segment_once():
    token = VALUE // 2 + VALUE // 16 + (ROW - VALUE) * 2  # codes, scales and bf16
    assert new_layer("nvfp4+bf16").page_bytes == 16 * token
    assert new_layer("bf16").page_bytes == 16 * ROW * 2


def test_a_window_keeps_latent_rows_in_16_bits():
    layer = new_layer("int4+bf16")
    window = kvx.PagedWindow(8, 16, sink=16, recent=32, max_sequences=1)
    pages = np.zeros((8, layer.page_bytes), np.uint8)
    blocks = np.zeros((window.num_blocks, layer.window_block_bytes), np.uint8)
    q, k = rows_of(44)
    k = np.round(k * 8) / 8  # which bf16 holds exactly
    table, found = np.array([[3, 6, 1]], np.int32), []
    for first in range(0, 44, 11):
        part = slice(first, first + 11)
        lengths = np.array([first + 11], np.int32)
        starts = np.array([0, 11], np.int32)
        plan = window.plan(table, lengths, starts, 11)
        arguments = dict(window_pages=blocks, plan=plan)
        layer.append(pages, k[part], None, plan.slots, **arguments)
        found.append(
            layer.attend(pages, q[part], plan.block_table, lengths, starts, **arguments)
        )
    assert relative_error(np.concatenate(found), attention(q, k, k[:, :, :VALUE])) < 2e-6


def test_layers_say_what_latent_rows_want():
    layer = new_layer("int8")
    heads = new_layer("int8", latent=False)
    pages = np.zeros((1, heads.page_bytes), np.uint8)
    _, k = rows_of(1)
    with pytest.raises(kvx.Error, match="latent cache's values are a part of its keys: pass None"):
        layer.append(pages, k, k[:, :, :VALUE], np.array([0]))
    with pytest.raises(kvx.Error, match="v is None"):
        heads.append(pages, k, None, np.array([0]))
    with pytest.raises(kvx.Error, match="only a latent cache's rows"):
        new_layer("int4+bf16", latent=False)
    with pytest.raises(kvx.Error, match="one row for both"):
        new_layer("int8/int4")
    with pytest.raises(kvx.Error, match="v_head_dim is 200; expected 1 to 192"):
        new_layer("int8", v_head_dim=200)
    with pytest.raises(kvx.UnsupportedError, match="int4_dual"):
        new_layer("int8+int4_dual")
