// The README's example: a cache of packed blocks, a prompt appended and attended to, the memory
// that it took.
#include <cstdio>
#include <vector>

#include "kv/kv_cache.hpp"

int main() {
  constexpr int kTokens = 48, kQHeads = 9, kKvHeads = 3, kHeadDim = 64;
  const std::vector<float> q(kTokens * kQHeads * kHeadDim, 0.5f);
  const std::vector<float> k(kTokens * kKvHeads * kHeadDim, 0.25f), v(k.size(), 2.0f);
  std::vector<float> out(q.size());
  const auto rows = [](auto* data, int heads) {
    return kvx::dense_rows(data, kvx::DType::kF32, heads, kHeadDim);
  };

  // begin README
  const auto threads = kvx::make_thread_pool(0);
  const kvx::ops::CpuContext cpu{
      &kvx::ops::cpu::kernel_table(kvx::device::choose_cpu_level().value()), threads.get()};
  kvx::kv::KvCacheConfig config;
  config.geometry = {.num_layers = 1, .num_kv_heads = 3, .k_head_dim = 64, .v_head_dim = 64};
  config.recipe = kvx::kv::parse_recipe("nvfp4:auto").value();
  config.max_tokens_per_sequence = 8192;
  const auto cache = kvx::kv::KvCache::create(config, cpu).value();

  const kvx::kv::StepEntry step{cache->create_sequence().value(), kTokens};
  const bool ok = cache->begin_step({&step, 1}).ok() &&
                  cache
                      ->append_and_attend(0, {.num_q_heads = kQHeads, .softmax_scale = 0.125f},
                                          rows(q.data(), kQHeads), rows(k.data(), kKvHeads),
                                          rows(v.data(), kKvHeads), rows(out.data(), kQHeads))
                      .ok() &&
                  cache->end_step().ok();
  // end README

  const long long bytes = cache->sequence_bytes(kTokens).total();
  std::printf("%d tokens in %lld bytes, out[0] = %g\n", kTokens, bytes, out[0]);
  return ok && out[0] == 2.0f ? 0 : 1;
}
