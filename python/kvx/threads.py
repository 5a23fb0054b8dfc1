"""Which OpenMP library torch computes with, so that kvx can run on the same threads."""

import os

from kvx import _core
from kvx.errors import UnsupportedError

_NAMES = ("libgomp", "libiomp", "libomp")


def use_torch_threads() -> None:
    """Runs caches made from now on upon torch's OpenMP threads instead of kvx's own.

    Two pools take the cores from each other: OpenMP threads spin between torch's operations.
    Raises kvx.UnsupportedError: torch has not loaded an OpenMP library (import it first).
    """
    _core.use_openmp(_openmp_library())


def _openmp_library():
    with open("/proc/self/maps") as maps:
        # address, access, offset, device, inode, path: only the last may hold blanks
        paths = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    loaded = sorted(filter(_is_openmp, paths))
    if not loaded:
        raise UnsupportedError("no OpenMP library is loaded in this process; import torch first")
    # What is preloaded answers torch's calls; else the library that torch brought along does.
    preloaded = [os.path.realpath(path) for path in _preloaded() if _is_openmp(path)]
    for path in loaded:
        if path in preloaded:
            return path
    return next((path for path in loaded if "/torch" in path), loaded[0])


def _preloaded():
    return os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":")


def _is_openmp(path):
    return os.path.basename(path).startswith(_NAMES)
