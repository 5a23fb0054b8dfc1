// The commands of kvx, one file each. A command adds itself to the parser; when the user names it,
// it sets `action`, which main runs.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/result.hpp"
#include "tools/kvx/command_line.hpp"

namespace kvx::tool {

// A command that did its work may still have found what it was to look out for: a sentence each.
// The tool ends with exit code 3 then.
struct Verdict {
  std::vector<std::string> failures;
};

// What main runs. Most commands return a Status and judge nothing.
class Action {
 public:
  template <class Run>
  Action& operator=(Run run) {
    run_ = [run = std::move(run)]() -> Result<Verdict> {
      if constexpr (std::is_same_v<std::invoke_result_t<Run>, Status>) {
        KVX_RETURN_IF_ERROR(run());
        return Verdict{};
      } else {
        return run();
      }
    };
    return *this;
  }
  explicit operator bool() const { return static_cast<bool>(run_); }
  Result<Verdict> operator()() const { return run_(); }

 private:
  std::function<Result<Verdict>()> run_;
};

// Those that run a model are there where kHasRunner says so: run, compare, stress, tune, probe, and
// two of cache.
void add_run(Command app, Action& action);
void add_compare(Command app, Action& action);
void add_stress(Command app, Action& action);
void add_bench(Command app, Action& action);
// kvx bench abi; the command that was added to `bench`.
Command add_bench_abi(Command bench, Action& action);
void add_formats(Command app, Action& action);
void add_info(Command app, Action& action);
void add_cache(Command app, Action& action);
// kvx cache save and load.
void add_cache_of_model(Command cache, Action& action);
void add_replay(Command app, Action& action);
void add_tune(Command app, Action& action);
void add_probe(Command app, Action& action);

}  // namespace kvx::tool
