// Tokenizer: byte-level BPE (GPT-2's) from a GGUF's vocabulary and merges.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/result.hpp"
#include "runner/gguf.hpp"
#include "runner/unicode_split.hpp"

namespace kvx::runner {

enum class SpecialTokens {
  kParse,   // "<|im_end|>" in the text is the token: for templates
  kAsText,  // it is ten characters: for text that others wrote. User-defined tokens are no marks of
            // the template, but words of the vocabulary, and are found all the same
};

class Tokenizer {
 public:
  // UNSUPPORTED: a tokenizer.ggml.model other than gpt2 or an unknown pre-tokeniser.
  // INVALID_ARGUMENT: a token, merge or id that contradicts the others.
  static Result<Tokenizer> create(const GgufView& gguf);

  // Any bytes; UnicodeSplit says how those that are not UTF-8 are cut. A byte without a token
  // becomes the unknown token; INVALID_ARGUMENT where the model has none.
  Result<std::vector<int>> encode(std::string_view text, SpecialTokens special) const;

  // A token's bytes, not always whole characters; a special token's are its name.
  // Requires: 0 <= token < size().
  std::string decode(int token) const { return bytes_[static_cast<size_t>(token)]; }
  std::string decode(const std::vector<int>& tokens) const;

  int size() const { return static_cast<int>(bytes_.size()); }
  bool is_special(int token) const { return is_special_[static_cast<size_t>(token)]; }
  bool ends_generation(int token) const;
  std::optional<int> find_special(std::string_view name) const;
  // The model wants its first token in front of every text; encode does not add it.
  bool adds_bos() const { return adds_bos_; }
  std::optional<int> bos() const { return bos_; }

 private:
  struct Merge {
    int rank = 0;
    int token = 0;
  };
  struct Special {
    std::string text;
    int token = 0;
    bool is_word = false;  // user-defined
  };

  explicit Tokenizer(UnicodeSplit split) : split_(std::move(split)) {}
  Status read_tokens(const GgufView& gguf);
  void keep_whole_words();
  Status read_merges(const GgufView& gguf);
  Status read_ids(const GgufView& gguf);

  Status encode_text(std::string_view text, std::vector<int>& out) const;
  const Special* special_at(std::string_view text, SpecialTokens special) const;
  Status bytes_to_tokens(std::string_view piece, std::vector<int>& out) const;
  const Merge* find_merge(int left, int right) const;
  void merge(std::vector<int>& tokens) const;

  UnicodeSplit split_;
  std::vector<std::string> bytes_;                    // [size]
  std::vector<bool> is_special_;                      // [size]
  std::vector<Special> special_;                      // sorted by text
  std::unordered_map<std::string, int> whole_words_;  // empty where every word is merged
  std::unordered_map<uint64_t, Merge> merges_;        // by left << 32 | right
  std::vector<int> token_of_byte_;                    // [256], -1: none
  std::optional<int> unknown_;
  std::optional<int> bos_;
  std::optional<int> eos_;
  std::optional<int> eot_;
  bool adds_bos_ = false;
};

// The length of text without a last character that is not all there yet: what a stream may print.
size_t complete_utf8_length(std::string_view text);

}  // namespace kvx::runner
