// Session: opening, prompting, writing; shared by kvx run and kvx cache.
#include "tools/kvx/session.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cache/prefix/content_hash.hpp"
#include "device/cuda_caller.hpp"
#include "device/memory_size.hpp"
#include "engines/turbomind/policy.hpp"
#include "kv/plan/cache_budget.hpp"
#include "runner/chat_template.hpp"
#include "runner/mapped_file.hpp"
#include "tools/kvx/cache_options.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {
namespace {

// The bound of the default context: many models' own is larger than a chat needs, and its memory is
// allocated at once.
constexpr int kMostDefaultContext = 8192;

// The prompt and at least one token of an answer must fit.
Status check_fits(const Session& session, size_t num_tokens) {
  const int64_t used = session.attention->num_tokens();
  if (used + static_cast<int64_t>(num_tokens) < context_of(session)) return {};
  return invalid_argument("prompt has {} tokens after {}; the context is {} tokens", num_tokens,
                          used, context_of(session));
}

// All that decides K and V: a hash of the model file, the type of its products, the devices.
Result<std::string> model_identity(const SessionOptions& options, bool multiplies_on_gpu) {
  KVX_ASSIGN_OR_RETURN(const runner::MappedFile file, runner::MappedFile::open(options.model));
  return fmt::format("{} {}{}{}", hex(cache::checksum(file.bytes())), options.products,
                     options.device == "cpu" ? "" : " " + options.device,
                     multiplies_on_gpu ? " cublas" : "");
}

Result<int64_t> free_bytes_of_disk(const std::string& folder) {
  std::error_code problem;
  const std::filesystem::space_info space = std::filesystem::space(folder, problem);
  if (problem) return invalid_argument("'{}' has no room: {}", folder, problem.message());
  return static_cast<int64_t>(std::min<uintmax_t>(space.available, INT64_MAX));
}

Status set_budgets(const SessionOptions& options, const runner::ModelConfig& model,
                   runner::KvAttentionOptions& cache) {
  const kv::KvCacheConfig config = runner::cache_config_of(model, cache);
  const int64_t on_host = device::host_memory_bytes();
  if (!options.memory.empty()) {
    int64_t available = on_host;
    if (cache.on_gpu) {
      KVX_ASSIGN_OR_RETURN(available, device::cuda_free_bytes(0));
    }
    KVX_ASSIGN_OR_RETURN(cache.memory_budget_bytes,
                         kv::cache_budget_bytes(config, options.memory, available));
  }
  KVX_ASSIGN_OR_RETURN(cache.tiers, tier::parse_tiers(options.tiers));
  if (!options.host_tier.empty() && !options.tiers.empty()) {
    return invalid_argument("host-tier is '{}' and tiers is '{}'; expected one of them",
                            options.host_tier, options.tiers);
  }
  if (!options.host_tier.empty()) {
    int64_t available = on_host;
    tier::TierConfig tier;
    tier.folder = options.host_tier_folder;
    if (!tier.folder.empty()) {
      tier.kind = tier::TierKind::kDisk;
      KVX_ASSIGN_OR_RETURN(available, free_bytes_of_disk(tier.folder));
    }
    KVX_ASSIGN_OR_RETURN(tier.budget_bytes,
                         kv::cache_budget_bytes(config, options.host_tier, available));
    cache.tiers = {std::move(tier)};
  }
  return {};
}

Status publish_events(const SessionOptions& options, Session& session) {
  if (options.kv_events.empty()) return {};
  observe::EventPublisherOptions events;
  events.endpoint = options.kv_events;
  events.replay_endpoint = options.kv_events_replay;
  KVX_ASSIGN_OR_RETURN(session.publisher,
                       observe::EventPublisher::create(session.attention->cache(), events));
  fmt::print(stderr, "KV events are sent from {}{}{}\n", session.publisher->endpoint(),
             options.kv_events_replay.empty() ? "" : ", and again from ",
             session.publisher->replay_endpoint());
  return {};
}

Status serve_metrics(const SessionOptions& options, Session& session) {
  if (options.metrics_port < 0) return {};
  session.shown = std::make_unique<observe::ShownCache>(session.attention->cache(), "kvx run");
  KVX_ASSIGN_OR_RETURN(session.metrics,
                       observe::MetricsServer::create("127.0.0.1", options.metrics_port));
  fmt::print(stderr, "metrics are at http://127.0.0.1:{}/metrics\n", session.metrics->port());
  return {};
}

// The first messages of a chat: the model's own system message, if it has one, and the user's
// words.
std::vector<runner::ChatMessage> first_messages(const Session& session, std::string words) {
  std::vector<runner::ChatMessage> messages;
  std::string system = runner::default_system_message(session.loaded.model->gguf());
  if (!system.empty()) messages.push_back({"system", std::move(system)});
  messages.push_back({"user", std::move(words)});
  return messages;
}

// 0: the CPU.
Result<int> sm_version_of(const SessionOptions& options) {
  if (options.device == "cpu") return engines::turbomind::kCpu;
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* gpu, device::known_cuda_device(0));
  return 10 * gpu->compute_major + gpu->compute_minor;
}

// The recipe of --cache, or what --quant-policy means on this device.
Result<std::string> recipe_text(const SessionOptions& options) {
  if (options.quant_policy < 0) return options.cache;
  if (options.cache != SessionOptions().cache) {
    return invalid_argument("cache is '{}' and quant-policy {}; expected one of the two",
                            options.cache, options.quant_policy);
  }
  using engines::turbomind::Fp4Format;
  engines::turbomind::KvCacheModeOptions mode_options;
  if (options.fp4_format != "auto") {
    mode_options.fp4_format = options.fp4_format == "mx" ? Fp4Format::kMx : Fp4Format::kNv;
  }
  KVX_ASSIGN_OR_RETURN(const int sm_version, sm_version_of(options));
  KVX_ASSIGN_OR_RETURN(const auto mode, engines::turbomind::get_kv_cache_mode(
                                            options.quant_policy, sm_version, mode_options));
  return engines::turbomind::recipe_of(mode, DType::kF16);
}

}  // namespace

Result<Session> open_session(const SessionOptions& options, bool shares_prefixes) {
  runner::KvAttentionOptions cache;
  KVX_ASSIGN_OR_RETURN(const std::string text, recipe_text(options));
  KVX_ASSIGN_OR_RETURN(const tune::CacheRecipe recipe, tune::read_recipe(text));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::RecipeOverride> overrides,
                       parse_overrides(options.overrides));
  cache.block_size = options.block_size;
  if (options.is_fast) cache.precision = ops::Precision::kFast;
  cache.on_gpu = options.device == "cuda";
  KVX_ASSIGN_OR_RETURN(Engine engine, make_engine(options.threads));
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::GpuProducts> gpu,
                       open_products(options.products_on, options.device));
  const bool multiplies_on_gpu = gpu != nullptr;
  KVX_ASSIGN_OR_RETURN(LoadedModel loaded, load_model(options.model, options.products,
                                                      *engine.executor, std::move(gpu)));
  const runner::ModelConfig& model = loaded.model->config();
  KVX_RETURN_IF_ERROR(use_recipe(recipe, overrides, *loaded.model, cache));
  KVX_RETURN_IF_ERROR(check_context("ctx", options.context, model));
  cache.max_tokens =
      options.context > 0 ? options.context : std::min(kMostDefaultContext, model.context_length);
  cache.prefix.is_on = shares_prefixes;
  KVX_RETURN_IF_ERROR(set_budgets(options, model, cache));
  if (shares_prefixes) {
    KVX_ASSIGN_OR_RETURN(cache.prefix.model, model_identity(options, multiplies_on_gpu));
  }
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::KvAttention> attention,
                       runner::KvAttention::create(model, cache, *engine.executor));
  Session session{std::move(engine), std::move(loaded), std::move(attention)};
  KVX_RETURN_IF_ERROR(publish_events(options, session));
  KVX_RETURN_IF_ERROR(serve_metrics(options, session));
  return session;
}

int64_t context_of(const Session& session) {
  return session.attention->cache().config().max_tokens_per_sequence;
}

Result<runner::GenerateResult> write(Session& session, std::span<const int> prompt,
                                     runner::GenerateOptions options,
                                     const std::function<bool()>& is_interrupted) {
  KVX_RETURN_IF_ERROR(check_fits(session, prompt.size()));
  const int64_t room =
      context_of(session) - session.attention->num_tokens() - static_cast<int64_t>(prompt.size());
  options.max_tokens = static_cast<int>(std::min<int64_t>(options.max_tokens, room));
  Progress progress(Progress::Where::kTerminalAlone);
  const auto num_tokens = static_cast<double>(prompt.size());
  const std::string doing = fmt::format("reading {} tokens", prompt.size());
  progress.show(0, doing);
  options.on_prefill = [&](int64_t num_fed) -> Status {
    if (is_interrupted && is_interrupted()) return unsupported("the prefill was interrupted");
    progress.show(static_cast<double>(num_fed) / num_tokens, doing);
    return {};
  };
  const auto print = [&](std::string_view text) {
    progress.finish();
    fmt::print("{}", text);
    // The text ends where its reader is gone.
    return std::fflush(stdout) == 0 && !(is_interrupted && is_interrupted());
  };
  return runner::generate(*session.loaded.model, session.loaded.tokenizer, *session.attention,
                          prompt, options, print);
}

namespace {

kv::SaveOptions with_progress(Progress& progress, int zstd_level) {
  return {zstd_level, [&progress](int64_t num_done, int64_t num_blocks) {
            progress.show(static_cast<double>(num_done) / static_cast<double>(num_blocks),
                          "saving blocks");
          }};
}

}  // namespace

Status save_sequence(Session& session, const std::string& path, int zstd_level) {
  Progress progress(Progress::Where::kTerminalAlone);
  runner::KvAttention& attention = *session.attention;
  return attention.cache().save_sequence(attention.sequence(), path,
                                         with_progress(progress, zstd_level));
}

Status save_prefixes(Session& session, const std::string& path) {
  Progress progress(Progress::Where::kTerminalAlone);
  return session.attention->cache().save_prefixes(path, with_progress(progress, 0));
}

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

Status print_stats(const Session& session) {
  const kv::KvCache& cache = session.attention->cache();
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerCounts> layers, cache.head_counts());
  fmt::print(stderr, "clipped by a static scale: {} inputs; not finite: {}\n",
             cache.saturated_inputs().value_or(0), cache.nonfinite_inputs());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t head = 0; head < layers[layer].k.size(); ++head) {
      const ops::HeadCounts& k = layers[layer].k[head];
      const ops::HeadCounts& v = layers[layer].v[head];
      if (k.saturated + k.nonfinite + v.saturated + v.nonfinite == 0) continue;
      fmt::print(stderr, "layer {}, KV head {}: clipped K {}, V {}; not finite K {}, V {}\n", layer,
                 head, k.saturated, v.saturated, k.nonfinite, v.nonfinite);
    }
  }
  return {};
}

Result<std::vector<int>> prompt_tokens(const Session& session, const std::string& prompt,
                                       bool is_raw) {
  const runner::Tokenizer& tokenizer = session.loaded.tokenizer;
  KVX_ASSIGN_OR_RETURN(std::vector<int> tokens,
                       is_raw ? tokenizer.encode(prompt, runner::SpecialTokens::kAsText)
                              : runner::encode_chat(tokenizer, first_messages(session, prompt)));
  if (tokenizer.adds_bos() && tokenizer.bos()) tokens.insert(tokens.begin(), *tokenizer.bos());
  return tokens;
}

Result<std::vector<int>> turn_tokens(const Session& session, const std::string& words) {
  const runner::ChatMessage message{"user", words};
  return runner::encode_chat(session.loaded.tokenizer, {&message, 1});
}

// Messages are encoded one by one: a first turn is the opening and then the user's words.
Result<std::vector<int>> opening_tokens(const Session& session) {
  KVX_ASSIGN_OR_RETURN(std::vector<int> tokens, prompt_tokens(session, "", false));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> turn, turn_tokens(session, ""));
  tokens.resize(tokens.size() - turn.size());
  return tokens;
}

void add_session_options(Command command, SessionOptions& options) {
  command.add_option("-m,--model", options.model, "The model, a GGUF file").required();
  command.add_option("--cache", options.cache, "The cache; see kvx formats --help")
      .capture_default_str();
  const Option policy =
      command
          .add_option(
              "--quant-policy", options.quant_policy,
              "In place of --cache: LMDeploy's policy, in TurboMind's blocks: 0, 4, 8 or 16 "
              "(FP4), or a mask of them")
          .whole_number(0, 1 << 16);
  command
      .add_option("--fp4-format", options.fp4_format,
                  "What bit 16 means: mx, nv, or auto, which goes by the device")
      .one_of({"auto", "mx", "nv"})
      .needs(policy);
  command
      .add_option("--layers", options.overrides.layers, "Other caches for some layers, as 0,1=bf16")
      .repeatable();
  command
      .add_option("--heads", options.overrides.heads,
                  "Other caches for some heads, layer:head, as 2:0,2:1=int8")
      .repeatable();
  command
      .add_option("--ctx", options.context,
                  fmt::format("Tokens that the cache holds; by default the model's context, {} "
                              "at most",
                              kMostDefaultContext))
      .whole_number(1, 1 << 24);
  command.add_option("--block-size", options.block_size, "Tokens in a block")
      .whole_number(1, cache::kMaxBlockSize)
      .capture_default_str();
  command.add_option(
      "--memory", options.memory,
      "What its blocks may take: 512MiB, a number of blocks, or a share of the memory "
      "as 0.5; by default what --ctx tokens need");
  command.add_option("--products", options.products, "What matrix products compute in")
      .one_of({"f32", "bf16"})
      .capture_default_str();
  add_products_on(command, options.products_on);
  command.add_flag("--fast", options.is_fast,
                   "Attention may be off by 8e-3 of its size where that saves time");
  command
      .add_option("--device", options.device,
                  "Where the cache lies and attention runs: cpu, or cuda for the first GPU")
      .one_of({"cpu", "cuda"})
      .capture_default_str();
  command.add_option("--threads", options.threads, "Threads; 0 is one a core")
      .whole_number(0, kMaxThreads);
}

}  // namespace kvx::tool
