"""What the builder plans for a step on a GPU, with a plan that only records: no GPU is needed."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from test_layer import BLOCK, HEADS, new_impl
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

import kvx
from kvx.torch import BatchAttention
from kvx.vllm import step
from kvx.vllm.backend import KvxMetadataBuilder
from kvx.vllm.step import StepLimits, leading_decodes, reserve_workspace

MAX_MODEL_LEN = 4096


class RecordingBatch:
    """Stands for kvx.torch.BatchAttention. planned: the arguments of each plan."""

    def __init__(self):
        self.planned = []

    def plan(self, block_table, seq_lens, q_starts, **bounds):
        shapes = tuple(block_table.shape), tuple(seq_lens.shape), tuple(q_starts.shape)
        self.planned.append(SimpleNamespace(shapes=shapes, **bounds))


def builder():
    """A builder as it is on a GPU; its constructor would launch kernels."""
    made = object.__new__(KvxMetadataBuilder)
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN))
    made.batch, made.workspace, made.positions = RecordingBatch(), None, None
    return made


def step_of(q_lens, seq_lens, padded_to=None, padded_rows=0, **changes):
    """The metadata of a step. padded_to: requests, as CUDA graphs pad them."""
    requests = padded_to or len(q_lens)
    q_lens = q_lens + [0] * (requests - len(q_lens))
    seq_lens = seq_lens + [0] * (requests - len(seq_lens))
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    fields = dict(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=sum(q_lens) + padded_rows,
        max_query_len=max(q_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(requests, 64, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(q_lens) + padded_rows, dtype=torch.int64),
    )
    return CommonAttentionMetadata(**{**fields, **changes})


def planned(common, capture=False):
    made = builder()
    if capture:
        metadata = made.build_for_cudagraph_capture(common)
    else:
        metadata = made.build(0, common)
    assert metadata.batch is made.batch
    (plan,) = made.batch.planned
    return plan


def test_a_step_of_decodes_is_planned_from_what_the_host_knows():
    plan = planned(step_of([1, 1, 1], [70, 4, 900]))
    assert (plan.max_q_len, plan.max_seq_len, plan.num_queries) == (1, 900, 3)
    assert plan.num_decodes == 0  # all are, and max_q_len says so


def test_decodes_in_front_of_prompts_are_counted():
    plan = planned(step_of([1, 1, 40, 1, 7], [70, 4, 900, 8, 7]))
    assert (plan.num_decodes, plan.max_q_len, plan.num_queries) == (2, 40, 50)
    assert planned(step_of([3, 1], [3, 9])).num_decodes == 0


def test_padding_is_passed_on_as_it_is():
    plan = planned(step_of([1, 1], [70, 4], padded_to=8, padded_rows=6))
    assert plan.shapes == ((8, 64), (8,), (9,))
    assert (plan.num_queries, plan.max_q_len) == (8, 1)


def test_tables_of_more_rows_than_requests_are_cut():
    common = step_of([1, 1], [70, 4], block_table_tensor=torch.zeros(16, 64, dtype=torch.int32))
    assert planned(common).shapes == ((2, 64), (2,), (3,))


def test_a_captured_step_serves_every_batch_of_its_shape():
    """vLLM captures with short requests of its own making."""
    decodes = planned(step_of([1] * 8, [1] * 8), capture=True)
    assert (decodes.max_seq_len, decodes.max_q_len) == (MAX_MODEL_LEN, 1)
    mixed = planned(step_of([1] * 8, [1] * 8, max_query_len=8), capture=True)
    assert (mixed.num_decodes, mixed.max_q_len) == (0, 8)  # a prompt may come first
    drafts = planned(step_of([4, 4], [4, 4]), capture=True)
    assert (drafts.num_decodes, drafts.max_q_len, drafts.num_queries) == (0, 4, 8)
    assert KvxMetadataBuilder._cudagraph_support == AttentionCGSupport.ALWAYS


def test_more_queries_than_a_sequence_can_have_are_cut():
    plan = planned(step_of([1] * 8, [1] * 8, max_query_len=8192), capture=True)
    assert plan.max_q_len == MAX_MODEL_LEN


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(kvx.UnsupportedError, match="not causal"):
        builder().build(0, step_of([1], [1], causal=False))


def test_leading_decodes_take_requests_without_queries_along():
    for q_lens, expected in [([1, 1], 2), ([0, 1, 2, 1], 2), ([5], 0), ([0, 0], 2)]:
        starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        assert leading_decodes(starts) == expected


class CountingBatch(BatchAttention):
    """runs: rows of the last plan's longest sequence, at each run."""

    runs: ClassVar = []

    def plan(self, *arrays, max_q_len, **bounds):
        self.max_q_len = max_q_len
        super().plan(*arrays, max_q_len=max_q_len, **bounds)

    def run(self, *arrays, **attention):
        self.runs.append(self.max_q_len)
        return super().run(*arrays, **attention)


def test_the_warm_up_runs_each_layer_as_a_decode_and_as_a_prompt(monkeypatch):
    """On the CPU, whose verbs are the same."""
    sinks = torch.nn.Parameter(torch.ones(HEADS))
    (first, spec), (second, _) = (
        new_impl(monkeypatch, "int8", **options)
        for options in ({}, {"sinks": sinks, "kv_sharing_target_layer_name": "layer 0"})
    )
    made = builder()
    made.vllm_config.model_config.dtype = torch.bfloat16
    made.kv_cache_spec, made.device = spec, torch.device("cpu")
    made.batch = CountingBatch()
    made._warm_up([first, second])
    assert CountingBatch.runs == [1, 1, BLOCK, BLOCK]
    assert first.pages is not None
    assert torch.equal(second.attention["sinks"], torch.ones(HEADS))


def test_a_layer_asks_for_the_workspace_of_the_largest_step(monkeypatch):
    monkeypatch.setattr(step, "_workspaces", {})
    impl, _ = new_impl(monkeypatch, "int8", sliding_window=100)
    made = config()
    made.cache_config = SimpleNamespace(block_size=None)  # none is named yet
    impl.config = made
    workspace = impl.workspace_on("cpu")
    assert workspace.dtype == torch.uint8 and workspace.numel() >= 1
    assert impl.pages is None  # its scales may not be there yet


def config(**scheduler):
    fields = dict(max_num_seqs=256, max_num_batched_tokens=8192)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**{**fields, **scheduler}),
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 512]),
    )


def test_the_largest_step_is_what_the_scheduler_may_make():
    limits = StepLimits.of(config())
    assert limits == StepLimits(256, 8192, MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert StepLimits.of(config(max_num_batched_tokens=64)).max_queries == 512  # a graph's
    asked = []

    class Layer:
        def workspace_bytes(self, **bounds):
            asked.append(bounds)
            return 0

    assert limits.workspace_bytes(Layer(), num_q_heads=32) == 1
    assert asked == [
        dict(
            num_q_heads=32,
            max_sequences=256,
            max_queries=8192,
            max_q_len=MAX_MODEL_LEN,
            max_seq_len=MAX_MODEL_LEN,
            window=0,
            has_window_pages=False,
        )
    ]


def test_all_layers_share_a_workspace_that_holders_keep(monkeypatch):
    monkeypatch.setattr(step, "_workspaces", {})
    device = torch.device("cpu")
    small = reserve_workspace(device, 1000)
    assert reserve_workspace(device, 10) is small and small.numel() == 1 << 20
    large = reserve_workspace(device, (1 << 20) + 1)
    assert large.numel() == 2 << 20 and large is not small
    assert reserve_workspace(device, 1000) is large
