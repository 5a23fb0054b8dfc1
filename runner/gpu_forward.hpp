// GpuForward: a Llama's layers with everything on a GPU: a step's rows go up once, logits or the
// last hidden rows come back, and the host waits for nothing in between.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "device/cuda_async.hpp"
#include "runner/attention_backend.hpp"
#include "runner/gpu_products.hpp"
#include "runner/model_config.hpp"

namespace kvx::runner {

// A layer's weights; norms on the host, products where GpuProducts has put them.
struct GpuLayerWeights {
  std::span<const float> attention_norm;
  GpuLinear* qkv = nullptr;
  GpuLinear* attention_out = nullptr;
  std::span<const float> feed_forward_norm;
  GpuLinear* gate_up = nullptr;
  GpuLinear* down = nullptr;
};

// One model's, and one thread's at a time. products, config and the weights outlive it.
class GpuForward {
 public:
  // Whether it computes such a model: attention by heads of their own, no experts, an even
  // head_dim. Others compute all but their products and attention on the host.
  static bool takes(const ModelConfig& config);

  // Requires: takes(config). Errors are those of the device's memory.
  static Result<std::unique_ptr<GpuForward>> create(GpuProducts& products,
                                                    const ModelConfig& config,
                                                    std::vector<GpuLayerWeights> layers,
                                                    std::span<const float> final_norm,
                                                    GpuLinear& output);

  // What a step begins with, on the host: embedded tokens [num_tokens, hidden], and for each the
  // angles of its rotation [num_tokens, rope_dims / 2].
  struct Step {
    int num_tokens = 0;
    const float* x = nullptr;
    const float* cosines = nullptr;
    const float* sines = nullptr;
  };
  // All layers, with K and V appended to the backend, whose step is open. On its way when it
  // returns. Requires: backend.gpu_stream().
  Status run(const Step& step, AttentionBackend& backend);

  // Of the last run(): [num_tokens, hidden] after the last norm, and the logits after its last
  // token, [vocab_size]. Both wait.
  Status read_hidden(float* hidden);
  Status read_logits(float* logits);

 private:
  // Rows of a step, on the device.
  struct Buffers {
    cache::Region normed, qkv, attended, rounded, delta, gate_up, activated, hidden;
    cache::Region tables;         // [x of all tokens][cosines][sines]; x is summed up there
    cache::Region pinned_tables;  // on the host
  };
  struct Norms {
    const float* attention = nullptr;
    const float* feed_forward = nullptr;
  };

  GpuForward(GpuProducts& products, const ModelConfig& config, std::vector<GpuLayerWeights> layers,
             GpuLinear& output, device::CudaEvent sent)
      : products_(products),
        config_(config),
        layers_(std::move(layers)),
        output_(output),
        sent_(std::move(sent)) {}
  Status upload_norms(std::span<const float> final_norm);
  Status reserve(int num_tokens);
  Status send(const Step& step);
  Status attend(int layer, AttentionBackend& backend);
  // What lies between the attention of one layer and the next: segment i ends before layer i's.
  Status launch_segment(int segment);
  // The same, of one token by a graph that is captured once.
  Status run_segment(int segment);
  // Up to a layer's attention, from the sum that the layer before it left; and behind it.
  Status before_attention(int layer, const GpuLinear* sum_of);
  Status after_attention(int layer);
  Status add_norm(const GpuLinear* sum_of, const float* weights, float* also_f32);
  int64_t table_floats(int num_tokens) const;

  GpuProducts& products_;
  const ModelConfig& config_;
  std::vector<GpuLayerWeights> layers_;
  GpuLinear& output_;
  device::CudaEvent sent_;  // the pinned tables may be written again
  cache::Region norm_weights_;
  std::vector<Norms> norms_;
  const float* final_norm_ = nullptr;
  Buffers buffers_;
  int reserved_tokens_ = 0;
  // Of steps of one token, [num_layers + 1]; empty before the second of them with these buffers.
  std::vector<device::CudaGraph> graphs_;
  bool has_run_one_token_ = false;
  cache::Region logits_;          // [vocab_size]
  cache::Region pinned_results_;  // on the host: logits, or hidden rows

  device::CudaStream stream_ = nullptr;  // of the last run
  int num_tokens_ = 0;                   // likewise
};

}  // namespace kvx::runner
