"""Nothing that Python passes crashes the module: it is refused by name, and nothing changes."""

import os
import subprocess
import sys
import threading

import dlpack_device
import numpy as np
import pytest
from dlpack_device import OnDevice
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from reference import attention, random_rows, relative_error

import kvx


def new_cache():
    return kvx.Cache(
        num_layers=1, num_kv_heads=2, head_dim=32, recipe="int8", max_tokens=64, max_sequences=2
    )


def rows(tokens=3):
    return (
        random_rows(1, tokens, 4, 32),
        random_rows(2, tokens, 2, 32),
        random_rows(3, tokens, 2, 32),
    )


def read_only(array):
    array.flags.writeable = False
    return array


Q, K, V = rows()
BAD_CALLS = {
    "q is a list": (Q.tolist(), K, V, np.empty_like(Q)),
    "q is None; expected a NumPy array": (None, K, V, np.empty_like(Q)),
    "q is float64; expected float32, float16 or bfloat16": (Q.astype(np.float64), K, V, np.empty_like(Q)),
    "k is int64; expected float32": (Q, K.astype(np.int64), V, np.empty_like(Q)),
    "v is complex64; expected float32": (Q, K, V.astype(np.complex64), np.empty_like(Q)),
    "q has the shape [3, 128]; expected [tokens, heads, 32]": (Q.reshape(3, 128), K, V, Q.copy()),
    "q has 3 heads; expected a multiple of num_kv_heads, 2": (Q[:, :3], K, V, Q[:, :3].copy()),
    "k has the shape [2, 2, 32]; expected [3, 2, 32]": (Q, K[:2], V, Q.copy()),
    "v has the shape [3, 1, 32]; expected [3, 2, 32]": (Q, K, V[:, :1], Q.copy()),
    "k has a stride of 2 elements along head_dim; expected 1": (
        Q, np.repeat(K, 2, axis=2)[:, :, ::2], V, Q.copy()),
    "out has the shape": (Q, K, V, np.empty((3, 4, 31), np.float32)),
    "out is a ndarray that cannot be written in place": (Q, K, V, read_only(np.empty_like(Q))),
    "out has rows that lie over each other": (
        Q, K, V, as_strided(np.empty(300, np.float32), (3, 4, 32), (0, 128, 4))),
    "out lies over q": (Q, K, V, Q),
    "q has 4294967300 heads; expected at most 2147483647": (
        np.broadcast_to(Q[:, :1], (3, 2**32 + 4, 32)), K, V, np.empty_like(Q)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CALLS)
def test_a_bad_array_is_named_and_the_step_goes_on(message):
    cache = new_cache()
    sequence = cache.create_sequence()
    cache.begin_step([(sequence, 3)])
    with pytest.raises(kvx.Error) as error:
        cache.append_and_attend(0, *BAD_CALLS[message])
    assert message in str(error.value)
    out = cache.append_and_attend(0, Q, K, V)
    cache.end_step()
    assert relative_error(out, attention(Q, K, V)) < 2e-2


def test_out_may_not_lie_over_the_sinks():
    cache = new_cache()
    sequence = cache.create_sequence()
    out = np.zeros_like(Q)
    with cache.step([(sequence, 3)]):
        with pytest.raises(kvx.Error, match="out lies over sinks"):
            cache.append_and_attend(0, Q, K, V, out, sinks=out[0, 0, :4])
        cache.append_and_attend(0, Q, K, V, out)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("device_type", [dlpack_device.CUDA, dlpack_device.CUDA_MANAGED])
def test_an_array_of_a_gpu_is_named_and_the_step_goes_on(name, device_type):
    cache = new_cache()
    sequence = cache.create_sequence()
    arrays = {"q": Q, "k": K, "v": V, "out": np.empty_like(Q)}
    with cache.step([(sequence, 3)]):
        bad = {**arrays, name: OnDevice(arrays[name], device_type)}
        message = f"{name} lies on {dlpack_device.TEXTS[device_type]}; expected the CPU"
        with pytest.raises(kvx.Error, match=message):
            cache.append_and_attend(0, **bad)
        out = cache.append_and_attend(0, **arrays)
    assert relative_error(out, attention(Q, K, V)) < 2e-2
    with pytest.raises(kvx.Error, match=f"x lies on {dlpack_device.TEXTS[device_type]}"):
        kvx.quantize(OnDevice(Q, device_type), "int8")


def test_arrays_that_change_meanwhile_crash_nothing():
    """The GIL is free in a verb: nobody keeps another thread from writing to its arrays."""
    cache = new_cache()
    arrays = [array.copy() for array in (Q, K, V)]
    is_done = threading.Event()

    def scribble():
        numbers = np.array([0, 1, -1e30, np.nan, np.inf, 1e-40], np.float32)
        random = np.random.default_rng(0)
        while not is_done.is_set():
            for array in arrays:
                array[...] = random.choice(numbers, array.shape)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(30):
            sequence = cache.create_sequence()
            for _ in range(5):
                with cache.step([(sequence, 3)]):
                    cache.append_and_attend(0, *arrays)
            kvx.quantize(arrays[0], "nvfp4:search").dequantize()
            cache.free_sequence(sequence)
    finally:
        is_done.set()
        thread.join()
    sequence = cache.create_sequence()
    with cache.step([(sequence, 3)]):
        out = cache.append_and_attend(0, Q, K, V)
    assert relative_error(out, attention(Q, K, V)) < 2e-2


def test_verbs_out_of_order_are_refused():
    cache = new_cache()
    sequence = cache.create_sequence()
    for call, message in [
        (lambda: cache.append_and_attend(0, Q, K, V), "no step is open"),
        (cache.end_step, "no step is open"),
        (cache.cancel_step, "no step is open"),
        (lambda: cache.begin_step([]), "entries is empty"),
        (lambda: cache.begin_step([(5, 1)]), "entries[0].sequence is 5"),
        (lambda: cache.begin_step([(sequence, 0)]), "entries[0].num_tokens is 0"),
        (lambda: cache.begin_step([(sequence, 65)]), "the sequence has 0 of 64 tokens"),
        (lambda: cache.num_tokens(-1), "sequence is -1"),
        (lambda: cache.free_sequence(1), "sequence is 1"),
        (lambda: cache.truncate(sequence, 1), "num_tokens is 1; expected 0 to 0"),
        (lambda: cache.gather(sequence, 0, 0, 1), "the sequence has 0"),
        (lambda: cache.gather(sequence, 0, -1, 1), "the sequence has 0"),
        (lambda: cache.gather(sequence, 3), "layer is 3"),
    ]:
        with pytest.raises(kvx.Error) as error:
            call()
        assert message in str(error.value)
    cache.begin_step([(sequence, 3)])
    for layer, message in [(1, "layer is 1"), (-1, "layer is -1")]:
        with pytest.raises(kvx.Error, match=message):
            cache.append_and_attend(layer, Q, K, V)
    cache.append_and_attend(0, Q, K, V)
    with pytest.raises(kvx.Error, match="layer 0 has already appended"):
        cache.append_and_attend(0, Q, K, V)
    with pytest.raises(kvx.Error, match="a step is open with sequence"):
        cache.free_sequence(sequence)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": -2}, "num_kv_heads is -2"),
        ({"head_dim": 33, "recipe": "nvfp4"}, "head_dim is 33; nvfp4 needs a multiple of 16"),
        ({"recipe": "nvfp5"}, "format is 'nvfp5'"),
        ({"head_dim": 0}, "head_dim is 0; expected 1 to 1024"),
        ({"v_head_dim": 0}, "v_head_dim is 0; expected 1 to 1024"),
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 to 1073741824"),
        ({"max_tokens": 2**40}, "max_tokens is 1099511627776; expected 1 to"),
        ({"recipe": "int8\0"}, "format is 'int8\0'; expected one of"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"block_size": 2000}, "block_size"),
        ({"layer_windows": [1, 2, 3]}, "layer_windows"),
        ({"layer_overrides": ["7=int8"]}, "7"),
        ({"memory_budget_bytes": 10}, "10"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, message):
    defaults = dict(num_layers=1, num_kv_heads=2, head_dim=32, recipe="int8", max_tokens=64)
    with pytest.raises(kvx.Error) as error:
        kvx.Cache(**{**defaults, **options})
    assert message in str(error.value) and "k_head_dim" not in str(error.value)


def test_a_closed_cache_says_so():
    cache = new_cache()
    sequence = cache.create_sequence()
    cache.close()
    cache.close()
    for call in (cache.create_sequence, cache.memory, lambda: cache.begin_step([(sequence, 1)])):
        with pytest.raises(kvx.Error, match="the cache is closed"):
            call()


# What a forked child does with what its parent made; 7 is what is expected of it.
IN_A_CHILD = {
    "a cache": """
cache = kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=64)
def in_child():
    is_told(cache.create_sequence)
""",
    "a cache that another thread is in": """
import threading
cache = kvx.Cache(num_layers=1, num_kv_heads=2, head_dim=64, recipe="int8", max_tokens=8192)
sequence, x = cache.create_sequence(), np.ones((8192, 2, 64), np.float32)
cache.begin_step([(sequence, 8192)])
is_inside = threading.Event()
def work():
    is_inside.set()
    cache.append_and_attend(0, x, x, x)
thread = threading.Thread(target=work)
thread.start()
is_inside.wait()
time.sleep(0.05)
def in_child():
    is_told(cache.create_sequence)
""",
    "a host tier": """
tiered = [kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=64,
                    prefix_model="a model", host_tier_bytes=1 << 20)]
def in_child():
    is_told(tiered[0].wait_for_tier)
    tiered.clear()
""",
    "blocks in host memory": """
from kvx import _core
blocks = [_core.HostBlocks([[np.zeros((2, 16), np.uint8)]], 1)]
def in_child():
    is_told(lambda: blocks[0].store(1, 0, [0], [0]))
    is_told(blocks[0].wait_for_all)
    blocks.clear()
""",
}


@pytest.mark.parametrize("what", IN_A_CHILD)
def test_a_forked_child_is_told_and_ends(what):
    program = f"""
import os, sys, time, numpy as np, kvx

def is_told(call):
    try:
        call()
    except kvx.UnsupportedError as error:
        assert "forked" in str(error)
    else:
        os._exit(8)

{IN_A_CHILD[what]}
child = os.fork()
if child == 0:
    import signal
    signal.alarm(120)
    in_child()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=300)
    assert done.returncode == 7


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([-(2**31), 2**31 - 1, 2**31, 2**63, -(2**70), 2.5, None, "1"]),
)
ARRAYS = st.one_of(
    NUMBERS,
    st.builds(
        lambda shape, kind, step: np.zeros([n * abs(step) for n in shape], kind)[
            tuple(slice(None, None, step) for _ in shape)
        ],
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 32]), max_size=4),
        st.sampled_from(["f4", "f2", "f8", "i4", "u1", "c8", "?", ">f4", "M8[s]", "O"]),
        st.sampled_from([1, 2, -1]),
    ),
    st.sampled_from([Q, K, V, np.empty_like(Q), np.empty(0), b"bytes", memoryview(b"x" * 64)]),
)
CALLS = st.one_of(
    st.tuples(st.just("begin_step"), st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3)),
    st.tuples(st.just("append_and_attend"), NUMBERS, ARRAYS, ARRAYS, ARRAYS, ARRAYS),
    st.tuples(st.just("append_and_attend"), st.just(0), st.just(Q), st.just(K), st.just(V), ARRAYS),
    st.tuples(st.sampled_from(["end_step", "cancel_step", "create_sequence", "memory"])),
    st.tuples(st.sampled_from(["free_sequence", "num_tokens", "max_step_tokens", "cost"]), NUMBERS),
    st.tuples(st.sampled_from(["truncate"]), NUMBERS, NUMBERS),
    st.tuples(st.just("gather"), NUMBERS, NUMBERS, NUMBERS, NUMBERS),
)


@given(st.lists(CALLS, max_size=12))
def test_random_calls_are_done_or_refused(calls):
    cache = new_cache()
    sequence = cache.create_sequence()
    for verb, *arguments in calls:
        try:
            getattr(cache, verb)(*arguments)
        except (kvx.Error, TypeError):
            pass
    # Whatever came, the cache still works.
    try:
        cache.cancel_step()
    except kvx.Error:
        pass
    try:
        cache.free_sequence(sequence)
    except kvx.Error:
        pass
    sequence = cache.create_sequence()
    with cache.step([(sequence, 3)]):
        out = cache.append_and_attend(0, *rows())
    assert relative_error(out, attention(*rows())) < 2e-2


@given(ARRAYS, st.text(max_size=12), ARRAYS)
def test_random_rows_are_quantised_or_refused(x, text, scale):
    for recipe in (text, "int8", "nvfp4"):
        try:
            kvx.quantize(x, recipe, tensor_scale=1.0 if recipe != text else scale)
        except (kvx.Error, TypeError):
            pass


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1e3", "CPU", ""])
def test_a_device_that_is_none_is_named(device):
    with pytest.raises(kvx.Error, match=f"device is '{device}'; expected cpu, cuda or cuda:N"):
        kvx.Cache(
            num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=8, device=device
        )


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(kvx.UnsupportedError, match="device is 'cuda:99': .*On a GPU"):
        kvx.Cache(
            num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=8, device="cuda:99"
        )


def test_the_cpu_has_no_streams():
    with pytest.raises(kvx.Error, match="stream is given; a cache on the CPU has none"):
        kvx.Cache(
            num_layers=1, num_kv_heads=1, head_dim=32, recipe="int8", max_tokens=8, stream=1
        )
    cache = new_cache()
    sequence = cache.create_sequence()
    with cache.step([(sequence, 3)]):
        with pytest.raises(kvx.Error, match="stream is given"):
            cache.append_and_attend(0, Q, K, V, stream=1)
        cache.append_and_attend(0, Q, K, V)
    with pytest.raises(kvx.Error, match="stream is given"):
        cache.gather(sequence, 0, stream=1)
    assert cache.device == "cpu"
    cache.synchronize()


def test_gather_writes_to_arrays_of_the_caller():
    cache = new_cache()
    sequence = cache.create_sequence()
    with cache.step([(sequence, 3)]):
        cache.append_and_attend(0, Q, K, V)
    out = np.empty((2, 3, 32), np.float32).swapaxes(0, 1), np.empty((3, 2, 32), np.float16)
    assert cache.gather(sequence, 0, out=out)[0] is out[0]
    for found, gathered in zip(out, cache.gather(sequence, 0)):
        assert np.array_equal(found, gathered.astype(found.dtype))
    with pytest.raises(kvx.Error, match=r"out's k has the shape \[2, 2, 32\]; expected \[3, 2, 32\]"):
        cache.gather(sequence, 0, out=(out[0][:2], out[1]))
