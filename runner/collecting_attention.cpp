// Rows are collected before they are appended, so that a cache that fails leaves no trace in them.
#include "runner/collecting_attention.hpp"

namespace kvx::runner {

kv::Rope rope_of(const ModelConfig& config) {
  return {kv::RopePairs::kInterleaved, config.rope_frequencies, 1.0};
}

Result<tune::Statistics> make_statistics(const ModelConfig& config) {
  if (config.is_latent()) {
    return unsupported(
        "the model caches latent rows, whose tables are not collected; expected a llama, or a "
        "recipe without tables");
  }
  tune::StatisticsConfig shape;
  shape.num_layers = config.num_layers;
  shape.num_q_heads = config.num_q_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.k_head_dim = config.head_dim;
  shape.v_head_dim = config.head_dim;
  shape.rope = rope_of(config);
  return tune::Statistics::create(std::move(shape));
}

CollectingAttention::CollectingAttention(AttentionBackend& base, tune::Statistics& statistics,
                                         const ops::CpuContext& context,
                                         std::span<const kv::LayerTables> transforms,
                                         int block_size)
    : base_(base),
      statistics_(statistics),
      context_(context),
      transforms_(transforms),
      block_size_(block_size) {}

Status CollectingAttention::append_and_attend(int layer, int num_tokens, const float* q,
                                              const float* k, const float* v, float* out) {
  const int64_t position = base_.num_tokens();
  Executor& executor = *context_.executor;
  if (transforms_.empty()) {
    KVX_RETURN_IF_ERROR(statistics_.feed_queries(layer, position, num_tokens, q, executor));
    KVX_RETURN_IF_ERROR(statistics_.feed(layer, position, num_tokens, k, v, executor));
  } else {
    KVX_RETURN_IF_ERROR(tune::feed_transformed(statistics_, context_,
                                               transforms_[layer].transform(), block_size_, layer,
                                               position, num_tokens, k, v));
  }
  return base_.append_and_attend(layer, num_tokens, q, k, v, out);
}

Status CollectingAttention::append_and_attend_on_gpu(int layer, int num_tokens, FloatRows q,
                                                     FloatRows k, FloatRows v,
                                                     MutableFloatRows out) {
  const int64_t position = base_.num_tokens();
  const device::CudaStream stream = *base_.gpu_stream();
  KVX_RETURN_IF_ERROR(on_gpu_->feed_queries(stream, layer, position, num_tokens, q));
  KVX_RETURN_IF_ERROR(on_gpu_->feed(stream, layer, position, num_tokens, k, v));
  return base_.append_and_attend_on_gpu(layer, num_tokens, q, k, v, out);
}

}  // namespace kvx::runner
