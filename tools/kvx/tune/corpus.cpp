// The windows of a text are dealt out in order: prompts, selection, verification.
#include "tools/kvx/tune/corpus.hpp"

#include <nlohmann/json.hpp>

#include "cache/prefix/content_hash.hpp"
#include "runner/chat_template.hpp"
#include "tools/kvx/files.hpp"

namespace kvx::tool {
namespace {

constexpr int kDefaultWindows = 8;

// The prompt of one line: {"messages": [{"role", "content"}, ...]}, {"prompt": text}, {"text":
// text} or a string.
Result<std::vector<int>> tokens_of_line(const std::string& line, int number,
                                        const runner::Tokenizer& tokenizer) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
  const auto wrong = [number](std::string_view found) {
    return invalid_argument(
        "prompts line {} is {}; expected a string, or an object with prompt, text or messages",
        number, found);
  };
  if (json.is_discarded()) return wrong("no JSON");
  const auto text_of = [](const nlohmann::json& object, const char* name) -> const std::string* {
    const auto found = object.is_object() ? object.find(name) : object.end();
    return found == object.end() ? nullptr : found->get_ptr<const std::string*>();
  };
  const std::string* text = json.get_ptr<const std::string*>();
  if (text == nullptr) text = text_of(json, "prompt");
  if (text == nullptr) text = text_of(json, "text");
  if (text != nullptr) return tokenizer.encode(*text, runner::SpecialTokens::kAsText);
  if (!json.is_object() || !json.contains("messages") || !json["messages"].is_array()) {
    return wrong("something else");
  }
  std::vector<runner::ChatMessage> messages;
  for (const nlohmann::json& message : json["messages"]) {
    const std::string* role = text_of(message, "role");
    const std::string* content = text_of(message, "content");
    if (role == nullptr || content == nullptr) return wrong("a message without role or content");
    messages.push_back({*role, *content});
  }
  return runner::encode_chat(tokenizer, messages);
}

Result<std::vector<std::vector<int>>> read_prompts(const CorpusOptions& options,
                                                   const std::string& content,
                                                   const runner::Tokenizer& tokenizer) {
  std::vector<std::vector<int>> prompts;
  size_t first = 0;
  for (int number = 1; first < content.size(); ++number) {
    const size_t end = std::min(content.find('\n', first), content.size());
    const std::string line = content.substr(first, end - first);
    first = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (options.num_prompts > 0 && static_cast<int>(prompts.size()) == options.num_prompts) break;
    KVX_ASSIGN_OR_RETURN(std::vector<int> tokens, tokens_of_line(line, number, tokenizer));
    if (tokens.empty()) return invalid_argument("prompts line {} has no tokens", number);
    if (static_cast<int>(tokens.size()) > options.context) tokens.resize(options.context);
    prompts.push_back(std::move(tokens));
  }
  if (prompts.empty() || static_cast<int>(prompts.size()) < options.num_prompts) {
    return invalid_argument("prompts is '{}' with {} prompts; num-prompts asks for {}",
                            options.prompts, prompts.size(), std::max(1, options.num_prompts));
  }
  return prompts;
}

}  // namespace

int64_t Corpus::num_prompt_tokens() const {
  int64_t count = 0;
  for (const std::vector<int>& prompt : prompts) count += static_cast<int64_t>(prompt.size());
  return count;
}

Result<Corpus> read_corpus(const CorpusOptions& options, const runner::Tokenizer& tokenizer) {
  Corpus corpus;
  int num_prompt_windows = 0;
  KVX_ASSIGN_OR_RETURN(const std::string text, read_file("text", options.text));
  std::string source = text;
  if (!options.prompts.empty()) {
    KVX_ASSIGN_OR_RETURN(source, read_file("prompts", options.prompts));
    KVX_ASSIGN_OR_RETURN(corpus.prompts, read_prompts(options, source, tokenizer));
  } else {
    num_prompt_windows = options.num_prompts > 0 ? options.num_prompts : kDefaultWindows;
  }
  corpus.text_hash =
      hex(cache::checksum({reinterpret_cast<const uint8_t*>(source.data()), source.size()}));

  KVX_ASSIGN_OR_RETURN(const std::vector<int> tokens,
                       tokenizer.encode(text, runner::SpecialTokens::kAsText));
  const int64_t num_windows = int64_t{num_prompt_windows} + 2 * options.num_windows;
  if (static_cast<int64_t>(tokens.size()) < num_windows * options.context) {
    return invalid_argument(
        "text is '{}' with {} tokens; {} prompts and twice {} windows of {} need {}", options.text,
        tokens.size(), num_prompt_windows, options.num_windows, options.context,
        num_windows * options.context);
  }
  for (int64_t w = 0; w < num_windows; ++w) {
    const auto first = tokens.begin() + w * options.context;
    std::vector<int> window(first, first + options.context);
    const bool is_prompt = w < num_prompt_windows;
    const bool is_selection = w < num_prompt_windows + options.num_windows;
    (is_prompt      ? corpus.prompts
     : is_selection ? corpus.selection
                    : corpus.verification)
        .push_back(std::move(window));
  }
  return corpus;
}

}  // namespace kvx::tool
