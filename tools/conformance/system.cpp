// The words for tasks that end without one.
#include "tools/conformance/system.hpp"

#include <fmt/format.h>

namespace kvx::conformance {

std::string hanging() {
  return fmt::format("hangs for {} seconds", kTaskSeconds);
}

std::string leaving() {
  return "ends the process in the middle of the check";
}

std::string faulting(const std::string& how) {
  return fmt::format("touches memory outside the call's buffers ({})", how);
}

}  // namespace kvx::conformance
