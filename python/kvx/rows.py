"""Rows of numbers outside of any cache: quantised to bytes, and back."""

import math
from dataclasses import dataclass, field

import numpy as np

from kvx import _core
from kvx.arrays import checked_array
from kvx.errors import Error


@dataclass(frozen=True, repr=False)
class Rows:
    """Quantised rows, as docs/numbers.md defines their bytes.

    codes:  uint8 [..., code bytes of a row]
    scales: uint8 [..., scale bytes of a row]; 0 bytes where ``steps`` gives the scales
    """

    codes: np.ndarray
    scales: np.ndarray
    format: str
    head_dim: int
    tensor_scale: float = 1.0
    steps: list[float] = field(default_factory=list)
    nonfinite_inputs: int = 0  # numbers without a code under given scales (stored as code 0)

    def __repr__(self):
        rows = math.prod(self.codes.shape[:-1])
        bits = 8 * self.nbytes / max(rows * self.head_dim, 1)
        return (
            f"kvx.Rows({self.format!r}, {rows} rows of {self.head_dim}, {self.nbytes} bytes, "
            f"{bits:.4g} bits a value)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype=np.float32) -> np.ndarray:
        """The decoded numbers, [..., head_dim]."""
        return dequantize(self, dtype)


def quantize(x, format: str, *, tensor_scale: float = 1.0, steps=()) -> Rows:
    """Quantises rows of float32, float16 or bfloat16.

    x:            [..., head_dim], the rows contiguous; [n, head_dim] with any row stride is read in
                  place
    format:       a format with its options, as in a recipe: ``"int4:g32"``, ``"nvfp4:4over6"``
    tensor_scale: nvfp4's second-level scale, positive
    steps:        for ``source=given``: one positive step a group (value = code * step)

    Raises kvx.Error: an unknown format, a head_dim that it cannot store, another dtype, an array
    that is not on the CPU.
    """
    shape = tuple(checked_array(x, "x").shape)
    if not shape:
        raise Error("x has the shape []; expected [..., head_dim]")
    head_dim = shape[-1]
    steps = [float(step) for step in steps]
    flat = x.reshape((-1, 1, head_dim)) if head_dim else x
    code_bytes, scale_bytes = _core.row_bytes(format, head_dim, steps)
    codes = np.empty((flat.shape[0], code_bytes), np.uint8)
    scales = np.empty((flat.shape[0], scale_bytes), np.uint8)
    nonfinite = _core.quantize_rows(flat, codes, scales, format, tensor_scale, steps)
    return Rows(
        codes.reshape(shape[:-1] + (code_bytes,)),
        scales.reshape(shape[:-1] + (scale_bytes,)),
        format,
        head_dim,
        tensor_scale,
        steps,
        nonfinite,
    )


def dequantize(rows: Rows, dtype=np.float32) -> np.ndarray:
    """Quantised rows decoded, as a NumPy array [..., head_dim] of float32 or float16.

    Raises kvx.Error: another dtype, codes or scales that do not have the format's sizes.
    """
    _core.row_bytes(rows.format, rows.head_dim, rows.steps)  # refuses a head_dim that cannot be
    leading = rows.codes.shape[:-1]
    if np.dtype(dtype) not in (np.float32, np.float16):
        raise Error(f"dtype is {np.dtype(dtype)}; expected float32 or float16")
    out = np.empty(leading + (rows.head_dim,), dtype)
    flat = out.reshape((-1, 1, rows.head_dim))
    _core.dequantize_rows(
        _flat(rows.codes),
        _flat(rows.scales),
        flat,
        rows.format,
        rows.tensor_scale,
        rows.steps,
    )
    return out


def transcode(rows: Rows, format: str, *, tensor_scale: float = 1.0, steps=()) -> Rows:
    """Quantised rows in another format: decoded and quantised by its rule, row by row; copied where
    the two are stored alike. Arguments as in quantize().

    Raises kvx.Error as quantize() does; kvx.UnsupportedError: only one of the two formats rotates.
    """
    steps = [float(step) for step in steps]
    code_bytes, scale_bytes = _core.row_bytes(format, rows.head_dim, steps)
    leading = rows.codes.shape[:-1]
    codes = np.empty(leading + (code_bytes,), np.uint8)
    scales = np.empty(leading + (scale_bytes,), np.uint8)
    nonfinite = _core.transcode_rows(
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
    return Rows(codes, scales, format, rows.head_dim, tensor_scale, steps, nonfinite)


def _flat(array):
    """[..., bytes] as [rows, bytes]; a view of a contiguous array."""
    return np.ascontiguousarray(array).reshape((math.prod(array.shape[:-1]), array.shape[-1]))
