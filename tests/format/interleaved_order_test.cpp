// Interleaved order holds the codes that nibbles hold, each in the bits that the table in
// format/interleaved_order.hpp names.
#include "format/interleaved_order.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/float16.hpp"
#include "format/small_float.hpp"

namespace kvx::tests {
namespace {

// Of code i in a interleaved: its sign's bit; its magnitude lies at bit 3 i.
constexpr int kSignBit[] = {13, 14, 12, 15};

uint32_t code_of_interleaved(uint32_t interleaved, int i) {
  return (interleaved >> (3 * i) & 7u) | ((interleaved >> kSignBit[i] & 1u) << 3);
}
uint32_t code_of_nibbles(uint32_t nibbles, int i) {
  return nibbles >> (4 * i) & 0xFu;
}

// Calls each(word, other word's half) for every interleaved in the lower half and in the upper one,
// beside bits that could carry into it or take from it.
template <class Each>
void for_every_half(const Each& each) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    for (const uint32_t beside : {0x0000u, 0xFFFFu, 0x5A3Cu}) {
      each(half | beside << 16, 0);
      each(half << 16 | beside, 16);
    }
  }
}

TEST(Interleaved, HoldEveryFourCodes) {
  for_every_half([](uint32_t nibbles, int at) {
    const uint32_t interleaved = format::interleaved_from_nibbles(nibbles);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(code_of_interleaved(interleaved >> at & 0xFFFFu, i),
                code_of_nibbles(nibbles >> at, i));
    }
    ASSERT_EQ(format::nibbles_from_interleaved(interleaved), nibbles);
  });
}

TEST(Interleaved, BecomeTheirCodesNumbersInF16) {
  for_every_half([](uint32_t interleaved, int at) {
    const uint32_t pairs[] = {format::f16x2_from_interleaved<0>(interleaved),
                              format::f16x2_from_interleaved<1>(interleaved),
                              format::f16x2_from_interleaved<2>(interleaved),
                              format::f16x2_from_interleaved<3>(interleaved)};
    for (int i = 0; i < 4; ++i) {
      const auto code = static_cast<uint8_t>(code_of_interleaved(interleaved >> at & 0xFFFFu, i));
      const float number = f16_to_f32(static_cast<uint16_t>(pairs[i] >> at));
      ASSERT_EQ(number, format::E2M1::decode(code) * 0x1p-14f);
      ASSERT_EQ(std::signbit(number), code >= 8);
    }
  });
}

TEST(Interleaved, ComeFromBytes) {
  const auto byte_of = [](uint32_t code) { return (code & 8u) << 4 | (code & 7u) << 1 | 0x71u; };
  for_every_half([&](uint32_t nibbles, int at) {
    uint32_t c0_c2 = 0, c1_c3 = 0;
    for (int half = 0; half < 32; half += 16) {
      const auto code = [&](int i) { return code_of_nibbles(nibbles >> half, i); };
      c0_c2 |= (byte_of(code(0)) | byte_of(code(2)) << 8) << half;
      c1_c3 |= (byte_of(code(1)) | byte_of(code(3)) << 8) << half;
    }
    ASSERT_EQ(format::interleaved_from_e5m2(c0_c2, c1_c3),
              format::interleaved_from_nibbles(nibbles))
        << at;
  });
}

}  // namespace
}  // namespace kvx::tests
