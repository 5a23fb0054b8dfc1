// Runs checks in processes of their own.
#include "tools/conformance/runner.hpp"

#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>

#include "tools/conformance/cuda_driver.hpp"

namespace kvx::conformance {
namespace {

constexpr unsigned kSeconds = 60;  // a check that takes longer hangs
// The exit code of a child whose check has passed. A provider that ends the process itself has
// another one.
constexpr int kAllIsWell = 57;

struct ChildEnd {
  int status;        // of waitpid()
  std::string text;  // what the child wrote
};

// Runs `body`, which writes its complaint to a file descriptor, in a child.
template <class Body>
ChildEnd run_in_child(const Body& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe to a child process");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no child process");
  if (child == 0) {
    close(ends[0]);
    alarm(kSeconds);
    const std::string complaint = body();
    const auto written = write(ends[1], complaint.data(), complaint.size());
    _exit(written == 0 && complaint.empty() ? kAllIsWell : 1);
  }
  close(ends[1]);
  ChildEnd end{};
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) {
    end.text.append(part, static_cast<size_t>(n));
  }
  close(ends[0]);
  waitpid(child, &end.status, 0);
  return end;
}

std::string complaint_of(const Check& check, const Provider& provider) {
  try {
    check.ask(provider);
    return "";
  } catch (const Failed& failed) {
    return failed.text;
  } catch (const std::exception& error) {
    return std::string("an exception: ") + error.what();
  }
}

bool is_well(const ChildEnd& end) {
  return WIFEXITED(end.status) && WEXITSTATUS(end.status) == kAllIsWell;
}

std::string text_of(const ChildEnd& end) {
  if (!end.text.empty()) return end.text;
  if (!WIFSIGNALED(end.status)) return "ends the process in the middle of the check";
  const int signal = WTERMSIG(end.status);
  if (signal == SIGALRM) return fmt::format("hangs for {} seconds", kSeconds);
  if (signal == SIGSEGV || signal == SIGBUS) {
    return fmt::format("touches memory outside the call's buffers ({})", strsignal(signal));
  }
  return fmt::format("dies: {}", strsignal(signal));
}

}  // namespace

kvx_status_t query_in_child(const Provider& provider, kvx_features_t& features) {
  struct Answer {
    kvx_status_t status;
    kvx_features_t features;
  };
  void* shared =
      mmap(nullptr, sizeof(Answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("no memory to share with a child process");
  auto* answer = new (shared) Answer{KVX_STATUS_INTERNAL_ERROR, features};
  const ChildEnd end = run_in_child([&] {
    answer->status = provider.query_features(&answer->features);
    return std::string();
  });
  const Answer got = *answer;
  munmap(shared, sizeof(Answer));
  if (!is_well(end)) throw std::runtime_error("kvx_query_features " + text_of(end));
  features = got.features;
  return got.status;
}

bool has_gpu() {
  const ChildEnd end =
      run_in_child([] { return std::string(CudaDriver::open().has_value() ? "" : "none"); });
  return is_well(end);
}

Result run_check(const Check& check, const Provider& provider, const Features& claims,
                 bool has_gpu) {
  if (check.on_device && !has_gpu) return {&check, Outcome::kNotRun, "no GPU in this machine"};
  if (!claims.covers(check.needs)) {
    return {&check, Outcome::kAbsent,
            fmt::format("{}", fmt::join((check.needs - claims).names(), ", ")),
            check.needs - claims};
  }
  if (check.is_exported && !check.is_exported(provider)) {
    return {&check, Outcome::kAbsent, "the function of 1.2"};
  }
  const ChildEnd end = run_in_child([&] { return complaint_of(check, provider); });
  if (is_well(end)) return {&check, Outcome::kPassed, ""};
  return {&check, Outcome::kFailed, text_of(end)};
}

}  // namespace kvx::conformance
