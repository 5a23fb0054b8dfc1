"""What kvx.vllm keeps blocks in: files of a block each, and host memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvx
from kvx import _core

FINGERPRINT = "model tiny\nrecipe int8\n"
TOKENS = [3, 1, 4, 1]


def pages(seed, layers=3, size=100):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (1, 2, size // 2), np.uint8) for _ in range(layers)]


@pytest.fixture
def files():
    return _core.BlockFiles(FINGERPRINT, 4)


@pytest.mark.parametrize("zstd_level", [0, 3])
def test_a_block_returns_from_its_file(files, tmp_path, zstd_level):
    path, stored = str(tmp_path / "a.kvx"), pages(1)
    stored[1][:] = 0  # compresses well
    num_bytes = files.save(path, "a", TOKENS, stored, zstd_level)
    assert num_bytes == (tmp_path / "a.kvx").stat().st_size
    files.check(path, "a", TOKENS)
    block = files.open(path, "a", TOKENS)
    for layer, expected in enumerate(stored):
        found = pages(2)[0].repeat(2, axis=0)
        before = found[0].copy()
        assert _core.read_layer([block], layer, found, [1]) == [""]
        assert np.array_equal(found[1:], expected) and np.array_equal(found[0], before)
    inside = kvx.inspect(path)
    assert (inside.fingerprint, inside.blocks, inside.block_size) == (FINGERPRINT, 1, 4)
    assert kvx.verify(path) == 3


def test_a_file_of_another_block_or_cache_is_refused(files, tmp_path):
    path = str(tmp_path / "a.kvx")
    files.save(path, "a", TOKENS, pages(1), 0)
    other = _core.BlockFiles(FINGERPRINT.replace("int8", "int4"), 4)
    block = files.open(path, "a", TOKENS)

    def read(layer, to, page=0):
        return _core.read_layer([block], layer, to, [page])

    for call, message in [
        (lambda: files.check(path, "b", TOKENS), "it is another block"),
        (lambda: files.check(path, "a", [3, 1, 4, 2]), "it is another block"),
        (lambda: files.check(path, "a", TOKENS[:3]), "tokens has 3 numbers; expected 4"),
        (lambda: other.check(path, "a", TOKENS), "recipe is int8; expected int4"),
        (lambda: files.open(path, "b", TOKENS), "it is another block"),
        (lambda: other.open(path, "a", TOKENS), "recipe is int8; expected int4"),
        (lambda: read(3, pages(1)[0]), "layer is 3; blocks.0. has 3 layers"),
        (lambda: read(0, pages(1)[0], 1), "ids.0. is 1; expected 0 to 0"),
        (lambda: read(0, np.zeros(9, np.uint8)), "pages is u?int8"),
        (lambda: files.check(path + "x", "a", TOKENS), "cannot be read"),
        (lambda: files.save(path + "/x", "a", TOKENS, pages(1), 0), "cannot be written"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()
    assert "layer 0 has pages of 100 bytes; expected 98" in read(0, pages(1, size=98)[0])[0]


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_flipped_bit_passes(tmp_path_factory, place, bit):
    """In the header, a page, or the index; in the zeros between them nothing can be lost."""
    path = tmp_path_factory.mktemp("bits") / "a.kvx"
    files, stored = _core.BlockFiles(FINGERPRINT, 4), pages(1, size=128)
    files.save(str(path), "a", TOKENS, stored, 0)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(kvx.Error):
        files.check(str(path), "a", TOKENS)


def new_host_blocks():
    """Two groups of layers over 6 blocks: pages of 8 and 16 bytes, and of 12."""
    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 256, (6, size), np.uint8) for size in (8, 16, 12)]
    return layers, _core.HostBlocks([layers[:2], layers[2:]], 4)


def test_blocks_return_from_host_memory():
    layers, blocks = new_host_blocks()
    assert blocks.slot_bytes == 24 and blocks.memory.shape == (4, 24)
    expected = [layer.copy() for layer in layers]
    blocks.store(1, 0, [5, 2], [0, 3])
    blocks.store(1, 1, [4], [1])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(1, True, 2 * 24 + 12)]
    assert blocks.drain_finished() == []
    for layer in layers:
        layer[:] = 0
    blocks.load(2, 0, [1, 0], [0, 3])  # to other blocks than they came from
    blocks.load(3, 1, [4], [1])
    blocks.load(4, 1, [], [])
    blocks.wait_for_all()
    assert sorted(blocks.drain_finished()) == [(2, True, 48), (3, True, 12), (4, True, 0)]
    for layer, before in zip(layers[:2], expected):
        assert np.array_equal(layer[[1, 0]], before[[5, 2]]) and not layer[2:].any()
    assert np.array_equal(layers[2][4], expected[2][4])


@given(st.integers(0, 23), st.integers(0, 7))
def test_memory_that_changes_is_noticed(place, bit):
    _, blocks = new_host_blocks()
    blocks.store(1, 0, [5, 2], [0, 3])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(1, True, 48)]
    blocks.memory[3, place] ^= 1 << bit
    blocks.load(2, 0, [1], [0])
    blocks.load(3, 0, [1, 0], [0, 3])
    blocks.wait_for_all()
    assert sorted(blocks.drain_finished()) == [(2, True, 24), (3, False, 48)]


def test_layers_of_a_load_end_one_by_one():
    layers, blocks = new_host_blocks()
    expected = [layer.copy() for layer in layers]
    blocks.store(1, 0, [5, 2], [0, 3])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(1, True, 48)]
    blocks.memory[3, 9] ^= 1  # of the second layer
    blocks.load_layer(-1, 0, 0, [1, 0], [0, 3])
    blocks.load_layer(-2, 0, 1, [1, 0], [0, 3])
    assert blocks.end_layer(-1) == (True, 16)
    assert np.array_equal(layers[0][[1, 0]], expected[0][[5, 2]])
    assert blocks.drain_finished() == []
    assert blocks.end_layer(-2) == (False, 32)
    assert np.array_equal(layers[2], expected[2])
    for call, message in [
        (lambda: blocks.end_layer(-2), "job -2 is no layer"),
        (lambda: blocks.load_layer(-3, 0, 2, [0], [0]), "layer is 2; expected 0 to 1"),
        (lambda: blocks.load_layer(-3, 1, 0, [6], [0]), "a block is 6; the engine has 6"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()


@pytest.mark.parametrize("lower", ["", "folder"])
@given(st.one_of(st.none(), st.tuples(st.integers(0, 23), st.integers(0, 7))))
@settings(max_examples=20)
def test_slots_go_down_and_up_with_their_checksums(tmp_path_factory, lower, change):
    layers, above = new_host_blocks()
    folder = str(tmp_path_factory.mktemp("slots")).encode() if lower else b""
    below = _core.HostBlocks([layers[:2], layers[2:]], 2, None, folder)
    again = _core.HostBlocks([layers[:2], layers[2:]], 1)
    expected = [layer[[5, 2]].copy() for layer in layers[:2]]
    above.store(1, 0, [5, 2], [0, 3])
    above.wait_for_all()
    assert above.drain_finished() == [(1, True, 48)]
    if change:
        above.memory[3, change[0]] ^= 1 << change[1]
    assert below.take(above, [0, 3], [1, 0]) == 2
    assert again.take(below, [1], [0]) == 1
    below.load(2, 0, [1, 0], [1, 0])
    below.wait_for_all()
    assert below.drain_finished() == [(2, not change, 48)], "whether it is what was stored"
    again.load(3, 0, [3], [0])
    again.wait_for_all()
    assert again.drain_finished() == [(3, True, 24)]
    for layer, before in zip(layers[:2], expected):
        assert np.array_equal(layer[3], before[0])
        assert change or np.array_equal(layer[[1, 0]], before)


def test_what_does_not_fit_host_memory_is_refused():
    layers, blocks = new_host_blocks()
    for call, message in [
        (lambda: blocks.store(1, 2, [0], [0]), "group is 2; expected 0 to 1"),
        (lambda: blocks.store(1, 0, [6], [0]), "a block is 6; the engine has 6"),
        (lambda: blocks.load(1, 0, [0], [4]), "a slot is 4; expected 0 to 3"),
        (lambda: blocks.load(1, 0, [0, 1], [0]), "block_ids has 2 numbers and slots 1"),
        (
            lambda: _core.HostBlocks([[layers[0][:0]]], 1).store(1, 0, [0], [0]),
            "a block is 0; the engine has 0",
        ),
        (lambda: blocks.take(blocks, [0, 1], [2]), "from_slots has 2 numbers and slots 1"),
        (lambda: blocks.take(blocks, [4], [2]), "a slot is 4; expected 0 to 3"),
        (lambda: blocks.take(blocks, [0], [-1]), "a slot is -1; expected 0 to 3"),
        (lambda: blocks.take(_core.HostBlocks([layers[:1]], 1), [0], [0]), "source has slots of"),
        (lambda: _core.HostBlocks([layers], 0), "num_slots is 0"),
        (lambda: _core.HostBlocks([], 3), "a slot has 0 bytes"),
        (lambda: _core.HostBlocks([layers], 2**62), "that is too many"),
        (lambda: _core.HostBlocks([[layers[0].astype(np.int8)]], 1), "pages is u?int8"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            call()
    assert blocks.drain_finished() == []
