// Optimal string alignment: Levenshtein's distance with swaps of neighbours.
#include "tools/kvx/nearest_word.hpp"

#include <algorithm>

namespace kvx::tool {

int edit_distance(std::string_view a, std::string_view b) {
  // distance[i][j]: between the first i letters of a and the first j of b.
  std::vector<std::vector<int>> distance(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) distance[i][0] = static_cast<int>(i);
  for (size_t j = 0; j <= b.size(); ++j) distance[0][j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = distance[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      distance[i][j] = std::min({replaced, distance[i - 1][j] + 1, distance[i][j - 1] + 1});
      const bool is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_swap) distance[i][j] = std::min(distance[i][j], distance[i - 2][j - 2] + 1);
    }
  }
  return distance[a.size()][b.size()];
}

std::optional<std::string> nearest_word(std::string_view mistyped,
                                        const std::vector<std::string>& words) {
  std::optional<std::string> nearest;
  int least = 0;
  for (const std::string& word : words) {
    const int distance = edit_distance(mistyped, word);
    const auto most = static_cast<int>((std::max(mistyped.size(), word.size()) + 2) / 3);
    if (distance > most || (nearest && distance >= least)) continue;
    nearest = word;
    least = distance;
  }
  return nearest;
}

}  // namespace kvx::tool
