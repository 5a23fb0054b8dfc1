// The options of kvx compare and kvx stress, and the caches that come of them.
#include "tools/kvx/cache_options.hpp"

#include "cache/pool/block_pool.hpp"

namespace kvx::tool {

void add_products_on(Command command, std::string& products_on) {
  command
      .add_option("--products-on", products_on,
                  "Where matrix products run: cpu, cuda (needs cuBLAS), or auto: where the cache "
                  "lies if cuBLAS is found")
      .one_of({"auto", "cpu", "cuda"})
      .capture_default_str();
}

void add_cache_options(Command command, CacheOptions& options, const char* products_help) {
  command
      .add_option("--layers", options.overrides.layers,
                  "Other caches for some layers, as 0,1=bf16; may be repeated")
      .repeatable();
  command
      .add_option("--heads", options.overrides.heads,
                  "Other caches for some heads, layer:head, as 2:0,2:1=int8; may be repeated")
      .repeatable();
  command.add_option("--block-size", options.block_size, "Tokens in a block")
      .whole_number(1, cache::kMaxBlockSize)
      .capture_default_str();
  command.add_option("--products", options.products, products_help)
      .one_of({"f32", "bf16"})
      .capture_default_str();
  add_products_on(command, options.products_on);
  command.add_flag("--fast", options.is_fast,
                   "Attention may be off by 8e-3 of its size where that saves time");
  command
      .add_option("--device", options.device,
                  "Where the caches lie and attention runs: cpu, or cuda for the first GPU")
      .one_of({"cpu", "cuda"})
      .capture_default_str();
  command.add_option("--threads", options.threads, "Threads; 0 is one a core")
      .whole_number(0, kMaxThreads);
}

Result<std::vector<runner::KvAttentionOptions>> caches_of(
    const CacheOptions& options, std::span<const tune::CacheRecipe> recipes,
    const std::vector<kv::RecipeOverride>& overrides, const runner::Model& model,
    int64_t max_tokens) {
  std::vector<runner::KvAttentionOptions> caches;
  for (const tune::CacheRecipe& recipe : recipes) {
    runner::KvAttentionOptions cache;
    cache.block_size = options.block_size;
    const bool is_base = caches.empty();
    KVX_RETURN_IF_ERROR(
        use_recipe(recipe, is_base ? std::vector<kv::RecipeOverride>() : overrides, model, cache));
    if (options.is_fast) cache.precision = ops::Precision::kFast;
    cache.max_tokens = max_tokens;
    cache.on_gpu = options.is_on_gpu();
    caches.push_back(std::move(cache));
  }
  return caches;
}

Result<LoadedModel> load_model(const std::string& path, const CacheOptions& options,
                               const Engine& engine) {
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::GpuProducts> gpu,
                       open_products(options.products_on, options.device));
  return load_model(path, options.products, *engine.executor, std::move(gpu));
}

std::string level_text(const CacheOptions& options, const Engine& engine,
                       const runner::Model& model) {
  std::string text(engine.level_name());
  if (options.is_on_gpu()) text += ", caches on the GPU";
  if (model.multiplies_on_gpu()) text += ", products by cuBLAS";
  return text;
}

}  // namespace kvx::tool
