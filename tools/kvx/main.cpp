// kvx: the command line tool. Exit codes: 0 done, 2 bad input (one line on stderr), 1 a fault
// of kvx, 3 done, and a limit of --fail-if was exceeded (a line each).
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "tools/kvx/command.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

constexpr int kOk = 0;
constexpr int kInternalFault = 1;
constexpr int kBadInput = 2;
constexpr int kGateFailed = 3;

constexpr std::string_view kWhatItIs =
    kHasRunner ? "kvx: quantised KV caches on real models."
               : "kvx: quantised KV caches; built without the commands that run a model.";

int fail(int exit_code, std::string_view message) {
  fmt::print(stderr, "kvx: {}\n", message);
  return exit_code;
}

int exit_code_of(const Error& error) {
  return error.code == ErrorCode::kInternal ? kInternalFault : kBadInput;
}

int run_tool(int argc, char** argv) {
  CommandLine command_line(
      fmt::format("{} 'kvx COMMAND --help' shows options and examples.", kWhatItIs), "kvx",
      fmt::format("kvx {}", kVersion));
  const Command app = command_line.root();
  Action action;
  if constexpr (kHasRunner) {
    add_run(app, action);
    add_compare(app, action);
    add_stress(app, action);
  }
  add_bench(app, action);
  add_formats(app, action);
  add_info(app, action);
  add_cache(app, action);
  add_replay(app, action);
  if constexpr (kHasRunner) {
    add_tune(app, action);
    add_probe(app, action);
  }
  const Result<std::optional<int>> parsed = command_line.parse(argc, argv);
  if (!parsed.ok()) return fail(kBadInput, parsed.error().message);
  if (parsed.value()) return *parsed.value();
  if (!action) {
    return fail(kBadInput, "command is missing; expected one of those in 'kvx --help'");
  }
  const Result<Verdict> verdict = action();
  if (!verdict.ok()) return fail(exit_code_of(verdict.error()), verdict.error().message);
  for (const std::string& failure : verdict.value().failures) fail(kGateFailed, failure);
  return verdict.value().failures.empty() ? kOk : kGateFailed;
}

int fail_to_write(std::string_view why) {
  return fail(kBadInput, fmt::format("stdout cannot be written ({})", why));
}

// Output that did not reach stdout, because a disk is full for example, is a failure.
int flushed(int exit_code) {
  const bool is_flushed = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return is_flushed || exit_code != kOk ? exit_code : fail_to_write(std::strerror(errno));
}

// Most exceptions here are std::bad_alloc; fmt throws when stdout is full.
int failed(const std::exception& error) {
  const bool is_text_lost = std::ferror(stdout) != 0;
  return is_text_lost ? fail_to_write(error.what()) : fail(kInternalFault, error.what());
}

}  // namespace
}  // namespace kvx::tool

int main(int argc, char** argv) {
  try {
    return kvx::tool::flushed(kvx::tool::run_tool(argc, argv));
  } catch (const std::exception& error) {
    return kvx::tool::failed(error);
  }
}
