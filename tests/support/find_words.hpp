// Words of a text by a regular expression. std::regex costs three seconds a file that uses it.
#pragma once

#include <set>
#include <string>

namespace kvx::tests {

// What the pattern's first group matched, wherever the pattern matches.
std::set<std::string> find_words(const std::string& text, const std::string& pattern);

}  // namespace kvx::tests
