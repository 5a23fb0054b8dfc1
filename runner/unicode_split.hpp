// UnicodeSplit cuts text into the pieces that byte-level BPE merges within: the pre-tokeniser.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "core/result.hpp"

namespace kvx::runner {

class UnicodeSplit {
 public:
  // name: tokenizer.ggml.pre; smollm, llama-bpe, qwen2, gpt-2 and default are known, UNSUPPORTED
  // otherwise.
  static Result<UnicodeSplit> create(std::string_view name);
  UnicodeSplit(UnicodeSplit&&) noexcept;
  UnicodeSplit& operator=(UnicodeSplit&&) noexcept;
  ~UnicodeSplit();

  // Views into text, in order; together they are the text, byte for byte. What is not UTF-8 is
  // classed as U+FFFD (neither letter, number nor space), but stays what it was.
  Result<std::vector<std::string_view>> split(std::string_view text) const;

 private:
  struct Patterns;
  explicit UnicodeSplit(std::unique_ptr<Patterns> patterns);
  std::unique_ptr<Patterns> patterns_;
};

}  // namespace kvx::runner
