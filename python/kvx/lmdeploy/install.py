"""Puts kvx's attention into LMDeploy's PyTorch engine, in this process."""

import functools

import lmdeploy
from lmdeploy.utils import get_logger

from kvx.errors import UnsupportedError
from kvx.lmdeploy.pages import recipe_of_process

TESTED_VERSION = "0.18"


def install() -> None:
    """From now on this process's models get kvx's attention, stored as the environment says.

    Raises kvx.Error: KVX_LMDEPLOY_RECIPE is not set. kvx.UnsupportedError: another LMDeploy, whose
    interface lacks something.
    """
    recipe = recipe_of_process()
    try:
        from lmdeploy.pytorch.backends import selector

        from kvx.lmdeploy.backend import backend_over
    except ImportError as error:
        raise UnsupportedError(
            f"kvx was made for LMDeploy {TESTED_VERSION}; this is {lmdeploy.__version__}: {error}"
        ) from error
    log = get_logger("lmdeploy")
    if not lmdeploy.__version__.startswith(TESTED_VERSION + "."):
        log.warning("kvx was tested with LMDeploy %s, not %s", TESTED_VERSION, lmdeploy.__version__)
    original = getattr(selector._get_backend, "__wrapped__", selector._get_backend)

    @functools.wraps(original)
    def with_kvx():
        return backend_over(original())

    selector._get_backend = with_kvx
    log.info("kvx stores keys and values as %s", recipe)


def uninstall() -> None:
    """Models made from now on get LMDeploy's own attention."""
    from lmdeploy.pytorch.backends import selector

    selector._get_backend = getattr(selector._get_backend, "__wrapped__", selector._get_backend)
