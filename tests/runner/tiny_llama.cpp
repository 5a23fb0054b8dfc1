// Weights by a rule that make_golden.py has too; the sizes are TinyLlama's there.
#include "tests/runner/tiny_llama.hpp"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>

#include "tests/runner/tiny_weights.hpp"

namespace kvx::tests {
namespace {

constexpr uint64_t kHidden = 16, kFeedForward = 24, kQSize = 32, kKvSize = 16, kVocab = 40;
constexpr int kLayers = 2;

void add_matrix(GgufWriter& writer, const std::string& name, uint64_t columns, uint64_t rows) {
  writer.f32_tensor(name, {columns, rows}, weights(name, columns * rows));
}

void add_norm(GgufWriter& writer, const std::string& name) {
  writer.f32_tensor(name, {kHidden}, weights(name, kHidden, 1.0f));
}

void add_layer(GgufWriter& writer, const std::string& at, bool biases) {
  add_norm(writer, at + "attn_norm.weight");
  add_matrix(writer, at + "attn_q.weight", kHidden, kQSize);
  add_matrix(writer, at + "attn_k.weight", kHidden, kKvSize);
  add_matrix(writer, at + "attn_v.weight", kHidden, kKvSize);
  add_matrix(writer, at + "attn_output.weight", kQSize, kHidden);
  add_norm(writer, at + "ffn_norm.weight");
  add_matrix(writer, at + "ffn_gate.weight", kHidden, kFeedForward);
  add_matrix(writer, at + "ffn_up.weight", kHidden, kFeedForward);
  add_matrix(writer, at + "ffn_down.weight", kFeedForward, kHidden);
  if (!biases) return;
  for (const char* name : {"attn_q.bias", "attn_k.bias", "attn_v.bias"}) {
    const uint64_t size = name == std::string("attn_q.bias") ? kQSize : kKvSize;
    writer.f32_tensor(at + name, {size}, weights(at + name, size));
  }
}

}  // namespace

GgufWriter tiny_llama(bool extras, uint32_t context) {
  GgufWriter writer;
  writer.text("general.architecture", "llama");
  writer.u32("llama.block_count", kLayers);
  writer.u32("llama.embedding_length", kHidden);
  writer.u32("llama.feed_forward_length", kFeedForward);
  writer.u32("llama.attention.head_count", 4);
  writer.u32("llama.attention.head_count_kv", 2);
  writer.u32("llama.attention.key_length", 8);
  writer.u32("llama.attention.value_length", 8);
  writer.u32("llama.context_length", context);
  writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  if (extras) {
    writer.u32("llama.rope.dimension_count", 4);
    writer.text("llama.rope.scaling.type", "linear");
    writer.f32("llama.rope.scaling.factor", 2.0f);
    writer.f32_tensor("rope_freqs.weight", {2}, {1.0f, 2.0f});
    add_matrix(writer, "output.weight", kHidden, kVocab);
  }
  add_matrix(writer, "token_embd.weight", kHidden, kVocab);
  add_norm(writer, "output_norm.weight");
  for (int layer = 0; layer < kLayers; ++layer) {
    add_layer(writer, "blk." + std::to_string(layer) + ".", extras);
  }
  return writer;
}

TemporaryFile::TemporaryFile(const std::vector<uint8_t>& bytes) {
  char name[] = "/tmp/kvx_test_XXXXXX";
  const int fd = ::mkstemp(name);
  path_ = name;
  const bool written =
      fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
  if (fd >= 0) ::close(fd);
  if (!written) throw std::runtime_error("cannot write " + path_);
}

TemporaryFile::~TemporaryFile() {
  std::remove(path_.c_str());
}

}  // namespace kvx::tests
