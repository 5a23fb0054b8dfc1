"""An offloading spec for vLLM: host memory and disks keep blocks that leave vLLM's pages, with
checksums.

    --kv-transfer-config '{"kv_connector": "KvxOffloadingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvx.vllm.offloading",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": "host(8GiB), disk(/nvme, 200GiB)",
            "spec_name": "KvxOffloadingSpec", "spec_module_path": "kvx.vllm.offloading"}}'

The manager (offloading_manager.py), in vLLM's scheduler, decides which block lies in which slot. In
the worker (offloading_worker.py) the queues of kvx's host tier, threads beside the engine's, make
the copies, with a checksum a page. A block that comes back changed is counted, forgotten and
computed anew. A GPU's pages are copied on a stream of their own to and from pinned memory.

``tiers`` names the tiers as everywhere in kvx, budgets of all workers of an engine together. vLLM's
own ``cpu_bytes_to_use`` is the same as one ``host``. Blocks are stored in the first tier, and what
it cannot take in the next one; they go down for room, come back from where they lie, and go up to
the first tier then.

With ``"load_by_layer": true`` a step begins when the first layer of its blocks is there, instead of
being scheduled when all are. Blocks that are not in the first tier's memory come as without it.

vLLM logs the manager's counts, exports them to Prometheus (METRICS, TIER_METRICS) and publishes its
events.
"""

from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingSpec,
)
from vllm.v1.request import RequestStatus

from kvx import _core
from kvx.errors import Error, UnsupportedError
from kvx.vllm.connector import calls_no_layer, fingerprint_of
from kvx.vllm.offloading_manager import METRICS, TIER_METRICS, KvxOffloadingManager, Tier
from kvx.vllm.offloading_worker import KvxOffloadingWorker
from kvx.vllm.shared_stores import StoreLink, StoreTiers, make_stores


class KvxOffloadingSpec(OffloadingSpec):
    """Extra config: tiers, or cpu_bytes_to_use, of all workers of an engine together.

    stores: what makes each ``store(NAME)`` of the tiers (make_stores).

    Raises kvx.Error: fewer bytes than a block has, or both, or a store that nobody makes;
    kvx.UnsupportedError: pipeline parallelism, chunks of several blocks, a store in front of other
    tiers.
    """

    fingerprints = ()  # of each worker's pages; KvxOffloadingConnector knows them

    @classmethod
    def build_metric_definitions(cls, extra_config):
        metrics = {name: OffloadingCounterMetadata(text) for name, text in METRICS.items()}
        for name, text in TIER_METRICS.items():
            metrics[name] = OffloadingCounterMetadata(text, ("tier",))
        return metrics

    def __init__(self, config):
        super().__init__(config)
        if config.parallel.pp_size != 1 or self.blocks_per_chunk != 1:
            raise UnsupportedError(
                f"pipeline_parallel_size is {config.parallel.pp_size}, in chunks of "
                f"{self.blocks_per_chunk} blocks; kvx's host memory takes all layers, block by block"
            )
        block = config.worker_kv_bytes_per_block * config.parallel.world_size
        text, tiers, stores, registered = _tiers_of(self.extra_config)
        make_stores(registered, self.extra_config.get("stores") or {})
        self.tiers = []
        for name, num_bytes, folder in tiers:
            if num_bytes < block:
                raise Error(f"{name} is {num_bytes}; expected at least a block's {block}")
            self.tiers.append(Tier(num_bytes // block, folder))
        self.stores = StoreTiers(
            text,
            tuple(place for place, _ in stores),
            tuple(f"{place}:{name}" for place, name in stores),
            config.worker_kv_bytes_per_block,
        )

    def get_manager(self):
        events = self.kv_events_config.enable_kv_cache_events
        return KvxOffloadingManager(self.tiers, events, self.stores)

    def get_worker(self, kv_caches):
        link = None
        if self.stores.indexes:
            if not self.fingerprints:
                raise UnsupportedError(
                    f"tiers is {self.stores.text!r} with vLLM's OffloadingConnector; stores need "
                    f"kvx.vllm.offloading's KvxOffloadingConnector"
                )
            link = StoreLink(self.stores, self.fingerprints[self.config.parallel.rank])
        return KvxOffloadingWorker(kv_caches, self.tiers, link)


def _tiers_of(extra_config):
    """(the text, tiers of this engine, stores, names of registered stores). For each tier what says
    how many bytes, how many, and the folder that they lie in ("": memory); for each store its place
    in the text and its kind."""
    in_memory = int(extra_config.get("cpu_bytes_to_use") or 0)
    text = extra_config.get("tiers") or ""
    if not text:
        return "", [("cpu_bytes_to_use", in_memory, "")], [], []
    if in_memory:
        raise Error(f"cpu_bytes_to_use is {in_memory} and tiers {text!r}; expected one of them")
    tiers = _core.parse_tiers(text)
    names = [name for name, *_ in tiers]
    own = [name for name in names if name in ("host", "disk")]
    if not own or names[: len(own)] != own:
        raise UnsupportedError(
            f"tiers is {text!r}; vLLM's offloading takes host(8GiB) and disk(/folder, 200GiB), one "
            f"of them at least, and folder(...), redis(...) and store(...) behind them"
        )
    return (
        text,
        [(f"the budget of {name}(...)", size, folder) for name, size, folder in tiers[: len(own)]],
        list(enumerate(names))[len(own) :],
        [folder for name, _, folder in tiers if name == "store"],
    )


class KvxOffloadingConnector(OffloadingConnector):
    """vLLM's own, which with this also reports blocks that came back changed, and finds blocks in
    stores that engines share.

    Without ``"kv_load_failure_policy": "recompute"`` requests of changed blocks fail.

    Extra config: load_by_layer. A load by layers is part of its request's step, where vLLM's own
    are over before it. What such a step computes may come from bad blocks, which is known at its
    end: nothing is stored before, and vLLM computes it again.

    Raises kvx.Error: load_by_layer is neither true nor false; kvx.UnsupportedError: it is true and
    the model has several groups of layers.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._loads_by_layer = extra.get("load_by_layer", False)
        if not isinstance(self._loads_by_layer, bool):
            raise Error(f"load_by_layer is {self._loads_by_layer!r}; expected true or false")
        if self._loads_by_layer and len(groups) != 1:  # vLLM mends bad blocks of one group alone
            raise UnsupportedError(
                f"load_by_layer is true and the model has {len(groups)} groups of layers; expected 1"
            )
        self._layer_of = {name: i for i, name in enumerate(groups[0].layer_names)}
        # scheduler
        self._is_by_layer = {}  # request: its next load
        self._layer_jobs = set()  # that have not ended when vLLM was last told
        fingerprints = [
            fingerprint_of(vllm_config, groups, worker)
            for worker in range(vllm_config.parallel_config.world_size)
        ]
        if self.connector_scheduler is not None:
            self.scheduler.manager.use_stores(fingerprints)
            self._build_store_jobs = self.scheduler._build_store_jobs
            self.scheduler._build_store_jobs = self._store_jobs
        if self.connector_worker is not None:
            self.connector_worker.spec.fingerprints = fingerprints

    # ---- the scheduler's side of loads by layer

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        is_by_layer = bool(
            count
            and self._loads_by_layer
            and self._can_load_by_layer(request, num_computed_tokens, num_computed_tokens + count)
        )
        self._is_by_layer[request.request_id] = is_by_layer
        return count, is_async and not is_by_layer

    def _can_load_by_layer(self, request, first, last):
        """first, last: tokens. The step has to have one of its own to compute."""
        (config,) = self.scheduler.config.kv_group_configs
        block = config.tokens_per_chunk
        has_window = config.sliding_window_size_in_chunks is not None
        if has_window or last >= request.num_tokens or last % block:
            return False
        (group,) = self.scheduler._req_status[request.request_id].group_states
        return self.scheduler.manager.are_in_memory(group.offload_keys[first // block : last // block])

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if self._is_by_layer.pop(request.request_id, False) and num_external_tokens:
            self._load_by_layer(request, blocks, num_external_tokens)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _load_by_layer(self, request, blocks, num_tokens):
        """vLLM's own takes blocks that have no hash yet for those to load, and gives the blocks of
        a load that is part of its step their hashes before."""
        scheduler = self.scheduler
        status = scheduler._req_status[request.request_id]
        (config,), (group,) = scheduler.config.kv_group_configs, status.group_states
        block = config.tokens_per_chunk
        first = status.num_locally_computed_tokens // block
        last = first + num_tokens // block
        ids = [page.block_id for page in blocks.blocks[config.group_idx]]
        scheduler._current_batch_allocated_block_ids.update(ids)
        keys = group.offload_keys[first:last]
        group.next_stored_chunk_idx = last
        status.load_key_ranges[:] = [
            (i * block, (i + 1) * block, key) for i, key in enumerate(keys, first)
        ]
        slots = scheduler.manager.prepare_load(keys, status.req_context)
        slots.is_by_layer = True
        pages = GPULoadStoreSpec(ids[first:last], group_sizes=[len(keys)], block_indices=[first])
        job_id = scheduler._generate_job_id()
        scheduler._current_batch_load_jobs[job_id] = TransferJob(request.request_id, slots, pages)
        scheduler._jobs[job_id] = TransferJobStatus(
            request.request_id, scheduler.config.num_workers, set(keys), is_store=False
        )
        status.transfer_jobs.add(job_id)
        if scheduler._chunks_being_loaded is not None:
            scheduler._chunks_being_loaded.update(keys)
        self._layer_jobs.add(job_id)

    def build_connector_meta(self, scheduler_output):
        """vLLM expects that no request has a load under way when it is preempted."""
        self._layer_jobs &= self.scheduler._jobs.keys()
        hidden = []
        for request_id in scheduler_output.preempted_req_ids or ():
            if (status := self.scheduler._req_status.get(request_id)) is not None:
                hidden.append((status.transfer_jobs, status.transfer_jobs & self._layer_jobs))
                status.transfer_jobs -= self._layer_jobs
        meta = super().build_connector_meta(scheduler_output)
        for jobs, those in hidden:
            jobs |= those
        return meta

    def _store_jobs(self, scheduler_output):
        """Blocks that are computed beside a load by layers are stored when it has come whole, a
        step later: any request may read the load's blocks."""
        if not self._layer_jobs:
            return self._build_store_jobs(scheduler_output)
        finished = {
            request_id
            for request_id in scheduler_output.finished_req_ids or ()
            if (status := self.scheduler._req_status.get(request_id)) is not None
            and status.req.status is not RequestStatus.FINISHED_ABORTED
            and not status.transfer_jobs & self._layer_jobs
        }
        computed = replace(scheduler_output, num_scheduled_tokens={}, finished_req_ids=finished)
        return self._build_store_jobs(computed)

    def request_finished(self, request, block_ids):
        self._is_by_layer.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request, block_ids):
        self._is_by_layer.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    # ---- the worker's side

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        num_layers = self.connector_worker.worker.num_layers
        if self._loads_by_layer and num_layers != len(self._layer_of):
            raise UnsupportedError(
                f"load_by_layer is true and vLLM keeps {len(self._layer_of)} layers in {num_layers} "
                f"pages a block; expected a page for each layer"
            )

    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        worker = self.connector_worker.worker
        worker.begin_layers()
        if worker.by_layer and calls_no_layer(forward_context):
            for layer in range(worker.num_layers):
                worker.wait_for_layer(layer)

    def wait_for_layer_load(self, layer_name):
        if layer_name in self._layer_of:
            self.connector_worker.worker.wait_for_layer(self._layer_of[layer_name])

    def get_finished(self, finished_req_ids):
        """vLLM runs requests of loads by layers already, so their ends are nobody's news."""
        loads = self.connector_worker._load_jobs
        running = {loads[job_id] for job_id in self.connector_worker.worker.by_layer}
        sending, receiving = super().get_finished(finished_req_ids)
        return sending, receiving - running

    def get_block_ids_with_load_errors(self):
        worker = self.connector_worker.worker
        bad, worker.bad_blocks = worker.bad_blocks, set()
        return bad

    def update_connector_output(self, connector_output):
        """All loads that are under way when one is bad are forgotten: some worker may have ended
        its part of that one steps before the others do."""
        if connector_output.invalid_block_ids:
            self.scheduler.manager.count("blocks_bad", len(connector_output.invalid_block_ids))
            self.scheduler.manager.doubt_loads()
        super().update_connector_output(connector_output)
