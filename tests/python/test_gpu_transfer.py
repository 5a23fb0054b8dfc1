"""Sequences that leave a GPU layer by layer: over sockets, and as memory that another process maps, on
the same GPU and on another one of the host."""

import subprocess
import sys
import time

import gpu
import numpy as np
import pytest

import kvx

TOKENS = 300
IMPORTER = """
import sys
import numpy as np
import torch
import kvx
endpoint, path, device, recipe, first = sys.argv[1:6]
heads = None if first == "all" else (int(first), 2)
torch.zeros(1, device=device)
cache = kvx.Cache(num_layers=3, num_kv_heads=2 if heads is None else 1, head_dim=64, recipe=recipe,
                  max_tokens=512, prefix_model="m", device=device)
print("ready", flush=True)
came = cache.import_sequence(endpoint, heads=heads)
assert cache.recorded_tokens(came.sequence) == list(range(300))
like = torch.zeros(1, device=device)
rows = [[side.cpu().numpy() for side in cache.gather(came.sequence, layer, like=like)]
        for layer in range(3)]
np.save(path, np.array(rows))
print(int(came.shared), came.bytes, flush=True)
"""


@pytest.fixture(autouse=True)
def torch():
    return gpu.library("torch")


def new_cache(recipe, device="cuda"):
    sizes = dict(num_layers=3, num_kv_heads=2, head_dim=64, max_tokens=512, prefix_model="m")
    return kvx.Cache(recipe=recipe, device=device, **sizes)


def rows_on(torch, device):
    torch.manual_seed(3)
    return [torch.randn((TOKENS, 2, 64)).to(device) for _ in range(3)]


def compute(cache, sequence, rows, layers=range(3)):
    for layer in layers:
        cache.append_and_attend(layer, rows[layer], rows[layer], -rows[layer])


def held(torch, cache, sequence):
    like = torch.zeros(1, device="cuda")
    return np.array(
        [
            [side.cpu().numpy() for side in cache.gather(sequence, layer, like=like)]
            for layer in range(3)
        ]
    )


def importer(endpoint, path, device, recipe, first="all"):
    command = [sys.executable, "-c", IMPORTER, endpoint, str(path), device, recipe, str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process, path):
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    shared, count = out.split()[-2:]
    return np.load(path), bool(int(shared)), int(count)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4:auto"])
def test_layers_pass_by_way_of_the_host(torch, tmp_path, recipe):
    cache, rows = new_cache(recipe), rows_on(torch, "cuda")
    sequence = cache.create_sequence()
    with cache.export_layers(sequence, range(TOKENS)) as offer:
        process = importer(offer.endpoint, tmp_path / "rows.npy", "cuda", recipe)
        other = importer(offer.endpoint, tmp_path / "head.npy", "cuda", recipe, 1)
        assert process.stdout.readline() == "ready\n"
        with cache.step([(sequence, TOKENS)]):
            compute(cache, sequence, rows, [0])
            layer_bytes = offer.state().bytes // 3
            end = time.monotonic() + 30
            while offer.state().bytes_sent < layer_bytes and time.monotonic() < end:
                time.sleep(0.001)
            assert offer.state().bytes_sent >= layer_bytes, "a layer leaves before the next"
            compute(cache, sequence, rows, [1, 2])
        expected = held(torch, cache, sequence)
        cache.close()
        came, shared, count = outcome(process, tmp_path / "rows.npy")
        assert not shared and count > offer.state().bytes
        assert (came == expected).all()
        came, _, _ = outcome(other, tmp_path / "head.npy")
        assert (came == expected[:, :, :, 1:]).all()


def mapped(torch, tmp_path, device, recipe):
    cache, rows = new_cache(recipe), rows_on(torch, "cuda")
    sequence = cache.create_sequence()
    with cache.export_layers(sequence, range(TOKENS), f"ipc://{tmp_path}/offer") as offer:
        process = importer(offer.endpoint, tmp_path / "rows.npy", device, recipe)
        assert process.stdout.readline() == "ready\n"
        with cache.step([(sequence, TOKENS)]):
            compute(cache, sequence, rows)
        expected = held(torch, cache, sequence)
        cache.close()
        came, shared, count = outcome(process, tmp_path / "rows.npy")
        assert shared, "expected memory that the other process maps (CUDA IPC)"
        assert count < 100_000, "the head alone travels"
        assert (came == expected).all()
        assert offer.wait(5)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4:auto"])
def test_another_process_maps_the_pages(torch, tmp_path, recipe):
    mapped(torch, tmp_path, "cuda", recipe)


def test_another_gpu_of_the_host_copies_the_pages(torch, tmp_path):
    gpu.second()
    mapped(torch, tmp_path, "cuda:1", "nvfp4:auto")


def test_a_cpu_takes_what_lies_on_a_gpu(torch, tmp_path):
    """Its codes have another order there."""
    cache, rows = new_cache("nvfp4"), rows_on(torch, "cuda")
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/offer"):
        sequence = cache.create_sequence()
        with cache.export_layers(sequence, range(TOKENS), endpoint) as offer:
            with cache.step([(sequence, TOKENS)]):
                compute(cache, sequence, rows)
            expected = held(torch, cache, sequence)
            other = new_cache("nvfp4", "cpu")
            came = other.import_sequence(offer.endpoint)
            assert not came.shared
            got = np.array([other.gather(came.sequence, layer) for layer in range(3)])
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
            other.close()
        cache.free_sequence(sequence)
