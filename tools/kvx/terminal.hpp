// The terminal: whether colour is wanted, and a progress line with the time left.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

namespace kvx::tool {

bool is_terminal(FILE* stream);

// A terminal, NO_COLOR unset or empty (no-color.org), TERM not "dumb".
bool wants_color(FILE* stream);

// "1 m 05 s", "12 s".
std::string duration_text(double seconds);

// "[#####.....]  50 %  window 2 of 4, int8  12 s left"; no time left until some of the work is
// done.
std::string progress_line(double fraction, double elapsed_seconds, std::string_view doing);

// Shows how far work is, on stderr: one line that is rewritten on a terminal, else a plain line now
// and then.
class Progress {
 public:
  // kTerminalAlone: nothing where stderr is no terminal.
  enum class Where { kEverywhere, kTerminalAlone };
  explicit Progress(Where where = Where::kEverywhere);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // fraction: of the whole work, 0 to 1; doing: what comes next.
  void show(double fraction, std::string_view doing);
  // Clears the line, so that what is printed next stands alone.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  bool is_terminal_;
  bool is_silent_;
  bool line_is_open_ = false;
  Clock::time_point start_;
  Clock::time_point last_shown_;
};

}  // namespace kvx::tool
