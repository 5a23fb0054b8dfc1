// KvCache: the assembled cache. A recipe and a geometry become block pools; sequences grow in
// steps; each layer of a step appends its K and V and attends, straight from the packed bytes, with
// wide ends where the recipe has them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cache/account.hpp"
#include "kv/layer_plan.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/transform.hpp"

namespace kvx::kv {

// Calibrated numbers that a recipe may need; empty vectors mean none. Scales are steps (value =
// code * scale).
struct StaticScales {
  std::vector<float>
      group_scales;  // [num_kv_heads, groups]; for source=given. fp8: one group, 1.0 when empty
  std::vector<float> tensor_scales;  // [num_kv_heads]; nvfp4's second level, 1.0 when empty
};
struct LayerCalibration {
  StaticScales k;
  StaticScales v;
  // Beside the Hadamard rotation, which the recipe names. mean, factor: [num_kv_heads, head_dim].
  std::vector<float> k_mean, v_mean, k_factor, v_factor;
  std::vector<float> k_block_offset;  // [num_offset_blocks, num_kv_heads, k_head_dim]
};

struct KvCacheConfig {
  CacheGeometry geometry;
  Recipe recipe;
  std::vector<RecipeOverride> overrides;      // later ones win
  std::vector<LayerCalibration> calibration;  // [num_layers] or empty
  int block_size = 64;                        // tokens, 1 to 1024
  int max_sequences = 1;
  int64_t max_tokens_per_sequence = 0;
  int max_step_tokens =
      512;  // of one sequence in one step; wide ends reserve 16-bit blocks for them
};

struct StepEntry {
  int sequence = 0;
  int num_tokens = 0;
};

// Attention's own parameters for one layer. The window is the geometry's.
struct AttentionParams {
  int num_q_heads = 0;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  const float* sinks = nullptr;  // [num_q_heads]
};

class KvCache {
 public:
  // Everything is allocated here. INVALID_ARGUMENT names what does not fit (a head_dim that a
  // format can't do, a missing scale table).
  static Result<std::unique_ptr<KvCache>> create(KvCacheConfig config,
                                                 const ops::CpuContext& context);
  virtual ~KvCache() = default;

  virtual Result<int> create_sequence() = 0;
  virtual void free_sequence(int sequence) = 0;
  virtual int64_t num_tokens(int sequence) const = 0;

  // A step adds tokens to some sequences: begin_step reserves every block of every layer group (all
  // or nothing), each layer then calls append_and_attend once, end_step makes the tokens part of
  // the sequences. abort_step gives the blocks back. OUT_OF_RANGE: a sequence would pass
  // max_tokens_per_sequence, or the pool has too few blocks.
  virtual Status begin_step(std::span<const StepEntry> entries) = 0;
  // Rows are the entries' tokens, one entry after the other. k, v: [tokens, num_kv_heads,
  // head_dim]; q, out: [tokens, num_q_heads, head_dim]. A query sees just what it would see if its
  // tokens came one by one: the step is cut at block borders where that matters.
  virtual Status append_and_attend(int layer, const AttentionParams& params, FloatRows q,
                                   FloatRows k, FloatRows v, MutableFloatRows out) = 0;
  virtual Status end_step() = 0;
  virtual void abort_step() = 0;

  // Stored rows of a sequence's tokens [first_token, first_token + num_tokens), transforms undone,
  // as dense [num_tokens, num_kv_heads, head_dim]; a null target is not wanted.
  virtual Status gather(int sequence, int layer, int64_t first_token, int64_t num_tokens,
                        MutableFloatRows k, MutableFloatRows v) const = 0;

  virtual const KvCacheConfig& config() const = 0;
  // NaN or infinite inputs that given or page-shared scales could not express, since creation.
  virtual int64_t nonfinite_inputs() const = 0;
  virtual cache::MemoryAccount account() const = 0;
};

// What a recipe costs, before anything is allocated: averages over layers, heads, K and V; wide
// ends are counted at the given number of tokens.
struct RecipeCost {
  double bits_per_value = 0;
  double bytes_per_token = 0;  // all layers
  int64_t tokens_per_gib = 0;  // sequences of num_tokens tokens each
};
Result<RecipeCost> cost_of(const KvCacheConfig& config, int64_t num_tokens);

}  // namespace kvx::kv
