// Block types against gguf-py's dequantisation of random blocks.
#include "runner/dequantize.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "tests/runner/golden_file.hpp"

namespace kvx::runner {
namespace {

TEST(Dequantize, DecodesEveryTypeAsTheReferenceDoes) {
  const auto cases = tests::golden_cases("dequantize");
  ASSERT_EQ(cases.size(), 11u);
  for (const auto& golden : cases) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    const auto type = tensor_type_from(golden.at("type").get<uint32_t>());
    ASSERT_TRUE(type.has_value());
    const std::string blocks = tests::bytes_from_hex(golden.at("blocks_hex"));
    const auto expected = golden.at("values_hex").get<std::vector<std::string>>();
    const auto elements = static_cast<int64_t>(expected.size());
    ASSERT_EQ(bytes_of_row(*type, elements), static_cast<int64_t>(blocks.size()));

    std::vector<float> values(expected.size());
    dequantize(*type, reinterpret_cast<const uint8_t*>(blocks.data()), elements, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      const auto bits = static_cast<uint32_t>(std::stoul(expected[i], nullptr, 16));
      ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), bits)
          << "element " << i << ": " << std::bit_cast<float>(bits) << " expected, found "
          << values[i];
    }
  }
}

TEST(Dequantize, KnowsNoOtherTypes) {
  for (const uint32_t number : {4u, 5u, 9u, 10u, 11u, 15u, 16u, 24u, 31u, 39u, 0xFFFFFFFFu}) {
    EXPECT_FALSE(tensor_type_from(number).has_value()) << number;
  }
}

}  // namespace
}  // namespace kvx::runner
