// Progress on stderr and the questions about the terminal.
#include "tools/kvx/terminal.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace kvx::tool {
namespace {

constexpr double kSecondsBetweenPlainLines = 5;
constexpr double kSecondsBetweenRedraws = 0.1;

double seconds_between(std::chrono::steady_clock::time_point from,
                       std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

bool is_terminal(FILE* stream) {
  return isatty(fileno(stream)) == 1;
}

bool wants_color(FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool refused = no_color != nullptr && *no_color != '\0';
  const bool is_dumb = term == nullptr || std::string_view(term) == "dumb";
  return is_terminal(stream) && !refused && !is_dumb;
}

std::string duration_text(double seconds) {
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  return fmt::format("{} m {:02} s", whole / 60, whole % 60);
}

std::string progress_line(double fraction, double elapsed_seconds, std::string_view doing) {
  constexpr int kWidth = 20;
  const double done = std::clamp(fraction, 0.0, 1.0);
  const int filled = static_cast<int>(done * kWidth);
  std::string line = fmt::format("[{}{}] {:3.0f} %  {}", std::string(filled, '#'),
                                 std::string(kWidth - filled, '.'), 100 * done, doing);
  if (done > 0) {
    line += fmt::format("  {} left", duration_text(elapsed_seconds * (1 - done) / done));
  }
  return line;
}

Progress::Progress(Where where)
    : is_terminal_(is_terminal(stderr)),
      is_silent_(!is_terminal_ && where == Where::kTerminalAlone),
      start_(Clock::now()) {}

void Progress::show(double fraction, std::string_view doing) {
  if (is_silent_) return;
  const Clock::time_point now = Clock::now();
  const double pause = is_terminal_ ? kSecondsBetweenRedraws : kSecondsBetweenPlainLines;
  const bool is_first = last_shown_ == Clock::time_point();
  if (!is_first && seconds_between(last_shown_, now) < pause) return;
  last_shown_ = now;
  const std::string line = progress_line(fraction, seconds_between(start_, now), doing);
  if (is_terminal_) {
    fmt::print(stderr, "\r\x1b[K{}", line);  // ESC [ K clears the rest of the line
    line_is_open_ = true;
  } else {
    fmt::print(stderr, "{}\n", line);
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (!line_is_open_) return;
  fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
  line_is_open_ = false;
}

}  // namespace kvx::tool
