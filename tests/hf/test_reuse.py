"""Tokens found again: prefixes in a cache and its host tier, and caches saved to files."""

import copy

import pytest
import torch
from conftest import SIZES, left_padded, prompt, tiny_model, tokens_of

import kvx
import kvx.hf

NAME = "a tiny model"


def new_cache(model, recipe="f32", **options):
    return kvx.hf.Cache(model.config, recipe, block_size=16, prefix_model=NAME, **options)


def spoken(model, cache, rows=1):
    """The tokens of a first turn, of 90 positions."""
    return tokens_of(model, cache, unmasked(prompt(rows, 70)), max_new_tokens=20)


def unmasked(ids):
    """generate() hides the padding token without a mask; these models say it like any other."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def next_turn(said, seed=1):
    return unmasked(torch.cat([said, prompt(len(said), 5, seed=seed)], 1))


@pytest.mark.parametrize("recipe", ["f32", "int8", "int8:sink=16,recent=16"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_saved_chat_goes_on_in_another_process_s_cache(name, recipe, tmp_path):
    model = kvx.hf.enable(tiny_model(name))
    cache = new_cache(model, recipe)
    said = spoken(model, cache, rows=2)
    cache.save(tmp_path / "chat", said)
    names = sorted(path.name for path in (tmp_path / "chat").iterdir())
    assert len(names) == 2 * SIZES["num_hidden_layers"] and names[1] == "layer-000-row-001.kvx"
    loaded = new_cache(model, recipe)
    tokens = loaded.load(tmp_path / "chat")
    assert torch.equal(tokens, said[:, :89]) and loaded.get_seq_length() == 89
    expected = tokens_of(model, cache, next_turn(said))
    assert torch.equal(tokens_of(model, loaded, next_turn(said)), expected)
    loaded.save(tmp_path / "chat", expected)  # in the place of the older one
    assert new_cache(model, recipe).load(tmp_path / "chat").shape == (2, 114)


def test_a_prefix_is_found_after_a_reset(model_name):
    model = kvx.hf.enable(tiny_model(model_name))
    cache = new_cache(model)
    said = spoken(model, cache)
    cache.record(said)
    cache.record(said)  # what was recorded stays
    turns = [next_turn(said, seed) for seed in (1, 2)]
    for turn in turns:
        expected = tokens_of(model, new_cache(model), turn)
        found = cache.begin(turn["input_ids"])
        assert 0 <= found <= 89 and found == cache.get_seq_length()
        if model_name in ("llama", "qwen3"):
            assert found >= 80  # whole blocks of 16
        assert torch.equal(tokens_of(model, cache, turn), expected)
    assert cache.begin(prompt(1, 40, seed=9)) == 0


def test_rows_share_the_shortest_prefix():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = new_cache(model)
    said = spoken(model, cache, rows=2)
    cache.record(said)
    other = said.clone()
    other[1, 40] = 3 if said[1, 40] != 3 else 4
    assert cache.begin(other) == 32
    expected = tokens_of(model, new_cache(model), unmasked(other))
    assert torch.equal(tokens_of(model, cache, unmasked(other)), expected)


def test_a_host_tier_keeps_what_the_cache_has_no_room_for():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = new_cache(model, max_tokens=96, max_batch=1, host_tier_bytes=2**24)
    said = spoken(model, cache)
    cache.record(said)
    for seed in range(3):  # of other texts, which take the blocks
        cache.reset()
        other = tokens_of(model, cache, unmasked(prompt(1, 70, seed=20 + seed)))
        cache.record(other)
    for layer in cache.layers:
        layer.cache.wait_for_tier()
    assert cache.begin(said) >= 64
    assert sum(layer.cache.host_tier().loaded for layer in cache.layers) > 0


def test_copies_find_the_same_prefixes():
    model = kvx.hf.enable(tiny_model("llama"))
    cache = new_cache(model)
    said = spoken(model, cache)
    cache.record(said)
    fork = copy.deepcopy(cache)
    assert fork.begin(said) >= 80 and cache.get_seq_length() == 89


def test_what_is_refused(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    cache = new_cache(model)
    said = spoken(model, cache)
    plain = kvx.hf.Cache(model.config, "f32")
    for call in (
        lambda: plain.record(said),
        lambda: plain.begin(said),
        lambda: plain.save(tmp_path / "x", said),
        lambda: plain.load(tmp_path / "x"),
    ):
        with pytest.raises(kvx.UnsupportedError, match=r"kvx.hf.Cache\(..., prefix_model=...\)"):
            call()
    with pytest.raises(kvx.Error, match="expected a prefix_model with it"):
        kvx.hf.Cache(model.config, "f32", host_tier_bytes=1000)
    with pytest.raises(kvx.Error, match=r"ids is list; expected a tensor of token numbers"):
        cache.record(said.tolist())
    with pytest.raises(kvx.Error, match=r"ids has the shape \[1, 50\]; expected \[1, 89\] or longer"):
        cache.record(said[:, :50])
    cache.record(said)
    changed = said.clone()
    changed[0, 7] = 96 - said[0, 7]
    with pytest.raises(kvx.Error, match=rf"ids\[0, 7\] is {96 - said[0, 7]}; {said[0, 7]} was rec"):
        cache.record(changed)
    with pytest.raises(kvx.Error, match="there are 2 rows; the cache was made for 1"):
        cache.begin(said.repeat(2, 1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(kvx.Error, match="expected a new name, or a saved cache"):
        cache.save(tmp_path / "other", said)
    with pytest.raises(kvx.Error, match="the cache is empty; there is nothing to save"):
        new_cache(model).save(tmp_path / "chat", said)
    padded = new_cache(model)
    tokens = tokens_of(model, padded, left_padded(2, 30, [0, 4]))
    with pytest.raises(kvx.UnsupportedError, match="only rows without padding"):
        padded.record(tokens)


def test_files_that_do_not_fit_change_nothing(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    cache = new_cache(model)
    said = spoken(model, cache)
    cache.save(tmp_path / "chat", said)
    other = new_cache(model, "int8")
    with pytest.raises(kvx.Error, match="int8|recipe|format"):
        other.load(tmp_path / "chat")
    with pytest.raises(kvx.Error, match="expected a folder that kvx.hf.Cache.save wrote"):
        cache.load(tmp_path / "nothing")
    first, second = (tmp_path / "chat" / f"layer-00{i}-row-000.kvx" for i in (0, 1))
    bytes_of_first = first.read_bytes()
    first.write_bytes(second.read_bytes())  # another layer's
    with pytest.raises(kvx.Error, match="layer"):
        cache.load(tmp_path / "chat")
    damaged = bytearray(bytes_of_first)
    damaged[len(damaged) // 2] ^= 1
    first.write_bytes(damaged)
    with pytest.raises(kvx.Error, match=first.name):
        cache.load(tmp_path / "chat")
    first.unlink()
    with pytest.raises(kvx.Error, match="holds files of 3 layers; expected .* the model's 4"):
        cache.load(tmp_path / "chat")
    assert cache.get_seq_length() == 89
    first.write_bytes(bytes_of_first)
    assert torch.equal(cache.load(tmp_path / "chat"), said[:, :89])


def test_tiers_are_named_as_everywhere_and_counted_together(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    tiers = f"host(64KiB), disk({tmp_path}, 16MiB), folder({tmp_path}/shared, timeout=60s)"
    cache = new_cache(model, max_tokens=128, max_batch=1, tiers=tiers)
    assert cache.tiers() == []
    said = spoken(model, cache)
    cache.record(said)
    cache.wait_for_tiers()  # a slow folder may drop what a step needs the room of
    for seed in range(3):  # of other texts, which take the blocks
        cache.reset()
        other = tokens_of(model, cache, unmasked(prompt(1, 70, seed=20 + seed)))
        cache.record(other)
        cache.wait_for_tiers()
    expected = tokens_of(model, new_cache(model), next_turn(said))
    assert cache.begin(next_turn(said)["input_ids"]) >= 64
    assert torch.equal(tokens_of(model, cache, next_turn(said)), expected)
    host, disk, folder = cache.tiers()
    assert [host.name, disk.name, folder.name] == ["host", "disk", "store"]
    assert host.moved_down > 0 and disk.loaded > 0 and folder.stored > 0
    assert host.allocated <= 64 * 2**10 and disk.allocated <= 16 * 2**20, "of all layers together"
    assert host.bad + disk.bad + folder.bad == 0

    shared = f"folder({tmp_path}/shared, timeout=60s)"
    another = new_cache(model, max_tokens=128, max_batch=1, tiers=shared)
    assert another.begin(next_turn(said)["input_ids"]) >= 64, "what the first one computed"
    assert torch.equal(tokens_of(model, another, next_turn(said)), expected)
    assert another.tiers()[0].loaded > 0


def test_tiers_that_are_none_are_refused():
    model = kvx.hf.enable(tiny_model("llama"))
    with pytest.raises(kvx.Error, match="tiers has a tier 'tape'"):
        new_cache(model, tiers="tape(1GiB)")
    with pytest.raises(kvx.Error, match="expected a prefix_model with it, and no host_tier_bytes"):
        kvx.hf.Cache(model.config, "f32", tiers="host(1MiB)")
