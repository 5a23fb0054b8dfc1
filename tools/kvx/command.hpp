// The commands of kvx, one file each. A command adds itself to the parser; when the user names it,
// it sets `action`, which main runs.
#pragma once

#include <functional>

#include "core/result.hpp"
#include "tools/kvx/command_line.hpp"

namespace kvx::tool {

using Action = std::function<Status()>;

void add_run(Command app, Action& action);
void add_compare(Command app, Action& action);
void add_bench(Command app, Action& action);
// kvx bench abi; the command that was added to `bench`.
Command add_bench_abi(Command bench, Action& action);
void add_formats(Command app, Action& action);
void add_info(Command app, Action& action);
void add_cache(Command app, Action& action);
void add_replay(Command app, Action& action);

}  // namespace kvx::tool
