// kvx compare: what caches cost and what they lose, on a real model and a real text.
#include <cstdio>

#include "engines/turbomind/policy.hpp"
#include "tools/kvx/cache_options.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/compare/comparison.hpp"
#include "tools/kvx/compare/window_scores.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/recipe_list.hpp"
#include "tools/kvx/report/report.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

constexpr const char* kBaseCache = "bf16";

struct CompareOptions {
  std::string model;
  std::string text;
  std::string formats = "bf16,fp8_e4m3,int8,int8/int4,nvfp4,nvfp4:auto,int4:auto";
  bool has_quant_policies = false;
  int context = 2048;
  int num_windows = 4;
  CacheOptions caches;
  bool attention = false;
  std::string fail_if;
  std::string json;
  std::string html;
};

// The base cache first, whether it was named or not.
std::vector<tune::CacheRecipe> with_base_first(std::vector<tune::CacheRecipe> recipes) {
  const auto base = std::ranges::find_if(
      recipes, [](const tune::CacheRecipe& one) { return one.recipe.text == kBaseCache; });
  if (base == recipes.end()) {
    recipes.insert(recipes.begin(), tune::read_recipe(kBaseCache).value());
  } else {
    std::rotate(recipes.begin(), base, base + 1);
  }
  return recipes;
}

Result<std::vector<int>> tokens_of(const std::string& text, const CompareOptions& options,
                                   const runner::Tokenizer& tokenizer) {
  KVX_ASSIGN_OR_RETURN(std::vector<int> tokens,
                       tokenizer.encode(text, runner::SpecialTokens::kAsText));
  const int64_t wanted = int64_t{options.num_windows} * options.context;
  if (static_cast<int64_t>(tokens.size()) < wanted) {
    return invalid_argument("text is '{}' with {} tokens; {} windows of {} need {}", options.text,
                            tokens.size(), options.num_windows, options.context, wanted);
  }
  return tokens;
}

std::string joined(const OverrideTexts& texts) {
  std::string text;
  for (const std::string& one : texts.layers) text += " --layers " + one;
  for (const std::string& one : texts.heads) text += " --heads " + one;
  return text.empty() ? text : text.substr(1);
}

CompareReport header_of(const CompareOptions& options, const Engine& engine,
                        const runner::Model& model) {
  CompareReport report;
  report.version = kVersion;
  report.model = file_name(options.model);
  report.text = file_name(options.text);
  report.cpu_level = level_text(options.caches, engine, model);
  report.products = options.caches.products;
  report.threads = engine.executor->num_threads();
  report.context = options.context;
  report.num_windows = options.num_windows;
  report.num_scored_tokens = int64_t{options.num_windows} * num_scored(options.context);
  report.overrides = joined(options.caches.overrides);
  return report;
}

Result<std::vector<quality::Gate>> gates_of(const CompareOptions& options) {
  if (options.fail_if.empty()) return std::vector<quality::Gate>();
  return quality::parse_gates(options.fail_if);
}

// TurboMind's caches of LMDeploy's policies 0, 4, 8 and 16, the last in both of its formats and
// rotated, which TurboMind's own kernels do not read.
Result<std::string> quant_policy_formats() {
  using engines::turbomind::KvCacheMode;
  std::string formats;
  for (const KvCacheMode mode : {KvCacheMode::kNone, KvCacheMode::kInt4, KvCacheMode::kInt8,
                                 KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    KVX_ASSIGN_OR_RETURN(const std::string recipe,
                         engines::turbomind::recipe_of(mode, DType::kF16));
    formats += recipe + ",";
  }
  return formats +
         "mxfp4_g16:order=turbomind,mxfp4_g16:hadamard,search,order=turbomind,"
         "nvfp4:hadamard,search,order=turbomind";
}

Result<Verdict> run_compare(const CompareOptions& options) {
  // Checks without the model come first: a mistyped format should not wait for the weights.
  std::string formats = options.formats;
  if (options.has_quant_policies) {
    KVX_ASSIGN_OR_RETURN(formats, quant_policy_formats());
  }
  KVX_ASSIGN_OR_RETURN(std::vector<tune::CacheRecipe> recipes, read_recipe_list(formats));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::RecipeOverride> overrides,
                       parse_overrides(options.caches.overrides));
  KVX_ASSIGN_OR_RETURN(std::vector<quality::Gate> gates, gates_of(options));
  const bool measures_logits = options.attention || need_logits(gates);
  const OutputFile outputs[] = {{"json", options.json}, {"html", options.html}};
  KVX_RETURN_IF_ERROR(check_outputs(outputs));
  KVX_ASSIGN_OR_RETURN(const std::string text, read_file("text", options.text));
  KVX_ASSIGN_OR_RETURN(const Engine engine, make_engine(options.caches.threads));
  KVX_ASSIGN_OR_RETURN(const LoadedModel loaded, load_model(options.model, options.caches, engine));
  KVX_RETURN_IF_ERROR(check_context("ctx", options.context, loaded.model->config()));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> tokens, tokens_of(text, options, loaded.tokenizer));

  ComparisonPlan plan{{}, options.context, options.num_windows, measures_logits};
  KVX_ASSIGN_OR_RETURN(plan.caches, caches_of(options.caches, with_base_first(std::move(recipes)),
                                              overrides, *loaded.model, options.context));
  CompareReport report = header_of(options, engine, *loaded.model);
  report.gates = std::move(gates);
  Progress progress;
  KVX_ASSIGN_OR_RETURN(report.caches,
                       compare_caches(*loaded.model, tokens, plan, engine, progress));
  progress.finish();
  fmt::print("{}", report_table(report, wants_color(stdout)));
  if (!options.json.empty()) {
    KVX_RETURN_IF_ERROR(write_file("json", options.json, report_json(report)));
  }
  if (!options.html.empty()) {
    KVX_RETURN_IF_ERROR(write_file("html", options.html, report_html(report)));
  }
  Verdict verdict;
  for (const GateFailure& failure : failures_of(report)) verdict.failures.push_back(failure.text());
  return verdict;
}

}  // namespace

void add_compare(Command app, Action& action) {
  Command command =
      app.add_subcommand("compare", "Measure what caches cost and lose on a model and a text");
  auto o = std::make_shared<CompareOptions>();
  command.add_option("-m,--model", o->model, "The model, a GGUF file").required();
  command.add_option("-f,--text", o->text, "The text, UTF-8").required();
  command
      .add_option("--formats", o->formats,
                  "Caches, separated by commas; bf16 is always run, as the base")
      .capture_default_str();
  command.add_flag("--quant-policies", o->has_quant_policies,
                   "In place of --formats: LMDeploy's policies 0, 4, 8 and 16 in TurboMind's "
                   "blocks, and what the rotation changes");
  command.add_option("--ctx", o->context, "Tokens in a window; its second half is scored")
      .whole_number(4, 1 << 24)
      .capture_default_str();
  command.add_option("--chunks", o->num_windows, "Windows, from the beginning of the text")
      .whole_number(1, 1 << 20)
      .capture_default_str();
  add_cache_options(
      command, o->caches,
      "What matrix products compute in; with f32 the figures depend on the cache alone");
  command.add_flag("--attention", o->attention,
                   "Measure attention's logits too: the worst layer and KV head of each cache");
  command.add_option("--fail-if", o->fail_if,
                     "End with exit code 3 where one of these is true of a cache: ppl>0.2%, "
                     "kl>0.01, top1<99%, cosine<0.999, error>0.05 (attention's output), "
                     "logit_cosine<0.999, logit_error>0.05, saturated>0, nonfinite>0; separated "
                     "by commas");
  command.add_option("--json", o->json, "Write everything that was measured to this file");
  command.add_option("--html", o->html, "Write a page with charts to this file");
  command.footer(
      "Examples:\n"
      "  kvx compare -m model.gguf -f text.txt\n"
      "  kvx compare -m model.gguf -f text.txt --formats int8,nvfp4,nvfp4:auto --html report.html\n"
      "  kvx compare -m model.gguf -f text.txt --formats int4:auto --layers 0,29=bf16 --chunks 8\n"
      "  kvx compare -m model.gguf -f text.txt --formats nvfp4:auto --fail-if 'ppl>1%,kl>0.01'\n"
      "  kvx compare -m model.gguf -f text.txt --quant-policies\n"
      "\n'kvx formats --help' explains how a cache is named.");
  command.callback([&action, o] { action = [o] { return run_compare(*o); }; });
}

}  // namespace kvx::tool
