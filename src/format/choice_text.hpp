// The words for what a format lets its user choose, as messages and documentation print them.
#pragma once

#include <string>
#include <string_view>

#include "format/facts.hpp"

namespace kvx::format {

inline std::string text_of(int group_size) {
  return group_size == kWholeRow ? "row" : std::to_string(group_size);
}
template <class Enum>
std::string text_of(Enum value) {
  return std::string(name_of(value));
}

template <class T>
std::string list_of(const Choices<T>& choices, std::string_view separator) {
  std::string text;
  for (int i = 0; i < choices.count; ++i) {
    if (i > 0) text += separator;
    text += text_of(choices.values[i]);
  }
  return text;
}

}  // namespace kvx::format
