// PtyRunner: a program on a terminal of its own, whose user is the test.
#pragma once

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

namespace kvx::tool {

class PtyRunner {
 public:
  PtyRunner(const std::string& folder, const std::vector<std::string>& arguments) {
    winsize size = {};
    size.ws_col = 120;
    size.ws_row = 40;
    child_ = forkpty(&terminal_, nullptr, nullptr, &size);
    if (child_ != 0) return;
    std::vector<char*> pointers;
    for (const std::string& argument : arguments) {
      pointers.push_back(const_cast<char*>(argument.c_str()));
    }
    pointers.push_back(nullptr);
    setenv("TERM", "xterm", 1);
    unsetenv("LC_ALL");
    if (chdir(folder.c_str()) == 0) execv(pointers[0], pointers.data());
    _exit(127);
  }
  ~PtyRunner() {
    if (!has_ended_) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    close(terminal_);
  }
  PtyRunner(const PtyRunner&) = delete;
  PtyRunner& operator=(const PtyRunner&) = delete;

  void type(const std::string& keys) { (void)!write(terminal_, keys.data(), keys.size()); }

  // Reads until the text appears behind what an earlier call has found; false after five minutes,
  // or when the program has ended without it.
  bool expect(const std::string& text) { return expect_one_of({text}) == 0; }

  // As expect, of several texts: the index of the first that appears, or -1.
  int expect_one_of(const std::vector<std::string>& texts) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    while (true) {
      for (size_t i = 0; i < texts.size(); ++i) {
        const size_t at = screen_.find(texts[i], seen_);
        if (at == std::string::npos) continue;
        seen_ = at + texts[i].size();
        return static_cast<int>(i);
      }
      if (std::chrono::steady_clock::now() > deadline || !read_some()) return -1;
    }
  }

  // Reads what is left and returns the exit code; -1 where a signal ended the program, or where it
  // wrote nothing for five minutes and was killed.
  int wait() {
    while (read_some()) {
    }
    int status = 0;
    for (int i = 0; i < 6000 && !has_ended_; ++i) {
      has_ended_ = waitpid(child_, &status, WNOHANG) == child_;
      if (!has_ended_) usleep(10'000);
    }
    if (!has_ended_) {
      kill(child_, SIGKILL);
      waitpid(child_, &status, 0);
    }
    has_ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  // All that the program has written, with what the terminal echoed.
  const std::string& screen() const { return screen_; }

 private:
  bool read_some() {
    pollfd source = {terminal_, POLLIN, 0};
    if (poll(&source, 1, 300'000) <= 0) return false;
    char bytes[4096];
    const ssize_t num_read = read(terminal_, bytes, sizeof bytes);
    if (num_read > 0) screen_.append(bytes, static_cast<size_t>(num_read));
    return num_read > 0;
  }

  pid_t child_ = -1;
  int terminal_ = -1;
  bool has_ended_ = false;
  std::string screen_;
  size_t seen_ = 0;
};

}  // namespace kvx::tool
