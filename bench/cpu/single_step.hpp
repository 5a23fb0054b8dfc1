// Counts the instructions of a call by single-stepping it in a process of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvx::bench {

// The addresses, in the program's file, of the instructions that the call runs between two stops,
// in their order. Empty and a reason in `error` where the system does not let a process be traced.
std::vector<uint64_t> trace_call(const std::function<void()>& call, std::string& error);

}  // namespace kvx::bench
