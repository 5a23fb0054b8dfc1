"""TurboMind's words: policies, modes, block sizes, the engine configuration."""

import argparse
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import kvx
from kvx import turbomind
from kvx.turbomind import KvCacheMode, TurbomindEngineConfig

GEOMETRY = dict(num_layers=32, num_kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("policy", "sm", "mode"),
    [
        (0, 80, KvCacheMode.kNone),
        (4, 80, KvCacheMode.kInt4),
        (8, 80, KvCacheMode.kInt8),
        (12, 80, KvCacheMode.kInt8),  # a bitmask: int8 goes before int4
        (16, 90, KvCacheMode.kFp4Mx),
        (16, 100, KvCacheMode.kFp4Nv),
        (24, 120, KvCacheMode.kFp4Nv),
    ],
)
def test_a_policy_is_a_bitmask(policy, sm, mode):
    assert turbomind.get_kv_cache_mode(policy, sm) == mode


def test_fp4_fails_where_it_is_not_and_falls_back_only_when_asked():
    with pytest.raises(kvx.UnsupportedError):
        turbomind.get_kv_cache_mode(24, 80)
    assert turbomind.get_kv_cache_mode(24, 80, fall_back=True) == KvCacheMode.kInt8
    assert turbomind.get_kv_cache_mode(16, 120, fp4_format="mx") == KvCacheMode.kFp4Mx
    for policy in (1, 2, 32, -1):
        with pytest.raises(kvx.Error, match="quant_policy"):
            turbomind.get_kv_cache_mode(policy, 90)


def test_block_sizes_follow_from_the_mode_alone():
    rows = 32 * 8 * 2 * 64  # layers, heads, K and V, tokens
    for mode, bytes_per_row, scales in [
        (KvCacheMode.kNone, 256, 0),
        (KvCacheMode.kInt8, 128 + 4, 0),
        (KvCacheMode.kInt4, 64 + 4, 0),
        (KvCacheMode.kFp4Mx, 64, 8),
        (KvCacheMode.kFp4Nv, 64, 8),
    ]:
        sizes = turbomind.get_cache_block_size(mode, **GEOMETRY)
        assert (sizes.block_bytes, sizes.scale_block_bytes) == (rows * bytes_per_row, rows * scales)
    with pytest.raises(kvx.Error, match="head_dim"):
        turbomind.get_cache_block_size(KvCacheMode.kFp4Mx, **{**GEOMETRY, "head_dim": 24})
    with pytest.raises(kvx.Error, match="dtype is 'float32'"):
        turbomind.get_cache_block_size(KvCacheMode.kNone, **GEOMETRY, dtype="float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_policy": 5}, "quant_policy is 5; expected one of 0, 4, 8, 16"),
        ({"quant_policy": True}, "quant_policy is True"),
        ({"kv_cache_format": "fp8"}, "kv_cache_format is 'fp8'"),
        ({"kv_cache_format": "fp4", "quant_policy": 8}, "expected 16"),
        ({"kv_cache_format": "int"}, "expected 4 or 8"),
        ({"device_type": "ascend"}, "device_type is 'ascend'; expected one of cuda"),
        ({"quant_policy": 16, "capability": (8, 0)}, "80"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"cache_block_seq_len": 0}, "cache_block_seq_len is 0"),
    ],
)
def test_an_engine_configuration_is_checked(fields, message):
    with pytest.raises(kvx.Error, match=message):
        TurbomindEngineConfig(**fields)


def test_an_unknown_gpu_is_a_warning_for_fp4(monkeypatch):
    monkeypatch.setattr(turbomind, "capability_of_device", lambda: None)
    with pytest.warns(UserWarning, match="capability is unknown"):
        TurbomindEngineConfig(quant_policy=16)


def test_a_models_own_settings_never_change_the_users_policy():
    config = TurbomindEngineConfig(quant_policy=8, capability=(9, 0))
    config.update_from({"quant_policy": 0, "dtype": "bfloat16", "kv_cache_format": "fp4"})
    assert (config.quant_policy, config.kv_cache_format, config.dtype) == (8, "auto", "bfloat16")
    with pytest.raises(kvx.Error, match="cache_block_seq_len"):
        config.update_from({"dtype": "float16", "cache_block_seq_len": -1})
    assert config.dtype == "bfloat16"
    with pytest.raises(kvx.Error, match="speed is no field"):
        config.update_from({"speed": 3})


def test_lmdeploys_other_fields_decide_nothing():
    config = TurbomindEngineConfig(quant_policy=8, capability=(9, 0))
    before = dict(vars(config))
    config.update_from({"tp": 2, "session_len": 4096, "async_": 0})
    assert vars(config) == before


def test_the_gpu_is_asked_for_its_capability(monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (10, 0))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert TurbomindEngineConfig(quant_policy=16).mode(100) == KvCacheMode.kFp4Nv
    assert TurbomindEngineConfig().capability == (10, 0)


def test_estimates_count_the_scale_pool():
    config = TurbomindEngineConfig(quant_policy=16, capability=(9, 0))
    estimate = config.estimate(**GEOMETRY, memory_bytes=2**30)
    assert estimate["bytes_per_block"] == 32 * 8 * 2 * 64 * 72
    assert estimate["tokens"] == 64 * (2**30 // estimate["bytes_per_block"])


def test_the_command_line_takes_the_four_policies():
    parser = argparse.ArgumentParser(exit_on_error=False)
    turbomind.add_cli_arguments(parser)
    options = parser.parse_args(["--quant-policy", "16", "--kv-cache-format", "fp4"])
    assert (options.quant_policy, options.kv_cache_format) == (16, "fp4")
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--quant-policy", "5"])


def run_tool(*arguments):
    command = [sys.executable, "-m", "kvx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_demos_model_runs_on_policy_16_and_the_probe_reads_its_bytes():
    model = os.environ["KVX_TEST_MODEL"]
    result = run_tool("run", "-m", model, "-p", "Hi", "-n", "4", "--quant-policy", "16")
    assert result.returncode == 0, result.stderr
    assert "cache mxfp4_g16:search,order=turbomind" in result.stderr
    probe = run_tool(
        "probe", "--turbomind", "-m", model, "--layer", "2", "--head", "1", "--token", "3"
    )
    assert probe.returncode == 0, probe.stderr
    lines = dict(line.split(None, 1) for line in probe.stdout.splitlines()[1:])
    assert list(lines) == ["k_scale0", "v_scale0", "k_scale1", "v_scale1", "kv_byte0"]
    for name in list(lines)[:4]:
        byte, number = lines[name].split()
        assert float(number) == 2.0 ** (int(byte, 16) - 127)
    refused = run_tool("probe", "--turbomind", "-m", model, "--head", "3")
    assert refused.returncode == 2 and "head is 3; expected 0 to 2" in refused.stderr


def test_recipe_of_names_a_cache_in_turbominds_blocks():
    assert turbomind.recipe_of(0) == "f16:order=turbomind"
    assert turbomind.recipe_of(8, dtype="bfloat16") == "int8_affine:scale=bf16,order=turbomind"
    assert turbomind.recipe_of(16, sm_version=100) == "nvfp4:search,order=turbomind"
    assert turbomind.recipe_of(16, rotate=True) == "mxfp4_g16:hadamard,search,order=turbomind"
    with pytest.raises(kvx.Error, match="quant_policy is 3"):
        turbomind.recipe_of(3)
