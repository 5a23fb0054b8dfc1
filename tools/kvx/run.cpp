// kvx run: writes text with a model on the cache of your choice; a chat when no prompt is given.
#include <cstdio>
#include <iostream>
#include <random>

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
  bool has_prompt = false;
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
  std::unique_ptr<kv::KvCache> cache;
  std::unique_ptr<runner::KvAttention> attention;
};

Result<Session> open_session(const RunOptions& options) {
  KVX_ASSIGN_OR_RETURN(kv::Recipe recipe, kv::parse_recipe(options.cache));
  KVX_ASSIGN_OR_RETURN(std::vector<kv::RecipeOverride> overrides,
                       parse_overrides(options.overrides));
  KVX_ASSIGN_OR_RETURN(Engine engine, make_engine(options.threads));
  KVX_ASSIGN_OR_RETURN(LoadedModel loaded,
                       load_model(options.model, options.products, *engine.executor));
  const runner::ModelConfig& model = loaded.model->config();
  KVX_RETURN_IF_ERROR(check_context("ctx", options.context, model));
  const int context = options.context > 0 ? options.context
                                          : std::min(kMostDefaultContext, model.context_length);
  kv::KvCacheConfig config = cache_config(model, std::move(recipe), context, options.block_size);
  config.overrides = std::move(overrides);
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<kv::KvCache> cache,
                       kv::KvCache::create(std::move(config), engine.context));
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::KvAttention> attention,
                       runner::KvAttention::create(*cache, model));
  return Session{std::move(engine), std::move(loaded), std::move(cache), std::move(attention)};
}

int64_t context_of(const Session& session) {
  return session.cache->config().max_tokens_per_sequence;
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
  const int64_t room = context_of(session) - session.attention->num_tokens() -
                       static_cast<int64_t>(prompt.size());
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
             session.cache->config().recipe.text,
             session.cache->sequence_bytes(num_tokens).total(), num_tokens);
}

Result<std::vector<int>> prompt_tokens(const Session& session, const RunOptions& options) {
  const runner::Tokenizer& tokenizer = session.loaded.tokenizer;
  if (!options.is_raw && runner::check_chat_support(tokenizer).ok()) {
    return runner::encode_chat(
        tokenizer, first_messages(session.loaded.model->gguf(), options.prompt));
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

}  // namespace

}  // namespace kvx::tool
