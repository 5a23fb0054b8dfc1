// find_words, with the one std::regex of all tests.
#include "tests/support/find_words.hpp"

#include <regex>

namespace kvx::tests {

std::set<std::string> find_words(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::set<std::string> words;
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it) {
    words.insert((*it)[1]);
  }
  return words;
}

}  // namespace kvx::tests
