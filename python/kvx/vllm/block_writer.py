"""Pages on their way from vLLM's memory to files, beside the engine's steps.

    step ──► copy of the block's pages ──► [waiting] ──► thread: file
             in a staging buffer                         (checksums, zstd, fsync)

A step waits for the copy alone. Where all staging buffers are taken it waits for the oldest file.
"""

import queue
import threading
from collections import Counter

import torch
from vllm.logger import init_logger

from kvx.vllm.cores import new_threads_on_any_core

_log = init_logger("vllm.kvx")
_STAGED_BYTES = 64 << 20
_FEWEST_BUFFERS, _MOST_BUFFERS = 2, 256


class BlockWriter:
    """layers: each layer's pages, uint8 [blocks, ...], all in one place.

    save(block, pages) writes a file and raises kvx.Error where it cannot. A failure is counted and
    logged: a full disk is no reason to stop.
    """

    def __init__(self, layers, save):
        self._layers = layers
        self._save = save
        device = layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        block_bytes = sum(pages[0].numel() for pages in layers)
        wanted = _STAGED_BYTES // block_bytes
        self._num_unmade = min(max(wanted, _FEWEST_BUFFERS), _MOST_BUFFERS)  # staging buffers
        self._free = queue.SimpleQueue()
        self._waiting = queue.Queue()
        self._lock = threading.Lock()
        self._under_way = set()  # names of blocks
        self._outcomes = Counter()
        self._thread = threading.Thread(target=self._write_all, name="kvx files", daemon=True)
        with new_threads_on_any_core():
            self._thread.start()

    def is_under_way(self, block):
        with self._lock:
            return block.name in self._under_way

    def write(self, block, ids):
        """Copies the pages `ids` [layers] as they are after all that the current stream has been
        given, and lets the thread write them."""
        buffer = self._take_buffer()
        try:
            copied = self._stage(buffer, ids)
        except BaseException:
            self._free.put(buffer)  # else the last one's loss would hold a step up for good
            raise
        with self._lock:
            self._under_way.add(block.name)
        self._waiting.put((block, buffer, copied))

    def _stage(self, buffer, ids):
        """The event after which a GPU's pages are in the buffer."""
        if self._stream is None:
            self._copy(buffer, ids)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._copy(buffer, ids)
        copied = self._stream.record_event()
        # What the engine does next may overwrite the pages.
        torch.cuda.current_stream(self._stream.device).wait_event(copied)
        return copied

    def _take_buffer(self):
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._num_unmade == 0:
                return self._free.get()
        pin = self._stream is not None
        buffer = [
            torch.empty((1, *pages.shape[1:]), dtype=torch.uint8, pin_memory=pin)
            for pages in self._layers
        ]
        self._num_unmade -= 1  # there was memory for it
        return buffer

    def _copy(self, buffer, ids):
        for pages, host, i in zip(self._layers, buffer, ids):
            host.copy_(pages[i : i + 1], non_blocking=True)

    def _write_all(self):
        while (work := self._waiting.get()) is not None:
            block, buffer, copied = work
            outcome = "saved"
            try:
                if copied is not None:
                    copied.synchronize()
                self._save(block, buffer)
            except Exception as error:
                outcome = "unsaved"
                _log.warning("kvx could not save a block: %s", error)
            with self._lock:
                self._under_way.discard(block.name)
                self._outcomes[outcome] += 1
            self._free.put(buffer)
            self._waiting.task_done()

    def take_outcomes(self):
        """How many blocks were saved and unsaved since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        return outcomes

    def flush(self):
        """Waits until every block is in its file."""
        self._waiting.join()

    def close(self):
        """Writes what is waiting, and ends the thread."""
        self.flush()
        self._waiting.put(None)
        self._thread.join()


__all__ = ["BlockWriter"]
