"""Stores that engines share (folder, redis, store), behind the tiers of vLLM's offloading.

    scheduler: lookup ──► StoreLookups ──► exists of every worker's record, in a thread
    worker:    stored in a tier ──► StoreLink.put ──► a record
               load ──► StoreLink.fetch ──► a slot of the first tier ──► vLLM's pages

A record holds a worker's pages of a block in one group of layers (docs/store-record.md); its name is
vLLM's hash, and its scope hashes all else that decides the bytes. What a store answers is trusted by
nobody: a record that is not the one asked for is a bad block.
"""

import importlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from kvx import _core
from kvx.errors import Error, InternalError
from kvx.stores import register_store
from kvx.vllm.cores import new_threads_on_any_core

_log = init_logger("vllm.kvx")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0  # seconds after a failed call
_KEPT_SECONDS = 30.0  # that a store has a block
_KEPT_MISS_SECONDS = 2.0  # that it has none, once somebody has heard it
_DISTRUSTED_SECONDS = 60.0  # a block whose record was bad
_MOST_ANSWERS = 1 << 16
_MOST_AT_ONCE = 8  # records
_MOST_WAITING_BYTES = 64 << 20  # for stores that are slower than the engine


_made = {}  # name: what the store of this process was made of
_making = threading.Lock()


def make_stores(wanted, stores):
    """Registers what ``store(NAME)`` of the tiers names. vLLM's scheduler and its workers are
    processes of their own, so each calls what makes its store.

    wanted: the names in the tiers' text. stores: by name ``"module:function"``, or a dict of it as
    ``make`` and of the function's keywords as ``options``. A name without an entry has to be
    registered in this process already. Raises kvx.Error.
    """
    if not isinstance(stores, dict):
        raise Error(f"stores is {stores!r}; expected a dict, a name's 'module:function' each")
    if unused := sorted(set(stores) - set(wanted)):
        raise Error(f"stores has {unused}; expected names that tiers has as store(NAME)")
    with _making:
        for name, recipe in stores.items():
            function, options = _function_and_options(name, recipe)
            if name not in _made:
                register_store(name, _imported(name, function)(**options))
                _made[name] = recipe
            elif _made[name] != recipe:
                raise Error(
                    f"stores[{name!r}] is {recipe!r}; this process has it as {_made[name]!r} "
                    f"(expected one of the two, or another name)"
                )
    registered = _core.registered_stores()
    for name in wanted:
        if name not in registered:
            raise Error(
                f"tiers has store({name}), which nobody has registered in this process; vLLM's "
                f"scheduler and workers are processes of their own, expected "
                f'"stores": {{"{name}": "module:function"}} in kv_connector_extra_config, a function '
                f"that returns the store and that each of them calls"
            )


def _function_and_options(name, recipe):
    function, options = recipe, {}
    if isinstance(recipe, dict):
        function, options = recipe.get("make"), recipe.get("options", {})
        is_known = set(recipe) <= {"make", "options"} and isinstance(options, dict)
    else:
        is_known = True
    if not is_known or not isinstance(function, str) or function.count(":") != 1:
        raise Error(
            f"stores[{name!r}] is {recipe!r}; expected 'module:function', or a dict of make, such a "
            f"text, and options, the function's keywords"
        )
    return function, options


def _imported(name, function):
    module, _, attribute = function.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Error(f"stores[{name!r}] is {function!r}, which cannot be had: {error}") from error


@dataclass(frozen=True)
class StoreTiers:
    """The stores of a chain of tiers. indexes: their places in the text; labels: of metrics."""

    text: str
    indexes: tuple[int, ...]
    labels: tuple[str, ...]
    max_bytes: int  # of a worker's block in one group

    def open(self, fingerprint):
        """Raises kvx.Error: a URL, folder or variable that cannot be."""
        return [_core.BlockStore(self.text, i, fingerprint, self.max_bytes) for i in self.indexes]


def _named(keys):
    """(vLLM's hashes, groups of layers) of offload keys."""
    return [bytes(get_offload_block_hash(key)) for key in keys], [
        get_offload_group_idx(key) for key in keys
    ]


class _Patience:
    """A store that fails is left alone, for longer from failure to failure."""

    def __init__(self, label):
        self._label = label
        self._pause = _SHORTEST_PAUSE
        self._until = 0.0

    def is_over(self):
        return time.monotonic() >= self._until

    def worked(self):
        self._pause = _SHORTEST_PAUSE

    def failed(self, error):
        _log.warning("kvx leaves the store %s alone for %.1f s: %s", self._label, self._pause, error)
        self._until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class StoreLookups:
    """Which blocks stores have. A thread asks, so no step waits for a store.

    tiers: StoreTiers. fingerprints: of all workers; a block counts when all have a record of it.
    """

    def __init__(self, tiers, fingerprints):
        by_worker = [tiers.open(fingerprint) for fingerprint in fingerprints]
        self.labels = tiers.labels
        self._stores = list(zip(*by_worker))  # of each tier, a worker each
        self._patience = [_Patience(label) for label in tiers.labels]
        self._timeout = max(store.timeout_ms for store in by_worker[0]) / 1000
        self._changed = threading.Condition()
        # key: (the store's place or None, until when it holds; None: nobody has heard it)
        self._answers = {}
        self._asked = {}  # key: since when
        self._is_over = False
        with new_threads_on_any_core():
            self._thread = threading.Thread(target=self._ask_all, name="kvx lookups", daemon=True)
            self._thread.start()

    def find(self, key):
        """(is_known, the place of the first store that has the block or None). What is not known
        is asked, and what has not been answered within the stores' timeout is not there."""
        now = time.monotonic()
        with self._changed:
            place, until = self._answers.get(key, (None, 0.0))
            if until is None:
                until = now + _KEPT_MISS_SECONDS
                self._answers[key] = place, until
            if now < until:
                return True, place
            since = self._asked.setdefault(key, now)
            if since == now:
                self._changed.notify()
            return now - since > self._timeout, None

    def place_of(self, key):
        """Of a block that was found a moment ago."""
        with self._changed:
            place, _ = self._answers.get(key, (None, 0.0))
        return 0 if place is None else place

    def is_stored(self, key):
        """A block was stored here, so the stores will have it; whether they do is asked anew."""
        with self._changed:
            if self._answers.get(key, (0, 0.0))[0] is None:
                del self._answers[key]

    def distrust(self, key):
        """A block's record was bad, or there was no room for it: it is computed."""
        with self._changed:
            self._answers[key] = None, time.monotonic() + _DISTRUSTED_SECONDS

    def close(self):
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _ask_all(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._is_over)
                if self._is_over:
                    return
                keys = list(self._asked)
            places = self._ask(keys)
            with self._changed:
                if len(self._answers) > _MOST_ANSWERS:
                    self._answers.clear()
                until = time.monotonic() + _KEPT_SECONDS
                for key in keys:
                    del self._asked[key]
                    place = places.get(key)
                    self._answers[key] = place, None if place is None else until

    def _ask(self, keys):
        """The place of the first store that has each block."""
        places = {}
        for place, (workers, patience) in enumerate(zip(self._stores, self._patience)):
            left = [key for key in keys if key not in places]
            if not left or not patience.is_over():
                continue
            try:
                for store in workers:
                    has = store.exists(*_named(left)) if left else []
                    left = [key for key, is_there in zip(left, has) if is_there]
                patience.worked()
            except (Error, InternalError) as error:
                patience.failed(error)
                continue
            places.update((key, place) for key in left)
        return places


class StoreLink:
    """A worker's way to the stores. counts: blocks that were put, unsent (the store was slow or
    failed), fetched, missing and bad.

    tiers: StoreTiers. fingerprint: of the worker's pages.
    """

    def __init__(self, tiers, fingerprint):
        self._stores = tiers.open(fingerprint)
        self._patience = [_Patience(label) for label in tiers.labels]
        self.counts = Counter()
        self._lock = threading.Lock()  # guards counts and these two
        self._waiting_bytes = [0] * len(self._stores)
        self._bad = set()  # names of records that are to be replaced
        with new_threads_on_any_core():
            self._putters = [ThreadPoolExecutor(1, "kvx put") for _ in self._stores]
            self._fetchers = ThreadPoolExecutor(2, "kvx get")
            for pool in [*self._putters, self._fetchers]:
                pool.submit(int).result()  # starts a thread

    def _count(self, what, number=1):
        with self._lock:
            self.counts[what] += number

    # ---- put

    def put(self, blocks):
        """blocks: (key, bytes). Does not wait; what a slow store has no room for is left out."""
        num_bytes = sum(len(payload) for _, payload in blocks)
        for place, putter in enumerate(self._putters):
            with self._lock:
                has_room = self._waiting_bytes[place] + num_bytes <= _MOST_WAITING_BYTES
                if has_room or self._waiting_bytes[place] == 0:
                    self._waiting_bytes[place] += num_bytes
                else:
                    self.counts["unsent"] += len(blocks)
                    continue
            putter.submit(self._put, place, blocks, num_bytes)

    def _put(self, place, blocks, num_bytes):
        num_put = 0
        try:
            if self._patience[place].is_over():
                num_put = self._put_what_is_not_there(self._stores[place], blocks)
                self._patience[place].worked()
        except (Error, InternalError) as error:
            self._patience[place].failed(error)
        except Exception:
            _log.exception("kvx could not put blocks into a store")
        with self._lock:
            self._waiting_bytes[place] -= num_bytes
            self.counts["put"] += num_put
            self.counts["unsent"] += len(blocks) - num_put

    def _put_what_is_not_there(self, store, blocks):
        names, groups = _named([key for key, _ in blocks])
        has = store.exists(names, groups)
        with self._lock:
            has = [is_there and key not in self._bad for is_there, (key, _) in zip(has, blocks)]
        wanted = [i for i, is_there in enumerate(has) if not is_there]
        num_put = len(blocks) - len(wanted)
        for first in range(0, len(wanted), _MOST_AT_ONCE):
            some = wanted[first : first + _MOST_AT_ONCE]
            stored = store.put(
                [names[i] for i in some], [groups[i] for i in some], [blocks[i][1] for i in some]
            )
            num_put += sum(stored)
            with self._lock:
                self._bad -= {blocks[i][0] for i, is_stored in zip(some, stored) if is_stored}
        return num_put

    # ---- fetch

    def fetch(self, blocks, after, write):
        """blocks: (key, the store's place, bytes of it); after: Futures of moves that make room.
        write(i, bytes) puts the i-th one where it belongs, and says whether it could. The Future's
        result: whether all are there."""
        return self._fetchers.submit(self._fetch, blocks, after, write)

    def _fetch(self, blocks, after, write):
        for moves in after:
            moves.result()
        num_there = 0
        for place, store in enumerate(self._stores):
            wanted = [i for i, (_, its_place, _) in enumerate(blocks) if its_place == place]
            for first in range(0, len(wanted), _MOST_AT_ONCE):
                some = wanted[first : first + _MOST_AT_ONCE]
                num_there += self._fetch_some(store, place, blocks, some, write)
        return num_there == len(blocks)

    def _fetch_some(self, store, place, blocks, some, write):
        names, groups = _named([blocks[i][0] for i in some])
        if not self._patience[place].is_over():
            self._count("missing", len(some))
            return 0
        try:
            found = store.get(names, groups, [blocks[i][2] for i in some])
        except (Error, InternalError) as error:
            self._patience[place].failed(error)
            self._count("missing", len(some))
            return 0
        num_there = 0
        for i, what in zip(some, found):
            if isinstance(what, bytes) and write(i, what):
                num_there += 1
                continue
            if isinstance(what, str):
                _log.warning("kvx computes a block anew: its record in a store: %s", what)
                with self._lock:
                    self._bad.add(blocks[i][0])
            self._count("bad" if isinstance(what, str) else "missing")
        self._count("fetched", num_there)
        return num_there

    def flush(self):
        """Waits until all that was to be put is put."""
        for putter in self._putters:
            putter.submit(int).result()

    def close(self):
        for pool in [*self._putters, self._fetchers]:
            pool.shutdown()


__all__ = ["StoreLink", "StoreLookups", "StoreTiers", "make_stores"]
