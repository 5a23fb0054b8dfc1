"""Layers are written while later ones are computed: from copies, with a bound on what waits."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

import kvx
from kvx import _core
from kvx.vllm import layer_writer
from kvx.vllm.layer_writer import LayerWriter

PAGE_BYTES = [6, 2]  # kvx's; vLLM's first layer has pages of 8


@dataclass(frozen=True)
class Named:
    name: str
    tokens: list = field(default_factory=lambda: [1, 2, 3, 4])


class Files:
    def __init__(self, folder):
        self.folder = folder
        self.files = _core.BlockFiles("order x\n", 4)
        self.may_begin = threading.Event()
        self.may_begin.set()

    def path(self, block):
        return str(self.folder / f"{block.name}.kvx")

    def begin(self, block):
        assert self.may_begin.wait(60)
        if block.name == "refused":
            raise kvx.Error("the disk is full")
        return self.files.begin(self.path(block), block.name, block.tokens, PAGE_BYTES)

    def forget(self, block):
        (self.folder / f"{block.name}.kvx").unlink(missing_ok=True)

    def pages(self, block):
        opened = self.files.open(self.path(block), block.name, block.tokens)
        pages = [torch.zeros((1, num_bytes), dtype=torch.uint8) for num_bytes in PAGE_BYTES]
        for layer, page in enumerate(pages):
            (problem,) = _core.read_layer([opened], layer, page, [0])
            if problem:
                raise kvx.Error(problem)
        return [page[0].tolist() for page in pages]


@pytest.fixture
def layers():
    first = torch.arange(32, dtype=torch.uint8).reshape(4, 2, 4)
    return [first, torch.arange(8, dtype=torch.uint8).reshape(4, 2)]


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def writer_of(layers, files):
    return LayerWriter(layers, PAGE_BYTES, files.begin, files.forget)


def test_a_layer_is_there_before_the_next_one_is_computed(layers, files):
    writer = writer_of(layers, files)
    a, b = Named("a"), Named("b")
    writer.begin_step([a, b], [[3, 0], [1, 1]])
    writer.hand_on(0)
    writer.flush()
    with pytest.raises(kvx.Error, match="its layer 1 has not come"):
        files.pages(a)
    layers[0].zero_()  # the engine gives the pages to others
    writer.hand_on(0)  # a layer that shares another one's pages calls again
    layers[1] += 10
    writer.hand_on(1)
    layers[1].zero_()
    assert writer.is_under_way(a) or files.pages(a)
    writer.end_step()
    writer.flush()
    assert files.pages(a) == [[24, 25, 26, 27, 28, 29], [10, 11]]
    assert files.pages(b) == [[8, 9, 10, 11, 12, 13], [12, 13]]
    assert not writer.is_under_way(a)
    assert writer.take_outcomes() == {"saved": 2} and writer.take_outcomes() == {}
    writer.close()


def test_layers_that_call_nobody_are_written_at_the_steps_end(layers, files):
    writer = writer_of(layers, files)
    writer.end_step()  # of no step
    writer.begin_step([Named("a")], [[2, 2]])
    writer.end_step()
    writer.hand_on(0)  # after the step
    writer.close()
    assert files.pages(Named("a")) == [[16, 17, 18, 19, 20, 21], [4, 5]]


def test_a_failure_is_counted_and_others_are_written(layers, files):
    writer = writer_of(layers, files)
    blocks = [Named("a"), Named("refused"), Named("lost"), Named("b")]
    writer.begin_step(blocks, [[0, 0], [1, 1], [2, 2], [3, 3]])
    writer.hand_on(0)
    writer.flush()
    files.forget(Named("lost"))
    writer.end_step()
    writer.flush()
    assert files.pages(Named("a")) == [[0, 1, 2, 3, 4, 5], [0, 1]]
    assert files.pages(Named("b")) == [[24, 25, 26, 27, 28, 29], [6, 7]]
    assert writer.take_outcomes() == {"saved": 2, "unsaved": 2}
    writer.close()


def test_a_layer_waits_where_too_much_is_staged(layers, files, monkeypatch):
    monkeypatch.setattr(layer_writer, "_STAGED_BYTES", 7)
    writer = writer_of(layers, files)
    files.may_begin.clear()
    writer.begin_step([Named("a")], [[0, 0]])
    writer.hand_on(0)
    ended = threading.Event()
    waits = threading.Thread(target=lambda: (writer.end_step(), ended.set()))
    waits.start()
    assert not ended.wait(0.2)
    files.may_begin.set()
    waits.join(60)
    assert ended.is_set()
    writer.close()
    assert files.pages(Named("a")) == [[0, 1, 2, 3, 4, 5], [0, 1]]


def test_a_copy_that_fails_holds_no_later_layer_up(layers, files, monkeypatch):
    monkeypatch.setattr(layer_writer, "_STAGED_BYTES", 7)
    writer = writer_of(layers, files)
    copy = writer._copy

    def fail(layer, ids):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(writer, "_copy", fail)
    writer.begin_step([Named("a")], [[0, 0]])
    with pytest.raises(RuntimeError, match="out of memory"):
        writer.hand_on(0)
    monkeypatch.setattr(writer, "_copy", copy)
    writer.begin_step([Named("b")], [[0, 0]])
    ended = threading.Event()
    threading.Thread(target=lambda: (writer.end_step(), ended.set()), daemon=True).start()
    assert ended.wait(60), "it waits for the bytes of a copy that never was"
    writer.close()
    assert files.pages(Named("b")) == [[0, 1, 2, 3, 4, 5], [0, 1]]


@pytest.mark.parametrize("bad_layer", [0, 1])
def test_blocks_of_a_copy_that_fails_are_not_under_way(layers, files, monkeypatch, bad_layer):
    writer = writer_of(layers, files)
    copy = writer._copy

    def fail(layer, ids):
        if layer == bad_layer:
            raise RuntimeError("out of memory")
        return copy(layer, ids)

    monkeypatch.setattr(writer, "_copy", fail)
    writer.begin_step([Named("a"), Named("b")], [[0, 0], [1, 1]])
    with pytest.raises(RuntimeError, match="out of memory"):
        writer.end_step()
    writer.flush()
    assert not writer.is_under_way(Named("a")) and not list(files.folder.iterdir())
    assert writer.take_outcomes() == {"unsaved": 2}
    monkeypatch.setattr(writer, "_copy", copy)
    writer.begin_step([Named("a")], [[3, 3]])  # a later step may hand it on
    writer.end_step()
    writer.close()
    assert files.pages(Named("a")) == [[24, 25, 26, 27, 28, 29], [6, 7]]
    assert writer.take_outcomes() == {"saved": 1}


def test_pages_of_another_size_are_refused(files):
    file = files.begin(Named("a"))
    with pytest.raises(kvx.Error, match="no page of 5 bytes of layer 0"):
        _core.write_layer([file], 0, torch.zeros((1, 5), dtype=torch.uint8))
    with pytest.raises(kvx.Error, match="no page of 6 bytes of layer 2"):
        _core.write_layer([file], 2, torch.zeros((1, 6), dtype=torch.uint8))
    with pytest.raises(kvx.Error, match="2 pages and files 1"):
        _core.write_layer([file], 0, torch.zeros((2, 6), dtype=torch.uint8))
