"""The oracle's golden rows, byte for byte: the files that the C++ tests read."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvx

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_TENSOR_SCALE = np.finfo(np.float32).max / 448
SCALE_BYTES = {"f16": "<f2", "bf16": "<u2", "f32": "<f4", "e8m0": "u1", "e4m3": "u1"}


def floats(text):
    return np.frombuffer(bytes.fromhex(text), ">f4").astype(np.float32)


def input_of(case):
    """f32 numbers, or 16-bit patterns as the case's own type."""
    if case["input_type"] == "f32":
        return floats(case["input"])
    bits = np.frombuffer(bytes.fromhex(case["input"]), ">u2").astype(np.uint16)
    if case["input_type"] == "f16":
        return bits.view(np.float16)
    return None  # NumPy has no bfloat16; tests/hf passes it as torch tensors


def recipe_of(name, case):
    options = []
    fmt = {f.name: f for f in kvx.formats()}[name]
    if len(fmt.group_sizes) > 1 and str(case["group_size"]) in fmt.group_sizes:  # else the row
        options.append(f"g{case['group_size']}")
    if len(fmt.scale_types) > 1:
        options.append(f"scale={case.get('scale_type') or case['param_type']}")
    if len(fmt.scale_rules) > 1:
        options.append(f"rule={case['scale_rule'].removeprefix('e8m0_')}")
    if len(fmt.scale_sources) > 1:
        options.append(f"source={case['scale_source']}")
    if case.get("scale_choice", "amax") != "amax":
        options.append(case["scale_choice"])
    return name + (":" + ",".join(options) if options else "")


def given_steps(case):
    """The given scales' values, from their stored bytes."""
    if case.get("scale_source") != "given":
        return []
    stored = np.frombuffer(bytes.fromhex(case["scales"]), SCALE_BYTES[case["scale_type"]])
    if case["scale_type"] == "e8m0":
        return [2.0 ** (int(e) - 127) for e in stored]
    if case["scale_type"] == "e4m3":
        return [e4m3(int(code)) for code in stored]
    return [float(step) for step in stored]


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def check_case(name, case):
    """Whether the case can be expressed in Python."""
    x = input_of(case)
    if x is None:
        return False
    tensor_scale = float(floats(case["tensor_scale"])[0]) if "tensor_scale" in case else 1.0
    steps = given_steps(case)
    if tensor_scale > MAX_TENSOR_SCALE or min(steps, default=1) < np.finfo(np.float32).tiny:
        return False  # the files go beyond what the API boundary lets in
    recipe = recipe_of(name, case)
    rows = kvx.quantize(x[None], recipe, tensor_scale=tensor_scale, steps=steps)
    where = f"{recipe} row {case['row']} head_dim {case['head_dim']}"
    assert rows.codes.tobytes().hex() == case["codes"], where
    if case.get("scale_source") != "given":
        assert rows.scales.tobytes().hex() == case["scales"], where
    expected = floats(case["decoded"])
    found = rows.dequantize()[0]
    assert np.array_equal(np.isnan(found), np.isnan(expected)), where
    numbers = ~np.isnan(expected)
    assert found[numbers].tobytes() == expected[numbers].tobytes(), where
    if "nonfinite_count" in case:
        assert rows.nonfinite_inputs == case["nonfinite_count"], where
    return True


ROW_FORMATS = [f.name for f in kvx.formats() if f.scale_rules != ["dual"]]


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_every_formats_rows_are_the_oracles_bytes(name):
    cases = json.loads((GOLDEN / f"rows_{name}.json").read_text())["cases"]
    num_expressed = sum(check_case(name, case) for case in cases)
    assert num_expressed >= len(cases) / 2 > 0


def test_scales_chosen_by_squared_error_are_the_oracles():
    cases = json.loads((GOLDEN / "search.json").read_text())["cases"]
    assert sum(check_case(case["format"], case) for case in cases) >= 200
