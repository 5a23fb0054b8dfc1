"""transformers on a GPU: with an f32 cache an f32 model generates DynamicCache's tokens, from packed
bytes on the device. Skips by name where there is no GPU (tests/python/gpu.py)."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from conftest import left_padded, passed, prompt, right_padded, tiny_model, tokens_of
from transformers import DynamicCache

import kvx
import kvx.hf
from kvx.hf.tune import collect

sys.path.append(str(Path(__file__).parents[1] / "python"))
import gpu  # noqa: E402


@pytest.fixture(autouse=True)
def needs_gpu():
    gpu.library("torch")
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def both(name, inputs, recipe="f32", dtype=torch.float32, **options):
    """What the model generates with DynamicCache and with kvx's, and kvx's cache."""
    stock = tiny_model(name, dtype).cuda()
    expected = tokens_of(stock, DynamicCache(config=stock.config), on_gpu(inputs), **options)
    model = kvx.hf.enable(tiny_model(name, dtype).cuda())
    cache = kvx.hf.Cache(model.config, recipe)
    return tokens_of(model, cache, on_gpu(inputs), **options), expected, cache


@pytest.mark.parametrize("recipe", ["f32", "f32:sink=16,recent=32,full_precision=f32"])
def test_greedy(model_name, recipe):
    found, expected, cache = both(model_name, {"input_ids": prompt(tokens=83)}, recipe)
    assert torch.equal(found, expected)
    assert all(layer.cache.device == "cuda:0" for layer in cache.layers)


def test_left_padded_batches(model_name):
    found, expected, _ = both(model_name, left_padded(3, 30, [0, 11, 29]))
    assert torch.equal(found, expected)


def test_right_padded_batches():
    found, expected, _ = both("llama", right_padded(3, 150, [0, 11, 149]))
    assert torch.equal(found, expected)


def test_masks_with_holes():
    inputs = left_padded(2, 30, [0, 5])
    inputs["attention_mask"][1, 12:15] = 0
    found, expected, _ = both("llama", inputs)
    assert torch.equal(found, expected)


def test_beam_search(model_name):
    options = dict(num_beams=3, num_return_sequences=2)
    found, expected, _ = both(model_name, left_padded(2, 70, [0, 9]), **options)
    assert torch.equal(found, expected)


def test_assisted_generation_crops(model_name):
    options = dict(assistant_model=tiny_model("llama").cuda())
    found, expected, _ = both(model_name, {"input_ids": prompt(tokens=30)}, **options)
    assert torch.equal(found, expected)


def test_a_long_prompt_comes_in_steps():
    sizes = dict(max_position_embeddings=4096)
    stock = tiny_model("llama", **sizes).cuda()
    inputs = on_gpu({"input_ids": prompt(tokens=2500)})
    options = dict(max_new_tokens=8)
    expected = tokens_of(stock, DynamicCache(config=stock.config), inputs, **options)
    model = kvx.hf.enable(tiny_model("llama", **sizes).cuda())
    found = tokens_of(model, kvx.hf.Cache(model.config, "f32"), inputs, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4:auto", "int4:auto"])
def test_packed_bfloat16_models_say_nearly_what_they_would(recipe):
    model = tiny_model("llama", torch.bfloat16).cuda()
    ids = prompt(tokens=120).cuda()
    with torch.no_grad():
        expected = model(input_ids=ids, **passed(DynamicCache(config=model.config))).logits
        kvx.hf.enable(model)
        found = model(input_ids=ids, **passed(kvx.hf.Cache(model.config, recipe))).logits
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert 0 < error < 0.2


def test_compare():
    model = tiny_model("llama").cuda()
    tokens = prompt(tokens=200)[0].cuda()
    figures = kvx.hf.compare(model, tokens, ["int8"], context=100, windows=2, shows_progress=False)
    assert [cache.name for cache in figures] == ["bf16", "int8"]
    assert abs(figures[1].kl.value) < 0.1 and figures[1].saturated_inputs == 0


def test_caches_that_are_the_cpus_say_so():
    model = tiny_model("llama").cuda()
    with torch.no_grad(), pytest.raises(kvx.UnsupportedError, match="DecodingCache works on cpu"):
        cache = kvx.hf.DecodingCache(model.config, "int8")
        model(input_ids=prompt().cuda(), **passed(cache))


def test_without_a_kvx_cache_sdpa_attends(model_name):
    inputs = on_gpu(left_padded(2, 30, [0, 11]))
    stock, model = tiny_model(model_name).cuda(), kvx.hf.enable(tiny_model(model_name).cuda())
    shown = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = stock(**inputs, use_cache=False).logits[shown]
        found = model(**inputs, use_cache=False).logits[shown]
    assert torch.allclose(found, expected, atol=2e-3, rtol=1e-3)
    expected = tokens_of(stock, DynamicCache(config=stock.config), inputs)
    assert torch.equal(tokens_of(model, DynamicCache(config=model.config), inputs), expected)
    ids = inputs["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_copies_share_blocks_where_there_is_room():
    model = kvx.hf.enable(tiny_model("llama").cuda())
    inputs = on_gpu({"input_ids": prompt(tokens=70)})
    cache = kvx.hf.Cache(model.config, "int8")
    with torch.no_grad():
        model(**inputs, **passed(cache))
    with pytest.raises(kvx.OutOfRangeError, match=r"kvx.hf.Cache\(\.\.\., max_batch=\.\.\.\)"):
        copy.deepcopy(cache)
    cache = kvx.hf.Cache(model.config, "int8", max_batch=3)
    with torch.no_grad():
        model(**inputs, **passed(cache))
    used = cache.memory()
    longer = {"input_ids": torch.cat([inputs["input_ids"], prompt(1, 5, seed=4).cuda()], 1)}
    found = []
    for _ in range(5):
        fork = copy.deepcopy(cache)
        assert cache.memory() == fork.memory()
        found.append(tokens_of(model, fork, longer, max_new_tokens=9))
    assert all(torch.equal(tokens, found[0]) for tokens in found)
    assert cache.get_seq_length() == 70 and cache.memory() <= 4 * used


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_whole_compiled_graph_says_the_same_tokens(backend):
    inputs = on_gpu(left_padded(2, 40, [0, 9]))
    stock = tiny_model("llama").cuda()
    expected = tokens_of(stock, DynamicCache(config=stock.config), inputs)
    model = kvx.hf.enable(tiny_model("llama").cuda())
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    for _ in range(2):
        cache = kvx.hf.Cache(model.config, "f32")
        assert torch.equal(tokens_of(model, cache, inputs), expected)
    torch.compiler.reset()


def rows_of_a_layer(dtype):
    torch.manual_seed(3)
    q, k, v = (torch.randn(heads, 70, 64).transpose(0, 1) for heads in (4, 2, 2))
    return [rows.to(dtype) for rows in (q, 3 * k, v)]  # strided, as attention gets them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_counted_where_they_lie(dtype):
    def counted(rows):
        statistics = kvx._core.Statistics(
            num_layers=1, num_q_heads=4, num_kv_heads=2, k_head_dim=64, v_head_dim=64
        )
        for first, last in ((0, 3), (3, 70)):
            q, k, v = (part[first:last] for part in rows)
            statistics.feed(0, first, k, v)
            statistics.feed_queries(0, first, q)
        return [
            statistics.percentile(0, side, head, percent, 16, 8)
            for side in "kv" for head in range(2) for percent in (50, 99.9, 100)
        ]  # fmt: skip

    rows = rows_of_a_layer(dtype)
    assert counted([part.cuda() for part in rows]) == counted(rows)


def test_tuning_on_a_gpu(tmp_path):
    torch.manual_seed(5)
    text = torch.randint(3, 97, (40 * 4,)).tolist()
    model = kvx.hf.enable(tiny_model("llama"))
    on_cpu = collect(model, [text], shows_progress=False)
    model = model.cuda()
    on_cuda = collect(model, [text], shows_progress=False)
    for layer in range(model.config.num_hidden_layers):
        for side in "kv":
            found, expected = (x.percentile(layer, side, 0, 100) for x in (on_cuda, on_cpu))
            assert found == pytest.approx(expected, rel=1e-3)
    tuned = kvx.hf.tune(
        model, text, tmp_path / "m.kvxtune", recipe="int4:immediate", context=40,
        num_prompts=4, tables=("k_mean", "v_mean", "k_feedback"), shows_progress=False,
    )  # fmt: skip
    cache = kvx.hf.Cache(model.config, f"tuned:{tuned.path}")
    assert len(tokens_of(model, cache, on_gpu({"input_ids": prompt(tokens=20)}))) == 1


def test_a_nan_on_a_gpu_is_named_by_its_layer():
    model = kvx.hf.enable(tiny_model("llama")).cuda()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
    with pytest.raises(kvx.Error, match="v of layer 1 is -?nan at position"):
        collect(model, [[5, 6, 7, 8, 9, 10]], shows_progress=False)
