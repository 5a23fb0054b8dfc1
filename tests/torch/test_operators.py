"""kvx's operators: what torch requires of one, in eager mode and in whole compiled graphs."""

import engine
import pytest
import torch

import kvx
import kvx.torch


@pytest.fixture
def step():
    step = engine.new_step("int8", [20, 37], [1, 5], padding=2)
    step.name = kvx.torch.register_layer(step.layer)
    step.append()
    yield step
    kvx.torch.unregister_layer(step.name)


def test_torchs_own_checks_of_each_operator(step):
    ops, check = torch.ops.kvx, torch.library.opcheck
    batch = (*step.batch, step.name)
    out, lse = torch.zeros_like(step.q), torch.zeros(step.q.shape[:2])
    check(ops.append.default, (step.pages, step.k, step.v, step.slots, step.name))
    check(ops.attend.default, (step.pages, step.q, *batch), {"softcap": 5.0, "max_q_len": 5})
    into = (step.pages, step.q, *step.batch, out, step.name)
    check(ops.attend_into.default, into, {"lse": lse})
    check(ops.gather.default, (step.pages, *batch[:2], 57, step.name, torch.float32))
    ids = torch.tensor([1, 2]), torch.tensor([3, 0])
    check(ops.copy_blocks.default, (step.pages, *ids, step.name))
    codes, scales = kvx.torch.quantize(step.k, "nvfp4")
    check(ops.quantize.default, (step.k.contiguous(), "nvfp4"))
    check(ops.dequantize.default, (codes, scales, "nvfp4", engine.DIM, torch.bfloat16))
    q, k, v = (torch.randn(2, heads, 9, 64) for heads in (4, 2, 2))
    check(ops.attention.default, (q, k, v, "int8", True))


def test_operators_are_the_layers_verbs(step):
    expected, _ = step.expected()
    found = kvx.torch.attend(step.pages, step.q, *step.batch, step.name)
    assert engine.relative_error(found[:6], expected) < engine.LIMIT["int8"]
    assert not found[6:].any()  # the padding
    out, lse = torch.full_like(step.q, 7), torch.full(step.q.shape[:2], 7.0)
    kvx.torch.attend_into(step.pages, step.q, *step.batch, out, step.name, lse=lse)
    assert torch.equal(out[:6], found[:6]) and (out[6:] == 7).all() and (lse[6:] == 7).all()
    k, v = kvx.torch.gather(step.pages, *step.batch[:2], 60, step.name)
    assert torch.equal(k[:20], step.layer.gather(step.pages, step.block_table[0], 20, like=k)[0])
    assert not k[57:].any() and engine.relative_error(v[:57], step.v[:57].double()) < 0.01


def test_a_whole_layer_is_one_compiled_graph():
    eager, traced = (engine.new_step("nvfp4", [20, 37], [20, 37]) for _ in "ab")
    names = [kvx.torch.register_layer(step.layer) for step in (eager, traced)]

    def forward(pages, q, k, v, slots, table, lens, starts, name):
        kvx.torch.append(pages, k * 2, v, slots, name)
        return kvx.torch.attend(pages, q + 1, table, lens, starts, name, max_q_len=37) * 3

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    outs = [
        function(step.pages, step.q, step.k, step.v, step.slots, *step.batch, name)
        for function, step, name in zip((forward, compiled), (eager, traced), names)
    ]
    assert torch.equal(*outs) and torch.equal(eager.pages, traced.pages) and eager.pages.any()
    for name in names:
        kvx.torch.unregister_layer(name)


def test_rows_and_attention_compile_as_one_graph():
    q, k, v = (torch.randn(1, heads, 9, 64) for heads in (4, 2, 2))

    def forward(q, k, v):
        codes, scales = kvx.torch.quantize(k + v, "int4")
        decoded = kvx.torch.dequantize(codes, scales, "int4", 64)
        return kvx.torch.attention(q, decoded, v, recipe="int8")

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), forward(q, k, v))


def test_names_of_layers():
    one, other = (kvx.PagedLayer("int8", num_kv_heads=1, head_dim=64) for _ in "ab")
    assert kvx.torch.register_layer(one, "model.0") == "model.0"
    assert kvx.torch.register_layer(one, "model.0") == "model.0"
    assert kvx.torch.registered_layer("model.0") is one
    with pytest.raises(kvx.Error, match="name is 'model.0'; another layer has it"):
        kvx.torch.register_layer(other, "model.0")
    with pytest.raises(kvx.Error, match="layer is a str; expected a kvx.PagedLayer"):
        kvx.torch.register_layer("model.0")
    fresh = kvx.torch.register_layer(other)
    assert fresh != kvx.torch.register_layer(one)
    kvx.torch.unregister_layer("model.0")
    with pytest.raises(kvx.Error, match="layer is 'model.0'; expected a name"):
        kvx.torch.registered_layer("model.0")
    with pytest.raises(kvx.Error, match="layer is 'model.0'; expected a name"):
        x = torch.zeros(0, 1, 64)
        kvx.torch.append(torch.zeros(1, 64, dtype=torch.uint8), x, x, torch.arange(0), "model.0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_the_packages_own(dtype):
    x = torch.randn(3, 5, 64).to(dtype)
    codes, scales = kvx.torch.quantize(x, "nvfp4", tensor_scale=0.5)
    rows = kvx.quantize(x, "nvfp4", tensor_scale=0.5)
    assert torch.equal(codes, rows.codes) and torch.equal(scales, rows.scales)
    assert rows.codes.dtype == torch.uint8 and rows.nbytes == 15 * 36
    found = kvx.torch.dequantize(codes, scales, "nvfp4", 64, dtype=dtype, tensor_scale=0.5)
    assert torch.equal(found, rows.dequantize(dtype)) and found.dtype == dtype
    assert torch.equal(kvx.transcode(rows, "int8").codes, kvx.quantize(rows.dequantize(), "int8").codes)
    with pytest.raises(kvx.Error, match="dtype is torch.int8; expected torch.float32"):
        kvx.torch.dequantize(codes, scales, "nvfp4", 64, dtype=torch.int8)
    with pytest.raises(kvx.Error, match="dtype is float64; expected float32, float16 or bfloat16"):
        rows.dequantize(torch.float64)
