// Printable Latin-1 bytes stand for themselves; the other 68, in order, for U+0100 and up.
#include "runner/byte_alphabet.hpp"

#include <unicode/utf8.h>

#include <array>

namespace kvx::runner {
namespace {

constexpr int kFirstStandIn = 0x100;
constexpr int kNumStandIns = 68;

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<int, 256> character_of{};
  std::array<int, kFirstStandIn + kNumStandIns> byte_of{};  // -1: no character of the alphabet

  constexpr Alphabet() {
    for (int& byte : byte_of) byte = -1;
    int stand_in = kFirstStandIn;
    for (int byte = 0; byte < 256; ++byte) {
      const int character = stands_for_itself(byte) ? byte : stand_in++;
      character_of[static_cast<size_t>(byte)] = character;
      byte_of[static_cast<size_t>(character)] = byte;
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

std::string byte_to_character(uint8_t byte) {
  const int character = kAlphabet.character_of[byte];
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xC0 | character >> 6), static_cast<char>(0x80 | (character & 0x3F))};
}

std::optional<std::string> characters_to_bytes(std::string_view text) {
  std::string bytes;
  const auto* data = reinterpret_cast<const uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    UChar32 character;
    U8_NEXT(data, i, text.size(), character);
    if (character < 0 || character >= static_cast<UChar32>(kAlphabet.byte_of.size())) return {};
    const int byte = kAlphabet.byte_of[static_cast<size_t>(character)];
    if (byte < 0) return {};
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

}  // namespace kvx::runner
