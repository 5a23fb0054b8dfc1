"""KV events of kvx.Cache, decoded by vLLM's own classes."""

import sys
from pathlib import Path

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

sys.path.append(str(Path(__file__).parents[1] / "python"))
from kv_events import add, batches_of, told_cache  # noqa: E402


def test_vllm_reads_what_kvx_sends():
    cache = told_cache()
    sequence = add(cache, list(range(50)), adapter="a LoRA")
    cache.free_sequence(sequence)
    cache.clear_prefixes()
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    batches = [decoder.decode(p) for p in batches_of(cache.event_publisher, 7).values()]
    events = [event for batch in batches for event in batch.events]
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == list(range(48))
    assert all(event.medium == "GPU" and event.lora_name == "a LoRA" for event in stored)
    assert all(hash(event) == hash(event) for event in stored)  # as vLLM's aggregator needs


def test_what_kvx_sends_is_what_vllm_would_send():
    cache = told_cache()
    add(cache, list(range(20)), adapter="a LoRA")
    payload = batches_of(cache.event_publisher, 1)[0]
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    ours = msgspec.msgpack.decode(payload)
    assert theirs == ours
