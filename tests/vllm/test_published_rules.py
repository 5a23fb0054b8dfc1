"""bench/quality's rules of other caches: llama.cpp's formats against its own Python package, and
laws of the rest. They are tested here because vLLM's environment has the package gguf."""

import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "quality"))
import published_rules  # noqa: E402

HEAD_DIM = 64


def rows(seed=1):
    """[heads, blocks, tokens, head_dim] with channels of different sizes and a group of zeros."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 64, HEAD_DIM, generator=numbers) * torch.linspace(0.1, 3, HEAD_DIM)
    x[0, 0, 0, :32] = 0
    return x


def relative_error(rule, x):
    return float((rule(x) - x).norm() / x.norm())


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_llama_cpps_formats_are_those_of_its_package(name):
    (rule,) = [rule for rule in published_rules.RULES if rule.name == f"llama.cpp {name}"]
    kind = GGMLQuantizationType[name.upper()]
    x = rows()
    packed = quantize(x.numpy().reshape(-1, HEAD_DIM), kind)
    expected = torch.from_numpy(dequantize(packed, kind)).reshape(x.shape)
    torch.testing.assert_close(rule.quantise_k(x), expected, rtol=0, atol=0)
    assert rule.bits(HEAD_DIM, 64) == 8 * packed.nbytes / x.numel()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_of_a_few_bits_err_like_a_grid_of_them(bits):
    x = rows()
    for rule in (
        published_rules.kvarn(bits, bits),
        published_rules.kivi(bits, 64),
        published_rules.turboquant_like(bits),
    ):
        for side in (rule.quantise_k, rule.quantise_v):
            assert 1 < relative_error(side, x) * 2**bits < 2.6, rule.name


def test_kivi_is_exact_for_keys_of_four_values_a_channel():
    """K is rounded along the tokens of a channel: four evenly spaced values need two bits."""
    codes = torch.randint(0, 4, (1, 1, 64, HEAD_DIM), generator=torch.Generator().manual_seed(2))
    codes[..., 0, :], codes[..., 1, :] = 0, 3
    x = codes * 0.5 + torch.arange(HEAD_DIM)
    assert torch.equal(published_rules.kivi(2, 64).quantise_k(x), x)
    assert not torch.equal(published_rules.kivi(2, 64).quantise_v(x), x)


def test_kvarn_evens_out_large_tokens_and_channels():
    """Scales along both axes take away what differs by powers of a token and of a channel."""
    x = rows() * torch.logspace(-1, 1, 64)[:, None]
    rule = published_rules.kvarn(3, 3)
    assert relative_error(rule.quantise_k, x) < 0.8 * relative_error(
        published_rules.kivi(3, 64).quantise_k, x
    )
