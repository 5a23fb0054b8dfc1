// Loads a golden file of the runner (made by make_golden.py or make_tokenizer_golden.py, which say
// how).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvx::tests {

nlohmann::json golden_file(const std::string& name);

inline nlohmann::json golden_cases(const std::string& name) {
  return golden_file(name).at("cases");
}

inline std::string bytes_from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

}  // namespace kvx::tests
