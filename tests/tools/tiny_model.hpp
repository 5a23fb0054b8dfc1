// The tests' tiny Llama and DeepSeek with a tokenizer, so that the tool's commands run from end to
// end in a moment. Its words are noise; what is tested is the way that they take.
#pragma once

#include "tests/runner/tiny_deepseek.hpp"
#include "tests/runner/tiny_llama.hpp"

namespace kvx::tests {

inline constexpr int kTinyContext = 64;
inline constexpr int kTinyHeadDim = 8;

// One token a letter, a digit, a full stop or a blank, and ChatML's two marks: 40 in all, without
// merges, so that a text has as many tokens as characters.
inline GgufWriter with_tiny_tokenizer(GgufWriter writer) {
  std::vector<std::string> tokens = {"<|im_start|>", "<|im_end|>", "\u0120", "\u010A"};
  for (char c = 'a'; c <= 'z'; ++c) tokens.emplace_back(1, c);
  for (char c = '0'; c <= '8'; ++c) tokens.emplace_back(1, c);
  tokens.emplace_back(".");
  std::vector<int32_t> types(tokens.size(), 1);  // normal
  types[0] = types[1] = 3;                       // control
  writer.text("tokenizer.ggml.model", "gpt2");
  writer.text("tokenizer.ggml.pre", "default");
  writer.strings("tokenizer.ggml.tokens", tokens);
  writer.ints("tokenizer.ggml.token_type", types);
  writer.strings("tokenizer.ggml.merges", {});
  writer.u32("tokenizer.ggml.eos_token_id", 1);
  return writer;
}

inline GgufWriter tiny_chat_model(uint32_t context = kTinyContext) {
  return with_tiny_tokenizer(tiny_llama(false, context));
}

// num_characters of letters and blanks, the same every time.
inline std::string tiny_text(int num_characters) {
  std::string text;
  uint32_t state = 1;
  while (static_cast<int>(text.size()) < num_characters) {
    state = state * 1664525u + 1013904223u;
    const uint32_t letter = (state >> 16) % 27;
    text += letter == 26 ? ' ' : static_cast<char>('a' + letter);
  }
  return text;
}

}  // namespace kvx::tests
