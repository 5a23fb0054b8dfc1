// kvx replay: what a prefix cache saves on a trace of requests, policy by policy.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tools/kvx/command.hpp"
#include "tools/kvx/embedded.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/replay/simulation.hpp"
#include "tools/kvx/report/page.hpp"
#include "tools/kvx/table.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr cache::EvictionKind kPolicies[] = {cache::EvictionKind::kLru, cache::EvictionKind::kLfu,
                                             cache::EvictionKind::k2Q,
                                             cache::EvictionKind::kAgents};

struct ReplayCommand {
  std::string trace;          // a file
  int64_t num_generated = 0;  // requests; 0: none
  bool is_of_agents = false;
  uint64_t seed = 1;
  std::string save_trace;
  std::vector<int64_t> num_blocks = {1000, 2000, 5000, 10000, 20000, 50000};
  int64_t num_host_blocks = 0;
  int64_t bytes_per_token = 0;
  std::string json;
  std::string html;
};

struct Run {
  ReplayOptions options;
  ReplayCounters counters;
};

Result<std::vector<TraceRequest>> trace_of(const ReplayCommand& command) {
  if (command.num_generated > 0 && command.is_of_agents) {
    return generate_agents_trace(command.num_generated, command.seed);
  }
  if (command.num_generated > 0) return generate_trace(command.num_generated, command.seed);
  KVX_ASSIGN_OR_RETURN(const std::string text, read_file("trace", command.trace));
  return parse_trace(text);
}

Result<std::vector<Run>> run_all(const ReplayCommand& command,
                                 const std::vector<TraceRequest>& trace) {
  std::vector<Run> runs;
  Progress progress;
  const double num_runs = static_cast<double>(std::size(kPolicies) * command.num_blocks.size());
  for (cache::EvictionKind policy : kPolicies) {
    for (int64_t num_blocks : command.num_blocks) {
      const auto num_done = static_cast<double>(runs.size());
      const auto show = [&](double share) {
        progress.show((num_done + share) / num_runs,
                      fmt::format("{}, {} blocks", name_of(policy), num_blocks));
      };
      const ReplayOptions options{num_blocks, command.num_host_blocks, policy};
      KVX_ASSIGN_OR_RETURN(const ReplayCounters counters, replay(trace, options, show));
      runs.push_back({options, counters});
    }
  }
  progress.finish();
  return runs;
}

// GiB, or blocks where --bytes-per-token was not given.
std::string size_text(int64_t num_blocks, int64_t bytes_per_token) {
  if (bytes_per_token == 0) return std::to_string(num_blocks);
  const double bytes =
      static_cast<double>(num_blocks) * kTraceBlockTokens * static_cast<double>(bytes_per_token);
  return fmt::format("{:.2f} GiB", bytes / (1 << 30));
}

std::string table_of(const ReplayCommand& command, const std::vector<Run>& runs) {
  Table table({{"policy"},
               {"blocks", Align::kRight},
               {"prefill saved %", Align::kRight},
               {"of it from host %", Align::kRight},
               {"held", Align::kRight},
               {"held by host", Align::kRight},
               {"evicted", Align::kRight},
               {"too long", Align::kRight}});
  for (const Run& run : runs) {
    const ReplayCounters& counted = run.counters;
    const double host_share = counted.hit_tokens == 0
                                  ? 0
                                  : 100.0 * static_cast<double>(counted.host_hit_tokens) /
                                        static_cast<double>(counted.hit_tokens);
    table.add_row(
        {std::string(name_of(run.options.eviction)), std::to_string(run.options.num_blocks),
         fmt::format("{:.2f}", 100 * counted.hit_rate()), fmt::format("{:.1f}", host_share),
         size_text(counted.most_blocks, command.bytes_per_token),
         size_text(counted.most_host_blocks, command.bytes_per_token),
         std::to_string(counted.num_evicted), std::to_string(counted.num_too_long)});
  }
  return table.text(wants_color(stdout));
}

std::string json_of(const ReplayCommand& command, const std::vector<Run>& runs) {
  Json list = Json::array();
  for (const Run& run : runs) {
    const ReplayCounters& counted = run.counters;
    list.push_back({{"policy", name_of(run.options.eviction)},
                    {"num_blocks", run.options.num_blocks},
                    {"hit_rate", counted.hit_rate()},
                    {"hit_tokens", counted.hit_tokens},
                    {"host_hit_tokens", counted.host_hit_tokens},
                    {"num_evicted", counted.num_evicted},
                    {"num_too_long", counted.num_too_long},
                    {"most_blocks", counted.most_blocks},
                    {"most_host_blocks", counted.most_host_blocks}});
  }
  const std::string name = command.num_generated > 0
                               ? fmt::format("generated{}, seed {}",
                                             command.is_of_agents ? " of agents" : "", command.seed)
                               : command.trace;
  return Json{{"trace", name},
              {"num_requests", runs.front().counters.num_requests},
              {"input_tokens", runs.front().counters.input_tokens},
              {"num_host_blocks", command.num_host_blocks},
              {"bytes_per_token", command.bytes_per_token},
              {"runs", list}}
      .dump(2, ' ', false, Json::error_handler_t::replace);
}

Status run_replay(const ReplayCommand& command) {
  const OutputFile outputs[] = {
      {"json", command.json}, {"html", command.html}, {"save-trace", command.save_trace}};
  KVX_RETURN_IF_ERROR(check_outputs(outputs));
  KVX_ASSIGN_OR_RETURN(const std::vector<TraceRequest> trace, trace_of(command));
  if (!command.save_trace.empty()) {
    KVX_RETURN_IF_ERROR(write_file("save-trace", command.save_trace, trace_text(trace)));
  }
  KVX_ASSIGN_OR_RETURN(const std::vector<Run> runs, run_all(command, trace));
  fmt::print("{} requests, {} prompt tokens, blocks of {} tokens\n", trace.size(),
             runs.front().counters.input_tokens, kTraceBlockTokens);
  fmt::print("{}", table_of(command, runs));
  const std::string json = json_of(command, runs);
  if (!command.json.empty()) KVX_RETURN_IF_ERROR(write_file("json", command.json, json));
  if (command.html.empty()) return {};
  return write_file("html", command.html, page_with_data(replay_page(), json));
}

}  // namespace

void add_replay(Command app, Action& action) {
  Command command = app.add_subcommand(
      "replay", "Replay a trace of requests that share prefixes, policy by policy");
  auto o = std::make_shared<ReplayCommand>();
  Command input = command.add_option_group("input");
  input.add_option("trace", o->trace, "A trace in Mooncake's format, JSON lines");
  const Option generate =
      input.add_option("--generate", o->num_generated, "Make up a trace of so many requests")
          .whole_number(1, 10'000'000);
  input.require_one_option();
  command
      .add_flag("--agents", o->is_of_agents,
                "Make it up of agents: sessions of 40 turns that share their tools' prompts")
      .needs(generate);
  command.add_option("--seed", o->seed, "Of the made-up trace")
      .whole_number(0, INT64_MAX)
      .capture_default_str();
  command.add_option("--save-trace", o->save_trace, "Write the trace to this file");
  command.add_option("--blocks", o->num_blocks, "Blocks that the cache holds; several with commas")
      .delimiter(',')
      .whole_number(1, 100'000'000)
      .capture_default_str();
  command
      .add_option("--host-blocks", o->num_host_blocks,
                  "Blocks of host memory behind it, which gets a copy of every block")
      .whole_number(0, 100'000'000)
      .capture_default_str();
  command
      .add_option(
          "--bytes-per-token", o->bytes_per_token,
          "Bytes that a token takes (kvx compare measures them), to print bytes instead of blocks")
      .whole_number(0, 1 << 30);
  command.add_option("--json", o->json, "Write the numbers as JSON to this file");
  command.add_option("--html", o->html, "Write a page with a chart to this file");
  command.footer(
      "Examples:\n"
      "  kvx replay --generate 20000 --html replay.html\n"
      "  kvx replay --generate 20000 --agents --blocks 500,1000\n"
      "  kvx replay mooncake_trace.jsonl --blocks 10000,50000 --host-blocks 200000\n");
  command.callback([&action, o] { action = [o] { return run_replay(*o); }; });
}

}  // namespace kvx::tool
