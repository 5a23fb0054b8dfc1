// Features: a set of a provider's features, with the masks of kvx_features_t. A check needs some
// features and runs for every provider that claims them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/conformance/provider.hpp"

namespace kvx::conformance {

// The masks of kvx_features_t, in its order.
enum Mask {
  kTableFlags,
  kLayouts,
  kCacheDtypes,
  kIoDtypes,
  kIndexDtypes,
  kTableFormats,
  kMemoryTypes,
  kScaleGranularities,
  kTraits,
  kFormats,
  kBlockFormats,
  kNumMasks
};

class Features {
 public:
  // Bit `number` of a mask.
  Features& add(Mask mask, int number) { return add_flags(mask, uint64_t{1} << number); }
  Features& add_flags(Mask mask, uint64_t flags) {
    bits_[mask] |= flags;
    return *this;
  }
  Features& add(const Features& other);

  bool covers(const Features& needed) const { return (needed - *this).is_empty(); }
  bool is_empty() const { return bits_ == decltype(bits_){}; }
  friend Features operator-(const Features& all, const Features& without);

  // "layout HND_PACKED", "trait BEAMS", ...
  std::vector<std::string> names() const;

 private:
  std::array<uint64_t, kNumMasks> bits_{};
};

// The features that the specification requires of every provider of 1.1.
Features claims_of_v1_1();
// The result of kvx_query_features. Throws std::runtime_error when the call fails.
Features claims_queried(const Provider& provider);

}  // namespace kvx::conformance
