// What the kit asks of a POSIX system.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tools/conformance/system.hpp"

namespace kvx::conformance {
namespace {

std::string text_of(int status, std::string text) {
  if (!text.empty()) return text;
  if (!WIFSIGNALED(status)) return leaving();
  const int signal = WTERMSIG(status);
  if (signal == SIGALRM) return hanging();
  if (signal == SIGSEGV || signal == SIGBUS) return faulting(strsignal(signal));
  return std::string("dies: ") + strsignal(signal);
}

}  // namespace

int64_t page_bytes() {
  return sysconf(_SC_PAGESIZE);
}

uint8_t* map_pages(int64_t bytes) {
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<uint8_t*>(mapped);
}

void unmap_pages(uint8_t* pages, int64_t bytes) {
  munmap(pages, static_cast<size_t>(bytes));
}

void forbid_pages(uint8_t* pages, int64_t bytes) {
  mprotect(pages, static_cast<size_t>(bytes), PROT_NONE);
}

void* open_library(const std::string& file) {
  return dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void* symbol_of(void* library, const char* name) {
  return dlsym(library, name);
}

std::string library_problem() {
  return dlerror();
}

const char* cuda_library() {
  return "libcuda.so.1";
}

TaskEnd run_in_child(const std::string&, const std::function<TaskEnd()>& task) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe to a child process");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no child process");
  if (child == 0) {
    close(ends[0]);
    alarm(kTaskSeconds);
    const TaskEnd end = task();
    const auto written = write(ends[1], end.text.data(), end.text.size());
    _exit(end.is_well && written == static_cast<ssize_t>(end.text.size()) ? kAllIsWell : 1);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) {
    text.append(part, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kAllIsWell) return {true, text};
  return {false, text_of(status, text)};
}

std::optional<std::string> task_of_this_process() {
  return std::nullopt;
}

void end_task(const TaskEnd&) {
  std::abort();  // fork()'s child ends where it was made
}

}  // namespace kvx::conformance
