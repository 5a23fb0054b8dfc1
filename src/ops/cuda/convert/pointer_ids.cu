// A thread for each entry of the table.
#include "core/checked.hpp"
#include "ops/cuda/convert/pointer_ids.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops {
namespace {

constexpr int kThreads = 128;

struct IdParams {
  PointerTable table;
  int32_t* ids;
  DeviceCounters* counters;
};

// -1: the address begins no block.
__device__ int64_t id_of(const PointerPool& pool, const uint8_t* block, int64_t num_blocks) {
  const auto distance = static_cast<uint64_t>(block - pool.base);
  const auto stride = static_cast<uint64_t>(pool.stride);
  if (distance % stride != 0) return -1;
  const uint64_t id = distance / stride;
  return id < static_cast<uint64_t>(num_blocks) ? static_cast<int64_t>(id) : -1;
}

__global__ void __launch_bounds__(kThreads) find_ids(const __grid_constant__ IdParams params) {
  cuda::wait_for_earlier_launches();
  const PointerTable& table = params.table;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= table.count) return;
  int64_t id = id_of(table.pool, table.blocks[i], table.num_blocks);
  if (table.scale_blocks != nullptr &&
      id_of(table.scale_pool, table.scale_blocks[i], table.num_blocks) != id) {
    id = -1;
  }
  if (id < 0) atomicAdd(&params.counters->out_of_range, 1ull);
  params.ids[i] = static_cast<int32_t>(id);
}

}  // namespace

Status pointer_ids(const CudaContext& context, const PointerTable& table, int32_t* ids,
                   DeviceCounters* counters) {
  if (table.count == 0) return {};
  const auto ctas = static_cast<unsigned>(ceil_div<int64_t>(table.count, kThreads));
  return cuda::launch_overlapping(context, "pointer_ids", find_ids,
                                  {.grid = dim3(ctas), .threads = kThreads},
                                  {table, ids, counters});
}

}  // namespace kvx::ops
