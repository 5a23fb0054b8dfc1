"""Blocks on their way from files to vLLM's pages layer by layer, while the step computes.

    thread: layer 0 of all blocks ──► pages ──► layer 1 ──► pages ──► ...
    step:          waits for layer 0, computes it ──► waits for layer 1, computes it ──► ...

A step with a long prefix begins when the first layer is there instead of when all are.
"""

import queue
import threading

import torch
from vllm.logger import init_logger

from kvx import _core
from kvx.vllm.cores import new_threads_on_any_core

_log = init_logger("vllm.kvx")


class Loads:
    """A step's blocks on their way.

    blocks: of the caller's; places: [blocks][layers], each block's page, None where a layer needs
    none; parts: for each block a list of (file, [(first, last)] by layer), the columns of a page
    that the file (_core.BlockPages) fills.
    """

    def __init__(self, blocks, places, parts, num_layers):
        self.blocks, self.places, self.parts = blocks, places, parts
        self.problems = {}  # by a block's place in blocks: what was wrong with its files first
        self.error = None  # that ended the thread's work
        self._changed = threading.Condition()
        self._num_layers = num_layers
        self._num_there = 0
        self._events = [None] * num_layers  # after which a GPU's pages are there

    def is_there(self, layer, event=None):
        with self._changed:
            self._events[layer] = event
            self._num_there = layer + 1
            self._changed.notify_all()

    def ends(self, error):
        with self._changed:
            self.error = error
            self._num_there = self._num_layers
            self._changed.notify_all()

    def wait(self, layer):
        """Until the layer's pages are there for what the current stream is given next."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_there > layer)
            event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class LayerLoader:
    """layers: each layer's pages, uint8 [blocks, ...], all in one place."""

    def __init__(self, layers):
        self._layers = [pages.view(len(pages), -1) for pages in layers]
        device = layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting = queue.Queue()
        self._thread = threading.Thread(target=self._load_all, name="kvx loads", daemon=True)
        with new_threads_on_any_core():
            self._thread.start()

    def begin(self, blocks, places, parts):
        """Loads, which the thread fills. Pages are written behind what the current stream was
        given so far."""
        loads = Loads(blocks, places, parts, len(self._layers))
        after = None
        if self._stream is not None:
            after = torch.cuda.current_stream(self._stream.device).record_event()
        self._waiting.put((loads, after))
        return loads

    def _load_all(self):
        while (work := self._waiting.get()) is not None:
            loads, after = work
            try:
                if after is not None:
                    self._stream.wait_event(after)
                for layer in range(len(self._layers)):
                    loads.is_there(layer, self._load_layer(loads, layer))
                loads.ends(None)
            except Exception as error:
                _log.exception("kvx could not load blocks")
                loads.ends(error)

    def _load_layer(self, loads, layer):
        """The event after which a GPU has the pages."""
        wanted = [i for i, places in enumerate(loads.places) if places[layer] is not None]
        if not wanted:
            return None
        pages = self._layers[layer]
        if self._stream is None:
            self._read(loads, layer, wanted, pages, [loads.places[i][layer] for i in wanted])
            return None
        host = torch.empty((len(wanted), pages.shape[1]), dtype=torch.uint8, pin_memory=True)
        self._read(loads, layer, wanted, host, list(range(len(wanted))))
        places = torch.tensor([loads.places[i][layer] for i in wanted]).pin_memory()
        with torch.cuda.stream(self._stream):
            placed = host.to(pages.device, non_blocking=True)
            pages.index_copy_(0, places.to(pages.device, non_blocking=True), placed)
        return self._stream.record_event()

    def _read(self, loads, layer, wanted, pages, rows):
        """Each block's parts of a layer go to its row of pages."""
        by_columns = {}
        for i, row in zip(wanted, rows):
            for file, columns in loads.parts[i]:
                by_columns.setdefault(columns[layer], []).append((i, row, file))
        for (first, last), some in by_columns.items():
            files = [file for _, _, file in some]
            problems = _core.read_layer(
                files, layer, pages[:, first:last], [row for _, row, _ in some]
            )
            for (i, _, _), problem in zip(some, problems):
                if problem:
                    loads.problems.setdefault(i, problem)

    def close(self):
        self._waiting.put(None)
        self._thread.join()


__all__ = ["LayerLoader", "Loads"]
