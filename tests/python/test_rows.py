"""Rows outside of a cache: shapes, strides, dtypes, laws, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from reference import random_rows

import kvx

COMPUTED = ["int8", "int4:g32", "fp8_e4m3:source=computed", "nvfp4", "mxfp4", "int8_affine", "bf16"]


def same_bytes(a, b):
    return a.codes.tobytes() == b.codes.tobytes() and a.scales.tobytes() == b.scales.tobytes()


def test_leading_shape_is_kept_and_zero_rows_are_rows():
    rows = kvx.quantize(random_rows(1, 2, 3, 64), "nvfp4")
    assert rows.codes.shape == (2, 3, 32) and rows.scales.shape == (2, 3, 4)
    assert rows.dequantize().shape == (2, 3, 64)
    assert rows.nbytes == 6 * 36
    assert kvx.quantize(np.empty((0, 64), np.float32), "int8").dequantize().shape == (0, 64)
    assert kvx.quantize(random_rows(1, 64), "int8").dequantize().shape == (64,)


def test_any_row_stride_gives_the_same_bytes():
    whole = random_rows(2, 10, 128)
    for view in (whole[:, 32:96], whole[::-1, :64], whole[::3, 64:]):
        assert same_bytes(kvx.quantize(view, "int8"), kvx.quantize(view.copy(), "int8"))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, None])
def test_rows_are_decoded_to_dtypes_that_kvx_has(dtype):
    rows = kvx.quantize(random_rows(1, 64), "int8")
    with pytest.raises(kvx.Error, match="dtype is .*; expected float32 or float16"):
        rows.dequantize(dtype)


def test_results_do_not_depend_on_the_number_of_threads():
    x = random_rows(3, 3000, 128)
    results = []
    try:
        for threads in (1, 3):
            kvx.set_num_threads(threads)
            assert kvx.num_threads() == threads
            results.append(kvx.quantize(x, "nvfp4:search"))
    finally:
        kvx.set_num_threads(0)
    assert same_bytes(*results)


@given(st.sampled_from(COMPUTED), st.integers(0, 2**32 - 1), st.sampled_from([64, 96, 128]))
def test_quantising_what_was_decoded_changes_little_and_zero_stays_zero(recipe, seed, head_dim):
    x = random_rows(seed, 4, head_dim)
    x[0] = 0
    once = kvx.quantize(x, recipe).dequantize()
    assert not once[0].any()
    # A 4-bit step is amax / 6 at most, and half of it the largest error of a code.
    assert np.abs(once - x).max() <= np.abs(x).max() * 0.26
    assert np.isfinite(once).all()


@given(st.sampled_from(["int8", "int4", "nvfp4", "mxfp4"]), st.integers(0, 2**32 - 1))
def test_signs_are_symmetric(recipe, seed):
    x = random_rows(seed, 3, 64)
    assert np.array_equal(
        kvx.quantize(-x, recipe).dequantize(), -kvx.quantize(x, recipe).dequantize()
    )


def test_a_nan_stays_visible_in_its_group_alone():
    x = random_rows(4, 1, 128)
    x[0, 5] = np.nan
    found = kvx.quantize(x, "int8:g64").dequantize()[0]
    assert np.isnan(found[:64]).all() and np.isfinite(found[64:]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kvx.quantize(x, "int9"), "format is 'int9'; expected one of"),
        (lambda x: kvx.quantize(x, "int8:auto"), "rows have no full-precision window"),
        (lambda x: kvx.quantize(x, "int8/int4"), "rows have one format"),
        (lambda x: kvx.quantize(x, "int8:source=page"), "page-shared scales need a cache's blocks"),
        (lambda x: kvx.quantize(x, "int8:source=given"), "steps has 0 numbers"),
        (lambda x: kvx.quantize(x, "int8", steps=[1.0]), "makes its own scales"),
        (lambda x: kvx.quantize(x, "int8", tensor_scale=2.0), "tensor_scale is 2; int8 has none"),
        (lambda x: kvx.quantize(x, "nvfp4", tensor_scale=-1.0), "tensor scale is -1"),
        (lambda x: kvx.quantize(x[:, :63], "int4"), "head_dim is 63; int4 needs a multiple of 2"),
        (lambda x: kvx.quantize(x.astype(np.float64), "int8"), "expected float32, float16 or"),
        (lambda x: kvx.quantize(x.astype(np.int8), "int8"), "expected float32, float16 or"),
        (lambda x: kvx.quantize(np.zeros((2, 0), np.float32), "int8"), "x"),
        (lambda x: kvx.quantize(x, "int8").__class__(
            codes=np.zeros((4, 3), np.uint8), scales=np.zeros((4, 2), np.uint8),
            format="int8", head_dim=64).dequantize(), "expected uint8 [4, 64]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(kvx.Error) as error:
        call(random_rows(5, 4, 64))
    assert message in str(error.value)


def test_what_is_no_array_is_a_type_error():
    for x in ([1.0, 2.0], None, "text", 3):
        with pytest.raises(TypeError, match="expected a NumPy array"):
            kvx.quantize(x, "int8")


def test_formats_and_recipes_say_what_they_are():
    names = [f.name for f in kvx.formats()]
    assert "nvfp4" in names and len(names) == len(set(names)) == 17
    recipe = kvx.parse_recipe("int8/int4:sink=16,recent=64")
    assert (recipe.k.format, recipe.v.format) == ("int8", "int4")
    assert (recipe.sink_tokens, recipe.recent_tokens) == (16, 64)
    assert recipe.full_precision_format == "bf16"
    assert kvx.parse_recipe("int8").full_precision_format is None
    assert any(form.startswith("sink=") for form, _ in kvx.recipe_options())


def test_formats_of_whole_blocks_have_no_rows_alone():
    with pytest.raises(kvx.Error, match="int2_dual, which quantises whole blocks"):
        kvx.quantize(random_rows(1, 1, 1, 64), "int2_dual")
    with pytest.raises(kvx.Error, match="no full-precision window"):
        kvx.PagedLayer("int3_dual:auto", num_kv_heads=2, head_dim=64, block_size=64)


@pytest.mark.parametrize("source", COMPUTED)
@pytest.mark.parametrize("target", COMPUTED)
def test_transcoding_is_decoding_and_quantising(source, target):
    rows = kvx.quantize(random_rows(8, 5, 3, 64), source)
    found = kvx.transcode(rows, target)
    assert found.format == target and found.codes.shape[:2] == (5, 3)
    expected = rows if source == target else kvx.quantize(rows.dequantize(), target)
    assert same_bytes(found, expected)


def test_transcoding_takes_given_scales_and_refuses_another_rotation():
    rows = kvx.quantize(random_rows(8, 5, 64), "int8")
    found = kvx.transcode(rows, "fp8_e4m3", steps=[0.25])
    assert same_bytes(found, kvx.quantize(rows.dequantize(), "fp8_e4m3", steps=[0.25]))
    with pytest.raises(kvx.UnsupportedError, match="only one of the two rotates"):
        kvx.transcode(rows, "int4:hadamard")
    with pytest.raises(kvx.Error, match="int5"):
        kvx.transcode(rows, "int5")


ROWS_OF_ANY_SHAPE = arrays(
    st.sampled_from([np.float32, np.float16]),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([64, 96, 128])),
    elements=st.floats(-65504, 65504, width=16),
)


@given(ROWS_OF_ANY_SHAPE, st.sampled_from(COMPUTED))
def test_rows_are_quantised_one_by_one_whatever_lies_beside_them(x, recipe):
    whole = kvx.quantize(x, recipe)
    assert whole.codes.shape[:2] == x.shape[:2] and whole.dequantize().shape == x.shape
    for index in np.ndindex(x.shape[:2]):
        row = kvx.quantize(x[index], recipe)
        assert np.array_equal(row.codes, whole.codes[index])
        assert np.array_equal(row.scales, whole.scales[index])


SYMMETRIC = ["int8", "int4:g32", "nvfp4", "mxfp4"]


@given(ROWS_OF_ANY_SHAPE, st.sampled_from(SYMMETRIC), st.integers(-5, 5))
def test_a_power_of_two_goes_into_the_scales_alone(x, recipe, exponent):
    # Within the scales' own range: nvfp4's end at 448, which is 2688 with six as the code.
    x = np.where(np.abs(x) < 2.0**-2, 0, np.clip(x, -(2.0**6), 2.0**6)).astype(np.float32)
    x[..., ::32] = 2.0**5  # no group of small numbers alone
    x[..., 16::32] = 2.0**5
    one, other = kvx.quantize(x, recipe), kvx.quantize(x * 2.0**exponent, recipe)
    assert np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.dequantize() * np.float32(2.0**exponent), other.dequantize())


@given(st.integers(0, 3), st.integers(-2, 300), st.integers(-2, 300), st.sampled_from(COMPUTED))
def test_codes_of_any_size_are_decoded_or_refused(rows, code_bytes, scale_bytes, recipe):
    codes, scales = (np.full((rows, max(n, 0)), 7, np.uint8) for n in (code_bytes, scale_bytes))
    for head_dim in (64, code_bytes, scale_bytes):
        stored = kvx.Rows(codes, scales, recipe, head_dim)
        for call in (stored.dequantize, lambda: kvx.transcode(stored, "int8")):
            try:
                call()
            except (kvx.Error, TypeError):
                pass


def test_rows_are_equal_where_facts_and_bytes_are():
    x = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    rows = kvx.quantize(x, "int4")
    assert rows == kvx.quantize(x.copy(), "int4")
    assert rows != kvx.quantize(x * 1.5, "int4")
    assert rows != kvx.quantize(x[:3], "int4")
    assert rows != kvx.quantize(x, "int4:g32")
    assert rows != "int4"
    with pytest.raises(TypeError, match="unhashable"):
        hash(rows)
