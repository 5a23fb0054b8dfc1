"""turbomind_blocks.json: sizes, offsets and whole blocks for quant policies 0, 4, 8 and 16."""

import itertools

from kvx_oracle.small_float import BF16, F16
from kvx_oracle.turbomind import BlockShape, write_block

from . import inputs
from .json_text import words

POLICIES = (0, 4, 8, 16)
# (layers, heads, head_dim, block_len); the last but one is the fork's case of requirements 3.1.3
SHAPES = (
    (1, 1, 64, 64),
    (30, 3, 64, 64),
    (32, 8, 128, 64),
    (36, 8, 64, 16),
    (2, 4, 192, 32),
    (32, 8, 128, 128),
    (3, 2, 80, 1),
)
TINY = (2, 2, 32, 4)


def size_case(policy, layers, heads, head_dim, block_len):
    shape = BlockShape(policy, layers, heads, head_dim, block_len)
    corners = itertools.product(
        sorted({0, layers // 2, layers - 1}),
        sorted({0, heads - 1}),
        (0, 1),
        sorted({0, block_len // 2, block_len - 1}),
    )
    return {
        **shape_fields(shape),
        "token_data_bytes": shape.token_data,
        "token_param_bytes": shape.token_params,
        "layer_bytes": shape.layer_bytes,
        "block_bytes": shape.block_bytes,
        "scale_block_bytes": shape.scale_block_bytes,
        # each: layer, head, 0 key or 1 value, token, data offset, params offset, scales offset
        "offsets": [[*at, *offsets(shape, at)] for at in corners],
    }


def offsets(shape, at):
    """-1 for what the policy does not have."""
    params = shape.param_offset(*at) if shape.token_params else -1
    scales = shape.scale_offset(*at) if shape.token_scales else -1
    return shape.data_offset(*at), params, scales


def shape_fields(shape):
    return {
        "policy": shape.policy,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "block_len": shape.block_len,
    }


def written_case(policy, dtype, first_token):
    """One block whose every row is written; `first_token` numbers its rows in the sequence."""
    shape = BlockShape(policy, *TINY)
    sides = [
        [
            [
                [
                    token_codes(
                        dtype, shape.head_dim, f"{side} {layer} {head} {first_token + slot}"
                    )
                    for slot in range(shape.block_len)
                ]
                for head in range(shape.num_heads)
            ]
            for layer in range(shape.num_layers)
        ]
        for side in ("key", "value")
    ]
    block, scales = write_block(shape, dtype, sides)
    return {
        **shape_fields(shape),
        "first_token": first_token,
        "dtype": dtype.name,
        # [layer][head][slot][dim], 16-bit patterns
        "keys": flat(sides[0]),
        "values": flat(sides[1]),
        "block": block.hex(),
        "scale_block": scales.hex(),
    }


def token_codes(dtype, head_dim, seed):
    return [dtype.encode(x) for x in inputs.normal(head_dim, "1.5", seed)]


def flat(side):
    return words((code for layer in side for head in layer for t in head for code in t), 16)


def files():
    sizes = [size_case(policy, *shape) for shape in SHAPES for policy in POLICIES]
    written = [written_case(policy, dtype, 0) for policy in POLICIES for dtype in (F16, BF16)]
    # The next block of the FP4 sequence, so that a reader can tell tokens of two blocks apart.
    written += [written_case(16, dtype, TINY[3]) for dtype in (F16, BF16)]
    yield "turbomind_blocks.json", {"sizes": sizes, "written": written}
