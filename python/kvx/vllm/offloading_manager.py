"""Which block of vLLM's lies in which slot of which tier: the part of kvx's offloading that runs in
vLLM's scheduler.

    prepare_store ──► first tier ──► tier below ──► ... ──► evicted
    prepare_load  ◄── the tier that has the block
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import accumulate

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
}


class Slots(BlockIDsLoadStoreSpec):
    """Slots of the tiers, one for each block, in the order of the blocks; they are numbered through
    from the first tier on. moves: (from slot, to slot) of blocks that make room before, in order.
    """

    def __init__(self, block_ids, moves=()):
        super().__init__(block_ids)
        self.moves = list(moves)


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


@dataclass(frozen=True)
class _Retention:
    """What a request says of its blocks."""

    priority: int | None = None


def _retention_of(params):
    """What a request says under "kvx". Nobody has checked it, and a request that errs is served
    like one that says nothing, with a warning."""
    said = (params or {}).get("kvx")
    if said is None:
        return _Retention()
    if not isinstance(said, dict) or set(said) - {"priority"}:
        _log.warning(
            "kvx retains a request's blocks like others: kv_transfer_params.kvx is %r; expected "
            'nothing but {"priority": 0 to 100}, the tiers behind vLLM have no times, pins or '
            "sessions",
            said,
        )
        return _Retention()
    priority = said.get("priority")
    if type(priority) is int and 0 <= priority <= 100:
        return _Retention(priority)
    _log.warning(
        "kvx retains a request's blocks like others: kv_transfer_params.kvx.priority is %r; "
        "expected 0 to 100",
        priority,
    )
    return _Retention()


class _TierState:
    """The blocks of one tier, in the order in which they leave it: by priority, and among equals
    the least recently used one first."""

    def __init__(self, level, tier, first_slot):
        self.level = level
        self.label = f"{level}:{tier.name}"
        self.medium = tier.medium
        self.entries: dict[bytes, _Entry] = {}
        self._order: dict[int, OrderedDict[bytes, None]] = {}  # by priority
        self.free = list(range(first_slot, first_slot + tier.num_slots))

    def add(self, key, entry):
        self.entries[key] = entry
        self._order.setdefault(entry.priority, OrderedDict())[key] = None

    def pop(self, key):
        entry = self.entries.pop(key)
        keys = self._order[entry.priority]
        del keys[key]
        if not keys:
            del self._order[entry.priority]
        return entry

    def use(self, key, priority):
        """priority: None leaves it as it is."""
        entry = self.pop(key)
        if priority is not None:
            entry.priority = priority
        self.add(key, entry)

    def in_order(self):
        for priority in sorted(self._order):
            yield from self._order[priority]


def _priority_of(req_context):
    """None: the request says nothing of it."""
    retention = req_context and req_context.get_state(_Retention)
    return retention.priority if retention else None


class KvxOffloadingManager(OffloadingManager):
    """Decides which block lies in which slot. The block of a tier's lowest priority makes room,
    among equals the least recently used one: it goes to the tier below, and from the last one it is
    gone. A request's ``kv_transfer_params`` may say ``{"kvx": {"priority": 80}}``; others have 35.

    tiers: list of Tier, the nearest first. sends_events: keeps events for take_events.
    """

    def __init__(self, tiers, sends_events=False):
        self._config = tiers
        self._sends_events = sends_events
        self._events = []
        self._new_counts = Counter()  # since vLLM last asked
        self._tiers = []
        self.reset_cache()

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
        # Entries on their way down, by a key of the store that waits for them.
        self._moving: dict[bytes, list[_Entry]] = {}

    def on_new_request(self, req_context):
        req_context.set_state(_retention_of(req_context.kv_transfer_params))
        return RequestOffloadingContext()

    def _find(self, key):
        """(tier, entry), or (None, None)."""
        for tier in self._tiers:
            if (entry := tier.entries.get(key)) is not None:
                return tier, entry
        return None, None

    def lookup(self, key, req_context):
        _, entry = self._find(key)
        if entry is None or entry.is_doubtful:
            return LookupResult.MISS
        return LookupResult.HIT if entry.is_ready else LookupResult.HIT_PENDING

    def touch(self, keys, req_context):
        for key in reversed(list(keys)):  # a prefix's beginning goes last
            tier, _ = self._find(key)
            if tier is not None:
                tier.use(key, _priority_of(req_context))

    def prepare_load(self, keys, req_context):
        slots = []
        for key in keys:
            _, entry = self._find(key)
            entry.readers += 1
            slots.append(entry.slot)
        return Slots(slots)

    def complete_load(self, keys, req_context):
        self.count("blocks_loaded", len(keys))
        for key in keys:
            tier, entry = self._find(key)
            if entry is None:  # forgotten since
                continue
            self.count("tier_blocks_loaded", 1, tier.label)
            entry.readers -= 1
            if entry.is_doubtful and entry.readers == 0:
                self._forget(key)

    def doubt_loads(self):
        """A load that is under way has brought back a bad block: vLLM does not pass here which."""
        for tier in self._tiers:
            for entry in tier.entries.values():
                entry.is_doubtful = entry.is_doubtful or entry.readers > 0

    def prepare_store(self, keys, req_context):
        first = self._tiers[0]
        new = [key for key in keys if self._find(key)[1] is None]
        moves, moved = [], []
        evicted = self._make_room(first, len(new), set(keys), moves, moved)
        self.count("blocks_evicted", len(evicted))
        new = new[: len(first.free)]
        slots = [first.free.pop() for _ in new]
        priority = _priority_of(req_context)
        if priority is None:
            priority = _DEFAULT_PRIORITY
        for key, slot in zip(new, slots):
            first.add(key, _Entry(slot, priority=priority))
        if moved:  # so there is room for a new one
            self._moving[new[0]] = moved
        return PrepareStoreOutput(new, Slots(slots, moves), evicted)

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
            for entry in self._moving.pop(key, ()):
                entry.is_ready = True  # one that was not moved whole fails its checks
            tier, entry = self._find(key)
            if entry is None or entry.is_ready:
                continue
            entry.is_ready = success
            if success:
                self.count("blocks_stored", 1)
                self.count("tier_blocks_stored", 1, tier.label)
                self._tell(tier, [key], removed=False)
            else:
                self._forget(key)

    def _forget(self, key):
        tier, entry = self._find(key)
        tier.pop(key)
        tier.free.append(entry.slot)
        if entry.is_ready:
            self._tell(tier, [key], removed=True)

    def _tell(self, tier, keys, removed):
        if self._sends_events and keys:
            self._events.append(OffloadingEvent(list(keys), tier.medium, removed))

    def take_events(self):
        events, self._events = self._events, []
        return events
