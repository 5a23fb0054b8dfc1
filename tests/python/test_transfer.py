"""Sequences from one process to another."""

import subprocess
import sys
import threading
import time

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
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
        assert offer.wait(60) and offer.state().taken == 1


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
        end = time.monotonic() + 60
        while offer.state().refused == 0 and time.monotonic() < end:
            time.sleep(0.001)  # the import does not wait for ever to be heard
        assert offer.state().refused == 1 and "another" in offer.state().last_refusal
        with pytest.raises(kvx.Error, match="seconds is -1"):
            offer.wait(-1)
    with pytest.raises(kvx.Error, match="the offer is closed"):
        offer.state()
    with pytest.raises(kvx.UnsupportedError, match="nobody at tcp://127.0.0.1:1 has answered"):
        other.import_sequence("tcp://127.0.0.1:1", seconds=0.1)
    with pytest.raises(kvx.Error, match="cannot be bound"):
        cache.export_sequence(sequence, "here")


LAYER_IMPORTER = """
import sys
import numpy as np
import kvx
endpoint, path, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
heads = None if first < 0 else (first, 2)
cache = kvx.Cache(num_layers=2, num_kv_heads=2 if heads is None else 1, head_dim=64,
                  recipe="nvfp4:immediate", max_tokens=512, prefix_model="m")
print("ready", flush=True)
came = cache.import_sequence(endpoint, heads=heads)
assert cache.recorded_tokens(came.sequence) == list(range(300))
np.save(path, np.stack([cache.gather(came.sequence, layer) for layer in range(2)]))
print(came.bytes, came.asked_again)
"""


def layers_taken_elsewhere(offer, path, first=-1):
    command = [sys.executable, "-c", LAYER_IMPORTER, offer.endpoint, str(path), str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def made(**options):
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=512, prefix_model="m")
    return kvx.Cache(**(sizes | dict(recipe="nvfp4:immediate") | options))


def test_layers_leave_while_the_next_are_computed(tmp_path):
    rows = np.random.default_rng(1).standard_normal((300, 2, 64), np.float32)
    cache = made()
    sequence = cache.create_sequence()
    with cache.export_layers(sequence, range(300)) as offer:
        assert (offer.state().layers, offer.state().layers_there) == (2, 0)
        importer = layers_taken_elsewhere(offer, tmp_path / "rows.npy")
        assert importer.stdout.readline() == "ready\n"
        with cache.step([(sequence, 300)]):
            cache.append_and_attend(0, rows, rows, rows)
            layer_bytes = offer.state().bytes // 2
            end = time.monotonic() + 60
            while offer.state().bytes_sent < layer_bytes and time.monotonic() < end:
                time.sleep(0.001)
            bytes_sent = offer.state().bytes_sent
            assert importer.poll() is None
            cache.append_and_attend(1, rows, rows, rows)
        expected = np.stack([cache.gather(sequence, layer) for layer in range(2)])
        cache.close()
        out, err = importer.communicate(timeout=300)
        assert importer.returncode == 0, err
        num_bytes, asked_again = map(int, out.split())
        assert bytes_sent >= layer_bytes and offer.wait(60)
        if asked_again == 0:  # else some came twice
            assert bytes_sent < 2 * layer_bytes and num_bytes == offer.state().bytes_sent
    assert (np.load(tmp_path / "rows.npy") == expected).all()


def test_each_rank_takes_its_heads(tmp_path):
    rows = np.random.default_rng(1).standard_normal((300, 2, 64), np.float32)
    cache = made()
    sequence = cache.create_sequence()
    with cache.export_layers(sequence, range(300)) as offer:
        importers = [layers_taken_elsewhere(offer, tmp_path / f"{i}.npy", i) for i in range(2)]
        with cache.step([(sequence, 300)]):
            for layer in range(2):
                cache.append_and_attend(layer, rows, rows, -rows)
        expected = np.stack([cache.gather(sequence, layer) for layer in range(2)])
        for i, importer in enumerate(importers):
            _, err = importer.communicate(timeout=300)
            assert importer.returncode == 0, err
            assert (np.load(tmp_path / f"{i}.npy") == expected[:, :, :, i : i + 1]).all()


def test_other_threads_use_a_cache_that_waits():
    cache, other = made(), made(max_sequences=2)
    rows = np.ones((300, 2, 64), np.float32)
    sequence, decoding = cache.create_sequence(), other.create_sequence()
    came = []
    with cache.export_layers(sequence, range(300)) as offer:
        waiting = threading.Thread(target=lambda: came.append(other.import_sequence(offer.endpoint)))
        waiting.start()
        with other.step([(decoding, 10)]):
            for layer in range(2):
                other.append_and_attend(layer, rows[:10], rows[:10], rows[:10])
        assert other.num_tokens(decoding) == 10 and not came
        with cache.step([(sequence, 300)]):
            for layer in range(2):
                cache.append_and_attend(layer, rows, rows, rows)
        waiting.join(60)
    assert other.num_tokens(came[0].sequence) == 300


def test_layers_that_will_not_come():
    cache, other = made(), made()
    sequence = cache.create_sequence()
    with pytest.raises(kvx.Error, match="num_tokens is 0; the sequence has 0"):
        cache.export_layers(sequence, [])
    with pytest.raises(kvx.OutOfRangeError, match="max_tokens"):
        cache.export_layers(sequence, range(513))
    with cache.export_layers(sequence, range(300)) as offer:
        with pytest.raises(kvx.UnsupportedError, match="the sequence's head has not come"):
            other.import_sequence(offer.endpoint, seconds=3)  # without any answer it says so
        with pytest.raises(kvx.Error, match=r"heads is \(1, 2\); expected \(first, of\)"):
            other.import_sequence(offer.endpoint, heads=(1, 2))
        cache.free_sequence(sequence)
        assert offer.state().problem == "the sequence was freed before its last layer"
        with pytest.raises(kvx.Error, match="was freed before its last layer"):
            other.import_sequence(offer.endpoint)
