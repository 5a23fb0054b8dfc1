"""Prefixes that are found again, and cache files."""

import os

import numpy as np
import pytest
from reference import random_rows

import kvx

SHAPE = dict(num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=512, max_sequences=4)


def new_cache(recipe="int8", **options):
    return kvx.Cache(recipe=recipe, **{**SHAPE, "prefix_model": "a model", **options})


def feed(cache, sequence, tokens):
    """Appends rows that follow from the tokens and their positions, and records the tokens."""
    first = cache.num_tokens(sequence)
    for at in range(first, first + len(tokens)):
        token = tokens[at - first]
        with cache.step([(sequence, 1)]):
            for layer in range(2):
                rows = random_rows(1000 * at + token + layer, 1, 10, 64)
                cache.append_and_attend(layer, rows[:, :6], rows[:, 6:8], rows[:, 8:])
    cache.record_tokens(sequence, tokens)


def stored(cache, sequence):
    return np.stack([side for layer in range(2) for side in cache.gather(sequence, layer)])


def text(count):
    return np.arange(count, dtype=np.int64) % 7


def test_a_prefix_is_found_again_by_its_tokens():
    cache = new_cache()
    first = cache.create_sequence()
    feed(cache, first, text(150))
    second = cache.create_sequence_from(text(140))
    assert cache.num_tokens(second) == 128  # whole blocks
    assert np.array_equal(stored(cache, second), stored(cache, first)[:, :128])
    assert cache.recorded_tokens(second) == text(128).tolist()
    assert cache.num_tokens(cache.create_sequence_from(text(140), adapter="another")) == 0
    cache.free_sequence(first)
    cache.free_sequence(second)
    cache.clear_prefixes()
    assert cache.num_tokens(cache.create_sequence_from(text(140))) == 0


@pytest.mark.parametrize("in_files", [False, True])
def test_the_host_tier_gives_back_what_the_cache_had_no_room_for(tmp_path, in_files):
    folder = tmp_path if in_files else None
    cache = new_cache(max_sequences=1, host_tier_bytes=1 << 20, host_tier_folder=folder)
    first = cache.create_sequence()
    feed(cache, first, text(200))
    before = stored(cache, first)
    cache.free_sequence(first)
    cache.wait_for_tier()  # a step waits for files for a while only
    other = cache.create_sequence()
    feed(cache, other, text(512)[::-1])
    cache.free_sequence(other)
    cache.wait_for_tier()
    tier = cache.host_tier()
    assert (tier.stored, tier.loaded, tier.bad) == (3 + 8, 0, 0)
    assert 0 < tier.held <= tier.allocated <= 1 << 20
    assert list(tmp_path.iterdir()) == []  # the files have no names
    again = cache.create_sequence_from(text(200))
    assert cache.num_tokens(again) == 192
    assert np.array_equal(stored(cache, again), before[:, :192])
    assert 0 < cache.host_tier().loaded <= 3  # the pool may have kept one


def test_tiers_that_cannot_be_are_refused():
    for options, message in [
        (dict(tiers="tape(1GiB)"), "tiers has a tier 'tape'; expected host, disk, folder"),
        (dict(tiers="host(1MiB)", prefix_model=None), "expected a prefix_model with it"),
        (dict(tiers="host(1MiB)", host_tier_bytes=1 << 20), "expected 0 with tiers"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            new_cache(**options)
    with pytest.raises(TypeError, match="tiers is 3"):
        new_cache(tiers=3)
    assert new_cache().tiers() == []


def test_a_host_tier_that_cannot_be_is_refused(tmp_path):
    for options, reason in (
        (dict(host_tier_bytes=-1), "host_tier_bytes is -1; expected 0 or more"),
        (dict(host_tier_bytes=1 << 20, prefix_model=None), "expected a prefix_model with it"),
        (dict(host_tier_folder=tmp_path), "expected host_tier_bytes with it"),
        (dict(host_tier_bytes=1 << 20, host_tier_folder=tmp_path / "none"), "takes no files"),
    ):
        with pytest.raises(kvx.Error, match=reason):
            new_cache(**options)
    with pytest.raises(kvx.OutOfRangeError, match="one block of each class needs"):
        new_cache(host_tier_bytes=10)
    assert new_cache().host_tier().allocated == 0


def test_paths_may_be_bytes_and_hold_no_null(tmp_path):
    cache = new_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, text(3))
    path = tmp_path / "a"
    cache.save_sequence(sequence, bytes(path))
    assert kvx.inspect(bytes(path)).blocks == 1
    for call in (kvx.inspect, kvx.verify, cache.load_sequence, cache.load_prefixes):
        with pytest.raises(kvx.Error, match="expected no null character"):
            call(f"{path}\0b")
    with pytest.raises(kvx.Error, match="host_tier_folder is .* expected no null character"):
        new_cache(host_tier_bytes=1 << 20, host_tier_folder="a\0b")


def test_paths_may_be_no_utf8(tmp_path):
    cache = new_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, text(3))
    path = bytes(tmp_path) + b"/\xff\xe9"
    with pytest.raises(kvx.Error) as error:
        cache.load_sequence(path)
    assert f"'{os.fsdecode(path)}' cannot be read" in str(error.value)
    cache.save_sequence(sequence, path)
    assert kvx.inspect(os.fsdecode(path)).blocks == kvx.verify(path) == 1
    assert cache.num_tokens(cache.load_sequence(path)) == 3
    cache.save_prefixes(path)
    assert cache.load_prefixes(path).bad == 0


def test_a_sequence_comes_back_from_its_file(tmp_path):
    cache = new_cache("nvfp4:auto")
    sequence = cache.create_sequence()
    feed(cache, sequence, text(200))
    for level in (0, 3):
        path = tmp_path / f"level{level}.kvx"
        cache.save_sequence(sequence, path, zstd_level=level)
        other = new_cache("nvfp4:auto")
        loaded = other.load_sequence(path)
        assert np.array_equal(stored(other, loaded), stored(cache, sequence))
        found = kvx.inspect(path)
        assert found.sequences == [text(200).tolist()] and found.fingerprint == cache.fingerprint()
        assert found.file_bytes == path.stat().st_size and found.block_size == 64
        assert {kind.is_full_precision for kind in found.kinds} == {False, True}
        assert kvx.verify(path) == sum(kind.block_copies for kind in found.kinds)


def test_prefixes_come_back_from_their_file(tmp_path):
    cache = new_cache()
    feed(cache, cache.create_sequence(), text(150))
    cache.save_prefixes(tmp_path / "prefixes.kvx")
    other = new_cache()
    report = other.load_prefixes(tmp_path / "prefixes.kvx")
    assert (report.blocks, report.loaded, report.bad) == (2, 2, 0)
    assert other.num_tokens(other.create_sequence_from(text(150))) == 128
    assert other.load_prefixes(tmp_path / "prefixes.kvx").known == 2


def test_a_damaged_file_is_refused_and_named(tmp_path):
    cache = new_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, text(70))
    path = tmp_path / "file.kvx"
    cache.save_sequence(sequence, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(kvx.Error, match="1 of 2 block copies are bad; block 0"):
        kvx.verify(path)
    with pytest.raises(kvx.Error):
        cache.load_sequence(path)
    assert cache.load_sequence is not None and cache.num_tokens(sequence) == 70
    path.write_bytes(b"no cache file")
    with pytest.raises(kvx.Error, match="file.kvx"):
        kvx.inspect(path)


def test_files_of_another_cache_and_caches_without_prefixes_are_refused(tmp_path):
    cache = new_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, text(10))
    cache.save_sequence(sequence, tmp_path / "file.kvx")
    with pytest.raises(kvx.Error, match="nvfp4"):
        new_cache("nvfp4").load_sequence(tmp_path / "file.kvx")
    plain = new_cache(prefix_model=None)
    with pytest.raises(kvx.UnsupportedError):
        plain.create_sequence_from([1, 2, 3])
    with pytest.raises(kvx.Error, match="prefix_hash is 'md5'"):
        new_cache(prefix_hash="md5")
    with pytest.raises(kvx.UnsupportedError):
        cache.create_sequence_from([1, 2, 3], tenant="needs sha256")
    with pytest.raises(kvx.OutOfRangeError):
        cache.record_tokens(sequence, [1])


@pytest.mark.parametrize("negative", [[3, -1], np.array([3, -1])])
def test_negative_tokens_are_refused_and_nothing_is_recorded(negative):
    cache = new_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, text(2))
    for call in (
        lambda: cache.record_tokens(sequence, negative),
        lambda: cache.create_sequence_from(negative),
    ):
        with pytest.raises(kvx.Error, match=r"tokens\[1\] is -1; expected 0 to"):
            call()
    with pytest.raises(TypeError, match=r"tokens\[1\] is 'a' \(a str\); expected a whole number"):
        cache.record_tokens(sequence, [3, "a"])
