// WriteCall: a write with all its memory, and its expected result.
#pragma once

#include "tools/conformance/check.hpp"
#include "tools/conformance/tensors.hpp"

namespace kvx::conformance {

// Scales are powers of two from 1/8 to 8, different for K and V.
struct ScaleCase {
  kvx_scale_granularity_t granularity = KVX_SCALE_NONE;
  kvx_dtype_t dtype = KVX_DTYPE_F32;
  bool by_pointer = false;  // k_scale and v_scale instead of descriptors
  int gap = 0;              // elements between scales

  int exponent(int side, int64_t block, int64_t head) const;
};

struct WriteCase {
  Geometry geometry = {};
  Arrangement arrangement = {};
  kvx_dtype_t k_cache = KVX_DTYPE_F16;
  kvx_dtype_t v_cache = KVX_DTYPE_F16;
  kvx_dtype_t k_io = KVX_DTYPE_F16;
  kvx_dtype_t v_io = KVX_DTYPE_F16;
  int64_t num_sequences = 0;  // of padded IO
  int64_t gap = 0;            // of IO
  kvx_dtype_t slot_dtype = KVX_DTYPE_S64;
  std::vector<int64_t> slots = {};  // empty: some of the geometry's, in a jumble
  int64_t invalid_slot = -1;
  ScaleCase scale = {};

  WriteCase& set_types(kvx_dtype_t cache, kvx_dtype_t io) {
    k_cache = v_cache = cache;
    k_io = v_io = io;
    return *this;
  }
};

class WriteCall {
 public:
  explicit WriteCall(const WriteCase& write_case);
  WriteCall(const WriteCall&) = delete;

  // Expects OK and the specification's value of every byte.
  void must_move(WriteFunction function);
  // Expects this status and no changed byte.
  void must_refuse(WriteFunction function, kvx_status_t expected, const std::string& what);
  // Sets the expected bytes to those of a correct write.
  void expect_moved();

  WriteCase given;
  Memory memory;
  kvx_cache_desc_t cache{};
  kvx_write_desc_t write{};

 private:
  const void* add_scales(int side, kvx_scale_desc_t& desc);
  void fill_io();

  const kvx_tensor_desc_t& cache_tensor(int side) const { return side == 0 ? cache.k : cache.v; }
  const kvx_tensor_desc_t& io_tensor(int side) const {
    return side == 0 ? write.io.key : write.io.value;
  }
};

}  // namespace kvx::conformance
