// GPU architectures: what a target runs on is asked of the device code, where it has run is a
// record that whoever runs the tests on another GPU extends.
#include "tools/kvx/info_gpus.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "device/cuda_targets.hpp"

namespace kvx::tool {
namespace {

struct Capability {
  int major;
  int minor;
};
constexpr Capability kCapabilities[] = {{8, 0},  {8, 6},  {8, 7},  {8, 9}, {9, 0},
                                        {10, 0}, {10, 3}, {12, 0}, {12, 1}};

struct Record {
  std::string_view target;
  std::string_view compiled_by;  // the presets
  std::string_view has_run;      // empty: nowhere
};
constexpr std::string_view kReleaseAll = "release-all";
constexpr Record kRecords[] = {
    {"80", kReleaseAll, "H200, compiled for it (80-on-90)"},
    {"80-virtual", kReleaseAll, "H200, compiled by the driver"},
    {"89", kReleaseAll, ""},
    {"90a", "all presets", "H100 and H200"},
    {"100f", kReleaseAll, ""},
    {"120f", kReleaseAll, ""},
    {"80-on-90", "none, for tests", "H200"},
};

std::string capabilities_of(std::string_view target) {
  const bool is_ptx = target.ends_with("-virtual");
  std::string names;
  for (const auto& [major, minor] : kCapabilities) {
    if (!device::cuda_targets_run_on(target, major, minor)) continue;
    if (is_ptx) return fmt::format("{}.{} and later", major, minor);
    names += fmt::format("{}{}.{}", names.empty() ? "" : ", ", major, minor);
  }
  return names;
}

std::string run_of(std::string_view target) {
  for (const Record& record : kRecords) {
    if (record.target == target && !record.has_run.empty()) {
      return fmt::format("has run on {}", record.has_run);
    }
  }
  return "compiled, has run nowhere";
}

}  // namespace

std::string gpu_lines(std::string_view targets, std::string_view indent) {
  std::string lines;
  while (!targets.empty()) {
    const size_t end = std::min(targets.find_first_of("; "), targets.size());
    const std::string_view target = targets.substr(0, end);
    targets.remove_prefix(std::min(end + 1, targets.size()));
    if (target.empty()) continue;
    lines += fmt::format("{}{}: compute capability {}; {}\n", lines.empty() ? "" : indent, target,
                         capabilities_of(target), run_of(target));
  }
  return lines.empty() ? "none: this build has no kernels for a GPU\n" : lines;
}

std::string gpu_markdown() {
  std::string page =
      "\n## GPU architectures\n\n"
      "Compiled is not run: kernels that no device has run may be wrong there. `kvx info` lists "
      "what\nits build has.\n\n"
      "| target | compute capability | compiled by the preset | has run on |\n|---|---|---|---|\n";
  for (const Record& record : kRecords) {
    page += fmt::format("| {} | {} | {} | {} |\n", record.target, capabilities_of(record.target),
                        record.compiled_by, record.has_run.empty() ? "nothing" : record.has_run);
  }
  return page;
}

}  // namespace kvx::tool
