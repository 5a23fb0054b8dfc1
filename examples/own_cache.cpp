// A cache that kvx owns: INT8 keys, INT4 values, grown token by token, attended to at every step.
#include <cmath>
#include <cstdio>
#include <kvx/kvx.hpp>
#include <vector>

using namespace kvx::api;

constexpr int kKvHeads = 2, kQHeads = 8, kDim = 64, kLayers = 3, kTokens = 100;

int fail(const char* what, const Failure& failure) {
  std::fprintf(stderr, "%s: %s\n", what, failure.text.c_str());
  return 1;
}

int main() {
  auto config = sized<kvx_cache_config_t>();
  config.num_layers = kLayers;
  config.num_kv_heads = kKvHeads;
  config.k_head_dim = config.v_head_dim = kDim;
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kTokens;
  config.recipe = "int8/int4";
  auto cache = Cache::create(config);
  if (!cache) return fail("create", cache.failure());
  auto sequence = cache->create_sequence();
  if (!sequence) return fail("create_sequence", sequence.failure());

  std::vector<float> q(kQHeads * kDim, 0.1f), k(kKvHeads * kDim, 0.2f), v(kKvHeads * kDim);
  std::vector<float> out(kQHeads * kDim);
  const kvx_rows_t q_rows = rows(q.data(), KVX_DTYPE_F32), k_rows = rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v_rows = rows(v.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = rows(out.data(), KVX_DTYPE_F32);
  const int32_t sequences[] = {*sequence}, one_token[] = {1};
  for (int t = 0; t < kTokens; ++t) {
    for (float& number : v) number = static_cast<float>(t % 8);
    if (auto done = cache->begin_step(sequences, one_token); !done) {
      return fail("begin_step", done.failure());
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      auto args = sized<kvx_step_layer_args_t>();
      args.layer = layer;
      args.num_q_heads = kQHeads;
      args.q = &q_rows;
      args.k = &k_rows;
      args.v = &v_rows;
      args.out = &out_rows;
      if (auto done = cache->step_layer(args); !done) return fail("step_layer", done.failure());
    }
    if (auto done = cache->end_step(); !done) return fail("end_step", done.failure());
  }
  // All keys are alike: the output is the mean of the values 0, 1, ..., 7, 0, ..., of 100 tokens.
  std::printf("the mean of the values is %g\n", static_cast<double>(out[0]));
  return std::fabs(out[0] - 3.42f) < 0.01f ? 0 : 1;
}
