// <|im_start|>role\ncontent<|im_end|>\n for each message, then <|im_start|>assistant\n.
#include "runner/chat_template.hpp"

#include <fmt/format.h>

namespace kvx::runner {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";

Status append_text(const Tokenizer& tokenizer, std::string_view text, std::vector<int>& out) {
  KVX_ASSIGN_OR_RETURN(const auto tokens, tokenizer.encode(text, SpecialTokens::kAsText));
  out.insert(out.end(), tokens.begin(), tokens.end());
  return {};
}

// In a Jinja string a line break may be written as the two characters \n.
std::string with_line_breaks(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_break = text.substr(i).starts_with("\\n");
    out.push_back(is_break ? '\n' : text[i]);
    if (is_break) ++i;
  }
  return out;
}

}  // namespace

Status check_chat_support(const Tokenizer& tokenizer) {
  for (const std::string_view mark : {kStart, kEnd}) {
    if (!tokenizer.find_special(mark)) {
      return unsupported("the model's vocabulary has no {}; the ChatML template needs it", mark);
    }
  }
  return {};
}

// Templates are Jinja programs; this reads only the literal that ChatML models put there.
std::string default_system_message(const GgufView& gguf) {
  const auto text = gguf.string_or("tokenizer.chat_template", "");
  if (!text.ok()) return {};
  const std::string source = with_line_breaks(text.value());
  const std::string opening = fmt::format("{}system\n", kStart);
  for (size_t at = source.find(opening); at != std::string::npos;
       at = source.find(opening, at + 1)) {
    const size_t begin = at + opening.size();
    const size_t end = source.find(kEnd, begin);
    const size_t quote = source.find('\'', begin);
    // A literal that ends before its quote does is a fixed message; otherwise it joins variables.
    if (end != std::string::npos && end < quote) return source.substr(begin, end - begin);
  }
  return {};
}

Result<std::vector<int>> encode_chat(const Tokenizer& tokenizer,
                                     std::span<const ChatMessage> messages) {
  KVX_RETURN_IF_ERROR(check_chat_support(tokenizer));
  const int start = *tokenizer.find_special(kStart);
  const int end = *tokenizer.find_special(kEnd);
  std::vector<int> tokens;
  for (const ChatMessage& message : messages) {
    tokens.push_back(start);
    KVX_RETURN_IF_ERROR(
        append_text(tokenizer, fmt::format("{}\n{}", message.role, message.content), tokens));
    tokens.push_back(end);
    KVX_RETURN_IF_ERROR(append_text(tokenizer, "\n", tokens));
  }
  tokens.push_back(start);
  KVX_RETURN_IF_ERROR(append_text(tokenizer, "assistant\n", tokens));
  return tokens;
}

}  // namespace kvx::runner
