"""feedback.json: rows rounded with error feedback (docs/numbers.md 8)."""

from dataclasses import replace
from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import AFFINE, GROUPED, Options
from kvx_oracle.small_float import BF16, F16, F32

from . import inputs
from .json_text import words
from .rows import case, fits, given_scales

HEAD_DIMS = (20, 64, 80)
ROWS = ("normal_1", "first_half_zero", "denormal", "largest", "outliers", "inf_and_nan", "ties")
OPTIONS = (
    ("nvfp4", Options()),
    ("nvfp4", Options(tensor_scale=binary32.nearest(Fraction("0.0025")), scale_choice="search")),
    ("mxfp4_g16", Options()),
    ("mxfp4", Options(scale_rule="e8m0_floor")),
    ("int8", Options(group_size=64)),
    ("int4", Options(group_size=32, scale_type=F32)),
    ("int4", Options(group_size=64, scale_choice="search")),
    ("fp4_row", Options()),
    ("int4_row", Options()),
    ("fp8_e4m3", Options()),
    ("fp8_e5m2", Options()),
    ("int8_affine", Options(param_type=F16)),
    ("int4_affine", Options(param_type=F16)),
    ("int4_affine", Options(param_type=BF16)),
)
GIVEN = (("nvfp4", "0.4"), ("int8", "0.02"), ("fp8_e4m3", "0.01"))


def weights_of(head_dim):
    """Weights above the diagonal, every seventh 0, the others of either sign and below 1."""
    random = inputs.Random(f"weights {head_dim}")
    weights = [[0.0] * head_dim for _ in range(head_dim)]
    for i in range(head_dim):
        for j in range(i + 1, head_dim):
            exact = random.normal() / 5
            weights[i][j] = 0.0 if (i + j) % 7 == 0 else binary32.nearest(exact)
    return weights


def above_diagonal(weights):
    return [x for i, row in enumerate(weights) for x in row[i + 1 :]]


def option_sets(head_dim):
    yield from OPTIONS
    for name, base in GIVEN:
        if fits(name, head_dim):
            yield name, given_scales(name, head_dim, base, "fed")


def cases():
    for head_dim in HEAD_DIMS:
        weights = weights_of(head_dim)
        for name, options in option_sets(head_dim):
            if not fits(name, head_dim):
                continue
            element = GROUPED[name].element if name not in AFFINE else None
            rows = inputs.few_rows(head_dim)
            if head_dim == 64:
                rows = [r for r in inputs.common_rows(head_dim, element) if r[0] in ROWS]
            for row_name, source in rows:
                fed = replace(options, feedback=weights)
                yield {"format": name, **case(name, source, row_name, fed)}


def files():
    shared = [
        {
            "head_dim": d,
            "weights": words(map(binary32.to_bits, above_diagonal(weights_of(d)))),
        }
        for d in HEAD_DIMS
    ]
    yield "feedback.json", {"weights": shared, "cases": list(cases())}
