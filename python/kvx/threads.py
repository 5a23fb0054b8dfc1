"""The threads that verbs run on: kvx's own, or those of an OpenMP library such as torch's."""

import os

from kvx import _core
from kvx.errors import UnsupportedError
from kvx.refusals import in_words

_NAMES = ("libgomp", "libiomp", "libomp")


@in_words
def set_num_threads(num_threads: int) -> None:
    """Threads for caches and rows from now on; 0 means one a core. Results never depend on it.

    Raises kvx.Error: more than 1024.
    """
    _core.set_num_threads(num_threads)


def num_threads() -> int:
    """Threads that new caches run on."""
    return _core.num_threads()


@in_words
def use_openmp(library: str) -> None:
    """Runs caches and rows from now on upon the threads of an OpenMP library that the process has
    loaded (its path), which a program that computes with them wants.

    Raises kvx.Error: it is not loaded, or is no OpenMP library.
    """
    _core.use_openmp(library)


def use_torch_threads() -> None:
    """Runs caches made from now on upon torch's OpenMP threads instead of kvx's own.

    Two pools take the cores from each other: OpenMP threads spin between torch's operations.
    Raises kvx.UnsupportedError: torch has not loaded an OpenMP library (import it first).
    """
    use_openmp(_openmp_library())


def _openmp_library() -> str:
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


def _preloaded() -> list[str]:
    return os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":")


def _is_openmp(path: str) -> bool:
    return os.path.basename(path).startswith(_NAMES)
