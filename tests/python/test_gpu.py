"""Caches on a GPU: the CPU's bytes, attention near the CPU's, arrays of torch, CuPy and JAX where
they lie, in the order of their streams; and everything that does not fit refused by name."""

import gc
import threading

import gpu
import numpy as np
import pytest
from dlpack_device import OnDevice
from hypothesis import given
from hypothesis import strategies as st
from pages import run_blocks
from reference import attention, random_rows, relative_error

import kvx
from kvx import engines

RECIPES = ["f32", "bf16", "fp8_e4m3", "int8", "int4", "int4_affine", "nvfp4", "mxfp4", "int8/int4",
           "nvfp4:auto", "int4:auto"]  # fmt: skip
SLEEP = 200_000_000  # GPU cycles, a tenth of a second: the host is far ahead


@pytest.fixture(autouse=True)
def torch():
    return gpu.library("torch")


def new_cache(device="cuda", recipe="int8", **options):
    defaults = dict(num_layers=1, num_kv_heads=2, head_dim=64, max_tokens=512, max_sequences=3)
    return kvx.Cache(recipe=recipe, device=device, **{**defaults, **options})


def stream_of_rows(tokens, seed=0):
    return (
        random_rows(seed, tokens, 6, 64),
        random_rows(seed + 1, tokens, 2, 64),
        random_rows(seed + 2, tokens, 2, 64),
    )


def feed(cache, sequence, q, k, v, step_tokens=48, **options):
    """Appends all rows to every layer; the outputs of layer 0, one a step."""
    outputs, first = [], 0
    while first < len(q):
        count = min(step_tokens, len(q) - first, cache.max_step_tokens(sequence))
        part = slice(first, first + count)
        with cache.step([(sequence, count)]):
            outs = [
                cache.append_and_attend(layer, q[part], k[part], v[part], **options)
                for layer in range(cache.num_layers)
            ]
        outputs.append(outs[0])
        first += count
    return outputs


def to_gpu(torch, arrays, dtype=None, device="cuda"):
    return [torch.from_numpy(x).to(device, dtype) for x in arrays]


def test_saturated_inputs_are_the_cpus(torch):
    counts = {}
    for device in ("cpu", "cuda"):
        rows = list(stream_of_rows(70))
        rows[1][3, 1, :2] = (500, -1e6)  # E4M3 ends at 448
        rows[2][9, 0, 5] = np.nan
        cache = new_cache(device, "fp8_e4m3", num_layers=2)
        feed(cache, cache.create_sequence(), *(rows if device == "cpu" else to_gpu(torch, rows)))
        counts[device] = cache.saturation()
    assert counts["cuda"].k_clipped.tolist() == [[0, 2], [0, 2]]
    for name in ("k_clipped", "v_clipped", "k_nonfinite", "v_nonfinite"):
        expected, found = (getattr(counts[device], name) for device in ("cpu", "cuda"))
        assert found.tolist() == expected.tolist(), name


def attended(torch, tensors):
    """What a fresh cache of f32 holds, read back."""
    cache = new_cache(recipe="f32")
    return torch.cat(feed(cache, cache.create_sequence(), *tensors)).cpu().numpy()


# ---- the same numbers


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_are_the_cpus_byte_for_byte(torch, recipe, tmp_path):
    rows = stream_of_rows(200)
    for device in ("cpu", "cuda"):
        cache = new_cache(device, recipe, prefix_model="test", num_layers=2)
        sequence = cache.create_sequence()
        feed(cache, sequence, *(rows if device == "cpu" else to_gpu(torch, rows)))
        cache.record_tokens(sequence, range(200))
        cache.save_sequence(sequence, tmp_path / device)
    assert (tmp_path / "cuda").read_bytes() == (tmp_path / "cpu").read_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_and_gather_are_near_the_cpus(torch, recipe):
    rows = stream_of_rows(150)
    cpu, cuda = new_cache("cpu", recipe), new_cache("cuda", recipe)
    expected = np.concatenate(feed(cpu, cpu.create_sequence(), *rows))
    outs = feed(cuda, cuda.create_sequence(), *to_gpu(torch, rows))
    assert all(out.device == torch.device("cuda:0") for out in outs)
    assert relative_error(torch.cat(outs).cpu(), expected) < 4e-3
    for found, expected in zip(cuda.gather(0, 0, like=outs[0]), cpu.gather(0, 0)):
        assert np.array_equal(found.cpu().numpy(), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_tensors(torch, name):
    rows = stream_of_rows(70)
    tensors = to_gpu(torch, rows, getattr(torch, name))
    cache = new_cache(recipe="bf16")
    out = torch.cat(feed(cache, cache.create_sequence(), *tensors))
    assert out.dtype == tensors[0].dtype
    assert relative_error(out.float().cpu(), attention(*rows)) < 1.5e-2


def test_windows_softcap_and_sinks(torch):
    rows = stream_of_rows(90)
    sinks = np.linspace(-1, 2, 6, dtype=np.float32)
    cache = new_cache(recipe="f32", layer_windows=[24])
    options = dict(softcap=5.0, softmax_scale=0.2)
    out = feed(
        cache, cache.create_sequence(), *to_gpu(torch, rows), 7,
        sinks=torch.from_numpy(sinks).cuda(), **options,
    )  # fmt: skip
    expected = attention(*rows, scale=0.2, window=24, softcap=5.0, sinks=sinks)
    assert relative_error(torch.cat(out).cpu(), expected) < 1e-5


def test_forks_cuts_and_prefixes(torch):
    rows, other = stream_of_rows(100), stream_of_rows(100, seed=9)
    cache = new_cache(recipe="f32", prefix_model="test", block_size=16)
    first = cache.create_sequence()
    feed(cache, first, *to_gpu(torch, rows))
    cache.record_tokens(first, range(100))
    fork = cache.fork_sequence(first)
    cache.truncate(first, 90)
    tail = feed(cache, first, *to_gpu(torch, [x[90:] for x in other]))
    mixed = [np.concatenate([x[:90], y[90:]]) for x, y in zip(rows, other)]
    assert relative_error(torch.cat(tail).cpu(), attention(*mixed)[90:]) < 1e-5
    assert np.array_equal(cache.gather(fork, 0, like=tail[0])[0].cpu(), rows[1])
    third = cache.create_sequence_from([*range(100)])
    assert cache.num_tokens(third) == 96


def test_a_file_goes_from_the_gpu_to_the_cpu_and_back(torch, tmp_path):
    rows = stream_of_rows(100)
    shape = dict(recipe="nvfp4:auto", prefix_model="test")
    here, there, back = new_cache("cuda", **shape), new_cache("cpu", **shape), new_cache(**shape)
    sequence = here.create_sequence()
    last = feed(here, sequence, *to_gpu(torch, rows))[-1]
    here.record_tokens(sequence, range(100))
    here.save_sequence(sequence, tmp_path / "a")
    there.save_sequence(there.load_sequence(tmp_path / "a"), tmp_path / "b")
    loaded = back.load_sequence(tmp_path / "b")
    gathered = zip(back.gather(loaded, 0, like=last), here.gather(sequence, 0, like=last))
    for found, expected in gathered:
        assert torch.equal(found, expected)


# ---- arrays where they lie


def test_views_with_offsets_and_strides_are_read_and_written_in_place(torch):
    q, k, v = stream_of_rows(40)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in to_gpu(torch, (q, k, v))]
    whole = torch.full((45, 6, 100), torch.nan, device="cuda")
    out = whole[3:43, :, 20:84]
    cache = new_cache(recipe="f32")
    sequence = cache.create_sequence()
    with cache.step([(sequence, 40)]):
        assert cache.append_and_attend(0, *by_head, out) is out
    assert relative_error(out.cpu(), attention(q, k, v)) < 1e-5
    written = torch.zeros_like(whole, dtype=torch.bool)
    written[3:43, :, 20:84] = True
    assert torch.equal(whole.isnan(), ~written)
    into = tuple(torch.empty((2, 40, 64), device="cuda").transpose(0, 1) for _ in "kv")
    assert cache.gather(sequence, 0, out=into) is not None
    assert np.array_equal(into[0].cpu(), k) and np.array_equal(into[1].cpu(), v)


def test_cupys_arrays_are_read_and_made(torch):
    cupy = gpu.library("cupy")
    rows = stream_of_rows(60)
    cache = new_cache(recipe="f32")
    sequence = cache.create_sequence()
    outs = feed(cache, sequence, *(cupy.asarray(x) for x in rows))
    assert isinstance(outs[0], cupy.ndarray)
    assert relative_error(cupy.asnumpy(cupy.concatenate(outs)), attention(*rows)) < 1e-5
    k, v = cache.gather(sequence, 0, like=outs[0])
    assert np.array_equal(cupy.asnumpy(k), rows[1]) and np.array_equal(cupy.asnumpy(v), rows[2])


def test_cupys_freed_pool_is_no_concern_of_a_verb(torch):
    cupy = gpu.library("cupy")
    rows = stream_of_rows(60)
    cache = new_cache(recipe="f32")
    sequence = cache.create_sequence()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        arrays = [cupy.asarray(x) for x in rows]
        out = feed(cache, sequence, *arrays, step_tokens=60)[0]
        del arrays
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.full((1 << 20,), np.nan, np.float32)
        found = cupy.asnumpy(out)
    assert relative_error(found, attention(*rows)) < 1e-5


def test_jaxs_arrays_are_read_and_never_written(torch):
    jax = gpu.library("jax")
    rows = stream_of_rows(60)
    q, k, v = (jax.device_put(x) for x in rows)
    cache = new_cache(recipe="f32")
    sequence = cache.create_sequence()
    out = torch.empty((60, 6, 64), device="cuda")
    with pytest.raises(kvx.Error, match="out is None and q is a .*; expected a torch tensor"):
        with cache.step([(sequence, 60)]):
            cache.append_and_attend(0, q, k, v)
    with pytest.raises(kvx.Error, match="out is a .* that cannot be written in place"):
        with cache.step([(sequence, 60)]):
            cache.append_and_attend(0, q, k, v, jax.numpy.zeros((60, 6, 64)))
    with cache.step([(sequence, 60)]):
        cache.append_and_attend(0, q, k, v, out)
    del q, k, v
    gc.collect()
    jax.numpy.full((1 << 20,), np.nan).block_until_ready()
    assert relative_error(out.cpu(), attention(*rows)) < 1e-5


# ---- streams


def delayed(torch, rows):
    """The rows' tensors, whose numbers come late in the current stream."""
    tensors = [torch.full(x.shape, torch.nan, device="cuda") for x in rows]
    hosts = [torch.from_numpy(x).pin_memory() for x in rows]
    torch.cuda.current_stream().synchronize()
    torch.cuda._sleep(SLEEP)
    for tensor, host in zip(tensors, hosts):
        tensor.copy_(host, non_blocking=True)
    return tensors


@pytest.mark.parametrize("how", ["default", "current", "argument", "the cache's", "cupy's"])
def test_a_verb_is_in_the_order_of_the_callers_stream(torch, how):
    rows = stream_of_rows(80)
    side, given = torch.cuda.Stream(), {}
    cache = new_cache(recipe="f32", stream=side if how == "the cache's" else None)
    sequence = cache.create_sequence()
    # The first call of a size allocates attention's workspace, which waits.
    feed(cache, sequence, *to_gpu(torch, rows), step_tokens=80)
    cache.truncate(sequence, 0)
    torch.cuda.synchronize()
    if how == "cupy's":
        given["stream"] = gpu.library("cupy").cuda.ExternalStream(side.cuda_stream)
    if how == "argument":
        given["stream"] = side
    at = torch.cuda.default_stream() if how == "default" else side
    with torch.cuda.stream(at):
        tensors = delayed(torch, rows)
    # With `stream=` torch's current stream is another one: the verb may not look at that alone.
    with torch.cuda.stream(torch.cuda.default_stream() if given else at):
        out = torch.full(rows[0].shape, torch.nan, device="cuda") if given else None
        with cache.step([(sequence, 80)]):
            out = cache.append_and_attend(0, *tensors, out, **given)
        assert not at.query()  # the host has waited for nothing
    with torch.cuda.stream(at):
        copy = out.clone()
        at.synchronize()
    assert relative_error(copy.cpu(), attention(*rows)) < 1e-5


def test_steps_of_different_streams_follow_each_other(torch):
    rows = stream_of_rows(96)
    cache = new_cache(recipe="f32")
    sequence = cache.create_sequence()
    outs = []
    for first in range(0, 96, 24):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensors = delayed(torch, [x[first : first + 24] for x in rows])
            with cache.step([(sequence, 24)]):
                outs.append(cache.append_and_attend(0, *tensors))
    torch.cuda.synchronize()
    assert relative_error(torch.cat(outs).cpu(), attention(*rows)) < 1e-5


def test_decoding_allocates_nothing_and_waits_for_nothing(torch):
    rows = to_gpu(torch, stream_of_rows(400))
    cache = new_cache(recipe="nvfp4:auto")
    sequence = cache.create_sequence()
    feed(cache, sequence, *(x[:300] for x in rows))
    out = torch.empty((1, 6, 64), device="cuda")
    one = [x[300:301] for x in rows]
    for _ in range(3):
        with cache.step([(sequence, 1)]):
            cache.append_and_attend(0, *one, out)
    cache.synchronize()
    before = torch.cuda.mem_get_info()
    for _ in range(20):
        with cache.step([(sequence, 1)]):
            cache.append_and_attend(0, *one, out)
    assert torch.cuda.mem_get_info() == before


def test_threads_on_streams_of_their_own(torch):
    rows = stream_of_rows(120)
    expected = attention(*rows)
    errors = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = attended(torch, to_gpu(torch, rows))
            errors.append(relative_error(found, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and max(errors) < 1e-5


# ---- a second GPU


def test_caches_on_two_gpus_hold_the_same(tmp_path):
    torch = gpu.second()
    rows = stream_of_rows(150)
    for device in ("cuda:0", "cuda:1"):
        cache = new_cache(device, "nvfp4:auto", prefix_model="test")
        sequence = cache.create_sequence()
        tensors = [torch.from_numpy(x).to(device) for x in rows]
        outputs = feed(cache, sequence, *tensors)
        assert {str(out.device) for out in outputs} == {device}
        cache.record_tokens(sequence, range(150))
        cache.save_sequence(sequence, tmp_path / device)
        np.save(tmp_path / f"{device}.npy", torch.cat(outputs).cpu().numpy())
    assert (tmp_path / "cuda:0").read_bytes() == (tmp_path / "cuda:1").read_bytes()
    first, second = (np.load(tmp_path / f"cuda:{i}.npy") for i in range(2))
    assert relative_error(first, second) < 1e-5


def test_a_layers_pages_on_a_second_gpu(torch):
    gpu.second()
    (out, found), (out_there, found_there) = (
        through_a_layer(torch, "int8", device) for device in ("cuda:0", "cuda:1")
    )
    assert relative_error(out_there, out) < 1e-5
    assert all(np.array_equal(here, there) for here, there in zip(found, found_there))


def test_arrays_of_another_gpu_are_named(torch):
    gpu.second()
    there = {name: array.to("cuda:1") for name, array in arrays_on(torch, "cuda").items()}
    with pytest.raises(kvx.Error, match="^q lies on cuda:1; expected cuda:0, the cache's"):
        one_step(new_cache(), there)
    one_step(new_cache("cuda:1"), there)


# ---- what is refused


def test_steps_of_several_threads_are_open_at_once(torch):
    """Each thread on a stream and with a kvx.Step of its own."""
    rows = [stream_of_rows(60, seed) for seed in range(3)]
    expected = []
    for one in rows:
        cache = new_cache()
        expected.append(torch.cat(feed(cache, cache.create_sequence(), *to_gpu(torch, one))))
    cache = new_cache()
    sequences = [cache.create_sequence() for _ in rows]
    found, start = {}, threading.Barrier(3)

    def work(i):
        step = kvx.Step(cache)
        start.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            q, k, v = to_gpu(torch, rows[i])
            outs = []
            for first in range(0, 60, 20):
                part = slice(first, first + 20)
                with step.begin([(sequences[i], 20)]):
                    outs.append(step.append_and_attend(0, q[part], k[part], v[part]))
            found[i] = torch.cat(outs).cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, one in enumerate(expected):
        assert relative_error(found[i].numpy(), one.cpu().numpy()) < 2e-3


def one_step(cache, arrays, **options):
    sequence = cache.create_sequence()
    try:
        with cache.step([(sequence, arrays["q"].shape[0])]):
            return cache.append_and_attend(0, **arrays, **options)
    finally:
        cache.free_sequence(sequence)


def arrays_on(torch, device):
    rows = {name: torch.from_numpy(x).to(device) for name, x in zip("qkv", stream_of_rows(5))}
    return {**rows, "out": torch.empty_like(rows["q"])}


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_arrays_of_another_place_are_named(torch, name):
    on_cpu, on_gpu = arrays_on(torch, "cpu"), arrays_on(torch, "cuda")
    cuda, cpu = new_cache(), new_cache("cpu")
    with pytest.raises(kvx.Error, match=f"^{name} lies on the CPU; expected cuda:0, the cache's"):
        one_step(cuda, {**on_gpu, name: on_cpu[name]})
    with pytest.raises(kvx.Error, match=f"^{name} lies on cuda:0; expected the CPU"):
        one_step(cpu, {**on_cpu, name: on_gpu[name]})
    other_gpu = OnDevice(on_cpu[name].numpy(), device_id=1)
    with pytest.raises(kvx.Error, match=f"^{name} lies on cuda:1; expected cuda:0"):
        one_step(cuda, {**on_gpu, name: other_gpu})
    wrong_device = f"^{name} is declared .* cuda:0; CUDA reports its memory as the host"
    with pytest.raises(kvx.Error, match=wrong_device):
        one_step(cuda, {**on_gpu, name: OnDevice(on_cpu[name].numpy())})
    assert one_step(cuda, on_gpu) is on_gpu["out"]


def test_other_bad_arrays_are_named(torch):
    cache, good = new_cache(), arrays_on(torch, "cuda")
    whole = torch.zeros((5, 2, 128), device="cuda")
    cases = {
        "k has a stride of 2 elements along head_dim": {"k": whole[:, :, ::2]},
        "v has the shape \\[5, 2, 128\\]": {"v": whole},
        "q is float64; expected": {"q": good["q"].double()},
        "out has rows that lie over each other": {"out": good["q"][:1].expand(5, 6, 64)},
        "out lies over q": {"out": good["q"]},
        r"sinks is float32 \[5\]; expected float32 \[6\]": {"sinks": torch.zeros(5, device="cuda")},
        "sinks lies on the CPU": {"sinks": torch.zeros(6)},
        "q is a .* that cannot be read": {"q": good["q"].to_sparse()},
        "stream is a str; expected a stream of torch or CuPy": {"stream": "fast"},
        "q is a .* negated|q is a view of numbers that are negated": {
            "q": torch._neg_view(good["q"])
        },
    }
    for message, bad in cases.items():
        with pytest.raises(kvx.Error, match=message):
            one_step(cache, {**good, **bad})
    one_step(cache, good)
    torch.cuda.synchronize()


def test_places_that_are_not_there(torch):
    with pytest.raises(kvx.UnsupportedError, match="device is 'cuda:63': CUDA device 63 is not"):
        new_cache("cuda:63")
    with pytest.raises(kvx.Error, match="stream is a float; expected"):
        new_cache(stream=1.5)
    with pytest.raises(kvx.Error, match="max_step_tokens is 2; expected at least max_sequences, 3"):
        new_cache(max_step_tokens=2)
    with pytest.raises(kvx.OutOfRangeError):
        new_cache(num_layers=64, max_tokens=1 << 24, max_sequences=64)
    cache = new_cache(max_step_tokens=16)
    with pytest.raises(kvx.Error, match="17"):
        cache.begin_step([(cache.create_sequence(), 17)])
    with pytest.raises(kvx.Error, match="like is None; expected a torch tensor or CuPy array"):
        cache.gather(0, 0)


def test_a_closed_cache_says_so(torch):
    cache = new_cache()
    tensors = arrays_on(torch, "cuda")
    one_step(cache, tensors)
    cache.close()
    with pytest.raises(kvx.Error, match="the cache is closed"):
        cache.begin_step([(0, 1)])
    with pytest.raises(kvx.Error, match="the cache is closed"):
        cache.append_and_attend(0, **tensors)


def through_a_layer(torch, recipe, device):
    """What attention over the pages of a layer gives, and what they hold, as NumPy's arrays."""
    q, k, v = stream_of_rows(70)
    table, lengths, starts = (np.array(x, np.int32) for x in ([[3, 1, 4, 2, 5]], [70], [0, 70]))
    slots = np.array([table[0, t // 16] * 16 + t % 16 for t in range(70)], np.int64)
    layer = kvx.PagedLayer(recipe, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    pages = np.zeros((6, layer.page_bytes), np.uint8)
    arrays = [pages, k, v, slots, q, table, lengths, starts]
    if device != "cpu":
        arrays = to_gpu(torch, arrays, device=device)
    pages, k, v, slots, q, *batch = arrays
    layer.append(pages, k, v, slots)
    out = layer.attend(pages, q, *batch)
    found = layer.gather(pages, batch[0][0], 70, like=q)
    out, *found = (np.asarray(x if device == "cpu" else x.cpu()) for x in (out, *found))
    return out, found


@pytest.mark.parametrize("recipe", RECIPES[:-2])
def test_a_layers_pages_on_a_gpu_hold_what_the_cpus_do(torch, recipe):
    (out, found), (out_there, found_there) = (
        through_a_layer(torch, recipe, device) for device in ("cpu", "cuda")
    )
    assert relative_error(out_there, out) < 4e-3
    assert all(np.array_equal(here, there) for here, there in zip(found, found_there))


def test_latent_records_on_a_gpu_are_the_cpus(torch):
    """vLLM's rows of 656 bytes: append, attend, transcode to bf16 rows and back."""
    q, rows = random_rows(3, 1, 16, 576), random_rows(4, 70, 1, 576)
    table, lengths, starts = (np.array(x, np.int32) for x in ([[3, 1, 4, 2, 0]], [70], [0, 1]))
    slots = np.array([table[0, t // 16] * 16 + t % 16 for t in range(70)], np.int64)

    def results(device):
        records = torch.zeros((5, 16, 656), dtype=torch.uint8, device=device)
        back = torch.zeros_like(records)
        wide = torch.zeros((5, 16, 576), dtype=torch.bfloat16, device=device)
        layer = engines.vllm.latent_layer(records, "fp8_ds_mla")
        others = [engines.vllm.latent_layer(wide, "bfloat16"),
                  engines.vllm.latent_layer(back, "fp8_ds_mla")]
        given = [torch.from_numpy(x).to(device) for x in (q, rows, slots, table, lengths, starts)]
        there = given[2]
        layer.append(given[1], None, there)
        out = layer.attend(given[0], engines.packed(*given[3:5]), given[5])
        for source, target in ((layer, others[0]), (others[0], others[1])):
            engines.transcode(source, target, there, there)
        arrays = (records, wide.view(torch.int16), back)
        return out.cpu().numpy(), [x.cpu().numpy() for x in arrays]

    (out, bytes_here), (out_there, bytes_there) = results("cpu"), results("cuda")
    assert relative_error(out_there, out) < 4e-3
    assert all(np.array_equal(here, there) for here, there in zip(bytes_here, bytes_there))


def tgis_paged(arrays):
    """Bytes of K and V, and their layer: four blocks of 16 tokens and two heads of 64."""
    k, v = arrays(4 * 2 * 64 * 16 * 2), arrays(4 * 2 * 64 * 16 * 2)
    half = gpu.library("torch").float16
    views = k.view(half).reshape(4, 2, 8, 16, 8), v.view(half).reshape(4, 2, 64, 16)
    return [k, v], engines.tgi.layer(views, "paged", "f16")


def llamacpps(kind, row_bytes, **options):
    def make(arrays):
        k, v = arrays(64 * 2 * row_bytes), arrays(64 * 2 * row_bytes)
        return [k, v], engines.llamacpp.layer(
            k, v, kind, kind, num_kv_heads=2, kv_size=16, num_streams=4, **options)

    return make


@pytest.mark.parametrize(
    "make",
    [
        tgis_paged,
        llamacpps("f16", 128, v_trans=True),
        llamacpps("q8_0", 68),
        llamacpps("q4_0", 36),
    ],
)
def test_engines_rows_in_fragments_on_a_gpu_are_the_cpus(torch, make):
    q, k, v = random_rows(3, 1, 4, 64), random_rows(4, 40, 2, 64), random_rows(5, 40, 2, 64)
    table, lengths, starts = (np.array(x, np.int32) for x in ([[2, 0, 3]], [40], [0, 1]))
    slots = np.array([table[0, t // 16] * 16 + t % 16 for t in range(40)], np.int64)

    def results(device):
        memory, layer = make(lambda size: torch.zeros(size, dtype=torch.uint8, device=device))
        given = [torch.from_numpy(x).to(device) for x in (q, k, v, slots, table, lengths, starts)]
        layer.append(given[1], given[2], given[3])
        there = engines.packed(*given[4:6])
        out = layer.attend(given[0], there, given[6])
        found = layer.flatten(there, [(0, 3, 30)], like=given[0])
        return out.cpu().numpy(), [x.cpu().numpy() for x in (*memory, *found)]

    (out, found), (out_there, found_there) = results("cpu"), results("cuda")
    assert relative_error(out_there, out) < 4e-3
    assert all(np.array_equal(here, there) for here, there in zip(found, found_there))


def test_turbominds_pointers_on_a_gpu_become_ids_there(torch):
    data = torch.zeros((4, 640), dtype=torch.uint8, device="cuda")
    first = data.data_ptr()
    offsets = torch.tensor([640, 1920, 0, 1, 2560, -640])
    ids = engines.turbomind.block_ids((first + offsets).cuda(), data)
    assert ids.is_cuda and ids.dtype == torch.int32
    assert ids.tolist() == [1, 3, 0, -1, -1, -1]
    ids = engines.turbomind.block_ids((first + offsets[:3]).pin_memory(), data)
    assert isinstance(ids, np.ndarray) and ids.tolist() == [1, 3, 0]
    with pytest.raises(kvx.Error, match="begins no block"):
        engines.turbomind.block_ids((first + offsets).pin_memory(), data)


def test_cupys_pages_and_jaxs_rows(torch):
    cupy, jax = gpu.library("cupy"), gpu.library("jax")
    cupy.cuda.Device(0).use()  # JAX begins on every GPU, and stays on the last
    _, k, v = stream_of_rows(20)
    layer = kvx.PagedLayer("f32", num_kv_heads=2, head_dim=64, block_size=16, device="cuda")
    pages = cupy.zeros((3, layer.page_bytes), cupy.uint8)
    slots = cupy.arange(20) + 16
    layer.append(pages, jax.device_put(k), jax.device_put(v), slots)
    found = layer.gather(pages, [1, 2], 20, like=cupy.zeros(1, cupy.float32))
    assert np.array_equal(cupy.asnumpy(found[0]), k) and np.array_equal(cupy.asnumpy(found[1]), v)
    rows = kvx.quantize(cupy.asarray(k), "int8")
    assert np.array_equal(cupy.asnumpy(rows.codes), kvx.quantize(k, "int8").codes)
    assert np.array_equal(cupy.asnumpy(rows.dequantize()), kvx.quantize(k, "int8").dequantize())
    with pytest.raises(kvx.Error, match="x lies on cuda:0 and is a .*; expected a torch tensor"):
        kvx.quantize(jax.device_put(k), "int8")


def test_a_layer_of_the_cpu_refuses_pages_of_a_gpu(torch):
    x = torch.zeros((4, 64), device="cuda")
    layer = kvx.PagedLayer("int8", num_kv_heads=1, head_dim=64)
    pages = torch.zeros((4, layer.page_bytes), dtype=torch.uint8, device="cuda")
    with pytest.raises(kvx.Error, match="pages lies on cuda:0; expected the CPU"):
        layer.append(pages, x[:, None], x[:, None], torch.arange(4))


@pytest.mark.parametrize("options", [
    dict(quantize="fp4"), dict(quantize="int4"), dict(quantize="int8"), dict(dtype="float16"),
    dict(dtype="float32", evict=True), dict(quantize="fp4", evict=True),
    dict(quantize="int8", window=24, max_append=8),
], ids=str)  # fmt: skip
def test_metal_marlins_cache_on_a_gpu_is_the_cpus(torch, options):
    """Codes and scales to the byte, through a ring, and past max_seq_len with eviction."""
    from kvx.marlin import CacheConfig, KVCache

    config = CacheConfig(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_seq_len=48, **options
    )
    caches = [KVCache(config, batch_size=3, device=device) for device in ("cpu", "cuda")]
    torch.manual_seed(0)
    steps = [30, 8, 1, 1, 8]
    if options.get("evict"):
        steps += [1, 5]
    for tokens in steps:
        for layer in range(2):
            k, v = torch.randn(2, 3, 2, tokens, 64)
            q = torch.randn(3, 4, min(tokens, 8), 64)
            found = []
            for cache in caches:
                place = torch.device(cache.device)
                cache.append(layer, k.to(place), v.to(place))
                found.append([
                    cache.attention(layer, q.to(place), causal=causal).cpu() for causal in (True, False)
                ])  # fmt: skip
                found[-1] += [x.cpu() for x in cache.get_kv(layer, like=q.to(place))]
            for expected, got in zip(*found):
                assert relative_error(got.numpy(), expected.numpy()) < 2e-3
        for cache in caches:
            cache.advance(tokens)
    for name in ("k_packed", "v_packed", "k_scales", "v_scales"):
        for expected, got in zip(getattr(caches[0], name), getattr(caches[1], name)):
            if expected is None:
                assert got is None
            else:
                got = torch.from_dlpack(got)
                assert got.is_cuda
                got = got.cpu().numpy()
                if "window" in options:  # a ring of the GPU's has more room, and so other slots
                    kept = np.arange(sum(steps) - expected.shape[2], sum(steps))
                    assert got.shape[2] == 64
                    expected, got = (x[:, :, kept % x.shape[2]] for x in (expected, got))
                assert np.array_equal(got, expected)
    with pytest.raises(kvx.Error, match="k lies on the CPU; expected cuda:0|k lies on"):
        caches[1].append(0, k, v)
    with pytest.raises(kvx.Error, match="like is None"):
        caches[1].get_kv(0)


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_turbominds_process_kv_on_a_gpu_writes_the_cpus_bytes(torch, pairs):
    from kvx import engines
    from kvx.turbomind import KvCacheMode, get_cache_block_size

    shape = dict(num_layers=1, num_kv_heads=2, head_dim=64, block_len=8)
    size = get_cache_block_size(KvCacheMode.kInt8, **shape).block_bytes
    torch.manual_seed(0)
    k, v = torch.randn(2, 12, 2, 64)
    k_bias, v_bias = torch.randn(2, 2, 64)
    positions = torch.arange(12) + 5
    # Turns whose cosines and sines are exact on every device.
    inv_freq = torch.zeros(16)
    found = []
    for device in ("cpu", "cuda"):
        data = torch.zeros(3, size, dtype=torch.uint8, device=device)
        layer = engines.turbomind.layer(data, None, mode=KvCacheMode.kInt8, layer=0, **shape)
        rows = k.to(device)
        engines.turbomind.process_kv(
            layer, rows, v.to(device), torch.arange(4, 16).to(device),
            k_bias=k_bias.to(device), v_bias=v_bias.to(device), positions=positions.to(device),
            inv_freq=inv_freq.to(device), pairs=pairs,
        )  # fmt: skip
        assert torch.equal(rows.cpu(), k)
        found.append(data.cpu())
    assert torch.equal(found[0], found[1]) and found[0].any()


def test_host_memory_keeps_a_gpus_blocks_with_checksums(torch):
    """Copies wait for what the stream was given before, and see changes in host memory."""
    torch.manual_seed(0)
    layers = [torch.randint(0, 256, (6, size), dtype=torch.uint8, device="cuda") for size in (64, 40)]
    expected = [layer.cpu() for layer in layers]
    stream = torch.cuda.Stream()
    blocks = kvx._core.HostBlocks([layers], 4, stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for layer in layers:
            layer += 1
    blocks.store(1, 0, [5, 2], [0, 3])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(1, True, 2 * 104)]
    for layer in layers:
        layer.zero_()
    torch.cuda.synchronize()
    blocks.load(2, 0, [1, 0], [0, 3])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(2, True, 2 * 104)]
    for layer, before in zip(layers, expected):
        assert torch.equal(layer[[1, 0]].cpu(), before[[5, 2]] + 1)
        assert not layer[2:].any()
    blocks.memory[3, 70] ^= 1
    blocks.load(3, 0, [1, 0], [0, 3])
    blocks.wait_for_all()
    assert blocks.drain_finished() == [(3, False, 2 * 104)]
    with pytest.raises(kvx.Error, match="pages"):
        kvx._core.HostBlocks([[layers[0], expected[1]]], 4)


NAMES = ["q", "k", "v", "out"]
SPOILED = ["no", "no", "no", "cpu", "dtype", "shape", "flat", "strides", "list", "none", "empty"]


@given(st.fixed_dictionaries({name: st.sampled_from(SPOILED) for name in NAMES}), st.booleans())
def test_no_mixture_of_bad_arrays_breaks_the_cache(how, is_on_side_stream):
    torch = gpu.library("torch")

    def spoiled(tensor, how):
        changes = {
            "no": lambda: tensor,
            "cpu": lambda: tensor.cpu(),
            "dtype": lambda: tensor.long(),
            "shape": lambda: tensor[:, :1],
            "flat": lambda: tensor.reshape(-1),
            "strides": lambda: tensor.repeat_interleave(2, 2)[:, :, ::2],
            "list": lambda: tensor.tolist(),
            "none": lambda: None,
            "empty": lambda: tensor[:0],
        }
        return changes[how]()

    cache = new_cache(recipe="f32")
    good = arrays_on(torch, "cuda")
    sequence = cache.create_sequence()
    cache.begin_step([(sequence, 5)])
    side = torch.cuda.Stream() if is_on_side_stream else None
    is_good = all(word == "no" or (name == "out" and word == "none") for name, word in how.items())
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    bad = {name: spoiled(good[name], how[name]) for name in NAMES}
    torch.cuda.synchronize()
    if is_good:
        out = cache.append_and_attend(0, **bad, stream=side)
    else:
        with pytest.raises((kvx.Error, TypeError)):
            cache.append_and_attend(0, **bad, stream=side)
        out = cache.append_and_attend(0, **good)
    cache.end_step()
    torch.cuda.synchronize()
    expected = attention(*(good[name].cpu().numpy() for name in "qkv"))
    assert relative_error(out.cpu(), expected) < 1e-5


# ---- the page


def test_every_block_of_the_python_page_for_gpus_runs(torch):
    assert run_blocks("docs/python.md", " gpu", np=np, kvx=kvx) >= 2
