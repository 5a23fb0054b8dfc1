"""An offloading spec for vLLM: host memory, or a disk, keeps blocks that leave vLLM's pages, with
checksums.

    --kv-transfer-config '{"kv_connector": "KvxOffloadingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": "host(8GiB)",
            "spec_name": "KvxOffloadingSpec", "spec_module_path": "kvx.vllm.offloading"}}'

The manager, in vLLM's scheduler, decides which block lies in which slot. In the worker
the queue of kvx's host tier, threads beside the engine's, makes the copies, with a checksum a page.
A block that comes back changed is counted, forgotten and computed anew. A GPU's pages are copied on
a stream of their own to and from pinned memory.

``tiers`` names one tier, as everywhere in kvx: ``host(8GiB)`` or ``disk(/nvme, 200GiB)``, of all
workers of an engine together. vLLM's own ``cpu_bytes_to_use`` is the same as ``host``.

vLLM logs the manager's counts and exports them to Prometheus (METRICS).
"""

import os
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from kvx import _core
from kvx.errors import Error, UnsupportedError
from kvx.vllm.cores import new_threads_on_any_core

_log = init_logger("vllm.kvx")

# What the manager counts, blocks of one group of layers each.
METRICS = {
    "vllm:kvx_offload_blocks_stored": "Blocks that were copied to host memory.",
    "vllm:kvx_offload_blocks_loaded": "Blocks that came back from host memory.",
    "vllm:kvx_offload_blocks_evicted": "Blocks in host memory that made room for others.",
    "vllm:kvx_offload_blocks_bad": (
        "Blocks of loads in which host memory had changed; they are computed anew."
    ),
}


class Slots(BlockIDsLoadStoreSpec):
    """Slots in host memory, one for each block, in the order of the blocks."""


@dataclass
class _Entry:
    slot: int
    is_ready: bool = False
    is_doubtful: bool = False  # forgotten once it has no readers
    readers: int = 0


class KvxOffloadingManager(OffloadingManager):
    """Decides which block lies in which slot; the least recently used one makes room."""

    def __init__(self, num_slots):
        self._num_slots = num_slots
        self._new_counts = Counter()  # since vLLM last asked
        self.reset_cache()

    def count(self, what, blocks):
        """what: as METRICS has it, without its prefix."""
        self._new_counts[f"vllm:kvx_offload_blocks_{what}"] += blocks

    def get_stats(self):
        counts, self._new_counts = +self._new_counts, Counter()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, blocks in counts.items():
            stats.increase_counter(name, blocks)
        return stats

    def reset_cache(self):
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._free = list(range(self._num_slots))

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def lookup(self, key, req_context):
        entry = self._entries.get(key)
        if entry is None or entry.is_doubtful:
            return LookupResult.MISS
        return LookupResult.HIT if entry.is_ready else LookupResult.HIT_PENDING

    def touch(self, keys, req_context):
        for key in reversed(list(keys)):  # a prefix's beginning goes last
            if key in self._entries:
                self._entries.move_to_end(key)

    def prepare_load(self, keys, req_context):
        entries = [self._entries[key] for key in keys]
        for entry in entries:
            entry.readers += 1
        return Slots([entry.slot for entry in entries])

    def complete_load(self, keys, req_context):
        self.count("loaded", len(keys))
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:  # forgotten since
                continue
            entry.readers -= 1
            if entry.is_doubtful and entry.readers == 0:
                self._forget(key)

    def doubt_loads(self):
        """A load that is under way has brought back a bad block: vLLM does not pass here which."""
        for entry in self._entries.values():
            entry.is_doubtful = entry.is_doubtful or entry.readers > 0

    def prepare_store(self, keys, req_context):
        new = [key for key in keys if key not in self._entries]
        evicted = self._make_room(len(new), set(keys))
        new = new[: len(self._free)]
        slots = [self._free.pop() for _ in new]
        self._entries.update((key, _Entry(slot)) for key, slot in zip(new, slots))
        return PrepareStoreOutput(new, Slots(slots), evicted)

    def _make_room(self, wanted, kept):
        idle = (
            key
            for key, entry in self._entries.items()
            if entry.is_ready and entry.readers == 0 and key not in kept
        )
        evicted = [key for key, _ in zip(idle, range(wanted - len(self._free)))]
        for key in evicted:
            self._forget(key)
        self.count("evicted", len(evicted))
        return evicted

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.is_ready:
                continue
            entry.is_ready = success
            if success:
                self.count("stored", 1)
            else:
                self._forget(key)

    def _forget(self, key):
        self._free.append(self._entries.pop(key).slot)


class KvxOffloadingWorker(OffloadingWorker):
    """Copies blocks between vLLM's pages and slots in host memory. bad_jobs: loads that failed."""

    def __init__(self, kv_caches, num_slots, folder=""):
        pages = [tensor.tensor.view(torch.uint8) for tensor in kv_caches.tensors]
        groups = [[pages[ref.tensor_idx] for ref in refs] for refs in kv_caches.group_data_refs]
        # Copies run behind this stream, which is put behind the engine's at each submission.
        self._stream = torch.cuda.Stream(pages[0].device) if pages[0].is_cuda else None
        with new_threads_on_any_core():
            self.blocks = _core.HostBlocks(groups, num_slots, self._stream, os.fsencode(folder))
        self.bad_jobs = 0
        self.bad_blocks = set()  # vLLM's numbers, since its last call
        self._loads = {}  # job_id: vLLM's blocks
        self._started = {}

    def submit_store(self, job_id, src_spec, dst_spec):
        self._submit(self.blocks.store, job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        """expedited: the step waits for the load. The queue has one order, so nothing changes."""
        self._loads[job_id] = dst_spec.block_ids.tolist()
        self._submit(self.blocks.load, job_id, dst_spec, src_spec)
        return True

    def _submit(self, verb, job_id, pages, slots):
        """pages: vLLM's blocks, group by group; slots: as many."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._started[job_id] = time.perf_counter()
        block_ids, slot_ids = pages.block_ids.tolist(), slots.block_ids.tolist()
        first = 0
        for group, size in enumerate(pages.group_sizes):
            part = slice(first, first + size)
            verb(job_id, group, block_ids[part], slot_ids[part])
            first += size

    def get_finished(self):
        results = []
        for job_id, is_whole, num_bytes in self.blocks.drain_finished():
            loaded = self._loads.pop(job_id, [])
            if not is_whole:
                self.bad_jobs += 1
                self.bad_blocks.update(loaded)
                _log.warning("kvx computes %d blocks anew: host memory has changed", len(loaded))
            seconds = time.perf_counter() - self._started.pop(job_id)
            # Bad blocks are reported apart: in vLLM's connector no job fails.
            results.append(TransferResult(job_id, True, num_bytes, seconds))
        return results

    def wait(self, job_ids):
        self.blocks.wait_for_all()


class KvxOffloadingSpec(OffloadingSpec):
    """Extra config: tiers, or cpu_bytes_to_use, of all workers of an engine together.

    Raises kvx.Error: fewer bytes than a block has, or both; kvx.UnsupportedError: pipeline
    parallelism, chunks of several blocks, several tiers, or a store among them.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {name: OffloadingCounterMetadata(text) for name, text in METRICS.items()}

    def __init__(self, config):
        super().__init__(config)
        if config.parallel.pp_size != 1 or self.blocks_per_chunk != 1:
            raise UnsupportedError(
                f"pipeline_parallel_size is {config.parallel.pp_size}, in chunks of "
                f"{self.blocks_per_chunk} blocks; kvx's host memory takes all layers, block by block"
            )
        name, wanted, self.folder = _tier_of(self.extra_config)
        block = config.worker_kv_bytes_per_block * config.parallel.world_size
        if wanted < block:
            raise Error(f"{name} is {wanted}; expected at least a block's {block}")
        self.num_slots = wanted // block

    def get_manager(self):
        return KvxOffloadingManager(self.num_slots)

    def get_worker(self, kv_caches):
        return KvxOffloadingWorker(kv_caches, self.num_slots, self.folder)


def _tier_of(extra_config):
    """What says how many bytes, how many, and the folder that they lie in ("": memory)."""
    in_memory = int(extra_config.get("cpu_bytes_to_use") or 0)
    text = extra_config.get("tiers") or ""
    if not text:
        return "cpu_bytes_to_use", in_memory, ""
    if in_memory:
        raise Error(f"cpu_bytes_to_use is {in_memory} and tiers {text!r}; expected one of them")
    tiers = _core.parse_tiers(text)
    if len(tiers) != 1 or tiers[0][0] not in ("host", "disk"):
        raise UnsupportedError(
            f"tiers is {text!r}; vLLM's offloading takes one tier, as host(8GiB) or "
            f"disk(/folder, 200GiB)"
        )
    name, num_bytes, folder = tiers[0]
    return f"the budget of {name}(...)", num_bytes, folder


class KvxOffloadingConnector(OffloadingConnector):
    """vLLM's own, which with this also reports blocks that came back changed.

    Without ``"kv_load_failure_policy": "recompute"`` their requests fail.
    """

    def get_block_ids_with_load_errors(self):
        worker = self.connector_worker.worker
        bad, worker.bad_blocks = worker.bad_blocks, set()
        return bad

    def update_connector_output(self, connector_output):
        """All loads that are under way when one is bad are forgotten: some worker may have ended
        its part of that one steps before the others do."""
        if connector_output.invalid_block_ids:
            self.scheduler.manager.count("bad", len(connector_output.invalid_block_ids))
            self.scheduler.manager.doubt_loads()
        super().update_connector_output(connector_output)
