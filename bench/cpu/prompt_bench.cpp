// How fast prompts attend: the queries at the end of a sequence on all of its tokens, by format and
// CPU level, in one thread. With --decode it is a token of each of several sequences. Recipes and
// levels take turns, so that what else the machine does meets them alike.
#include <CLI/CLI.hpp>
#include <memory>

#include "bench/cpu/tile_case.hpp"
#include "kv/recipe.hpp"
#include "tools/kvx/bench/bench_cache.hpp"

namespace kvx::bench {
namespace {

using tool::BenchCache;
using tool::BenchShape;

struct Options {
  std::vector<std::string> levels;
  std::vector<std::string> recipes = {"bf16", "f16",         "fp8_e4m3", "int8", "int8_affine",
                                      "int4", "int4_affine", "mxfp4",    "nvfp4"};
  BenchShape shape = {.num_sequences = 1,
                      .length = 4096,
                      .num_kv_heads = 1,
                      .num_q_heads = 4,
                      .prefill_tokens = 512};
  int rounds = 9;
  int decoded_sequences = 0;
};

// The products of queries and the tokens that they see, and of probabilities and values.
double prefill_flop(const BenchShape& shape) {
  const double hidden = (shape.prefill_tokens - 1) / 2.0;
  const double pairs = shape.prefill_tokens * (shape.length - hidden);
  return 2.0 * pairs * shape.num_q_heads * (shape.head_dim + shape.value_dim());
}

struct Prompt {
  Prompt(const std::string& recipe, device::CpuLevel level, const BenchShape& shape)
      : cache(must(BenchCache::create(shape, must(kv::parse_recipe(recipe)),
                                      {&ops::cpu::kernel_table(level), &serial_executor()}))) {
    check(cache->append_all());
  }

  static void check(const Status& status) {
    if (!status.ok()) fail(status.error().message);
  }

  void measure(bool decodes) {
    const double start = thread_microseconds();
    check(decodes ? cache->attend_decode() : cache->attend_prefill(0));
    microseconds = std::min(microseconds, thread_microseconds() - start);
  }

  std::unique_ptr<BenchCache> cache;
  double microseconds = 1e12;
};

// One for each recipe and level.
using Prompts = std::vector<std::vector<Prompt>>;

void print_row(const Options& options, const std::string& recipe,
               const std::vector<Prompt>& levels) {
  fmt::print("| {} |", recipe);
  for (const Prompt& one : levels) {
    if (options.decoded_sequences > 0) {
      fmt::print(" {:.2f} |", one.microseconds * 1e-3);
    } else {
      fmt::print(" {:.1f} |", prefill_flop(options.shape) / one.microseconds * 1e-3);
    }
  }
  fmt::print(" {:.2f} |\n", levels.front().microseconds / levels.back().microseconds);
}

void run(const Options& options) {
  const bool decodes = options.decoded_sequences > 0;
  BenchShape shape = options.shape;
  if (decodes) shape.num_sequences = options.decoded_sequences;
  Prompts prompts;
  for (const std::string& recipe : options.recipes) {
    for (prompts.emplace_back(); const std::string& level : options.levels) {
      prompts.back().emplace_back(recipe, level_named(level), shape);
    }
  }
  for (int i = 0; i < options.rounds; ++i) {
    for (std::vector<Prompt>& levels : prompts) {
      for (Prompt& one : levels) one.measure(decodes);
    }
  }
  std::string head = "| recipe |";
  std::string rule = "|---|";
  for (const std::string& level : options.levels) {
    head += fmt::format(" {}, {} |", level, decodes ? "ms" : "GFLOP/s");
    rule += "---:|";
  }
  fmt::print("{} first's time / last's |\n{}---:|\n", head, rule);
  for (size_t i = 0; i < prompts.size(); ++i) print_row(options, options.recipes[i], prompts[i]);
}

}  // namespace
}  // namespace kvx::bench

int main(int argc, char** argv) {
  kvx::bench::Options options;
  CLI::App app{"How fast a prompt's queries attend, by format and CPU level, in one thread"};
  app.add_option("recipes", options.recipes, "recipes; default: nine formats");
  app.add_option("--levels", options.levels,
                 "CPU levels, which take turns; default: this machine's")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--tokens", options.shape.length, "of the sequence");
  app.add_option("--queries", options.shape.prefill_tokens, "the last tokens of the sequence");
  app.add_option("--head-dim", options.shape.head_dim, "numbers of a row");
  app.add_option("--heads", options.shape.num_kv_heads, "KV heads");
  app.add_option("--q-heads", options.shape.num_q_heads, "query heads of all of them");
  app.add_option("--rounds", options.rounds, "calls of every level")->check(CLI::Range(1, 1000000));
  app.add_option("--decode", options.decoded_sequences,
                 "decode a token of so many sequences instead of a prompt's, and print ms")
      ->check(CLI::Range(1, 1 << 20));
  app.add_flag("--fast", options.shape.is_fast, "queries of 8 bits");
  CLI11_PARSE(app, argc, argv);
  if (options.levels.empty()) {
    const auto best = kvx::bench::must(kvx::device::choose_cpu_level());
    options.levels.emplace_back(kvx::device::name_of(best));
  }
  kvx::bench::run(options);
  return 0;
}
