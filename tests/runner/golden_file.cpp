// The parser of golden files, compiled once for all that read them.
#include "tests/runner/golden_file.hpp"

#include <fstream>

namespace kvx::tests {

nlohmann::json golden_file(const std::string& name) {
  std::ifstream file(std::string(KVX_SOURCE_DIR "/tests/golden/runner/") + name + ".json");
  return nlohmann::json::parse(file);
}

}  // namespace kvx::tests
