"""Tuned recipes: "tuned:FILE" as a cache's or a layer's recipe. The files are written here."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error
from tuned_file import all_tables, write_tuned

import kvx


def new_cache(recipe, **options):
    defaults = dict(num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=512, block_size=16)
    return kvx.Cache(recipe=recipe, **{**defaults, **options})


def stream(tokens, seed=0):
    return [random_rows(seed + i, tokens, heads, 64) for i, heads in enumerate((6, 2, 2))]


def feed(cache, rows, layers=None):
    """A new sequence of the rows in every layer; the last layer's outputs."""
    sequence = cache.create_sequence()
    with cache.step([(sequence, len(rows[0]))]):
        for layer in range(cache.num_layers):
            out = cache.append_and_attend(layer, *rows)
    return sequence, out


def test_every_table_changes_nothing_where_nothing_is_quantised(tmp_path):
    tables, ropes = all_tables()
    for recipe in ("f32", "f32:hadamard"):
        tuned = write_tuned(tmp_path / "m.kvxtune", recipe, tables, ropes=ropes)
        rows = stream(150)
        _, found = feed(new_cache(tuned), rows)
        assert relative_error(found, attention(*rows)) < 4e-6


def test_given_scales_of_the_file_are_the_steps(tmp_path):
    tables = {
        f"layers.{layer}.{side}.group_scales": [0.03125, 0.0625]
        for layer in range(2)
        for side in "kv"
    }
    tuned = write_tuned(tmp_path / "m.kvxtune", "int8:source=given", tables)
    assert kvx.parse_recipe(tuned).k.scale_source == "given"
    rows = stream(40)
    cache = new_cache(tuned)
    sequence, _ = feed(cache, rows)
    steps = np.array([0.03125, 0.0625], np.float32)[:, None]
    for stored, given in zip(cache.gather(sequence, 1), rows[1:]):
        expected = np.rint(np.clip(given / steps, -127, 127)) * steps
        np.testing.assert_array_equal(stored, expected)


def test_only_the_window_may_change(tmp_path):
    tuned = write_tuned(tmp_path / "m.kvxtune", "nvfp4:k.hadamard", {})
    assert kvx.parse_recipe(tuned).full_precision_format is None
    assert kvx.parse_recipe(f"{tuned},recent=128,sink=4").recent_tokens == 128
    with pytest.raises(kvx.Error, match="option is 'search'; expected sink=N, recent=N"):
        kvx.parse_recipe(f"{tuned},search")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_layers=3), "num_layers 2; the cache has 3"),
        (dict(num_kv_heads=4), "num_kv_heads 2; the cache has 4"),
        (dict(head_dim=128), "head_dim 64; the cache has 128"),
        (dict(num_layers=1, first_layer=2), "layer is 2; the tuned recipe has layers 0 to 1"),
    ],
)
def test_another_shape_is_refused(tmp_path, options, message):
    tables, ropes = all_tables()
    tuned = write_tuned(tmp_path / "m.kvxtune", "int8", tables, ropes=ropes)
    with pytest.raises(kvx.Error, match=message):
        new_cache(tuned, **options)


def test_a_damaged_file_is_one_error_that_names_it(tmp_path):
    path = tmp_path / "m.kvxtune"
    tables, ropes = all_tables()
    tuned = write_tuned(path, "int8", tables, ropes=ropes)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(kvx.Error, match=r"m.kvxtune': tensor 'layers.1.v.mean' ends at byte"):
        new_cache(tuned)
    write_tuned(path, "int8", {"layers.0.k.factor": np.zeros((2, 64))})
    with pytest.raises(kvx.Error, match=r"m.kvxtune': layer 0 k_factor\[0\] is 0"):
        new_cache(tuned)


def test_a_cache_of_one_layer_has_that_layers_tables(tmp_path):
    tables, ropes = all_tables()
    tuned = write_tuned(tmp_path / "m.kvxtune", "nvfp4:k.hadamard", tables, ropes=ropes)
    rows = stream(60)
    whole = new_cache(tuned)
    sequence, _ = feed(whole, rows)
    for layer in range(2):
        one = new_cache(tuned, num_layers=1, first_layer=layer)
        alone, _ = feed(one, rows)
        for a, b in zip(one.gather(alone, 0), whole.gather(sequence, layer)):
            np.testing.assert_array_equal(a, b)


def test_a_layer_in_pages_holds_what_a_cache_holds(tmp_path):
    tables, ropes = all_tables()
    tuned = write_tuned(
        tmp_path / "m.kvxtune",
        "nvfp4:k.hadamard",
        tables,
        ropes=ropes,
        layer_overrides=["1=int8:k.hadamard"],
    )
    rows = stream(60)
    cache = new_cache(tuned)
    sequence, _ = feed(cache, rows)
    q, k, v = rows
    for layer in range(2):
        pages_of = kvx.PagedLayer(
            tuned, num_kv_heads=2, head_dim=64, block_size=16, layer=layer, max_tokens=512
        )
        assert pages_of.needs_positions
        pages = np.zeros((5, pages_of.page_bytes), np.uint8)
        table = np.array([[3, 1, 4, 2]], np.int32)
        tokens = np.arange(60)
        slots = table[0, tokens // 16].astype(np.int64) * 16 + tokens % 16
        with pytest.raises(kvx.Error, match="positions is None; expected the tokens' positions"):
            pages_of.append(pages, k, v, slots)
        pages_of.append(pages, k, v, slots, positions=tokens)
        for a, b in zip(pages_of.gather(pages, table[0], 60, like=k), cache.gather(sequence, layer)):
            np.testing.assert_array_equal(a, b)
        lengths, starts = np.array([60], np.int32), np.array([0, 60], np.int32)
        out = pages_of.attend(pages, q, table, lengths, starts)
        assert relative_error(out, attention(*rows)) < 0.2


def test_dual_scale_pages_beside_a_window_hold_what_a_cache_holds(tmp_path):
    """Means, factors, block offsets and error feedback with weights of its errors."""
    tables, ropes = all_tables()
    for name, table in tables.items():
        if name.endswith("feedback"):
            table += 0.7 * np.eye(64)
    recipe = "int3_dual/int2_dual:k.hadamard,sink=16,recent=64"
    tuned = write_tuned(tmp_path / "m.kvxtune", recipe, tables, ropes=ropes)
    tokens = 350
    rows = stream(tokens)
    cache = new_cache(tuned, block_size=64)
    sequence, _ = feed(cache, rows)
    table = np.array([[3, 1, 4, 2, 9, 6]], np.int32)
    for layer in range(2):
        pages_of = kvx.PagedLayer(
            f"{tuned},immediate",
            num_kv_heads=2,
            head_dim=64,
            block_size=64,
            layer=layer,
            max_tokens=512,
        )
        window = kvx.PagedWindow(10, 64, max_sequences=1, unit="block")
        pages = np.zeros((10, pages_of.page_bytes), np.uint8)
        copies = np.zeros((window.num_blocks, pages_of.window_block_bytes), np.uint8)
        done = 0
        for count in (130, 150, *[1] * 70):
            q, k, v = (x[done : done + count] for x in rows)
            positions = np.arange(done, done + count)
            done += count
            lengths, starts = np.array([done], np.int32), np.array([0, count], np.int32)
            plan = window.plan(table, lengths, starts, count)
            beside = {"window_pages": copies, "plan": plan}
            pages_of.append(pages, k, v, plan.slots, positions=positions, **beside)
            out = pages_of.attend(pages, q, plan.block_table, lengths, starts, **beside)
        assert relative_error(out, attention(*rows)[-1:]) < 0.4
        quantised = slice(64, int(plan.first_recent_blocks[0]) * 64)
        assert quantised.stop == 256
        for a, b in zip(pages_of.gather(pages, table[0], 256), cache.gather(sequence, layer)):
            np.testing.assert_array_equal(a[quantised], b[quantised])


def test_a_layer_in_pages_must_say_which_it_is(tmp_path):
    tables, ropes = all_tables()
    tuned = write_tuned(tmp_path / "m.kvxtune", "int8", tables, ropes=ropes)
    shape = dict(num_kv_heads=2, head_dim=64)
    with pytest.raises(kvx.Error, match="expected layer=N with it"):
        kvx.PagedLayer(tuned, **shape)
    with pytest.raises(kvx.Error, match="max_tokens is 0"):
        kvx.PagedLayer(tuned, layer=0, **shape)
    with pytest.raises(kvx.Error, match="the tuned recipe .* has its own"):
        kvx.PagedLayer(tuned, layer=0, max_tokens=64, k_tensor_scales=[1.0, 1.0], **shape)
    with pytest.raises(kvx.Error, match="no full-precision window"):
        kvx.PagedLayer(f"{tuned},recent=16", layer=0, max_tokens=64, **shape)


def test_files_of_another_tuned_recipe_are_refused(tmp_path):
    tables, ropes = all_tables()
    tuned = write_tuned(tmp_path / "a.kvxtune", "int8", tables, ropes=ropes)
    other = write_tuned(tmp_path / "b.kvxtune", "int8", all_tables(seed=1)[0], ropes=ropes)
    cache = new_cache(tuned, prefix_model="m")
    sequence, _ = feed(cache, stream(40))
    cache.record_tokens(sequence, range(40))
    cache.save_sequence(sequence, tmp_path / "c.kvx")
    # The same tables under another name, for longer sequences.
    again = write_tuned(tmp_path / "c.kvxtune", "int8", tables, ropes=ropes)
    new_cache(again, prefix_model="m", max_tokens=1000).load_sequence(tmp_path / "c.kvx")
    for recipe in (other, "int8"):
        with pytest.raises(kvx.Error, match="calibration is"):
            new_cache(recipe, prefix_model="m").load_sequence(tmp_path / "c.kvx")
