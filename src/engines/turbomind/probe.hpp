// Debug probe: reads the first stored bytes of one row of an fp4 cache, at the addresses that
// append writes and attend reads.
#pragma once

#include <span>

#include "device/cuda.hpp"
#include "engines/turbomind/layout.hpp"

namespace kvx::engines::turbomind {

struct Fp4KvProbeResult {
  uint8_t k_scale0;  // of K's elements 0 to 15
  uint8_t v_scale0;
  uint8_t k_scale1;  // of K's elements 16 to 31
  uint8_t v_scale1;
  uint8_t kv_byte0;  // K's elements 0 (low four bits) and 1

  friend bool operator==(const Fp4KvProbeResult&, const Fp4KvProbeResult&) = default;
};

// A sequence's blocks, in order, in both pools: equally many.
struct SequenceBlocks {
  std::span<uint8_t* const> data;
  std::span<uint8_t* const> scales;
};

// INVALID_ARGUMENT: a layout without fp4 or with head_dim below 32 (one scale only), tables of
// different lengths, a layer, head or token that does not exist.
Result<Fp4KvProbeResult> fp4_kv_probe_host(const PoolLayout& layout, const SequenceBlocks& blocks,
                                           int layer, int head, int64_t token);

// The probe for blocks in a GPU's memory, with the tables of pointers that kernels read there.
struct DeviceSequenceBlocks {
  uint8_t* const* data = nullptr;    // on the device: [num_blocks]
  uint8_t* const* scales = nullptr;  // on the device: [num_blocks]
  int64_t num_blocks = 0;
};

// Waits for the work that was enqueued on `stream`, then reads. Errors as above; INTERNAL_ERROR
// with CUDA's text: a table or a block that the device cannot read. UNSUPPORTED: a build without
// CUDA.
Result<Fp4KvProbeResult> fp4_kv_probe(const PoolLayout& layout, const DeviceSequenceBlocks& blocks,
                                      int layer, int head, int64_t token,
                                      device::CudaStream stream = nullptr);

}  // namespace kvx::engines::turbomind
