// ConfigKeys: an architecture's values in a GGUF, "llama.block_count", each within bounds.
#pragma once

#include <cmath>
#include <string>

#include "runner/gguf.hpp"

namespace kvx::runner {

// Generous: far above any model, far below where a product of two could overflow.
inline constexpr int64_t kMostLayers = 4096;
inline constexpr int64_t kMostSize = 1 << 20;
inline constexpr int64_t kMostHeads = 4096;
inline constexpr int64_t kMostHeadDim = 4096;
inline constexpr int64_t kMostContext = int64_t{1} << 30;

// Names are without the architecture, "block_count"; errors name the whole key.
class ConfigKeys {
 public:
  ConfigKeys(const GgufView& gguf, std::string_view architecture)
      : gguf_(gguf), prefix_(std::string(architecture) + ".") {}

  const GgufView& gguf() const { return gguf_; }
  std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  bool contains(std::string_view name) const { return gguf_.find(key(name)) != nullptr; }

  // 1 to most.
  Status read(std::string_view name, int64_t most, int& out) const {
    KVX_ASSIGN_OR_RETURN(const int64_t value, gguf_.integer(key(name), 1, most));
    out = static_cast<int>(value);
    return {};
  }
  Result<int64_t> integer_or(std::string_view name, int64_t least, int64_t most,
                             int64_t fallback) const {
    return gguf_.integer_or(key(name), least, most, fallback);
  }
  Result<bool> flag_or(std::string_view name, bool fallback) const {
    return gguf_.flag_or(key(name), fallback);
  }
  Result<std::string_view> string_or(std::string_view name, std::string_view fallback) const {
    return gguf_.string_or(key(name), fallback);
  }
  Result<double> positive(std::string_view name, double fallback) const {
    KVX_ASSIGN_OR_RETURN(const double value, gguf_.number_or(key(name), fallback));
    if (value > 0 && std::isfinite(value)) return value;
    return invalid_argument("GGUF value {} is {}; a positive number was expected", key(name),
                            value);
  }

 private:
  const GgufView& gguf_;
  std::string prefix_;
};

}  // namespace kvx::runner
