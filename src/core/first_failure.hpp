// FirstFailure: an exception of a piece, kept until all pieces have ended. Pieces run in threads
// that must not see it, a pool's or a caller's, and the one who asked for them must.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

namespace kvx {

class FirstFailure {
 public:
  template <class Piece>
  void keep_of(const Piece& piece) noexcept {
    try {
      piece();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  // Requires: no piece runs. Nothing is kept afterwards.
  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace kvx
