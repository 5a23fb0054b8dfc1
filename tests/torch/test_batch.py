"""Attention that is planned once a step, and what bounds, padding and lse mean."""

import engine
import pytest
import torch

import kvx
import kvx.torch


@pytest.mark.parametrize("recipe", engine.LIMIT)
def test_a_step_planned_once_serves_layers_of_any_kind(recipe):
    steps = [engine.new_step(kind, [50, 17], [1, 9], padding=3) for kind in (recipe, "f32")]
    batch = kvx.torch.BatchAttention()
    batch.plan(*steps[0].batch, **steps[0].bounds)
    for step in steps:
        step.append()
        lse = torch.zeros(step.q.shape[:2])
        out = batch.run(step.layer, step.pages, step.q, lse=lse)
        expected, logs = step.expected()
        assert engine.relative_error(out[:10], expected) < engine.LIMIT[step.layer.recipe]
        assert engine.relative_error(lse[:10], logs) < engine.LIMIT[step.layer.recipe]
        assert torch.equal(out[:10], step.layer.attend(step.pages, step.q, *step.batch)[:10])


def test_decodes_need_no_q_starts():
    step = engine.new_step("f32", [50, 17, 3], [1, 1, 1])
    step.append()
    batch = kvx.torch.BatchDecode()
    batch.plan(step.block_table, step.seq_lens, max_seq_len=50)
    out = torch.empty_like(step.q)
    assert batch.run(step.layer, step.pages, step.q, out) is out
    assert engine.relative_error(out, step.expected()[0]) < engine.LIMIT["f32"]


def test_new_lengths_in_the_planned_arrays_are_a_new_step():
    step = engine.new_step("f32", [50], [1])
    step.append()
    batch = kvx.torch.BatchPrefill()
    batch.plan(*step.batch, max_q_len=1)
    batch.run(step.layer, step.pages, step.q)
    step.seq_lens[0] = step.lens[0] = 20
    out = batch.run(step.layer, step.pages, step.q)
    assert engine.relative_error(out, step.expected()[0]) < engine.LIMIT["f32"]


def test_what_does_not_fit_is_refused_and_the_plan_before_stays():
    step = engine.new_step("f32", [20], [3])
    step.append()
    batch = kvx.torch.BatchAttention()
    with pytest.raises(kvx.Error, match=r"nothing is planned; call plan\(\) first"):
        batch.run(step.layer, step.pages, step.q)
    batch.plan(*step.batch)
    table, lens, starts = step.batch
    for arguments, options, message in [
        ((table, lens, starts[:1]), {}, "expected n, n and n \\+ 1"),
        ((table.long(), lens, starts), {}, "block_table is int64 .* expected int32"),
        (step.batch, {"max_q_len": 0}, "max_q_len is 0; expected 1 to"),
        (step.batch, {"max_seq_len": 0}, "max_seq_len is 0; expected 1 to"),
        (step.batch, {"num_decodes": 2}, "num_decodes is 2; expected 0 to 1"),
        (step.batch, {"workspace": torch.zeros(8, dtype=torch.uint8)}, "workspace is given"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            batch.plan(*arguments, **options)
    for options, message in [
        ({"lse": torch.zeros(2, engine.HEADS)}, r"lse is float32 \[2, 8\]; expected float32 \[3 or more"),
        ({"lse": torch.zeros(3, engine.HEADS).double()}, "lse is float64 .* expected float32"),
        ({"stream": 1}, "stream is given; a layer on the CPU has none"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            batch.run(step.layer, step.pages, step.q, **options)
    with pytest.raises(kvx.Error, match="num_queries is 4; expected 0 to 3"):
        step.layer.attend(step.pages, step.q, *step.batch, num_queries=4)
    with pytest.raises(kvx.Error, match="q has 2 tokens; the step has 3"):
        step.layer.attend(step.pages, step.q, *step.batch, num_queries=2)
    out = batch.run(step.layer, step.pages, step.q)
    assert engine.relative_error(out, step.expected()[0]) < engine.LIMIT["f32"]
