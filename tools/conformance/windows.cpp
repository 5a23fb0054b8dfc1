// What the kit asks of Windows. A child's task and the pipe for its answer are in its environment.
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <fmt/format.h>
#include <windows.h>

#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "tools/conformance/system.hpp"

namespace kvx::conformance {
namespace {

constexpr const char* kTask = "KVX_CONFORMANCE_TASK";
constexpr const char* kAnswer = "KVX_CONFORMANCE_ANSWER";
constexpr DWORD kHangs = 58;  // the exit code of a child whose time is over

std::string text_of(DWORD code, std::string text) {
  if (!text.empty()) return text;
  if (code == kHangs) return hanging();
  if (code == EXCEPTION_ACCESS_VIOLATION) return faulting("access violation");
  if (code >= 0xC0000000U) return fmt::format("dies: exception {:#x}", code);
  return leaving();
}

struct Pipe {
  HANDLE from = nullptr;
  HANDLE to = nullptr;  // the child inherits it
};

Pipe open_pipe() {
  SECURITY_ATTRIBUTES inherited = {sizeof inherited, nullptr, TRUE};
  Pipe pipe;
  if (!CreatePipe(&pipe.from, &pipe.to, &inherited, 0)) {
    throw std::runtime_error("no pipe to a child process");
  }
  SetHandleInformation(pipe.from, HANDLE_FLAG_INHERIT, 0);
  return pipe;
}

// This program once more, for a task.
HANDLE start_again(const std::string& task, const Pipe& pipe) {
  SetEnvironmentVariableA(kTask, task.c_str());
  const auto answer = std::to_string(reinterpret_cast<uintptr_t>(pipe.to));
  SetEnvironmentVariableA(kAnswer, answer.c_str());
  STARTUPINFOA start = {};
  start.cb = sizeof start;
  PROCESS_INFORMATION child = {};
  std::string command = GetCommandLineA();
  const BOOL started = CreateProcessA(nullptr, command.data(), nullptr, nullptr, TRUE, 0, nullptr,
                                      nullptr, &start, &child);
  SetEnvironmentVariableA(kTask, nullptr);
  CloseHandle(pipe.to);
  if (!started) throw std::runtime_error("no child process");
  CloseHandle(child.hThread);
  return child.hProcess;
}

}  // namespace

int64_t page_bytes() {
  SYSTEM_INFO system;
  GetSystemInfo(&system);
  return system.dwPageSize;
}

uint8_t* map_pages(int64_t bytes) {
  return static_cast<uint8_t*>(
      VirtualAlloc(nullptr, static_cast<size_t>(bytes), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
}

void unmap_pages(uint8_t* pages, int64_t) {
  VirtualFree(pages, 0, MEM_RELEASE);
}

void forbid_pages(uint8_t* pages, int64_t bytes) {
  DWORD before = 0;
  VirtualProtect(pages, static_cast<size_t>(bytes), PAGE_NOACCESS, &before);
}

void* open_library(const std::string& file) {
  return LoadLibraryA(file.c_str());
}

void* symbol_of(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

std::string library_problem() {
  return fmt::format("Windows' error {}", GetLastError());
}

const char* cuda_library() {
  return "nvcuda.dll";
}

TaskEnd run_in_child(const std::string& name, const std::function<TaskEnd()>&) {
  const Pipe pipe = open_pipe();
  const HANDLE child = start_again(name, pipe);
  std::string text;
  char part[4096];
  for (DWORD n = 0; ReadFile(pipe.from, part, sizeof part, &n, nullptr) && n > 0;) {
    text.append(part, n);
  }
  CloseHandle(pipe.from);
  WaitForSingleObject(child, INFINITE);
  DWORD code = 0;
  GetExitCodeProcess(child, &code);
  CloseHandle(child);
  if (code == kAllIsWell) return {true, text};
  return {false, text_of(code, text)};
}

std::optional<std::string> task_of_this_process() {
  const char* task = std::getenv(kTask);
  if (task == nullptr) return std::nullopt;
  // A crash ends the process without a window that asks what to do.
  SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX);
  std::thread([] {
    Sleep(kTaskSeconds * 1000);
    TerminateProcess(GetCurrentProcess(), kHangs);
  }).detach();
  return task;
}

void end_task(const TaskEnd& end) {
  const char* answer = std::getenv(kAnswer);
  bool is_written = answer != nullptr;
  if (is_written && !end.text.empty()) {
    DWORD written = 0;
    const auto handle = reinterpret_cast<HANDLE>(std::strtoull(answer, nullptr, 10));
    const auto size = static_cast<DWORD>(end.text.size());
    is_written = WriteFile(handle, end.text.data(), size, &written, nullptr) && written == size;
  }
  TerminateProcess(GetCurrentProcess(), end.is_well && is_written ? kAllIsWell : 1);
  std::abort();
}

}  // namespace kvx::conformance
