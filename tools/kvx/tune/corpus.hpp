// Corpus: the tokens that tuning reads, in three parts that share no token: what statistics are
// collected from, what options are chosen on, and what the result is judged on.
#pragma once

#include <string>
#include <vector>

#include "runner/tokenizer.hpp"

namespace kvx::tool {

struct CorpusOptions {
  std::string text;     // a file
  std::string prompts;  // a file of JSON lines, or empty: windows of the text
  int num_prompts = 0;  // 0: 8 windows, or all lines of the file
  int context = 2048;   // tokens of a window, and the most of a prompt
  int num_windows = 2;  // of either kind of judging
};

struct Corpus {
  std::vector<std::vector<int>> prompts;    // at most `context` tokens each
  std::vector<std::vector<int>> selection;  // [num_windows] of `context` tokens
  std::vector<std::vector<int>> verification;
  std::string text_hash;  // of the files that statistics were collected from

  int64_t num_prompt_tokens() const;
};

// INVALID_ARGUMENT: a file that cannot be read, a line that is no prompt, fewer prompts or less
// text than asked for.
Result<Corpus> read_corpus(const CorpusOptions& options, const runner::Tokenizer& tokenizer);

}  // namespace kvx::tool
