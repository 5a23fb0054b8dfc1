// GPT-2's alphabet: every byte has one printable character, so that a vocabulary is plain text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvx::runner {

// The character of a byte, in UTF-8.
std::string byte_to_character(uint8_t byte);

// The bytes that text in the alphabet stands for; empty when a character is not of the alphabet.
std::optional<std::string> characters_to_bytes(std::string_view text);

}  // namespace kvx::runner
