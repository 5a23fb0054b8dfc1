"""New arrays of the caller's own kind: a verb that is given torch tensors returns torch tensors.

Others get NumPy's arrays, also JAX, whose own cannot be written. On a GPU arrays are torch's or
CuPy's."""

import sys
from typing import Any

import numpy as np

from kvx.errors import Error
from kvx.types import Array, ArrayT, Tokens

Shape = tuple[int, ...]


def empty_like(array: Any, shape: Shape) -> Any:
    """An uninitialised array of ``shape`` with ``array``'s library, dtype and device."""
    if hasattr(array, "new_empty"):  # PyTorch
        return array.new_empty(shape)
    cupy = _cupy_of(array)
    if cupy is not None:
        with array.device:
            return cupy.empty(shape, dtype=array.dtype)
    return np.empty(shape, dtype=_numpy_dtype(array))


def new_output(like: Array | None, shape: Shape, device: str, name: str) -> Any:
    """An array for a verb on ``device`` to write to, of ``like``'s library. ``name`` is the
    argument that decides it.

    Raises kvx.Error: a GPU's, and like's library makes none that could be written there.
    """
    out = empty_like(like, shape)
    if device != "cpu" and isinstance(out, np.ndarray) and not isinstance(like, np.ndarray):
        raise Error(
            f"{name} is {'None' if like is None else f'a {type(like).__name__}'}; expected a torch "
            f"tensor or CuPy array on {device}, whose library makes the array that is written"
        )
    return out


def new_array(like: Array, shape: Shape, dtype: str, device: str, name: str) -> Any:
    """An uninitialised array of ``like``'s library, where like lies; NumPy's for libraries whose
    arrays cannot be written. dtype: its name, such as ``"uint8"``.

    Raises kvx.Error: like lies on a GPU, where its library's arrays cannot be written.
    """
    if device != "cpu" and not hasattr(like, "new_empty") and _cupy_of(like) is None:
        raise Error(
            f"{name} lies on {device} and is a {type(like).__name__}; expected a torch tensor or "
            f"CuPy array, whose library makes the array that is written"
        )
    return _make(like, "empty", shape, dtype=dtype)


def new_numbers(like: Array | None, numbers: Any, dtype: str) -> Any:
    """Numbers of the host in an array of like's library, where like lies; NumPy's for None."""
    return _make(like, "asarray", np.asarray(numbers, dtype), dtype=dtype)


def new_full(like: Array | None, shape: Shape, number: float, dtype: str) -> Any:
    """One number everywhere, likewise; made on the device."""
    return _make(like, "full", shape, number, dtype=dtype)


def new_range(like: Array | None, n: int, dtype: str) -> Any:
    """0 to n - 1, likewise; made on the device."""
    return _make(like, "arange", n, dtype=dtype)


def _make(like: Any, function: str, *arguments: Any, dtype: str) -> Any:
    """What the function of like's library makes where like lies; NumPy's for other libraries."""
    if hasattr(like, "new_empty"):  # PyTorch
        torch = sys.modules["torch"]
        make = getattr(torch, function)
        return make(*arguments, dtype=getattr(torch, dtype), device=like.device)
    cupy = _cupy_of(like)
    if cupy is not None:
        with like.device:
            return getattr(cupy, function)(*arguments, dtype=dtype)
    return getattr(np, function)(*arguments, dtype=dtype)


def _cupy_of(array: object) -> Any:
    """CuPy where the array is CuPy's, else None."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else None


def _numpy_dtype(array: object) -> Any:
    """The array's where NumPy can share such arrays: float32 for JAX's bfloat16."""
    dtype = np.dtype(getattr(array, "dtype", np.float32))
    return np.float32 if dtype.kind == "V" else dtype


def checked_array(array: ArrayT, name: str) -> ArrayT:
    """Returns the array. Refuses with a message of kvx what is no array (lists, numbers, None)."""
    if not hasattr(array, "shape") or not hasattr(array, "reshape"):
        raise TypeError(
            f"{name} is {described(array)}; expected a NumPy array or a tensor"
        )
    return array


def token_list(tokens: Tokens) -> list[int]:
    """Token numbers of a list, an array or a tensor as a list. Raises kvx.Error: a negative one."""
    given: Any = tokens
    try:
        numbers = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError:
        raise TypeError(f"tokens is {described(tokens)}; expected a list of whole numbers") from None
    if not isinstance(numbers, list):
        raise TypeError(f"tokens is the number {numbers}; expected a list of whole numbers")
    for i, number in enumerate(numbers):
        if not hasattr(number, "__index__"):
            raise TypeError(f"tokens[{i}] is {described(number)}; expected a whole number")
        if not 0 <= number < 2**31:
            raise Error(f"tokens[{i}] is {number}; expected 0 to {2**31 - 1}")
    return numbers


def as_int64(slots: ArrayT) -> ArrayT:
    """int32 numbers as int64, in an array of the same library and place; all else as it is."""
    dtype = getattr(slots, "dtype", None)
    if getattr(dtype, "itemsize", 0) != 4 or str(dtype) not in ("int32", "torch.int32"):
        return slots
    array: Any = slots
    wide: ArrayT = array.long() if hasattr(array, "long") else array.astype("int64")
    return wide


def described(value: object) -> str:
    """A value by its type, for messages: ``'3' (a str)``, ``a list``, ``None``."""
    if value is None:
        return "None"
    kind = type(value).__name__
    kind = f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"
    is_short = isinstance(value, str | bytes | int | float) and len(repr(value)) <= 60
    return f"{value!r} ({kind})" if is_short else kind
