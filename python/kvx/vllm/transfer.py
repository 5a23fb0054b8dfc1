"""A KV connector from prefill to decode: one engine computes a prompt, another goes on from its
blocks, as the packed bytes that they are, layer by layer while the prompt is still computed.

    vllm serve MODEL --attention-backend CUSTOM --kv-transfer-config '{
        "kv_connector": "KvxTransferConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_connector_extra_config": {"endpoint": "tcp://127.0.0.1:5570"}}'

The decoding engine has the role kv_consumer and no endpoint. What a proxy does is vLLM's usual
course: it sends the prompt to the producer with ``"kv_transfer_params": {"do_remote_decode":
true}`` and one token to generate, and hands the ``kv_transfer_params`` of the answer to the
consumer.

    producer: layer ──► pages ──► files in shared memory, a record a layer ──► FolderServer
              of a step                                                        (a worker each)
    consumer: fetch_layers ──► files in shared memory ──► pages ──► step

Blocks are layer files (docs/layer-file.md), and whatever came is checked before a token is counted
on. A block that does not come is computed. A worker of the consumer takes the KV heads that it has
from those workers of the producer that have them, so tensor parallelism may differ.
"""

import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvx import _core
from kvx.errors import Error, InternalError, UnsupportedError
from kvx.vllm.connector import KvxFileConnector, WorkersFiles, fingerprint_of
from kvx.vllm.cores import new_threads_on_any_core
from kvx.vllm.layer_writer import LayerWriter
from kvx.vllm.shared_folder import SharedFolder

_log = init_logger("vllm.kvx")
_SHARED_MEMORY = Path("/dev/shm")
_FETCHES_AT_ONCE = 4
_TIMEOUT_MS = 30000  # of a producer that does not answer
_STEPS_IN_FLIGHT = 3  # vLLM schedules a step while earlier ones still load


@dataclass(eq=False)
class _Fetch:
    """A request's blocks on their way."""

    names: list[str]  # of files that are kept for it
    under_way: list[Future]  # a part each


def endpoints_of(endpoint, num_workers):
    """The endpoint of each worker: the ports from the first one's on."""
    address, _, port = endpoint.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or int(port) == 0:
        raise Error(f"endpoint is '{endpoint}'; expected the first worker's, as tcp://ADDRESS:PORT")
    return [f"{address}:{int(port) + worker}" for worker in range(num_workers)]


def heads_of_worker(worker, num_workers, num_heads):
    """range of a model's KV heads that vLLM gives a tensor-parallel worker. Raises
    kvx.UnsupportedError where it cannot divide them."""
    if num_heads % num_workers == 0:
        count = num_heads // num_workers
        return range(worker * count, (worker + 1) * count)
    if num_workers % num_heads == 0:  # several workers have the same one
        head = worker // (num_workers // num_heads)
        return range(head, head + 1)
    raise UnsupportedError(f"{num_heads} KV heads cannot lie on {num_workers} workers")


@dataclass(frozen=True)
class Slice:
    """KV heads [first, end) of the model that a worker of the producer has and one of the consumer
    wants. owned: all that the producer's worker has."""

    producer: int
    first: int
    end: int
    owned: range

    @property
    def heads(self):
        """As _core.fetch_layers takes them; empty: the worker's whole pages."""
        if (self.first, self.end) == (self.owned.start, self.owned.stop):
            return []
        return [self.first - self.owned.start, self.end - self.owned.start, len(self.owned)]


def slices_of(worker, num_workers, num_producers, num_heads):
    """The slices that make up a worker's pages, by head. Raises kvx.UnsupportedError."""
    wanted = heads_of_worker(worker, num_workers, num_heads)
    if num_producers == num_workers:
        return [Slice(worker, wanted.start, wanted.stop, wanted)]
    slices, head = [], wanted.start
    for producer in range(num_producers):
        owned = heads_of_worker(producer, num_producers, num_heads)
        if head in owned and head < wanted.stop:
            end = min(owned.stop, wanted.stop)
            slices.append(Slice(producer, head, end, owned))
            head = end
    return slices


class KvxTransferConnector(KvxFileConnector):
    """Extra config of a producer: endpoint, whose port and the next ones its workers bind, and
    keep_seconds, after which nobody wants a block any more (300). Of a consumer: wait_seconds for
    layers that the producer has not computed yet (5).

    ``counts`` are KvxFileConnector's, and ``fetched``: blocks that came. ``fetched_bytes``, of the
    scheduler: what came over the endpoints.

    Raises kvx.Error: an option that cannot be; and what KvxFileConnector raises.
    """

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config, role, kv_cache_config):
        transfer = vllm_config.kv_transfer_config
        options = transfer.kv_connector_extra_config
        self._is_producer, self._is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        num_workers = vllm_config.parallel_config.world_size
        self._endpoints = []
        if self._is_producer:
            self._endpoints = endpoints_of(options.get("endpoint", ""), num_workers)
        self._keep_seconds = _seconds(options, "keep_seconds", 300)
        self._wait_seconds = _seconds(options, "wait_seconds", 5)
        # of this engine alone; its processes share it
        self._shared = SharedFolder(_SHARED_MEMORY / f"kvx-{transfer.engine_id}")
        self._config = vllm_config
        model = vllm_config.model_config
        self._num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
        super().__init__(vllm_config, role, kv_cache_config)
        self._page_bytes = []  # of kvx's pages, a layer each; vLLM's may have some bytes more
        self._slices: dict[tuple[int, int], list[_SliceFiles]] = {}
        self.fetched_bytes = 0
        # consumer's scheduler
        self._fetches: dict[str, _Fetch] = {}  # by request
        self._orphans: list[_Fetch] = []  # whose requests ended before them
        self._warned = set()  # requests whose blocks cannot be had
        self._users = Counter()  # of files, by name
        self._needed = deque([[] for _ in range(_STEPS_IN_FLIGHT)])  # names, by step
        self._threads = None
        if role == KVConnectorRole.SCHEDULER and self._is_consumer:
            self._threads = ThreadPoolExecutor(_FETCHES_AT_ONCE, "kvx fetch")
        # producer's worker
        self._begun = None  # the step whose saves have begun
        self._server = None
        self._is_over = threading.Event()

    def _path(self, transfer_config):
        return self._shared.path

    def _new_files(self, worker, zstd_level):
        """What a producer's worker offers. zstd is not for the wire: records lie where they lie."""
        num_workers = self._config.parallel_config.world_size
        heads = heads_of_worker(worker, num_workers, self._num_heads)
        return WorkersFiles(
            self.root / f"out-{worker}", self._fingerprint(heads), self.block_size, 0
        )

    def _fingerprint(self, heads):
        named = f"{heads.start} to {heads.stop} of {self._num_heads}"
        return fingerprint_of(self._config, self.groups, heads=named)

    # ---- the producer

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        if not self._is_producer or self._server is not None:
            return
        with new_threads_on_any_core():
            endpoint = self._endpoints[self.workers.index(self.files)]
            self._server = _core.FolderServer(endpoint, str(self.files.folder))
            threading.Thread(target=self._forget_old, name="kvx files", daemon=True).start()
        _log.info("kvx offers blocks at %s", self._server.endpoint)

    def _new_writer(self, pages):
        self._page_bytes = [
            self._context[name].impl.new_layer(self.block_size).page_bytes
            for group in self.groups
            for name in group.layer_names
        ]
        if not self._is_producer:
            return None
        return LayerWriter(pages, self._page_bytes, self._begin_file, self.files.forget)

    def _begin_file(self, block):
        return self.files.begin(block, self._page_bytes)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """A layer of the step's new blocks leaves while the next one computes."""
        if self._is_producer and layer_name in self._layer_of:
            self._begin_saves()
            self._writer.hand_on(self._layer_of[layer_name])

    def wait_for_save(self):
        if self._is_producer and self._writer is not None:
            self._begin_saves()
            self._writer.end_step()

    def _begin_saves(self):
        """vLLM names a step's blocks to the worker before its first layer."""
        step = self._get_connector_metadata()
        if step is self._begun:
            return
        self._begun = step
        blocks = [
            block
            for block in step.saves
            if not self._writer.is_under_way(block) and not self.files.has(block)
        ]
        self._writer.begin_step(blocks, [self._ids(block) for block in blocks])

    def _forget_old(self):
        while not self._is_over.wait(min(self._keep_seconds / 4, 10)):
            oldest = time.time() - self._keep_seconds
            for file in self.files.folder.glob("*.kvx"):
                try:
                    if file.stat().st_mtime < oldest:
                        file.unlink()
                except FileNotFoundError:
                    pass  # it was damaged, and somebody else removed it

    def served(self):
        """(files, bytes) that this worker has sent."""
        return self._server.counts() if self._server is not None else (0, 0)

    def _add_saves(self, step, running, computed, scheduled):
        if self._is_producer:
            super()._add_saves(step, running, computed, scheduled)

    def _have_all(self, block):
        """What is wanted again stays for as long again."""
        found = super()._have_all(block)
        if found:
            for files in self.workers:
                try:
                    Path(files.path(block)).touch(exist_ok=True)
                except OSError:
                    return False
        return found

    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        self._warned.discard(request.request_id)
        if fetch := self._fetches.pop(request.request_id, None):
            self._orphans.append(fetch)
        params = request.kv_transfer_params or {}
        if not self._is_producer or not params.get("do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "kvx_endpoints": self._endpoints}

    # ---- the consumer's scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """None while the request's blocks are on their way."""
        if not self._is_consumer or not self._wanted_endpoints(request):
            return 0, False
        if not self._has_fetched(request, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _has_fetched(self, request, num_computed_tokens):
        if request.request_id not in self._fetches:
            endpoints = self._wanted_endpoints(request)
            self._check_hashes(request)
            first = num_computed_tokens // self.block_size
            last = (request.num_tokens - 1) // self.block_size
            names = [bytes(name).hex() for name in request.block_hashes[first:last]]
            self._users.update(names)
            with new_threads_on_any_core():
                under_way = [
                    self._threads.submit(self._fetch, endpoints, names, files)
                    for files in self._all_slices(len(endpoints))
                ]
            self._fetches[request.request_id] = _Fetch(names, under_way)
        fetch = self._fetches[request.request_id]
        # An engine without other requests would look again at once, and again.
        if wait(fetch.under_way, timeout=0 if self._running else 0.005).not_done:
            return False
        for one in fetch.under_way:
            files, num_bytes = one.result()
            self.counts["fetched"] += files
            self.fetched_bytes += num_bytes
        fetch.under_way = []
        return True

    def _wanted_endpoints(self, request):
        """A request says where its blocks are, and nobody has checked what it says."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return []
        endpoints = params.get("kvx_endpoints")
        is_list = isinstance(endpoints, list) and all(isinstance(one, str) for one in endpoints)
        problem = self._problem_of(len(endpoints)) if is_list else "it is no list of endpoints"
        if not problem:
            return endpoints
        if request.request_id not in self._warned:
            self._warned.add(request.request_id)
            _log.warning(
                "kvx computes a prompt itself: kvx_endpoints is %s (%s); expected the endpoints "
                "of the producer's workers, as its answer has them",
                endpoints,
                problem,
            )
        return []

    def _problem_of(self, num_producers):
        """Why no engine of so many workers can hand on blocks to this one; "" where it can."""
        if num_producers == len(self.workers):
            return ""
        if num_producers < 1:
            return "it names no worker"
        own = heads_of_worker(0, len(self.workers), self._num_heads)
        for group in self.groups:
            for heads in _num_heads_of(group.kv_cache_spec):
                if heads != len(own):
                    return (
                        f"a layer has {heads} KV heads a worker and others {len(own)}, so "
                        f"tensor-parallel engines need {len(self.workers)} workers as this one"
                    )
        try:
            heads_of_worker(0, num_producers, self._num_heads)
        except UnsupportedError as error:
            return str(error)
        return ""

    def _fetch(self, endpoints, names, files):
        """(files, bytes) that came. In a thread; what does not come is a miss."""
        try:
            num_files, num_bytes, problem = _core.fetch_layers(
                endpoints[files.slice.producer],
                names,
                str(files.folder),
                files.fingerprint_there,
                _TIMEOUT_MS,
                round(self._wait_seconds * 1000),
                files.slice.heads,
                files.fingerprint,
            )
        except (Error, InternalError) as error:
            num_files, num_bytes, problem = 0, 0, str(error)
        if problem:
            _log.warning("kvx computes a prompt itself: %s", problem)
        return num_files, num_bytes

    def _slices_of(self, worker, num_producers):
        """Files of the slices that make up a worker's pages."""
        key = worker, num_producers
        if key not in self._slices:
            own = heads_of_worker(worker, len(self.workers), self._num_heads)
            self._slices[key] = [
                _SliceFiles(self, one, worker, own.start)
                for one in slices_of(worker, len(self.workers), num_producers, self._num_heads)
            ]
        return self._slices[key]

    def _all_slices(self, num_producers):
        return [
            files
            for worker in range(len(self.workers))
            for files in self._slices_of(worker, num_producers)
        ]

    def _block(self, request, index, page_ids):
        block = super()._block(request, index, page_ids)
        if self._is_consumer and (endpoints := self._wanted_endpoints(request)):
            return replace(block, num_producers=len(endpoints))
        return block

    def _is_there(self, request, index):
        """Whether all slices of a block have come, whole."""
        block = self._block(request, index, [])
        for files in self._all_slices(block.num_producers):
            if not os.path.exists(files.path(block)):
                self.counts["missed"] += 1
                return False
            if not self._is_whole(files, block):
                return False
        self.counts["found"] += 1
        return True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if fetch := self._fetches.get(request.request_id):
            self._needed[-1] += fetch.names
            fetch.names = []

    def build_connector_meta(self, scheduler_output):
        self._release(self._needed.popleft())
        self._needed.append([])
        ended = [fetch for fetch in self._orphans if not wait(fetch.under_way, timeout=0).not_done]
        for fetch in ended:
            self._release(fetch.names)
            self._orphans.remove(fetch)
        return super().build_connector_meta(scheduler_output)

    def _release(self, names):
        """Files that no request needs any more go."""
        self._users.subtract(names)
        for name in set(names):
            if self._users[name] > 0:
                continue
            del self._users[name]
            for slices in self._slices.values():
                for files in slices:
                    (files.folder / f"{name}.kvx").unlink(missing_ok=True)

    # ---- the consumer's worker

    def _parts(self, block):
        """A slice's file has its heads' bytes of each page."""
        worker = self.workers.index(self.files)
        num_heads = len(heads_of_worker(worker, len(self.workers), self._num_heads))
        parts = []
        for files in self._slices_of(worker, block.num_producers):
            columns = []
            for page_bytes in self._page_bytes:
                head_bytes = page_bytes // num_heads
                first = files.first_head * head_bytes
                last = first + len(files.heads) * head_bytes
                columns.append((first, page_bytes if len(files.heads) == num_heads else last))
            parts.append((files.open(block), columns))
        return parts

    # ---- both

    def shutdown(self):
        super().shutdown()
        self._is_over.set()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._shared.delete()


class _SliceFiles(WorkersFiles):
    """A consumer's files with a slice of a worker's pages."""

    def __init__(self, connector, one, worker, first_head):
        self.slice = one
        self.heads = range(one.first, one.end)
        self.first_head = one.first - first_head  # in the worker's pages
        self.fingerprint = connector._fingerprint(self.heads)
        self.fingerprint_there = connector._fingerprint(one.owned)
        root = connector.root / f"in-{worker}-{one.producer}"
        super().__init__(root, self.fingerprint, connector.block_size, 0)


def _num_heads_of(spec):
    layers = getattr(spec, "kv_cache_specs", None)
    return {one.num_kv_heads for one in (layers.values() if layers else [spec])}


def _seconds(options, name, default):
    seconds = options.get(name, default)
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= 86400:
        raise Error(f"{name} is {seconds}; expected 0 to 86400 seconds")
    return seconds


__all__ = ["KvxTransferConnector", "endpoints_of", "heads_of_worker", "slices_of"]
