// Where the tests of the assembled cache keep their blocks: the host's memory, or, with
// KVX_TEST_DEVICE=cuda, a GPU's. The same cases run in both places (ctest: kv_test,
// kv_test_on_gpu); without a GPU the latter skip, or fail with KVX_REQUIRE_GPU=1.
#pragma once

#include "kv/kv_step.hpp"

namespace kvx::kv {

// Null: the host.
const ops::CudaContext* test_gpu();
inline bool is_on_gpu() {
  return test_gpu() != nullptr;
}

// What the cache's place asks for; rows are dense f32 on the host, as tests have them. On a GPU
// these copy and wait.
Status append_and_attend(const KvCache& cache, KvStep& step, int num_tokens, int layer,
                         const AttentionParams& params, FloatRows q, FloatRows k, FloatRows v,
                         MutableFloatRows out);
// The same with the cache's own step.
Status append_and_attend(KvCache& cache, int num_tokens, int layer, const AttentionParams& params,
                         FloatRows q, FloatRows k, FloatRows v, MutableFloatRows out);
// The first half of a layer.
Status append(const KvCache& cache, KvStep& step, int num_tokens, int layer, FloatRows k,
              FloatRows v);
Status gather(const KvCache& cache, int sequence, int layer, int64_t first_token,
              int64_t num_tokens, MutableFloatRows k, MutableFloatRows v);

}  // namespace kvx::kv
