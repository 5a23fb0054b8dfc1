// Session: a model with its cache, ready to write; kvx run and kvx cache share it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "observe/event_publisher.hpp"
#include "observe/metrics_server.hpp"
#include "runner/chat_template.hpp"
#include "runner/generate.hpp"
#include "runner/kv_attention.hpp"
#include "tools/kvx/command_line.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/recipe_list.hpp"

namespace kvx::tool {

struct SessionOptions {
  std::string model;
  std::string cache = "bf16";
  int quant_policy = -1;  // LMDeploy's, in place of `cache`; -1: not given
  std::string fp4_format = "auto";
  OverrideTexts overrides;
  int context = 0;  // 0: the model's, up to a bound
  int block_size = 64;
  std::string products = "f32";
  bool is_fast = false;
  std::string device = "cpu";
  std::string products_on = "auto";  // where --device says; the CPU where no cuBLAS is found
  int threads = 0;
  // Budgets in the form of cache::parse_memory_budget. Empty: the memory of a sequence of `context`
  // tokens, and no host tier.
  std::string memory;
  std::string host_tier;         // of kvx run alone
  std::string host_tier_folder;  // empty: in memory
  std::string tiers;             // instead: "host(8GiB), disk(/folder, 200GiB)"
  std::string kv_events;         // of kvx run alone: an endpoint; empty: no events are sent
  std::string kv_events_replay;  // likewise
  int metrics_port = -1;         // likewise, on this machine alone; 0: any; -1: none are served
};

struct Session {
  Engine engine;
  LoadedModel loaded;
  std::unique_ptr<runner::KvAttention> attention;
  std::unique_ptr<observe::EventPublisher> publisher = {};  // null: no events are sent
  std::unique_ptr<observe::ShownCache> shown = {};
  std::unique_ptr<observe::MetricsServer> metrics = {};  // null: none are served
};

// --model, --cache and so on.
void add_session_options(Command command, SessionOptions& options);

// shares_prefixes: blocks can be found again and saved; the model's file is read once more for its
// hash.
Result<Session> open_session(const SessionOptions& options, bool shares_prefixes);

// Tokens that the cache holds at most.
int64_t context_of(const Session& session);

// The prompt through the chat template, or as it stands, behind the first token of models that want
// one.
Result<std::vector<int>> prompt_tokens(const Session& session, const std::string& prompt,
                                       bool is_raw);

// The tokens of a chat before the user's first words: the first token of models that want one, and
// the model's own system message.
Result<std::vector<int>> opening_tokens(const Session& session);

// A user's words as the chat template has them, up to where the answer begins.
Result<std::vector<int>> turn_tokens(const Session& session, const std::string& words);

// Writes to stdout until the model ends, or max_tokens, or the context, or is_interrupted() (empty:
// never). prompt: what the cache does not hold yet; on a terminal a line shows how much of it was
// fed. UNSUPPORTED: it was interrupted before the first token.
Result<runner::GenerateResult> write(Session& session, std::span<const int> prompt,
                                     runner::GenerateOptions options,
                                     const std::function<bool()>& is_interrupted = {});

// KvCache::save_sequence and save_prefixes with a progress line on a terminal.
Status save_sequence(Session& session, const std::string& path, int zstd_level);
Status save_prefixes(Session& session, const std::string& path);

// "prefill 35 tokens, 290 tokens/s; decode ...": to stderr, so that stdout is the text alone.
void print_speed(const Session& session, const runner::GenerateResult& result);
// What the cache could not store as it came: a line, and one for each KV head that has any; to
// stderr. Errors are KvCache::head_counts's.
Status print_stats(const Session& session);

}  // namespace kvx::tool
