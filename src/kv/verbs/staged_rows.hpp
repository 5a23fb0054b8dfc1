// StagedRows: rows of floats that the host computes for a cache's verbs, on a GPU by way of pinned
// memory.
#pragma once

#include <memory>
#include <optional>

#include "kv/verbs/cuda_place.hpp"

namespace kvx::kv {

class StagedRows {
 public:
  // Zeros. cuda: where the cache lies; none: on the host. Errors as CudaPlace::create's and
  // Memory::allocate's.
  static Result<StagedRows> create(const std::optional<CudaPlacement>& cuda, int64_t num_floats);

  // For the host to write.
  float* host() const { return reinterpret_cast<float*>(on_host_.data()); }
  // The same where verbs read it, after send().
  const float* placed() const {
    return reinterpret_cast<const float*>(memory_ ? placed_.data() : on_host_.data());
  }
  // Behind what the cache's stream was given before.
  Status send() const;
  // Until send() has passed: host() may be written again, and placed() once the verbs are through.
  Status wait() const;

 private:
  StagedRows() = default;

  device::CudaStream stream_ = nullptr;
  int device_ = 0;
  std::unique_ptr<cache::Memory> pinned_;  // null on the host, as memory_ is
  std::unique_ptr<cache::Memory> memory_;
  cache::Region on_host_;
  cache::Region placed_;
};

}  // namespace kvx::kv
