// UnicodeSplit cuts text into the pieces that byte-level BPE merges within: the pre-tokeniser.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/result.hpp"

namespace kvx::runner {

class UnicodeSplit {
 public:
  // name: tokenizer.ggml.pre; smollm, llama-bpe, qwen2 and default are known, UNSUPPORTED
  // otherwise.
  static Result<UnicodeSplit> create(std::string_view name);
  UnicodeSplit(UnicodeSplit&&) noexcept;
  UnicodeSplit& operator=(UnicodeSplit&&) noexcept;
  ~UnicodeSplit();

  // Pieces in UTF-8; together they are the text, with U+FFFD for what is not UTF-8.
  Result<std::vector<std::string>> split(std::string_view text) const;

 private:
  struct Patterns;
  explicit UnicodeSplit(std::unique_ptr<Patterns> patterns);
  std::unique_ptr<Patterns> patterns_;
};

}  // namespace kvx::runner
