// AttendPlans: attention on a GPU by the plans of the calls before it, so that a call of known
// shapes is a launch alone.
#pragma once

#include <mutex>
#include <vector>

#include "ops/attend/attend_cuda.hpp"
#include "python/src/workspaces.hpp"

namespace kvx::python {

class AttendPlans {
 public:
  // As ops::attend, with the workspace that the call needs.
  Status attend(const ops::CudaContext& context, const ops::AttendArgs& args,
                const ops::CudaAttendLimits& limits, const GivenWorkspace& given,
                ops::DeviceCounters* counters);
  // For calls on another device.
  void clear() {
    const std::lock_guard lock(mutex_);
    plans_.clear();
  }

 private:
  // What differs most often from one call to the next; ops::attend compares the rest.
  struct Shape {
    int num_sequences;
    int64_t max_blocks;
    int num_q_heads;
    int window;
    DType q_dtype;
    int max_q_len;
    int64_t total_q;
    int64_t max_tokens;
    int num_decodes;
    bool operator==(const Shape&) const = default;
  };
  struct Planned {
    Shape shape;
    ops::AttendPlan plan;
  };
  std::mutex mutex_;
  std::vector<Planned> plans_;  // the newest last
};

}  // namespace kvx::python
