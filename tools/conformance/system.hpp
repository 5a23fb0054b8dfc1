// system: what the kit asks of the operating system: pages, shared libraries, child processes.
// POSIX's calls are in posix.cpp, Windows' in windows.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvx::conformance {

// ---- memory

int64_t page_bytes();
// Zeroed pages; null: there is no memory.
uint8_t* map_pages(int64_t bytes);
void unmap_pages(uint8_t* pages, int64_t bytes);
// Every later access to these pages faults.
void forbid_pages(uint8_t* pages, int64_t bytes);

// ---- shared libraries

// Null: library_problem() says why.
void* open_library(const std::string& file);
void* symbol_of(void* library, const char* name);
std::string library_problem();
// The name of the CUDA driver's library.
const char* cuda_library();

// ---- processes of their own

// How a task has ended: well, with what it says; or not, with what is wrong.
struct TaskEnd {
  bool is_well = false;
  std::string text;
};

// Does a task in a child process, which may crash or hang. POSIX's fork() does it; Windows has
// none, so this program starts again with the same arguments, and main() finds the task by its name
// (task_of_this_process()).
TaskEnd run_in_child(const std::string& name, const std::function<TaskEnd()>& task);
// The task that this process was started for; none on POSIX.
std::optional<std::string> task_of_this_process();
// Ends a process that was started for a task.
[[noreturn]] void end_task(const TaskEnd& end);

constexpr unsigned kTaskSeconds = 60;  // a task that takes longer hangs
// The exit code of a child whose task ended well. A provider that ends the process itself has
// another one.
constexpr int kAllIsWell = 57;

// What a task that ended without a word has done.
std::string hanging();
std::string leaving();
std::string faulting(const std::string& how);

}  // namespace kvx::conformance
