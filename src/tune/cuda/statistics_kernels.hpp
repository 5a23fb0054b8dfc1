// Kernels that count rows on a GPU, for DeviceStatistics. A build without CUDA has the same
// functions; they say so.
//
// Sums are kept in kNumSplits parts: CTAs that work side by side add to parts of their own, always
// the same runs of rows to the same part, so that sums do not depend on the order of CTAs.
#pragma once

#include <cstdint>

#include "core/rows.hpp"
#include "device/cuda.hpp"

namespace kvx::tune::gpu {

inline constexpr int kNumSplits = 8;
inline constexpr int kRunRows = 64;  // rows of a split that follow each other

// The first number found that is not finite.
struct BadNumber {
  int32_t is_found = 0;
  int32_t side = 0;  // 0: K, 1: V, 2: queries
  int32_t layer = 0;
  int32_t head = 0;
  int32_t channel = 0;
  float value = 0;
  int64_t position = 0;
};

// Rows of consecutive positions in one layer, [num_rows, num_heads, head_dim], on the device.
struct CountedRows {
  FloatRows rows;
  int num_rows = 0;
  int num_heads = 0;
  int head_dim = 0;
  int64_t first_position = 0;
  int layer = 0;
  int side = 0;              // BadNumber's
  BadNumber* bad = nullptr;  // on the device
};

// Where channels' numbers are added up, on the device; as in ChannelStatistics.
struct ChannelSums {
  double* sums = nullptr;           // [kNumSplits, num_heads, head_dim]
  double* square_sums = nullptr;    // likewise
  double* unturned_sums = nullptr;  // likewise, or null
  float* largest = nullptr;         // [num_heads, head_dim]
  uint32_t* counts = nullptr;       // [num_heads, head_dim, LogHistogram::kNumBuckets]
};

// How K's rows were rotated, kv::Rope with its frequencies on the device.
struct Turns {
  const double* inv_freq = nullptr;  // [num_pairs]
  int num_pairs = 0;
  bool is_interleaved = false;
  double attention_scaling = 1;
  const float* table = nullptr;  // of the rows that are counted, by launch_make_turns
};

// table [num_rows, num_pairs, 2]: cosine and sine of the positions' angles, divided by the scaling.
// Requires: num_rows > 0.
Status launch_make_turns(device::CudaStream stream, const Turns& turns, int64_t first_position,
                         int num_rows, float* table);

// turns.table where sums.unturned_sums are wanted.
Status launch_count_channels(device::CudaStream stream, const CountedRows& rows,
                             const ChannelSums& sums, const Turns& turns);

// sums [kNumSplits, num_kv_heads, head_dim, head_dim], of which the lower triangle is written:
// x x^T over the rows' heads that share a KV head. Requires: num_kv_heads divides rows.num_heads.
Status launch_add_moments(device::CudaStream stream, const CountedRows& rows, int num_kv_heads,
                          double* sums);

}  // namespace kvx::tune::gpu
