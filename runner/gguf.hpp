// GgufView reads a GGUF file's header: named values and named tensors, every access checked.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/result.hpp"
#include "runner/dequantize.hpp"

namespace kvx::runner {

// Strings lie in the file; the view must not outlive its bytes.
using GgufValue = std::variant<bool, int64_t, uint64_t, double, std::string_view,
                               std::vector<int64_t>, std::vector<uint64_t>, std::vector<double>,
                               std::vector<bool>, std::vector<std::string_view>>;

struct GgufTensor {
  std::string_view name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> dims;  // dims[0] is contiguous: a row
  std::span<const uint8_t> data;

  int64_t row_elements() const { return dims[0]; }
  int64_t num_rows() const;
  int64_t row_bytes() const { return bytes_of_row(type, dims[0]); }
  const uint8_t* row(int64_t index) const { return data.data() + index * row_bytes(); }
};

class GgufView {
 public:
  // INVALID_ARGUMENT: not a GGUF file, truncated, or a count, string, dimension or offset that the
  // file cannot hold; UNSUPPORTED: a version or tensor type that we do not read.
  static Result<GgufView> parse(std::span<const uint8_t> file);

  // Null when the key or name is absent.
  const GgufValue* find(std::string_view key) const;
  const GgufTensor* find_tensor(std::string_view name) const;

  // INVALID_ARGUMENT: absent, of another type, or outside [least, most].
  Result<int64_t> integer(std::string_view key, int64_t least, int64_t most) const;
  Result<int64_t> integer_or(std::string_view key, int64_t least, int64_t most,
                             int64_t fallback) const;
  Result<double> number_or(std::string_view key, double fallback) const;
  Result<bool> flag_or(std::string_view key, bool fallback) const;
  Result<std::string_view> string(std::string_view key) const;
  Result<std::string_view> string_or(std::string_view key, std::string_view fallback) const;
  Result<std::vector<std::string_view>> strings(std::string_view key) const;
  Result<std::vector<int64_t>> integers(std::string_view key) const;

  const std::map<std::string_view, GgufTensor>& tensors() const { return tensors_; }

 private:
  std::map<std::string_view, GgufValue> values_;
  std::map<std::string_view, GgufTensor> tensors_;
};

}  // namespace kvx::runner
