"""Ctrl-C in a long verb: it ends within a second of computing, in a process of its own with a real
SIGINT, and leaves nothing half written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What each program does until it is interrupted; ready() says that the long verb comes now.
BEFORE = """
import os, signal, sys, time, numpy as np, kvx

# A shell's background job is born with SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

def is_interrupted(verb):
    started = time.monotonic()
    try:
        print("ready", flush=True)
        verb()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return True
    print("the verb ended by itself after", time.monotonic() - started, "s", flush=True)
    return False

kvx.set_num_threads(2)
"""
ATTENTION = """
cache = kvx.Cache(num_layers=1, num_kv_heads=8, head_dim=128, recipe="{recipe}", max_tokens=40000)
sequence = cache.create_sequence()
few = np.ones((3, 8, 128), np.float32)
with cache.step([(sequence, 3)]):
    cache.append_and_attend(0, few, few, few)
x = np.ones((32768, 8, 128), np.float32)

def verb():
    with cache.step([(sequence, len(x))]):
        cache.append_and_attend(0, x, x, x)

assert is_interrupted(verb)
assert cache.num_tokens(sequence) == 3
keys, values = cache.gather(sequence, 0)
assert np.allclose(keys, 1, atol=0.01) and np.allclose(values, 1, atol=0.01)
with cache.step([(sequence, 3)]):
    out = cache.append_and_attend(0, few, few, few)
assert np.allclose(out, 1, atol=0.01)
"""
ROWS = """
few = np.random.default_rng(0).standard_normal((1000, 128)).astype(np.float32)
x = np.tile(few, (1000, 1))

def verb():
    while True:
        kvx.quantize(x, "nvfp4:search")

kvx.quantize(x[:1], "nvfp4")
assert is_interrupted(verb)
assert kvx.quantize(x[:2], "nvfp4").dequantize().shape == (2, 128)
"""
FILE = """
cache = kvx.Cache(num_layers=1, num_kv_heads=8, head_dim=128, recipe="f32", max_tokens=40000,
                  prefix_model="model")
sequence = cache.create_sequence()
x = np.random.default_rng(0).standard_normal((4096, 8, 128)).astype(np.float32)
with cache.step([(sequence, len(x))]):
    cache.append_and_attend(0, x, x, x)
cache.record_tokens(sequence, np.arange(len(x)))
path = sys.argv[1] + "/file"
with open(path, "w") as file:
    file.write("what was there")

def verb():
    while True:
        cache.save_sequence(sequence, path, zstd_level=19)

assert is_interrupted(verb)
left = os.listdir(sys.argv[1])
assert left == ["file"], left
if open(path, "rb").read() != b"what was there":
    kvx.verify(path)
"""
COMPARISON = """
assert is_interrupted(lambda: kvx.compare(sys.argv[2], sys.argv[3], ["int8"], windows=40))
"""
PROGRAMS = {
    "attention": ATTENTION.format(recipe="int8"),
    "attention with a window": ATTENTION.format(recipe="int8:sink=64,recent=256"),
    "rows": ROWS,
    "a file": FILE,
    "a comparison": COMPARISON,
}


def computed_seconds(group):
    """What the processes of a group, and those of them that have ended, have computed. A machine that
    others use as well gives them this time when it likes."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # behind the program's name
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))  # of its own and of those it waited for
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("what", PROGRAMS)
def test_ctrl_c_ends_a_long_verb_and_leaves_nothing_half_done(what, tmp_path):
    inputs = [os.environ.get(name, "") for name in ("KVX_TEST_MODEL", "KVX_TEST_TEXT")]
    assert all(inputs), "KVX_TEST_MODEL and KVX_TEST_TEXT are not set; run ./dev test"
    folder = tmp_path / "folder"
    folder.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", BEFORE + PROGRAMS[what], str(folder), *inputs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.7)
        before = computed_seconds(child.pid)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal sends it, to the tool of compare as well
        assert child.stdout.readline() == "interrupted\n"
        seconds = computed_seconds(child.pid) - before
        output, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0, output
    # 0.1 s of the clock: two threads compute twice as much.
    assert seconds < 2, seconds
    assert os.listdir(folder) in ([], ["file"])
