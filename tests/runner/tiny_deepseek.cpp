// The sizes are TinyDeepseek's in make_deepseek_golden.py.
#include "tests/runner/tiny_deepseek.hpp"

#include "tests/runner/tiny_weights.hpp"

namespace kvx::tests {
namespace {

constexpr uint64_t kHidden = 16, kHeads = 2, kLatent = 8, kRotary = 4, kNope = 6, kValue = 5;
constexpr uint64_t kFeedForward = 24, kVocab = 40, kRank = 12;
constexpr uint64_t kExperts = 4, kExpertWidth = 10;
constexpr int kLayers = 3;

void add(GgufWriter& writer, const std::string& name, const std::vector<uint64_t>& dims) {
  uint64_t count = 1;
  for (const uint64_t dim : dims) count *= dim;
  writer.f32_tensor(name, dims, weights(name, count));
}

void add_norm(GgufWriter& writer, const std::string& name, uint64_t size) {
  writer.f32_tensor(name, {size}, weights(name, size, 1.0f));
}

void add_attention(GgufWriter& writer, const std::string& at, bool extras) {
  constexpr uint64_t kQuerySize = kHeads * (kNope + kRotary);
  add_norm(writer, at + "attn_norm.weight", kHidden);
  add(writer, at + "attn_kv_a_mqa.weight", {kHidden, kLatent + kRotary});
  add_norm(writer, at + "attn_kv_a_norm.weight", kLatent);
  add(writer, at + "attn_output.weight", {kHeads * kValue, kHidden});
  if (extras) {
    add(writer, at + "attn_q_a.weight", {kHidden, kRank});
    add_norm(writer, at + "attn_q_a_norm.weight", kRank);
    add(writer, at + "attn_q_b.weight", {kRank, kQuerySize});
    add(writer, at + "attn_k_b.weight", {kNope, kLatent, kHeads});
    add(writer, at + "attn_v_b.weight", {kLatent, kValue, kHeads});
  } else {
    add(writer, at + "attn_q.weight", {kHidden, kQuerySize});
    add(writer, at + "attn_kv_b.weight", {kLatent, kHeads * (kNope + kValue)});
  }
}

void add_feed_forward(GgufWriter& writer, const std::string& at, bool has_experts, bool extras) {
  add_norm(writer, at + "ffn_norm.weight", kHidden);
  if (!has_experts) {
    add(writer, at + "ffn_gate.weight", {kHidden, kFeedForward});
    add(writer, at + "ffn_up.weight", {kHidden, kFeedForward});
    add(writer, at + "ffn_down.weight", {kFeedForward, kHidden});
    return;
  }
  add(writer, at + "ffn_gate_inp.weight", {kHidden, kExperts});
  if (extras) add(writer, at + "exp_probs_b.bias", {kExperts});
  add(writer, at + "ffn_gate_exps.weight", {kHidden, kExpertWidth, kExperts});
  add(writer, at + "ffn_up_exps.weight", {kHidden, kExpertWidth, kExperts});
  add(writer, at + "ffn_down_exps.weight", {kExpertWidth, kHidden, kExperts});
  add(writer, at + "ffn_gate_shexp.weight", {kHidden, kExpertWidth});
  add(writer, at + "ffn_up_shexp.weight", {kHidden, kExpertWidth});
  add(writer, at + "ffn_down_shexp.weight", {kExpertWidth, kHidden});
}

void add_values(GgufWriter& writer, bool extras, const std::map<std::string, uint32_t>& changes) {
  const auto u32 = [&](const std::string& name, uint64_t value) {
    const auto changed = changes.find(name);
    const auto written = static_cast<uint32_t>(value);
    writer.u32("deepseek2." + name, changed == changes.end() ? written : changed->second);
  };
  writer.text("general.architecture", "deepseek2");
  u32("block_count", kLayers);
  u32("embedding_length", kHidden);
  u32("feed_forward_length", kFeedForward);
  u32("attention.head_count", kHeads);
  u32("context_length", 64);
  writer.f32("deepseek2.attention.layer_norm_rms_epsilon", 1e-5f);
  u32("attention.kv_lora_rank", kLatent);
  u32("rope.dimension_count", kRotary);
  u32("leading_dense_block_count", 1);
  u32("expert_count", kExperts);
  u32("expert_used_count", 2);
  u32("expert_shared_count", 1);
  u32("expert_feed_forward_length", kExpertWidth);
  if (!extras) {
    u32("attention.key_length", kNope + kRotary);
    u32("attention.value_length", kValue);
    return;
  }
  u32("attention.key_length", kLatent + kRotary);
  u32("attention.value_length", kLatent);
  u32("attention.key_length_mla", kNope + kRotary);
  u32("attention.value_length_mla", kValue);
  u32("attention.q_lora_rank", kRank);
  u32("expert_gating_func", 2);
  u32("expert_group_count", 2);
  u32("expert_group_used_count", 1);
  writer.value("deepseek2.expert_weights_norm", kGgufBool, true);
  writer.f32("deepseek2.expert_weights_scale", 2.5f);
  writer.text("deepseek2.rope.scaling.type", "yarn");
  writer.f32("deepseek2.rope.scaling.factor", 4.0f);
  u32("rope.scaling.original_context_length", 16);
  writer.f32("deepseek2.rope.scaling.yarn_log_multiplier", 0.1f);
}

}  // namespace

GgufWriter tiny_deepseek(bool extras, const std::map<std::string, uint32_t>& changes) {
  GgufWriter writer;
  add_values(writer, extras, changes);
  add(writer, "token_embd.weight", {kHidden, kVocab});
  add(writer, "output.weight", {kHidden, kVocab});
  add_norm(writer, "output_norm.weight", kHidden);
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string at = "blk." + std::to_string(layer) + ".";
    add_attention(writer, at, extras);
    add_feed_forward(writer, at, layer > 0, extras);
  }
  return writer;
}

}  // namespace kvx::tests
