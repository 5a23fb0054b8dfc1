"""New arrays of the caller's own kind: a verb that is given torch tensors returns torch tensors."""

import numpy as np


def empty_like(array, shape):
    """An uninitialised array of ``shape`` with ``array``'s library and dtype."""
    if hasattr(array, "new_empty"):  # PyTorch
        return array.new_empty(shape)
    return np.empty(shape, dtype=getattr(array, "dtype", np.float32))


def zeros_like(array, shape):
    """The same, zeroed."""
    if hasattr(array, "new_zeros"):  # PyTorch
        return array.new_zeros(shape)
    return np.zeros(shape, dtype=getattr(array, "dtype", np.float32))


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
