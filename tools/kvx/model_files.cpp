// Loads a model and its tokenizer; every message names the option or field.
#include "tools/kvx/model_files.hpp"

namespace kvx::tool {

Result<LoadedModel> load_model(const std::string& path, const std::string& products,
                               Executor& executor) {
  const DType weights = products == "bf16" ? DType::kBF16 : DType::kF32;
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<runner::Model> model,
                       runner::Model::load(path, weights, executor));
  KVX_ASSIGN_OR_RETURN(runner::Tokenizer tokenizer, runner::Tokenizer::create(model->gguf()));
  if (tokenizer.size() != model->config().vocab_size) {
    return invalid_argument("model is '{}'; its tokenizer has {} tokens, its vocabulary {}", path,
                            tokenizer.size(), model->config().vocab_size);
  }
  return LoadedModel{std::move(model), std::move(tokenizer)};
}

Status check_context(const std::string& field, int64_t num_tokens,
                     const runner::ModelConfig& model) {
  if (num_tokens <= model.context_length) return {};
  return invalid_argument("{} is {}; the model's context is {} tokens", field, num_tokens,
                          model.context_length);
}

}  // namespace kvx::tool
