// The signal handler writes a byte into a pipe, so that poll() returns whichever thread it ran on.
#include "tools/kvx/chat/interrupts.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace kvx::tool {
namespace {

std::atomic<bool> is_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");
int pipe_ends[2] = {-1, -1};
struct sigaction old_action;

void on_interrupt(int) {
  const int saved = errno;
  is_interrupted = true;
  [[maybe_unused]] const ssize_t written = ::write(pipe_ends[1], "x", 1);  // a full pipe is enough
  errno = saved;
}

}  // namespace

Interrupts::Interrupts() {
  is_interrupted = false;
  if (pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) != 0) pipe_ends[0] = pipe_ends[1] = -1;
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;  // text on its way to stdout is written whole
  sigaction(SIGINT, &action, &old_action);
}

Interrupts::~Interrupts() {
  sigaction(SIGINT, &old_action, nullptr);
  for (int& end : pipe_ends) {
    if (end >= 0) close(end);
    end = -1;
  }
}

bool Interrupts::is_pending() const {
  return is_interrupted;
}

bool Interrupts::take() {
  char drained[64];
  while (read(pipe_ends[0], drained, sizeof drained) > 0) {
  }
  return is_interrupted.exchange(false);
}

int Interrupts::descriptor() const {
  return pipe_ends[0];
}

}  // namespace kvx::tool
