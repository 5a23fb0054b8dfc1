"""kvx in LMDeploy's PyTorch engine: its blocks hold kvx's packed bytes, and kvx attends over them.

    import kvx.lmdeploy
    from lmdeploy import PytorchEngineConfig, pipeline

    kvx.lmdeploy.enable("nvfp4")
    pipe = pipeline(MODEL, backend_config=PytorchEngineConfig(max_batch_size=8))

``python -m kvx.lmdeploy --recipe nvfp4 serve api_server MODEL --backend pytorch`` is the same for
LMDeploy's own program.
"""

try:
    import lmdeploy  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvx.lmdeploy needs LMDeploy 0.18: pip install lmdeploy ({error})"
    ) from error

from kvx.lmdeploy.config import RECIPE_VARIABLE, configure, disable, enable, recipe_of_policy

__all__ = ["RECIPE_VARIABLE", "configure", "disable", "enable", "recipe_of_policy"]
