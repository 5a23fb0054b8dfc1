"""search.json: scales chosen by 4 over 6 and by search (docs/numbers.md 5); rows_* have amax."""

from dataclasses import replace
from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import GROUPED, Options
from kvx_oracle.small_float import F32

from . import inputs
from .rows import case, fits

ROWS = ("normal_1", "constant", "denormal", "largest", "outliers", "nan_in_last_group", "ties")
OPTIONS = (
    ("nvfp4", Options()),
    ("nvfp4", Options(tensor_scale=binary32.nearest(Fraction("0.0025")))),
    ("mxfp4_g16", Options()),
    ("mxfp4", Options(scale_rule="e8m0_floor")),
    ("mxfp4", Options(scale_rule="e8m0_ceil")),
    ("int8", Options(group_size=64)),
    ("int8", Options(group_size=32, scale_type=F32)),
    ("int4", Options(group_size=64)),
    ("int4", Options(group_size=32, scale_type=F32)),
    ("fp4_row", Options()),
    ("int4_row", Options()),
    ("fp8_e4m3", Options()),
    ("fp8_e5m2", Options()),
)


def cases():
    for name, options in OPTIONS:
        element = GROUPED[name].element
        rows = [r for r in inputs.common_rows(64, element) if r[0] in ROWS]
        rows += [r for d in (80, 96, 128) if fits(name, d) for r in inputs.few_rows(d)]
        for choice in ("4over6", "search"):
            if choice == "4over6" and element.name != "e2m1":
                continue
            chosen = replace(options, scale_choice=choice)
            for row_name, source in rows:
                yield {"format": name, **case(name, source, row_name, chosen)}


def files():
    yield "search.json", {"cases": list(cases())}
