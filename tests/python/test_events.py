"""KV events of a cache, decoded by msgspec alone: the schema is vLLM's."""

import hashlib
import struct
import time

import pytest
import zmq
from kv_events import (
    ANY_PORT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    add,
    batches_of,
    decode,
    told_cache,
)

import kvx


def events_of(cache, num_events):
    payloads = batches_of(cache.event_publisher, num_events)
    return [event for payload in payloads.values() for event in decode(payload).events]


def test_stored_removed_and_cleared():
    cache = told_cache(data_parallel_rank=3)
    sequence = add(cache, list(range(50)), adapter="a LoRA", tenant="salt")
    cache.free_sequence(sequence)
    cache.clear_prefixes()
    payloads = list(batches_of(cache.event_publisher, 7).values())
    assert all(decode(payload).data_parallel_rank == 3 for payload in payloads)
    assert all(abs(decode(payload).ts - time.time()) < 60 for payload in payloads)
    events = [event for payload in payloads for event in decode(payload).events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == list(range(48))
    hashes = [name for event in stored for name in event.block_hashes]
    assert len(set(hashes)) == 3 and all(len(name) == 16 for name in hashes)
    assert stored[0].parent_block_hash is None
    assert all(event.medium == "GPU" and event.lora_name == "a LoRA" for event in stored)
    assert all(keys == ("a LoRA", "salt") for event in stored for keys in event.extra_keys)
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert sorted(name for event in removed for name in event.block_hashes) == sorted(hashes)
    assert isinstance(events[-1], AllBlocksCleared)


def test_hashes_are_a_chain_that_a_consumer_can_compute():
    cache = told_cache()
    add(cache, list(range(50)))
    stored = events_of(cache, 3)
    hashes = [name for event in stored for name in event.block_hashes]
    for parent, block in ((0, 1), (1, 2)):
        tokens = struct.pack("<16i", *range(16 * block, 16 * block + 16))
        assert hashes[block] == hashlib.sha256(hashes[parent] + tokens).digest()[:16]


def test_integer_hashes_are_the_low_64_bits():
    both = []
    for integer_hashes in (False, True):
        cache = told_cache(integer_hashes=integer_hashes)
        add(cache, list(range(20)))
        both.append(events_of(cache, 1)[0].block_hashes[0])
    assert int.from_bytes(both[0], "big") & ((1 << 64) - 1) == both[1]


def test_a_subscriber_hears_topic_number_and_batch():
    cache = told_cache(topic="kv@m")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.rcvtimeo = 50
        socket.subscribe(b"kv@")
        socket.connect(cache.event_publisher().endpoint)
        for _ in range(1200):  # until the subscription has arrived
            cache.clear_prefixes()
            try:
                topic, number, payload = socket.recv_multipart()
                break
            except zmq.Again:
                continue
    assert topic == b"kv@m" and len(number) == 8
    assert isinstance(decode(payload).events[0], AllBlocksCleared)


def test_replay_begins_where_it_is_asked_to():
    cache = told_cache()
    for number in range(4):
        cache.clear_prefixes()
        batches_of(cache.event_publisher, number + 1)
    assert list(batches_of(cache.event_publisher, 4, first=2)) == [2, 3]
    assert cache.event_publisher().replays == 5


def test_publishing_again_tells_all_blocks_again():
    cache = told_cache()
    add(cache, list(range(50)))
    assert len(events_of(cache, 3)) >= 1
    told = cache.publish_events(cache.event_publisher().endpoint, replay_endpoint=ANY_PORT)
    assert told.endpoint.startswith("tcp://127.0.0.1:")
    assert sum(len(event.block_hashes) for event in events_of(cache, 3)) == 3
    cache.stop_events()
    cache.stop_events()
    with pytest.raises(kvx.Error, match="no events are published"):
        cache.event_publisher()
    cache.close()


def test_refusals():
    cache = told_cache()
    with pytest.raises(kvx.Error, match="'here' cannot be bound"):
        cache.publish_events("here")
    with pytest.raises(kvx.Error, match="queue_events is 0"):
        cache.publish_events(ANY_PORT, queue_events=0)
    with pytest.raises(kvx.UnsupportedError, match="prefix_model"):
        small = kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=64, recipe="int8", max_tokens=16)
        small.publish_events(ANY_PORT)
    cache.close()
    with pytest.raises(kvx.Error, match="closed"):
        cache.publish_events(ANY_PORT)
