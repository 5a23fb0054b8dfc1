"""vLLM's latent layers (MLA): records of 656 bytes by vLLM's own rule, and rows of floats and fp8."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvx
from kvx import engines
import engine_layouts as oracle

BLOCKS, TOKENS, HEADS = 3, 8, 4
LATENT, ROTARY, RECORD = 512, 64, 656
ROW = LATENT + ROTARY
IDS = [2, 0]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "latent_fp8.json").read_text())


def floats(text):
    return np.frombuffer(bytes.fromhex(text), ">f4").astype(np.float32)


def golden(field):
    return np.stack([floats(row[field]) for row in GOLDEN["rows"]])


RECORDS = np.stack([np.frombuffer(bytes.fromhex(row["record"]), np.uint8) for row in GOLDEN["rows"]])
COUNT = len(RECORDS)
SLOTS = IDS[0] * TOKENS + np.arange(COUNT)


def table(length=COUNT):
    return engines.packed(np.array([IDS], np.int32), np.array([length], np.int32))


def records():
    """The golden records as tokens 0, 1, ... of block 2, among other bytes."""
    cache = np.full((BLOCKS, TOKENS, RECORD), 0xAB, np.uint8)
    cache[IDS[0], :COUNT] = RECORDS
    return cache


def test_records_are_read_as_vllm_reads_them():
    layer = engines.vllm.latent_layer(records(), "fp8_ds_mla")
    assert layer.key_dim == ROW
    k, v = layer.flatten(table(), [(0, 0, COUNT)])
    np.testing.assert_array_equal(k[0, 0], golden("decoded"))
    np.testing.assert_array_equal(v[0, 0], golden("decoded")[:, :LATENT])


def test_records_are_written_as_vllm_writes_them():
    cache = np.full((BLOCKS, TOKENS, RECORD), 0xAB, np.uint8)
    layer = engines.vllm.latent_layer(cache, "fp8_ds_mla")
    layer.append(golden("row")[:, None], None, SLOTS)
    np.testing.assert_array_equal(cache, records())


def test_layers_of_one_tensor_for_all_layers_are_views_of_it():
    memory = np.zeros((BLOCKS, 2, TOKENS, RECORD), np.uint8)
    memory[:, 1] = records()
    layer = engines.vllm.latent_layer(memory[:, 1], "fp8_ds_mla")
    k, _ = layer.flatten(table(), [(0, 0, COUNT)])
    np.testing.assert_array_equal(k[0, 0], golden("decoded"))


def test_attention_reads_the_records():
    layer = engines.vllm.latent_layer(records(), "fp8_ds_mla")
    q = np.random.default_rng(5).standard_normal((1, HEADS, ROW)).astype(np.float32)
    out = layer.attend(q, table(), np.array([0, 1], np.int32), softmax_scale=0.1)
    k = golden("decoded").astype(np.float64)
    scores = q[0] @ k.T * 0.1
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ k[:, :LATENT]
    np.testing.assert_allclose(out[0], expected, atol=2e-5)


def bf16_bits(numbers):
    """Of numbers that bf16 holds."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def float_cache(format, rows):
    """[blocks, tokens, 576] with the rows as tokens of block 2."""
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    cache = np.zeros((BLOCKS, TOKENS, ROW), kinds[format])
    cache[IDS[0], :COUNT] = bf16_bits(rows) if format == "bfloat16" else rows
    return cache


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_transcode_turns_rows_of_floats_into_records_and_back(format):
    cache = float_cache(format, golden("row"))
    source = engines.vllm.latent_layer(cache, format)
    target = np.full((BLOCKS, TOKENS, RECORD), 0xAB, np.uint8)
    layer = engines.vllm.latent_layer(target, "fp8_ds_mla")
    engines.transcode(source, layer, SLOTS, SLOTS)
    np.testing.assert_array_equal(target, records())
    engines.transcode(layer, source, SLOTS, SLOTS)
    found = cache[IDS[0], :COUNT]
    if format == "float32":
        np.testing.assert_array_equal(found, golden("decoded"))
    else:  # the rotary numbers come back as they were
        np.testing.assert_array_equal(found[:, LATENT:], bf16_bits(golden("row"))[:, LATENT:])
        back = (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(back, golden("decoded"), rtol=2**-8)


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
def test_rows_of_floats_are_key_and_value(format):
    rows = golden("decoded")
    if format == "bfloat16":
        rows = golden("row")
    layer = engines.vllm.latent_layer(float_cache(format, rows), format)
    k, v = layer.flatten(table(), [(0, 0, COUNT)])
    stored = rows.astype(np.float16).astype(np.float32) if format == "float16" else rows
    np.testing.assert_array_equal(k[0, 0], stored)
    np.testing.assert_array_equal(v[0, 0], stored[:, :LATENT])


def test_fp8_rows_have_the_layers_scale():
    codes = np.random.default_rng(5).integers(0x30, 0x40, (BLOCKS, TOKENS, 192), np.uint8)
    layer = engines.vllm.latent_layer(codes, "fp8", kv_lora_rank=128, k_scale=0.25)
    k, v = layer.flatten(table(), [(0, 0, COUNT)])
    expected = oracle.fp8_e4m3(codes[IDS[0], :COUNT]) * np.float32(0.25)
    np.testing.assert_array_equal(k[0, 0], expected)
    np.testing.assert_array_equal(v[0, 0], expected[:, :128])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: engines.vllm.latent_layer(records()[..., :640], "fp8_ds_mla"),
         r"shape \[3, 8, 640\]; expected \[n, n, 656\]"),
        (lambda: engines.vllm.latent_layer(np.zeros((2, 8, 656), np.uint16), "fp8_ds_mla"),
         "elements of 2 bytes; fp8_ds_mla has 1"),
        (lambda: engines.vllm.latent_layer(records(), "fp8_ds_mla", kv_lora_rank=256),
         "kv_lora_rank is 256; rows of fp8_ds_mla have 512"),
        (lambda: engines.vllm.latent_layer(records(), "nvfp4_ds_mla"),
         "kv_cache_dtype is 'nvfp4_ds_mla'; latent layers have one of fp8_ds_mla, float32"),
        (lambda: engines.vllm.latent_layer(np.zeros((2, 8, 512), np.float16), "float16"),
         "kv_lora_rank is 512; expected 1 to 511"),
        (lambda: engines.vllm.latent_layer(np.zeros((2, 8, 576), np.float16), "float16", k_scale=2.0),
         "scale of 2.0; f16 has none"),
        (lambda: engines.vllm.latent_layer(np.zeros((2, 1, 8, 576), np.float16), "float16"),
         r"expected \[n, n, n\]"),
        (lambda: engines.vllm.layer(records(), "fp8_ds_mla", head_dim=64),
         "'fp8_ds_mla'; expected one of"),
    ],
)  # fmt: skip
def test_errors_name_the_field(call, message):
    with pytest.raises(kvx.Error, match=message):
        call()


def test_values_of_latent_rows_are_not_given_apart():
    layer = engines.vllm.latent_layer(records(), "fp8_ds_mla")
    with pytest.raises(kvx.Error, match=r"k has shape|k\b.*576"):
        layer.append(golden("row")[:, None, :LATENT], None, SLOTS)
