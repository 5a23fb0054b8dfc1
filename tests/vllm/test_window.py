"""A full-precision window beside vLLM's pages."""

from types import SimpleNamespace

import pytest
import torch
from engines import Engine, prompts, transformers_tokens
from tuned_file import all_tables, write_tuned

import kvx
from kvx.vllm.layer_pages import RowShape
from kvx.vllm.window import StepWindow, WindowTokens, check_window, split_window

pytestmark = pytest.mark.usefixtures("in_this_process")


def test_a_recipes_window_is_split_from_the_recipe_of_the_pages():
    assert split_window("nvfp4") == ("nvfp4", None)
    assert split_window("nvfp4:auto,immediate") == ("nvfp4:auto,immediate", None)
    assert split_window("nvfp4:auto") == ("nvfp4:auto,immediate", WindowTokens(16, 64))
    assert split_window("int4:recent=32") == ("int4:recent=32,immediate", WindowTokens(0, 32))
    with pytest.raises(kvx.Error, match="leave full_precision=f16 out"):
        split_window("int4:recent=32,full_precision=f16")


def test_what_writes_pages_beside_steps_is_refused():
    parallel = SimpleNamespace(use_ubatching=False)
    check_window(SimpleNamespace(kv_transfer_config=None, parallel_config=parallel))
    with pytest.raises(kvx.UnsupportedError, match="beside a KV connector"):
        check_window(SimpleNamespace(kv_transfer_config=object(), parallel_config=parallel))
    parallel.use_ubatching = True
    with pytest.raises(kvx.UnsupportedError, match="two batches"):
        check_window(SimpleNamespace(kv_transfer_config=None, parallel_config=parallel))


def test_dual_scale_recipes_have_a_window_of_blocks():
    tokens = WindowTokens(16, 64, "block")
    assert split_window("int3_dual:auto") == ("int3_dual:auto,immediate", tokens)
    recipe = "int8/int2_dual:sink=16,recent=64"
    assert split_window(recipe) == (f"{recipe},immediate", tokens)
    with pytest.raises(kvx.Error, match="'int3_dual:auto,immediate'; dual-scale .* add recent=N"):
        split_window("int3_dual:auto,immediate")


def limits_of(vllm_config):
    return SimpleNamespace(max_sequences=4, max_queries=32, max_q_len=32, max_seq_len=256)


def test_plans_of_a_shape_are_written_to_the_same_memory(monkeypatch):
    """So that a captured graph reads each step's plan."""
    monkeypatch.setattr("kvx.vllm.window.StepLimits", SimpleNamespace(of=limits_of))
    layer = SimpleNamespace(kv_cache=torch.zeros(20, 2, 16, 40, dtype=torch.uint8))
    window = StepWindow(WindowTokens(16, 32), None, layer, 16, "cpu")

    def plan(lengths, q_lens):
        table = torch.arange(1, 13, dtype=torch.int32).view(2, 6)[: len(lengths)]
        starts = torch.tensor([0, *q_lens]).cumsum(0).int()
        return window.plan_step(table, torch.tensor(lengths).int(), starts, max(q_lens))

    first = plan([20, 30], [20, 12])
    addresses = [first.block_table.data_ptr(), first.window_slots.data_ptr()]
    assert first.num_sink_blocks.tolist() == [1, 0]  # the second one's first block came before
    second = plan([21, 31], [1, 1])
    assert [second.block_table.data_ptr(), second.window_slots.data_ptr()] == addresses
    assert second.window_slots[2:].tolist() == [-1] * 30
    one = plan([22], [1])
    assert one.block_table.data_ptr() == addresses[0]
    assert one.block_table is not second.block_table


def test_requests_inside_their_windows_say_the_tokens_of_a_16_bit_cache(model):
    """Prompts in chunks, several requests a step, which end and make room for others."""
    inputs = prompts([5, 40, 33, 21, 60, 17])
    options = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=3)
    with Engine(model, "bf16", **options) as engine:
        expected = engine.tokens(inputs)
    with Engine(model, "int4:sink=16,recent=128", **options) as engine:
        assert engine.tokens(inputs) == expected
        layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        impls = [layer.impl for layer in layers.values()]
        assert all(impl.window_pages is not None for impl in impls)
        assert all(impl.recipe == "int4:sink=16,recent=128,immediate" for impl in impls)


def test_cached_prefixes_keep_their_window(model):
    first, second = prompts([120, 120])
    second["prompt_token_ids"][:90] = first["prompt_token_ids"][:90]
    options = dict(max_num_seqs=3)
    with Engine(model, "bf16", enable_prefix_caching=False, **options) as engine:
        expected = engine.tokens([second])
    with Engine(model, "int4:sink=128,recent=128", enable_prefix_caching=True, **options) as engine:
        engine.tokens([first])
        (output,) = engine.outputs([second])
        assert output.num_cached_tokens == 64  # whole blocks
        assert [output.outputs[0].token_ids] == expected


# vLLM's blocks, in which these formats quantise.
DUAL = dict(block_size=64, max_num_batched_tokens=96, enable_chunked_prefill=True, max_num_seqs=3)


@pytest.mark.parametrize("recipe", ["int3_dual", "int4_dual/int2_dual"])
def test_dual_scale_pages_beside_a_window_say_the_tokens_of_a_16_bit_cache(model, recipe):
    """All tokens are in the window: requests end and begin, and their open blocks make room."""
    inputs = prompts([5, 40, 133, 21, 160, 17, 90, 64, 63])
    with Engine(model, "bf16", **DUAL) as engine:
        expected = engine.tokens(inputs)
    with Engine(model, f"{recipe}:sink=64,recent=192", **DUAL) as engine:
        assert engine.tokens(inputs) == expected
        assert engine.tokens(inputs) == expected  # from cached prefixes


def test_dual_scale_pages_are_as_close_as_a_cache_of_kvx(model):
    """Logits of a model that transformers runs with kvx.hf.Cache, whose window is the same."""
    inputs = prompts([200, 130, 171])
    recipe = "int4_dual:hadamard,sink=64,recent=64"
    expected = transformers_tokens(model, inputs, recipe)
    with Engine(model, recipe, **DUAL) as engine:
        assert engine.tokens(inputs) == expected


def test_tuned_recipes_with_a_window_are_those_of_a_cache_of_kvx(model, tmp_path):
    """Calibrated tables and error feedback, and a layer of rows among those of blocks."""
    shape = dict(layers=4, heads=2, head_dim=64)
    tables, ropes = all_tables(**shape)
    tuned = write_tuned(
        tmp_path / "m.kvxtune",
        "int4_dual:k.hadamard,sink=64,recent=64",
        tables,
        ropes=ropes,
        layer_overrides=["2=int8"],
        **shape,
    )
    assert split_window(tuned) == (f"{tuned},immediate", WindowTokens(64, 64, "block"))
    inputs = prompts([200, 130])
    expected = transformers_tokens(model, inputs, tuned)
    with Engine(model, tuned, **DUAL) as engine:
        assert engine.tokens(inputs) == expected


def test_requests_that_are_preempted_begin_again(model):
    """Memory for about two of four requests, which grow together."""
    inputs = prompts([100, 110, 120, 90])
    options = {**DUAL, "max_num_seqs": 4, "enable_prefix_caching": True}
    with Engine(model, "int4_dual:sink=64,recent=192", **options) as engine:
        expected = engine.tokens(inputs, count=100)
    with Engine(
        model, "int4_dual:sink=64,recent=192", num_gpu_blocks_override=9, **options
    ) as engine:
        assert engine.tokens(inputs, count=100) == expected


def test_rejected_drafts_do_not_change_the_tokens(model):
    inputs = prompts([40, 64])
    for prompt in inputs:
        prompt["prompt_token_ids"] *= 2
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    recipe = "int3_dual:sink=64,recent=192"
    with Engine(model, "bf16", **DUAL) as engine:
        expected = engine.tokens(inputs, count=60)
    with Engine(model, recipe, speculative_config=drafts, **DUAL) as engine:
        assert engine.tokens(inputs, count=60) == expected


def test_dual_scale_blocks_of_another_size_are_refused_by_name():
    shape = RowShape(num_kv_heads=2, head_dim=64, v_head_dim=64)
    with pytest.raises(kvx.Error, match="block_size is 32; int3_dual quantises blocks of 64 or 128"):
        shape.new_layer("int3_dual:auto,immediate", 32)
    shape = RowShape(num_kv_heads=1, head_dim=128, v_head_dim=64, is_latent=True)
    with pytest.raises(kvx.UnsupportedError, match="int3_dual"):
        shape.new_layer("int3_dual:auto,immediate", 64)
