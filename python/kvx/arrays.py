"""New arrays of the caller's own kind: a verb that is given torch tensors returns torch tensors.

Others get NumPy's arrays, also JAX, whose own cannot be written. On a GPU arrays are torch's or
CuPy's."""

import sys

import numpy as np

from kvx.errors import Error


def empty_like(array, shape):
    """An uninitialised array of ``shape`` with ``array``'s library, dtype and device."""
    if hasattr(array, "new_empty"):  # PyTorch
        return array.new_empty(shape)
    cupy = _cupy_of(array)
    if cupy is not None:
        with array.device:
            return cupy.empty(shape, dtype=array.dtype)
    return np.empty(shape, dtype=_numpy_dtype(array))


def new_output(like, shape, device, name):
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


def new_array(like, shape, dtype, device, name):
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


def new_numbers(like, numbers, dtype):
    """Numbers of the host in an array of like's library, where like lies; NumPy's for None."""
    return _make(like, "asarray", np.asarray(numbers, dtype), dtype=dtype)


def new_full(like, shape, number, dtype):
    """One number everywhere, likewise; made on the device."""
    return _make(like, "full", shape, number, dtype=dtype)


def new_range(like, n, dtype):
    """0 to n - 1, likewise; made on the device."""
    return _make(like, "arange", n, dtype=dtype)


def _make(like, function, *arguments, dtype):
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


def _cupy_of(array):
    """CuPy where the array is CuPy's, else None."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else None


def zeros_like(array, shape):
    """The same, zeroed."""
    if hasattr(array, "new_zeros"):  # PyTorch
        return array.new_zeros(shape)
    return np.zeros(shape, dtype=_numpy_dtype(array))


def _numpy_dtype(array):
    """The array's where NumPy can share such arrays: float32 for JAX's bfloat16."""
    dtype = np.dtype(getattr(array, "dtype", np.float32))
    return np.float32 if dtype.kind == "V" else dtype


def checked_array(array, name):
    """Returns the array. Refuses with a message of kvx what is no array (lists, numbers, None)."""
    if not hasattr(array, "shape") or not hasattr(array, "reshape"):
        raise TypeError(
            f"{name} is a {type(array).__name__}; expected a NumPy array or a tensor"
        )
    return array


def token_list(tokens):
    """Token numbers of a list, an array or a tensor as a list. Raises kvx.Error: a negative one."""
    numbers = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    try:
        least = min(numbers, default=0)
    except TypeError:
        raise Error("tokens holds what is no number; expected whole numbers of 0 or more") from None
    if least < 0:
        raise Error(f"tokens[{numbers.index(least)}] is {least}; expected 0 or more")
    return numbers
