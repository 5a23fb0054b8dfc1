// The commands of kvx, one file each. A command adds itself to the parser; when the user names it,
// it leaves what is to be done in `action`, and main runs that.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "core/result.hpp"

namespace kvx::tool {

using Action = std::function<Status()>;

void add_run(CLI::App& app, Action& action);
void add_compare(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
// kvx bench abi; the command that was added to `bench`.
CLI::App* add_bench_abi(CLI::App& bench, Action& action);
void add_formats(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);
void add_cache(CLI::App& app, Action& action);
void add_replay(CLI::App& app, Action& action);

// Accepts whole numbers from low to high; the message names the value and what was expected.
CLI::Validator whole_number(int64_t low, int64_t high);

}  // namespace kvx::tool
