"""Pages on their way from vLLM's memory to files layer by layer, while the step still computes.

    layer's attention ──► copy of the layer's pages ──► [waiting] ──► thread: a record in each file
                          of the step's new blocks                    (checksum)

A layer waits for the copy alone; where too much is waiting, for the oldest record.
"""

import queue
import threading
from collections import Counter
from functools import partial

import torch
from vllm.logger import init_logger

from kvx import _core
from kvx.vllm.cores import new_threads_on_any_core

_log = init_logger("vllm.kvx")
_STAGED_BYTES = 64 << 20


class _Step:
    """The blocks that a step fills. ids: the numbers of their pages, int64 [blocks] a layer."""

    def __init__(self, blocks, ids):
        self.blocks = blocks
        self.ids = ids
        self.handed_on = set()  # layers
        # the thread's
        self.files = None  # by their place in blocks, of those that can be written
        self.num_written = 0  # layers


class LayerWriter:
    """layers: each layer's pages, uint8 [blocks, ...], all in one place; page_bytes: how many of
    each layer's page are written.

    begin(block) makes a block's file (_core.LayerFile) and raises kvx.Error where it cannot.
    forget(block) deletes it. A failure is counted and logged: a full disk is no reason to stop.
    """

    def __init__(self, layers, page_bytes, begin, forget):
        self._layers = [
            pages.flatten(1)[:, :num_bytes] for pages, num_bytes in zip(layers, page_bytes)
        ]
        self._begin, self._forget = begin, forget
        device = layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step = None
        self._waiting = queue.Queue()
        self._staged = 0  # bytes
        self._under_way = set()  # names of blocks
        self._outcomes = Counter()
        self._changed = threading.Condition()  # guards these three
        self._thread = threading.Thread(target=self._work, name="kvx layers", daemon=True)
        with new_threads_on_any_core():
            self._thread.start()

    def is_under_way(self, block):
        with self._changed:
            return block.name in self._under_way

    def begin_step(self, blocks, ids):
        """blocks: those that the step fills. ids: [blocks][layers], their pages."""
        if not blocks:
            return
        by_layer = torch.tensor(ids, dtype=torch.int64).T.contiguous()
        if self._stream is not None:
            by_layer = by_layer.pin_memory().to(self._layers[0].device, non_blocking=True)
        self._step = _Step(blocks, by_layer)
        with self._changed:
            self._under_way.update(block.name for block in blocks)

    def hand_on(self, layer):
        """The current stream has been given all that the step puts into the layer's pages. A layer
        that was handed on already stays as it was."""
        step = self._step
        if step is None or layer in step.handed_on:
            return
        step.handed_on.add(layer)
        num_bytes = len(step.blocks) * self._layers[layer].shape[1]
        with self._changed:
            self._changed.wait_for(
                lambda: self._staged == 0 or self._staged + num_bytes <= _STAGED_BYTES
            )
            self._staged += num_bytes
        try:
            pages, copied = self._copy(layer, step.ids[layer])
        except BaseException as error:
            with self._changed:
                self._staged -= num_bytes  # else later layers would wait for these for good
                self._changed.notify_all()
            self._step = None
            self._waiting.put(partial(self._fail_step, step, error))
            raise
        self._waiting.put(partial(self._write_layer, step, layer, pages, copied))

    def _copy(self, layer, ids):
        """(the pages in host memory, the event after which they are there)"""
        if self._stream is None:
            return self._layers[layer].index_select(0, ids), None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            gathered = self._layers[layer].index_select(0, ids)
            host = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
        return host, self._stream.record_event()

    def end_step(self):
        """Hands on the layers that nobody has: a captured graph calls nobody. What the engine does
        next may overwrite the pages."""
        if self._step is None:
            return
        for layer in range(len(self._layers)):
            self.hand_on(layer)
        self._step = None
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _work(self):
        while (work := self._waiting.get()) is not None:
            work()
            self._waiting.task_done()

    def _write_layer(self, step, layer, pages, copied):
        try:
            if copied is not None:
                copied.synchronize()
            self._write(step, layer, pages)
        except Exception as error:
            self._abandon_all(step, error)
        step.num_written += 1
        with self._changed:
            self._staged -= pages.numel()
            self._changed.notify_all()
        if step.num_written == len(self._layers):
            self._end(step)

    def _fail_step(self, step, error):
        """One of the step's layers does not come, so its files will not be whole."""
        self._abandon_all(step, error)
        self._end(step)

    def _end(self, step):
        with self._changed:
            self._under_way.difference_update(block.name for block in step.blocks)
            self._outcomes["saved"] += len(step.files)
            self._outcomes["unsaved"] += len(step.blocks) - len(step.files)

    def _write(self, step, layer, pages):
        if step.files is None:
            step.files = {}
            for i, block in enumerate(step.blocks):
                try:
                    step.files[i] = self._begin(block)
                except Exception as error:
                    self._abandon(step, i, error)
        kept = sorted(step.files)
        if not kept:
            return
        if len(kept) < len(step.blocks):
            pages = pages[kept]
        problems = _core.write_layer([step.files[i] for i in kept], layer, pages)
        for i, problem in zip(kept, problems):
            if problem:
                self._abandon(step, i, problem)

    def _abandon_all(self, step, problem):
        step.files = step.files or {}
        for i in list(step.files):
            self._abandon(step, i, problem)

    def _abandon(self, step, i, problem):
        _log.warning("kvx could not save a block: %s", problem)
        step.files.pop(i, None)
        self._forget(step.blocks[i])

    def take_outcomes(self):
        """How many blocks were saved and unsaved since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, Counter()
        return +outcomes

    def flush(self):
        """Waits until every layer that was handed on is in its files."""
        self._waiting.join()

    def close(self):
        """Writes what is waiting, and ends the thread."""
        self.flush()
        self._waiting.put(None)
        self._thread.join()


__all__ = ["LayerWriter"]
