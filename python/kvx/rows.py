"""Rows of numbers outside of any cache: quantised to bytes, and back."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from kvx import _core
from kvx.arrays import checked_array, described, new_array, new_full, new_numbers, new_range
from kvx.errors import Error
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, DType, Stream, TensorT

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, repr=False, eq=False)
class Rows(Generic[ArrayT]):
    """Quantised rows, as docs/numbers.md defines their bytes.

    codes:  uint8 [..., code bytes of a row], of the library and where the numbers lay: torch's,
            CuPy's, else NumPy's
    scales: uint8 [..., scale bytes of a row]; 0 bytes where ``steps`` gives the scales
    nonfinite_inputs: numbers without a code under given scales, stored as code 0; on a GPU an array
            of that one number, for which nothing has waited

    Two are equal where format, head_dim, scales and every byte are, in arrays of one library.
    """

    codes: ArrayT
    scales: ArrayT
    format: str
    head_dim: int
    tensor_scale: float = 1.0
    steps: list[float] = field(default_factory=list)
    nonfinite_inputs: int | ArrayT = 0

    def __repr__(self) -> str:
        rows = math.prod(self.codes.shape[:-1])
        bits = 8 * self.nbytes / max(rows * self.head_dim, 1)
        return (
            f"kvx.Rows({self.format!r}, {rows} rows of {self.head_dim}, {self.nbytes} bytes, "
            f"{bits:.4g} bits a value)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        facts = [(r.format, r.head_dim, r.tensor_scale, list(r.steps)) for r in (self, other)]
        return (
            facts[0] == facts[1]
            and _are_same_bytes(self.codes, other.codes)
            and _are_same_bytes(self.scales, other.scales)
        )

    __hash__ = None  # type: ignore[assignment]  # their arrays can change

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return int(_nbytes(self.codes) + _nbytes(self.scales))

    @overload
    def dequantize(self: "Rows[_Bytes]", dtype: DType = np.float32) -> NDArray[Any]: ...
    @overload
    def dequantize(self: "Rows[TensorT]", dtype: DType = np.float32) -> TensorT: ...
    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The decoded numbers, [..., head_dim], as kvx.dequantize returns them."""
        return dequantize(self, dtype)


@overload  # a tensor's library is kept, others' arrays give NumPy's
def quantize(  # type: ignore[overload-overlap]
    x: TensorT,
    format: str,
    *,
    tensor_scale: float = 1.0,
    steps: Iterable[float] = (),
    stream: Stream = None,
) -> Rows[TensorT]: ...
@overload
def quantize(
    x: Array,
    format: str,
    *,
    tensor_scale: float = 1.0,
    steps: Iterable[float] = (),
    stream: Stream = None,
) -> Rows[_Bytes]: ...
@in_words
def quantize(
    x: Array,
    format: str,
    *,
    tensor_scale: float = 1.0,
    steps: Iterable[float] = (),
    stream: Stream = None,
) -> Rows[Any]:
    """Quantises rows of float32, float16 or bfloat16.

    x:            [..., head_dim], the rows contiguous; [n, head_dim] with any row stride is read in
                  place. On the CPU, or on a GPU (torch, CuPy)
    format:       a format with its options, as in a recipe: ``"int4:g32"``, ``"nvfp4:4over6"``
    tensor_scale: nvfp4's second-level scale, positive
    steps:        for ``source=given``: one positive step a group (value = code * step)
    stream:       on a GPU, as in kvx.Cache

    Raises kvx.Error: an unknown format, a head_dim that it cannot store, another dtype, an array
    of another place.
    """
    array: Any = checked_array(x, "x")
    shape = tuple(array.shape)
    if not shape:
        raise Error("x has the shape []; expected [..., head_dim]")
    head_dim = shape[-1]
    steps = _numbers(steps)
    flat = array.reshape((-1, 1, head_dim)) if head_dim else array
    code_bytes, scale_bytes = _core.row_bytes(format, head_dim, steps)
    device = _device_of(x, "x")
    codes = new_array(x, (flat.shape[0], code_bytes), "uint8", device, "x")
    scales = new_array(x, (flat.shape[0], scale_bytes), "uint8", device, "x")
    if device == "cpu":
        nonfinite = _core.quantize_rows(flat, codes, scales, format, tensor_scale, steps)
    else:
        tables = _tables(codes, format, head_dim, tensor_scale, steps)
        _core.quantize_rows_on_cuda(
            flat, codes, scales, format, tensor_scale, steps, tables, stream
        )
        nonfinite = tables[3][1]
    return Rows(
        codes.reshape(shape[:-1] + (code_bytes,)),
        scales.reshape(shape[:-1] + (scale_bytes,)),
        format,
        head_dim,
        tensor_scale,
        steps,
        nonfinite,
    )


@overload
def dequantize(
    rows: Rows[_Bytes], dtype: DType = np.float32, *, stream: Stream = None
) -> NDArray[Any]: ...
@overload
def dequantize(rows: Rows[ArrayT], dtype: DType = np.float32, *, stream: Stream = None) -> ArrayT: ...
@in_words
def dequantize(rows: Rows[Any], dtype: DType = np.float32, *, stream: Stream = None) -> Any:
    """Quantised rows decoded: [..., head_dim] of the codes' library, where they lie.

    dtype: float32 or float16, NumPy's or torch's; of torch's codes also torch.bfloat16

    Raises kvx.Error: another dtype, codes or scales that do not have the format's sizes.
    """
    _check_rows(rows)
    _core.row_bytes(rows.format, rows.head_dim, rows.steps)  # refuses a head_dim that cannot be
    leading = tuple(rows.codes.shape[:-1])
    device = _device_of(rows.codes, "codes")
    shape = leading + (rows.head_dim,)
    out = new_array(rows.codes, shape, _float_name(rows.codes, dtype), device, "codes")
    flat = out.reshape((-1, 1, rows.head_dim))
    codes, scales = _flat(rows.codes), _flat(rows.scales)
    if device == "cpu":
        _core.dequantize_rows(
            codes, scales, flat, rows.format, rows.tensor_scale, rows.steps
        )
    else:
        tables = _tables(codes, rows.format, rows.head_dim, rows.tensor_scale, rows.steps)
        _core.dequantize_rows_on_cuda(
            codes, scales, flat, rows.format, rows.tensor_scale, rows.steps, tables, stream
        )
    return out


@in_words
def transcode(
    rows: Rows[ArrayT],
    format: str,
    *,
    tensor_scale: float = 1.0,
    steps: Iterable[float] = (),
    stream: Stream = None,
) -> Rows[ArrayT]:
    """Quantised rows in another format: decoded and quantised by its rule, row by row; copied where
    the two are stored alike. Arguments as in quantize(), arrays as in dequantize().

    Raises kvx.Error as quantize() does; kvx.UnsupportedError: only one of the two formats rotates.
    """
    _check_rows(rows)
    steps = _numbers(steps)
    code_bytes, scale_bytes = _core.row_bytes(format, rows.head_dim, steps)
    leading = tuple(rows.codes.shape[:-1])
    device = _device_of(rows.codes, "codes")
    codes = new_array(rows.codes, leading + (code_bytes,), "uint8", device, "codes")
    scales = new_array(rows.codes, leading + (scale_bytes,), "uint8", device, "codes")
    arguments = (
        _flat(rows.codes),
        _flat(rows.scales),
        rows.format,
        rows.tensor_scale,
        rows.steps,
        math.prod(leading),
        rows.head_dim,
        _flat(codes),
        _flat(scales),
        format,
        tensor_scale,
        steps,
    )
    if device == "cpu":
        nonfinite = _core.transcode_rows(*arguments)
    else:
        flat = arguments[0]
        given = _tables(flat, rows.format, rows.head_dim, rows.tensor_scale, rows.steps)
        tables = _tables(flat, format, rows.head_dim, tensor_scale, steps)
        _core.transcode_rows_on_cuda(*arguments, given, tables, stream)
        nonfinite = tables[3][1]
    return Rows(codes, scales, format, rows.head_dim, tensor_scale, steps, nonfinite)


def _check_rows(rows: object) -> None:
    if not isinstance(rows, Rows):
        raise TypeError(f"rows is {described(rows)}; expected the kvx.Rows that quantize() returns")


def _numbers(steps: Iterable[float]) -> list[float]:
    try:
        return [float(step) for step in steps]
    except (TypeError, ValueError):
        raise TypeError(f"steps is {steps!r}; expected a list of positive numbers") from None


def _nbytes(array: Any) -> Any:
    return array.nbytes


def _flat(array: Any) -> Any:
    """[..., bytes] as [rows, bytes]; a view of a contiguous array."""
    shape = (math.prod(array.shape[:-1]), array.shape[-1])
    if isinstance(array, np.ndarray):
        array = np.ascontiguousarray(array)
    return array.reshape(shape)


def _device_of(array: object, name: str) -> str:
    """``"cpu"``, or the array's GPU: ``"cuda:0"``."""
    index = _core.cuda_device_of(array, name)
    return "cpu" if index < 0 else f"cuda:{index}"


def _float_name(like: object, dtype: Any) -> str:
    """A dtype of NumPy's or torch's by its name."""
    torch = sys.modules.get("torch")
    expected = ["float32", "float16"]
    if torch is not None and isinstance(like, torch.Tensor):
        expected.append("bfloat16")
    is_torchs = torch is not None and isinstance(dtype, torch.dtype)
    try:
        name = str(dtype).removeprefix("torch.") if is_torchs else np.dtype(dtype).name
    except TypeError:
        name = described(dtype)
    if name not in expected:
        raise Error(f"dtype is {name}; expected {', '.join(expected[:-1])} or {expected[-1]}")
    return name


def _tables(
    codes: Any, format: str, head_dim: int, tensor_scale: float, steps: list[float]
) -> tuple[Any, ...]:
    """What the device's kernels read beside rows (rows.cpp, CudaTables), of codes' library."""
    n = codes.shape[0]
    given = _core.given_scales(format, head_dim, steps)
    scales = np.frombuffer(given, np.uint8).reshape((1, -1))
    return (
        new_range(codes, n, "int64"),
        new_range(codes, n, "int32").reshape((1, n)),
        new_full(codes, (1,), n, "int32"),
        new_full(codes, (2,), 0, "int64"),
        new_numbers(codes, scales, "uint8") if given else None,
        new_full(codes, (1,), tensor_scale, "float32") if tensor_scale != 1.0 else None,
    )


def _are_same_bytes(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
