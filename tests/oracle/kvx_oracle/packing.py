"""Packing: codes to bytes and back (docs/numbers.md 7), and converters to foreign nibbles."""

import struct
from fractions import Fraction

from . import binary32
from .small_float import F16


def pack_bytes(codes, bytes_per_code=1):
    return b"".join(code.to_bytes(bytes_per_code, "little") for code in codes)


def pack_nibbles(codes):
    """byte i: [element 2i + 1 : 4 high bits][element 2i : 4 low bits]"""
    return bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))


def pack_quarters(codes):
    """byte i: element 4i in bits 0-1, element 4i + 1 in bits 2-3, ..."""
    assert len(codes) % 4 == 0
    return bytes(
        sum((code & 3) << 2 * position for position, code in enumerate(codes[begin : begin + 4]))
        for begin in range(0, len(codes), 4)
    )


def pack_three_bits(codes):
    """64 elements: 16 bytes of their low two bits as pack_quarters has them, then 64 bits: bit 2i
    is the high bit of element i, bit 2i + 1 that of element 32 + i."""
    assert len(codes) % 64 == 0
    packed = b""
    for begin in range(0, len(codes), 64):
        part = codes[begin : begin + 64]
        high = sum((part[i] >> 2) << 2 * i | (part[32 + i] >> 2) << 2 * i + 1 for i in range(32))
        packed += pack_quarters(part) + high.to_bytes(8, "little")
    return packed


def pack_words_of_eight(codes):
    """word i: element 8i in bits 0-3, element 8i + 1 in bits 4-7, ...; little-endian uint32."""
    assert len(codes) % 8 == 0
    words = words_of_eight(codes)
    return struct.pack(f"<{len(words)}I", *words)


def words_of_eight(codes):
    return [
        sum(code << 4 * position for position, code in enumerate(codes[begin : begin + 8]))
        for begin in range(0, len(codes), 8)
    ]


def pack_turbomind_u4(codes):
    """eight elements: [e2|e0][e6|e4][e3|e1][e7|e5], the second of each pair in the low nibble"""
    assert len(codes) % 8 == 0
    packed = bytearray()
    for begin in range(0, len(codes), 8):
        e = codes[begin : begin + 8]
        packed += bytes([e[0] | e[2] << 4, e[4] | e[6] << 4, e[1] | e[3] << 4, e[5] | e[7] << 4])
    return bytes(packed)


def twos_complement_to_offset_binary(nibble):
    """Offset binary stores value + 8 (metal-marlin's INT4 kernels)."""
    value = nibble - 16 if nibble >= 8 else nibble
    return value + 8


def offset_binary_to_twos_complement(nibble):
    return (nibble - 8) & 0xF


# metal-marlin's Python cache (RESMP-DEV/metal-marlin, quantize_fp4) calls the following "fp4". It
# is a linear code, not E2M1: q - 8 counts halves of the scale, and the maximum, which would be
# 20, is clamped to 15. Its encoder divides by the scale before that is rounded to F16.

METAL_MARLIN_FLOOR = Fraction("1e-8")


def metal_marlin_quantize(row):
    """(codes 0-15, F16 scale code) of finite binary32 numbers."""
    amax = max(max(abs(x) for x in row), binary32.nearest(METAL_MARLIN_FLOOR))
    scale = binary32.div(amax, 6.0)
    codes = []
    for x in row:
        scaled = min(max(binary32.div(x, scale), -6.0), 6.0)
        codes.append(min(max(round(Fraction(binary32.mul(scaled, 2.0))) + 8, 0), 15))
    return codes, F16.encode(scale)


def metal_marlin_dequantize(codes, scale_code):
    scale = F16.decode(scale_code)
    return [binary32.div(binary32.mul(float(code - 8), scale), 2.0) for code in codes]
