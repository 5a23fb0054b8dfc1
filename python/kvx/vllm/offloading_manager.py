"""Which block of vLLM's lies in which slot of which tier: the part of kvx's offloading that runs in
vLLM's scheduler.

    prepare_store ──► first tier ──► tier below ──► ... ──► evicted
                 └──────────────────────┘  what the first one has no room for
    prepare_load  ◄── the tier that has the block; the block goes up to the first tier
                  ◄── first tier ◄── a store that engines share (shared_stores.py)
"""

import heapq
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate, count

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvx.vllm.shared_stores import StoreLookups

_log = init_logger("vllm.kvx")
_DEFAULT_PRIORITY = 35  # as kvx.Cache.retain has it

# What the manager counts, blocks of one group of layers each.
METRICS = {
    "vllm:kvx_offload_blocks_stored": "Blocks that were copied to the tiers.",
    "vllm:kvx_offload_blocks_loaded": "Blocks that came back from the tiers.",
    "vllm:kvx_offload_blocks_evicted": "Blocks that left the last tier to make room for others.",
    "vllm:kvx_offload_blocks_bad": (
        "Blocks of loads in which a tier's memory had changed; they are computed anew."
    ),
}
# The same by tier, with the label "tier": "0:host", "1:disk".
TIER_METRICS = {
    "vllm:kvx_offload_tier_blocks_stored": "Blocks that came from vLLM's pages.",
    "vllm:kvx_offload_tier_blocks_loaded": "Blocks that went back to vLLM's pages.",
    "vllm:kvx_offload_tier_blocks_moved_down": "Blocks that left for the tier below.",
    "vllm:kvx_offload_tier_blocks_moved_up": "Blocks that left for the first tier, being loaded.",
}


NO_SLOT = -1


class Slots(BlockIDsLoadStoreSpec):
    """Slots of the tiers, one for each block, in the order of the blocks; they are numbered through
    from the first tier on. moves: (from slot, to slot) of blocks that make room or go up, in order.
    fetches: (slot, key, store's place) of blocks that come from a store; NO_SLOT for those that
    find no room. keys: of blocks that go to the stores, too, as many as slots. is_by_layer: a load
    that its step waits for layer by layer.
    """

    is_by_layer = False

    def __init__(self, block_ids, moves=(), fetches=(), keys=()):
        super().__init__(block_ids)
        self.moves = list(moves)
        self.fetches = list(fetches)
        self.keys = list(keys)


@dataclass(frozen=True)
class Tier:
    """folder: "" for memory."""

    num_slots: int
    folder: str = ""

    @property
    def name(self):
        return "disk" if self.folder else "host"

    @property
    def medium(self):
        return Medium.STORAGE if self.folder else Medium.CPU


@dataclass
class _Entry:
    slot: int
    is_ready: bool = False
    is_doubtful: bool = False  # forgotten once it has no readers
    readers: int = 0
    priority: int = _DEFAULT_PRIORITY
    is_pinned: bool = False
    expires: float | None = None  # when priority and pin end
    sessions: set = field(default_factory=set)  # that used it; None: a request without one
    # (tier, slot) that it has left for the first tier; a load still reads it there
    below: tuple | None = None
    fetched_from: str | None = None  # the label of the store that it comes from; not ready


@dataclass(frozen=True)
class _Retention:
    """What a request says of its blocks."""

    priority: int | None = None
    pin: bool = False
    seconds: float | None = None
    session: str | None = None
    ends_session: bool = False

    @property
    def says_how_long(self):
        return self.priority is not None or self.pin or self.seconds is not None


_SAYS_NOTHING = _Retention()
_LEAVES_FIRST = _Retention(priority=-1)
_MOST_SESSION_LETTERS = 256


def _problem_of(said):
    """What is wrong with a request's words; "" for nothing."""
    names = {"priority", "pin", "seconds", "session", "ends_session"}
    if not isinstance(said, dict) or not said or set(said) - names:
        return f"is {said!r}; expected some of {sorted(names)}"
    priority, seconds = said.get("priority", 0), said.get("seconds", 1)
    if type(priority) is not int or not 0 <= priority <= 100:
        return f"priority is {priority!r}; expected 0 to 100"
    if type(seconds) not in (int, float) or not 0.001 <= seconds <= 3e8:
        return f"seconds is {seconds!r}; expected 0.001 to 3e8"
    for name in ("pin", "ends_session"):
        if type(said.get(name, False)) is not bool:
            return f"{name} is {said[name]!r}; expected true or false"
    session = said.get("session")
    is_name = isinstance(session, str) and 1 <= len(session) <= _MOST_SESSION_LETTERS
    if "session" in said and not is_name:
        return f"session is {session!r}; expected 1 to {_MOST_SESSION_LETTERS} letters"
    if said.get("ends_session") and session is None:
        return "ends_session is true without a session"
    return ""


def _retention_of(params):
    """What a request says under "kvx". Nobody has checked it, and a request that errs is served
    like one that says nothing, with a warning."""
    said = (params or {}).get("kvx")
    if said is None:
        return _SAYS_NOTHING
    if problem := _problem_of(said):
        _log.warning(
            "kvx retains a request's blocks like others: kv_transfer_params.kvx %s", problem
        )
        return _SAYS_NOTHING
    return _Retention(**said)


class _TierState:
    """The blocks of one tier, in the order in which they leave it: by priority, and among equals
    the least recently used one first. Pinned ones stay, half of the slots at most."""

    def __init__(self, level, tier, first_slot):
        self.level = level
        self.label = f"{level}:{tier.name}"
        self.medium = tier.medium
        self.entries: dict[bytes, _Entry] = {}
        self._order: dict[int, OrderedDict[bytes, None]] = {}  # by priority; no pinned ones
        self._pinned: set[bytes] = set()
        self._most_pinned = tier.num_slots // 2
        self.free = list(range(first_slot, first_slot + tier.num_slots))

    def add(self, key, entry, is_next=False):
        """is_next: it leaves before all others of its priority."""
        self.entries[key] = entry
        if entry.is_pinned and len(self._pinned) < self._most_pinned:
            self._pinned.add(key)
            return
        keys = self._order.setdefault(entry.priority, OrderedDict())
        keys[key] = None
        keys.move_to_end(key, last=not is_next)

    def pop(self, key):
        entry = self.entries.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
            return entry
        keys = self._order[entry.priority]
        del keys[key]
        if not keys:
            del self._order[entry.priority]
        return entry

    def in_order(self):
        for priority in sorted(self._order):
            yield from self._order[priority]


def _retention(req_context):
    retention = req_context and req_context.get_state(_Retention)
    return retention or _SAYS_NOTHING


class KvxOffloadingManager(OffloadingManager):
    """Decides which block lies in which slot. The block of a tier's lowest priority makes room,
    among equals the least recently used one: it goes to the tier below, and from the last one it is
    gone.

    A request's ``kv_transfer_params`` may say of its blocks, under ``"kvx"``: ``priority`` (0 to
    100, others have 35), ``pin`` (they leave no tier), ``seconds`` (for how long both hold; for
    good without), ``session`` (the conversation that it belongs to) and ``ends_session`` (blocks
    that the session alone used go first). What a later request says of the same blocks counts.

    tiers: list of Tier, the nearest first. sends_events: keeps events for take_events. stores:
    StoreTiers behind them. clock: seconds.
    """

    def __init__(self, tiers, sends_events=False, stores=None, clock=time.monotonic):
        self._config = tiers
        self._clock = clock
        self.stores = stores
        self._lookups = None
        self._sends_events = sends_events
        self._events = []
        self._new_counts = Counter()  # since vLLM last asked
        self._tiers = []
        self.reset_cache()

    def use_stores(self, fingerprints):
        """fingerprints: of each worker's pages. Raises kvx.Error: stores that cannot be opened."""
        if self.stores is not None and self.stores.indexes:
            self._lookups = StoreLookups(self.stores, fingerprints)

    def shutdown(self):
        if self._lookups is not None:
            self._lookups.close()
            self._lookups = None

    def count(self, what, blocks, *labels):
        """what: as METRICS has it, without its prefix."""
        if blocks > 0:
            self._new_counts[f"vllm:kvx_offload_{what}", labels] += blocks

    def get_stats(self):
        counts, self._new_counts = self._new_counts, Counter()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), blocks in counts.items():
            stats.increase_counter(name, blocks, labels)
        return stats

    def reset_cache(self):
        for tier in self._tiers:
            told = [key for key, e in tier.entries.items() if e.is_ready or tier.level > 0]
            self._tell(tier, told, removed=True)
        first_slots = accumulate((tier.num_slots for tier in self._config), initial=0)
        self._tiers = [
            _TierState(level, tier, first)
            for level, (tier, first) in enumerate(zip(self._config, first_slots))
        ]
        # Entries on their way down, by a key of the store or load that makes them move.
        self._moving: dict[bytes, list[_Entry]] = {}
        self._expiring = []  # heap of (when, number, key); what an entry says itself counts
        self._numbers = count()
        self._sessions: dict[str, dict[bytes, None]] = {}  # the one used last is last

    def on_new_request(self, req_context):
        req_context.set_state(_retention_of(req_context.kv_transfer_params))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context):
        retention = _retention(req_context)
        if not retention.ends_session:
            return
        for key in self._sessions.pop(retention.session, ()):
            tier, entry = self._find(key)
            entry.sessions.discard(retention.session)
            if not entry.sessions:  # nobody else used it
                self._retain(tier, key, _LEAVES_FIRST)

    def _retain(self, tier, key, retention, is_next=False):
        """Makes a block its tier's most recently used one, and notes what a request says of it."""
        entry = tier.pop(key)
        if retention.says_how_long:
            priority = retention.priority
            entry.priority = _DEFAULT_PRIORITY if priority is None else priority
            entry.is_pinned, entry.expires = retention.pin, None
            if retention.seconds is not None:
                entry.expires = self._clock() + retention.seconds
                heapq.heappush(self._expiring, (entry.expires, next(self._numbers), key))
        elif entry.priority < 0:  # of a session that is over, and used again
            entry.priority = _DEFAULT_PRIORITY
        tier.add(key, entry, is_next)

    def _join(self, key, entry, retention):
        entry.sessions.add(retention.session)
        if retention.session is not None:
            keys = self._sessions.setdefault(retention.session, {})
            keys.pop(key, None)
            keys[key] = None

    def _expire(self):
        """Of blocks whose time is over nothing is said any more; they go before their equals."""
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            when, _, key = heapq.heappop(self._expiring)
            tier, entry = self._find(key)
            if entry is not None and entry.expires == when:
                nothing = _Retention(priority=_DEFAULT_PRIORITY)
                self._retain(tier, key, nothing, is_next=True)

    def _find(self, key):
        """(tier, entry), or (None, None)."""
        for tier in self._tiers:
            if (entry := tier.entries.get(key)) is not None:
                return tier, entry
        return None, None

    def lookup(self, key, req_context):
        _, entry = self._find(key)
        if entry is None and self._lookups is not None:
            is_known, place = self._lookups.find(key)
            if not is_known:
                return LookupResult.RETRY
            return LookupResult.MISS if place is None else LookupResult.HIT
        if entry is None or entry.is_doubtful:
            return LookupResult.MISS
        return LookupResult.HIT if entry.is_ready else LookupResult.HIT_PENDING

    def touch(self, keys, req_context):
        retention = _retention(req_context)
        for key in reversed(list(keys)):  # a prefix's beginning goes last
            tier, entry = self._find(key)
            if tier is not None:
                self._join(key, entry, retention)
                self._retain(tier, key, retention)

    def prepare_load(self, keys, req_context):
        """Blocks of lower tiers are read where they lie and go up to the first tier, as far as it
        has room for them. Blocks of stores come by way of the first tier."""
        self._expire()
        keys = list(keys)
        moves, moved, fetches = [], [], []
        first = self._tiers[0]
        below, in_store, slots = [], [], {}
        for key in keys:
            tier, entry = self._find(key)
            if entry is None:
                in_store.append(key)
                continue
            slots[key] = entry.slot
            if tier is not first and self._can_move(key):
                below.append(key)
        if below or in_store:
            wanted = len(below) + len(in_store)
            evicted = self._make_room(first, wanted, set(keys), moves, moved)
            self.count("blocks_evicted", len(evicted))
            for key in in_store:
                slots[key] = self._fetch(key, _retention(req_context), fetches)
            for key in below[: len(first.free)]:
                self._move_up(key, moves)
        if moved:
            self._moving.setdefault(keys[0], []).extend(moved)
        for key in keys:
            if slots[key] != NO_SLOT:
                self._find(key)[1].readers += 1
        return Slots([slots[key] for key in keys], moves, fetches)

    def are_in_memory(self, keys):
        """Whether the first tier has these blocks, in memory, and they wait for nothing."""
        first = self._tiers[0]
        entries = [first.entries.get(key) for key in keys]
        return first.medium == Medium.CPU and all(
            entry is not None and entry.is_ready and not entry.is_doubtful and entry.below is None
            for entry in entries
        )

    def _fetch(self, key, retention, fetches):
        """The slot into which a store's block goes."""
        place, first = self._lookups.place_of(key), self._tiers[0]
        if not first.free:
            self._lookups.distrust(key)
            return NO_SLOT
        entry = _Entry(first.free.pop(), fetched_from=self._lookups.labels[place])
        first.add(key, entry)
        self._join(key, entry, retention)
        self._retain(first, key, retention)
        fetches.append((entry.slot, key, place))
        return entry.slot

    def _can_move(self, key):
        _, entry = self._find(key)
        return entry.is_ready and not entry.is_doubtful and entry.readers == 0

    def _move_up(self, key, moves):
        first = self._tiers[0]
        tier, _ = self._find(key)
        entry = tier.pop(key)
        slot = first.free.pop()
        moves.append((entry.slot, slot))
        entry.below, entry.slot = (tier, entry.slot), slot
        first.add(key, entry)
        self.count("tier_blocks_moved_up", 1, tier.label)
        self._tell(tier, [key], removed=True)
        self._tell(first, [key], removed=False)

    def complete_load(self, keys, req_context):
        self.count("blocks_loaded", len(keys))
        for key in keys:
            self._end_moves(key)
            tier, entry = self._find(key)
            if entry is None:  # forgotten since
                continue
            was_in = entry.below[0] if entry.below else tier
            self.count("tier_blocks_loaded", 1, entry.fetched_from or was_in.label)
            if entry.fetched_from and not entry.is_doubtful:
                entry.fetched_from, entry.is_ready = None, True
                self._tell(tier, [key], removed=False)
            entry.readers -= 1
            if entry.readers == 0:
                self._leave_below(entry)
                if entry.is_doubtful:
                    self._forget(key)

    def _leave_below(self, entry):
        if entry.below:
            tier, slot = entry.below
            tier.free.append(slot)
            entry.below = None

    def _end_moves(self, key):
        for entry in self._moving.pop(key, ()):
            entry.is_ready = True  # one that was not moved whole fails its checks

    def doubt_loads(self):
        """A load that is under way has brought back a bad block: vLLM does not pass here which."""
        for tier in self._tiers:
            for key, entry in tier.entries.items():
                entry.is_doubtful = entry.is_doubtful or entry.readers > 0
                if entry.is_doubtful and entry.fetched_from:
                    self._lookups.distrust(key)

    def prepare_store(self, keys, req_context):
        """What the first tier cannot take goes to the next ones."""
        self._expire()
        retention = _retention(req_context)
        new = [key for key in keys if self._find(key)[1] is None]
        moves, moved, evicted, slots = [], [], [], []
        for tier in self._tiers:
            left = new[len(slots) :]
            evicted += self._make_room(tier, len(left), set(keys), moves, moved)
            for key in left[: len(tier.free)]:
                entry = _Entry(tier.free.pop())
                tier.add(key, entry)
                self._join(key, entry, retention)
                self._retain(tier, key, retention)
                slots.append(entry.slot)
        self.count("blocks_evicted", len(evicted))
        new = new[: len(slots)]
        if moved:  # so there is room for a new one
            self._moving[new[0]] = moved
        in_stores = new if self._lookups is not None else []
        return PrepareStoreOutput(new, Slots(slots, moves, keys=in_stores), evicted)

    def _make_room(self, tier, wanted, kept, moves, moved):
        """Frees slots of a tier, as many as it can. The keys that no tier has any more."""
        idle = (
            key
            for key in tier.in_order()
            if tier.entries[key].is_ready and tier.entries[key].readers == 0 and key not in kept
        )
        leaving = [key for key, _ in zip(idle, range(wanted - len(tier.free)))]
        if not leaving:
            return []
        evicted, below = [], None
        if tier.level + 1 < len(self._tiers):
            below = self._tiers[tier.level + 1]
            evicted = self._make_room(below, len(leaving), kept, moves, moved)
        num_evicted = len(leaving) - min(len(leaving), len(below.free) if below else 0)
        evicted += leaving[:num_evicted]
        for key in leaving[:num_evicted]:
            self._forget(key)
        for key in leaving[num_evicted:]:
            entry = tier.pop(key)
            slot = below.free.pop()
            moves.append((entry.slot, slot))
            tier.free.append(entry.slot)
            entry.slot, entry.is_ready = slot, False
            below.add(key, entry)
            moved.append(entry)
        self.count("tier_blocks_moved_down", len(leaving) - num_evicted, tier.label)
        self._tell(tier, leaving[num_evicted:], removed=True)
        self._tell(below, leaving[num_evicted:], removed=False)
        return evicted

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            self._end_moves(key)
            tier, entry = self._find(key)
            if entry is None or entry.is_ready:
                continue
            entry.is_ready = success
            if success:
                if self._lookups is not None:
                    self._lookups.is_stored(key)
                self.count("blocks_stored", 1)
                self.count("tier_blocks_stored", 1, tier.label)
                self._tell(tier, [key], removed=False)
            else:
                self._forget(key)

    def _forget(self, key):
        tier, entry = self._find(key)
        tier.pop(key)
        tier.free.append(entry.slot)
        self._leave_below(entry)
        for session in entry.sessions & self._sessions.keys():
            del self._sessions[session][key]
            if not self._sessions[session]:
                del self._sessions[session]
        if entry.is_ready:
            self._tell(tier, [key], removed=True)

    def _tell(self, tier, keys, removed):
        if self._sends_events and keys:
            self._events.append(OffloadingEvent(list(keys), tier.medium, removed))

    def take_events(self):
        events, self._events = self._events, []
        return events
