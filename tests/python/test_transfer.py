"""Sequences from one process to another."""

import subprocess
import sys

import numpy as np
import pytest

import kvx

IMPORTER = """
import sys
import numpy as np
import kvx
recipe, block_size, endpoint, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
cache = kvx.Cache(num_layers=2, num_kv_heads=2, head_dim=64, recipe=recipe, max_tokens=512,
                  block_size=block_size, prefix_model="m")
came = cache.import_sequence(endpoint, transcode=True)
assert cache.recorded_tokens(came.sequence) == list(range(300))
np.save(path, np.stack([cache.gather(came.sequence, layer) for layer in range(2)]))
print(came.bytes, int(came.shared))
"""


def filled(recipe="nvfp4:immediate", prefix_model="m", **options):
    cache = kvx.Cache(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        recipe=recipe,
        max_tokens=512,
        prefix_model=prefix_model,
        **options,
    )
    sequence = cache.create_sequence()
    rows = np.random.default_rng(1).standard_normal((300, 2, 64), np.float32)
    with cache.step([(sequence, 300)]):
        for layer in range(2):
            cache.append_and_attend(layer, rows + layer, rows + layer, rows - layer)
    cache.record_tokens(sequence, range(300))
    return cache, sequence


def taken_elsewhere(offer, tmp_path, recipe="nvfp4:immediate", block_size=64):
    path = tmp_path / "rows.npy"
    command = [sys.executable, "-c", IMPORTER, recipe, str(block_size), offer.endpoint, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    count, shared = map(int, done.stdout.split())
    return np.load(path), count, bool(shared)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_another_process_has_the_same_numbers(tmp_path, scheme):
    cache, sequence = filled()
    expected = np.stack([cache.gather(sequence, layer) for layer in range(2)])
    endpoint = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/offer"
    with cache.export_sequence(sequence, endpoint) as offer:
        cache.close()
        rows, count, shared = taken_elsewhere(offer, tmp_path)
        assert (rows == expected).all()
        assert shared == (scheme == "ipc")
        assert count == (0 if shared else offer.state().bytes)
        assert offer.wait(5) and offer.state().taken == 1


def test_the_receiver_converts_formats_and_block_sizes(tmp_path):
    cache, sequence = filled("bf16")
    expected = np.stack([cache.gather(sequence, layer) for layer in range(2)])
    with cache.export_sequence(sequence) as offer:
        rows, _, _ = taken_elsewhere(offer, tmp_path, "int8", 16)
    assert np.abs(rows - expected).max() < 0.05


def test_the_wire_carries_the_packed_bytes():
    cache, sequence = filled(block_size=64)
    other, _ = filled(block_size=64, max_sequences=2)
    with cache.export_sequence(sequence) as offer:
        came = other.import_sequence(offer.endpoint)
    packed = cache.memory().used
    assert packed <= came.bytes < 1.05 * packed


def test_refusals():
    cache, sequence = filled()
    other, _ = filled(prefix_model="another", max_sequences=2)
    with cache.export_sequence(sequence) as offer:
        with pytest.raises(kvx.Error, match="model"):
            other.import_sequence(offer.endpoint, transcode=True)
        assert offer.state().refused == 1 and "another" in offer.state().last_refusal
        with pytest.raises(kvx.Error, match="seconds is -1"):
            offer.wait(-1)
    with pytest.raises(kvx.Error, match="the offer is closed"):
        offer.state()
    with pytest.raises(kvx.UnsupportedError, match="nobody at tcp://127.0.0.1:1 has answered"):
        other.import_sequence("tcp://127.0.0.1:1", seconds=0.1)
    with pytest.raises(kvx.Error, match="cannot be bound"):
        cache.export_sequence(sequence, "here")
