// All checks in the order of the specification.
#include "tools/conformance/check.hpp"

#include <algorithm>

namespace kvx::conformance {
namespace {

std::string status_text(kvx_status_t status) {
  constexpr const char* kNames[] = {"OK",           "INVALID_ARGUMENT", "UNSUPPORTED",
                                    "OUT_OF_RANGE", "INCOMPATIBLE",     "INTERNAL_ERROR"};
  const auto number = static_cast<uint32_t>(status);
  if (number >= std::size(kNames)) return fmt::format("{}, which is no status", number);
  return fmt::format("{} {}", kNames[number], number);
}

}  // namespace

const char* title_of(Section section) {
  switch (section) {
    case Section::kVersioning:
      return "3 Versioning";
    case Section::kLayouts:
      return "4.2 Layouts and strides";
    case Section::kTypes:
      return "4.3 Types and memory";
    case Section::kBlockTables:
      return "5.1 Block tables";
    case Section::kSlots:
      return "5.2 Slot mapping";
    case Section::kLengths:
      return "5.3 Sequence lengths";
    case Section::kSizes:
      return "6 Sizes of structs";
    case Section::kScales:
      return "6.6 Scales";
    case Section::kPools:
      return "6.7 Pools";
    case Section::kIo:
      return "6.8 IO tensors";
    case Section::kValidation:
      return "7.1 Validation";
    case Section::kThreads:
      return "7.2 Threads and lifetime";
    case Section::kErrors:
      return "8 Error codes";
    case Section::kLaunch:
      return "Kernel entry points";
    case Section::kDevice:
      return "Device memory";
    case Section::kWords:
      return "1.2 Errors in words";
    case Section::kFormatWords:
      return "1.2 Formats and pages";
    case Section::kAppend:
      return "1.2 Append";
    case Section::kGather:
      return "1.2 Gather";
    case Section::kAttend:
      return "1.2 Attend";
    case Section::kCopies:
      return "1.2 Copies";
    case Section::kNumSections:
      break;
  }
  return "";
}

void require_status(kvx_status_t status, kvx_status_t expected, const std::string& what) {
  require(status == expected, "{} returns {}, expected {}", what, status_text(status),
          status_text(expected));
}

std::vector<Check> all_checks() {
  std::vector<Check> all;
  for (const auto& part :
       {version_checks(),    descriptor_checks(), write_checks(),      gather_checks(),
        table_checks(),      slot_checks(),       size_checks(),       scale_checks(),
        bad_write_checks(),  bad_gather_checks(), thread_checks(),     device_checks(),
        format_checks(),     append_checks(),     row_gather_checks(), attend_checks(),
        bad_attend_checks(), copy_checks(),       segment_checks(),    block_format_checks(),
        contiguous_checks(), turbomind_checks()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Check& a, const Check& b) { return a.section < b.section; });
  return all;
}

}  // namespace kvx::conformance
