"""What the GPU's tests need: a CUDA GPU that torch sees. Where there is none each of them skips by
name and is counted; with KVX_REQUIRE_GPU=1 it fails."""

import importlib
import os

import pytest

# Else JAX takes most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _missing(reason):
    if os.environ.get("KVX_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and KVX_REQUIRE_GPU is 1")
    pytest.skip(reason)


def library(name):
    """The library, if it is there and sees a GPU."""
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        _missing(f"no {name}: {error}")
    sees = {
        "torch": lambda: found.cuda.is_available(),
        "cupy": lambda: found.cuda.is_available(),
        "jax": lambda: found.default_backend() == "gpu",
    }
    if not sees[name]():
        _missing(f"{name} sees no GPU")
    return found


def second():
    """torch, where it sees two GPUs."""
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    return torch
