"""What the arguments of verbs are, for readers and type checkers. Nothing here is needed at run
time: arrays are told by what they can do, so that kvx needs none of the libraries they come from."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import DTypeLike

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Array(Protocol):
    """An array of NumPy, torch, CuPy, JAX, or of another library that speaks DLPack."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def __dlpack__(self) -> Callable[..., Any]: ...


class Tensor(Array, Protocol):
    """An array whose library makes new ones from it: a torch tensor."""

    @property
    def new_empty(self) -> Callable[..., Any]: ...


class TorchDevice(Protocol):
    """A ``torch.device``."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class TorchDType(Protocol):
    """A ``torch.dtype``."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...


class TorchStream(Protocol):
    """A ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A ``cupy.cuda.Stream``."""

    @property
    def ptr(self) -> int: ...


ArrayT = TypeVar("ArrayT", bound=Array)
TensorT = TypeVar("TensorT", bound=Tensor)

Device = str | TorchDevice
DType = DTypeLike | TorchDType
# a stream of torch or CuPy, or a cudaStream_t as a number; None: the library's current one
Stream = int | TorchStream | CupyStream | None
# token numbers: a list, or an array of integers in one dimension
Tokens = Sequence[int] | Array
