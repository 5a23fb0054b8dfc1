// A thread for each entry of the packed table.
#include "ops/cuda/convert/pack_table.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops {
namespace {

using copy_rows::block_id_of;
using copy_rows::TableView;

constexpr int kThreads = 128;

__device__ int32_t ragged_id(const PackTable& from, int64_t row, int64_t block) {
  const TableView& table = from.table;
  const int64_t first = table.indptr.at(row), end = table.indptr.at(row + 1);
  if (first < 0 || end > table.num_indices) return -1;
  if (table.kind == TableView::Kind::kRaggedPages) {
    return first + block < end ? block_id_of(table.indices.at(first + block)) : -1;
  }
  const int64_t first_token = first + block * from.block_size;
  if (first_token >= end) return -1;
  const int64_t entry = table.indices.at(first_token);
  for (int64_t t = first_token + 1; t < first_token + from.block_size && t < end; ++t) {
    if (table.indices.at(t) != entry) return -1;
  }
  return block_id_of(entry);
}

__device__ int32_t kv_offset_id(const TableView& table, int64_t row, int64_t block) {
  const int64_t k = table.indices.at(2 * row * table.max_blocks + block);
  const int64_t v = table.indices.at((2 * row + 1) * table.max_blocks + block);
  return v == k + 1 ? block_id_of(k) : -1;
}

struct PackParams {
  PackTable from;
  int32_t* ids;
  int32_t* lengths;
};

__global__ void pack(const __grid_constant__ PackParams params) {
  cuda::wait_for_earlier_launches();
  const PackTable& from = params.from;
  const TableView& table = from.table;
  const int64_t row = blockIdx.y;
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block == 0) params.lengths[row] = block_id_of(from.lengths.at(row / table.num_beams));
  if (block >= table.max_blocks) return;
  int32_t id = -1;
  switch (table.kind) {
    case TableView::Kind::kPacked:
      id = block_id_of(table.indices.at(row * from.row_stride + block));
      break;
    case TableView::Kind::kRaggedTokens:
    case TableView::Kind::kRaggedPages:
      id = ragged_id(from, row, block);
      break;
    case TableView::Kind::kKvOffsets:
      id = kv_offset_id(table, row, block);
      break;
  }
  params.ids[row * table.max_blocks + block] = id;
}

}  // namespace

Status pack_table(const CudaContext& context, const PackTable& from, int32_t* ids,
                  int32_t* lengths) {
  const auto across = static_cast<unsigned>((from.table.max_blocks + kThreads - 1) / kThreads);
  const dim3 grid(across, static_cast<unsigned>(from.table.num_rows()));
  return cuda::launch_overlapping(context, "pack_table", pack, {.grid = grid, .threads = kThreads},
                                  {from, ids, lengths});
}

}  // namespace kvx::ops
