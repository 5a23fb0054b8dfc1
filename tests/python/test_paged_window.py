"""A full-precision window beside an engine's pages, next to plain attention in float64."""

import numpy as np
import pytest
from reference import attention, random_rows, relative_error

import kvx

BLOCK = 16


class Engine:
    """One layer, its pages in a shuffled order and its window. Sequences are lists of pages."""

    def __init__(self, recipe="nvfp4:auto,immediate", unit="row", recent=32, sink=16, **options):
        self.layer = kvx.PagedLayer(
            recipe, num_kv_heads=2, head_dim=64, block_size=BLOCK, **options
        )
        self.pages = np.zeros((60, self.layer.page_bytes), np.uint8)
        self.window = kvx.PagedWindow(
            60, BLOCK, sink=sink, recent=recent, max_sequences=3, unit=unit
        )
        shape = (self.window.num_blocks, self.layer.window_block_bytes)
        self.window_pages = np.zeros(shape, np.uint8)
        self.free = list(np.random.default_rng(0).permutation(60))

    def new_table(self, tokens):
        return [self.free.pop() for _ in range(-(-tokens // BLOCK))]

    def step(self, parts, use_window=True):
        """parts: (table, tokens before, q, k, v); returns attention's rows of each part."""
        width = max(len(part[0]) for part in parts)
        table = np.zeros((len(parts), width), np.int32)
        for row, part in zip(table, parts):
            row[: len(part[0])] = part[0]
        counts = [len(part[2]) for part in parts]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lengths = np.array([part[1] + n for part, n in zip(parts, counts)], np.int32)
        q, k, v = (np.concatenate([part[i] for part in parts]) for i in (2, 3, 4))
        self.plan = self.window.plan(table, lengths, starts, len(q))
        slots = self.plan.slots
        with_window = {"window_pages": self.window_pages, "plan": self.plan} if use_window else {}
        self.layer.append(self.pages, k, v, slots, **with_window)
        table = self.plan.block_table if use_window else table
        out = self.layer.attend(self.pages, q, table, lengths, starts, **with_window)
        return np.split(out, starts[1:-1])


def stream(tokens, seed=0):
    """q, k and v whose last tokens matter most, as in a text."""
    q, k, v = (random_rows(seed + i, tokens, heads, 64) for i, heads in enumerate((4, 2, 2)))
    return q, k, v


@pytest.mark.parametrize("unit", ["row", "block"])
def test_tokens_in_the_window_are_attended_in_16_bits(unit):
    q, k, v = stream(40)
    engine = Engine(unit=unit)  # 16 sinks and 32 recent tokens: all 40 are in the window
    table = engine.new_table(40)
    found = [engine.step([(table, 0, q[:37], k[:37], v[:37])])[0]]
    for t in range(37, 40):
        found += engine.step([(table, t, q[t : t + 1], k[t : t + 1], v[t : t + 1])])
    assert relative_error(np.concatenate(found), attention(q, k, v)) < 6e-3  # of bf16


@pytest.mark.parametrize("recipe", ["int4", "nvfp4:auto,immediate", "int8/int4"])
@pytest.mark.parametrize("unit", ["row", "block"])
def test_a_window_brings_attention_closer(recipe, unit):
    texts = [stream(200, 10), stream(150, 20)]
    errors = []
    for use_window in (False, True):
        engine = Engine(recipe, unit=unit if use_window else "row")
        tables = [engine.new_table(len(text[0])) for text in texts]
        before = [0, 0]
        out = [[], []]
        for count in [100, *[1] * 50]:
            parts = [
                (table, n, *(x[n : n + count] for x in text))
                for table, n, text in zip(tables, before, texts)
            ]
            for rows, more in zip(out, engine.step(parts, use_window)):
                rows.append(more)
            before = [n + count for n in before]
        expected = [attention(*(x[:150] for x in text)) for text in texts]
        decoded = [np.concatenate(rows)[100:] for rows in out]
        errors.append(relative_error(np.stack(decoded), np.stack(expected)[:, 100:]))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("unit", ["row", "block"])
def test_rejected_drafts_inside_the_window_leave_nothing_behind(unit):
    q, k, v = stream(90)
    straight, cut = Engine(unit=unit), Engine(unit=unit)
    table = straight.new_table(90)
    for engine in (straight, cut):
        engine.step([(table, 0, q[:70], k[:70], v[:70])])
    cut.step([(table, 70, q[80:88], k[80:88], v[80:88])])  # eight drafts, all rejected
    for t in range(70, 85):
        rows = [(table, t, *(x[t : t + 1] for x in (q, k, v)))]
        np.testing.assert_array_equal(cut.step(rows)[0], straight.step(rows)[0])


def test_sequences_share_the_copies_of_their_shared_pages():
    q, k, v = stream(64)
    engine = Engine()
    table = engine.new_table(64)
    engine.step([(table, 0, q[:32], k[:32], v[:32])])
    sinks = engine.plan.block_table[0, 0]
    other = [*table[:2], *engine.new_table(32)]
    parts = [(t, 32, *(x[32:33] for x in (q, k, v))) for t in (table, other)]
    first, second = engine.step(parts)
    np.testing.assert_array_equal(first, second)
    assert engine.plan.block_table[:, 0].tolist() == [sinks, sinks]
    assert engine.plan.num_sink_blocks.tolist() == [1, 1]


def test_forgotten_pages_are_read_from_the_pages():
    q, k, v = stream(34)
    engine = Engine()
    table = engine.new_table(34)
    engine.step([(table, 0, q[:33], k[:33], v[:33])])
    engine.window.forget([int(page) for page in table])
    engine.step([(table, 33, q[33:], k[33:], v[33:])])
    assert engine.plan.num_sink_blocks.tolist() == [0]
    assert engine.plan.first_recent_blocks.tolist() == [3]


def test_rotations_are_the_windows_too():
    q, k, v = stream(30)
    engine = Engine("int8:hadamard")
    table = engine.new_table(30)
    (out,) = engine.step([(table, 0, q, k, v)])
    assert relative_error(out, attention(q, k, v)) < 6e-3


def test_what_does_not_fit_is_refused_and_named():
    with pytest.raises(kvx.Error, match="unit is 'page'"):
        kvx.PagedWindow(8, 16, max_sequences=1, unit="page")
    with pytest.raises(kvx.Error, match="max_sequences is 0"):
        kvx.PagedWindow(8, 16, max_sequences=0)
    with pytest.raises(kvx.Error, match="recent is -1"):
        kvx.PagedWindow(8, 16, recent=-1, max_sequences=4)
    q, k, v = stream(20)
    engine = Engine()
    table = engine.new_table(20)
    engine.step([(table, 0, q[:18], k[:18], v[:18])])
    plan, window = engine.plan, engine.window
    ids = np.array([table], np.int32)
    lengths, starts = np.array([19], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(kvx.Error, match="q_starts"):
        window.plan(ids, lengths, starts, 0)
    with pytest.raises(kvx.OutOfRangeError, match="is 60"):
        window.plan(np.full((1, 2), 60, np.int32), lengths, starts, 1)
    with pytest.raises(kvx.Error, match=r"plan.slots is .*expected 20 numbers"):
        small = kvx.WindowPlan(*(np.zeros(n, t) for n, t in ((2, "i4"), (1, "i4"), (1, "i4"))),
                               np.zeros(3, "i8"), np.zeros(20, "i8"))
        window.plan(ids, lengths, starts, 20, out=small)
    with pytest.raises(kvx.OutOfRangeError, match=r"blocks\[1\] is 60"):
        window.forget([3, 60])
    one = [x[18:19] for x in (k, v)]
    layer, pages = engine.layer, engine.pages
    with pytest.raises(kvx.Error, match="window_pages is None"):
        layer.append(pages, *one, plan.slots[:1], plan=plan)
    with pytest.raises(kvx.Error, match="plan is None"):
        layer.append(pages, *one, plan.slots[:1], window_pages=engine.window_pages)
    with pytest.raises(kvx.Error, match="window_pages is .*expected uint8"):
        layer.append(pages, *one, plan.slots[:1], window_pages=pages, plan=plan)
    with pytest.raises(kvx.Error, match=r"not plan\.block_table"):
        layer.attend(pages, q[:1], ids, lengths, starts, window_pages=pages, plan=plan)
    with pytest.raises(kvx.Error, match="planned with a window"):
        layer.attend(pages, q[:1], plan.block_table, lengths, starts, plan=plan)
