// JobList: what a tier remembers of each transfer under way. A transfer's tag is its job's place in
// the list, which grows to the most jobs at once.
#pragma once

#include <cstdint>
#include <vector>

namespace kvx::tier {

template <class Job>
class JobList {
 public:
  // Returns the tag.
  int64_t add(const Job& job) {
    ++num_jobs_;
    if (unused_.empty()) {
      jobs_.push_back(job);
      return static_cast<int64_t>(jobs_.size()) - 1;
    }
    const int64_t tag = unused_.back();
    unused_.pop_back();
    jobs_[tag] = job;
    return tag;
  }

  // The job of a transfer that has ended; its tag is free again.
  Job take(int64_t tag) {
    unused_.push_back(tag);
    --num_jobs_;
    return jobs_[tag];
  }

  bool is_empty() const { return num_jobs_ == 0; }

 private:
  std::vector<Job> jobs_;
  std::vector<int64_t> unused_;
  int64_t num_jobs_ = 0;
};

}  // namespace kvx::tier
