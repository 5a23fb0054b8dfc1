"""Formats: which element, groups, scale and packing each name means, and whole rows of them."""

import math
from dataclasses import dataclass, replace

from . import binary32, feedback, packing
from .affine import decode_affine, quantize_affine
from .elements import FP4, FP8_E4M3, FP8_E5M2, INT4, INT8
from .groups import ScaleRule, decode_codes, quantize_computed, quantize_given
from .search import chooser
from .small_float import BF16, E4M3, E8M0, F16, F32

WHOLE_ROW = 0


@dataclass(frozen=True)
class Format:
    name: str
    element: object
    group_size: int  # default; WHOLE_ROW is one group a row
    scale_type: object  # default
    rule: str
    pack: object
    multiple: int = 1  # head_dim must be a multiple of this


GROUPED = {
    f.name: f
    for f in (
        Format("fp8_e4m3", FP8_E4M3, WHOLE_ROW, F32, "amax", packing.pack_bytes),
        Format("fp8_e5m2", FP8_E5M2, WHOLE_ROW, F32, "amax", packing.pack_bytes),
        Format("int8", INT8, 64, F16, "amax", packing.pack_bytes),
        Format("int4", INT4, 64, F16, "amax", packing.pack_nibbles, 2),
        Format("mxfp4_g16", FP4, 16, E8M0, "e8m0_ceil", packing.pack_nibbles, 16),
        Format("mxfp4", FP4, 32, E8M0, "e8m0_floor", packing.pack_nibbles, 32),
        Format("nvfp4", FP4, 16, E4M3, "tensor", packing.pack_nibbles, 16),
        Format("fp4_row", FP4, WHOLE_ROW, F16, "amax", packing.pack_words_of_eight, 8),
        Format("int4_row", INT4, WHOLE_ROW, F16, "amax", packing.pack_words_of_eight, 8),
    )
}
PLAIN = {"f32": F32, "f16": F16, "bf16": BF16}
AFFINE = {"int8_affine": (8, packing.pack_bytes), "int4_affine": (4, packing.pack_turbomind_u4)}
NAMES = (*PLAIN, *GROUPED, *AFFINE)


@dataclass(frozen=True)
class Options:
    """What a cache may choose beside the format's name; None is the format's default."""

    group_size: int | None = None
    scale_type: object = None
    scale_rule: str | None = None
    scale_choice: str = "amax"
    param_type: object = None  # affine formats: F16 or BF16
    tensor_scale: float = 1.0
    given_scales: tuple | None = None  # stored scale codes, one a group
    feedback: list | None = None  # [head_dim][head_dim] weights


@dataclass
class Row:
    codes: bytes
    scales: bytes  # in group order, little-endian; affine: scale then zero
    decoded_bits: list  # binary32 bits, what gather returns
    nonfinite_count: int = 0


@dataclass(frozen=True)
class Input:
    """One row as the caller holds it: codes of a float type."""

    float_type: object
    codes: tuple

    def numbers(self):
        return [self.float_type.decode(code) for code in self.codes]


def quantize_row(name, source, options=Options()):
    if name in PLAIN:
        return plain_row(PLAIN[name], source)
    if name in AFFINE:
        return affine_row(name, source.numbers(), options)
    return grouped_row(GROUPED[name], source.numbers(), options)


def plain_row(fmt, source):
    """Numbers of the cache's own type keep their bits; others are converted."""
    same_type = fmt is source.float_type
    codes = source.codes if same_type else [fmt.encode(x) for x in source.numbers()]
    decoded = [plain_decoded_bits(fmt, code) for code in codes]
    return Row(packing.pack_bytes(codes, fmt.bytes), b"", decoded)


def plain_decoded_bits(fmt, code):
    """The binary32 of a 16-bit or 32-bit float; for F16 NaNs the canonical one stands."""
    if fmt is F32:
        return code
    if fmt is BF16:
        return code << 16
    return binary32.to_bits(fmt.decode(code))


def affine_row(name, numbers, options):
    bits, pack = AFFINE[name]
    row = quantize_affine(numbers, options.param_type, bits)
    if options.feedback is not None and feedback.applies_to(numbers):
        row = fed_affine(row, numbers, options, bits)
    scales = packing.pack_bytes([row.scale_code, row.zero_code], 2)
    return Row(pack(row.codes), scales, list(map(binary32.to_bits, row.decoded)))


def fed_affine(row, numbers, options, bits):
    scale, zero = map(options.param_type.decode, (row.scale_code, row.zero_code))
    if not math.isfinite(scale):
        return row
    rounding = feedback.affine_rounding(row.scale_code, row.zero_code, options.param_type, bits)
    codes = feedback.feed_back(numbers, options.feedback, rounding)
    return replace(row, codes=codes, decoded=decode_affine(codes, scale, zero, options.param_type))


def scale_rule(fmt, options):
    return ScaleRule(
        options.scale_rule or fmt.rule,
        options.scale_type or fmt.scale_type,
        fmt.element,
        options.tensor_scale,
    )


def group_size_of(fmt, options, head_dim):
    return options.group_size or fmt.group_size or head_dim


def num_groups(fmt, options, head_dim):
    return math.ceil(head_dim / group_size_of(fmt, options, head_dim))


def grouped_row(fmt, numbers, options):
    head_dim = len(numbers)
    assert head_dim % fmt.multiple == 0, f"{fmt.name}: head_dim {head_dim}"
    rule = scale_rule(fmt, options)
    size = group_size_of(fmt, options, head_dim)
    slices = [numbers[begin : begin + size] for begin in range(0, head_dim, size)]
    if options.given_scales is None:
        choose = chooser(options.scale_choice)
        groups = [quantize_computed(part, rule, choose) for part in slices]
    else:
        pairs = zip(slices, options.given_scales, strict=True)
        groups = [quantize_given(part, scale, rule) for part, scale in pairs]
    if options.feedback is not None and feedback.applies_to(numbers):
        groups = fed_groups(groups, numbers, rule, options.feedback)
    return Row(
        fmt.pack([code for group in groups for code in group.codes]),
        packing.pack_bytes([group.scale_code for group in groups], rule.scale_type.bytes),
        [binary32.to_bits(x) for group in groups for x in group.decoded],
        sum(group.nonfinite_count for group in groups),
    )


def fed_groups(groups, numbers, rule, weights):
    size = len(groups[0].codes)
    steps = [rule.step(group.scale_code) for group in groups]
    rounding = feedback.grouped_rounding(numbers, size, steps, rule.element)
    codes = feedback.feed_back(numbers, weights, rounding)
    return [
        replace(
            group,
            codes=codes[i * size : (i + 1) * size],
            decoded=decode_codes(codes[i * size : (i + 1) * size], rule.element, steps[i]),
        )
        for i, group in enumerate(groups)
    ]
