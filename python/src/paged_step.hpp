// PagedStep: kv::KvStep for Python, a writer of its own beside the cache's calls and other writers.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "kv/kv_step.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "python/src/step_arrays.hpp"

namespace kvx::python {

using Entries = std::vector<std::pair<int, int>>;  // (sequence, num_tokens)

// What a cache and its writers share. cache: null once closed; writers keep it until they are gone.
struct CacheParts {
  std::shared_ptr<const Context> context;
  std::shared_ptr<CudaLane> lane;  // null on the CPU
  std::mutex lane_mutex;           // the lane orders one verb at a time
  std::shared_ptr<kv::KvCache> cache;
};

// Another thread's calls of the same step wait; those of other steps do not.
class PagedStep {
 public:
  // Requires: the cache is open.
  explicit PagedStep(std::shared_ptr<CacheParts> parts);
  ~PagedStep();

  void begin(const Entries& entries);
  void append_and_attend(int layer, const AttentionArguments& given, nb::handle stream);
  // kept_tokens: of each entry, when some are taken back; none: all.
  void end(const std::optional<std::vector<int>>& kept_tokens);
  void cancel();
  bool is_open();

 private:
  template <class F>
  std::invoke_result_t<F> locked(F f) {
    nb::gil_scoped_release no_gil;
    parts_->context->home().check();
    const std::lock_guard lock(mutex_);
    return f();
  }
  void check_rows_of(const StepArrays& arrays) const;

  const std::shared_ptr<CacheParts> parts_;
  std::shared_ptr<kv::KvCache> cache_;
  std::unique_ptr<kv::KvStep> step_;
  std::mutex mutex_;
  int64_t num_tokens_ = 0;  // of the open step
};

// Runs a verb in the order of its arrays' streams. Without the GIL.
template <class F>
void in_order(CacheParts& parts, const ArrayPlace& place, KeptArrays& kept, F verb) {
  if (!parts.lane) return verb();
  const std::lock_guard lock(parts.lane_mutex);
  throw_if_error(parts.lane->begin(place, kept));
  verb();
  throw_if_error(parts.lane->end(place, kept));
}

}  // namespace kvx::python
