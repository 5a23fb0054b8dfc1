// Reads the golden files that the oracle wrote (tests/oracle/README.md says what is in them).
#pragma once

#include <bit>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/float16.hpp"
#include "format/list.hpp"
#include "format/spec.hpp"

namespace kvx::tests {

using Json = nlohmann::json;

inline Json read_golden(const std::string& name) {
  const std::string path = std::string(KVX_SOURCE_DIR) + "/tests/golden/" + name + ".json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("no golden file " + path);
  return Json::parse(file);
}

// Hex patterns of `digits` digits each, side by side.
inline std::vector<uint32_t> patterns(const std::string& hex, int digits) {
  std::vector<uint32_t> values;
  for (size_t i = 0; i + digits <= hex.size(); i += digits) {
    values.push_back(static_cast<uint32_t>(std::stoul(hex.substr(i, digits), nullptr, 16)));
  }
  return values;
}

inline std::vector<uint8_t> bytes_of_hex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (const uint32_t value : patterns(hex, 2)) bytes.push_back(static_cast<uint8_t>(value));
  return bytes;
}

inline std::vector<float> floats_of_hex(const std::string& hex) {
  std::vector<float> values;
  for (const uint32_t bits : patterns(hex, 8)) values.push_back(std::bit_cast<float>(bits));
  return values;
}

inline float float_of_hex(const std::string& hex) {
  return floats_of_hex(hex).at(0);
}

template <class Enum, size_t N>
Enum enum_named(const std::string& name, const Enum (&values)[N]) {
  for (const Enum value : values) {
    if (format::name_of(value) == name) return value;
  }
  throw std::runtime_error("unknown name " + name);
}

inline DType dtype_named(const std::string& name) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name_of(type) == name) return type;
  }
  throw std::runtime_error("unknown type " + name);
}

// Patterns of a type as the bytes of memory.
inline std::vector<uint8_t> memory_of(DType type, const std::string& hex) {
  const int size = bytes_of(type);
  std::vector<uint8_t> bytes;
  for (const uint32_t value : patterns(hex, 2 * size)) {
    for (int b = 0; b < size; ++b) bytes.push_back(static_cast<uint8_t>(value >> (8 * b)));
  }
  return bytes;
}

// The spec that a golden row asks for. format: its own field, or the file's.
inline format::FormatSpec spec_of(const Json& row, const std::string& format_name) {
  using namespace format;
  SpecOptions options;
  const Facts& facts = facts_of(format_named(format_name).value());
  if (row.contains("group_size")) {
    const bool is_whole_row = facts.group_sizes.values[0] == kWholeRow;
    options.group_size = is_whole_row ? kWholeRow : row["group_size"].get<int>();
    options.scale_type = enum_named(
        row["scale_type"].get<std::string>(),
        {ScaleType::kF32, ScaleType::kF16, ScaleType::kBF16, ScaleType::kE8M0, ScaleType::kE4M3});
    const std::string rule = row["scale_rule"];
    options.scale_rule = rule == "e8m0_ceil"    ? ScaleRule::kE8M0Ceil
                         : rule == "e8m0_floor" ? ScaleRule::kE8M0Floor
                                                : ScaleRule::kAmax;  // "amax" and "tensor"
    options.scale_choice =
        enum_named(row["scale_choice"].get<std::string>(),
                   {ScaleChoice::kAmax, ScaleChoice::k4Over6, ScaleChoice::kSearch});
    options.scale_source = enum_named(row["scale_source"].get<std::string>(),
                                      {ScaleSource::kComputed, ScaleSource::kGiven});
  }
  if (row.contains("param_type")) {
    options.scale_type =
        enum_named(row["param_type"].get<std::string>(), {ScaleType::kF16, ScaleType::kBF16});
  }
  auto spec = make_spec(facts, options);
  if (!spec.ok()) throw std::runtime_error(spec.error().message);
  return spec.value();
}

}  // namespace kvx::tests
