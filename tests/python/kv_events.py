"""vLLM's KV events as a consumer declares them, with msgspec alone, a cache that sends them, and a
client of the replay socket."""

import struct
import time

import msgspec
import numpy as np
import zmq

import kvx

ANY_PORT = "tcp://127.0.0.1:*"


class Event(msgspec.Struct, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


def told_cache(**options):
    """A small cache that publishes its events."""
    cache = kvx.Cache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        recipe="int8",
        max_tokens=160,
        block_size=16,
        prefix_model="m",
        prefix_hash="sha256",
    )
    cache.publish_events(ANY_PORT, replay_endpoint=ANY_PORT, **options)
    return cache


def add(cache, tokens, **keys):
    """A sequence of these tokens, recorded."""
    sequence = cache.create_sequence_from([], **keys)
    rows = np.random.default_rng(0).standard_normal((len(tokens), 1, 64), np.float32)
    with cache.step([(sequence, len(tokens))]):
        cache.append_and_attend(0, rows, rows, rows)
    cache.record_tokens(sequence, tokens)
    return sequence


def batches_of(publisher_of, num_events, first=0):
    """Asks the replay socket for all batches, once so many events were sent: {number: payload}."""
    end = time.monotonic() + 60
    while publisher_of().events < num_events:
        assert time.monotonic() < end, publisher_of()
        time.sleep(0.001)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 60_000
        socket.connect(publisher_of().replay_endpoint)
        socket.send_multipart([b"", struct.pack(">q", first)])
        batches = {}
        while True:
            empty, topic, number, payload = socket.recv_multipart()
            if number == struct.pack(">q", -1):
                return batches
            batches[struct.unpack(">q", number)[0]] = payload
