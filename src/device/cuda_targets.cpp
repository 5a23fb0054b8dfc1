// Which devices run what kernels were compiled for.
#include "device/cuda_targets.hpp"

#include <algorithm>
#include <charconv>

namespace kvx::device {
namespace {

// "103" is 10.3.
struct Capability {
  int major;
  int minor;
};

Capability capability_of(std::string_view digits) {
  int number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return {number / 10, number % 10};
}

bool target_runs_on(std::string_view target, int major, int minor) {
  constexpr std::string_view kVirtual = "-virtual";
  constexpr std::string_view kOn = "-on-";
  if (target.ends_with(kVirtual)) {
    const Capability oldest = capability_of(target);
    return major > oldest.major || (major == oldest.major && minor >= oldest.minor);
  }
  if (const size_t at = target.find(kOn); at != std::string_view::npos) {
    target.remove_prefix(at + kOn.size());
  }
  const Capability own = capability_of(target);
  return major == own.major && (target.ends_with('a') ? minor == own.minor : minor >= own.minor);
}

}  // namespace

bool cuda_targets_run_on(std::string_view targets, int major, int minor) {
  while (!targets.empty()) {
    const size_t end = std::min(targets.find(' '), targets.size());
    if (end > 0 && target_runs_on(targets.substr(0, end), major, minor)) return true;
    targets.remove_prefix(std::min(end + 1, targets.size()));
  }
  return false;
}

Status check_has_kernels(const CudaDevice& device, std::string_view targets) {
  const int major = device.compute_major;
  const int minor = device.compute_minor;
  if (major < kOldestCudaMajor) {
    return unsupported("CUDA device {} ({}) has compute capability {}.{}; kvx needs {}.0 or later",
                       device.index, device.name, major, minor, kOldestCudaMajor);
  }
  if (cuda_targets_run_on(targets, major, minor)) return {};
  return unsupported(
      "CUDA device {} ({}) has compute capability {}.{}; this build has kernels for {}",
      device.index, device.name, major, minor, targets);
}

}  // namespace kvx::device
