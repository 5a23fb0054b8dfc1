// A DeepSeek-V2 of three layers, two of them of experts, as a GGUF; make_deepseek_golden.py
// computes its logits.
#pragma once

#include <map>
#include <string>

#include "tests/runner/gguf_writer.hpp"

namespace kvx::tests {

// extras: queries of low rank, keys' and values' weights in a tensor each, YaRN, and experts in
// groups with sigmoid scores, a bias and normed weights.
// changes: other numbers for some of its values, without "deepseek2.".
GgufWriter tiny_deepseek(bool extras, const std::map<std::string, uint32_t>& changes = {});

}  // namespace kvx::tests
