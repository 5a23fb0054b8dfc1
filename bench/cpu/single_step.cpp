// trace_call by ptrace: the call runs in a child, which its parent steps from one stop to the next.
#include "bench/cpu/single_step.hpp"

#if defined(__linux__) && defined(__x86_64__)
#include <link.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#endif

namespace kvx::bench {

#if defined(__linux__) && defined(__x86_64__)

// What the loader added to the addresses in the program's file.
static uint64_t load_address() {
  uint64_t address = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uint64_t*>(out) = info->dlpi_addr;
        return 1;  // the program is the first
      },
      &address);
  return address;
}

// Waits for the child to stop. Returns false where it did not stop with this signal.
static bool stops_with(pid_t child, int signal) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSTOPPED(status) && WSTOPSIG(status) == signal;
}

// Single-steps the child, which stands at its first stop, to its second.
static std::vector<uint64_t> step_to_next_stop(pid_t child) {
  std::vector<uint64_t> addresses;
  for (;;) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) return addresses;
    if (!stops_with(child, SIGTRAP)) return addresses;  // the second stop
    user_regs_struct registers{};
    ptrace(PTRACE_GETREGS, child, nullptr, &registers);
    addresses.push_back(registers.rip - load_address());
  }
}

std::vector<uint64_t> trace_call(const std::function<void()>& call, std::string& error) {
  call();  // what runs once, such as the binding of symbols
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    raise(SIGSTOP);
    call();
    raise(SIGSTOP);
    _exit(0);
  }
  std::vector<uint64_t> addresses;
  if (child > 0 && stops_with(child, SIGSTOP)) addresses = step_to_next_stop(child);
  if (addresses.empty()) error = "this system does not let a process trace its child";
  if (child > 0) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  return addresses;
}

#else

std::vector<uint64_t> trace_call(const std::function<void()>&, std::string& error) {
  error = "calls are counted on x86-64 Linux only";
  return {};
}

#endif

}  // namespace kvx::bench
