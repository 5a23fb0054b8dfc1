// nearest_word: the word that a mistyped one was probably meant to be.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvx::tool {

// The number of letters to insert, delete, replace or swap with their neighbour, so that one word
// becomes the other.
int edit_distance(std::string_view a, std::string_view b);

// The word at the smallest distance, the first of several; none where every word differs in more
// than a third of its letters.
std::optional<std::string> nearest_word(std::string_view mistyped,
                                        const std::vector<std::string>& words);

}  // namespace kvx::tool
