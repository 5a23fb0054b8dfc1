"""Blocks are written beside the steps: from copies, in order, with a bound on what waits."""

import os
import threading
from dataclasses import dataclass

import pytest
import torch

import kvx
from kvx.vllm import block_writer
from kvx.vllm.block_writer import BlockWriter


@dataclass(frozen=True)
class Named:
    name: str


class Files:
    """Stands for a folder. Each save waits until `may_save` is set."""

    def __init__(self):
        self.may_save = threading.Event()
        self.saved = {}  # name: the pages' bytes

    def save(self, block, pages):
        assert self.may_save.wait(60)
        if block.name == "refused":
            raise kvx.Error("the disk is full")
        self.saved[block.name] = [page[0].tolist() for page in pages]


@pytest.fixture
def layers():
    return [torch.arange(12, dtype=torch.uint8).reshape(4, 3), torch.full((4, 2), 9).byte()]


@pytest.fixture
def files():
    return Files()


def test_a_step_goes_on_while_files_are_written(layers, files):
    writer = BlockWriter(layers, files.save)
    writer.write(Named("a"), [1, 0])
    assert files.saved == {} and writer.is_under_way(Named("a"))
    layers[0].zero_()  # the engine gives the page to others
    files.may_save.set()
    writer.flush()
    assert files.saved == {"a": [[3, 4, 5], [9, 9]]}
    assert not writer.is_under_way(Named("a"))
    assert writer.take_outcomes() == {"saved": 1} and writer.take_outcomes() == {}
    writer.close()


def test_a_failure_is_counted_and_others_are_written(layers, files):
    writer = BlockWriter(layers, files.save)
    files.may_save.set()
    for name in ("a", "refused", "b"):
        writer.write(Named(name), [0, 0])
    writer.close()
    assert list(files.saved) == ["a", "b"]
    assert writer.take_outcomes() == {"saved": 2, "unsaved": 1}


def test_what_waits_is_bounded(layers, files, monkeypatch):
    monkeypatch.setattr(block_writer, "_STAGED_BYTES", 1)  # the fewest buffers
    writer = BlockWriter(layers, files.save)
    for name in ("a", "b"):
        writer.write(Named(name), [2, 0])
    third = threading.Thread(target=writer.write, args=(Named("c"), [3, 0]))
    third.start()
    assert not writer.is_under_way(Named("c"))  # it has no buffer before "a" is written
    files.may_save.set()
    third.join(60)
    writer.close()
    assert [pages[0] for pages in files.saved.values()] == [[6, 7, 8], [6, 7, 8], [9, 10, 11]]


def test_the_thread_is_not_bound_to_the_core_of_the_steps(layers):
    """vLLM binds the thread that makes the writer; a thread inherits that."""
    before, cores = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {min(before)})
    try:
        writer = BlockWriter(layers, lambda block, pages: cores.append(os.sched_getaffinity(0)))
        writer.write(Named("a"), [0, 0])
        writer.close()
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert cores == [before]


def test_a_buffer_that_there_is_no_memory_for_may_be_made_later(layers, files, monkeypatch):
    monkeypatch.setattr(block_writer, "_STAGED_BYTES", 1)  # the fewest buffers
    writer = BlockWriter(layers, files.save)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(block_writer.torch, "empty", fail)
        for _ in range(block_writer._FEWEST_BUFFERS):
            with pytest.raises(RuntimeError, match="out of memory"):
                writer.write(Named("a"), [0, 0])
    assert writer._num_unmade == block_writer._FEWEST_BUFFERS
    files.may_save.set()
    writer.write(Named("b"), [1, 0])
    writer.close()
    assert files.saved == {"b": [[3, 4, 5], [9, 9]]}


def test_a_copy_that_fails_gives_its_buffer_back(layers, files, monkeypatch):
    monkeypatch.setattr(block_writer, "_STAGED_BYTES", 1)  # the fewest buffers
    writer = BlockWriter(layers, files.save)
    for _ in range(block_writer._FEWEST_BUFFERS):
        with pytest.raises(RuntimeError):
            writer.write(Named("a"), [99, 0])  # no such page
    files.may_save.set()
    ended = threading.Event()
    threading.Thread(
        target=lambda: (writer.write(Named("b"), [1, 0]), ended.set()), daemon=True
    ).start()
    assert ended.wait(60), "it waits for a buffer that nobody has"
    writer.close()
    assert files.saved == {"b": [[3, 4, 5], [9, 9]]}
