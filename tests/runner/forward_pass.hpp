// A tiny model from its file to its logits.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <vector>

#include "runner/model.hpp"
#include "tests/runner/gguf_writer.hpp"
#include "tests/runner/tiny_llama.hpp"

namespace kvx::tests {

inline Result<std::unique_ptr<runner::Model>> load(const GgufWriter& writer) {
  const TemporaryFile file(writer.file());
  return runner::Model::load(file.path(), DType::kF32, serial_executor());
}

// [tokens, vocab_size]
inline std::vector<float> all_logits(runner::Model& model, runner::AttentionBackend& backend,
                                     std::span<const int> tokens) {
  std::vector<float> hidden(tokens.size() * model.config().hidden);
  const Status forward = model.forward(tokens, backend, hidden.data());
  EXPECT_TRUE(forward.ok()) << forward.error().message;
  std::vector<float> logits(tokens.size() * model.config().vocab_size);
  EXPECT_TRUE(model.logits(hidden.data(), static_cast<int>(tokens.size()), logits.data()).ok());
  return logits;
}

}  // namespace kvx::tests
