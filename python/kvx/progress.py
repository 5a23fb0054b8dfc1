"""A progress bar where tqdm is installed, and nothing where it is not."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def percent_bar(description: str, shown: bool = True) -> Iterator[Callable[[float, str], None]]:
    """A call that moves a bar to a percentage and says what comes next."""
    if tqdm is None or not shown:
        yield lambda percent, doing: None
        return
    with tqdm(total=100, desc=description, leave=False, unit="%") as bar:

        def show(percent: float, doing: str) -> None:
            bar.set_postfix_str(doing, refresh=False)
            bar.update(percent - bar.n)

        yield show
