// kvx run: writes text with a model on the cache of your choice; a chat when no prompt is given.
#include <cstdio>
#include <filesystem>

#include "tools/kvx/chat/chat.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/session.hpp"

namespace kvx::tool {
namespace {

struct RunOptions {
  SessionOptions session;
  std::string prompt;
  bool is_raw = false;
  bool shows_stats = false;
  std::string prefix_cache;  // a file; empty: none
  runner::GenerateOptions generate;
};

bool has_tiers(const RunOptions& options) {
  return !options.session.host_tier.empty() || !options.session.tiers.empty();
}

bool shares_prefixes(const RunOptions& options) {
  return !options.prefix_cache.empty() || has_tiers(options) || !options.session.kv_events.empty();
}

Result<Session> open_run(const RunOptions& options) {
  if (!options.prefix_cache.empty()) {
    KVX_RETURN_IF_ERROR(check_can_replace("prefix-cache", options.prefix_cache));
  }
  KVX_ASSIGN_OR_RETURN(Session session, open_session(options.session, shares_prefixes(options)));
  if (options.prefix_cache.empty() || !std::filesystem::exists(options.prefix_cache)) {
    return session;
  }
  KVX_ASSIGN_OR_RETURN(const kv::LoadReport report,
                       session.attention->cache().load_prefixes(options.prefix_cache));
  if (report.num_bad + report.num_no_room > 0) {
    fmt::print(stderr, "prefix cache: {} blocks are bad, {} found no room ({})\n", report.num_bad,
               report.num_no_room, report.first_problem);
  }
  return session;
}

// A new sequence begins with what is cached of the prompt; returns the rest.
Result<std::span<const int>> begin_cached(const RunOptions& options, Session& session,
                                          const std::vector<int>& prompt) {
  if (!shares_prefixes(options)) {
    KVX_RETURN_IF_ERROR(session.attention->reset());
    return std::span<const int>(prompt);
  }
  KVX_RETURN_IF_ERROR(session.attention->reset_to_prefix({}, prompt));
  const int64_t num_cached = session.attention->num_tokens();
  fmt::print(stderr, "prefix cache: {} of {} prompt tokens\n", num_cached, prompt.size());
  return std::span<const int>(prompt).subspan(static_cast<size_t>(num_cached));
}

void print_tiers(const Session& session) {
  for (const tier::HostTierSnapshot& one : session.attention->cache().snapshot().tiers) {
    fmt::print(stderr, "{} tier: {} blocks came, {} went back, {} bad; {} of {} bytes in use\n",
               name_of(one.tier), one.num_stored, one.num_loaded, one.num_bad, one.held_bytes,
               one.allocated_bytes);
  }
}

Status finish(const RunOptions& options, Session& session) {
  if (options.shows_stats) KVX_RETURN_IF_ERROR(print_stats(session));
  if (has_tiers(options)) {
    session.attention->cache().wait_for_tiers();
    print_tiers(session);
  }
  if (options.prefix_cache.empty()) return {};
  return save_prefixes(session, options.prefix_cache);
}

Status run_once(const RunOptions& options) {
  KVX_ASSIGN_OR_RETURN(Session session, open_run(options));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> prompt,
                       prompt_tokens(session, options.prompt, options.is_raw));
  KVX_ASSIGN_OR_RETURN(const std::span<const int> rest, begin_cached(options, session, prompt));
  KVX_ASSIGN_OR_RETURN(const runner::GenerateResult result, write(session, rest, options.generate));
  fmt::print("\n");
  print_speed(session, result);
  return finish(options, session);
}

// Saves the prefix cache when the chat has ended.
Status chat(const RunOptions& options) {
  KVX_ASSIGN_OR_RETURN(Session session, open_run(options));
  const auto begin = [&](const std::vector<int>& prompt) {
    return begin_cached(options, session, prompt);
  };
  KVX_RETURN_IF_ERROR(run_chat(session, options.generate, begin));
  return finish(options, session);
}

}  // namespace

void add_run(Command app, Action& action) {
  Command command = app.add_subcommand(
      "run", "Write text with a model on the cache of your choice; a chat without a prompt");
  auto o = std::make_shared<RunOptions>();
  runner::SamplingOptions& sampling = o->generate.sampling;
  add_session_options(command, o->session);
  Option prompt =
      command.add_option("-p,--prompt", o->prompt, "The user's words; without them, a chat");
  prompt.may_be_empty();
  command.add_flag("--raw", o->is_raw, "Continue the prompt as it stands, without a chat template")
      .needs(prompt);
  command.add_option("-n,--tokens", o->generate.max_tokens, "Tokens to write at most")
      .whole_number(1, 1 << 24)
      .capture_default_str();
  command.add_option("--temperature", sampling.temperature, "0 always takes the likeliest token")
      .capture_default_str();
  command.add_option("--top-k", sampling.top_k, "Draw from the K likeliest tokens; 0 is all")
      .capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "Draw from the likeliest tokens that together have this probability")
      .capture_default_str();
  command.add_option("--seed", sampling.seed, "Of the draws")
      .whole_number(0, INT64_MAX)
      .capture_default_str();
  command.add_option("--prefix-cache", o->prefix_cache,
                     "Begin with the blocks of this file where the prompt allows it, and keep what "
                     "was computed in it; it is made when it is missing");
  command.add_flag(
      "--stats", o->shows_stats,
      "Say afterwards what the cache could not store as it came, by layer and KV head");
  const Option host_tier = command.add_option(
      "--host-tier", o->session.host_tier,
      "Host memory behind the cache, in the same units as --memory: blocks that the cache has no "
      "room for stay there for a chat that begins with them");
  command
      .add_option("--host-tier-folder", o->session.host_tier_folder,
                  "Where --host-tier takes room on a disk instead: in files that are gone with the "
                  "process")
      .needs(host_tier);
  command.add_option("--tiers", o->session.tiers,
                     "Tiers behind the cache, nearest first: 'host(8GiB), disk(/folder, 200GiB)'; "
                     "blocks move down when room is needed and up when a chat begins with them");
  const Option kv_events = command.add_option(
      "--kv-events", o->session.kv_events,
      "Tell other processes which blocks the cache has: vLLM's KV events over ZeroMQ, from this "
      "endpoint, as tcp://127.0.0.1:5557");
  command
      .add_option("--kv-events-replay", o->session.kv_events_replay,
                  "The endpoint that sends them again, as tcp://127.0.0.1:5558")
      .needs(kv_events);
  command
      .add_option("--metrics-port", o->session.metrics_port,
                  "Serve the cache's metrics for Prometheus at http://127.0.0.1:PORT/metrics; 0 "
                  "takes any free port")
      .whole_number(0, 65535);
  command.footer(
      "The text goes to stdout; speed and the cache's bytes go to stderr. In a chat the line "
      "/help\n"
      "lists the commands; ctrl-C ends an answer.\n\n"
      "Examples:\n"
      "  kvx run -m model.gguf -p \"What is a key-value cache?\" -n 100\n"
      "  kvx run -m model.gguf --cache nvfp4:auto\n"
      "  kvx run -m model.gguf --raw -p \"Once upon a time\" --cache int8/int4\n");
  command.callback([&action, o, prompt] {
    const bool has_prompt = prompt.is_given();
    action = [o, has_prompt] { return has_prompt ? run_once(*o) : chat(*o); };
  });
}

}  // namespace kvx::tool
