// kvx tune: a cache's tables and options from a text, chosen by what they are worth, as one file.
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "cache/prefix/content_hash.hpp"
#include "runner/mapped_file.hpp"
#include "tools/kvx/cache_options.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/tune/budget.hpp"
#include "tools/kvx/tune/options.hpp"
#include "tools/kvx/tune/report.hpp"
#include "tools/kvx/tune/tuner.hpp"
#include "tune/tune_file.hpp"

namespace kvx::tool {
namespace {

struct TuneOptions {
  std::string model;
  CorpusOptions corpus;
  std::string out;
  std::string cache = "nvfp4:auto";
  std::string budget;
  double bits = 0;
  std::string widen = "heads";
  double percentile = 99.9;
  int block_size = 64;
  std::string products = "f32";
  std::string products_on = "auto";
  std::string device = "cpu";
  int threads = 0;
};

// "models/llama.kvxtune" of "models/llama.gguf".
std::string default_out(const std::string& model) {
  return std::filesystem::path(model).replace_extension(".kvxtune").string();
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

Result<tune::ModelIdentity> identity_of(const std::string& path, const runner::Model& model) {
  KVX_ASSIGN_OR_RETURN(const runner::MappedFile file, runner::MappedFile::open(path));
  tune::ModelIdentity identity;
  KVX_ASSIGN_OR_RETURN(identity.name, model.gguf().string_or("general.name", ""));
  KVX_ASSIGN_OR_RETURN(identity.architecture, model.gguf().string("general.architecture"));
  identity.hash = hex(cache::checksum(file.bytes()));
  return identity;
}

Result<tune::TuneFile> file_of(const TuneOptions& options, const runner::Model& model,
                               const Corpus& corpus, const Candidate& candidate,
                               runner::KvAttentionOptions cache, std::string measured) {
  tune::TuneFile file;
  file.recipe = candidate.recipe;
  KVX_ASSIGN_OR_RETURN(OverrideTexts overrides, candidate.override_texts());
  file.layer_overrides = std::move(overrides.layers);
  file.head_overrides = std::move(overrides.heads);
  file.geometry = runner::cache_config_of(model.config(), cache).geometry;
  file.layers = std::move(cache.calibration);
  KVX_ASSIGN_OR_RETURN(file.model, identity_of(options.model, model));
  file.text_hash = corpus.text_hash;
  file.date = today();
  file.measured = std::move(measured);
  return file;
}

// Checks without the model come first: a mistyped option should not wait for the weights.
Status check(const TuneOptions& options, Goal& goal) {
  KVX_ASSIGN_OR_RETURN(goal, parse_goal(options.budget, options.bits));
  const Result<kv::Recipe> recipe = kv::parse_recipe(options.cache);
  if (!recipe.ok()) {
    return Error{recipe.error().code, fmt::format("cache: {}", recipe.error().message)};
  }
  KVX_RETURN_IF_ERROR(tune::check_percentile(options.percentile));
  return check_can_replace("out", options.out);
}

// Adds a row to what was judged.
Status judge(const std::string& name, const Candidate& candidate, const runner::Model& model,
             Tuner& tuner, TuneReport& report) {
  KVX_ASSIGN_OR_RETURN(const runner::KvAttentionOptions cache, tuner.fit(candidate));
  KVX_ASSIGN_OR_RETURN(
      const kv::RecipeCost cost,
      kv::cost_of(runner::cache_config_of(model.config(), cache), cache.max_tokens));
  KVX_ASSIGN_OR_RETURN(quality::CacheQuality quality, tuner.verify(candidate));
  report.judged.push_back({name, cost.bits_per_value, cost.bytes_per_token, std::move(quality)});
  return {};
}

Result<Verdict> run_tune(TuneOptions options) {
  const auto start = std::chrono::steady_clock::now();
  if (options.out.empty()) options.out = default_out(options.model);
  Goal goal;
  KVX_RETURN_IF_ERROR(check(options, goal));
  KVX_ASSIGN_OR_RETURN(const Engine engine, make_engine(options.threads));
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::GpuProducts> gpu,
                       open_products(options.products_on, options.device));
  KVX_ASSIGN_OR_RETURN(const LoadedModel loaded, load_model(options.model, options.products,
                                                            *engine.executor, std::move(gpu)));
  runner::Model& model = *loaded.model;
  KVX_RETURN_IF_ERROR(check_context("ctx", options.corpus.context, model.config()));
  KVX_ASSIGN_OR_RETURN(const Corpus corpus, read_corpus(options.corpus, loaded.tokenizer));

  Progress progress;
  Work work(progress);
  work.plan(static_cast<double>(corpus.num_prompt_tokens()));
  const CacheSetup setup{options.corpus.context, options.block_size, options.device == "cuda"};
  Tuner tuner(model, corpus, setup, engine, work);
  KVX_RETURN_IF_ERROR(tuner.collect());
  TuneReport report;
  report.num_prompts = static_cast<int>(corpus.prompts.size());
  report.num_prompt_tokens = corpus.num_prompt_tokens();
  KVX_ASSIGN_OR_RETURN(Candidate best,
                       tuner.choose_options(options.cache, options.percentile, report.tried));
  if (goal.kind != Goal::Kind::kNone) {
    const Budget::Unit unit = options.widen == "heads" ? Budget::Unit::kHead : Budget::Unit::kLayer;
    Budget budget(model, corpus, setup, unit, engine, work, tuner);
    KVX_ASSIGN_OR_RETURN(best, budget.plan(best, goal));
    report.plan = budget.assignment();
  }
  work.begin("judging the result");
  KVX_ASSIGN_OR_RETURN(const Candidate plain, untuned(options.cache));
  KVX_RETURN_IF_ERROR(judge(options.cache, plain, model, tuner, report));
  KVX_RETURN_IF_ERROR(judge("tuned", best, model, tuner, report));
  KVX_ASSIGN_OR_RETURN(runner::KvAttentionOptions cache, tuner.fit(best));
  report.recipe = best.recipe;
  KVX_ASSIGN_OR_RETURN(report.overrides, best.override_texts());
  progress.finish();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{}", report.text(wants_color(stdout)));

  Verdict verdict;
  if (std::optional<std::string> failure = report.failure(goal)) {
    verdict.failures.push_back(std::move(*failure));
    return verdict;
  }
  KVX_ASSIGN_OR_RETURN(const tune::TuneFile file,
                       file_of(options, model, corpus, best, std::move(cache), report.json()));
  KVX_RETURN_IF_ERROR(tune::write_tune_file(options.out, file));
  fmt::print("\nwrote {}; use it as --cache tuned:{}\n", options.out, options.out);
  return verdict;
}

}  // namespace

void add_tune(Command app, Action& action) {
  Command command = app.add_subcommand(
      "tune", "Calibrate a cache on a text and keep what makes it better, as a .kvxtune file");
  auto o = std::make_shared<TuneOptions>();
  command.add_option("-m,--model", o->model, "The model, a GGUF file").required();
  command
      .add_option("-f,--text", o->corpus.text,
                  "A text, UTF-8: its first windows are collected from, the next are judged on")
      .required();
  command.add_option(
      "--prompts", o->corpus.prompts,
      "Collect from these prompts instead: JSON lines with prompt, text or messages");
  command
      .add_option("--num-prompts", o->corpus.num_prompts,
                  "Prompts to collect from; by default 8 windows of the text, or all lines")
      .whole_number(1, 1 << 20);
  command.add_option("--out", o->out, "The file to write; by default the model's name .kvxtune");
  command.add_option("--cache", o->cache, "The cache to tune; see kvx formats --help")
      .capture_default_str();
  command.add_option("--budget", o->budget,
                     "Widen layers and heads until it is kept: kl=0.01, or ppl=0.5% of perplexity");
  command
      .add_option("--bits", o->bits,
                  "Widen layers and heads as far as these bits a number go, as 4.75")
      .number(1, 32);
  command
      .add_option("--widen", o->widen,
                  "What a budget widens at a time: single KV heads, or all of a layer")
      .one_of({"heads", "layers"})
      .capture_default_str();
  command
      .add_option("--percentile", o->percentile,
                  "Where given scales may clip; the maximum is tried too")
      .capture_default_str();
  command.add_option("--ctx", o->corpus.context, "Tokens in a window, and the most of a prompt")
      .whole_number(16, 1 << 24)
      .capture_default_str();
  command
      .add_option("--chunks", o->corpus.num_windows,
                  "Windows that options are chosen on, and as many that judge the result")
      .whole_number(1, 1 << 20)
      .capture_default_str();
  command.add_option("--block-size", o->block_size, "Tokens in a block")
      .whole_number(1, cache::kMaxBlockSize)
      .capture_default_str();
  command.add_option("--products", o->products, "What matrix products compute in")
      .one_of({"f32", "bf16"})
      .capture_default_str();
  add_products_on(command, o->products_on);
  command
      .add_option("--device", o->device,
                  "Where the caches lie, attention runs and rows are counted: cpu, or cuda for the "
                  "first GPU")
      .one_of({"cpu", "cuda"})
      .capture_default_str();
  command.add_option("--threads", o->threads, "Threads; 0 is one a core")
      .whole_number(0, kMaxThreads);
  command.footer(
      "Examples:\n"
      "  kvx tune -m model.gguf -f text.txt --cache nvfp4:immediate --out model.kvxtune\n"
      "  kvx tune -m model.gguf -f text.txt --cache int4:auto --budget kl=0.005\n"
      "  kvx tune -m model.gguf -f text.txt --prompts chats.jsonl --num-prompts 128\n"
      "\nExit code 3: nothing keeps the budget; the best is printed and nothing is written.");
  command.callback([&action, o] { action = [o] { return run_tune(*o); }; });
}

}  // namespace kvx::tool
