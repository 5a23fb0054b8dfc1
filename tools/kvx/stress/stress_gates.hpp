// stress_gates: which caches of a stress report a condition of --fail-if does not allow.
#pragma once

#include <string>
#include <vector>

#include "quality/gate.hpp"
#include "tools/kvx/stress/stress_report.hpp"

namespace kvx::tool {

// One line for each gate that a cache other than the base fails, with the figure at its worst:
// "int4: passkey is 50 % at 4096 tokens, which --fail-if passkey<90% does not allow". Requires:
// gates of GateUse::kStress, and where drift is among them parts that it was measured in.
std::vector<std::string> failures_of(const StressReport& report,
                                     const std::vector<quality::Gate>& gates);

}  // namespace kvx::tool
