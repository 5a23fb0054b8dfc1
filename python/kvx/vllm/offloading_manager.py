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
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

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


class _TierState:
    """The blocks of one tier."""

    def __init__(self, level, tier, first_slot):
        self.level = level
        self.label = f"{level}:{tier.name}"
        self.medium = tier.medium
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self.free = list(range(first_slot, first_slot + tier.num_slots))


class KvxOffloadingManager(OffloadingManager):
    """Decides which block lies in which slot. The least recently used block of a tier makes room:
    it goes to the tier below, and from the last one it is gone.

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
                tier.entries.move_to_end(key)

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
        first.entries.update((key, _Entry(slot)) for key, slot in zip(new, slots))
        if moved:  # so there is room for a new one
            self._moving[new[0]] = moved
        return PrepareStoreOutput(new, Slots(slots, moves), evicted)

    def _make_room(self, tier, wanted, kept, moves, moved):
        """Frees slots of a tier, as many as it can. The keys that no tier has any more."""
        idle = (
            key
            for key, entry in tier.entries.items()
            if entry.is_ready and entry.readers == 0 and key not in kept
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
            entry = tier.entries.pop(key)
            slot = below.free.pop()
            moves.append((entry.slot, slot))
            tier.free.append(entry.slot)
            entry.slot, entry.is_ready = slot, False
            below.entries[key] = entry
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
        del tier.entries[key]
        tier.free.append(entry.slot)
        if entry.is_ready:
            self._tell(tier, [key], removed=True)

    def _tell(self, tier, keys, removed):
        if self._sends_events and keys:
            self._events.append(OffloadingEvent(list(keys), tier.medium, removed))

    def take_events(self):
        events, self._events = self._events, []
        return events
