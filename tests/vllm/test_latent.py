"""Latent attention (MLA): transformers' own tokens, from latent rows in vLLM's pages."""

import pytest
import torch
from engines import BLOCK, LATENT_CONFIGS, Engine, prompts, save_model, transformers_tokens
from test_connector import connected, counts, files_of
from test_offloading import offloading, said
from test_registration import config
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import kvx
from kvx.torch import BatchAttention
from kvx.vllm import latent, layer_pages

pytestmark = pytest.mark.usefixtures("in_this_process")

CHUNKS = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in LATENT_CONFIGS}


@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_an_f32_cache_says_the_tokens_of_transformers(models, name):
    """Prompts in chunks of 48 tokens, several requests in a step, and cached prefixes."""
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(models[name], inputs)
    with Engine(models[name], "f32", enable_prefix_caching=True, **CHUNKS) as engine:
        assert engine.tokens(inputs) == expected
        outputs = engine.outputs(inputs)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 64, 128, 32]
        assert max(len(set(tokens)) for tokens in expected) >= 8  # no stutter


@pytest.mark.parametrize("recipe", ["int8", "int8+bf16", "nvfp4+bf16", "int4+bf16:hadamard"])
def test_quantised_rows_say_what_they_say_in_transformers(models, recipe):
    inputs = prompts([5, 70, 131])
    expected = transformers_tokens(models["deepseek_v3"], inputs, recipe, count=8)
    with Engine(models["deepseek_v3"], recipe, **CHUNKS) as engine:
        assert engine.tokens(inputs, count=8) == expected


def test_fp8_ds_mla_is_a_recipe_of_latent_rows(models):
    inputs = prompts([5, 70, 131])
    recipe = "fp8_e4m3+bf16:source=computed,g128"
    expected = transformers_tokens(models["deepseek_v3"], inputs, recipe, count=8)
    options = dict(kv_cache_dtype="fp8_ds_mla", attention_backend="CUSTOM", **CHUNKS)
    with Engine(models["deepseek_v3"], **options) as engine:
        assert engine.tokens(inputs, count=8) == expected
        assert engine.cached_tokens == (1 << 24) // (3 * BLOCK * (128 + 4 + 128)) * BLOCK


@pytest.mark.parametrize(
    "recipe, row_bytes", [("f32", 768), ("int8+bf16", 260), ("nvfp4+bf16", 200), ("int4", 102)]
)
def test_a_page_holds_each_row_once(models, recipe, row_bytes):
    with Engine(models["deepseek_v2"], recipe) as engine:
        layers = 3 * BLOCK * row_bytes
        assert engine.cached_tokens == (1 << 24) // layers * BLOCK


def test_requests_inside_their_windows_say_the_tokens_of_a_16_bit_cache(models):
    inputs = prompts([5, 40, 33, 60])
    options = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=3)
    with Engine(models["deepseek_v3"], "bf16", **options) as engine:
        expected = engine.tokens(inputs)
    with Engine(models["deepseek_v3"], "int4+bf16:sink=16,recent=128", **options) as engine:
        assert engine.tokens(inputs) == expected


def test_an_engine_goes_on_from_the_files_of_another(models, tmp_path):
    (prompt,) = prompts([120])
    with connected(models["deepseek_v2"], tmp_path, "int8+bf16") as engine:
        expected = engine.tokens([prompt])
        assert counts(engine)["found"] == 0
    assert sum(kvx.verify(file) for file in files_of(tmp_path)) == 3 * len(files_of(tmp_path)) > 0
    with connected(models["deepseek_v2"], tmp_path, "int8+bf16") as engine:
        (output,) = engine.outputs([prompt])
        assert output.num_cached_tokens == 96
        assert [output.outputs[0].token_ids] == expected


def test_blocks_come_back_from_host_memory(models):
    (prompt,) = prompts([120])
    with offloading(models["deepseek_v2"], "nvfp4+bf16") as engine:
        (expected,) = engine.tokens([prompt])
        assert said(engine, prompt) == (expected, 96)


def test_a_cpu_without_amx_has_prefixes_chunks_and_blocks_as_wished(models, monkeypatch):
    """vLLM's own kernel there has none of them, and its platform sets that for any backend."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    inputs = prompts([70, 131])
    with Engine(models["deepseek_v2"], "f32", enable_prefix_caching=True, **CHUNKS) as engine:
        vllm_config = engine.llm.llm_engine.vllm_config
        assert vllm_config.cache_config.block_size == BLOCK
        assert vllm_config.scheduler_config.max_num_batched_tokens == 48
        expected = engine.tokens(inputs)
        outputs = engine.outputs(inputs)
        assert [output.num_cached_tokens for output in outputs] == [64, 128]
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("eager", [True, False])
def test_several_processes_and_torch_compile(models, monkeypatch, eager):
    inputs = prompts([5, 70])
    expected = transformers_tokens(models["deepseek_v3"], inputs)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traced by Dynamo, not compiled by g++
    with Engine(models["deepseek_v3"], "f32", enforce_eager=eager) as engine:
        assert engine.tokens(inputs) == expected


HEADS, LATENT, ROTARY, TOKENS = 4, 128, 64, 40


def new_impl(monkeypatch, recipe, kv_cache_dtype="auto", **options):
    """(impl, kv_cache), as vLLM makes them."""
    monkeypatch.setattr(layer_pages, "get_current_vllm_config", lambda: config(recipe))
    impl = latent.KvxLatentImpl(
        HEADS,
        LATENT + ROTARY,
        0.1,
        1,
        None,
        options.pop("sliding_window", None),
        kv_cache_dtype,
        None,
        kv_lora_rank=LATENT,
        **options,
    )
    mode = layer_pages.get_kv_quant_mode(kv_cache_dtype)
    sizes = dict(block_size=16, num_kv_heads=1, head_size=LATENT + ROTARY, dtype=torch.bfloat16)
    if kv_cache_dtype == "fp8_ds_mla":  # as vLLM makes it for any model
        sizes |= dict(dtype=torch.uint8, state_content_bytes=656)
    sizes |= dict(cache_dtype_str=kv_cache_dtype, kv_quant_mode=mode)
    spec = latent.KvxLatentBackend.customize_spec(MLAAttentionSpec(**sizes))
    assert latent.KvxLatentBackend.customize_spec(spec) is spec
    return impl, torch.zeros((8, 16, spec.state_content_bytes), dtype=torch.uint8)


def run(impl, kv_cache):
    """Stores and attends a prompt in blocks 5, 2 and 7; returns (q, rows, out)."""
    torch.manual_seed(1)
    q, rows = torch.randn(TOKENS, HEADS, LATENT + ROTARY), torch.randn(TOKENS, LATENT + ROTARY)
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    at = torch.arange(TOKENS)
    slots = table[0, at // 16].long() * 16 + at % 16
    given = rows[:, :LATENT], rows[:, None, LATENT:], kv_cache, slots
    impl.do_kv_cache_update(*given, impl.kv_cache_dtype, None)
    batch = BatchAttention()
    batch.plan(table, torch.tensor([TOKENS]).int(), torch.tensor([0, TOKENS]).int())
    metadata = latent.KvxLatentMetadata(batch, TOKENS, TOKENS, 1)
    out, lse = impl.forward_mqa((q[..., :LATENT], q[..., LATENT:]), kv_cache, metadata, None)
    assert lse is None
    return q, rows, out


@pytest.mark.parametrize("window", [None, 9])
def test_a_layer_computes_absorbed_attention(monkeypatch, window):
    q, rows, out = run(*new_impl(monkeypatch, "f32", sliding_window=window))
    scores = torch.einsum("qhd,kd->hqk", q.double(), rows.double()) * 0.1
    at = torch.arange(TOKENS)
    hidden = at[None] > at[:, None]
    if window:
        hidden |= at[None] <= at[:, None] - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,kd->qhd", weights, rows.double()[:, :LATENT])
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_a_checkpoints_scale_is_that_of_the_row(monkeypatch):
    impl, kv_cache = new_impl(monkeypatch, None, "fp8")

    class Layer:
        _k_scale = torch.tensor(0.5)

    impl.take("layer 0", Layer, {})
    quantised = kv_cache.view(torch.float8_e4m3fn)  # as vLLM's layer passes it
    _, rows, _ = run(impl, quantised)
    found, _ = impl.pages.gather(kv_cache, [5, 2, 7], TOKENS, like=rows)
    stored = kvx.quantize(rows.numpy(), "fp8_e4m3", steps=[0.5]).dequantize()
    assert torch.equal(found[:, 0], torch.from_numpy(stored))
    Layer._k_scale = torch.tensor(1.0)
    with pytest.raises(kvx.Error, match="layer 0 has no k_scale and is stored as fp8_e4m3"):
        new_impl(monkeypatch, None, "fp8")[0].take("layer 0", Layer, {})


def test_rows_of_fp8_ds_mla_need_no_scale_and_as_many_bytes_as_vllms(monkeypatch):
    """A scale for 128 latent numbers, rotary ones in bf16: DeepSeek's rows take vLLM's 656 bytes."""
    impl, kv_cache = new_impl(monkeypatch, None, "fp8_ds_mla")
    assert kv_cache.shape[-1] == LATENT + LATENT // 128 * 4 + ROTARY * 2

    class Layer:
        _k_scale = torch.tensor(1.0)

    impl.take("layer 0", Layer, {})
    _, rows, _ = run(impl, kv_cache)
    found, _ = impl.pages.gather(kv_cache, [5, 2, 7], TOKENS, like=rows)
    groups = rows[:, :LATENT].unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scale).to(torch.float8_e4m3fn)
    assert torch.allclose(found[:, 0, :LATENT], (codes.float() * scale).flatten(1), rtol=1e-6)
    assert torch.equal(found[:, 0, LATENT:], rows[:, LATENT:].bfloat16().float())
    shape = layer_pages.RowShape(1, 512 + 64, 512, is_latent=True)
    assert shape.new_layer(impl.recipe, 64).page_bytes == 64 * 656


def test_what_kvx_does_not_compute_is_refused(monkeypatch):
    with pytest.raises(kvx.UnsupportedError, match="indexer"):
        new_impl(monkeypatch, "int8", indexer=object())
    with pytest.raises(kvx.Error, match="one row for both"):
        new_impl(monkeypatch, "int8/int4")


def test_heads_have_no_rotary_part(tmp_path):
    with pytest.raises(kvx.Error, match="only a latent cache's rows"):
        Engine(save_model("llama", tmp_path), "int4+bf16")
