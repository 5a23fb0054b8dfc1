"""rows_<format>.json: whole rows of every format, and how search.json's cases are made too."""

from dataclasses import replace
from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import (
    AFFINE,
    GROUPED,
    NAMES,
    PLAIN,
    Input,
    Options,
    group_size_of,
    num_groups,
    quantize_row,
)
from kvx_oracle.small_float import BF16, E4M3, E8M0, F16, F32

from . import inputs
from .inputs import Random
from .json_text import words

COMMON_HEAD_DIM = 64
OTHER_HEAD_DIMS = (80, 96, 128)
LARGE_HEAD_DIMS = (192, 256, 576)
FULL_OPTIONS = 2  # a format's first option sets see every row, the others the telling ones
TELLING_ROWS = (
    "normal_1",
    "zeros_of_both_signs",
    "denormal",
    "largest",
    "outliers",
    "inf_and_nan",
    "ties",
)


def case(name, source, row_name, options=Options()):
    """One JSON case: everything a reader needs to make the row itself, and the row."""
    row = quantize_row(name, source, options)
    return {
        "row": row_name,
        "head_dim": len(source.codes),
        **option_fields(name, options, len(source.codes)),
        "input_type": source.float_type.name,
        "input": words(source.codes, 8 * source.float_type.bytes),
        "codes": row.codes.hex(),
        "scales": row.scales.hex(),
        "decoded": words(row.decoded_bits),
        "nonfinite_count": row.nonfinite_count,
    }


def option_fields(name, options, head_dim):
    if name in PLAIN:
        return {}
    if name in AFFINE:
        return {"param_type": options.param_type.name}
    fmt = GROUPED[name]
    fields = {
        "group_size": group_size_of(fmt, options, head_dim),
        "scale_type": (options.scale_type or fmt.scale_type).name,
        "scale_rule": options.scale_rule or fmt.rule,
        "scale_choice": options.scale_choice,
        "scale_source": "computed" if options.given_scales is None else "given",
    }
    if name == "nvfp4":
        fields["tensor_scale"] = words([binary32.to_bits(options.tensor_scale)])
    return fields


def given_scales(name, head_dim, base, seed, **options):
    """Options with a given scale a group, all near `base` and all different."""
    random = Random(f"{name} {head_dim} {base} {seed}")
    fmt = GROUPED[name]
    options = Options(**options)
    scale_type = options.scale_type or fmt.scale_type
    count = num_groups(fmt, options, head_dim)
    scales = tuple(given_code(scale_type, Fraction(base), random) for _ in range(count))
    return replace(options, given_scales=scales)


def given_code(scale_type, base, random):
    """3/4 to 5/4 of `base`, or for E8M0 a power of two from 1/8 to 4."""
    if scale_type is E8M0:
        return E8M0.code_of_exponent(random.below(6) - 3)
    number = binary32.nearest(base * Fraction(48 + random.below(32), 64))
    return E4M3.encode_saturating(number) if scale_type is E4M3 else scale_type.encode(number)


def fixed_scale(name, head_dim, code, **options):
    """Options with the same given scale code in every group."""
    options = Options(**options)
    count = num_groups(GROUPED[name], options, head_dim)
    return replace(options, given_scales=(code,) * count)


def f32_code(text):
    return binary32.to_bits(binary32.nearest(Fraction(text)))


def option_makers(name):
    """Functions head_dim -> Options: each way of using a format."""
    if name in PLAIN:
        return [lambda d: Options()]
    if name in AFFINE:
        return [lambda d, t=t: Options(param_type=t) for t in (F16, BF16)]
    if name in ("fp8_e4m3", "fp8_e5m2"):
        whole_rows = [lambda d: Options()] + [
            lambda d, text=text: fixed_scale(name, d, f32_code(text))
            for text in ("1", "0.0371", "1e-41", "3e38")
        ]
        if name == "fp8_e5m2":
            return whole_rows
        return [
            *whole_rows,
            lambda d: Options(group_size=128),
            lambda d: given_scales(name, d, "0.0371", "given", group_size=128),
        ]
    given = lambda d: given_scales(name, d, "0.4", "given")
    if name in ("int8", "int4"):
        return integer_option_makers(name)
    if name == "mxfp4":
        return [lambda d, r=r: Options(scale_rule=r) for r in ("e8m0_floor", "e8m0_ceil")] + [given]
    if name in ("fp4_row", "int4_row"):
        return [lambda d, t=t: Options(scale_type=t) for t in (F16, F32)] + [given]
    return [lambda d: Options(), given]


def integer_option_makers(name):
    base = "0.02" if name == "int8" else "0.4"
    computed = [
        lambda d, g=g, t=t: Options(group_size=g, scale_type=t)
        for g in (64, 32, 128)
        for t in (F16, F32)
    ]
    given = [
        lambda d, t=t: given_scales(name, d, base, "given", group_size=32, scale_type=t)
        for t in (F16, F32)
    ]
    smallest = lambda d: fixed_scale(name, d, 1)  # F16 2^-24: everything saturates
    return [*computed, *given, smallest]


def fits(name, head_dim):
    return name in PLAIN or head_dim % multiple_of(name) == 0


def multiple_of(name):
    if name in GROUPED:
        return GROUPED[name].multiple
    return 8 if name == "int4_affine" else 1


def format_cases(name):
    element = GROUPED[name].element if name in GROUPED else None
    for index, make_options in enumerate(option_makers(name)):
        large = LARGE_HEAD_DIMS if index == 0 and element is not None else ()
        for head_dim in (COMMON_HEAD_DIM, *OTHER_HEAD_DIMS, *large):
            if not fits(name, head_dim):
                continue
            options = make_options(head_dim)
            if head_dim == COMMON_HEAD_DIM:
                rows = inputs.common_rows(head_dim, element)
                if index >= FULL_OPTIONS:
                    rows = [row for row in rows if row[0] in TELLING_ROWS]
            else:
                rows = inputs.few_rows(head_dim)
            yield from (case(name, source, row_name, options) for row_name, source in rows)
    yield from sixteen_bit_input_cases(name, option_makers(name)[0])
    if name in AFFINE:
        yield from affine_cases(name)
    if name == "nvfp4":
        yield from tensor_scale_cases()


def sixteen_bit_input_cases(name, make_options):
    options = make_options(COMMON_HEAD_DIM)
    chosen = ("normal_1", "outliers", "zeros_of_both_signs", "inf_in_last_group", "tiny")
    for float_type in (F16, BF16):
        for row_name, source in inputs.common_rows(COMMON_HEAD_DIM, None):
            if row_name in chosen:
                yield case(name, inputs.converted(source, float_type), row_name, options)
    if name in PLAIN:
        yield from kept_bits_cases(name)


def kept_bits_cases(name):
    """The cache's own type goes in: NaNs with payloads and signs come out as they were."""
    fmt = PLAIN[name]
    infinity, mantissa = fmt.infinity_code, fmt.mantissa_bits
    nans = [fmt.nan_code, infinity + 1, infinity + (1 << mantissa) - 1, fmt.nan_code + 5]
    pattern = [0, 1, infinity - 1, infinity, *nans]
    codes = [code | fmt.sign_bit if d // 8 % 2 else code for d, code in enumerate(pattern * 8)]
    yield case(name, Input(fmt, tuple(codes)), "every_special_bit_pattern")


def affine_cases(name):
    """Where the parameters' own arithmetic is at its limits."""
    for param_type in (F16, BF16):
        options = Options(param_type=param_type)
        largest = float(param_type.largest)
        low = [binary32.nearest(Fraction(d, 64)) for d in range(64)]
        negative_zero_first = [-0.0] + [0.0] * 31 + low[32:]
        for row_name, row in (
            ("ramp", low),
            ("whole_range", [largest if d % 2 else -largest for d in range(64)]),
            ("zero_is_minus_zero", negative_zero_first),
            ("zero_is_the_later_minus_zero", negative_zero_first[::-1]),
            ("all_minus_zero", [-0.0] * 64),
            ("two_neighbours", [float(param_type.magnitude(0x3C00 + d % 2)) for d in range(64)]),
            ("denormal_range", [float(param_type.magnitude(d % 9)) for d in range(64)]),
            ("big_offset", [1000.0 + d for d in range(64)]),
        ):
            yield case(name, inputs.f32_input(row), row_name, options)


def tensor_scale_cases():
    """nvfp4 under the second-level scales that checkpoints use, and extreme ones."""
    rows = inputs.common_rows(COMMON_HEAD_DIM, GROUPED["nvfp4"].element)
    for row_name, source in rows:
        finite = [abs(x) for x in source.numbers() if abs(x) <= binary32.FLT_MAX]
        amax = max(finite)
        for divisor in (448.0, 6.0 * 448.0):
            scale = binary32.div(amax, divisor)
            if scale > 0:
                yield case("nvfp4", source, row_name, Options(tensor_scale=scale))
    chosen = [r for r in rows if r[0] in ("normal_1", "denormal", "largest", "nan_in_last_group")]
    for text in ("0.3", "1e-44", "1e-30", "2e5", "1e30", "3e38"):
        scale = binary32.nearest(Fraction(text))
        for row_name, source in chosen:
            yield case("nvfp4", source, row_name, Options(tensor_scale=scale))
    given = given_scales("nvfp4", 64, "0.4", "both", tensor_scale=0.75)
    yield from (case("nvfp4", source, row_name, given) for row_name, source in chosen)


def files():
    for name in NAMES:
        yield f"rows_{name}.json", {"format": name, "cases": list(format_cases(name))}
