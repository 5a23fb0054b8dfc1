"""Prompts of latent layers in the expanded form: the same tokens as in the absorbed form, and when
it is chosen."""

from types import SimpleNamespace

import pytest
import torch
from engines import LATENT_CONFIGS, Engine, prompts, save_model, transformers_tokens
from test_builder import RecordingBatch, step_of
from test_registration import config

import kvx
from kvx.vllm import latent
from kvx.vllm.expanded import ExpandedLimits, ExpandedPrompts, HeadDims
from kvx.vllm.recipe import latent_prompts_of

CHUNKS = dict(max_num_batched_tokens=48, enable_chunked_prefill=True, max_num_seqs=4)
DEEPSEEK = HeadDims(latent=512, nope=128, rotary=64, value=128)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in LATENT_CONFIGS}


@pytest.fixture
def expanded_steps(in_this_process, monkeypatch):
    """(queries, heads at once, tokens) of each layer's call in the expanded form."""
    steps = []
    forward_mha = latent.KvxLatentImpl.forward_mha

    def counted(self, q, kv_c, k_pe, kv_cache, metadata, *args, **options):
        steps.append((len(q), metadata.prefill.heads_at_once, metadata.prefill.num_tokens))
        return forward_mha(self, q, kv_c, k_pe, kv_cache, metadata, *args, **options)

    monkeypatch.setattr(latent.KvxLatentImpl, "forward_mha", counted)
    return steps


def engine(model, recipe, form="expanded", **options):
    wishes = {"recipe": recipe, "latent_prompts": form}
    return Engine(model, recipe, additional_config={"kvx": wishes}, **options)


@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_an_f32_cache_says_the_tokens_of_transformers(models, expanded_steps, name):
    """Chunks behind cached tokens, several requests beside decodes in a step, cached prefixes."""
    inputs = prompts([5, 70, 131, 33])
    expected = transformers_tokens(models[name], inputs)
    with engine(models[name], "f32", enable_prefix_caching=True, **CHUNKS) as expanded:
        assert expanded.tokens(inputs) == expected
        assert any(tokens > queries for queries, _, tokens in expanded_steps)  # cached ones as well
        outputs = expanded.outputs(inputs)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 64, 128, 32]
    assert len(expanded_steps) >= 3 * 6


def test_heads_are_expanded_as_many_at_a_time_as_fit(models, expanded_steps, monkeypatch):
    inputs = prompts([70, 131])
    expected = transformers_tokens(models["deepseek_v3"], inputs)
    monkeypatch.setattr(ExpandedLimits, "heads_at_once", lambda limits, tokens: 2)
    made, new_heads = [], latent.ExpandedHeads

    def counted(*args):
        made.append(args)
        return new_heads(*args)

    monkeypatch.setattr(latent, "ExpandedHeads", counted)
    with engine(models["deepseek_v3"], "f32", **CHUNKS) as expanded:
        assert len(made) == 1  # all layers share them, and no step makes any
        assert expanded.tokens(inputs) == expected
    assert {heads for _, heads, _ in expanded_steps} == {2} and len(made) == 1


@pytest.mark.parametrize("recipe", ["int8+bf16", "int4+bf16:hadamard"])
def test_quantised_rows_say_what_they_say_in_transformers(models, expanded_steps, recipe):
    """The rows are the pages', the step's own too."""
    inputs = prompts([5, 70, 131])
    expected = transformers_tokens(models["deepseek_v3"], inputs, recipe, count=8)
    with engine(models["deepseek_v3"], recipe, **CHUNKS) as expanded:
        assert expanded.tokens(inputs, count=8) == expected
    assert expanded_steps


def test_beside_a_window_prompts_stay_absorbed(models, expanded_steps):
    with engine(models["deepseek_v3"], "int4+bf16:sink=16,recent=128", **CHUNKS) as absorbed:
        assert len(absorbed.tokens(prompts([70]))[0]) == 20
    assert not expanded_steps


def test_long_prompts_are_expanded_without_being_asked_for(models, expanded_steps):
    inputs = prompts([200, 201, 202, 203])
    expected = transformers_tokens(models["deepseek_v2"], inputs)
    with engine(models["deepseek_v2"], "f32", "auto") as chosen:
        assert chosen.tokens(inputs) == expected
    assert [step[0] for step in expanded_steps] == 3 * [806]


def limits(**changes):
    options = dict(num_heads=128, itemsize=2, num_bytes=1 << 32, wish="auto", on_gpu=True)
    return ExpandedLimits(DEEPSEEK, most_drafts=0, **{**options, **changes})


@pytest.mark.parametrize(
    "queries, tokens, is_expanded",
    [
        (2048, 2048, True),
        (512, 512, True),
        (128, 128, False),  # the launches cost more
        (128, 8192, False),  # expanding cached tokens does
        (2048, 32768, True),
        (4, 100_000, False),
    ],
)
def test_the_form_of_fewer_operations_is_chosen(queries, tokens, is_expanded):
    assert limits().takes([(queries, tokens)]) is is_expanded


@pytest.mark.parametrize(
    "queries, tokens, is_expanded", [(31, 31, False), (32, 32, True), (160, 8192, False)]
)
def test_on_a_cpu_expanding_costs_less(queries, tokens, is_expanded):
    assert limits(on_gpu=False).takes([(queries, tokens)]) is is_expanded


def test_a_gpu_expands_a_few_heads_at_a_time_for_long_prompts_alone():
    at_once = limits(num_bytes=1024 * 15_000)
    assert at_once.heads_at_once(1024) == 8
    assert not at_once.takes([(1024, 1024)])
    assert limits(num_bytes=2048 * 15_000).takes([(2048, 2048)])


def test_what_does_not_fit_is_absorbed():
    assert limits().takes([(2048, 100_000)])
    assert limits().heads_at_once(100_000) == 16
    assert not limits(num_bytes=1 << 28).takes([(2048, 200_000)])
    assert not limits(itemsize=4).takes([(2048, 2048)])  # no kernel for prompts in binary32
    assert limits(itemsize=4, wish="expanded").takes([(2048, 2048)])
    assert not limits(wish="absorbed").takes([(2048, 2048)])
    drafts = ExpandedLimits(DEEPSEEK, 128, 2, 1 << 32, "expanded", True, most_drafts=3)
    assert not drafts.takes([(4, 2048), (4, 512)])  # these steps are in graphs
    assert drafts.takes([(5, 2048), (4, 512)])


def test_rows_go_to_pages_one_sequence_behind_the_other():
    """The host knows the lengths by upper bounds alone."""
    batch = RecordingBatch()
    starts, lengths = torch.tensor([0, 3, 70]).int(), torch.tensor([66, 68]).int()
    table = torch.zeros(2, 4, dtype=torch.int32)
    of_step = ExpandedPrompts(batch, limits(), table, lengths, starts, [(3, 70), (67, 68)])
    assert (of_step.num_tokens, of_step.num_pages) == (138, 4)
    expected = [*range(66), *range(128, 128 + 68), -1, -1, -1, -1]
    assert of_step.slots.tolist() == expected
    (plan,) = batch.planned
    assert plan.shapes == ((2, 2), (2,), (3,))
    assert (plan.max_q_len, plan.max_seq_len, plan.num_queries) == (67, 70, 70)


def builder(**changes):
    made = object.__new__(latent.KvxLatentMetadataBuilder)
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=4096))
    made.batch, made.prompts_batch = RecordingBatch(), RecordingBatch()
    made.workspace = made.positions = made.window = None
    made.expanded = limits(wish="expanded", **changes)
    return made


def test_decodes_of_the_step_stay_absorbed():
    made = builder()
    lengths = [90, 300, 64, 200]
    bounds = torch.tensor(lengths, dtype=torch.int32)
    common = step_of([1, 1, 64, 30], lengths, seq_lens_cpu_upper_bound=bounds)
    metadata = made.build(0, common)
    assert (metadata.num_decode_tokens, metadata.num_decodes, metadata.num_prefills) == (2, 2, 2)
    assert metadata.num_actual_tokens == 96
    (decodes,), (of_prompts,) = made.batch.planned, made.prompts_batch.planned
    assert (decodes.shapes[0][0], decodes.num_queries, decodes.max_q_len) == (2, 2, 1)
    assert (of_prompts.shapes[0][0], of_prompts.num_queries) == (2, 94)


@pytest.mark.parametrize(
    "q_lens, with_bounds", [([1, 1], True), ([1, 64], False)], ids=["decodes", "no bounds"]
)
def test_other_steps_are_absorbed_as_a_whole(q_lens, with_bounds):
    made = builder()
    bounds = torch.tensor([90, 80], dtype=torch.int32) if with_bounds else None
    metadata = made.build(0, step_of(q_lens, [90, 80], seq_lens_cpu_upper_bound=bounds))
    assert metadata.prefill is None
    assert metadata.num_decode_tokens == metadata.num_actual_tokens == sum(q_lens)


def test_there_are_three_wishes():
    assert latent_prompts_of({}) == "auto"
    with pytest.raises(kvx.Error, match="latent_prompts is 'fast'; expected auto, absorbed or exp"):
        latent_prompts_of(config("int8", latent_prompts="fast").additional_config["kvx"])
