"""Attention over an engine's own pages, beside plain attention in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import attention, random_rows, relative_error

import kvx

TOLERANCE = {"f32": 2e-6, "bf16": 6e-3, "int8": 2e-2, "int8/int4": 0.2, "nvfp4:auto,immediate": 0.2}


class Engine:
    """Pages in a shuffled order, as an engine allocates them; page 0 is unused."""

    def __init__(self, recipe, num_pages=40, block_size=16, padding=0, **options):
        self.layer = kvx.PagedLayer(
            recipe, num_kv_heads=2, head_dim=64, block_size=block_size, **options
        )
        self.block_size = block_size
        whole = np.zeros((num_pages, self.layer.page_bytes + padding), np.uint8)
        self.pages = whole[:, : self.layer.page_bytes]
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, num_pages)))
        self.tables, self.lengths = [], []

    def add(self, tokens, table=()):
        needed = -(-tokens // self.block_size) - len(table)
        self.tables.append([*table, *(self.free.pop() for _ in range(needed))])
        self.lengths.append(0)
        return len(self.tables) - 1

    def step(self, parts, padding=0, **options):
        """parts: (sequence, q, k, v); returns attention's rows. Padding as CUDA graphs make it."""
        slots, starts = [], [0]
        for sequence, q, _, _ in parts:
            first = self.lengths[sequence]
            table = self.tables[sequence]
            for at in range(first, first + len(q)):
                slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
            self.lengths[sequence] += len(q)
            starts.append(starts[-1] + len(q))
        q, k, v = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
        q, k, v = (
            np.concatenate([x, np.full_like(x[:1], 7).repeat(padding, 0)]) for x in (q, k, v)
        )
        slots = np.array(slots + padding * [-1], np.int64)
        self.layer.append(self.pages, k, v, slots)
        rows = len(parts) + padding
        table = np.zeros((rows, max(map(len, self.tables)) + 3), np.int32)
        for row, part in enumerate(parts):
            table[row, : len(self.tables[part[0]])] = self.tables[part[0]]
        lengths = np.array([self.lengths[p[0]] for p in parts] + padding * [0], np.int32)
        starts = np.array(starts + padding * starts[-1:], np.int32)
        out = self.layer.attend(self.pages, q, table, lengths, starts, **options)
        return np.split(out, starts[1 : len(parts)])


def stream(tokens, seed=0):
    return [random_rows(seed + i, tokens, heads, 64) for i, heads in enumerate((6, 2, 2))]


@pytest.mark.parametrize("recipe", TOLERANCE)
@pytest.mark.parametrize("padding", [0, 64])
def test_prompts_and_decoding_of_several_sequences_are_plain_attention(recipe, padding):
    engine = Engine(recipe, padding=padding)
    texts = [stream(100, 10), stream(40, 20), stream(65, 30)]
    sequences = [engine.add(len(text[0])) for text in texts]
    found = [[] for _ in texts]
    for cut in ((0, 33), (33, 39), (39, 40)):  # a prompt in two chunks, then a token
        parts = [(s, *(x[slice(*cut)] for x in text)) for s, text in zip(sequences, texts)]
        for rows, more in zip(found, engine.step(parts)):
            rows.append(more)
    for rows, text in zip(found, texts):
        expected = attention(*(x[:40] for x in text))
        assert relative_error(np.concatenate(rows), expected) < TOLERANCE[recipe]


def test_windows_softcap_sinks_and_scale():
    engine = Engine("f32")
    text = stream(70)
    options = dict(softcap=5.0, sinks=np.linspace(-1, 2, 6, dtype=np.float32), window=24)
    (found,) = engine.step([(engine.add(70), *text)], softmax_scale=0.2, **options)
    assert relative_error(found, attention(*text, scale=0.2, **options)) < 2e-6


def test_padded_rows_are_neither_stored_nor_read():
    engine = Engine("int8")
    text = stream(20)
    sequence = engine.add(20)
    before = engine.pages[0].copy()
    (found,) = engine.step([(sequence, *text)], padding=3)
    assert relative_error(found[:20], attention(*text)) < 2e-2
    assert np.array_equal(engine.pages[0], before)


def test_sequences_share_the_pages_of_a_prefix():
    engine = Engine("f32")
    text, other = stream(32), stream(32, seed=9)
    first = engine.add(32)
    engine.step([(first, *text)])
    second = engine.add(32, table=engine.tables[first][:1])
    engine.lengths[second] = 16
    (found,) = engine.step([(second, *(x[16:] for x in other))])
    mixed = [np.concatenate([x[:16], y[16:]]) for x, y in zip(text, other)]
    assert relative_error(found, attention(*mixed)[16:]) < 2e-6


def test_what_was_stored_is_read_back():
    engine = Engine("f32")
    _, k, v = stream(37)
    sequence = engine.add(37)
    engine.step([(sequence, random_rows(1, 37, 2, 64), k, v)])
    found = engine.layer.gather(engine.pages, engine.tables[sequence], 37)
    assert np.array_equal(found[0], k) and np.array_equal(found[1], v)


def test_tokens_of_several_sequences_are_read_back_one_after_the_other():
    engine = Engine("f32")
    texts = [stream(37), stream(5, seed=9)]
    sequences = [engine.add(len(text[0])) for text in texts]
    engine.step([(s, *text) for s, text in zip(sequences, texts)])
    table = np.zeros((2, 6), np.int32)
    for s in sequences:
        table[s, : len(engine.tables[s])] = engine.tables[s]
    k, v = np.full((2, 45, 2, 64), 7, np.float32)
    lengths = np.array([37, 5], np.int32)
    engine.layer.gather_sequences(engine.pages, table[:, :4], lengths, k, v)
    for side, found in ((1, k), (2, v)):
        assert np.array_equal(found[:42], np.concatenate([text[side] for text in texts]))
        assert (found[42:] == 7).all()


def test_pages_are_copied_within_an_engines_memory_and_to_another_one():
    engine = Engine("int8")
    text = stream(40)
    sequence = engine.add(40)
    engine.step([(sequence, *text)])
    table = np.array(engine.tables[sequence])
    fresh = np.array([engine.free.pop() for _ in table])
    engine.layer.copy_blocks(engine.pages, table, fresh)
    assert np.array_equal(engine.pages[fresh], engine.pages[table]) and engine.pages[fresh].any()
    other = np.zeros((8, engine.layer.page_bytes), np.uint8)
    engine.layer.copy_blocks(engine.pages, table, np.array([5, 0, 2]), to_pages=other)
    assert np.array_equal(other[[5, 0, 2]], engine.pages[table])
    assert not other[[1, 3, 4, 6, 7]].any()


def test_lse_is_the_log_of_the_softmaxs_sum():
    engine = Engine("f32")
    q, k, v = stream(20)
    sequence = engine.add(20)
    lse = np.full((20, 6), 7, np.float32)
    (plain,) = engine.step([(sequence, q, k, v)], lse=lse)
    shares = [[engine.tables[sequence][:1], 16], [engine.tables[sequence][1:], 4]]
    # The last four queries: the first page before them, and their own page, merged by their sums.
    outs, logs = [], []
    for pages, tokens in shares:
        out, log = np.zeros((4, 6, 64), np.float32), np.zeros((4, 6), np.float32)
        for row in range(4):
            seen = 16 if tokens == 16 else row + 1
            engine.layer.attend(
                engine.pages, q[16 + row :][:1], np.array([pages], np.int32),
                np.array([seen], np.int32), np.array([0, 1], np.int32),
                out[row : row + 1], lse=log[row : row + 1],
            )  # fmt: skip
        outs.append(out)
        logs.append(log)
    total = np.logaddexp(*logs)
    merged = sum(out * np.exp(log - total)[..., None] for out, log in zip(outs, logs))
    assert np.abs(total - lse[16:]).max() < 1e-5 and np.abs(merged - plain[16:]).max() < 1e-5


def test_numbers_without_a_code_are_counted():
    engine = Engine("int8:source=given", k_steps=[0.1, 0.1], v_steps=[0.1, 0.1])
    q, k, v = stream(16)
    k[3, 1, :2] = np.nan
    slots = np.arange(16) + 16
    assert engine.layer.append(engine.pages, k, v, slots) == 2
    engine.layer.append(engine.pages, k, v, slots)
    assert engine.layer.counters() == {"out_of_range": 0, "nonfinite_inputs": 4}
    engine.layer.reset_counters()
    assert engine.layer.counters() == {"out_of_range": 0, "nonfinite_inputs": 0}


def test_a_layer_of_the_cpu_says_so():
    layer = kvx.PagedLayer("nvfp4", num_kv_heads=2, head_dim=64, block_size=16)
    assert (layer.device, layer.order) == ("cpu", "pool")
    assert repr(layer).startswith("kvx.PagedLayer('nvfp4', 2 heads of 64, pages of 16 tokens and ")
    bounds = dict(max_sequences=8, max_queries=8, max_q_len=1, max_seq_len=4096)
    assert layer.workspace_bytes(num_q_heads=6, **bounds) == 0


def test_given_scales_are_the_engines():
    steps = dict(k_steps=[0.5, 0.25], v_steps=[0.125, 0.0625])
    engine = Engine("fp8_e4m3", **steps)
    _, k, v = stream(16)
    sequence = engine.add(16)
    engine.step([(sequence, random_rows(1, 16, 2, 64), k, v)])
    found = engine.layer.gather(engine.pages, engine.tables[sequence], 16)
    for side, name, rows in ((k, "k_steps", found[0]), (v, "v_steps", found[1])):
        for head in range(2):
            stored = kvx.quantize(side[:, head], "fp8_e4m3", steps=[steps[name][head]])
            assert np.array_equal(rows[:, head], stored.dequantize())


def test_a_page_takes_what_its_format_takes():
    def page_bytes(recipe):
        return kvx.PagedLayer(recipe, num_kv_heads=3, head_dim=64, block_size=128).page_bytes

    assert page_bytes("bf16") == 3 * 128 * 256
    assert page_bytes("int8") == 3 * 128 * 132
    assert page_bytes("int4") == 3 * 128 * 68
    assert page_bytes("nvfp4") == 3 * 128 * 72


def test_what_does_not_fit_is_refused():
    engine = Engine("int8", num_pages=4)
    layer, pages = engine.layer, engine.pages
    q, k, v = stream(3)
    slots, table = np.array([16, 17, 18]), np.array([[1, 0]], np.int32)
    lengths, starts = np.array([3], np.int32), np.array([0, 3], np.int32)
    for call, message in [
        (lambda: layer.append(pages, k, v, np.array([16, 17, 64])), r"slots\[2\] is 64; 4 pages of 16"),
        (lambda: layer.append(pages, k, v, slots.astype(np.uint32)), r"slots is uint32 \[3\]; .* int64"),
        (lambda: layer.append(pages, k[:2], v, slots), "k has 2 tokens; the step has 3"),
        (lambda: layer.append(pages[:, 1:], k, v, slots), "pages is u?int8"),
        (lambda: layer.append(pages.astype(np.int8), k, v, slots), "pages is u?int8"),
        (lambda: layer.append(np.broadcast_to(pages[0], pages.shape), k, v, slots), "pages is"),
        (lambda: layer.attend(pages, q, table, lengths[:0], starts), "expected n, n and n"),
        (lambda: layer.attend(pages, q[:2], table, lengths, starts), "q has 2 tokens"),
        (lambda: layer.attend(pages, q, table + 4, lengths, starts), "block"),
        (lambda: layer.gather(pages, [1, 2], 33), "num_tokens is 33; 2 pages of 16 hold 32"),
        (lambda: layer.attend(pages, q, table, lengths + 99, starts), "seq_len"),
        (lambda: layer.attend(pages, q, table, lengths, -starts), "q has 3 tokens"),
        (lambda: layer.attend(pages, q[:, :5], table, lengths, starts), "a multiple of num_kv"),
        (lambda: layer.attend(pages, q[:, :0], table, lengths, starts), "q has 0 heads"),
        (lambda: kvx.PagedLayer("nvfp4:auto", num_kv_heads=1, head_dim=64), "add immediate"),
        (lambda: kvx.PagedLayer("int8", num_kv_heads=1, head_dim=64, block_size=0), "block_size"),
        (lambda: kvx.PagedLayer("int8", num_kv_heads=1, head_dim=0), "^head_dim is 0"),
        (
            lambda: kvx.PagedLayer("fp8_e4m3", num_kv_heads=2, head_dim=64, k_steps=[1]),
            "^k_steps has 1 numbers; expected 2",
        ),
        (
            lambda: kvx.PagedLayer("fp8_e4m3", num_kv_heads=1, head_dim=64, v_steps=[np.nan]),
            r"^v_steps\[0\] is nan",
        ),
        (lambda: layer.gather(pages, np.array([2**32 + 1]), 3), "block_ids is .4294967297.; exp"),
        (lambda: layer.gather(pages, np.array([1.5]), 3), "block_ids is .1.5.; expected"),
        (lambda: layer.gather(pages, np.array([np.nan]), 3), "block_ids is .nan.; expected"),
        (lambda: layer.gather(pages, 1, 3), "block_ids is 1; expected"),
        (lambda: layer.append(pages, k, v, slots, stream=3), "stream is given; a layer on the CPU"),
        (
            lambda: layer.workspace_bytes(
                num_q_heads=6, max_sequences=1, max_queries=1, max_q_len=0, max_seq_len=9
            ),
            "max_q_len is 0; expected 1 to",
        ),
        (
            lambda: layer.workspace_bytes(
                num_q_heads=5, max_sequences=1, max_queries=1, max_q_len=1, max_seq_len=9
            ),
            "q has 5 heads; expected a multiple of num_kv_heads, 2",
        ),
        (
            lambda: layer.copy_blocks(pages, np.array([0]), np.array([4])),
            "4",
        ),
        (
            lambda: layer.copy_blocks(pages, np.array([0, 1]), np.array([2])),
            "from_blocks has 2 numbers and to_blocks 1; expected as many",
        ),
        (
            lambda: layer.gather_sequences(pages, table, np.array([-1], np.int32), k, k.copy()),
            r"seq_lens\[0\] is -1; expected 0 or more",
        ),
        (
            lambda: kvx.PagedLayer("int8", num_kv_heads=1, head_dim=64, device="gpu"),
            "device is 'gpu'; expected cpu, cuda or cuda:N",
        ),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()
    assert not pages[1].any()


def test_out_may_not_lie_over_what_attend_reads():
    engine = Engine("int8", num_pages=4)
    q = stream(3)[0]
    memory = np.zeros(q.size, np.float32)
    out = memory.reshape(q.shape)
    numbers = {"block_table": [1, 2], "seq_lens": [3], "q_starts": [0, 3]}
    for name in (*numbers, "sinks"):
        given = {key: np.array(value, np.int32) for key, value in numbers.items()}
        given["sinks"] = np.zeros(6, np.float32)
        there = memory[: given[name].size].view(given[name].dtype)
        there[:] = given[name]
        given[name] = there
        given["block_table"] = given["block_table"].reshape(1, -1)
        with pytest.raises(kvx.Error, match=f"out lies over {name}"):
            engine.layer.attend(engine.pages, q, out=out, **given)


def test_a_step_without_sequences_is_one():
    engine = Engine("int8", num_pages=4)
    none = np.zeros(0, np.int32)
    q = stream(3)[0]
    table = np.zeros((0, 5), np.int32)
    assert engine.layer.attend(engine.pages, q, table, none, np.zeros(1, np.int32)).shape == q.shape


class Model:
    """What pages should hold: the engine's sequences as lists of rows, and their tables."""

    def __init__(self, recipe):
        self.engine = Engine(recipe, num_pages=24, block_size=4)
        self.texts = []  # (k, v) of each sequence

    def add(self, shared):
        """A sequence that begins with whole pages of the first one, which both then only read."""
        pages = min(shared, len(self.texts[0][0]) // 4) if self.texts else 0
        table = self.engine.tables[0][:pages] if pages else ()
        self.engine.lengths.append(4 * pages)
        self.engine.tables.append(list(table))
        self.texts.append(tuple(x[: 4 * pages] for x in (self.texts[0] if pages else EMPTY)))

    def step(self, seed, counts):
        """Appends counts[s] tokens to sequence s, and compares attention with the model's."""
        parts = []
        for s, count in enumerate(counts[: len(self.texts)]):
            needed = -(-(len(self.texts[s][0]) + count) // 4) - len(self.engine.tables[s])
            if count == 0 or needed > len(self.engine.free):
                continue
            self.engine.tables[s] += [self.engine.free.pop() for _ in range(needed)]
            q, k, v = stream(count, seed=seed + 3 * s)
            self.texts[s] = tuple(np.concatenate(xy) for xy in zip(self.texts[s], (k, v)))
            parts.append((s, q, k, v))
        if not parts:
            return
        for (s, q, _, _), found in zip(parts, self.engine.step(parts)):
            assert relative_error(found, attention(q, *self.texts[s])) < 3e-6

    def check(self):
        for s, text in enumerate(self.texts):
            found = self.engine.layer.gather(self.engine.pages, self.engine.tables[s], len(text[0]))
            assert all(np.array_equal(a, b) for a, b in zip(found, text))


EMPTY = (np.empty((0, 2, 64), np.float32),) * 2
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4)),
    st.tuples(st.just("step"), st.integers(0, 2**31), st.lists(st.integers(0, 9), max_size=4)),
)


@given(st.lists(OPERATIONS, max_size=12))
def test_any_history_of_an_engine_is_plain_attention(operations):
    model = Model("f32")
    model.add(0)
    for verb, *arguments in operations:
        getattr(model, verb)(*arguments)
    model.check()


NUMBERS = st.one_of(st.integers(-3, 70), st.sampled_from([-(2**31), 2**31 - 1, 2**40]))


def int_arrays(kind, dimensions):
    """Any numbers in any small shape of so many dimensions; seldom of another type or one more."""
    sizes = st.lists(st.integers(0, 3), min_size=dimensions, max_size=dimensions)
    good = st.builds(
        lambda shape, number: np.full(shape, number % 2**31, kind), sizes, st.integers(-3, 70)
    )
    return st.one_of(good, st.sampled_from([None, 3, np.zeros(3, "f4"), np.zeros((1, 1, 1), kind)]))


ROWS = st.builds(
    lambda tokens, heads, kind: np.ones((tokens, heads, 64), kind),
    st.integers(0, 5),
    st.integers(0, 7),
    st.sampled_from(["f4", "f2", "f8", "u1"]),
)


@given(
    ROWS, ROWS, int_arrays(np.int64, 1), int_arrays(np.int32, 2), int_arrays(np.int32, 1),
    int_arrays(np.int32, 1), st.one_of(NUMBERS, st.floats(), st.none()),
)  # fmt: skip
def test_random_calls_are_done_or_refused(q, k, slots, table, lengths, starts, number):
    engine = Engine("int8", num_pages=4)
    layer, pages = engine.layer, engine.pages
    for call in (
        lambda: layer.append(pages, k, k, slots),
        lambda: layer.attend(pages, q, table, lengths, starts),
        lambda: layer.attend(pages, q, table, lengths, starts, window=number),
        lambda: layer.attend(pages, q, table, lengths, starts, softmax_scale=number),
        lambda: layer.attend(pages, q, table, lengths, starts, softcap=number),
        lambda: layer.gather(pages, [1, 2], number),
        lambda: layer.append(q, k, k, slots),
    ):
        try:
            call()
        except (kvx.Error, TypeError, ValueError):
            pass
    text = stream(20)
    pages[:] = 0
    (found,) = engine.step([(engine.add(20), *text)])
    assert relative_error(found, attention(*text)) < 2e-2
