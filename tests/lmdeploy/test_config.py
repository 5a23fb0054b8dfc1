"""LMDeploy's configurations with kvx in them, what is refused, and the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.pytorch.backends import selector
from lmdeploy.pytorch.models.patch import update_custom_module_map
from steps import use_cpu

import kvx
import kvx.lmdeploy
import kvx.turbomind
from kvx.lmdeploy import RECIPE_VARIABLE, configure, disable, enable, recipe_of_policy

sys.path.append(str(Path(__file__).parents[1] / "python"))
from pages import run_blocks  # noqa: E402


def test_a_configuration_carries_kvx_into_each_process(monkeypatch):
    use_cpu(monkeypatch)
    enable("nvfp4")
    config = PytorchEngineConfig(max_batch_size=3, session_len=99, enable_prefix_caching=True)
    assert (config.quant_policy, config.max_batch_size) == (0, 3)
    assert os.environ[RECIPE_VARIABLE] == "nvfp4"
    update_custom_module_map(config.custom_module_map)  # as a worker does before it makes a model
    assert selector.get_backend().__name__ == "KvxOpsBackend"


@pytest.mark.parametrize("policy, recipe", [(4, "int4"), (8, "int8"), (16, "mxfp4_g16:hadamard")])
def test_a_policy_is_turbominds(monkeypatch, policy, recipe):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    enable(kv_cache_format="fp4" if policy == 16 else "int")
    assert PytorchEngineConfig(quant_policy=policy).quant_policy == 0
    assert os.environ[RECIPE_VARIABLE] == recipe


def test_a_gpu_is_asked_what_it_is(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    assert recipe_of_policy(16) == "nvfp4:hadamard"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    with pytest.raises(kvx.UnsupportedError, match="sm_version is 80"):
        recipe_of_policy(16)


def test_policy_0_and_configurations_afterwards_are_lmdeploys_own():
    enable()
    assert PytorchEngineConfig().custom_module_map is None
    disable()
    assert PytorchEngineConfig(quant_policy=16).quant_policy == 16
    assert TurbomindEngineConfig(quant_policy=8).quant_policy == 8
    assert RECIPE_VARIABLE not in os.environ


@pytest.mark.parametrize(
    "recipe, format, fields, message",
    [
        (None, "auto", {"quant_policy": 17}, "quant_policy is 17; expected one of 0, 4, 8, 16"),
        (None, "auto", {"quant_policy": 42}, "quant_policy is 42"),
        (None, "fp4", {"quant_policy": 8}, "kv_cache_format is 'fp4' but quant_policy is 8"),
        (None, "int", {}, "kv_cache_format is 'int' but quant_policy is 0; expected 4 or 8"),
        (None, "fp8", {"quant_policy": 8}, "kv_cache_format is 'fp8'; expected one of auto, int"),
        ("int8", "auto", {"quant_policy": 8}, "expected a recipe, or a policy and its format"),
        ("int8", "int", {}, "expected a recipe, or a policy and its format"),
        ("int8", "auto", {"device_type": "ascend"}, "device_type is 'ascend'; expected 'cuda'"),
        ("int8", "auto", {"custom_module_map": "map.py"}, "custom_module_map is 'map.py'"),
        ("int8", "auto", {"piecewise_cudagraph_max_tokens": 64}, "piecewise_cudagraph_max_tokens"),
        (
            "int8",
            "auto",
            {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"}},
            "kv_tr",
        ),
        ("nvfp4:auto", "auto", {}, "no full-precision window beside them"),
        ("tuned:file", "auto", {}, "a tuned recipe cannot be used there"),
        ("int3", "auto", {}, "int3"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(recipe, format, fields, message):
    config = PytorchEngineConfig(**fields)
    before = dict(vars(config))
    with pytest.raises(kvx.Error, match=message):
        configure(config, recipe, format)
    assert vars(config) == before and RECIPE_VARIABLE not in os.environ


def test_a_process_has_one_recipe():
    configure(PytorchEngineConfig(), "int8")
    configure(PytorchEngineConfig(), "int8")
    with pytest.raises(
        kvx.Error, match="recipe is 'int4' and this process's engines store by 'int8'"
    ):
        configure(PytorchEngineConfig(), "int4")


def test_turbominds_engine_is_refused_while_kvx_is_enabled():
    enable("int8")
    with pytest.raises(kvx.UnsupportedError, match="--backend pytorch"):
        TurbomindEngineConfig()


def test_a_process_without_the_recipe_says_so():
    configure(config := PytorchEngineConfig(), "int8")
    del os.environ[RECIPE_VARIABLE]
    with pytest.raises(kvx.Error, match=f"{RECIPE_VARIABLE} is not set"):
        update_custom_module_map(config.custom_module_map)


def test_kvx_knows_every_field_of_turbominds_configuration():
    config = kvx.turbomind.TurbomindEngineConfig()
    own = TurbomindEngineConfig.__dataclass_fields__
    config.update_from({name: own[name].default for name in own if name != "cache_block_seq_len"})


def test_the_pages_code_runs():
    assert run_blocks("docs/lmdeploy.md", " lmdeploy") == 1


def program(*arguments):
    command = [sys.executable, "-m", "kvx.lmdeploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_program_gives_lmdeploy_the_rest():
    shown = program("--recipe", "int8", "serve", "api_server", "--help")
    assert shown.returncode == 0 and "--quant-policy" in shown.stdout, shown.stderr


def test_the_program_says_what_is_wrong_in_one_line():
    refused = program("--recipe", "int8:auto", "serve", "api_server", "a model")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith(
        "python -m kvx.lmdeploy: recipe is 'int8:auto'"
    )
