"""Transforms before quantisation and their inverse (docs/numbers.md 6)."""

import math
from dataclasses import dataclass
from fractions import Fraction

from . import binary32
from .small_float import F32


@dataclass(frozen=True)
class Transform:
    """Each term is a list of head_dim binary32 numbers, or None when it is absent."""

    mean: list | None = None
    block_offset: list | None = None
    factor: list | None = None
    hadamard: bool = False

    def apply(self, row):
        if self.mean is not None:
            row = list(map(binary32.sub, row, self.mean))
        if self.block_offset is not None:
            row = list(map(binary32.sub, row, self.block_offset))
        if self.factor is not None:
            row = list(map(binary32.mul, row, self.factor))
        return hadamard(row) if self.hadamard else row

    def invert(self, row):
        if self.hadamard:
            row = hadamard(row)
        if self.factor is not None:
            row = list(map(binary32.div, row, self.factor))
        if self.block_offset is not None:
            row = list(map(binary32.add, row, self.block_offset))
        if self.mean is not None:
            row = list(map(binary32.add, row, self.mean))
        return row


def hadamard_size(head_dim):
    """The largest power of two that divides head_dim."""
    return head_dim & -head_dim


def hadamard(row):
    size = hadamard_size(len(row))
    norm = inverse_square_root(size)
    result = []
    for begin in range(0, len(row), size):
        block = butterfly(row[begin : begin + size])
        result += [binary32.mul(x, norm) for x in block]
    return result


def butterfly(block):
    """Walsh-Hadamard, strides 1, 2, 4, ...: (a, b) -> (a + b, a - b)."""
    block = list(block)
    stride = 1
    while stride < len(block):
        for index in range(len(block)):
            if index & stride == 0:
                a, b = block[index], block[index + stride]
                block[index], block[index + stride] = binary32.add(a, b), binary32.sub(a, b)
        stride *= 2
    return block


def inverse_square_root(size):
    """1/sqrt(size) as the nearest binary32 number, exactly decided: 100 digits are taken by an
    integer square root, and the result is irrational or a power of two, so no tie is near."""
    digits = 10**100
    return F32.round(Fraction(math.isqrt(digits * digits // size), digits))
