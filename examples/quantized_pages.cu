// Quantised pages in a GPU's memory: append and attend are launches on the engine's stream that
// allocate nothing and wait for nothing. Exits with 77 where no GPU can be used.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <kvx/kvx.hpp>
#include <stdexcept>
#include <vector>

namespace {

constexpr uint32_t kBlocks = 8, kBlockSize = 16, kKvHeads = 2, kQHeads = 8, kDim = 64;
constexpr int kTokens = 40, kNoGpu = 77;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// An array in the GPU's memory, zeroed.
template <class T>
class Device {
 public:
  explicit Device(size_t count) : count_(count) {
    check(cudaMalloc(&data_, count * sizeof(T)));
    check(cudaMemset(data_, 0, count * sizeof(T)));
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) {
    check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  T* data() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// One sequence of 40 tokens in blocks 5, 2 and 7; queries of zeros weigh all tokens alike.
bool run(const char* name, kvx_format_t format, cudaStream_t stream) {
  const std::vector<int32_t> block_ids = {5, 2, 7};
  std::vector<int64_t> slots;
  std::vector<float> values;
  for (int t = 0; t < kTokens; ++t) {
    slots.push_back(int64_t{block_ids[t / kBlockSize]} * kBlockSize + t % kBlockSize);
    values.insert(values.end(), kKvHeads * kDim, 0.1f * static_cast<float>(t));
  }
  const Device<int32_t> device_ids(block_ids), lengths({kTokens}), q_starts({0, 1});
  const Device<int64_t> device_slots(slots);
  const Device<float> rows(values), q(kQHeads * kDim), out(kQHeads * kDim);

  kvx::Pages pages;
  pages.block_size = kBlockSize;
  pages.head_dim = kDim;
  pages.k.format = pages.v.format = format;
  const uint64_t page_bytes = kvx::page_bytes_per_token(pages).value() * kBlockSize;
  const Device<uint8_t> pool(kBlocks * kKvHeads * page_bytes);
  const Device<uint64_t> counters(2);  // what was out of range, and what was not finite
  kvx::Layer layer = kvx::Layer::of_pages(pages, pool.data(), kBlocks, kKvHeads).value();
  layer.set_memory(KVX_MEMORY_DEVICE, counters.data());

  kvx::AppendArgs append;
  append.k = append.v = kvx::rows(rows.data());
  append.slots = kvx::Indices(device_slots.data(), device_slots.size());
  kvx::append(layer, append, stream).value();

  kvx::AttendArgs attend;
  attend.num_q_heads = kQHeads;
  attend.q = kvx::rows(q.data());
  attend.out = kvx::rows(out.data());
  attend.block_table = kvx::packed_table({device_ids.data(), device_ids.size()}, 3);
  attend.seq_lens = kvx::seq_lens({lengths.data(), lengths.size()});
  attend.q_starts = q_starts.data();
  attend.num_queries = 1;  // what the host cannot read on the GPU
  attend.max_q_len = 1;
  const Device<uint8_t> workspace(kvx::attend_workspace(layer, attend).value() + 1);
  attend.workspace = workspace.data();
  attend.workspace_bytes = workspace.size();
  kvx::attend(layer, attend, stream).value();
  check(cudaStreamSynchronize(stream));

  const float result = out.to_host()[0];
  const uint64_t num_skipped = counters.to_host()[0];
  std::printf("%-5s attention gives %.3f, %llu slots were out of range\n", name, result,
              static_cast<unsigned long long>(num_skipped));
  return num_skipped == 0 && std::fabs(result - 1.95f) < 0.05f;
}

}  // namespace

int main() try {
  if ((kvx::features().value().memory_types >> KVX_MEMORY_DEVICE & 1) == 0) {
    std::printf("no GPU that this library has kernels for: nothing was run\n");
    return kNoGpu;
  }
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const bool is_right =
      run("int8", KVX_FORMAT_INT8, stream) && run("nvfp4", KVX_FORMAT_NVFP4, stream);
  check(cudaStreamDestroy(stream));
  return is_right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
