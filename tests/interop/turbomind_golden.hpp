// The oracle's TurboMind blocks: tests/golden/turbomind_blocks.json.
#pragma once

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "interop/turbomind/layout.hpp"

namespace kvx::interop::turbomind {

inline const nlohmann::json& golden_file() {
  static const nlohmann::json file = [] {
    std::ifstream stream(KVX_SOURCE_DIR "/tests/golden/turbomind_blocks.json");
    return nlohmann::json::parse(stream);
  }();
  return file;
}

// The oracle's policy 16 is MX, as on the CPU.
inline Geometry geometry_of(const nlohmann::json& shape, DType dtype) {
  const Result<KvCacheMode> mode = get_kv_cache_mode(shape.at("policy"), kCpu);
  return {mode.value(),           dtype,
          shape.at("num_layers"), shape.at("num_heads"),
          shape.at("head_dim"),   shape.at("block_len")};
}

inline std::string shape_text(const nlohmann::json& shape) {
  return fmt::format("policy {}, {} layers, {} heads, head_dim {}, block_len {}",
                     shape.at("policy").get<int>(), shape.at("num_layers").get<int>(),
                     shape.at("num_heads").get<int>(), shape.at("head_dim").get<int>(),
                     shape.at("block_len").get<int>());
}

// "a1b2" as the bytes 0xA1, 0xB2.
inline std::vector<uint8_t> hex_bytes(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// "b7a1" as the 16-bit pattern 0xB7A1.
inline std::vector<uint16_t> hex_words(const std::string& text) {
  std::vector<uint16_t> words;
  for (size_t i = 0; i < text.size(); i += 4) {
    words.push_back(static_cast<uint16_t>(std::stoul(text.substr(i, 4), nullptr, 16)));
  }
  return words;
}

}  // namespace kvx::interop::turbomind
