// Work: how much of a long command is done, counted in tokens of forward passes.
#pragma once

#include <algorithm>
#include <string>

#include "tools/kvx/terminal.hpp"

namespace kvx::tool {

class Work {
 public:
  explicit Work(Progress& progress) : progress_(progress) {}

  // More passes than were planned push the end away.
  void plan(double num_tokens) { all_ += num_tokens; }
  void begin(std::string doing) {
    doing_ = std::move(doing);
    show();
  }
  void advance(int64_t num_tokens) {
    done_ += static_cast<double>(num_tokens);
    show();
  }

 private:
  void show() {
    all_ = std::max(all_, done_);
    if (all_ > 0) progress_.show(done_ / all_, doing_);
  }

  Progress& progress_;
  double done_ = 0;
  double all_ = 0;
  std::string doing_;
};

}  // namespace kvx::tool
