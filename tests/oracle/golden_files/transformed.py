"""transforms.json: mean, block offset, factor and Hadamard in every combination."""

import itertools
from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import Options, quantize_row
from kvx_oracle.transforms import Transform

from . import inputs
from .inputs import Random
from .json_text import words

HEAD_DIMS = (64, 80, 96, 128, 192)
TERMS = ("mean", "block_offset", "factor")
TENSOR_SCALE = binary32.nearest(Fraction("0.004"))


def f32_words(numbers):
    return words(map(binary32.to_bits, numbers))


def terms_of(head_dim):
    """Each term's head_dim numbers; factors lie in [1/2, 2) and every fourth is a power of two."""
    random = Random(f"factor {head_dim}")
    factor = []
    for d in range(head_dim):
        exact = Fraction((1 << 20) + random.bits(20), 1 << 20) * Fraction(2) ** -random.bits(1)
        factor.append(binary32.nearest(exact if d % 4 else Fraction(1, 2)))
    return {
        "mean": inputs.normal(head_dim, "3", "mean"),
        "block_offset": inputs.normal(head_dim, "0.5", "block offset"),
        "factor": factor,
    }


def row_of(head_dim):
    """Numbers around the mean, a zero of either sign, a tiny and a large one."""
    row = inputs.normal(head_dim, "2", "row")
    row[3:7] = [0.0, -0.0, binary32.nearest(Fraction("1e-40")), 1e6]
    return row


def case(head_dim, present, hadamard):
    values = terms_of(head_dim)
    transform = Transform(**{term: values[term] for term in present}, hadamard=hadamard)
    transformed = transform.apply(row_of(head_dim))
    nvfp4 = quantize_row("nvfp4", inputs.f32_input(transformed), Options(tensor_scale=TENSOR_SCALE))
    decoded = [binary32.from_bits(bits) for bits in nvfp4.decoded_bits]
    return {
        "head_dim": head_dim,
        **{term: term in present for term in TERMS},
        "hadamard": hadamard,
        "transformed": f32_words(transformed),
        "restored": f32_words(transform.invert(transformed)),
        "nvfp4_codes": nvfp4.codes.hex(),
        "nvfp4_scales": nvfp4.scales.hex(),
        "nvfp4_gathered": f32_words(transform.invert(decoded)),
    }


def files():
    shared = [
        {
            "head_dim": head_dim,
            **{term: f32_words(numbers) for term, numbers in terms_of(head_dim).items()},
            "input": f32_words(row_of(head_dim)),
        }
        for head_dim in HEAD_DIMS
    ]
    subsets = [s for n in range(4) for s in itertools.combinations(TERMS, n)]
    cases = [
        case(head_dim, present, hadamard)
        for head_dim in HEAD_DIMS
        for present in subsets
        for hadamard in (False, True)
    ]
    tensor_scale = f32_words([TENSOR_SCALE])
    yield "transforms.json", {"nvfp4_tensor_scale": tensor_scale, "terms": shared, "cases": cases}
