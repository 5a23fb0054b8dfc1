// The ChatML template: what a chat looks like to a model that was trained on <|im_start|>.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/result.hpp"
#include "runner/tokenizer.hpp"

namespace kvx::runner {

struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;
};

// UNSUPPORTED: the vocabulary lacks <|im_start|> or <|im_end|>.
Status check_chat_support(const Tokenizer& tokenizer);

// The system message that the model's own template puts before a chat without one; empty for none.
std::string default_system_message(const GgufView& gguf);

// The messages as tokens, ending where the assistant's next words begin. Only the template's marks
// are special: a message cannot forge them.
Result<std::vector<int>> encode_chat(const Tokenizer& tokenizer,
                                     std::span<const ChatMessage> messages);

}  // namespace kvx::runner
