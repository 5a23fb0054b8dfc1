"""The worker of vLLM's offloading: copies between vLLM's pages and the slots of kvx's tiers, and to
and from stores that engines share. offloading.py has the spec that makes it."""

import os
import time
from bisect import bisect_right
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult, get_offload_group_idx

from kvx import _core
from kvx.vllm.cores import new_threads_on_any_core
from kvx.vllm.offloading_manager import NO_SLOT

_log = init_logger("vllm.kvx")


class KvxOffloadingWorker(OffloadingWorker):
    """Copies blocks between vLLM's pages and the tiers' slots. bad_jobs: loads that failed.

    Blocks go down and up in a thread, in the order of the manager's decisions. A store or a load
    whose slots a block still leaves or enters waits for it; a step does not.

    link: StoreLink of the stores behind the tiers, or None. Blocks that are stored in a tier are
    copied for them in the same thread.
    """

    def __init__(self, kv_caches, tiers, link=None):
        self.link = link
        pages = [tensor.tensor.view(torch.uint8) for tensor in kv_caches.tensors]
        groups = [[pages[ref.tensor_idx] for ref in refs] for refs in kv_caches.group_data_refs]
        # Copies run behind this stream, which is put behind the engine's at each submission.
        self._stream = torch.cuda.Stream(pages[0].device) if pages[0].is_cuda else None
        with new_threads_on_any_core():
            self.tiers = [
                _core.HostBlocks(groups, tier.num_slots, self._stream, os.fsencode(tier.folder))
                for tier in tiers
            ]
            self._mover = ThreadPoolExecutor(1, "kvx tiers")
            self._mover.submit(int).result()  # starts the thread
        self._first_slots = list(accumulate((tier.num_slots for tier in tiers), initial=0))
        self._busy = {}  # slot: what reads or writes it beside the queues, a Future
        self._new = {}  # job_id: (key, slot) of blocks that go to the stores once they are stored
        self._fetches = {}  # job_id: the Future of blocks that come from stores
        self._without_slot = set()  # job_ids of loads of which some blocks found no room
        self._waiting = deque()  # (job_id, Futures of moves, what starts the job after them)
        self.bad_jobs = 0
        self.bad_blocks = set()  # vLLM's numbers, since its last call
        self._loads = {}  # job_id: vLLM's blocks
        self._started = {}
        self.by_layer = {}  # job_id: (pages, slots) of the step's loads that it waits for by layer
        self.num_layers = len(groups[0])
        self._layers = []  # of these loads, by layer: (job_id, tier, number there)
        self._num_loaded = {}  # job_id: [all was whole, bytes]
        self._next_number = -1  # of a layer that is loaded; jobs' are not negative
        self._open = {}  # job_id: [tiers that still work on it, all was whole, bytes]

    def submit_store(self, job_id, src_spec, dst_spec):
        self._begin("store", job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        """expedited: the step waits for the load. The queue has one order, so nothing changes."""
        self._loads[job_id] = dst_spec.block_ids.tolist()
        if src_spec.is_by_layer:
            self._started[job_id] = time.perf_counter()
            self.by_layer[job_id] = dst_spec, src_spec
            return True
        self._begin("load", job_id, dst_spec, src_spec)
        return True

    def _begin(self, verb, job_id, pages, slots):
        self._started[job_id] = time.perf_counter()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        # A load reads where its blocks lie, beside the moves that take them up.
        places = slots.block_ids.tolist()
        if verb == "load":
            waits_for = self._moves_at(places)
            self._start_moves(slots.moves)
            waits_for |= self._start_fetches(job_id, slots.fetches)
            if NO_SLOT in places:
                self._without_slot.add(job_id)
        else:
            self._start_moves(slots.moves)
            waits_for = self._moves_at(places)
            if slots.keys:
                self._new[job_id] = list(zip(slots.keys, places))
        self._waiting.append((job_id, waits_for, partial(self._submit, verb, job_id, pages, slots)))
        self._start_waiting()

    # ---- loads that a step waits for layer by layer

    def begin_layers(self):
        """Starts what submit_load was given of these: the first layer of all blocks comes first."""
        if not self.by_layer:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        parts = []
        for job_id, (pages, slots) in self.by_layer.items():
            for move in self._moves_at(slots.block_ids.tolist()):
                move.result()
            self._num_loaded[job_id] = [True, 0]
            parts += [(job_id, *part) for part in self._parts_of(pages, slots).items()]
        self._layers = [[] for _ in range(self.num_layers)]
        for layer, loads in enumerate(self._layers):
            for job_id, (tier, group), (blocks, places) in parts:
                number, self._next_number = self._next_number, self._next_number - 1
                self.tiers[tier].load_layer(number, group, layer, blocks, places)
                loads.append((job_id, tier, number))

    def wait_for_layer(self, layer):
        """Until the layer's pages are there. Bad ones are reported when the step has ended."""
        if not self._layers:
            return
        loads, self._layers[layer] = self._layers[layer], []
        for job_id, tier, number in loads:
            is_whole, num_bytes = self.tiers[tier].end_layer(number)
            loaded = self._num_loaded[job_id]
            loaded[0] = loaded[0] and is_whole
            loaded[1] += num_bytes

    def end_layers(self):
        """Waits for all layers. What became of the step's loads, TransferResults."""
        for layer in range(len(self._layers)):
            self.wait_for_layer(layer)
        self._layers = []
        self.by_layer = {}
        ended, self._num_loaded = self._num_loaded, {}
        return [self._result(job_id, *loaded) for job_id, loaded in ended.items()]

    # ---- moves

    def _start_moves(self, moves):
        if moves:
            under_way = self._mover.submit(self._move, moves)
            self._busy.update((slot, under_way) for move in moves for slot in move)

    def _start_fetches(self, job_id, fetches):
        if not fetches:
            return set()
        slots = [slot for slot, _, _ in fetches]

        def write(i, content):
            tier, place = self._place_of(slots[i])
            return self.tiers[tier].write_slot(get_offload_group_idx(fetches[i][1]), place, content)

        blocks = [
            (key, place, self.tiers[0].group_bytes(get_offload_group_idx(key)))
            for _, key, place in fetches
        ]
        fetched = self.link.fetch(blocks, self._moves_at(slots), write)
        self._fetches[job_id] = fetched
        self._busy.update((slot, fetched) for slot in slots)
        return {fetched}

    def _read_for_stores(self, blocks):
        """blocks: (key, slot). In the thread of the moves, so the slots are what they were."""
        read = []
        for key, slot in blocks:
            tier, place = self._place_of(slot)
            content = self.tiers[tier].read_slot(get_offload_group_idx(key), place)
            if content is not None:
                read.append((key, content))
        if read:
            self.link.put(read)

    def _moves_at(self, slots):
        """Moves under way that slots have to wait for."""
        self._busy = {slot: moves for slot, moves in self._busy.items() if not moves.done()}
        return {self._busy[slot] for slot in slots if slot in self._busy}

    def _place_of(self, slot):
        """(number of its tier, slot there)."""
        tier = bisect_right(self._first_slots, slot) - 1
        return tier, slot - self._first_slots[tier]

    def _move(self, moves):
        for source, target in moves:
            (above, from_slot), (below, to_slot) = self._place_of(source), self._place_of(target)
            if self.tiers[below].take(self.tiers[above], [from_slot], [to_slot]) == 0:
                _log.warning("kvx lost a block on its way down: the disk refused it")

    def _start_waiting(self):
        """Starts what need not wait for moves any more."""
        waiting, self._waiting = self._waiting, deque()
        for job_id, moves, start in waiting:
            if all(move.done() for move in moves):
                for move in moves:
                    move.result()
                start()
            else:
                self._waiting.append((job_id, moves, start))

    def _submit(self, verb, job_id, pages, slots):
        parts = self._parts_of(pages, slots)
        for (tier, group), (blocks, places) in parts.items():
            getattr(self.tiers[tier], verb)(job_id, group, blocks, places)
        self._open[job_id] = [len({tier for tier, _ in parts}), True, 0]

    def _parts_of(self, pages, slots):
        """(tier, group): (blocks, slots there). pages: vLLM's blocks, group by group; slots: as
        many."""
        block_ids, slot_ids = pages.block_ids.tolist(), slots.block_ids.tolist()
        parts = defaultdict(lambda: ([], []))
        first = 0
        for group, size in enumerate(pages.group_sizes):
            for block, slot in zip(block_ids[first : first + size], slot_ids[first : first + size]):
                if slot == NO_SLOT:
                    continue
                tier, place = self._place_of(slot)
                blocks, places = parts[tier, group]
                blocks.append(block)
                places.append(place)
            first += size
        return parts

    def get_finished(self):
        by_layer = self.end_layers()
        self._start_waiting()
        for tier in self.tiers:
            for job_id, is_whole, num_bytes in tier.drain_finished():
                job = self._open[job_id]
                job[0] -= 1
                job[1] = job[1] and is_whole
                job[2] += num_bytes
        ended = [job_id for job_id, (num_open, _, _) in self._open.items() if num_open == 0]
        return by_layer + [self._result(job_id, *self._open.pop(job_id)[1:]) for job_id in ended]

    def _result(self, job_id, is_whole, num_bytes):
        if new := self._new.pop(job_id, None):
            reads = self._mover.submit(self._read_for_stores, new)
            self._busy.update((slot, reads) for _, slot in new)
        loaded = self._loads.pop(job_id, [])
        fetched = self._fetches.pop(job_id, None)
        has_all = fetched is None or fetched.result()
        if job_id in self._without_slot:
            self._without_slot.remove(job_id)
            has_all = False
        if not has_all:
            self.bad_jobs += 1
            self.bad_blocks.update(loaded)
            _log.warning("kvx computes %d blocks anew: a store did not give them", len(loaded))
        elif not is_whole:
            self.bad_jobs += 1
            self.bad_blocks.update(loaded)
            _log.warning("kvx computes %d blocks anew: a tier's memory has changed", len(loaded))
        seconds = time.perf_counter() - self._started.pop(job_id)
        # Bad blocks are reported apart: in vLLM's connector no job fails.
        return TransferResult(job_id, True, num_bytes, seconds)

    def wait(self, job_ids):
        for _, moves, start in self._waiting:
            wait(moves)
            start()
        self._waiting.clear()
        for tier in self.tiers:
            tier.wait_for_all()

    def shutdown(self):
        self._mover.shutdown()
        if self.link is not None:
            self.link.close()
