// A Llama of two layers and a few thousand weights, as a GGUF; make_golden.py computes its logits.
#pragma once

#include <string>

#include "tests/runner/gguf_writer.hpp"

namespace kvx::tests {

// extras: an output matrix of its own, q/k/v biases, linear and llama3 rope scaling, and rotation
// of half a head only. context: the most tokens of a text.
GgufWriter tiny_llama(bool extras, uint32_t context = 64);

// A file in the temporary folder that goes with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::vector<uint8_t>& bytes);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvx::tests
