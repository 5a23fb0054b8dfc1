// The place of the tests' caches, and rows to and from it.
#include "tests/kv/place.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

namespace kvx::kv {
namespace {

bool is_set(const char* variable, std::string_view value) {
  const char* found = std::getenv(variable);
  return found != nullptr && found == value;
}

bool wants_gpu() {
  return is_set("KVX_TEST_DEVICE", "cuda");
}

// Without a GPU each case skips, so that each is counted.
class PlaceListener final : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo&) override {
    const Result<device::CudaDevice> device = device::open_cuda_device();
    if (device.ok()) return;
    if (is_set("KVX_REQUIRE_GPU", "1")) FAIL() << device.error().message;
    GTEST_SKIP() << device.error().message;
  }
};

[[maybe_unused]] const bool is_registered = [] {
  if (wants_gpu()) {
    testing::UnitTest::GetInstance()->listeners().Append(new PlaceListener);
  }
  return true;
}();

// Dense f32 rows where the caches lie.
class PlacedRows {
 public:
  // Requires: a GPU. Null data: none.
  PlacedRows(const void* rows, int64_t num_tokens, int64_t token_stride)
      : bytes_(rows == nullptr ? 0 : num_tokens * token_stride * bytes_of(DType::kF32)) {
    if (bytes_ == 0) return;
    static const auto memory = cache::cuda_memory(0);
    region_ = memory.value()->allocate(bytes_, "a test's rows").value();
    EXPECT_TRUE(device::cuda_copy(region_.data(), rows, bytes_).ok());
  }
  uint8_t* data() const { return region_.data(); }
  void fetch(void* rows) const {
    if (bytes_ == 0) return;
    EXPECT_TRUE(device::cuda_copy(rows, region_.data(), bytes_).ok());
  }

 private:
  int64_t bytes_;
  cache::Region region_;
};

template <class Rows>
PlacedRows placed(Rows& rows, int64_t num_tokens) {
  PlacedRows copy(rows.data, num_tokens, rows.token_stride);
  rows.data = copy.data();
  return copy;
}

template <class Target>
Status append_and_attend_on_gpu(Target& target, int num_tokens, int layer,
                                const AttentionParams& params, FloatRows q, FloatRows k,
                                FloatRows v, MutableFloatRows out) {
  void* const host_out = out.data;
  const PlacedRows rows[] = {placed(q, num_tokens), placed(k, num_tokens), placed(v, num_tokens),
                             placed(out, num_tokens)};
  const Status done = target.append_and_attend(layer, params, q, k, v, out);
  const Status synchronized = device::cuda_synchronize(test_gpu()->stream);
  rows[3].fetch(host_out);
  return done.ok() ? synchronized : done;
}

}  // namespace

const ops::CudaContext* test_gpu() {
  static const ops::CudaContext* const found = []() -> const ops::CudaContext* {
    if (!wants_gpu()) return nullptr;
    const Result<device::CudaDevice> device = device::open_cuda_device();
    if (!device.ok()) return nullptr;
    // Never destroyed: caches of any test use it.
    static auto* const stream =
        new device::OwnedCudaStream(device::OwnedCudaStream::create().value());
    return new ops::CudaContext{device.value(), stream->get()};
  }();
  return found;
}

Status append_and_attend(const KvCache& cache, KvStep& step, int num_tokens, int layer,
                         const AttentionParams& params, FloatRows q, FloatRows k, FloatRows v,
                         MutableFloatRows out) {
  if (cache.config().cuda) {
    return append_and_attend_on_gpu(step, num_tokens, layer, params, q, k, v, out);
  }
  return step.append_and_attend(layer, params, q, k, v, out);
}

Status append_and_attend(KvCache& cache, int num_tokens, int layer, const AttentionParams& params,
                         FloatRows q, FloatRows k, FloatRows v, MutableFloatRows out) {
  if (cache.config().cuda) {
    return append_and_attend_on_gpu(cache, num_tokens, layer, params, q, k, v, out);
  }
  return cache.append_and_attend(layer, params, q, k, v, out);
}

Status append(const KvCache& cache, KvStep& step, int num_tokens, int layer, FloatRows k,
              FloatRows v) {
  if (!cache.config().cuda) return step.append(layer, k, v);
  const PlacedRows rows[] = {placed(k, num_tokens), placed(v, num_tokens)};
  KVX_RETURN_IF_ERROR(step.append(layer, k, v));
  return device::cuda_synchronize(test_gpu()->stream);
}

Status gather(const KvCache& cache, int sequence, int layer, int64_t first_token,
              int64_t num_tokens, MutableFloatRows k, MutableFloatRows v) {
  if (!cache.config().cuda) return cache.gather(sequence, layer, first_token, num_tokens, k, v);
  void* const host_k = k.data;
  void* const host_v = v.data;
  const PlacedRows rows[] = {placed(k, num_tokens), placed(v, num_tokens)};
  KVX_RETURN_IF_ERROR(cache.gather(sequence, layer, first_token, num_tokens, k, v));
  KVX_RETURN_IF_ERROR(cache.synchronize());
  rows[0].fetch(host_k);
  rows[1].fetch(host_v);
  return {};
}

}  // namespace kvx::kv
