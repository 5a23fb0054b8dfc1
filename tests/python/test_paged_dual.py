"""Dual-scale formats in an engine's pages, beside a window: whole blocks, the bytes of kvx.Cache."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error

import kvx

BLOCK = 64
PAGES = 48
RECIPES = ["int4_dual/int3_dual:hadamard", "int3_dual:hadamard", "int2_dual:hadamard"]


class Engine:
    """One layer, its pages and its window. A sequence is its table, rows and number of tokens."""

    closes_after_attention = False

    def __init__(self, recipe="int3_dual", block=BLOCK, recent=64, max_sequences=3, sink=16):
        shape = {"num_kv_heads": 2, "head_dim": 64, "block_size": block}
        self.layer = kvx.PagedLayer(recipe, **shape)
        self.rows_16 = kvx.PagedLayer("bf16", **shape)  # reads the window's blocks
        self.pages = np.zeros((PAGES, self.layer.page_bytes), np.uint8)
        self.window = kvx.PagedWindow(
            PAGES, block, sink=sink, recent=recent, max_sequences=max_sequences, unit="block"
        )
        window_shape = (self.window.num_blocks, self.layer.window_block_bytes)
        self.window_pages = np.zeros(window_shape, np.uint8)
        self.block = block

    def step(self, parts):
        """parts: (table, tokens before, (q, k, v) of the new ones); returns attention's rows."""
        width = max(len(table) for table, _, _ in parts)
        table = np.zeros((len(parts), width), np.int32)
        for row, (ids, _, _) in zip(table, parts):
            row[: len(ids)] = ids
        counts = [len(rows[0]) for _, _, rows in parts]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lengths = np.array([part[1] + n for part, n in zip(parts, counts)], np.int32)
        q, k, v = (np.concatenate([part[2][i] for part in parts]) for i in range(3))
        self.plan = plan = self.window.plan(table, lengths, starts, len(q))
        window = {"window_pages": self.window_pages, "plan": plan}
        is_left = self.closes_after_attention and max(counts) == 1
        self.layer.append(self.pages, k, v, plan.slots, closes=not is_left, **window)
        out = self.layer.attend(self.pages, q, plan.block_table, lengths, starts, **window)
        if is_left:
            self.layer.close_blocks(self.pages, **window)
        return np.split(out, starts[1:-1])

    def stored_keys(self, sequence, num_tokens):
        """What attention reads of a sequence of the step: [tokens, 2, 64], and whether in 16 bits."""
        keys, is_16_bits = [], []
        for b in range(-(-num_tokens // self.block)):
            first_recent = self.plan.first_recent_blocks[sequence]
            in_window = b < self.plan.num_sink_blocks[sequence] or b >= first_recent
            layer, pages = (
                (self.rows_16, self.window_pages) if in_window else (self.layer, self.pages)
            )
            tokens = min(self.block, num_tokens - b * self.block)
            keys.append(layer.gather(pages, [self.plan.block_table[sequence, b]], tokens)[0])
            is_16_bits += [in_window] * tokens
        return np.concatenate(keys), np.array(is_16_bits)


def text(tokens, seed=0):
    """q, k and v whose numbers 16 bits store exactly."""
    rows = (random_rows(seed + i, tokens, heads, 64) for i, heads in enumerate((4, 2, 2)))
    return tuple((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in rows)


def cut(rows, first, count):
    return tuple(x[first : first + count] for x in rows)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", [64, 128])
def test_pages_have_the_bytes_of_a_cache_that_owns_its_memory(recipe, block):
    """Prompts in one call and in chunks that end anywhere, then decodes."""
    rows = text(420)
    owned = kvx.Cache(
        num_layers=1,
        num_kv_heads=2,
        head_dim=64,
        recipe=f"{recipe},sink=16,recent=64",
        block_size=block,
        max_tokens=1024,
    )
    sequence = owned.create_sequence()
    with owned.step([(sequence, 420)]):
        owned.append_and_attend(0, *rows)
    expected_keys, expected_values = owned.gather(sequence, 0)
    for steps in ([420], [150, 200, *[1] * 70], [64, 128, 228], [1] * 420):
        engine = Engine(recipe, block)
        table = [9, 3, 7, 1, 30, 21, 8][: -(-420 // block)]
        done, out = 0, []
        for count in steps:
            out += engine.step([(table, done, cut(rows, done, count))])
            done += count
        closed = engine.plan.first_recent_blocks[0]
        assert closed == owned_window_begins(block)
        keys, values = engine.layer.gather(engine.pages, table, int(closed) * block)
        sinks = block  # in a window, too: read from there
        stop = int(closed) * block
        np.testing.assert_array_equal(keys[sinks:], expected_keys[sinks:stop])
        np.testing.assert_array_equal(values[sinks:], expected_values[sinks:stop])
        assert np.isfinite(np.concatenate(out)).all()


def owned_window_begins(block):
    """The first block of 420 tokens whose tokens the last query has in 16 bits."""
    return 5 if block == 64 else 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_is_that_of_the_rows_that_are_stored(recipe):
    """Sequences of mixed lengths; K and V are one array, so that the stored rows are known."""
    plain = recipe.replace(":hadamard", "").replace("int4_dual/", "")
    engine = Engine(plain)
    lengths = [70, 300, 129]
    tables = [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]
    texts = [text(n, 10 * i) for i, n in enumerate(lengths)]
    texts = [(q, k, k) for q, k, _ in texts]
    before = [n - 1 for n in lengths]
    engine.step([(t, 0, cut(x, 0, n)) for t, x, n in zip(tables, texts, before)])
    found = engine.step([(t, n, cut(x, n, 1)) for t, x, n in zip(tables, texts, before)])
    for s, (x, n) in enumerate(zip(texts, lengths)):
        stored, _ = engine.stored_keys(s, n)
        expected = attention(x[0][-1:], stored, stored)
        assert relative_error(found[s], expected) < 2e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_decodes_do_not_read_the_pages_of_blocks_that_they_fill(recipe):
    """So these may be quantised behind attention, or beside it."""
    rows, tables = [text(270), text(300, 10)], [[9, 3, 7, 1, 30], [2, 8, 11, 4, 5]]
    engines = [Engine(recipe), Engine(recipe)]
    engines[1].closes_after_attention = True
    done = 0
    for count in [100, *[1] * 160]:
        parts = [(t, done, cut(x, done, count)) for t, x in zip(tables, rows)]
        found, other = (engine.step(parts) for engine in engines)
        np.testing.assert_array_equal(found, other)
        np.testing.assert_array_equal(engines[0].pages, engines[1].pages)
        done += count


def test_only_a_window_of_blocks_closes_blocks():
    engine = Engine("int8")
    table, one, starts = (np.array(x, np.int32) for x in ([[0]], [1], [0, 1]))
    plan = kvx.PagedWindow(PAGES, BLOCK, max_sequences=1).plan(table, one, starts, 1)
    with pytest.raises(kvx.Error, match="the plan closes no blocks; expected one of a window"):
        engine.layer.close_blocks(engine.pages, engine.window_pages, plan)
    full = engine.window.plan(table, 64 * one, 64 * starts, 64)
    full.closing_to[:] = PAGES
    with pytest.raises(kvx.OutOfRangeError, match=f"plan.closing_to has block {PAGES}"):
        engine.layer.close_blocks(engine.pages, engine.window_pages, full)


def test_rows_in_the_window_are_exact_and_older_ones_close():
    engine = Engine()
    rows = text(300)
    engine.step([([4, 5, 6, 7, 8], 0, rows)])
    stored, is_16_bits = engine.stored_keys(0, 300)
    assert is_16_bits.tolist() == [t < 64 or t >= 192 for t in range(300)]
    np.testing.assert_array_equal(stored[is_16_bits], rows[1][is_16_bits])
    assert 0.01 < relative_error(stored[~is_16_bits], rows[1][~is_16_bits]) < 0.22


def test_rejected_drafts_leave_nothing_behind():
    """Drafts that fill a block, which is quantised with them, and are replaced."""
    rows = text(400)
    straight, drafted = Engine(), Engine()
    table = [4, 5, 6, 7, 8, 9, 10]
    for engine in (straight, drafted):
        engine.step([(table, 0, cut(rows, 0, 250))])
    drafted.step([(table, 250, cut(rows, 300, 20))])  # all rejected
    drafted.step([(table, 250, cut(rows, 250, 3))])
    drafted.step([(table, 253, cut(rows, 310, 60))])
    straight.step([(table, 250, cut(rows, 250, 3))])
    for t in range(253, 400):
        a, b = (e.step([(table, t, cut(rows, t, 1))])[0] for e in (straight, drafted))
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(straight.pages[table[:5]], drafted.pages[table[:5]])


def test_a_prefix_of_pages_is_whole_when_another_sequence_begins_with_it():
    """Also one that is computed in the same step, and one whose sequence has ended."""
    rows = text(200)
    other = tuple(np.concatenate([x[:128], y[128:]]) for x, y in zip(rows, text(200, 50)))
    engine = Engine(max_sequences=4)
    engine.step([([0, 1, 2, 3], 0, rows), ([0, 1, 4, 5], 128, cut(other, 128, 72))])
    for sequence, of in enumerate((rows, other)):
        stored, _ = engine.stored_keys(sequence, 200)
        assert relative_error(stored, of[1]) < 0.2
    engine.step([([0, 1, 6, 7], 128, cut(other, 128, 72))])
    again, _ = engine.stored_keys(0, 200)
    assert relative_error(again, other[1]) < 0.2


class Traffic:
    """Requests that begin, grow, skip steps, cut back and end without a word, on few pages."""

    def __init__(self, engine, seed):
        self.engine, self.random = engine, np.random.default_rng(seed)
        self.free = list(range(PAGES))
        self.live, self.seed = [], 100

    def new(self):
        self.seed += 10
        tokens = int(self.random.integers(1, 330))
        rows = text(tokens, self.seed)
        table = [self.free.pop(0) for _ in range(-(-tokens // BLOCK))]
        return {"table": table, "rows": rows, "done": 0, "tokens": tokens}

    def run(self, steps):
        num_reopened = 0
        for _ in range(steps):
            while len(self.live) < 5 and len(self.free) > 8:
                self.live.append(self.new())
            chosen = self.random.permutation(len(self.live))[: self.random.integers(1, 4)]
            picked = [self.live[i] for i in chosen]
            for request in picked:
                if self.random.random() < 0.1:  # drafts were rejected
                    request["done"] = max(request["done"] - int(self.random.integers(1, 30)), 0)
            counts = [self.count(request) for request in picked]
            parts = [
                (r["table"], r["done"], cut(r["rows"], r["done"], n))
                for r, n in zip(picked, counts)
            ]
            self.engine.step(parts)
            num_reopened += int((self.engine.plan.reopened_tokens > 0).sum())
            for s, (request, count) in enumerate(zip(picked, counts)):
                request["done"] += count
                self.check(s, request)
            for request in [r for r in picked if r["done"] == r["tokens"]]:
                self.free += request["table"]
                self.live = [r for r in self.live if r is not request]
        return num_reopened

    def count(self, request):
        left = request["tokens"] - request["done"]
        return min(left, int(self.random.choice([1, 1, 3, 64, 100, 300])))

    def check(self, sequence, request):
        """A row of another token is as far away as a row is long."""
        done = request["done"]
        stored, _ = self.engine.stored_keys(sequence, done)
        true = request["rows"][1][:done]
        distances = np.linalg.norm(stored - true, axis=-1) / np.linalg.norm(true, axis=-1)
        assert distances.max() < 0.45


def test_no_traffic_makes_a_sequence_read_anothers_rows():
    traffic = Traffic(Engine(max_sequences=3), seed=1)
    assert traffic.run(600) > 0  # more requests are open than the window has room for


def test_append_takes_whole_blocks_without_a_window():
    _, k, v = text(192)
    layer = Engine().layer
    pages = np.zeros((4, layer.page_bytes), np.uint8)
    slots = np.arange(192) + 64
    layer.append(pages, k, v, slots)
    keys, _ = layer.gather(pages, [1, 2, 3], 192)
    assert relative_error(keys, k) < 0.2
    before = pages.copy()
    message = r"slot_mapping\[64\] begins 63 tokens of block 2; int3_dual quantises whole blocks"
    with pytest.raises(kvx.Error, match=message):
        layer.append(pages, k[:127], v[:127], slots[:127])
    np.testing.assert_array_equal(pages, before)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(kvx.Error, match=r"block_size is 16; int3_dual .* 64 or 128"):
        kvx.PagedLayer("int3_dual", num_kv_heads=2, head_dim=64, block_size=16)
    with pytest.raises(kvx.UnsupportedError, match="int2_dual"):
        kvx.PagedLayer(
            "int2_dual", num_kv_heads=1, head_dim=128, v_head_dim=64, latent=True, block_size=64
        )
    engine = Engine(max_sequences=1)
    rows = text(10)
    with pytest.raises(kvx.Error, match="num_window_blocks is 4; 2 sequences .* need 8"):
        engine.step([([0], 0, rows), ([1], 0, rows)])
