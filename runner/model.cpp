// Loading tensors into packed matrices, and the forward pass, layer by layer.
#include "runner/model.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "runner/elementwise.hpp"

namespace kvx::runner {
namespace {

std::string layer_tensor(int layer, const char* name) {
  return fmt::format("blk.{}.{}", layer, name);
}

void reserve(std::vector<float>& buffer, int rows, int columns) {
  const size_t size = static_cast<size_t>(rows) * static_cast<size_t>(columns);
  if (buffer.size() < size) buffer.resize(size);
}

}  // namespace

Model::Model(MappedFile file, GgufView gguf, ModelConfig config, DType weights, Executor& executor,
             std::unique_ptr<GpuProducts> gpu)
    : file_(std::move(file)),
      gguf_(std::move(gguf)),
      config_(std::move(config)),
      weights_type_(weights),
      executor_(executor),
      gpu_(std::move(gpu)) {}

Result<std::unique_ptr<Model>> Model::load(const std::string& path, DType weights,
                                           Executor& executor, std::unique_ptr<GpuProducts> gpu) {
  if (weights == DType::kF16) return unsupported("weights are f16; f32 and bf16 are multiplied");
  if (weights == DType::kBF16 && !gpu && !cpu_multiplies_bf16()) {
    return unsupported("weights are bf16; this CPU does not multiply bf16, f32 was expected");
  }
  KVX_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  KVX_ASSIGN_OR_RETURN(GgufView gguf, GgufView::parse(file.bytes()));
  KVX_ASSIGN_OR_RETURN(ModelConfig config, read_model_config(gguf));
  std::unique_ptr<Model> model(new Model(std::move(file), std::move(gguf), std::move(config),
                                         weights, executor, std::move(gpu)));
  KVX_RETURN_IF_ERROR(model->load_weights());
  return model;
}

Status Model::load_weights() {
  const WeightLoader weights(gguf_, weights_type_, weight_memory_, gpu_.get());
  const std::string embedding = "token_embd.weight";
  KVX_ASSIGN_OR_RETURN(
      embedding_,
      weights.find(embedding, std::array{int64_t{config_.hidden}, int64_t{config_.vocab_size}}));
  for (int i = 0; i < config_.num_layers; ++i) {
    KVX_ASSIGN_OR_RETURN(Layer layer, load_layer(i));
    layers_.push_back(std::move(layer));
    file_.release_pages();  // packed is packed: the file and its copy are never both in memory
  }
  KVX_ASSIGN_OR_RETURN(final_norm_, weights.load_vector("output_norm.weight", config_.hidden));
  // A model without output.weight multiplies by its embedding.
  const std::string own = "output.weight";
  const std::string& output = weights.contains(own) ? own : embedding;
  KVX_ASSIGN_OR_RETURN(output_,
                       weights.load_linear(config_.hidden, {{{output, config_.vocab_size}}}));
  file_.release_pages();  // all but the embedding's rows have been packed
  return gpu_ && GpuForward::takes(config_) ? load_gpu_forward() : Status();
}

Status Model::load_gpu_forward() {
  std::vector<GpuLayerWeights> layers;
  for (const Layer& layer : layers_) {
    layers.push_back({layer.attention_norm, layer.qkv->on_gpu(), layer.attention_out->on_gpu(),
                      layer.feed_forward_norm, layer.gate_up->on_gpu(), layer.down->on_gpu()});
  }
  KVX_ASSIGN_OR_RETURN(gpu_forward_, GpuForward::create(*gpu_, config_, std::move(layers),
                                                        final_norm_, *output_->on_gpu()));
  return {};
}

Result<Model::Layer> Model::load_layer(int index) {
  const WeightLoader weights(gguf_, weights_type_, weight_memory_, gpu_.get());
  Layer layer;
  KVX_RETURN_IF_ERROR(load_attention(weights, index, layer));
  KVX_RETURN_IF_ERROR(load_feed_forward(weights, index, layer));
  return layer;
}

Status Model::load_attention(const WeightLoader& weights, int index, Layer& layer) {
  const auto name = [index](const char* part) { return layer_tensor(index, part); };
  const int hidden = config_.hidden;
  KVX_ASSIGN_OR_RETURN(layer.attention_norm, weights.load_vector(name("attn_norm.weight"), hidden));
  int num_columns = config_.attended_size();
  if (config_.is_latent()) {
    num_columns = config_.num_q_heads * config_.latent.value_dim;
    KVX_ASSIGN_OR_RETURN(layer.latent, LatentProjection::load(weights, config_, name("")));
  } else {
    KVX_ASSIGN_OR_RETURN(
        layer.qkv, weights.load_linear(hidden, {{{name("attn_q.weight"), config_.q_size()},
                                                 {name("attn_k.weight"), config_.kv_size()},
                                                 {name("attn_v.weight"), config_.kv_size()}}}));
  }
  KVX_ASSIGN_OR_RETURN(layer.attention_out,
                       weights.load_linear(num_columns, {{{name("attn_output.weight"), hidden}}}));
  return {};
}

Status Model::load_feed_forward(const WeightLoader& weights, int index, Layer& layer) {
  const auto name = [index](const char* part) { return layer_tensor(index, part); };
  const int hidden = config_.hidden;
  const int width = config_.feed_forward;
  KVX_ASSIGN_OR_RETURN(layer.feed_forward_norm,
                       weights.load_vector(name("ffn_norm.weight"), hidden));
  if (config_.has_experts(index)) {
    KVX_ASSIGN_OR_RETURN(layer.experts, Experts::load(weights, config_, name("")));
    return {};
  }
  KVX_ASSIGN_OR_RETURN(layer.gate_up,
                       weights.load_linear(hidden, {{{name("ffn_gate.weight"), width},
                                                     {name("ffn_up.weight"), width}}}));
  KVX_ASSIGN_OR_RETURN(layer.down,
                       weights.load_linear(width, {{{name("ffn_down.weight"), hidden}}}));
  return {};
}

Status Model::forward(std::span<const int> tokens, AttentionBackend& backend, float* hidden,
                      const OnStep& on_step) {
  const size_t num_tokens = tokens.size();
  for (const int token : tokens) {
    if (token < 0 || token >= config_.vocab_size) {
      return invalid_argument("token is {}; 0 to {} is the vocabulary", token,
                              config_.vocab_size - 1);
    }
  }
  const int64_t end = backend.num_tokens() + static_cast<int64_t>(tokens.size());
  if (end > config_.context_length) {
    return out_of_range("the sequence would have {} tokens; the model's context is {}", end,
                        config_.context_length);
  }
  while (!tokens.empty()) {
    const int64_t most = std::min<int64_t>(kMostStepTokens, backend.max_step_tokens());
    if (most <= 0) {
      return out_of_range("the cache is full after {} tokens; {} more were to come",
                          backend.num_tokens(), tokens.size());
    }
    const auto step = tokens.first(std::min(tokens.size(), static_cast<size_t>(most)));
    KVX_RETURN_IF_ERROR(forward_step(step, backend, hidden));
    tokens = tokens.subspan(step.size());
    if (on_step) {
      KVX_RETURN_IF_ERROR(on_step(static_cast<int64_t>(num_tokens - tokens.size())));
    }
    if (hidden != nullptr) hidden += static_cast<int64_t>(step.size()) * config_.hidden;
  }
  return {};
}

Status Model::forward_to_logits(std::span<const int> tokens, AttentionBackend& backend,
                                float* logits, const OnStep& on_step) {
  if (runs_on_gpu(backend)) {
    KVX_RETURN_IF_ERROR(forward(tokens, backend, nullptr, on_step));
    return gpu_forward_->read_logits(logits);
  }
  const auto hidden_size = static_cast<size_t>(config_.hidden);
  std::vector<float> hidden(tokens.size() * hidden_size);
  KVX_RETURN_IF_ERROR(forward(tokens, backend, hidden.data(), on_step));
  return this->logits(hidden.data() + (tokens.size() - 1) * hidden_size, 1, logits);
}

Status Model::forward_step(std::span<const int> tokens, AttentionBackend& backend, float* hidden) {
  const int num_tokens = static_cast<int>(tokens.size());
  embed(tokens);
  const int num_pairs = config_.rope_dims / 2;
  reserve(step_.cosines, num_tokens, num_pairs);
  reserve(step_.sines, num_tokens, num_pairs);
  rope_angles(backend.num_tokens(), num_tokens, config_.rope_frequencies, step_.cosines.data(),
              step_.sines.data());
  KVX_RETURN_IF_ERROR(backend.begin_step(num_tokens));
  const bool on_gpu = runs_on_gpu(backend);
  KVX_RETURN_IF_ERROR(
      on_gpu ? gpu_forward_->run(
                   {num_tokens, step_.x.data(), step_.cosines.data(), step_.sines.data()}, backend)
             : run_layers(num_tokens, backend));
  KVX_RETURN_IF_ERROR(backend.end_step());
  KVX_RETURN_IF_ERROR(backend.record_tokens(tokens));
  if (hidden == nullptr) return {};
  if (on_gpu) return gpu_forward_->read_hidden(hidden);
  rms_norm(step_.x.data(), num_tokens, final_norm_, config_.norm_epsilon, hidden, executor_);
  return {};
}

Status Model::run_layers(int num_tokens, AttentionBackend& backend) {
  reserve(step_.normed, num_tokens, config_.hidden);
  reserve(step_.delta, num_tokens, config_.hidden);
  reserve(step_.q, num_tokens, config_.q_size());
  reserve(step_.k, num_tokens, config_.kv_size());
  if (!config_.is_latent()) reserve(step_.v, num_tokens, config_.kv_size());
  reserve(step_.attended, num_tokens, config_.attended_size());
  reserve(step_.gate, num_tokens, config_.feed_forward);
  reserve(step_.up, num_tokens, config_.feed_forward);
  for (int i = 0; i < config_.num_layers; ++i) {
    KVX_RETURN_IF_ERROR(forward_layer(i, num_tokens, backend));
  }
  return {};
}

Status Model::forward_layer(int index, int num_tokens, AttentionBackend& backend) {
  Layer& layer = layers_[index];
  Activations& a = step_;
  rms_norm(a.x.data(), num_tokens, layer.attention_norm, config_.norm_epsilon, a.normed.data(),
           executor_);
  KVX_RETURN_IF_ERROR(project_rows(layer, num_tokens));
  backend.see_layer_input(index, num_tokens, a.x.data());
  KVX_RETURN_IF_ERROR(backend.append_and_attend(index, num_tokens, a.q.data(), a.k.data(),
                                                config_.is_latent() ? nullptr : a.v.data(),
                                                a.attended.data()));
  KVX_RETURN_IF_ERROR(project_attention(index, a.attended.data(), num_tokens, a.delta.data()));
  add(a.x.data(), a.delta.data(), num_tokens, config_.hidden, executor_);

  rms_norm(a.x.data(), num_tokens, layer.feed_forward_norm, config_.norm_epsilon, a.normed.data(),
           executor_);
  KVX_RETURN_IF_ERROR(feed_forward(layer, num_tokens));
  add(a.x.data(), a.delta.data(), num_tokens, config_.hidden, executor_);
  return {};
}

Status Model::project_rows(Layer& layer, int num_tokens) {
  Activations& a = step_;
  if (layer.latent) {
    return layer.latent->project(a.normed.data(), num_tokens, {a.cosines.data(), a.sines.data()},
                                 a.q.data(), a.k.data(), executor_);
  }
  KVX_RETURN_IF_ERROR(layer.qkv->multiply(
      a.normed.data(), num_tokens, std::array{a.q.data(), a.k.data(), a.v.data()}, executor_));
  rotate(num_tokens, config_.num_q_heads, a.q.data());
  rotate(num_tokens, config_.num_kv_heads, a.k.data());
  return {};
}

Status Model::feed_forward(Layer& layer, int num_tokens) {
  Activations& a = step_;
  if (layer.experts) {
    return layer.experts->feed(a.normed.data(), num_tokens, a.delta.data(), executor_);
  }
  KVX_RETURN_IF_ERROR(layer.gate_up->multiply(a.normed.data(), num_tokens,
                                              std::array{a.gate.data(), a.up.data()}, executor_));
  silu_multiply(a.gate.data(), a.up.data(), num_tokens, config_.feed_forward, executor_);
  return layer.down->multiply(a.gate.data(), num_tokens, std::array{a.delta.data()}, executor_);
}

void Model::embed(std::span<const int> tokens) {
  reserve(step_.x, static_cast<int>(tokens.size()), config_.hidden);
  float* row = step_.x.data();
  for (const int token : tokens) {
    dequantize(embedding_->type, embedding_->row(token), config_.hidden, row);
    row += config_.hidden;
  }
}

void Model::rotate(int num_tokens, int num_heads, float* rows) const {
  rope(rows, num_tokens, num_heads, config_.head_dim, config_.rope_dims / 2, step_.cosines.data(),
       step_.sines.data(), executor_);
}

Status Model::project_attention(int layer, const float* attended, int num_tokens, float* out) {
  Layer& of = layers_[layer];
  if (of.latent) {
    reserve(step_.expanded, num_tokens, config_.num_q_heads * config_.latent.value_dim);
    KVX_RETURN_IF_ERROR(of.latent->expand(attended, num_tokens, step_.expanded.data(), executor_));
    attended = step_.expanded.data();
  }
  return of.attention_out->multiply(attended, num_tokens, std::array{out}, executor_);
}

Status Model::logits(const float* hidden, int num_tokens, float* out) {
  return output_->multiply(hidden, num_tokens, std::array{out}, executor_);
}

}  // namespace kvx::runner
