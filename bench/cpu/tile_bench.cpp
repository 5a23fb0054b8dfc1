// What attention's packed kernels cost for one tile of 64 tokens in the first cache: scores and
// weighted sums, by format and CPU level. bench/cpu/README.md says how to read it.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "bench/cpu/single_step.hpp"
#include "bench/cpu/tile_case.hpp"

namespace kvx::bench {
namespace {

struct Options {
  std::vector<std::string> levels;
  std::vector<std::string> formats = {"bf16",        "f16",  "fp8_e4m3",    "fp8_e5m2", "int8",
                                      "int8_affine", "int4", "int4_affine", "mxfp4",    "nvfp4"};
  Shape shape;
  int rounds = 200;
  int calls = 0;
  bool counts = false;
  std::string trace;
};

using Cases = std::vector<std::unique_ptr<Case>>;

std::vector<uint64_t> must_trace(const std::function<void()>& call) {
  std::string error;
  std::vector<uint64_t> addresses = trace_call(call, error);
  if (addresses.empty()) fail(error);
  return addresses;
}

void print_times(const Cases& cases, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    for (const auto& one : cases) one->measure();
  }
  fmt::print("| format | level | scores, us | values, us | both, us |\n|---|---|---:|---:|---:|\n");
  for (const auto& one : cases) {
    fmt::print("| {} | {} | {:.3f} | {:.3f} | {:.3f} |\n", one->format_name, one->level_name,
               one->score_us, one->values_us, one->score_us + one->values_us);
  }
}

void print_counts(const Cases& cases) {
  fmt::print("| format | level | scores | values | both, a token |\n|---|---|---:|---:|---:|\n");
  for (const auto& one : cases) {
    const size_t scores = must_trace([&] { one->score(); }).size();
    const size_t values = must_trace([&] { one->add_values(); }).size();
    fmt::print("| {} | {} | {} | {} | {} |\n", one->format_name, one->level_name, scores, values,
               (scores + values) / kMaxTileTokens);
  }
}

void write_trace(Case& one, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) fail(fmt::format("{} cannot be written", path));
  for (const uint64_t address : must_trace([&] {
         one.score();
         one.add_values();
       })) {
    fmt::print(file, "{:x}\n", address);
  }
  std::fclose(file);
}

void run(const Options& options) {
  Cases cases;
  for (const std::string& format : options.formats) {
    for (const std::string& level : options.levels) {
      cases.push_back(std::make_unique<Case>(format, level, options.shape));
    }
  }
  for (int i = 0; i < options.calls; ++i) {
    for (const auto& one : cases) {
      one->score();
      one->add_values();
    }
  }
  if (options.calls > 0) return;
  if (!options.trace.empty()) return write_trace(*cases.front(), options.trace);
  options.counts ? print_counts(cases) : print_times(cases, options.rounds);
}

}  // namespace
}  // namespace kvx::bench

int main(int argc, char** argv) {
  kvx::bench::Options options;
  bool fast = false;
  CLI::App app{"What attention's packed kernels cost for a tile of 64 tokens in the first cache"};
  app.add_option("formats", options.formats, "formats; default: ten of them");
  app.add_option("--levels", options.levels,
                 "CPU levels, which take turns; default: this machine's")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--head-dim", options.shape.head_dim, "numbers of a row")
      ->check(CLI::Range(16, 256));
  app.add_option("--rows", options.shape.rows, "query rows")->check(CLI::Range(1, 8));
  app.add_option("--rounds", options.rounds, "rounds of ten calls")->check(CLI::Range(1, 1000000));
  app.add_flag("--fast", fast, "queries of 8 bits");
  app.add_flag("--count", options.counts, "instructions instead of times");
  app.add_option("--calls", options.calls, "make so many calls and print nothing")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--trace", options.trace, "file for the addresses of a call's instructions");
  CLI11_PARSE(app, argc, argv);
  if (options.levels.empty()) {
    const auto best = kvx::bench::must(kvx::device::choose_cpu_level());
    options.levels.emplace_back(kvx::device::name_of(best));
  }
  if (fast) options.shape.precision = kvx::ops::Precision::kFast;
  kvx::bench::run(options);
  return 0;
}
