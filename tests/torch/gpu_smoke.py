"""kvx on CUDA tensors: attention beside float64, eager and in CUDA graphs; and what calls cost.

Without pytest:  python tests/torch/gpu_smoke.py    (PYTHONPATH: the folder that holds kvx)

Prints a line a check and ends with GOOD, or with BAD and exit code 1. Times are printed and never
judged.
"""

import json
import sys
import time
import traceback

import engine
import torch

import kvx
import kvx.torch

RECIPES = ["bf16", "int8", "int4", "nvfp4"]
SHAPES = {
    "decode": ([1, 63, 64, 300], [1, 1, 1, 1]),
    "several queries": ([5, 200, 300], [5, 1, 40]),
    "a prompt": ([700], [700]),
    "decodes before prompts": ([300, 17, 500, 64], [1, 1, 120, 64]),
}
BF16 = dict(device="cuda", dtype=torch.bfloat16)


def new_step(recipe, lens, q_lens, **options):
    return engine.new_step(recipe, lens, q_lens, **{**BF16, "padding": 3, **options})


def check(found, step):
    expected, _ = step.expected()
    error = engine.relative_error(found[: len(expected)], expected)
    limit = engine.LIMIT[step.layer.recipe] + 4e-3  # of bf16's own output
    assert error < limit, f"relative error {error}, expected below {limit}"


def check_recipe(recipe, shape, num_decodes=0):
    """Eager, with padding, fused strides, a table whose rows are apart, and no bounds."""
    step = new_step(recipe, *SHAPES[shape])
    assert step.append() is None
    queries = sum(step.q_lens)
    out, lse = torch.full_like(step.q, 7), torch.full(step.q.shape[:2], 7.0, device="cuda")
    step.layer.attend(
        step.pages, step.q, *step.batch, out, lse=lse, num_decodes=num_decodes, **step.bounds
    )
    check(out, step)
    logs = step.expected()[1]
    assert (lse[:queries].double() - logs).abs().max() < 0.6
    assert (out[queries:] == 7).all() and (lse[queries:] == 7).all(), "padding was written"
    without_bounds = step.layer.attend(step.pages, step.q, *step.batch)
    check(without_bounds, step)
    assert step.layer.counters() == {"out_of_range": 0, "nonfinite_inputs": 0}


def check_graph(recipe, shape):
    """A captured append and attend of two layers, replayed with other lengths in the same arrays."""
    steps = [new_step(recipe, *SHAPES[shape]) for _ in "ab"]
    outs = [torch.empty_like(step.q) for step in steps]
    batch = kvx.torch.BatchAttention()
    batch.plan(*steps[0].batch, **steps[0].bounds)

    def run():
        for step, out in zip(steps, outs):
            step.append()
            batch.run(step.layer, step.pages, step.q, out)

    run()  # loads kernels and makes the workspaces
    torch.cuda.synchronize()
    for step, out in zip(steps, outs):
        step.pages.zero_()
        out.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    for step, out in zip(steps, outs):
        check(out, step)
    if max(steps[0].q_lens) == 1:
        shorter = [max(1, n // 2) for n in steps[0].lens]
        for step in steps:
            step.seq_lens[: len(shorter)] = torch.tensor(shorter, dtype=torch.int32)
        graph.replay()
        for step, out in zip(steps, outs):
            found, longer = out, step.lens
            first, keep = 0, []
            for n, whole in zip(shorter, longer):
                keep.append(torch.arange(first, first + n))
                first += whole
            rows = torch.cat(keep).to("cuda")
            step.k, step.v, step.lens = step.k[rows], step.v[rows], shorter
            check(found, step)


def check_same_bytes(recipe):
    """A page's bytes are the CPU's where the order is."""
    here = engine.new_step(recipe, [50, 17], [1, 1])
    there = engine.new_step(recipe, [50, 17], [1, 1], device="cuda")
    here.append()
    there.append()
    if there.layer.order == "pool":
        assert torch.equal(there.pages.cpu(), here.pages)
    like = there.k.contiguous()
    for s, n in enumerate(here.lens):
        expected = here.layer.gather(here.pages, here.block_table[s], n, like=here.k.contiguous())
        for ids in (there.block_table[s], there.block_table[s].tolist()):
            found = there.layer.gather(there.pages, ids, n, like=like)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected))


def check_given_steps():
    step = new_step("fp8_e4m3", [50], [1], k_steps=[0.02, 0.03], v_steps=[0.02, 0.04])
    step.append()
    engine.LIMIT["fp8_e4m3"] = 0.1
    check(step.layer.attend(step.pages, step.q, *step.batch), step)


def check_counters():
    step = new_step("int8", [50], [1])
    step.slots[:2] = 1 << 40
    step.append()
    assert step.layer.counters()["out_of_range"] > 0
    step.layer.reset_counters()
    step.seq_lens[0] = 1 << 20
    out = step.layer.attend(step.pages, step.q, *step.batch, max_q_len=1)
    assert step.layer.counters()["out_of_range"] > 0 and not out[:1].any()


def check_streams_and_allocations():
    """A side stream's order is kept, and warm calls neither allocate nor wait."""
    step = new_step("int8", *SHAPES["decode"])
    side, out = torch.cuda.Stream(), torch.empty_like(step.q)
    with torch.cuda.stream(side):
        step.append()
        step.layer.attend(step.pages, step.q, *step.batch, out, **step.bounds)
    torch.cuda._sleep(1)
    out.fill_(0)  # every kernel is loaded now
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        step.append()
        step.layer.attend(step.pages, step.q, *step.batch, out, **step.bounds)
    assert not side.query(), "a verb has waited for the device"
    out.fill_(torch.nan)  # on another stream, long before the verb's turn
    torch.cuda.current_stream().synchronize()
    step.layer.attend(step.pages, step.q, *step.batch, out, stream=side, **step.bounds)
    assert not side.query()
    side.synchronize()
    assert torch.cuda.mem_get_info() == before, "a warm call, or another process, has allocated"
    check(out, step)


def check_workspace():
    """A given one is taken and checked; a capture without one is refused, and stays usable."""
    step = new_step("int8", [20000, 64], [1, 1])  # of lengths that a plan balances, in a workspace
    step.append()
    sizes = dict(max_sequences=8, max_queries=8, max_q_len=1, max_seq_len=32768)
    most = step.layer.workspace_bytes(num_q_heads=engine.HEADS, **sizes)
    assert most > 0
    workspace = torch.empty(most, dtype=torch.uint8, device="cuda")
    bounds = dict(max_q_len=1, max_seq_len=20000)
    check(step.layer.attend(step.pages, step.q, *step.batch, workspace=workspace, **bounds), step)
    for bad, message in [
        (workspace[:256], "workspace has 256 bytes; this call needs"),
        (workspace[1:], "workspace begins on 1 bytes; expected a multiple of 256"),
        (workspace.cpu(), "workspace lies on the CPU; expected cuda:0, the layer's device"),
        (workspace.int(), "workspace is int32"),
    ]:
        refused(message, step.layer.attend, step.pages, step.q, *step.batch, workspace=bad, **bounds)


def check_refusals():
    step = new_step("int8", [50], [1])
    layer, pages = step.layer, step.pages
    odd = torch.zeros(pages.numel() + 8, dtype=torch.uint8, device="cuda")[8:].view_as(pages)
    for message, call in [
        ("k lies on the CPU; expected cuda:0, the layer's device",
         lambda: layer.append(pages, step.k.cpu(), step.v, step.slots)),
        ("slots lies on the CPU", lambda: layer.append(pages, step.k, step.v, step.slots.cpu())),
        ("pages lies on the CPU",
         lambda: layer.append(pages.cpu(), step.k, step.v, step.slots)),
        ("pages begins 8 bytes after a multiple of 16",
         lambda: layer.append(odd, step.k, step.v, step.slots)),
        ("q_starts lies on the CPU",
         lambda: layer.attend(pages, step.q, *step.batch[:2], step.q_starts.cpu())),
        ("like is None; expected a torch tensor", lambda: layer.gather(pages, [1], 3)),
        ("device is 'cuda:63'", lambda: kvx.PagedLayer(
            "int8", num_kv_heads=1, head_dim=64, device="cuda:63")),
    ]:  # fmt: skip
        refused(message, call)
    step.append()
    check(layer.attend(pages, step.q, *step.batch), step)


def refused(message, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kvx.Error as error:
        assert message in str(error), f"'{error}' has no '{message}'"
    else:
        raise AssertionError(f"not refused; expected '{message}'")


def check_rows(format, **options):
    x = torch.randn(5, 33, 64)
    for dtype in (torch.float32, torch.bfloat16):
        here = kvx.quantize(x.to(dtype), format, **options)
        there = kvx.quantize(x.to("cuda", dtype), format, **options)
        assert there.codes.is_cuda and int(there.nonfinite_inputs) == here.nonfinite_inputs
        assert torch.equal(there.codes.cpu(), here.codes)
        assert torch.equal(there.scales.cpu(), here.scales)
        assert torch.equal(there.dequantize(dtype).cpu(), here.dequantize(dtype))
        other, expected = (kvx.transcode(rows, "int8") for rows in (there, here))
        assert torch.equal(other.codes.cpu(), expected.codes)
        assert torch.equal(other.scales.cpu(), expected.scales)
    if there.scales.numel():
        mixed = kvx.Rows(there.codes, here.scales, format, 64, there.tensor_scale, there.steps)
        refused("scales lies on the CPU; expected cuda:0", kvx.dequantize, mixed)


def check_operators():
    step = new_step("nvfp4", *SHAPES["decodes before prompts"])
    name = kvx.torch.register_layer(step.layer)
    most = max(step.q_lens)

    def forward(pages, q, k, v, slots, table, lens, starts):
        kvx.torch.append(pages, k, v, slots, name)
        return kvx.torch.attend(pages, q, table, lens, starts, name, max_q_len=most) * 2

    arguments = (step.pages, step.q, step.k, step.v, step.slots, *step.batch)
    expected = forward(*arguments)
    check(expected / 2, step)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), expected)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = forward(*arguments)
    graph.replay()
    assert torch.equal(out, expected)
    k, v = kvx.torch.gather(*arguments[:1], *step.batch[:2], sum(step.lens), name)
    assert engine.relative_error(v, step.v[: sum(step.lens)].double()) < 0.2
    kvx.torch.copy_blocks(
        step.pages, *(torch.tensor([x], device="cuda") for x in (1, 0)), name
    )
    assert torch.equal(step.pages[0], step.pages[1])
    kvx.torch.unregister_layer(name)


def check_attention():
    q, k, v = (torch.randn(2, heads, 90, 64, **BF16) for heads in (4, 2, 2))
    for is_causal in (True, False):
        found = kvx.torch.attention(q, k, v, recipe="bf16", is_causal=is_causal)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), is_causal=is_causal, enable_gqa=True
        )
        assert engine.relative_error(found, expected) < 1e-2


CHECKS = {
    **{f"{r}, {s}": (check_recipe, r, s) for r in RECIPES for s in SHAPES},
    **{
        f"{r}, decodes apart": (check_recipe, r, "decodes before prompts", 2) for r in RECIPES
    },
    **{f"{r}, {s}, graph": (check_graph, r, s) for r in RECIPES for s in SHAPES},
    **{f"{r}, bytes": (check_same_bytes, r) for r in ["f32", *RECIPES]},
    "given steps": (check_given_steps,),
    "counters": (check_counters,),
    "streams": (check_streams_and_allocations,),
    "workspace": (check_workspace,),
    "refusals": (check_refusals,),
    "operators": (check_operators,),
    "attention": (check_attention,),
    **{f"rows of {f}": (check_rows, f) for f in ["int8", "int4:g32", "mxfp4", "bf16"]},
    "rows of nvfp4 with a tensor scale": (lambda f: check_rows(f, tensor_scale=0.5), "nvfp4"),
    "rows of fp8 with steps": (lambda f: check_rows(f, steps=[0.03]), "fp8_e4m3"),
}


def host_us(call, times=2000):
    """Microseconds of the host for a call, without waiting for the device in between."""
    for _ in range(20):
        call()
    spent = 0.0
    for _ in range(times // 100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call()
        spent += time.perf_counter() - start
    return round(spent / times * 1e6, 2)


def print_host_times():
    for recipe in RECIPES:
        step = new_step(recipe, [64] * 64, [1] * 64, padding=0)
        layer, out = step.layer, torch.empty_like(step.q)
        step.append()
        k, v, slots = step.k[:64], step.v[:64], step.slots[:64].clone()
        batch = kvx.torch.BatchAttention()
        batch.plan(*step.batch, **step.bounds)
        name = kvx.torch.register_layer(layer)
        times = {
            "append": host_us(lambda: layer.append(step.pages, k, v, slots)),
            "attend": host_us(
                lambda: layer.attend(step.pages, step.q, *step.batch, out, **step.bounds)
            ),
            "BatchAttention.run": host_us(lambda: batch.run(layer, step.pages, step.q, out)),
            "BatchAttention.plan": host_us(lambda: batch.plan(*step.batch, **step.bounds)),
            "operator append": host_us(
                lambda: torch.ops.kvx.append(step.pages, k, v, slots, name)
            ),
            "torch copy_": host_us(lambda: out.copy_(step.q)),
        }
        kvx.torch.unregister_layer(name)
        print("HOST us", json.dumps({"recipe": recipe, "order": layer.order, **times}), flush=True)


def main():
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return 1
    print(kvx.__version__, torch.__version__, torch.cuda.get_device_name(), flush=True)
    bad = 0
    for name, (function, *arguments) in CHECKS.items():
        try:
            function(*arguments)
            torch.cuda.synchronize()
            print("ok  ", name, flush=True)
        except Exception:  # each check is judged by itself
            bad += 1
            print("BAD ", name, flush=True)
            traceback.print_exc(file=sys.stdout)
    print_host_times()
    print(f"BAD: {bad} of {len(CHECKS)}" if bad else f"GOOD: {len(CHECKS)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
