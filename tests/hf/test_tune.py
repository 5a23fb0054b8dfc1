"""kvx.hf.tune: what it collects, what it writes, and what it refuses."""

import pytest
import torch
from conftest import tiny_model
from safetensors import safe_open

import kvx.hf
from kvx.hf.tune import collect


def text(count, seed=5):
    torch.manual_seed(seed)
    return torch.randint(3, 97, (count,)).tolist()


def test_statistics_are_those_of_the_keys_that_a_cache_gets():
    model = tiny_model("llama")
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        seen.append(key)
        return original(query, key, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        statistics = collect(kvx.hf.enable(model), [text(40)], shows_progress=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    assert len(seen) == 4 and statistics.has_rope
    key = seen[2][0]  # [heads, tokens, dim]; repeated for query heads where SDPA has no groups
    heads = key[:: key.shape[0] // 2]
    for head in range(2):
        largest = heads[head].abs().max().item()
        assert statistics.percentile(2, "k", head, 100) == pytest.approx(largest, rel=1e-6)


def test_a_tuned_cache_is_nearer_to_bf16(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    tuned = kvx.hf.tune(
        model, text(40 * 8), tmp_path / "m.kvxtune", recipe="int4:immediate",
        num_prompts=4, context=40, windows=2, block_size=16, shows_progress=False,
    )
    assert tuned.tried[0].name == "int4:immediate"
    kept = [one for one in tuned.tried if one.is_kept]
    found = kvx.hf.compare(
        model, text(80, seed=9), ["int4:immediate", f"tuned:{tuned.path}"],
        context=40, windows=2, shows_progress=False,
    )
    assert len(kept) > 1 and found[2].kl.value < found[1].kl.value


def test_given_scales_are_fitted_after_the_transforms(tmp_path):
    model = kvx.hf.enable(tiny_model("llama"))
    scales, divergence = {}, {}
    for recipe in ("int8:source=given", "int8:source=given,hadamard"):
        path = tmp_path / "m.kvxtune"
        kvx.hf.tune(
            model, text(200), path, recipe=recipe, num_prompts=4, context=40, tables=(),
            shows_progress=False,
        )
        with safe_open(path, framework="pt") as file:
            scales[recipe] = file.get_tensor("layers.1.k.group_scales")
        found = kvx.hf.compare(
            model, text(80, seed=9), [f"tuned:{path}"], context=40, windows=2, shows_progress=False
        )
        divergence[recipe] = found[1].kl.value
    plain, rotated = scales.values()
    assert plain.shape == rotated.shape == (2,) and not torch.equal(plain, rotated)
    assert max(divergence.values()) < 1e-2  # scales that are wrong by a factor give 0.1 and more


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_prompts=9), "200 tokens; 9 prompts and 1 windows of 40 need 400"),
        (dict(recipe="int9"), "format is 'int9'"),
        (dict(percentile=0, recipe="fp8_e4m3", tables=()), "percentile is 0"),
        (dict(tables=("k_scale",)), "tables has 'k_scale'"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(tmp_path, options, message):
    path = tmp_path / "m.kvxtune"
    arguments = {"num_prompts": 3, "context": 40, "windows": 1, **options}
    with pytest.raises(kvx.Error, match=message):
        kvx.hf.tune(
            kvx.hf.enable(tiny_model("llama")), text(200), path, shows_progress=False, **arguments
        )
    assert not path.exists()


def test_fewer_prompts_than_asked_are_refused(tmp_path):
    with pytest.raises(kvx.Error, match="2 prompts; 3 to collect from"):
        kvx.hf.tune(
            tiny_model("llama"), [text(40), text(40)], tmp_path / "m", num_prompts=3, context=40,
            tables=(),
        )


def test_a_nan_is_named_by_its_layer():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = float("nan")
    with pytest.raises(kvx.Error, match="of layer 1 is nan at position 0"):
        collect(kvx.hf.enable(model), [text(20)], shows_progress=False)


def test_models_of_two_rotations_are_tuned_without_block_offsets(tmp_path):
    model = kvx.hf.enable(tiny_model("gemma3"))
    assert not collect(model, [text(20)], shows_progress=False).has_rope
    with pytest.raises(kvx.UnsupportedError, match="k_block_offset needs the model's rotation"):
        kvx.hf.tune(
            model, text(200), tmp_path / "m", num_prompts=3, context=40,
            tables=("k_block_offset",), shows_progress=False,
        )
