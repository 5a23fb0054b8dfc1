// The model's dense f32 rows as the cache's views.
#include "runner/kv_attention.hpp"

#include <utility>

#include "device/cpu_level.hpp"
#include "kv/files/transcode.hpp"

namespace kvx::runner {

kv::KvCacheConfig cache_config_of(const ModelConfig& model, const KvAttentionOptions& options) {
  kv::KvCacheConfig config;
  config.geometry.num_layers = model.num_layers;
  config.geometry.num_kv_heads = model.num_kv_heads;
  config.geometry.k_head_dim = model.head_dim;
  config.geometry.v_head_dim = model.value_dim;
  config.geometry.is_latent = model.is_latent();
  config.recipe = options.recipe;
  config.overrides = options.overrides;
  config.calibration = options.calibration;
  config.block_size = options.block_size;
  config.max_tokens_per_sequence = options.max_tokens;
  config.max_sequences = options.max_sequences;
  config.memory_budget_bytes = options.memory_budget_bytes;
  config.prefix = options.prefix;
  config.tiers = options.tiers;
  return config;
}

KvAttention::KvAttention(std::unique_ptr<GpuRows> rows, std::unique_ptr<kv::KvCache> cache,
                         int sequence, const ModelConfig& model, ops::Precision precision)
    : gpu_rows_(std::move(rows)),
      cache_(std::move(cache)),
      sequence_(sequence),
      num_q_heads_(model.num_q_heads),
      num_kv_heads_(model.num_kv_heads),
      head_dim_(model.head_dim),
      value_dim_(model.value_dim),
      is_latent_(model.is_latent()),
      softmax_scale_(model.softmax_scale),
      precision_(precision) {}

Result<std::unique_ptr<KvAttention>> KvAttention::create(const ModelConfig& model,
                                                         const KvAttentionOptions& options,
                                                         Executor& executor) {
  KVX_ASSIGN_OR_RETURN(const device::CpuLevel level, device::choose_cpu_level());
  const ops::CpuContext context{&ops::cpu::kernel_table(level), &executor};
  kv::KvCacheConfig config = cache_config_of(model, options);
  std::unique_ptr<GpuRows> rows;
  if (options.on_gpu) {
    KVX_ASSIGN_OR_RETURN(rows, GpuRows::create(model));
    config.cuda = rows->placement();
  }
  KVX_ASSIGN_OR_RETURN(auto cache, kv::KvCache::create(std::move(config), context));
  KVX_ASSIGN_OR_RETURN(const int sequence, cache->create_sequence());
  return std::unique_ptr<KvAttention>(
      new KvAttention(std::move(rows), std::move(cache), sequence, model, options.precision));
}

Status KvAttention::begin_step(int num_tokens) {
  const kv::StepEntry entry{sequence_, num_tokens};
  return cache_->begin_step({&entry, 1});
}

kv::AttentionParams KvAttention::params() const {
  kv::AttentionParams params;
  params.num_q_heads = num_q_heads_;
  params.softmax_scale = softmax_scale_;
  params.precision = precision_;
  return params;
}

Status KvAttention::append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                                      const float* v, float* out) {
  float* const host_out = out;
  if (gpu_rows_) {
    KVX_RETURN_IF_ERROR(gpu_rows_->put(num_tokens, q, k, v));
    q = gpu_rows_->q();
    k = gpu_rows_->k();
    v = gpu_rows_->v();
    out = gpu_rows_->out();
  }
  const FloatRows values =
      is_latent_ ? FloatRows() : dense_rows(v, DType::kF32, num_kv_heads_, value_dim_);
  KVX_RETURN_IF_ERROR(cache_->append_and_attend(
      layer, params(), dense_rows(q, DType::kF32, num_q_heads_, head_dim_),
      dense_rows(k, DType::kF32, num_kv_heads_, head_dim_), values,
      dense_rows(out, DType::kF32, num_q_heads_, value_dim_)));
  return gpu_rows_ ? gpu_rows_->get(num_tokens, host_out) : Status();
}

std::optional<device::CudaStream> KvAttention::gpu_stream() const {
  if (!gpu_rows_) return std::nullopt;
  return gpu_rows_->placement().context.stream;
}

Status KvAttention::append_and_attend_on_gpu(int layer, int, FloatRows q, FloatRows k, FloatRows v,
                                             MutableFloatRows out) {
  return cache_->append_and_attend(layer, params(), q, k, v, out);
}

Status KvAttention::read_keys(int layer, std::vector<float>& keys) {
  const int64_t num_floats = num_tokens() * num_kv_heads_ * head_dim_;
  keys.resize(static_cast<size_t>(num_floats));
  float* to = keys.data();
  if (gpu_rows_) {
    KVX_ASSIGN_OR_RETURN(to, gpu_rows_->reserve_to_read(num_floats));
  }
  KVX_RETURN_IF_ERROR(cache_->gather(sequence_, layer, 0, num_tokens(),
                                     dense_rows(to, DType::kF32, num_kv_heads_, head_dim_), {}));
  return gpu_rows_ ? gpu_rows_->read(num_floats, keys.data()) : Status();
}

Status KvAttention::reset() {
  KVX_RETURN_IF_ERROR(cache_->free_sequence(sequence_));
  KVX_ASSIGN_OR_RETURN(sequence_, cache_->create_sequence());
  return {};
}

Status KvAttention::reset_to_prefix(const cache::PrefixKeys& keys, std::span<const int> tokens) {
  KVX_RETURN_IF_ERROR(cache_->free_sequence(sequence_));
  KVX_ASSIGN_OR_RETURN(sequence_, cache_->create_sequence_from(keys, tokens));
  return {};
}

Status KvAttention::fork() {
  KVX_ASSIGN_OR_RETURN(const int fork, cache_->fork_sequence(sequence_));
  forked_from_ = std::exchange(sequence_, fork);
  return {};
}

Status KvAttention::return_from_fork() {
  if (forked_from_ < 0) return invalid_argument("the sequence is no fork; call fork() first");
  KVX_RETURN_IF_ERROR(cache_->free_sequence(sequence_));
  sequence_ = std::exchange(forked_from_, -1);
  return {};
}

Status KvAttention::load(const std::string& path, FileOf file) {
  KVX_RETURN_IF_ERROR(cache_->free_sequence(sequence_));
  const Result<int> loaded = file == FileOf::kAnyCache ? kv::transcode_sequence(*cache_, path)
                                                       : cache_->load_sequence(path);
  KVX_ASSIGN_OR_RETURN(sequence_, loaded.ok() ? loaded : cache_->create_sequence());
  return loaded.ok() ? Status{} : Status{loaded.error()};
}

}  // namespace kvx::runner
