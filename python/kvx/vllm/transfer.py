"""A KV connector from prefill to decode: one engine computes a prompt, another goes on from its
blocks, as the packed bytes that they are.

    vllm serve MODEL --attention-backend CUSTOM --kv-transfer-config '{
        "kv_connector": "KvxTransferConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_connector_extra_config": {"endpoint": "tcp://127.0.0.1:5570"}}'

The decoding engine has the role kv_consumer and no endpoint. What a proxy does is vLLM's usual
course: it sends the prompt to the producer with ``"kv_transfer_params": {"do_remote_decode":
true}`` and one token to generate, and hands the ``kv_transfer_params`` of the answer to the
consumer.

    producer: step ──► pages ──► files in shared memory ──► FolderServer   (a worker each)
    consumer: fetch_files ──► files in shared memory ──► pages ──► step

Blocks are files as KvxFileConnector's, so whatever came is checked before a token is counted on.
A block that does not come is computed.
"""

import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvx import _core
from kvx.errors import Error
from kvx.vllm.connector import KvxFileConnector
from kvx.vllm.cores import new_threads_on_any_core
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
    under_way: list[Future]  # a worker each


def endpoints_of(endpoint, num_workers):
    """The endpoint of each worker: the ports from the first one's on."""
    address, _, port = endpoint.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or int(port) == 0:
        raise Error(f"endpoint is '{endpoint}'; expected the first worker's, as tcp://ADDRESS:PORT")
    return [f"{address}:{int(port) + worker}" for worker in range(num_workers)]


class KvxTransferConnector(KvxFileConnector):
    """Extra config of a producer: endpoint, whose port and the next ones its workers bind, and
    keep_seconds, after which nobody wants a block any more (300). Of a consumer: wait_seconds for
    blocks that the producer has not computed yet (5).

    ``counts`` are KvxFileConnector's, and ``fetched``: blocks that came. ``fetched_bytes``, of the
    scheduler: what came over the endpoints.

    Raises kvx.Error: an option that cannot be; and what KvxFileConnector raises.
    """

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config, role, kv_cache_config):
        transfer = vllm_config.kv_transfer_config
        options = transfer.kv_connector_extra_config
        self._is_producer, self._is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        self._endpoints = []
        if self._is_producer:
            num_workers = vllm_config.parallel_config.world_size
            self._endpoints = endpoints_of(options.get("endpoint", ""), num_workers)
        self._keep_seconds = _seconds(options, "keep_seconds", 300)
        self._wait_seconds = _seconds(options, "wait_seconds", 5)
        # of this engine alone; its processes share it
        self._shared = SharedFolder(_SHARED_MEMORY / f"kvx-{transfer.engine_id}")
        super().__init__(vllm_config, role, kv_cache_config)
        self.fetched_bytes = 0
        # consumer's scheduler
        self._fetches: dict[str, _Fetch] = {}  # by request
        self._orphans: list[_Fetch] = []  # whose requests ended before them
        self._users = Counter()  # of files, by name
        self._loading = deque([[] for _ in range(_STEPS_IN_FLIGHT)])  # names, by step
        self._threads = None
        if role == KVConnectorRole.SCHEDULER and self._is_consumer:
            self._threads = ThreadPoolExecutor(_FETCHES_AT_ONCE, "kvx fetch")
        # producer's worker
        self._server = None
        self._is_over = threading.Event()

    def _path(self, transfer_config):
        return self._shared.path

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
        if found and self._is_producer:
            for files in self.workers:
                try:
                    Path(files.path(block)).touch(exist_ok=True)
                except OSError:
                    return False
        return found

    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        if fetch := self._fetches.pop(request.request_id, None):
            self._orphans.append(fetch)
        params = request.kv_transfer_params or {}
        if not self._is_producer or not params.get("do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "kvx_endpoints": self._endpoints}

    # ---- the consumer

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """None while the request's blocks are on their way."""
        if self._is_consumer and not self._has_fetched(request, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _has_fetched(self, request, num_computed_tokens):
        endpoints = self._wanted_endpoints(request)
        if not endpoints:
            return True
        if request.request_id not in self._fetches:
            self._check_hashes(request)
            first = num_computed_tokens // self.block_size
            last = (request.num_tokens - 1) // self.block_size
            names = [bytes(name).hex() for name in request.block_hashes[first:last]]
            self._users.update(names)
            with new_threads_on_any_core():
                under_way = [
                    self._threads.submit(self._fetch, endpoint, names, str(files.folder))
                    for endpoint, files in zip(endpoints, self.workers)
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
        if is_list and len(endpoints) == len(self.workers):
            return endpoints
        _log.warning(
            "kvx computes a prompt itself: kvx_endpoints is %s; expected the endpoints of %d "
            "workers, as the producer's answer has them",
            endpoints,
            len(self.workers),
        )
        return []

    def _fetch(self, endpoint, names, folder):
        """(files, bytes) that came. In a thread; what does not come is a miss."""
        wait_ms = round(self._wait_seconds * 1000)
        try:
            return _core.fetch_files(endpoint, names, folder, _TIMEOUT_MS, wait_ms)
        except Error as error:
            _log.warning("kvx computes a prompt itself: %s", error)
            return 0, 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if fetch := self._fetches.get(request.request_id):
            self._loading[-1] += fetch.names
            fetch.names = []

    def build_connector_meta(self, scheduler_output):
        self._release(self._loading.popleft())
        self._loading.append([])
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
            for files in self.workers:
                (files.folder / f"{name}.kvx").unlink(missing_ok=True)

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


def _seconds(options, name, default):
    seconds = options.get(name, default)
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= 86400:
        raise Error(f"{name} is {seconds}; expected 0 to 86400 seconds")
    return seconds


__all__ = ["KvxTransferConnector", "endpoints_of"]
