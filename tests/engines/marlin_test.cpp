// metal-marlin's bytes against the oracle's.
#include "engines/marlin.hpp"

#include <gtest/gtest.h>

#include "format/packing.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/golden.hpp"

namespace kvx::engines {
namespace {

using namespace kvx::tests;  // NOLINT: golden readers

std::vector<uint8_t> packed(const std::string& nibbles) {
  std::vector<uint8_t> codes;
  for (const uint32_t code : patterns(nibbles, 1)) codes.push_back(static_cast<uint8_t>(code));
  std::vector<uint8_t> bytes(codes.size() / 2);
  format::pack<format::Packing::kWords>(codes.data(), 0, static_cast<int>(codes.size()),
                                        bytes.data());
  return bytes;
}

TEST(Marlin, OffsetBinaryAndTwosComplementAreTheOraclesBothWays) {
  const Json golden = read_golden("packing")["offset_binary"];
  const std::vector<uint8_t> twos = packed(golden["twos_complement"]);
  const std::vector<uint8_t> offset = packed(golden["offset_binary"]);
  std::vector<uint8_t> bytes = twos;
  swap_twos_complement_and_offset_binary(bytes);
  EXPECT_TRUE(same_bytes(offset, bytes));
  swap_twos_complement_and_offset_binary(bytes);
  EXPECT_TRUE(same_bytes(twos, bytes));
}

TEST(Marlin, AZeroFilledBufferIsMinusEightInOffsetBinary) {
  std::vector<uint8_t> bytes(4, 0);
  swap_twos_complement_and_offset_binary(bytes);
  EXPECT_EQ(bytes, std::vector<uint8_t>(4, 0x88));  // two's complement -8, twice a byte
}

TEST(Marlin, TheLinearFp4CodeIsTheOracles) {
  const Json golden = read_golden("packing")["metal_marlin_fp4"];
  ASSERT_GE(golden.size(), 10u);
  for (const Json& row : golden) {
    SCOPED_TRACE(row["row"].get<std::string>());
    const int head_dim = row["head_dim"];
    const std::vector<uint8_t> expected = packed(row["codes"]);
    const auto scale = static_cast<uint16_t>(patterns(row["scale_f16"], 4).at(0));
    const std::vector<float> input = floats_of_hex(row["input"]);
    if (!input.empty()) {  // "every_code" has none: it is for reading
      std::vector<uint8_t> words(head_dim / 2);
      EXPECT_EQ(encode_metal_marlin_linear_fp4(input.data(), head_dim, words.data()), scale);
      EXPECT_TRUE(same_bytes(expected, words));
    }
    std::vector<float> decoded(head_dim);
    decode_metal_marlin_linear_fp4(expected.data(), scale, head_dim, decoded.data());
    const std::vector<uint8_t> wanted = memory_of(DType::kF32, row["decoded"]);
    EXPECT_TRUE(
        same_bytes(wanted, {reinterpret_cast<const uint8_t*>(decoded.data()), decoded.size() * 4}));
  }
}

}  // namespace
}  // namespace kvx::engines
