// Assignment: which format of a ladder the K and V of every layer, or of each of its heads, have.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/result.hpp"
#include "kv/recipe.hpp"
#include "tools/kvx/tune/candidate.hpp"

namespace kvx::tool {

// One side in one format: what it costs and how far off it is.
struct FormatError {
  std::string format;
  double bits = 0;
  std::vector<double> errors;  // [num_layers, num_parts], ProxyAttention's
};
// The formats of a side, fewest bits first: the recipe's own first, 16 bits last.
struct SideLadder {
  std::vector<FormatError> formats;
};
// What K or V of a recipe may be widened to, without errors yet. Dual-scale formats are among them
// where the cache can hold their blocks.
Result<SideLadder> ladder_of(const kv::Recipe& recipe, int head_dim, int block_size, bool is_k);

enum class CacheSide { kK, kV };

class Assignment {
 public:
  // num_parts: the KV heads of a layer where they are widened one by one, 1 where a layer is
  // widened whole.
  Assignment(SideLadder k, SideLadder v, int num_layers, int num_parts);

  int num_layers() const { return num_layers_; }
  int num_parts() const { return num_parts_; }

  double bits() const;   // a number, averaged over layers, parts and sides
  double error() const;  // the sum over layers, parts and sides
  // Widens the part's side that loses the most error a bit. False: all are as wide as can be, or
  // none is left whose bits go below most_bits.
  bool widen(double most_bits);

  std::vector<KvFormats> formats(int layer) const;  // [num_parts]
  const FormatError& format(CacheSide side, int layer, int part) const;
  double error(CacheSide side, int layer, int part) const;

  double bits(int layer) const;                   // a number, averaged over parts and sides
  double error(CacheSide side, int layer) const;  // the sum over parts

 private:
  struct Step;
  std::optional<Step> best_step(double most_bits) const;
  int place_of(int layer, int part) const { return layer * num_parts_ + part; }

  SideLadder ladders_[2];        // K, V
  std::vector<int> formats_[2];  // [num_layers, num_parts], of the ladder
  int num_layers_;
  int num_parts_;
};

}  // namespace kvx::tool
