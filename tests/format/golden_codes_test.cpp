// The oracle's codes, scales and packings, one number at a time.
#include <gtest/gtest.h>

#include <cmath>

#include "format/packing.hpp"
#include "format/scale.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/golden.hpp"

namespace kvx::format {
namespace {

using namespace kvx::tests;  // NOLINT: golden readers

// Calls f with the codec that the golden files name.
template <class F>
void with_codec(const std::string& name, F f) {
  if (name == "int8") return f(Int8Codec());
  if (name == "int4") return f(Int4Codec());
  if (name == "e2m1") return f(E2M1Codec());
  if (name == "e4m3") return f(E4M3Codec());
  if (name == "e5m2") return f(E5M2Codec());
  FAIL() << "no codec is named " << name;
}

bool same_number(float expected, float found) {
  if (std::isnan(expected)) return std::isnan(found);
  return std::bit_cast<uint32_t>(expected) == std::bit_cast<uint32_t>(found);
}

TEST(GoldenCodes, EveryCodeDecodesAsTheOracleSays) {
  const Json golden = read_golden("codes");
  for (const Json& element : golden["elements"]) {
    with_codec(element["type"], [&](auto codec) {
      const std::vector<float> values = floats_of_hex(element["decode"]);
      EXPECT_EQ(values.size(), size_t{1} << codec.kBits);
      for (size_t code = 0; code < values.size(); ++code) {
        EXPECT_TRUE(same_number(values[code], codec.decode(static_cast<uint8_t>(code))))
            << element["type"] << " code " << code;
      }
    });
  }
}

TEST(GoldenCodes, ValuesMiddlesAndNeighboursEncodeAsTheOracleSays) {
  const Json golden = read_golden("codes");
  for (const Json& element : golden["elements"]) {
    with_codec(element["type"], [&](auto codec) {
      const std::vector<float> inputs = floats_of_hex(element["encode_input"]);
      const auto codes = patterns(element["encode_code"], codec.kBits / 4);
      ASSERT_EQ(inputs.size(), codes.size());
      for (size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_EQ(codec.encode(inputs[i]), codes[i]) << element["type"] << " of " << inputs[i];
      }
    });
  }
}

TEST(GoldenCodes, NonfiniteInputsUnderAGivenScaleAreTheOracles) {
  const Json golden = read_golden("codes");
  for (const Json& row : golden["given_nonfinite"]) {
    with_codec(row["type"], [&](auto codec) {
      const std::vector<float> inputs = floats_of_hex(row["input"]);
      const auto codes = patterns(row["code"], codec.kBits / 4);
      for (size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_EQ(codec.encode_nonfinite(inputs[i]), codes[i]) << row["type"] << " " << inputs[i];
      }
      EXPECT_EQ(codec.kCountsNonfinite, row["counted"].get<bool>()) << row["type"];
    });
  }
}

TEST(GoldenCodes, SixteenBitFloatsConvertAsTheOracleSays) {
  const Json golden = read_golden("codes");
  for (const Json& row : golden["sixteen_bit"]) {
    const bool is_f16 = row["type"] == "f16";
    const std::vector<float> inputs = floats_of_hex(row["encode_input"]);
    const auto codes = patterns(row["encode_code"], 4);
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(is_f16 ? f32_to_f16(inputs[i]) : f32_to_bf16(inputs[i]), codes[i]) << inputs[i];
    }
    const auto bits = patterns(row["decode_code"], 4);
    const std::vector<float> values = floats_of_hex(row["decode"]);
    for (size_t i = 0; i < bits.size(); ++i) {
      const auto code = static_cast<uint16_t>(bits[i]);
      EXPECT_TRUE(same_number(values[i], is_f16 ? f16_to_f32(code) : bf16_to_f32(code))) << code;
    }
  }
}

TEST(GoldenCodes, E8M0BytesAndRulesAreTheOracles) {
  const Json golden = read_golden("codes")["e8m0"];
  const std::vector<float> values = floats_of_hex(golden["decode"]);
  ASSERT_EQ(values.size(), 256u);
  for (uint32_t code = 0; code < 256; ++code) {
    EXPECT_TRUE(same_number(values[code], E8M0::decode(code))) << code;
  }
  const std::vector<float> amax = floats_of_hex(golden["amax"]);
  const auto ceil = patterns(golden["e8m0_ceil"], 2);
  const auto floor = patterns(golden["e8m0_floor"], 2);
  for (size_t i = 0; i < amax.size(); ++i) {
    EXPECT_EQ(e8m0_scale(ScaleRule::kE8M0Ceil, amax[i]).bits, ceil[i]) << amax[i];
    EXPECT_EQ(e8m0_scale(ScaleRule::kE8M0Floor, amax[i]).bits, floor[i]) << amax[i];
  }
}

TEST(GoldenCodes, ComputedScalesAreTheOracles) {
  const Json golden = read_golden("codes");
  for (const Json& row : golden["computed_scales"]) {
    const ScaleType type =
        enum_named(row["scale_type"].get<std::string>(),
                   {ScaleType::kF32, ScaleType::kF16, ScaleType::kBF16, ScaleType::kE4M3});
    const ScaleMaker maker = {type, ScaleRule::kAmax, float_of_hex(row["tensor_scale"]),
                              type == ScaleType::kE4M3};
    const std::vector<float> amax = floats_of_hex(row["amax"]);
    const auto codes = patterns(row["scale_code"], 2 * bytes_of(type));
    ASSERT_EQ(amax.size(), codes.size());
    with_codec(row["element"], [&](auto codec) {
      for (size_t i = 0; i < amax.size(); ++i) {
        EXPECT_EQ(maker.make(codec.kQmax, amax[i]).bits, codes[i])
            << row["element"] << " " << row["scale_type"] << " of amax " << amax[i];
      }
    });
  }
}

TEST(GoldenCodes, PackingsAreTheOracles) {
  const Json golden = read_golden("packing");
  for (const Json& row : golden["packings"]) {
    std::vector<uint8_t> codes;
    for (const uint32_t code : patterns(row["codes"], 1)) {
      codes.push_back(static_cast<uint8_t>(code));
    }
    const int n = static_cast<int>(codes.size());
    std::vector<uint8_t> packed(n / 2);
    pack<Packing::kNibbles>(codes.data(), 0, n, packed.data());
    EXPECT_TRUE(same_bytes(bytes_of_hex(row["nibbles"]), packed));
    pack<Packing::kWords>(codes.data(), 0, n, packed.data());
    EXPECT_TRUE(same_bytes(bytes_of_hex(row["words_of_eight_bytes"]), packed));
    pack<Packing::kTurboMind>(codes.data(), 0, n, packed.data());
    EXPECT_TRUE(same_bytes(bytes_of_hex(row["turbomind_u4"]), packed));
    std::vector<uint8_t> unpacked(n);
    unpack<Packing::kTurboMind>(packed.data(), 0, n, unpacked.data());
    EXPECT_TRUE(same_bytes(codes, unpacked));
  }
}

}  // namespace
}  // namespace kvx::format
