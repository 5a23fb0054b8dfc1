// Check: one check of a provider, which runs in a process of its own.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "tools/conformance/features.hpp"
#include "tools/conformance/provider.hpp"

namespace kvx::conformance {

// Sections of the KVX v1 specification, and of what later versions add.
enum class Section {
  kVersioning,
  kLayouts,
  kTypes,
  kBlockTables,
  kSlots,
  kLengths,
  kSizes,
  kScales,
  kPools,
  kIo,
  kValidation,
  kThreads,
  kErrors,
  kLaunch,
  kDevice,
  kWords,
  kFormatWords,
  kAppend,
  kGather,
  kAttend,
  kCopies,
  kNumSections
};
const char* title_of(Section section);

struct Check {
  Section section;
  std::string name;  // short and unique: "gather PACKED, NHD"
  Features needs;
  std::function<void(const Provider&)> ask;  // throws Failed
  bool on_device = false;                    // needs a GPU in this machine
  // For a function that 1.2 added: whether the library has it.
  std::function<bool(const Provider&)> is_exported = nullptr;
};

// The exception that a check throws when the provider is wrong.
struct Failed {
  std::string text;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Failed{fmt::format(format, std::forward<Args>(args)...)};
}

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) fail(format, std::forward<Args>(args)...);
}

void require_status(kvx_status_t status, kvx_status_t expected, const std::string& what);

std::vector<Check> version_checks();
std::vector<Check> descriptor_checks();
std::vector<Check> write_checks();
std::vector<Check> slot_checks();
std::vector<Check> scale_checks();
std::vector<Check> gather_checks();
std::vector<Check> table_checks();
std::vector<Check> size_checks();
std::vector<Check> bad_write_checks();
std::vector<Check> bad_gather_checks();
std::vector<Check> thread_checks();
std::vector<Check> device_checks();
std::vector<Check> format_checks();
std::vector<Check> append_checks();
std::vector<Check> row_gather_checks();
std::vector<Check> attend_checks();
std::vector<Check> bad_attend_checks();
std::vector<Check> copy_checks();
std::vector<Check> block_format_checks();
std::vector<Check> segment_checks();
std::vector<Check> contiguous_checks();
std::vector<Check> turbomind_checks();

// All checks, in the order of the specification's sections.
std::vector<Check> all_checks();

}  // namespace kvx::conformance
