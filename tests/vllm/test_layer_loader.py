"""Layers are loaded while earlier ones compute: a layer's pages are there when it has waited."""

import threading

import pytest
import torch

from kvx import _core
from kvx.vllm.layer_loader import LayerLoader

PAGES = [6, 2]  # bytes of a page, a layer each
TOKENS = [1, 2, 3, 4]


@pytest.fixture
def files(tmp_path):
    files = _core.BlockFiles("order x\n", 4)
    for i, name in enumerate("abc"):
        pages = [torch.full((1, count), 10 * i + count, dtype=torch.uint8) for count in PAGES]
        files.save(str(tmp_path / name), name, TOKENS, pages, i)  # zstd, too
    return {name: files.open(str(tmp_path / name), name, TOKENS) for name in "abc"}


def new_layers():
    return [torch.zeros((4, 2, 3), dtype=torch.uint8), torch.zeros((4, 2), dtype=torch.uint8)]


def whole(file):
    return [(file, [(0, 6), (0, 2)])]


def rows(layer):
    return [page.unique().tolist() for page in layer.flatten(1)]


def test_a_layer_is_there_before_the_next_one_is_read(files, monkeypatch):
    layers = new_layers()
    loader = LayerLoader(layers)
    may_go_on = threading.Event()
    load = loader._load_layer

    def load_layer(loads, layer):
        assert layer == 0 or may_go_on.wait(60)
        return load(loads, layer)

    monkeypatch.setattr(loader, "_load_layer", load_layer)
    places = [[3, 0], [1, None], [2, 2]]
    loads = loader.begin(list("abc"), places, [whole(files[name]) for name in "abc"])
    loads.wait(0)
    assert rows(layers[0]) == [[0], [16], [26], [6]]
    assert not layers[1].any()
    waited = threading.Thread(target=loads.wait, args=(1,))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    may_go_on.set()
    waited.join(60)
    assert rows(layers[1]) == [[2], [0], [22], [0]]
    assert loads.problems == {} and loads.error is None
    loader.close()


def test_slices_of_a_page_come_from_files_of_their_own(tmp_path):
    layers = new_layers()
    loader = LayerLoader(layers)
    files = _core.BlockFiles("order x\n", 4)
    parts = []
    for i, (first, last) in enumerate([(0, 4), (4, 6)]):
        pages = [torch.full((1, n), 1 + i, dtype=torch.uint8) for n in (last - first, 1)]
        files.save(str(tmp_path / f"{i}"), "x", TOKENS, pages, 0)
        file = files.open(str(tmp_path / f"{i}"), "x", TOKENS)
        parts.append((file, [(first, last), (i, i + 1)]))
    loads = loader.begin(["x"], [[2, 1]], [parts])
    loads.wait(1)
    assert layers[0].flatten(1)[2].tolist() == [1, 1, 1, 1, 2, 2]
    assert layers[1][1].tolist() == [1, 2]
    loads = loader.begin(["x"], [[0, 1]], [[(parts[0][0], [(0, 3), (0, 1)])]])
    loads.wait(1)
    assert "layer 0 has pages of 4 bytes; expected 3" in loads.problems[0]
    loader.close()


def test_damage_is_one_blocks(files, tmp_path):
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[:64] + bytes([content[64] ^ 1]) + content[65:])
    (tmp_path / "c").unlink()
    layers = new_layers()
    loader = LayerLoader(layers)
    loads = loader.begin(
        list("abc"), [[0, 0], [1, 1], [2, 2]], [whole(files[name]) for name in "abc"]
    )
    loads.wait(1)
    assert sorted(loads.problems) == [0, 2]
    assert "layer 0" in loads.problems[0] and "cannot be read" in loads.problems[2]
    assert rows(layers[0])[1] == [16] and rows(layers[1])[1] == [12]
    loader.close()


def test_what_ends_the_thread_is_told(files):
    loader = LayerLoader(new_layers())
    loads = loader.begin(["a"], [[9, 0]], [whole(files["a"])])  # no such page
    loads.wait(1)
    assert "ids[0] is 9; expected 0 to 3" in str(loads.error)
    loads = loader.begin(["a"], [[1, 1]], [whole(files["a"])])  # the next one is loaded
    loads.wait(1)
    assert loads.error is None
    loader.close()
