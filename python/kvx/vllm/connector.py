"""A KV connector that keeps vLLM's full blocks in files, where other engines find them.

    --kv-transfer-config '{"kv_connector": "KvxFileConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvx.vllm.connector",
        "kv_connector_extra_config": {"path": "DIR"}}'

Each block is a cache file of its own (docs/cache-file.md) with a page of every layer, as the pages
lie in vLLM's memory. Its name is vLLM's hash of all tokens up to the block's end; its folder is
named by what else decides the bytes (``fingerprint_of``). Nothing in a file is trusted: what is
damaged, or is another block, is a miss, counted and deleted.

vLLM makes one of these in the scheduler, which decides what is loaded and saved, and one in each
worker, which loads and saves. Tensor-parallel workers have heads of their own, so each has a folder
of its own. A block counts as found when all of them have it.
"""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvx import _core
from kvx.errors import Error, InternalError, UnsupportedError
from kvx.vllm.block_writer import BlockWriter
from kvx.vllm.layer_loader import LayerLoader
from kvx.vllm.layer_pages import LayerPages
from kvx.vllm.metrics import FileMetrics, FileStats
from kvx.vllm.recipe import DEFAULT_RECIPE, options_of, recipe_wish

_log = init_logger("vllm.kvx")
_NULL_BLOCK = 0  # stands for a block that left its layer's sliding window


@dataclass(frozen=True)
class Block:
    """A block to load or save. page_ids: its page in each group of layers. num_producers: the
    workers of the engine that it came from, 0 for files of this one's own."""

    name: str
    tokens: list[int]
    page_ids: list[int]
    num_producers: int = 0


@dataclass
class Step(KVConnectorMetadata):
    """What the worker does before a step, and after it."""

    loads: list[Block] = field(default_factory=list)
    saves: list[Block] = field(default_factory=list)


@dataclass
class _Running:
    """A request's blocks, as vLLM names their pages step by step."""

    request: object
    page_ids: list[list[int]] = field(default_factory=list)  # [groups][blocks]
    looked_at: int = 0  # blocks that are saved, or need not be


class WorkersFiles:
    """Files of a worker's pages, in a folder that their fingerprint names."""

    def __init__(self, root, fingerprint, block_size, zstd_level):
        self.folder = Path(root) / hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = _core.BlockFiles(fingerprint, block_size)
        self._zstd_level = zstd_level

    def path(self, block):
        return str(self.folder / f"{block.name}.kvx")

    def has(self, block):
        return os.path.exists(self.path(block))

    def forget(self, block):
        Path(self.path(block)).unlink(missing_ok=True)

    def check(self, block):
        """Reads the whole file. Raises kvx.Error: damaged, or another block."""
        self._files.check(self.path(block), block.name, block.tokens)

    def open(self, block):
        """The block's file, for _core.read_layer. Raises kvx.Error: it is none, or another block."""
        return self._files.open(self.path(block), block.name, block.tokens)

    def begin(self, block, page_bytes):
        """A file whose layers come one after the other (_core.LayerFile)."""
        return self._files.begin(self.path(block), block.name, block.tokens, page_bytes)

    def save(self, block, pages):
        self._files.save(self.path(block), block.name, block.tokens, pages, self._zstd_level)


class KvxFileConnector(KVConnectorBase_V1, SupportsHMA):
    """Extra config: path, a folder (created if missing); zstd_level, 0 for none.

    ``counts`` is what happened to blocks: found, missed, bad (files that failed their checks) in
    the scheduler, loaded, saved, unsaved and bad in a worker. vLLM logs them and exports them to
    Prometheus (kvx.vllm.metrics).

    Raises kvx.UnsupportedError: pipeline parallelism, blocks of several sizes, pages that are not
    kvx's.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.root = Path(self._path(vllm_config.kv_transfer_config))
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise UnsupportedError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; kvx's files hold "
                f"pages of all layers, expected 1"
            )
        self.groups = kv_cache_config.kv_cache_groups
        sizes = {group.kv_cache_spec.block_size for group in self.groups}
        if len(sizes) != 1:
            raise UnsupportedError(f"blocks of {sorted(sizes)} tokens; kvx's files hold one size")
        (self.block_size,) = sizes
        self.windows = [_window_of(group.kv_cache_spec) for group in self.groups]
        zstd_level = int(options.get("zstd_level", 0))
        self._config = vllm_config
        self.workers = [
            self._new_files(worker, zstd_level) for worker in range(parallel.world_size)
        ]
        self.counts = Counter()
        self._reported = Counter()  # of these, what vLLM's metrics have
        self._context = vllm_config.compilation_config.static_forward_context
        # scheduler
        self._found = {}  # request: (first block, number of blocks) that files hold
        self._running: dict[str, _Running] = {}
        self._loads: list[Block] = []
        # worker
        self.files = self.workers[parallel.rank]
        self._layers = []  # (group, pages of all blocks)
        self._writer = None
        self._layer_of = {}  # by name
        self._loader = None
        self._loading = None  # Loads of the step
        self._bad_pages = set()

    def _path(self, transfer_config):
        """The folder of all workers' files."""
        path = transfer_config.kv_connector_extra_config.get("path")
        if not path:
            raise Error("kv_connector_extra_config has no path; expected a folder for the files")
        return path

    def _new_files(self, worker, zstd_level):
        fingerprint = fingerprint_of(self._config, self.groups, worker)
        return WorkersFiles(self.root, fingerprint, self.block_size, zstd_level)

    @property
    def requires_kv_delivery(self):
        return False  # a block that is not saved is a later miss, nothing more

    # ---- vLLM's metrics; the scheduler and each worker report their own counts

    def get_kv_connector_stats(self):
        if self._writer is not None:
            self.counts.update(self._writer.take_outcomes())
        new = self.counts - self._reported
        self._reported = Counter(self.counts)
        return FileStats(data=dict(new)) if new else None

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return FileStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return FileMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """How many tokens after the computed ones are in files; never the last of all."""
        first = num_computed_tokens // self.block_size
        if self._found.get(request.request_id, (None, 0))[0] != first:
            last = (request.num_tokens - 1) // self.block_size
            self._check_hashes(request)
            count = 0
            while first + count < last and self._is_there(request, first + count):
                count += 1
            self._found[request.request_id] = (first, count)
        return self._found[request.request_id][1] * self.block_size, False

    def _check_hashes(self, request):
        expected = request.num_tokens // self.block_size
        if len(request.block_hashes) != expected:
            raise UnsupportedError(
                f"a request of {request.num_tokens} tokens has {len(request.block_hashes)} block "
                f"hashes; kvx's files expect one a block, {expected}"
            )

    def _is_there(self, request, index):
        """A bad file is a miss, and makes room for a good one."""
        block = self._block(request, index, [])
        if not self._have_all(block):
            self.counts["missed"] += 1
            return False
        if not all(self._is_whole(files, block) for files in self.workers):
            return False
        self.counts["found"] += 1
        return True

    def _is_whole(self, files, block):
        try:
            files.check(block)
        except (Error, InternalError) as error:
            self.counts["bad"] += 1
            _log.warning("kvx computes a block anew: %s", error)
            files.forget(block)
            return False
        return True

    def _have_all(self, block):
        return all(files.has(block) for files in self.workers)

    def _block(self, request, index, page_ids):
        tokens = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
        return Block(bytes(request.block_hashes[index]).hex(), list(tokens), page_ids)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """vLLM has pages for the request; some of them are to be loaded."""
        self._running.setdefault(request.request_id, _Running(request))
        if num_external_tokens == 0:
            return
        first, _ = self._found[request.request_id]
        page_ids = blocks.get_block_ids()
        for index in range(first, first + num_external_tokens // self.block_size):
            ids = [group[index] for group in page_ids]
            self._loads.append(self._block(request, index, ids))

    def build_connector_meta(self, scheduler_output):
        """The step's loads, and the blocks that it will have filled."""
        step = Step(loads=self._loads)
        self._loads = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._found.pop(new.req_id, None)
            running = self._running[new.req_id]
            running.page_ids = [list(ids) for ids in new.block_ids]
            self._add_saves(step, running, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            running = self._running[request_id]
            more = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:  # preempted: it has other pages now
                self._found.pop(request_id, None)
                running.page_ids = [list(ids) for ids in more]
            elif more is not None:
                for page_ids, ids in zip(running.page_ids, more):
                    page_ids += ids
            self._add_saves(step, running, cached.num_computed_tokens[i], scheduled[request_id])
        return step

    def _add_saves(self, step, running, computed, scheduled):
        """computed: tokens before the step. Blocks that a sliding window has left are gone."""
        request = running.request
        full = min(
            (computed + scheduled) // self.block_size,
            len(request.block_hashes),  # vLLM has no tokens yet of a step in flight
            *map(len, running.page_ids),
        )
        for index in range(running.looked_at, full):
            ids = [group[index] for group in running.page_ids]
            end = (index + 1) * self.block_size
            is_held = all(not window or end > computed - window + 1 for window in self.windows)
            block = self._block(request, index, ids)
            if is_held and _NULL_BLOCK not in ids and not self._have_all(block):
                step.saves.append(block)
        running.looked_at = max(running.looked_at, full)

    def request_finished(self, request, block_ids):
        """False: vLLM frees the pages; what is saved was saved in its step."""
        self._running.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    # ---- the worker's side

    def register_kv_caches(self, kv_caches):
        """kv_caches: uint8 [blocks, ...] a layer, by name."""
        self._layers = []
        for group, members in enumerate(self.groups):
            for name in members.layer_names:
                if not isinstance(getattr(self._context.get(name), "impl", None), LayerPages):
                    raise UnsupportedError(
                        f"{name} does not keep its pages in kvx's order; KvxFileConnector needs "
                        f"--attention-backend CUSTOM"
                    )
                self._layer_of[name] = len(self._layers)
                self._layers.append((group, kv_caches[name]))
        pages = [pages for _, pages in self._layers]
        if not pages:
            return
        self._writer = self._new_writer(pages)
        self._loader = LayerLoader(pages)

    def _new_writer(self, pages):
        return BlockWriter(pages, self.files.save)

    def flush(self):
        """Waits until every block that was to be saved is in its file."""
        if self._writer is not None:
            self._writer.flush()

    def shutdown(self):
        """Blocks that wait for their files are written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _ids(self, block):
        """The block's page in each layer; None where it is vLLM's null block."""
        ids = [block.page_ids[group] for group, _ in self._layers]
        return [None if i == _NULL_BLOCK else i for i in ids]

    def _parts(self, block):
        """(file, [(first, last)] by layer) of each file that the block's pages come from: the
        columns of a page that it fills."""
        whole = [(0, pages[0].numel()) for _, pages in self._layers]
        return [(self.files.open(block), whole)]

    def start_load_kv(self, forward_context, **kwargs):
        """A thread loads the step's blocks, layer by layer."""
        self._finish_loads()
        blocks, places, parts = [], [], []
        for block in self._get_connector_metadata().loads:
            try:
                parts.append(self._parts(block))
            except (Error, InternalError) as error:  # it was whole when the scheduler looked
                self._is_bad(block, error)
                continue
            blocks.append(block)
            places.append(self._ids(block))
        if not blocks:
            return
        self._loading = self._loader.begin(blocks, places, parts)
        if calls_no_layer(forward_context):
            self._loading.wait(len(self._layers) - 1)

    def _is_bad(self, block, problem):
        self.counts["bad"] += 1
        if len(self.groups) > 1:  # vLLM recovers from this in models of one group alone
            raise Error(str(problem))
        _log.warning("kvx could not load a block: %s", problem)
        self._bad_pages.add(block.page_ids[0])

    def wait_for_layer_load(self, layer_name):
        if self._loading is not None and layer_name in self._layer_of:
            self._loading.wait(self._layer_of[layer_name])
            self._raise_what_vllm_cannot_mend(self._loading)

    def _raise_what_vllm_cannot_mend(self, loads):
        if loads.error is not None:
            raise loads.error
        if loads.problems and len(self.groups) > 1:
            raise Error(next(iter(loads.problems.values())))

    def _finish_loads(self):
        """What became of the last step's blocks."""
        if self._loading is None:
            return
        loads, self._loading = self._loading, None
        loads.wait(len(self._layers) - 1)
        self._raise_what_vllm_cannot_mend(loads)
        for i, problem in sorted(loads.problems.items()):
            self._is_bad(loads.blocks[i], problem)
        self.counts["loaded"] += len(loads.blocks) - len(loads.problems)

    def get_block_ids_with_load_errors(self):
        self._finish_loads()
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Blocks are saved whole, beside the steps after their own."""

    def wait_for_save(self):
        """The pages of the step's new blocks are copied; a thread writes them to files."""
        for block in self._get_connector_metadata().saves:
            # Other workers may lack what this one has.
            if not self._writer.is_under_way(block) and not self.files.has(block):
                self._writer.write(block, self._ids(block))


def calls_no_layer(forward_context):
    """Whether the step is a captured graph, which asks nobody for its layers."""
    return getattr(forward_context, "cudagraph_runtime_mode", None) == CUDAGraphMode.FULL


def _window_of(spec):
    """The sliding window of a group's layers, None for none."""
    layers = getattr(spec, "kv_cache_specs", None)
    specs = layers.values() if layers else [spec]
    windows = [w for w in (getattr(spec, "sliding_window", None) for spec in specs) if w]
    return min(windows, default=None)


def fingerprint_of(vllm_config, groups, worker=0, heads="") -> str:
    """All that decides the bytes of a worker's page beside its tokens, a fact a line. heads: which
    KV heads it has, instead of a worker."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_latent = isinstance(groups[0].kv_cache_spec, MLAAttentionSpec)
    facts = {
        "order": "vllm,latent row" if is_latent else "vllm,head,k,k_scales,v,v_scales",
        "model": model.model,
        "weights": _weights_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "recipe": recipe_wish(vllm_config) or DEFAULT_RECIPE,
        "unit_scales": options_of(vllm_config).get("unit_scales", False),
        "cache_dtype": cache.cache_dtype,
        "skipped_layers": ",".join(cache.kv_cache_dtype_skip_layers or []),
        "block_size": groups[0].kv_cache_spec.block_size,
    }
    if heads:
        facts["kv_heads"] = heads
    else:
        facts["worker"] = f"{worker} of {vllm_config.parallel_config.world_size}"
    if not current_platform.is_cpu():  # a GPU may order codes as its kernels decode them fastest
        capability = current_platform.get_device_capability()
        facts["device"] = f"{current_platform.device_type} {capability.as_version_str()}"
    facts |= {f"group_{i}": ",".join(group.layer_names) for i, group in enumerate(groups)}
    return "".join(f"{name} {value}\n" for name, value in facts.items())


def _weights_of(model):
    """A hub's commit; of a folder, its files' names, sizes and times."""
    folder = Path(model.model)
    if not folder.is_dir():
        return getattr(model.hf_config, "_commit_hash", None) or model.revision
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
