"""A progress bar where tqdm is installed, and nothing where it is not."""

from collections.abc import Iterable
from typing import TypeVar

try:
    from tqdm.auto import tqdm  # type: ignore
except ImportError:
    tqdm = None

_T = TypeVar("_T")


def progress(steps: Iterable[_T], description: str, shown: bool = True) -> Iterable[_T]:
    """Yields from ``steps`` under a bar with the title ``description``."""
    if tqdm is None or not shown:
        return steps
    bar: Iterable[_T] = tqdm(steps, desc=description, leave=False)
    return bar
