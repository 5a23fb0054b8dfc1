// kvx run: writes text with a model on the cache of your choice; a chat when no prompt is given.
#include <cstdio>
#include <iostream>

#include "runner/chat_template.hpp"
#include "runner/generate.hpp"
#include "runner/kv_attention.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/recipe_list.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {
namespace {

struct RunOptions {
  std::string model;
  std::string prompt;
  bool is_raw = false;
  std::string cache = "bf16";
  OverrideTexts overrides;
  int context = 0;  // 0: the model's, up to kMostDefaultContext
  int block_size = 64;
  std::string products = "f32";
  int threads = 0;
  runner::GenerateOptions generate;
};

// Models promise contexts that nobody wants to pay for unasked.
constexpr int kMostDefaultContext = 8192;

// A model with its cache, ready to write.
struct Session {
  Engine engine;
  LoadedModel loaded;
  std::unique_ptr<runner::KvAttention> attention;
};

Result<Session> open_session(const RunOptions& options) {
  runner::KvAttentionOptions cache;
  KVX_ASSIGN_OR_RETURN(cache.recipe, kv::parse_recipe(options.cache));
  KVX_ASSIGN_OR_RETURN(cache.overrides, parse_overrides(options.overrides));
  cache.block_size = options.block_size;
  KVX_ASSIGN_OR_RETURN(Engine engine, make_engine(options.threads));
  KVX_ASSIGN_OR_RETURN(LoadedModel loaded,
                       load_model(options.model, options.products, *engine.executor));
  const runner::ModelConfig& model = loaded.model->config();
  KVX_RETURN_IF_ERROR(check_context("ctx", options.context, model));
  cache.max_tokens =
      options.context > 0 ? options.context : std::min(kMostDefaultContext, model.context_length);
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::KvAttention> attention,
                       runner::KvAttention::create(model, cache, *engine.executor));
  return Session{std::move(engine), std::move(loaded), std::move(attention)};
}

int64_t context_of(const Session& session) {
  return session.attention->cache().config().max_tokens_per_sequence;
}

// The prompt and at least one token of an answer must fit.
Status check_fits(const Session& session, size_t num_tokens) {
  const int64_t used = session.attention->num_tokens();
  if (used + static_cast<int64_t>(num_tokens) < context_of(session)) return {};
  return invalid_argument("prompt has {} tokens after {}; the context is {} tokens", num_tokens,
                          used, context_of(session));
}

Result<runner::GenerateResult> write(Session& session, std::span<const int> prompt,
                                     runner::GenerateOptions options) {
  KVX_RETURN_IF_ERROR(check_fits(session, prompt.size()));
  const int64_t room =
      context_of(session) - session.attention->num_tokens() - static_cast<int64_t>(prompt.size());
  options.max_tokens = static_cast<int>(std::min<int64_t>(options.max_tokens, room));
  const auto print = [](std::string_view text) {
    fmt::print("{}", text);
    return std::fflush(stdout) == 0;  // a reader that went away ends the text
  };
  return runner::generate(*session.loaded.model, session.loaded.tokenizer, *session.attention,
                          prompt, options, print);
}

// "prefill 35 tokens, 290 tokens/s; decode ...": to stderr, so that stdout is the text alone.
void print_speed(const Session& session, const runner::GenerateResult& result) {
  const auto rate = [](int tokens, double seconds) { return seconds > 0 ? tokens / seconds : 0.0; };
  const int64_t num_tokens = session.attention->num_tokens();
  fmt::print(stderr,
             "prefill {} tokens, {:.0f} tokens/s; decode {} tokens, {:.1f} tokens/s; cache {}: {} "
             "bytes for {} tokens\n",
             result.prompt_tokens, rate(result.prompt_tokens, result.prefill_seconds),
             result.decoded_tokens, rate(result.decoded_tokens, result.decode_seconds),
             session.attention->cache().config().recipe.text,
             session.attention->cache().sequence_bytes(num_tokens).total(), num_tokens);
}

// What a chat begins with: the model's own system message, if it has one, and the user's words.
std::vector<runner::ChatMessage> first_messages(const Session& session, std::string words) {
  std::vector<runner::ChatMessage> messages;
  std::string system = runner::default_system_message(session.loaded.model->gguf());
  if (!system.empty()) messages.push_back({"system", std::move(system)});
  messages.push_back({"user", std::move(words)});
  return messages;
}

Result<std::vector<int>> prompt_tokens(const Session& session, const RunOptions& options) {
  const runner::Tokenizer& tokenizer = session.loaded.tokenizer;
  if (!options.is_raw) {
    return runner::encode_chat(tokenizer, first_messages(session, options.prompt));
  }
  KVX_ASSIGN_OR_RETURN(std::vector<int> tokens,
                       tokenizer.encode(options.prompt, runner::SpecialTokens::kAsText));
  if (tokenizer.adds_bos() && tokenizer.bos()) tokens.insert(tokens.begin(), *tokenizer.bos());
  return tokens;
}

Status run_once(const RunOptions& options) {
  KVX_ASSIGN_OR_RETURN(Session session, open_session(options));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> prompt, prompt_tokens(session, options));
  KVX_ASSIGN_OR_RETURN(const runner::GenerateResult result,
                       write(session, prompt, options.generate));
  fmt::print("\n");
  print_speed(session, result);
  return {};
}

// The tokens of the user's next words. The template ends an answer with <|im_end|>, which one that
// was cut off lacks, and a line break.
Result<std::vector<int>> next_turn(const Session& session, const std::string& words,
                                   bool answer_was_cut) {
  const runner::Tokenizer& tokenizer = session.loaded.tokenizer;
  if (session.attention->num_tokens() == 0) {
    return runner::encode_chat(tokenizer, first_messages(session, words));
  }
  KVX_ASSIGN_OR_RETURN(
      std::vector<int> tokens,
      tokenizer.encode(answer_was_cut ? "<|im_end|>\n" : "\n", runner::SpecialTokens::kParse));
  const runner::ChatMessage message{"user", words};
  KVX_ASSIGN_OR_RETURN(const std::vector<int> turn, runner::encode_chat(tokenizer, {&message, 1}));
  tokens.insert(tokens.end(), turn.begin(), turn.end());
  return tokens;
}

// One turn a line until the input ends.
Status chat(const RunOptions& options) {
  KVX_ASSIGN_OR_RETURN(Session session, open_session(options));
  KVX_RETURN_IF_ERROR(runner::check_chat_support(session.loaded.tokenizer));
  const bool is_person = is_terminal(stdin);
  if (is_person) fmt::print(stderr, "A line is a turn; Ctrl-D ends the chat.\n");
  std::string words;
  bool answer_was_cut = false;
  while (true) {
    if (is_person) fmt::print(stderr, "> ");
    if (!std::getline(std::cin, words)) break;
    if (words.empty()) continue;
    KVX_ASSIGN_OR_RETURN(const std::vector<int> turn, next_turn(session, words, answer_was_cut));
    KVX_ASSIGN_OR_RETURN(const runner::GenerateResult result,
                         write(session, turn, options.generate));
    answer_was_cut = !result.model_ended;
    fmt::print("\n");
    print_speed(session, result);
  }
  return {};
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "run", "Write text with a model on the cache of your choice; a chat without a prompt");
  auto o = std::make_shared<RunOptions>();
  runner::SamplingOptions& sampling = o->generate.sampling;
  command->add_option("-m,--model", o->model, "The model, a GGUF file")->required();
  CLI::Option* prompt =
      command->add_option("-p,--prompt", o->prompt, "What the user says; without it, a chat");
  command->add_flag("--raw", o->is_raw, "Continue the prompt as it stands, without a chat template")
      ->needs(prompt);
  command->add_option("-n,--tokens", o->generate.max_tokens, "Tokens to write at most")
      ->check(whole_number(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--cache", o->cache, "The cache; see kvx formats --help")
      ->capture_default_str();
  command->add_option("--layers", o->overrides.layers, "Other caches for some layers, as 0,1=bf16")
      ->expected(1);
  command
      ->add_option("--heads", o->overrides.heads,
                   "Other caches for some heads, layer:head, as 2:0,2:1=int8")
      ->expected(1);
  command
      ->add_option("--ctx", o->context,
                   fmt::format("Tokens that the cache holds; by default the model's context, {} "
                               "at most",
                               kMostDefaultContext))
      ->check(whole_number(1, 1 << 24));
  command->add_option("--block-size", o->block_size, "Tokens in a block")
      ->check(whole_number(1, cache::kMaxBlockSize))
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0 always takes the likeliest token")
      ->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "Draw from the K likeliest tokens; 0 is all")
      ->capture_default_str();
  command
      ->add_option("--top-p", sampling.top_p,
                   "Draw from the likeliest tokens that together have this probability")
      ->capture_default_str();
  command->add_option("--seed", sampling.seed, "Of the draws")->capture_default_str();
  command->add_option("--products", o->products, "What matrix products compute in")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->add_option("--threads", o->threads, "Threads; 0 is one a core")
      ->check(whole_number(0, kMaxThreads));
  command->footer(
      "The text goes to stdout; speed and the cache's bytes go to stderr.\n\n"
      "Examples:\n"
      "  kvx run -m model.gguf -p \"What is a key-value cache?\" -n 100\n"
      "  kvx run -m model.gguf --cache nvfp4:auto\n"
      "  kvx run -m model.gguf --raw -p \"Once upon a time\" --cache int8/int4\n");
  command->callback([&action, o, prompt] {
    const bool has_prompt = prompt->count() > 0;
    action = [o, has_prompt] { return has_prompt ? run_once(*o) : chat(*o); };
  });
}

}  // namespace kvx::tool
