// GPU architectures: which this build has kernels for, and which kernels have run on a device.
#pragma once

#include <string>
#include <string_view>

namespace kvx::tool {

// A line for each of the targets (of KVX_CUDA_TARGETS, separated by ';' or spaces): the compute
// capabilities that run it, and where it has run. "none" without targets.
std::string gpu_lines(std::string_view targets, std::string_view indent);

// All architectures, compiled and run, as a table of docs/status.md.
std::string gpu_markdown();

}  // namespace kvx::tool
