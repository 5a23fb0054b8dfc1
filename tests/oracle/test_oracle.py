"""Tests of the oracle itself, against the standards' tables, Python's own struct codecs and facts
that docs/numbers.md and the public projects state."""

import math
import struct
import unittest
from fractions import Fraction

from golden_files.inputs import Random, f32_input, normal
from kvx_oracle import binary32, packing
from kvx_oracle.affine import quantize_affine
from kvx_oracle.elements import ELEMENTS, FP4, INT4, INT8
from kvx_oracle.formats import GROUPED, Input, Options, quantize_row
from kvx_oracle.groups import ScaleRule, reciprocal
from kvx_oracle.search import squared_error
from kvx_oracle.small_float import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32
from kvx_oracle.transforms import Transform, hadamard, inverse_square_root
from kvx_oracle.turbomind import BlockShape, write_block

NAN, INF = math.nan, math.inf


def random_finite(random):
    while True:
        number = binary32.from_bits(random.bits(32))
        if math.isfinite(number):
            return number


def packed(kind, number):
    """Python's conversion, whose overflow is an exception."""
    try:
        return struct.unpack(f"<{kind}", struct.pack(f"<{kind}", number))[0]
    except OverflowError:
        return math.copysign(INF, number)


def decoded(row):
    return [binary32.from_bits(bits) for bits in row.decoded_bits]


class SmallFloats(unittest.TestCase):
    def test_e2m1_has_the_sixteen_values_of_ocp_mx(self):
        magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        values = [E2M1.decode(code) for code in range(16)]
        self.assertEqual(values, magnitudes + [-m for m in magnitudes])
        self.assertEqual(math.copysign(1, values[8]), -1)

    def test_ocp_ofp8_limits(self):
        self.assertEqual((E4M3.largest, E4M3.smallest, E4M3.smallest_normal), (448, 2**-9, 2**-6))
        self.assertEqual(
            (E5M2.largest, E5M2.smallest, E5M2.smallest_normal), (57344, 2**-16, 2**-14)
        )
        nans = [code for code in range(256) if math.isnan(E4M3.decode(code))]
        self.assertEqual(nans, [0x7F, 0xFF])
        nans = [code for code in range(256) if math.isnan(E5M2.decode(code))]
        self.assertEqual(nans, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF])
        self.assertEqual((E5M2.decode(0x7C), E5M2.decode(0xFC)), (INF, -INF))

    def test_e5m2_is_the_upper_byte_of_f16(self):
        for code in range(256):
            self.assertEqual(repr(E5M2.decode(code)), repr(F16.decode(code << 8)))

    def test_e8m0_is_a_power_of_two_without_zero(self):
        self.assertEqual(
            (E8M0.decode(0), E8M0.decode(127), E8M0.decode(254)), (2.0**-127, 1, 2.0**127)
        )
        self.assertTrue(math.isnan(E8M0.decode(255)))

    def test_every_f16_code_decodes_as_struct_does(self):
        for code in range(1 << 16):
            expected = struct.unpack("<e", struct.pack("<H", code))[0]
            self.assertEqual(repr(F16.decode(code)), repr(expected))

    def test_f16_and_f32_round_as_struct_does(self):
        random = Random("round")
        for _ in range(4000):
            number = math.ldexp(random.bits(60) - (1 << 59), random.below(340) - 220)
            self.assertEqual(F32.round(Fraction(number)), packed("f", number))
            number = math.ldexp(random.bits(60) - (1 << 59), random.below(50) - 90)
            self.assertEqual(F16.round(Fraction(number)), packed("e", number))

    def test_bf16_rounds_binary32_bits_to_their_upper_half(self):
        random = Random("bf16")
        for _ in range(4000):
            bits = random.bits(32)
            if bits & 0x7F800000 == 0x7F800000:
                continue
            expected = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            self.assertEqual(BF16.encode(binary32.from_bits(bits)), expected)

    def test_the_grid_and_the_rounding_formula_agree(self):
        random = Random("grid")
        for _ in range(4000):
            number = binary32.from_bits(0x30000000 + random.bits(28) | random.bits(1) << 31)
            if abs(number) >= 57344:
                continue
            self.assertEqual(E5M2.encode_saturating(number), E5M2.encode(number))

    def test_a_tie_goes_to_the_even_code(self):
        ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
        for number, value in ties.items():
            self.assertEqual(E2M1.decode(E2M1.encode_saturating(number)), value)
        self.assertEqual(E4M3.decode(E4M3.encode_saturating(464.0)), 448)
        self.assertEqual(E4M3.encode_saturating(2.0**-10), 0)
        self.assertEqual(E4M3.encode_saturating(3 * 2.0**-10), 2)

    def test_codes_saturate_and_zero_keeps_its_sign(self):
        for fmt in (E2M1, E4M3, E5M2):
            for number in (float(fmt.largest) * 1.5, binary32.FLT_MAX, INF):
                self.assertEqual(fmt.encode_saturating(number), fmt.largest_code)
                self.assertEqual(fmt.encode_saturating(-number), fmt.largest_code | fmt.sign_bit)
            self.assertEqual(fmt.encode_saturating(-0.0), fmt.sign_bit)
            self.assertEqual(fmt.encode_saturating(-1e-30), fmt.sign_bit)

    def test_every_code_is_its_own_nearest(self):
        for fmt in (E2M1, E4M3, E5M2):
            for code in range(1 << fmt.bits):
                if math.isfinite(fmt.decode(code)):
                    self.assertEqual(fmt.encode_saturating(fmt.decode(code)), code)


class Binary32(unittest.TestCase):
    def test_operations_equal_the_machine_s_binary64_rounded_once_more(self):
        # 53 bits are more than twice 24, so the double rounding is harmless for these operations.
        random = Random("operations")
        for _ in range(4000):
            a, b = random_finite(random), random_finite(random)
            self.assertEqual(repr(binary32.add(a, b)), repr(packed("f", a + b)))
            self.assertEqual(repr(binary32.sub(a, b)), repr(packed("f", a - b)))
            self.assertEqual(repr(binary32.mul(a, b)), repr(packed("f", a * b)))
            if b:
                self.assertEqual(repr(binary32.div(a, b)), repr(packed("f", a / b)))

    def test_zeros_infinities_and_nan(self):
        self.assertEqual(repr(binary32.mul(-0.0, 3.0)), "-0.0")
        self.assertEqual(repr(binary32.add(1.0, -1.0)), "0.0")
        self.assertEqual(repr(binary32.add(-0.0, -0.0)), "-0.0")
        self.assertEqual(repr(binary32.mul(2.0**-140, -(2.0**-140))), "-0.0")
        self.assertEqual(binary32.div(1.0, 0.0), INF)
        self.assertEqual(binary32.mul(binary32.FLT_MAX, 2.0), INF)
        self.assertTrue(math.isnan(binary32.div(0.0, 0.0)))
        self.assertTrue(math.isnan(binary32.sub(INF, INF)))


class Scales(unittest.TestCase):
    def test_ceil_rule_is_the_integer_rule_of_c14(self):
        rule = ScaleRule("e8m0_ceil", E8M0, FP4)
        random = Random("ceil")
        for _ in range(4000):
            amax = binary32.from_bits(1 + random.bits(31) % 0x7F7FFFFF)
            mantissa, exponent = math.frexp(amax)
            expected = max(exponent - 3 if mantissa <= 0.75 else exponent - 2, -127) + 127
            self.assertEqual(rule.scale_code(amax), expected)

    def test_floor_rule_differs_where_the_mantissa_is_above_one_and_a_half(self):
        ceil, floor = ScaleRule("e8m0_ceil", E8M0, FP4), ScaleRule("e8m0_floor", E8M0, FP4)
        for amax, difference in ((4.0, 0), (5.0, 0), (6.0, 0), (6.5, 1), (7.9, 1), (8.0, 0)):
            self.assertEqual(ceil.scale_code(amax) - floor.scale_code(amax), difference)

    def test_no_ceil_scaled_number_is_beyond_six(self):
        rule = ScaleRule("e8m0_ceil", E8M0, FP4)
        for bits in (1, 0x007FFFFF, 0x00C00000, 0x00C00001, 0x40C00000, 0x40C00001, 0x7F7FFFFF):
            amax = binary32.from_bits(bits)
            self.assertLessEqual(amax / E8M0.decode(rule.scale_code(amax)), 6)

    def test_nvfp4_scale_does_not_underflow_to_zero(self):
        rule = ScaleRule("tensor", E4M3, FP4)
        self.assertEqual(rule.scale_code(1e-30), 1)
        self.assertEqual(rule.scale_code(2688.0), E4M3.largest_code)
        self.assertEqual(rule.scale_code(1e30), E4M3.largest_code)

    def test_computed_scales_are_positive_and_their_reciprocal_is_finite(self):
        for scale_type in (F16, F32, BF16):
            for element in ELEMENTS.values():
                rule = ScaleRule("amax", scale_type, element)
                for amax in (binary32.from_bits(1), 1e-38, 1.0, binary32.FLT_MAX):
                    step = rule.step(rule.scale_code(amax))
                    self.assertTrue(step > 0 and math.isfinite(step))
                    self.assertTrue(math.isfinite(binary32.div(1.0, step)))

    def test_the_reciprocal_of_a_vanished_step_is_the_largest_number(self):
        self.assertEqual(reciprocal(0.0), binary32.FLT_MAX)
        self.assertEqual(reciprocal(2.0**-149), binary32.FLT_MAX)


class Rows(unittest.TestCase):
    def test_a_row_of_zeros_has_zero_bytes_in_every_grouped_format(self):
        for name in GROUPED:
            row = quantize_row(name, f32_input([0.0, -0.0] * 32))
            self.assertEqual(set(row.codes) | set(row.scales), {0})
            self.assertEqual(set(row.decoded_bits), {0})

    def test_a_nan_or_infinity_turns_its_whole_group_into_nan(self):
        for bad in (NAN, INF, -INF):
            for name, fmt in GROUPED.items():
                row = quantize_row(name, f32_input([1.0] * 63 + [bad]))
                size = min(fmt.group_size or 64, 64)
                self.assertTrue(all(math.isnan(x) for x in decoded(row)[64 - size :]))
                self.assertTrue(all(math.isfinite(x) for x in decoded(row)[: 64 - size]))

    def test_quantising_uses_the_rounded_scale(self):
        row = [0.7, 0.1, 0.33, 0.05] * 16
        source = f32_input([binary32.nearest(Fraction(x)) for x in row])
        result = quantize_row("fp4_row", source)
        scale = F16.decode(int.from_bytes(result.scales, "little"))
        expected = [
            E2M1.encode_saturating(binary32.mul(x, reciprocal(scale))) for x in source.numbers()
        ]
        self.assertEqual(result.codes, packing.pack_nibbles(expected))

    def test_error_is_at_most_half_a_step_for_integers(self):
        numbers = normal(128, "1", "half step")
        for name, options in (("int8", Options(scale_type=F32)), ("int4", Options(scale_type=F32))):
            row = quantize_row(name, f32_input(numbers), options)
            for index, (x, y) in enumerate(zip(numbers, decoded(row))):
                at = index // 64 * 4
                step = struct.unpack("<f", row.scales[at : at + 4])[0]
                self.assertLessEqual(abs(x - y), step * 0.5001)

    def test_a_last_group_may_be_shorter(self):
        row = quantize_row("int8", f32_input(normal(80, "1", "partial")))
        self.assertEqual((len(row.codes), len(row.scales)), (80, 4))

    def test_sign_symmetry(self):
        numbers = normal(64, "1", "sign")
        for name in GROUPED:
            plus = quantize_row(name, f32_input(numbers))
            minus = quantize_row(name, f32_input([-x for x in numbers]))
            self.assertEqual(plus.scales, minus.scales)
            self.assertEqual(decoded(plus), [-x for x in decoded(minus)])

    def test_the_most_negative_integer_is_never_written_but_is_read(self):
        self.assertEqual(INT8.encode(-INF), 0x81)
        self.assertEqual(INT4.encode(-1000.0), 0x9)
        self.assertEqual((INT8.decode(0x80), INT4.decode(0x8)), (-128.0, -8.0))

    def test_integers_round_half_to_even(self):
        self.assertEqual([INT8.encode(x) for x in (0.5, 1.5, 2.5, -0.5, -1.5)], [0, 2, 2, 0, 0xFE])

    def test_a_calibrated_scale_is_the_step(self):
        code = F32.encode(binary32.nearest(Fraction(4, 127)))
        options = Options(group_size=64, scale_type=F32, given_scales=(code,))
        row = quantize_row("int8", f32_input([1.0] * 64), options)
        self.assertEqual(set(row.codes), {32})

    def test_non_finite_elements_under_a_given_scale(self):
        numbers = [NAN, INF, -INF, 1.0] * 16
        f32_one, f16_one = F32.encode(1.0), F16.encode(1.0)
        e4m3 = quantize_row("fp8_e4m3", f32_input(numbers), Options(given_scales=(f32_one,)))
        self.assertEqual((e4m3.codes[:4].hex(), e4m3.nonfinite_count), ("7f7f7f38", 0))
        e5m2 = quantize_row("fp8_e5m2", f32_input(numbers), Options(given_scales=(f32_one,)))
        self.assertEqual((e5m2.codes[:4].hex(), e5m2.nonfinite_count), ("7f7cfc3c", 0))
        int8 = quantize_row("int8", f32_input(numbers), Options(given_scales=(f16_one,)))
        self.assertEqual((int8.codes[:4].hex(), int8.nonfinite_count), ("00000001", 48))
        fp4 = quantize_row("fp4_row", f32_input(numbers), Options(given_scales=(f16_one,)))
        self.assertEqual((fp4.codes[:2].hex(), fp4.nonfinite_count), ("0020", 48))

    def test_the_cache_s_own_type_keeps_every_bit(self):
        codes = (0x7C01, 0xFFFF, 0x8000, 0x0001)
        self.assertEqual(quantize_row("f16", Input(F16, codes)).codes, struct.pack("<4H", *codes))


class Affine(unittest.TestCase):
    def test_a_constant_row_has_scale_zero_and_comes_back(self):
        row = quantize_affine([1.5] * 8, F16, 8)
        self.assertEqual((row.scale_code, row.zero_code, row.codes), (0, F16.encode(1.5), [0] * 8))
        self.assertEqual(row.decoded, [1.5] * 8)

    def test_the_ends_are_code_zero_and_the_largest(self):
        for param_type in (F16, BF16):
            row = quantize_affine([float(d) for d in range(16)], param_type, 4)
            self.assertEqual(row.codes, list(range(16)))

    def test_minus_zero_is_less_than_zero(self):
        self.assertEqual(quantize_affine([0.0, -0.0], F16, 4).zero_code, 0x8000)

    def test_a_number_too_big_for_the_parameters_makes_the_row_nan(self):
        row = quantize_affine([1.0, 70000.0], F16, 8)
        self.assertEqual((row.scale_code, row.zero_code), (0x7E00, 0x7E00))
        self.assertTrue(all(map(math.isnan, row.decoded)))


class Choices(unittest.TestCase):
    def test_search_never_has_a_larger_error_than_amax(self):
        numbers = normal(64, "1", "search")
        for name in ("nvfp4", "int4_row", "fp8_e4m3"):
            errors = [
                squared_error(numbers, decoded(quantize_row(name, f32_input(numbers), options)))
                for options in (Options(scale_choice="amax"), Options(scale_choice="search"))
            ]
            self.assertLess(errors[1], errors[0] * 1.0001)

    def test_four_over_six_takes_a_group_that_four_fits(self):
        # amax 4 with a 3: under amax/6 the 3 becomes 4.5 -> 4 steps of 2/3; under amax/4 it is 3.
        row = quantize_row("nvfp4", f32_input([4.0, 3.0] * 8), Options(scale_choice="4over6"))
        self.assertEqual((row.codes[0], row.scales[0]), (0x56, E4M3.encode_saturating(1.0)))

    def test_the_first_of_equal_errors_wins(self):
        row = quantize_row("mxfp4", f32_input([6.0] * 32), Options(scale_choice="search"))
        self.assertEqual(row.scales, bytes([127]))

    def test_the_sum_goes_by_lanes(self):
        # 2^24 in lane 0 swallows a lone 1 added to it, but not the 2 that lanes 1 and 9 make.
        numbers = [4096.0, 1.0] + [0.0] * 7 + [1.0] + [0.0] * 6
        self.assertEqual(squared_error(numbers, [0.0] * 16), 2.0**24 + 2)


class Transforms(unittest.TestCase):
    def test_hadamard_of_a_unit_is_constant(self):
        self.assertEqual(hadamard([1.0] + [0.0] * 63), [0.125] * 64)

    def test_hadamard_works_in_blocks_of_the_largest_power_of_two(self):
        row = hadamard([1.0] + [0.0] * 79)
        self.assertEqual(row, [0.25] * 16 + [0.0] * 64)

    def test_hadamard_is_its_own_inverse_when_nothing_rounds(self):
        row = [float(d % 5) for d in range(64)]
        self.assertEqual(hadamard(hadamard(row)), row)

    def test_norm_is_the_nearest_number_to_the_inverse_root(self):
        for size in (2, 4, 8, 32, 64, 128):
            self.assertEqual(inverse_square_root(size), packed("f", 1 / math.sqrt(size)))

    def test_an_absent_term_is_skipped(self):
        row = [-0.0, binary32.from_bits(1)]
        self.assertEqual(repr(Transform().apply(row)), repr(row))


class Packing(unittest.TestCase):
    def test_turbomind_order(self):
        self.assertEqual(packing.pack_turbomind_u4(list(range(8))).hex(), "20643175")

    def test_words_of_eight_are_the_nibbles_in_little_endian_words(self):
        codes = [(7 * d + 3) % 16 for d in range(64)]
        self.assertEqual(packing.pack_words_of_eight(codes), packing.pack_nibbles(codes))
        self.assertEqual(packing.words_of_eight(list(range(8))), [0x76543210])

    def test_offset_binary_is_the_nibble_with_its_top_bit_flipped(self):
        for nibble in range(16):
            offset = packing.twos_complement_to_offset_binary(nibble)
            self.assertEqual(offset, nibble ^ 8)
            self.assertEqual(packing.offset_binary_to_twos_complement(offset), nibble)

    def test_metal_marlin_s_code_clips_the_maximum(self):
        codes, scale = packing.metal_marlin_quantize([6.0, -6.0, 1.0, 0.0])
        self.assertEqual((codes, scale), ([15, 0, 10, 8], F16.encode(1.0)))
        self.assertEqual(packing.metal_marlin_dequantize(codes, scale), [3.5, -4.0, 1.0, 0.0])


class TurboMind(unittest.TestCase):
    def test_sizes(self):
        self.assertEqual(BlockShape(16, 32, 8, 128, 64).layer_bytes, 65536)  # not the fork's 69632
        self.assertEqual(BlockShape(16, 32, 8, 128, 64).scale_block_bytes, 32 * 8 * 64 * 2 * 8)
        self.assertEqual(BlockShape(0, 1, 1, 128, 1).block_bytes, 512)
        self.assertEqual(BlockShape(8, 1, 1, 128, 1).block_bytes, 2 * (128 + 4))
        self.assertEqual(BlockShape(4, 1, 1, 128, 1).block_bytes, 2 * (64 + 4))

    def test_rows_tile_the_block_without_gap_or_overlap(self):
        for policy in (0, 4, 8, 16):
            shape = BlockShape(policy, 2, 3, 32, 4)
            data, scales = bytearray(shape.block_bytes), bytearray(shape.scale_block_bytes)
            rows = [
                (l, h, s, t) for l in range(2) for h in range(3) for s in (0, 1) for t in range(4)
            ]
            for at in rows:
                spans = [
                    (data, shape.data_offset(*at), shape.token_data),
                    (data, shape.param_offset(*at), shape.token_params),
                    (scales, shape.scale_offset(*at), shape.token_scales),
                ]
                for region, begin, size in spans:
                    for byte in range(begin, begin + size):
                        region[byte] += 1
            self.assertEqual(set(data) | set(scales), {1})

    def test_a_constant_block(self):
        shape = BlockShape(8, 1, 1, 16, 1)
        row = [[[[F16.encode(2.0)] * 16]]]
        block, scales = write_block(shape, F16, (row, row))
        self.assertEqual(block.hex(), "00" * 32 + "00000040" * 2)
        self.assertEqual(scales, b"")


if __name__ == "__main__":
    unittest.main()
