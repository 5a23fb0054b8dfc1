"""Stores of your own: any object that keeps bytes under keys, as a tier of any cache."""

import atexit
from collections.abc import Sequence
from typing import Protocol

from kvx import _core
from kvx.errors import Error
from kvx.refusals import in_words

__all__ = ["Store", "register_store", "unregister_store"]

_CALLS = ("put", "get", "exists", "remove", "remove_all")

atexit.register(_core.close_stores)


class Store(Protocol):
    """What kvx.register_store takes. A key is text of letters, digits and ``/-._:``.

    Calls come from threads of kvx's own, several at once. One that raises, or has not returned
    within the tier's timeout, has failed: the cache goes on without the store for a while and
    counts it. What get returns need not be trusted: a value is a record with a checksum, and
    anything else is a miss.
    """

    def put(self, keys: list[str], values: list[bytes]) -> Sequence[bool] | None:
        """Keeps the values; whether each was kept, or None for all. A key that has a value may keep
        that one."""

    def get(self, keys: list[str]) -> Sequence[bytes | None]:
        """The value of each key, bytes or what has their buffer; None where there is none."""

    def exists(self, keys: list[str]) -> Sequence[bool]:
        """Whether there is a value, of each key."""

    def remove(self, keys: list[str]) -> None:
        """Forgets the values, also where there are none."""

    def remove_all(self, parts: str) -> None:
        """Forgets all keys that begin with these whole parts: ``a/b`` is ``a/b/c``'s, not
        ``a/bc``'s."""


@in_words
def register_store(name: str, store: Store) -> None:
    """Makes ``store(NAME)`` a tier that any cache's ``tiers`` may name.

    name: 1 to 64 letters, digits, ``-`` and ``_``. Raises kvx.Error: another name, one that is
    registered, or an object that lacks one of the five methods of kvx.Store.
    """
    for call in _CALLS:
        if not callable(getattr(store, call, None)):
            raise Error(
                f"store is a {type(store).__name__} without a method {call}(); expected an object "
                f"with {', '.join(_CALLS)}, as kvx.Store describes them"
            )
    _core.register_store(name, store)


@in_words
def unregister_store(name: str) -> None:
    """Takes the name back; caches that have the store keep it. Raises kvx.Error: no such name."""
    _core.unregister_store(name)
