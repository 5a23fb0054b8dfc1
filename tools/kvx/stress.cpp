// kvx stress: what caches forget over long texts, on a real model: retrieval, repeated entities and
// the drift of a long text that the model writes.
#include <algorithm>
#include <cstdio>

#include "tools/kvx/cache_options.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/recipe_list.hpp"
#include "tools/kvx/stress/stress_gates.hpp"
#include "tools/kvx/stress/stress_report.hpp"
#include "tools/kvx/stress/stress_run.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

struct StressOptions {
  std::string model;
  std::string base = "bf16";
  std::vector<std::string> caches;
  std::vector<int64_t> lengths;
  int samples = 2;
  int drift = 1024;
  uint64_t seed = 1;
  CacheOptions cache;
  std::string fail_if;
  std::string json;
  std::string html;
};

constexpr const char* kDefaultCaches[] = {"int8", "nvfp4", "nvfp4:auto"};
constexpr int64_t kDefaultLengths[] = {2048, 4096, 8192};
constexpr int64_t kOpeningTokens = 64;  // room for the words before a text that the model writes

// The base cache first, whether it was named or not.
Result<std::vector<tune::CacheRecipe>> recipes_of(const StressOptions& options) {
  KVX_ASSIGN_OR_RETURN(tune::CacheRecipe base, tune::read_recipe(options.base));
  std::vector<tune::CacheRecipe> recipes = {std::move(base)};
  std::vector<std::string> names = options.caches;
  if (names.empty()) names.assign(std::begin(kDefaultCaches), std::end(kDefaultCaches));
  for (const std::string& name : names) {
    KVX_ASSIGN_OR_RETURN(tune::CacheRecipe recipe, tune::read_recipe(name));
    const bool is_there = std::ranges::any_of(recipes, [&](const tune::CacheRecipe& earlier) {
      return earlier.recipe.text == recipe.recipe.text;
    });
    if (!is_there) recipes.push_back(std::move(recipe));
  }
  return recipes;
}

// The model's context bounds the default lengths; a length that was asked for is checked.
Result<std::vector<int64_t>> lengths_of(const StressOptions& options,
                                        const runner::ModelConfig& model) {
  std::vector<int64_t> lengths = options.lengths;
  if (lengths.empty()) {
    for (const int64_t length : kDefaultLengths) {
      if (length <= model.context_length) lengths.push_back(length);
    }
    if (lengths.empty()) lengths.push_back(model.context_length);
  }
  for (const int64_t length : lengths) {
    if (length >= 16 && length <= model.context_length) continue;
    return invalid_argument("lengths has {}; expected 16 to {}, the model's context", length,
                            model.context_length);
  }
  if (options.drift + kOpeningTokens > model.context_length && options.drift > 0) {
    return invalid_argument("drift is {} tokens; expected at most {}, the model's context less {}",
                            options.drift, model.context_length - kOpeningTokens, kOpeningTokens);
  }
  return lengths;
}

Result<StressPlan> plan_of(const StressOptions& options, const runner::Model& model,
                           std::span<const tune::CacheRecipe> recipes,
                           const std::vector<kv::RecipeOverride>& overrides,
                           std::vector<int64_t> lengths) {
  StressPlan plan;
  plan.lengths = std::move(lengths);
  plan.num_samples = options.samples;
  plan.drift_tokens = options.drift;
  plan.seed = options.seed;
  int64_t longest = options.drift > 0 ? options.drift + kOpeningTokens : 0;
  for (const int64_t length : plan.lengths) longest = std::max(longest, length);
  KVX_ASSIGN_OR_RETURN(plan.caches, caches_of(options.cache, recipes, overrides, model, longest));
  return plan;
}

StressReport header_of(const StressOptions& options, const Engine& engine,
                       const runner::Model& model) {
  StressReport report;
  report.version = kVersion;
  report.model = file_name(options.model);
  report.cpu_level = level_text(options.cache, engine, model);
  report.products = options.cache.products;
  report.threads = engine.executor->num_threads();
  report.seed = options.seed;
  report.num_samples = options.samples;
  return report;
}

Result<std::vector<quality::Gate>> gates_of(const StressOptions& options) {
  if (options.fail_if.empty()) return std::vector<quality::Gate>();
  KVX_ASSIGN_OR_RETURN(std::vector<quality::Gate> gates,
                       quality::parse_gates(options.fail_if, quality::GateUse::kStress));
  for (const quality::Gate& gate : gates) {
    if (gate.figure == quality::Figure::kDrift && options.drift == 0) {
      return invalid_argument("fail-if has {} and drift is 0; expected tokens to measure it on",
                              gate.text);
    }
  }
  return gates;
}

Result<Verdict> stress(const StressOptions& options) {
  // Checks without the model come first: a mistyped format should not wait for the weights.
  KVX_ASSIGN_OR_RETURN(const std::vector<tune::CacheRecipe> recipes, recipes_of(options));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::RecipeOverride> overrides,
                       parse_overrides(options.cache.overrides));
  KVX_ASSIGN_OR_RETURN(const std::vector<quality::Gate> gates, gates_of(options));
  const OutputFile outputs[] = {{"json", options.json}, {"html", options.html}};
  KVX_RETURN_IF_ERROR(check_outputs(outputs));
  KVX_ASSIGN_OR_RETURN(const Engine engine, make_engine(options.cache.threads));
  KVX_ASSIGN_OR_RETURN(const LoadedModel loaded, load_model(options.model, options.cache, engine));
  KVX_ASSIGN_OR_RETURN(std::vector<int64_t> lengths, lengths_of(options, loaded.model->config()));
  KVX_ASSIGN_OR_RETURN(const StressPlan plan,
                       plan_of(options, *loaded.model, recipes, overrides, std::move(lengths)));
  StressReport report = header_of(options, engine, *loaded.model);
  Progress progress;
  KVX_RETURN_IF_ERROR(run_stress(*loaded.model, loaded.tokenizer, plan, engine, progress, report));
  progress.finish();
  fmt::print("{}", stress_table(report, wants_color(stdout)));
  if (!options.json.empty()) {
    KVX_RETURN_IF_ERROR(write_file("json", options.json, stress_json(report)));
  }
  if (!options.html.empty()) {
    KVX_RETURN_IF_ERROR(write_file("html", options.html, stress_html(report)));
  }
  return Verdict{failures_of(report, gates)};
}

}  // namespace

void add_stress(Command app, Action& action) {
  Command command = app.add_subcommand(
      "stress", "Measure what caches forget over long texts: retrieval, entities, drift");
  auto o = std::make_shared<StressOptions>();
  command.add_option("-m,--model", o->model, "The model, a GGUF file").required();
  command
      .add_option("--cache", o->caches,
                  "A cache to measure; may be repeated. Without it int8, nvfp4 and nvfp4:auto")
      .repeatable();
  command.add_option("--base", o->base, "The cache that the others are measured against")
      .capture_default_str();
  command
      .add_option("--lengths", o->lengths,
                  "Tokens of the retrieval texts, separated by commas; without it 2048, 4096 and "
                  "8192, as far as the model's context goes")
      .delimiter(',');
  command.add_option("--samples", o->samples, "Texts for each task and length")
      .whole_number(1, 1000)
      .capture_default_str();
  command.add_option("--drift", o->drift, "Tokens of the text that the model writes; 0 is none")
      .whole_number(0, 1 << 20)
      .capture_default_str();
  command.add_option("--seed", o->seed, "Of the texts and of what the model writes")
      .whole_number(0, INT64_MAX)
      .capture_default_str();
  add_cache_options(command, o->cache, "What matrix products compute in");
  command.add_option("--fail-if", o->fail_if,
                     "End with exit code 3 where one of these is true of a cache: passkey<90%, "
                     "needles<90%, entities<90%, nll>0.05 (change of the answers'), drift>0.01, "
                     "saturated>0, nonfinite>0; separated by commas");
  command.add_option("--json", o->json, "Write everything that was measured to this file");
  command.add_option("--html", o->html, "Write a page with charts to this file");
  command.footer(
      "Examples:\n"
      "  kvx stress -m model.gguf\n"
      "  kvx stress -m model.gguf --cache nvfp4:auto --cache int4:auto --html stress.html\n"
      "  kvx stress -m model.gguf --cache nvfp4:auto --fail-if 'passkey<90%,drift>0.01'\n"
      "  kvx stress -m model.gguf --cache int4 --lengths 512 --samples 1 --drift 128  # short\n");
  command.callback([&action, o] { action = [o] { return stress(*o); }; });
}

}  // namespace kvx::tool
