"""What kvx.Cache refuses with the argument or the call that helps."""

import copy
import pickle

import pytest

import kvx

SIZES = dict(num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=64)


def test_prefixes_and_files_name_prefix_model():
    cache = kvx.Cache(**SIZES)
    sequence = cache.create_sequence()
    for name, call in {
        "create_sequence_from": lambda: cache.create_sequence_from([1, 2]),
        "save_sequence": lambda: cache.save_sequence(sequence, "/nowhere"),
        "load_sequence": lambda: cache.load_sequence("/nowhere"),
        "save_prefixes": lambda: cache.save_prefixes("/nowhere"),
        "load_prefixes": lambda: cache.load_prefixes("/nowhere"),
    }.items():
        message = rf"^{name}\(\) needs .*kvx.Cache\(..., prefix_model=...\)$"
        with pytest.raises(kvx.UnsupportedError, match=message):
            call()
    named = kvx.Cache(**SIZES, prefix_model="a model")
    with pytest.raises(kvx.Error, match="/nowhere"):
        named.load_sequence("/nowhere")


def test_a_cache_is_not_pickled_or_copied_but_its_recipe_is():
    cache = kvx.Cache(**SIZES)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        message = r"cannot be pickled or copied.*'int8'.*save_sequence\(\).*fork_sequence\(\)"
        with pytest.raises(kvx.UnsupportedError, match=message):
            copied(cache)
    assert kvx.parse_recipe(pickle.loads(pickle.dumps(cache.recipe))) == kvx.parse_recipe("int8")
    assert pickle.loads(pickle.dumps(kvx.parse_recipe("int8"))) == kvx.parse_recipe("int8")
