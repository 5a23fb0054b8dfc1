"""LMDeploy's engine configuration with kvx in it: which recipe, and what loads kvx in each process.

An engine may run its model in processes of its own. Each of them loads the file that
custom_module_map names before it makes the model: module_map/kvx_module_map.py, alone in its
folder because LMDeploy puts that on the path. The environment has the recipe.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.messages import QuantPolicy

from kvx.errors import Error, UnsupportedError
from kvx.formats import parse_recipe
from kvx.refusals import in_words
from kvx.turbomind import (
    FP4_BIT,
    KvCacheMode,
    capability_of_device,
    check_kv_cache_format,
    check_quant_policy,
    get_kv_cache_mode,
)

RECIPE_VARIABLE = "KVX_LMDEPLOY_RECIPE"
MODULE_MAP = str(Path(__file__).parent / "module_map" / "kvx_module_map.py")

_OF_POLICY = {4: "int4", 8: "int8"}
# Rotated rows lose half as much (docs/engines.md), and no kernel but kvx's reads these blocks.
_OF_FP4_MODE = {KvCacheMode.kFp4Mx: "mxfp4_g16:hadamard", KvCacheMode.kFp4Nv: "nvfp4:hadamard"}


@in_words
def enable(recipe: str | None = None, *, kv_cache_format: str = "auto") -> None:
    """Every PytorchEngineConfig that is made from now on stores by kvx, as configure() says.

    A TurbomindEngineConfig is refused meanwhile, since that engine has kernels of its own.
    Raises kvx.Error as configure() does for the recipe.
    """
    if recipe is not None:
        _check_recipe(recipe)
    disable()
    _wrap(PytorchEngineConfig, lambda config: configure(config, recipe, kv_cache_format))
    _wrap(TurbomindEngineConfig, _refuse_turbomind)


def disable() -> None:
    """Configurations made from now on are LMDeploy's own again."""
    for owner in (PytorchEngineConfig, TurbomindEngineConfig):
        owner.__init__ = _original(owner)
    os.environ.pop(RECIPE_VARIABLE, None)


@in_words
def configure(
    config: PytorchEngineConfig, recipe: str | None = None, kv_cache_format: str = "auto"
) -> PytorchEngineConfig:
    """config itself, whose engine then stores keys and values by kvx; one recipe a process.

    recipe: ``"nvfp4"``, ``"int8/int4"``; any but a tuned one. config.quant_policy is then 0. None:
            config.quant_policy in TurboMind's numbers, as recipe_of_policy() reads them; 0 leaves
            the configuration as it is
    kv_cache_format: "auto" follows quant_policy; "int" and "fp4" must agree with it

    Raises kvx.Error and kvx.UnsupportedError naming LMDeploy's own field.
    """
    policy = int(config.quant_policy)
    if recipe is None:
        if policy == 0 and kv_cache_format == "auto":
            return config
        recipe = recipe_of_policy(policy, kv_cache_format)
    elif policy != 0 or kv_cache_format != "auto":
        raise Error(
            f"recipe is '{recipe}', quant_policy {policy} and kv_cache_format '{kv_cache_format}'; "
            f"expected a recipe, or a policy and its format"
        )
    _check_recipe(recipe)
    _check_fields(config)
    before = os.environ.get(RECIPE_VARIABLE)
    if before not in (None, recipe):
        raise Error(
            f"recipe is '{recipe}' and this process's engines store by '{before}' "
            f"({RECIPE_VARIABLE}); expected one recipe a process (kvx.lmdeploy.disable() forgets "
            f"it)"
        )
    os.environ[RECIPE_VARIABLE] = recipe
    config.custom_module_map = MODULE_MAP
    config.quant_policy = QuantPolicy.NONE
    return config


@in_words
def recipe_of_policy(quant_policy: int, kv_cache_format: str = "auto") -> str:
    """kvx's recipe for a policy in TurboMind's numbers: 4 int4, 8 int8, 16 FP4.

    16 is NVFP4 from Blackwell on and MXFP4 with groups of 16 on Ada and Hopper, both rotated; the
    GPU is asked which it is. Raises kvx.Error: another number, or a format that does not agree.
    kvx.UnsupportedError: 16 on a GPU without FP4's kernels; a recipe can be named there.
    """
    check_quant_policy(quant_policy)
    check_kv_cache_format(kv_cache_format, quant_policy)
    if quant_policy == 0:
        raise Error("quant_policy is 0, which is not quantised; expected 4, 8 or 16, or a recipe")
    if quant_policy != FP4_BIT:
        return _OF_POLICY[quant_policy]
    major, minor = capability_of_device() or (0, 0)
    return _OF_FP4_MODE[get_kv_cache_mode(quant_policy, major * 10 + minor)]


def _check_recipe(recipe: str) -> None:
    if recipe.startswith("tuned:"):
        raise UnsupportedError(
            f"recipe is '{recipe}'; LMDeploy's blocks have one size in all layers, and its layers "
            f"do not know their number, so a tuned recipe cannot be used there"
        )
    if parse_recipe(recipe).full_precision_format is not None:
        raise UnsupportedError(
            f"recipe is '{recipe}'; LMDeploy's blocks have no full-precision window beside them "
            f"(add immediate, or leave auto, sink and recent out)"
        )


def _check_fields(config: PytorchEngineConfig) -> None:
    """Raises kvx.UnsupportedError naming what LMDeploy would compute in another way."""
    refused = {
        "device_type": (config.device_type != "cuda", "'cuda'"),
        "custom_module_map": (config.custom_module_map not in (None, MODULE_MAP), "None"),
        "kv_transfer_config": (config.kv_transfer_config is not None, "None"),
        "piecewise_cudagraph_max_tokens": (
            config.piecewise_cudagraph_max_tokens is not None,
            "None",
        ),
    }
    for name, (is_refused, expected) in refused.items():
        if is_refused:
            raise UnsupportedError(
                f"{name} is {getattr(config, name)!r}; expected {expected} while kvx stores keys "
                f"and values"
            )


def _wrap(owner: Any, then: Callable[[Any], object]) -> None:
    """Calls then(config) behind the making of each configuration."""
    original = _original(owner)

    @functools.wraps(original)
    def made(config, *args, **fields):
        original(config, *args, **fields)
        then(config)

    made.kvx_original = original
    owner.__init__ = made


def _original(owner: Any) -> Any:
    return getattr(owner.__init__, "kvx_original", owner.__init__)


def _refuse_turbomind(config: TurbomindEngineConfig) -> None:
    raise UnsupportedError(
        "backend is 'turbomind', which has kernels of its own, while kvx is enabled for LMDeploy's "
        "PyTorch engine; pass a PytorchEngineConfig or --backend pytorch"
    )
