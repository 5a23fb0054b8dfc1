"""TurboMind: LMDeploy's blocks, byte for byte.

Policies 0, 4 and 8 are TurboMind 0.16's own; policy 16 is kvx's FP4 data pool and scale pool
beside them (src/engines/turbomind/layout.hpp).

    block, policies 0, 4, 8:
      layer: [head: [K data: block_len rows][V data: block_len rows]] * heads
             [head: [K params: block_len x {scale, zero}][V params: the same]] * heads
    data block, policy 16: the same without params
    scale block, policy 16:
      layer: [head: [token: [K scales: head_dim/16][V scales: head_dim/16]] * block_len] * heads
"""

from dataclasses import dataclass

from .formats import Input, Options, quantize_row

KEY, VALUE = 0, 1
POLICY_FORMAT = {4: "int4_affine", 8: "int8_affine", 16: "mxfp4_g16"}
POLICY_BITS = {0: 16, 4: 4, 8: 8, 16: 4}
FP4_GROUP = 16


@dataclass(frozen=True)
class BlockShape:
    policy: int
    num_layers: int
    num_heads: int
    head_dim: int
    block_len: int

    @property
    def token_data(self):
        return POLICY_BITS[self.policy] * self.head_dim // 8

    @property
    def token_params(self):
        """Two parameters of 16 bits."""
        return 4 if self.policy in (4, 8) else 0

    @property
    def token_scales(self):
        """Scale bytes of one token's K or V row."""
        return self.head_dim // FP4_GROUP if self.policy == 16 else 0

    @property
    def head_data(self):
        return self.block_len * self.token_data

    @property
    def head_params(self):
        return self.block_len * self.token_params

    @property
    def layer_bytes(self):
        return self.num_heads * 2 * (self.head_data + self.head_params)

    @property
    def block_bytes(self):
        return self.num_layers * self.layer_bytes

    @property
    def scale_block_bytes(self):
        rows = self.num_layers * self.num_heads * self.block_len * 2
        return rows * self.token_scales

    def data_offset(self, layer, head, side, token):
        in_layer = (head * 2 + side) * self.head_data + token * self.token_data
        return layer * self.layer_bytes + in_layer

    def param_offset(self, layer, head, side, token):
        all_data = self.num_heads * 2 * self.head_data
        in_params = (head * 2 + side) * self.head_params + token * self.token_params
        return layer * self.layer_bytes + all_data + in_params

    def scale_offset(self, layer, head, side, token):
        row = (layer * self.num_heads + head) * self.block_len + token
        return (row * 2 + side) * self.token_scales


def write_block(shape, dtype, sides):
    """(data block, scale block) of codes `sides[KEY or VALUE][layer][head][token][dim]`."""
    block = bytearray(shape.block_bytes)
    scales = bytearray(shape.scale_block_bytes)
    for side, layers in enumerate(sides):
        for layer, heads in enumerate(layers):
            for head, tokens in enumerate(heads):
                for token, codes in enumerate(tokens):
                    at = (layer, head, side, token)
                    row = quantized(shape.policy, Input(dtype, tuple(codes)))
                    put(block, shape.data_offset(*at), row.codes)
                    if shape.policy == 16:
                        put(scales, shape.scale_offset(*at), row.scales)
                    else:
                        put(block, shape.param_offset(*at), row.scales)
    return bytes(block), bytes(scales)


def quantized(policy, source):
    if policy == 0:
        return quantize_row(source.float_type.name, source)
    return quantize_row(POLICY_FORMAT[policy], source, Options(param_type=source.float_type))


def put(block, offset, row_bytes):
    block[offset : offset + len(row_bytes)] = row_bytes
