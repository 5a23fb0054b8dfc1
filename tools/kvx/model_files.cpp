// Loads a model and its tokenizer; every message names the option or field.
#include "tools/kvx/model_files.hpp"

#include <cstdio>

namespace kvx::tool {

namespace {

Result<LoadedModel> load(const std::string& path, DType weights, Executor& executor,
                         std::unique_ptr<runner::GpuProducts> gpu) {
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::Model> model,
                       runner::Model::load(path, weights, executor, std::move(gpu)));
  KVX_ASSIGN_OR_RETURN(runner::Tokenizer tokenizer, runner::Tokenizer::create(model->gguf()));
  if (tokenizer.size() != model->config().vocab_size) {
    return invalid_argument("the tokenizer has {} tokens; expected vocab_size, {}",
                            tokenizer.size(), model->config().vocab_size);
  }
  return LoadedModel{std::move(model), std::move(tokenizer)};
}

}  // namespace

Result<std::unique_ptr<runner::GpuProducts>> open_products(const std::string& products_on,
                                                           const std::string& device) {
  const bool is_wanted = products_on == "cuda";
  if (!is_wanted && (products_on == "cpu" || device == "cpu")) {
    return std::unique_ptr<runner::GpuProducts>();
  }
  auto gpu = runner::GpuProducts::create();
  if (gpu.ok() || is_wanted || gpu.error().code != ErrorCode::kUnsupported) return gpu;
  fmt::print(stderr, "matrix products stay on the CPU: {}\n", gpu.error().message);
  return std::unique_ptr<runner::GpuProducts>();
}

Result<LoadedModel> load_model(const std::string& path, const std::string& products,
                               Executor& executor, std::unique_ptr<runner::GpuProducts> gpu) {
  Result<LoadedModel> loaded =
      load(path, products == "bf16" ? DType::kBF16 : DType::kF32, executor, std::move(gpu));
  if (loaded.ok()) return loaded;
  return Error{loaded.error().code, fmt::format("model is '{}'; {}", path, loaded.error().message)};
}

Status use_recipe(const tune::CacheRecipe& recipe, const std::vector<kv::RecipeOverride>& overrides,
                  const runner::Model& model, runner::KvAttentionOptions& cache) {
  KVX_ASSIGN_OR_RETURN(const std::string_view name, model.gguf().string_or("general.name", ""));
  KVX_ASSIGN_OR_RETURN(const std::string_view architecture,
                       model.gguf().string_or("general.architecture", ""));
  KVX_RETURN_IF_ERROR(tune::check_model(recipe, name, architecture));
  const kv::KvCacheConfig config = runner::cache_config_of(model.config(), cache);
  KVX_RETURN_IF_ERROR(tune::check_geometry(recipe, config.geometry, config.block_size));
  cache.recipe = recipe.recipe;
  cache.overrides = recipe.overrides;
  cache.overrides.insert(cache.overrides.end(), overrides.begin(), overrides.end());
  cache.calibration = recipe.calibration();
  return {};
}

Status check_context(const std::string& field, int64_t num_tokens,
                     const runner::ModelConfig& model) {
  if (num_tokens <= model.context_length) return {};
  return invalid_argument("{} is {}; the model's context is {} tokens", field, num_tokens,
                          model.context_length);
}

}  // namespace kvx::tool
