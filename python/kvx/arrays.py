"""New arrays of the caller's own kind: a verb that is given torch tensors returns torch tensors.

Others get NumPy's arrays, also JAX, whose own cannot be written."""

import numpy as np


def empty_like(array, shape):
    """An uninitialised array of ``shape`` with ``array``'s library and dtype."""
    if hasattr(array, "new_empty"):  # PyTorch
        return array.new_empty(shape)
    return np.empty(shape, dtype=_numpy_dtype(array))


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
    """Refuses, with kvx's own words, what is no array (lists, numbers, None)."""
    if not hasattr(array, "shape") or not hasattr(array, "reshape"):
        raise TypeError(
            f"{name} is a {type(array).__name__}; expected a NumPy array or a tensor on the CPU"
        )
    return array


def token_list(tokens):
    """Token numbers of a list, an array or a tensor as a list."""
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
