"""packing.json: how codes lie in bytes, and the nibbles of other projects."""

from kvx_oracle import binary32, packing
from kvx_oracle.small_float import F16

from . import inputs
from .inputs import Random
from .json_text import words


def packing_case(count):
    random = Random(f"packing {count}")
    codes = list(range(count)) if count <= 16 else [random.bits(4) for _ in range(count)]
    return {
        "codes": words(codes, 4),
        "nibbles": packing.pack_nibbles(codes).hex(),
        "words_of_eight": words(packing.words_of_eight(codes)),
        "words_of_eight_bytes": packing.pack_words_of_eight(codes).hex(),
        "turbomind_u4": packing.pack_turbomind_u4(codes).hex(),
    }


def offset_binary():
    """Nibble n of two's complement and the same value in offset binary, all sixteen."""
    nibbles = range(16)
    return {
        "twos_complement": words(nibbles, 4),
        "offset_binary": words(map(packing.twos_complement_to_offset_binary, nibbles), 4),
    }


def metal_marlin_cases():
    rows = [
        (name, source.numbers())
        for name, source in inputs.common_rows(64, None)
        if name in ("normal_1", "normal_0.02", "constant", "all_zero", "signs", "outliers", "tiny")
    ]
    rows += [("normal_1", inputs.normal(d, "1", "marlin")) for d in (80, 128)]
    for name, row in rows:
        codes, scale = packing.metal_marlin_quantize(row)
        decoded = packing.metal_marlin_dequantize(codes, scale)
        yield {
            "row": name,
            "head_dim": len(row),
            "input": words(map(binary32.to_bits, row)),
            "codes": words(codes, 4),
            "words_of_eight": words(packing.words_of_eight(codes)),
            "scale_f16": words([scale], 16),
            "decoded": words(map(binary32.to_bits, decoded)),
        }
    yield every_metal_marlin_code()


def every_metal_marlin_code():
    codes, scale = list(range(16)), F16.encode(0.4)
    decoded = packing.metal_marlin_dequantize(codes, scale)
    return {
        "row": "every_code",
        "head_dim": 16,
        "input": "",
        "codes": words(codes, 4),
        "words_of_eight": words(packing.words_of_eight(codes)),
        "scale_f16": words([scale], 16),
        "decoded": words(map(binary32.to_bits, decoded)),
    }


def files():
    yield "packing.json", {
        "packings": [packing_case(count) for count in (8, 16, 64, 80, 96, 128, 192)],
        "offset_binary": offset_binary(),
        "metal_marlin_fp4": list(metal_marlin_cases()),
    }
