// A layer is nine launches beside its attention: two norms (each adds what the products before it
// computed), the rotation, the activation, four products, and in bf16 one that rounds attention's
// output.
#include "runner/gpu_forward.hpp"

#include <algorithm>
#include <cstring>

#include "core/rows.hpp"
#include "runner/elementwise_cuda.hpp"

namespace kvx::runner {
namespace {

float* floats(const cache::Region& region) {
  return reinterpret_cast<float*>(region.data());
}

}  // namespace

bool GpuForward::takes(const ModelConfig& config) {
  return !config.is_latent() && config.experts.num_experts == 0 && config.head_dim % 2 == 0;
}

Result<std::unique_ptr<GpuForward>> GpuForward::create(GpuProducts& products,
                                                       const ModelConfig& config,
                                                       std::vector<GpuLayerWeights> layers,
                                                       std::span<const float> final_norm,
                                                       GpuLinear& output) {
  KVX_ASSIGN_OR_RETURN(device::CudaEvent sent, device::CudaEvent::create());
  std::unique_ptr<GpuForward> forward(
      new GpuForward(products, config, std::move(layers), output, std::move(sent)));
  KVX_RETURN_IF_ERROR(forward->upload_norms(final_norm));
  const int64_t bytes = int64_t{config.vocab_size} * 4;
  KVX_ASSIGN_OR_RETURN(forward->logits_, products.memory().allocate(bytes, "logits"));
  KVX_ASSIGN_OR_RETURN(forward->pinned_results_, products.pinned().allocate(bytes, "logits"));
  return forward;
}

// All norms in one region, one behind the other.
Status GpuForward::upload_norms(std::span<const float> final_norm) {
  std::vector<float> all;
  for (const GpuLayerWeights& layer : layers_) {
    all.insert(all.end(), layer.attention_norm.begin(), layer.attention_norm.end());
    all.insert(all.end(), layer.feed_forward_norm.begin(), layer.feed_forward_norm.end());
  }
  all.insert(all.end(), final_norm.begin(), final_norm.end());
  const int64_t bytes = std::ssize(all) * 4;
  KVX_ASSIGN_OR_RETURN(norm_weights_, products_.memory().allocate(bytes, "norms"));
  KVX_RETURN_IF_ERROR(device::cuda_copy(norm_weights_.data(), all.data(), bytes));
  const float* at = floats(norm_weights_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    norms_.push_back({at, at + config_.hidden});
    at += 2 * config_.hidden;
  }
  final_norm_ = at;
  return {};
}

int64_t GpuForward::table_floats(int num_tokens) const {
  return int64_t{num_tokens} * (config_.hidden + config_.rope_dims / 2 * 2);
}

Status GpuForward::reserve(int num_tokens) {
  if (num_tokens <= reserved_tokens_) return {};
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_));  // the buffers are in use
  reserved_tokens_ = 0;
  buffers_ = {};
  graphs_.clear();
  has_run_one_token_ = false;
  const auto allocate = [&](cache::Region& region, int64_t size_of_token) -> Status {
    KVX_ASSIGN_OR_RETURN(
        region, products_.memory().allocate(num_tokens * size_of_token * 4, "rows of a step"));
    return {};
  };
  const int64_t qkv_size = config_.q_size() + 2 * config_.kv_size();
  const int64_t hidden = config_.hidden;
  KVX_RETURN_IF_ERROR(allocate(buffers_.normed, hidden));
  KVX_RETURN_IF_ERROR(allocate(buffers_.qkv, qkv_size));
  KVX_RETURN_IF_ERROR(allocate(buffers_.attended, config_.attended_size()));
  KVX_RETURN_IF_ERROR(allocate(buffers_.rounded, config_.attended_size()));
  KVX_RETURN_IF_ERROR(allocate(buffers_.delta, hidden));
  KVX_RETURN_IF_ERROR(allocate(buffers_.gate_up, int64_t{2} * config_.feed_forward));
  KVX_RETURN_IF_ERROR(allocate(buffers_.activated, config_.feed_forward));
  KVX_RETURN_IF_ERROR(allocate(buffers_.hidden, hidden));
  KVX_RETURN_IF_ERROR(allocate(buffers_.tables, table_floats(1)));
  const int64_t bytes = table_floats(num_tokens) * 4;
  KVX_ASSIGN_OR_RETURN(buffers_.pinned_tables, products_.pinned().allocate(bytes, "tables"));
  reserved_tokens_ = num_tokens;
  return {};
}

// x stays where it comes to: its norms and sums are computed there.
Status GpuForward::send(const Step& step) {
  KVX_RETURN_IF_ERROR(sent_.wait());
  uint8_t* to = buffers_.pinned_tables.data();
  const auto add = [&](const float* numbers, int64_t count) {
    std::memcpy(to, numbers, static_cast<size_t>(count) * 4);
    to += count * 4;
  };
  const int64_t num_pairs = config_.rope_dims / 2;
  add(step.x, int64_t{step.num_tokens} * config_.hidden);
  add(step.cosines, step.num_tokens * num_pairs);
  add(step.sines, step.num_tokens * num_pairs);
  KVX_RETURN_IF_ERROR(device::cuda_copy_async(buffers_.tables.data(), buffers_.pinned_tables.data(),
                                              to - buffers_.pinned_tables.data(), stream_));
  return sent_.record(stream_);
}

Status GpuForward::run(const Step& step, AttentionBackend& backend) {
  stream_ = *backend.gpu_stream();
  KVX_RETURN_IF_ERROR(products_.use_stream(stream_));
  KVX_RETURN_IF_ERROR(reserve(step.num_tokens));
  num_tokens_ = step.num_tokens;
  KVX_RETURN_IF_ERROR(send(step));
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    KVX_RETURN_IF_ERROR(run_segment(layer));
    KVX_RETURN_IF_ERROR(attend(layer, backend));
  }
  KVX_RETURN_IF_ERROR(run_segment(config_.num_layers));
  has_run_one_token_ = has_run_one_token_ || num_tokens_ == 1;
  return products_.record_work(stream_);
}

Status GpuForward::launch_segment(int segment) {
  const GpuLinear* sum_of = nullptr;
  if (segment > 0) {
    KVX_RETURN_IF_ERROR(after_attention(segment - 1));
    sum_of = layers_[segment - 1].down;
  }
  if (segment < config_.num_layers) return before_attention(segment, sum_of);
  return add_norm(sum_of, final_norm_, floats(buffers_.hidden));
}

// The first step of one token is launched piece by piece: what CUDA and cuBLAS load then could not
// be captured.
Status GpuForward::run_segment(int segment) {
  if (num_tokens_ != 1 || !has_run_one_token_) return launch_segment(segment);
  if (segment >= std::ssize(graphs_)) {
    KVX_ASSIGN_OR_RETURN(device::CudaGraph graph, device::CudaGraph::capture(stream_, [&] {
                           return launch_segment(segment);
                         }));
    graphs_.push_back(std::move(graph));
  }
  return graphs_[static_cast<size_t>(segment)].launch(stream_);
}

// sum_of: whose product is added to x first, without its bias yet; null: nothing is.
Status GpuForward::add_norm(const GpuLinear* sum_of, const float* weights, float* also_f32) {
  gpu::NormArgs args;
  args.x = floats(buffers_.tables);
  if (sum_of != nullptr) args.delta = {floats(buffers_.delta), sum_of->bias()};
  args.weights = weights;
  args.epsilon = config_.norm_epsilon;
  args.normed = buffers_.normed.data();
  args.also_f32 = also_f32;
  return gpu::launch_add_norm(stream_, args, num_tokens_, config_.hidden, output_.type());
}

Status GpuForward::before_attention(int layer, const GpuLinear* sum_of) {
  GpuLinear& qkv = *layers_[layer].qkv;
  KVX_RETURN_IF_ERROR(add_norm(sum_of, norms_[layer].attention, nullptr));
  KVX_RETURN_IF_ERROR(
      qkv.multiply_on_gpu(buffers_.normed.data(), num_tokens_, floats(buffers_.qkv)));
  gpu::RotateArgs args;
  args.rows = floats(buffers_.qkv);
  args.bias = qkv.bias();
  args.num_pairs = config_.rope_dims / 2;
  args.cosines = floats(buffers_.tables) + int64_t{num_tokens_} * config_.hidden;
  args.sines = args.cosines + int64_t{num_tokens_} * args.num_pairs;
  args.num_q_heads = config_.num_q_heads;
  args.num_kv_heads = config_.num_kv_heads;
  args.head_dim = config_.head_dim;
  return gpu::launch_rotate(stream_, args, num_tokens_);
}

Status GpuForward::attend(int layer, AttentionBackend& backend) {
  const int64_t token_stride = config_.q_size() + 2 * config_.kv_size();
  const auto rows_from = [&](int64_t first) {
    FloatRows rows = dense_rows(static_cast<const void*>(floats(buffers_.qkv) + first), DType::kF32,
                                1, config_.head_dim);
    rows.token_stride = token_stride;
    return rows;
  };
  return backend.append_and_attend_on_gpu(
      layer, num_tokens_, rows_from(0), rows_from(config_.q_size()),
      rows_from(config_.q_size() + config_.kv_size()),
      dense_rows(static_cast<void*>(buffers_.attended.data()), DType::kF32, config_.num_q_heads,
                 config_.value_dim));
}

Status GpuForward::after_attention(int layer) {
  const GpuLayerWeights& weights = layers_[layer];
  const void* attended = buffers_.attended.data();
  if (weights.attention_out->type() != DType::kF32) {
    const int64_t count = int64_t{num_tokens_} * config_.attended_size();
    KVX_RETURN_IF_ERROR(gpu::launch_round(stream_, floats(buffers_.attended), count,
                                          weights.attention_out->type(), buffers_.rounded.data()));
    attended = buffers_.rounded.data();
  }
  KVX_RETURN_IF_ERROR(
      weights.attention_out->multiply_on_gpu(attended, num_tokens_, floats(buffers_.delta)));
  KVX_RETURN_IF_ERROR(add_norm(weights.attention_out, norms_[layer].feed_forward, nullptr));
  KVX_RETURN_IF_ERROR(weights.gate_up->multiply_on_gpu(buffers_.normed.data(), num_tokens_,
                                                       floats(buffers_.gate_up)));
  KVX_RETURN_IF_ERROR(gpu::launch_silu_multiply(
      stream_, {floats(buffers_.gate_up), weights.gate_up->bias()}, num_tokens_,
      config_.feed_forward, weights.down->type(), buffers_.activated.data()));
  return weights.down->multiply_on_gpu(buffers_.activated.data(), num_tokens_,
                                       floats(buffers_.delta));
}

Status GpuForward::read_hidden(float* hidden) {
  const int64_t bytes = int64_t{num_tokens_} * config_.hidden * 4;
  if (bytes > pinned_results_.bytes()) {
    pinned_results_ = {};
    KVX_ASSIGN_OR_RETURN(pinned_results_, products_.pinned().allocate(bytes, "hidden rows"));
  }
  KVX_RETURN_IF_ERROR(
      device::cuda_copy_async(pinned_results_.data(), buffers_.hidden.data(), bytes, stream_));
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_));
  std::memcpy(hidden, pinned_results_.data(), static_cast<size_t>(bytes));
  return {};
}

Status GpuForward::read_logits(float* logits) {
  KVX_RETURN_IF_ERROR(products_.use_stream(stream_));
  const int64_t last = int64_t{num_tokens_ - 1} * config_.hidden * bytes_of(output_.type());
  KVX_RETURN_IF_ERROR(output_.multiply_on_gpu(buffers_.normed.data() + last, 1, floats(logits_)));
  KVX_RETURN_IF_ERROR(
      device::cuda_copy_async(pinned_results_.data(), logits_.data(), logits_.bytes(), stream_));
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream_));
  std::memcpy(logits, pinned_results_.data(), static_cast<size_t>(logits_.bytes()));
  return {};
}

}  // namespace kvx::runner
