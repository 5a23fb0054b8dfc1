"""A full-precision window beside vLLM's pages."""

from types import SimpleNamespace

import pytest
import torch
from engines import Engine, prompts

import kvx
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
        return window.plan_step(table, torch.tensor(lengths).int(), starts)

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
