"""Wrong calls are refused in Python's words: the argument's name, its value or type, and what was
expected. No word of the binding, of DLPack or of the C ABI gets through."""

import pickle
import re

import numpy as np
import pytest
from reference import random_rows

import kvx
import kvx.marlin
import kvx.turbomind

X = random_rows(1, 4, 64)
ROWS = kvx.quantize(X, "int8")
Q, K = random_rows(2, 3, 4, 32), random_rows(3, 3, 2, 32)
SIZES = dict(num_layers=1, num_kv_heads=2, head_dim=32, recipe="int8", max_tokens=64)
TABLE, LENGTHS = np.array([[0]], np.int32), np.array([3], np.int32)
STARTS = np.array([0, 3], np.int32)
NOT_PYTHONS = re.compile(
    r"nanobind|incompatible function|_core|DLPack|KVX_|kvx_[a-z]|--help|ndarray\[|std::|handle"
)


def new_cache(**options):
    return kvx.Cache(**{**SIZES, "max_sequences": 2, **options})


def in_step(*arguments, **options):
    cache = new_cache()
    with cache.step([(cache.create_sequence(), 3)]):
        cache.append_and_attend(*arguments, **options)


def with_sequence(call):
    cache = new_cache(prefix_model="model")
    cache.create_sequence()
    return call(cache)


LAYER = kvx.PagedLayer("int8", num_kv_heads=2, head_dim=32, block_size=16)
PAGES = np.zeros((2, LAYER.page_bytes), np.uint8)
SLOTS = np.arange(3)
CACHE = kvx.marlin.KVCache(kvx.marlin.CacheConfig(1, 2, 2, 32, 16))
CONFIG = dict(num_layers=1, num_kv_heads=2, head_dim=32)

# A call, and words of its message.
WRONG = {
    "quantize a number": (lambda: kvx.quantize(3, "int8"), "x is 3 (an int); expected a NumPy"),
    "quantize a list": (lambda: kvx.quantize([1.0], "int8"), "x is a list; expected a NumPy array"),
    "quantize None": (lambda: kvx.quantize(None, "int8"), "x is None; expected a NumPy array"),
    "quantize float64": (lambda: kvx.quantize(X.astype(float), "int8"), "x is float64; expected"),
    "quantize whole numbers": (lambda: kvx.quantize(X.astype(int), "int8"), "x is int64; expected"),
    "a format that is none": (lambda: kvx.quantize(X, 8), "format is 8 (an int); expected a str"),
    "an unknown format": (lambda: kvx.quantize(X, "int5"), "format is 'int5'; expected one of"),
    "a tensor_scale of text": (
        lambda: kvx.quantize(X, "nvfp4", tensor_scale="1"),
        "tensor_scale is '1' (a str); expected a number",
    ),
    "steps of text": (
        lambda: kvx.quantize(X, "int8", steps="ab"),
        "steps is 'ab' (a str); expected a list of numbers",
    ),
    "one step": (
        lambda: kvx.quantize(X, "int8", steps=1.0),
        "steps is 1.0 (a float); expected a list of numbers",
    ),
    "dequantize an array": (lambda: kvx.dequantize(X), "rows is a ndarray; expected the kvx.Rows"),
    "dequantize to text": (lambda: ROWS.dequantize("text"), "dtype is 'text' (a str); expected"),
    "transcode an array": (lambda: kvx.transcode(X, "int4"), "rows is a ndarray; expected the kvx"),
    "transcode to a number": (lambda: kvx.transcode(ROWS, 4), "format is 4 (an int); expected a str"),
    "a recipe that is none": (lambda: kvx.parse_recipe(8), "text is 8 (an int); expected a str"),
    "a wrong option": (lambda: kvx.parse_recipe("int8:g7"), "kvx.recipe_options() lists them"),
    "a cache of text layers": (
        lambda: new_cache(num_layers="2"),
        "num_layers is '2' (a str); expected a whole number",
    ),
    "a cache of half a head": (
        lambda: new_cache(num_kv_heads=0.5),
        "num_kv_heads is 0.5 (a float); expected a whole number",
    ),
    "a recipe of None": (lambda: new_cache(recipe=None), "recipe is None; expected a str"),
    "windows that are none": (
        lambda: new_cache(layer_windows="8"),
        "layer_windows is '8' (a str); expected a list of whole numbers",
    ),
    "a window of text": (
        lambda: new_cache(layer_windows=["8"]),
        "layer_windows[0] is '8' (a str); expected a whole number",
    ),
    "an override that is no text": (
        lambda: new_cache(layer_overrides=[("0", "int8")]),
        "layer_overrides[0] is a tuple; expected a str",
    ),
    "too many tokens": (lambda: new_cache(max_tokens=2**40), "max_tokens is 1099511627776; expected"),
    "far too many tokens": (lambda: new_cache(max_tokens=2**70), "max_tokens is 11805916207174113"),
    "a folder that is no path": (
        lambda: new_cache(prefix_model="m", host_tier_bytes=1 << 20, host_tier_folder=3),
        "host_tier_folder is 3 (an int); expected a str or a path",
    ),
    "a device that is none": (lambda: new_cache(device=3), "device is '3'; expected cpu, cuda"),
    "entries that are none": (
        lambda: with_sequence(lambda c: c.begin_step(0)),
        "entries is 0 (an int); expected a list of tuples",
    ),
    "entries of numbers": (
        lambda: with_sequence(lambda c: c.begin_step([0])),
        "entries[0] is 0 (an int); expected a tuple of 2: (a whole number, a whole number)",
    ),
    "entries of text": (
        lambda: with_sequence(lambda c: c.begin_step([(0, "3")])),
        "entries[0][1] is '3' (a str); expected a whole number",
    ),
    "entries too large": (
        lambda: with_sequence(lambda c: c.begin_step([(0, 2**40)])),
        "entries[0][1] is 1099511627776; expected",
    ),
    "a sequence of text": (
        lambda: with_sequence(lambda c: c.num_tokens("0")),
        "sequence is '0' (a str); expected a whole number",
    ),
    "a sequence too large": (lambda: with_sequence(lambda c: c.num_tokens(2**40)), "sequence is 109"),
    "truncate to a half": (
        lambda: with_sequence(lambda c: c.truncate(0, 1.5)),
        "num_tokens is 1.5 (a float); expected a whole number",
    ),
    "gather a layer of text": (
        lambda: with_sequence(lambda c: c.gather(0, "0")),
        "layer is '0' (a str); expected a whole number",
    ),
    "gather from a half": (
        lambda: with_sequence(lambda c: c.gather(0, 0, first_token="1")),
        "first_token is '1' (a str); expected a whole number",
    ),
    "a layer that is none": (lambda: in_step("0", Q, K, K), "layer is '0' (a str); expected"),
    "keys of a list": (lambda: in_step(0, Q, K.tolist(), K), "k is a list"),
    "keys of None": (lambda: in_step(0, Q, None, K), "k is None; expected a NumPy array"),
    "a softcap of text": (
        lambda: in_step(0, Q, K, K, softcap="1"),
        "softcap is '1' (a str); expected a number",
    ),
    "a precision": (lambda: in_step(0, Q, K, K, precision=1), "precision is 1; expected 'accurate'"),
    "sinks of another size": (
        lambda: in_step(0, Q, K, K, sinks=np.zeros(3, np.float32)),
        "sinks is float32 [3]; expected float32 [4]",
    ),
    "sinks of another dtype": (
        lambda: in_step(0, Q, K, K, sinks=np.zeros(4)),
        "sinks is float64 [4]; expected float32 [4]",
    ),
    "tokens of a number": (
        lambda: with_sequence(lambda c: c.record_tokens(0, 3)),
        "tokens is 3 (an int); expected a list of whole numbers",
    ),
    "tokens of text": (
        lambda: with_sequence(lambda c: c.record_tokens(0, ["a"])),
        "tokens[0] is 'a' (a str); expected a whole number",
    ),
    "tokens of halves": (
        lambda: with_sequence(lambda c: c.create_sequence_from([0.5])),
        "tokens[0] is 0.5 (a float); expected a whole number",
    ),
    "tokens too large": (
        lambda: with_sequence(lambda c: c.create_sequence_from([2**31])),
        "tokens[0] is 2147483648; expected 0 to 2147483647",
    ),
    "a path of a number": (
        lambda: with_sequence(lambda c: c.save_sequence(0, 3)),
        "path is 3 (an int); expected a str or a path",
    ),
    "a zstd_level of text": (
        lambda: with_sequence(lambda c: c.save_sequence(0, "f", zstd_level="1")),
        "zstd_level is '1' (a str); expected a whole number",
    ),
    "no prefixes": (lambda: new_cache().recorded_tokens("0"), "sequence is '0' (a str)"),
    "files without prefixes": (lambda: new_cache().save_prefixes("f"), "prefix_model=..."),
    "inspect a number": (lambda: kvx.inspect(3), "path is 3 (an int); expected a path"),
    "a layer of a number": (
        lambda: kvx.PagedLayer(8, num_kv_heads=2, head_dim=32),
        "recipe is 8 (an int); expected a str",
    ),
    "pages of float32": (
        lambda: LAYER.append(PAGES.astype(np.float32), K, K, SLOTS),
        "pages is float32 [2,",
    ),
    "slots of a list": (lambda: LAYER.append(PAGES, K, K, [0, 1, 2]), "slots is a list that cannot"),
    "slots of floats": (
        lambda: LAYER.append(PAGES, K, K, SLOTS.astype(np.float32)),
        "slots is float32 [3]; expected int64 in 1 dimension",
    ),
    "a table of int64": (
        lambda: LAYER.attend(PAGES, Q, TABLE.astype(int), LENGTHS, STARTS),
        "block_table is int64 [1, 1]; expected int32 in 2 dimensions",
    ),
    "attention in a window of text": (
        lambda: LAYER.attend(PAGES, Q, TABLE, LENGTHS, STARTS, window="8"),
        "window is '8' (a str); expected a whole number",
    ),
    "block ids of text": (lambda: LAYER.gather(PAGES, ["a"], 1), "block_ids is ['a']; expected"),
    "a workspace of text": (
        lambda: LAYER.workspace_bytes(
            num_q_heads="4", max_sequences=1, max_queries=1, max_q_len=1, max_seq_len=1
        ),
        "num_q_heads is '4' (a str); expected a whole number",
    ),
    "a config that is none": (
        lambda: kvx.marlin.KVCache({}),
        "config is a dict; expected a CacheConfig",
    ),
    "advance by text": (
        lambda: CACHE.advance("1"),
        "num_tokens is '1' (a str); expected a whole number",
    ),
    "a mode that is none": (
        lambda: kvx.turbomind.get_cache_block_size("int8", **CONFIG),
        "mode is 'int8' (a str); expected a KvCacheMode",
    ),
    "threads of text": (
        lambda: kvx.set_num_threads("2"),
        "num_threads is '2' (a str); expected a whole number",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_refused_in_pythons_words(what):
    call, words = WRONG[what]
    with pytest.raises((kvx.Error, TypeError)) as error:
        call()
    text = str(error.value)
    assert words in text
    assert not NOT_PYTHONS.search(text), text
    assert "\n" not in text


def test_int32_slots_are_slots():
    pages = [np.zeros_like(PAGES) for _ in range(2)]
    for memory, dtype in zip(pages, (np.int64, np.int32)):
        LAYER.append(memory, K, K, SLOTS.astype(dtype))
    assert pages[0].any() and np.array_equal(*pages)


def test_what_owns_bytes_does_not_pickle_and_says_what_does():
    for thing in (new_cache(), LAYER, CACHE):
        with pytest.raises(kvx.UnsupportedError, match="cannot be pickled .* [Pp]ickle its"):
            pickle.dumps(thing)
    config = kvx.marlin.CacheConfig(1, 2, 2, 32, 16)
    for thing in (kvx.parse_recipe("nvfp4:auto"), config, ROWS, kvx.formats()[0]):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_reprs_say_what_a_thing_is():
    assert repr(LAYER).startswith("kvx.PagedLayer('int8', 2 heads of 32, pages of 16 tokens")
    assert repr(CACHE) == (
        "kvx.marlin.KVCache('f16', batch of 1, 1 layers, 2 KV heads of 32, 0 of 16 tokens)"
    )
