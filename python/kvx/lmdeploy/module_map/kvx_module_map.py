"""What LMDeploy loads in each process of an engine before it makes the model (custom_module_map).

Loading it puts kvx in; no class of a model is replaced.
"""

from kvx.lmdeploy.install import install

install()
MODULE_MAP: dict[str, str] = {}
