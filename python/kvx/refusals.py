"""Refusals of arguments of the wrong type, in Python's words.

``in_words`` costs a verb one call: arguments are compared with the verb's annotations after the
module has refused them.
"""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from kvx.arrays import described
from kvx.errors import Error
from kvx.types import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Mismatch = tuple[str, object, str]  # the argument or the part of it, its value, what was expected

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a str",
}
_INT32 = 2**31


def in_words(verb: Callable[_P, _R]) -> Callable[_P, _R]:
    """The verb, whose TypeErrors name its argument that has the wrong type."""

    @functools.wraps(verb)
    def refusing(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return verb(*args, **kwargs)
        except TypeError as error:
            words = _words_of(verb, args, kwargs, error)
        raise words

    return refusing


def _words_of(verb: Callable[..., Any], args: Any, kwargs: Any, error: TypeError) -> Exception:
    try:
        given = inspect.signature(verb).bind(*args, **kwargs).arguments
    except TypeError:
        return error  # an argument is missing, or is none of the verb's
    hints = typing.get_type_hints(verb)
    for name, value in given.items():
        if name in hints and (found := _mismatch(name, value, hints[name])):
            where, what, expected = found
            return TypeError(f"{where} is {described(what)}; expected {expected}")
    if "incompatible function arguments" not in str(error):
        return error  # of something else
    for name, value in given.items():
        if large := _too_large(name, value):
            where, number = large
            return Error(f"{where} is {number}; expected {-_INT32} to {_INT32 - 1}")
    return TypeError(f"an argument of {verb.__qualname__}() has a type that it does not take")


def _mismatch(name: str, value: object, hint: Any) -> _Mismatch | None:
    """Where a value, or one inside of it, is not what the hint says."""
    if hint in _WORDS:
        return None if _is_plain(value, hint) else (name, value, _WORDS[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _mismatch_of_all(name, value, arguments)
    if origin in (Sequence, Iterable):
        return _mismatch_inside(name, value, arguments[0])
    if origin is tuple:
        return _mismatch_of_tuple(name, value, arguments)
    if origin is os.PathLike or hint is bytes:
        return None if isinstance(value, bytes | os.PathLike) else (name, value, "a path")
    if isinstance(hint, type) and hint.__module__.startswith("kvx") and hint is not Array:
        is_protocol = getattr(hint, "_is_protocol", False)
        is_one = is_protocol or isinstance(value, hint)
        return None if is_one else (name, value, f"a {hint.__name__}")
    is_array = hint is Array or getattr(hint, "__bound__", None) is Array
    if is_array and not hasattr(value, "shape"):
        return name, value, "a NumPy array or a tensor"
    return None


def _mismatch_of_all(name: str, value: object, hints: tuple[Any, ...]) -> _Mismatch | None:
    """Where a value is none of what a union allows."""
    if value is None and type(None) in hints:
        return None
    misses = [_mismatch(name, value, hint) for hint in hints if hint is not type(None)]
    found = [miss for miss in misses if miss is not None]
    if len(found) < len(misses):
        return None
    inside = [miss for miss in found if miss[0] != name]
    return inside[0] if inside else (name, value, " or ".join(dict.fromkeys(m[2] for m in found)))


def _mismatch_of_tuple(name: str, value: object, hints: tuple[Any, ...]) -> _Mismatch | None:
    if not isinstance(value, tuple | list) or len(value) != len(hints):
        names = ", ".join(_WORDS.get(hint, "...") for hint in hints)
        return name, value, f"a tuple of {len(hints)}: ({names})"
    parts = enumerate(zip(value, hints))
    found = (_mismatch(f"{name}[{i}]", part, hint) for i, (part, hint) in parts)
    return next(filter(None, found), None)


def _mismatch_inside(name: str, value: object, hint: Any) -> _Mismatch | None:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        words = _WORDS.get(hint, "a tuple").removeprefix("a ")
        return name, value, f"a list of {words}s"
    if not isinstance(value, Sequence) and not hasattr(value, "tolist"):
        return None  # read by now
    found = (_mismatch(f"{name}[{i}]", item, hint) for i, item in enumerate(value))
    return next(filter(None, found), None)


def _is_plain(value: object, kind: type) -> bool:
    if kind is int:
        return hasattr(value, "__index__")
    if kind is float:
        return hasattr(value, "__float__") or hasattr(value, "__index__")
    return isinstance(value, kind)


def _too_large(name: str, value: object) -> tuple[str, int] | None:
    """The first whole number that has more than 32 bits."""
    if isinstance(value, int):
        return None if -_INT32 <= value < _INT32 else (name, value)
    if isinstance(value, list | tuple):
        found = (_too_large(f"{name}[{i}]", item) for i, item in enumerate(value))
        return next(filter(None, found), None)
    return None
