// The oracle's TurboMind blocks: tests/golden/turbomind_blocks.json.
#pragma once

#include <fmt/format.h>

#include <string>

#include "engines/turbomind/layout.hpp"
#include "tests/support/golden.hpp"

namespace kvx::engines::turbomind {

inline const tests::Json& golden_file() {
  static const tests::Json file = tests::read_golden("turbomind_blocks");
  return file;
}

// The oracle's policy 16 is MX, as on the CPU.
inline Geometry geometry_of(const tests::Json& shape, DType dtype) {
  const Result<KvCacheMode> mode = get_kv_cache_mode(shape.at("policy"), kCpu);
  return {mode.value(),           dtype,
          shape.at("num_layers"), shape.at("num_heads"),
          shape.at("head_dim"),   shape.at("block_len")};
}

inline std::string shape_text(const tests::Json& shape) {
  return fmt::format("policy {}, {} layers, {} heads, head_dim {}, block_len {}",
                     shape.at("policy").get<int>(), shape.at("num_layers").get<int>(),
                     shape.at("num_heads").get<int>(), shape.at("head_dim").get<int>(),
                     shape.at("block_len").get<int>());
}

}  // namespace kvx::engines::turbomind
