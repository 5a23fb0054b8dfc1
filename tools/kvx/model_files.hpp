// A model for a command: weights and tokenizer from one GGUF file.
#pragma once

#include <memory>
#include <string>

#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "runner/tokenizer.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::tool {

struct LoadedModel {
  std::unique_ptr<runner::Model> model;
  runner::Tokenizer tokenizer;
};

// products_on: "cpu", "cuda", or "auto": where the caches' device is, and on the CPU, which a line
// says, where no cuBLAS is found. Null: the CPU multiplies.
Result<std::unique_ptr<runner::GpuProducts>> open_products(const std::string& products_on,
                                                           const std::string& device);

// products: "f32" or "bf16", what the matrix products compute in. gpu: what multiplies instead of
// the CPU, or null.
Result<LoadedModel> load_model(const std::string& path, const std::string& products,
                               Executor& executor,
                               std::unique_ptr<runner::GpuProducts> gpu = nullptr);

// Sets the cache's recipe, overrides (the recipe's own, and `overrides`, which win) and tables.
// INVALID_ARGUMENT: the recipe was tuned for another model.
Status use_recipe(const tune::CacheRecipe& recipe, const std::vector<kv::RecipeOverride>& overrides,
                  const runner::Model& model, runner::KvAttentionOptions& cache);

// INVALID_ARGUMENT when num_tokens exceeds the model's context. field: the option that requests
// them.
Status check_context(const std::string& field, int64_t num_tokens,
                     const runner::ModelConfig& model);

}  // namespace kvx::tool
