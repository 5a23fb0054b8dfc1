// A small tuned recipe with every table, for tests.
#pragma once

#include <random>

#include "tune/tune_file.hpp"

namespace kvx::tune {

inline std::vector<float> random_table(size_t count, uint32_t seed, float low, float high) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> table(count);
  for (float& x : table) x = uniform(random);
  return table;
}

// 2 layers of 2 KV heads of 64: nvfp4, with fp8 of given scales for V's second layer.
inline TuneFile a_tune_file() {
  TuneFile file;
  file.recipe = "nvfp4/fp8_e4m3:k.hadamard,k.search";
  file.layer_overrides = {"1=nvfp4/int8:k.hadamard"};
  file.head_overrides = {"0:1=int8/fp8_e4m3"};
  file.geometry.num_layers = 2;
  file.geometry.num_kv_heads = 2;
  file.geometry.k_head_dim = 64;
  file.geometry.v_head_dim = 64;
  file.layers.resize(2);
  uint32_t seed = 1;
  for (kv::LayerCalibration& layer : file.layers) {
    layer.k.tensor_scales = random_table(2, ++seed, 0.1f, 2);
    layer.k_factor = random_table(128, ++seed, 0.5f, 2);
    layer.v_mean = random_table(128, ++seed, -1, 1);
    layer.v_factor = random_table(128, ++seed, 0.5f, 2);
    layer.k_feedback.resize(2 * 64 * 64);
    for (size_t i = 0; i < layer.k_feedback.size(); ++i) {
      const size_t from = i / 64 % 64;
      if (i % 64 > from) layer.k_feedback[i] = 0.01f * static_cast<float>(i % 7);
    }
    layer.k_rope_mean = random_table(128, ++seed, -3, 3);
    for (int i = 0; i < 32; ++i) layer.k_rope.inv_freq.push_back(1.0 / (1 + i));
  }
  file.layers[0].v.group_scales = random_table(2, ++seed, 0.01f, 0.1f);
  file.layers[0].k_mean = random_table(128, ++seed, -1, 1);
  file.layers[1].k_rope.pairs = kv::RopePairs::kInterleaved;
  file.layers[1].k_rope.attention_scaling = 0.1;
  file.model = {"A small model", "llama", "00112233445566778899aabbccddeeff"};
  file.text_hash = "ffeeddccbbaa99887766554433221100";
  file.date = "2026-11-25";
  file.measured = R"({"kl":0.0123,"windows":[{"ppl":12.5}]})";
  return file;
}

}  // namespace kvx::tune
