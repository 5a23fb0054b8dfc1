// parse_tune_file: from the container's tensors and the header's fields to a TuneFile, each field
// checked before it is used.
#include <charconv>
#include <cstring>
#include <optional>
#include <set>

#include "tune/json.hpp"
#include "tune/safetensors.hpp"
#include "tune/table_list.hpp"
#include "tune/tune_file.hpp"

namespace kvx::tune {
namespace {

using nlohmann::json;

// The fields of a JSON object, each taken once: what is left is unknown.
class Fields {
 public:
  explicit Fields(json object) : object_(std::move(object)) {}

  Result<json> take(const char* name) {
    const auto found = object_.find(name);
    if (found == object_.end()) return invalid_argument("{} is missing", name);
    json value = std::move(*found);
    object_.erase(found);
    return value;
  }
  Result<std::string> take_text(const char* name) {
    KVX_ASSIGN_OR_RETURN(const json value, take(name));
    if (value.is_string()) return value.get<std::string>();
    return invalid_argument("{} is {}; expected text", name, json_text(value));
  }
  Result<int> take_int(const char* name) {
    KVX_ASSIGN_OR_RETURN(const json value, take(name));
    if (value.is_number_unsigned() && value.get<uint64_t>() <= INT32_MAX) return value.get<int>();
    return invalid_argument("{} is {}; expected a whole number", name, json_text(value));
  }
  Result<std::vector<std::string>> take_texts(const char* name) {
    KVX_ASSIGN_OR_RETURN(const json value, take(name));
    std::vector<std::string> texts;
    if (!value.is_array()) return invalid_argument("{} is no list", name);
    for (const json& text : value) {
      if (!text.is_string()) return invalid_argument("{} holds {}", name, json_text(text));
      texts.push_back(text.get<std::string>());
    }
    return texts;
  }
  Status check_end() const {
    if (object_.empty()) return {};
    return invalid_argument("'{}' is no field of version {}", object_.begin().key(),
                            kTuneFileVersion);
  }

 private:
  json object_;
};

Result<Fields> fields_of(const Safetensors& container) {
  const auto found = container.metadata.find("kvx");
  if (found == container.metadata.end()) {
    return invalid_argument("__metadata__ has no 'kvx': the file is no tuned recipe");
  }
  KVX_ASSIGN_OR_RETURN(json object, parse_json_object("__metadata__ 'kvx'", found->second));
  Fields fields(std::move(object));
  KVX_ASSIGN_OR_RETURN(const int version, fields.take_int("version"));
  if (version > kTuneFileVersion) {
    return Error{
        ErrorCode::kIncompatible,
        fmt::format("version is {}; this library reads version {}", version, kTuneFileVersion)};
  }
  if (version < 1) return invalid_argument("version is {}; expected {}", version, kTuneFileVersion);
  return fields;
}

Status parse_header(Fields& fields, TuneFile& file) {
  KVX_ASSIGN_OR_RETURN(file.recipe, fields.take_text("recipe"));
  KVX_ASSIGN_OR_RETURN(file.layer_overrides, fields.take_texts("layer_overrides"));
  KVX_ASSIGN_OR_RETURN(file.head_overrides, fields.take_texts("head_overrides"));
  KVX_ASSIGN_OR_RETURN(file.geometry.num_layers, fields.take_int("num_layers"));
  KVX_ASSIGN_OR_RETURN(file.geometry.num_kv_heads, fields.take_int("num_kv_heads"));
  KVX_ASSIGN_OR_RETURN(file.geometry.k_head_dim, fields.take_int("k_head_dim"));
  KVX_ASSIGN_OR_RETURN(file.geometry.v_head_dim, fields.take_int("v_head_dim"));
  KVX_ASSIGN_OR_RETURN(file.block_size, fields.take_int("k_block_size"));
  KVX_ASSIGN_OR_RETURN(file.model.name, fields.take_text("model_name"));
  KVX_ASSIGN_OR_RETURN(file.model.architecture, fields.take_text("model_architecture"));
  KVX_ASSIGN_OR_RETURN(file.model.hash, fields.take_text("model_hash"));
  KVX_ASSIGN_OR_RETURN(file.text_hash, fields.take_text("text_hash"));
  KVX_ASSIGN_OR_RETURN(file.date, fields.take_text("date"));
  KVX_ASSIGN_OR_RETURN(const json measured, fields.take("measured"));
  file.measured = json_text(measured);
  return {};
}

// A rope of the header and the layers that have it.
struct LayersOfRope {
  kv::Rope rope;
  std::vector<int> layers;
};

Result<LayersOfRope> parse_rope(const json& entry, int num_layers) {
  if (!entry.is_object()) return invalid_argument("ropes holds {}", json_text(entry));
  Fields fields(entry);
  LayersOfRope result;
  KVX_ASSIGN_OR_RETURN(const std::string pairs, fields.take_text("pairs"));
  if (pairs != "halves" && pairs != "interleaved") {
    return invalid_argument("ropes pairs is '{}'; expected halves or interleaved", pairs);
  }
  result.rope.pairs = pairs == "halves" ? kv::RopePairs::kHalves : kv::RopePairs::kInterleaved;
  KVX_ASSIGN_OR_RETURN(const json scaling, fields.take("attention_scaling"));
  if (!scaling.is_number()) {
    return invalid_argument("ropes attention_scaling is {}; expected a number", json_text(scaling));
  }
  result.rope.attention_scaling = scaling.get<double>();
  KVX_ASSIGN_OR_RETURN(const json layers, fields.take("layers"));
  if (!layers.is_array()) return invalid_argument("ropes layers is no list");
  for (const json& layer : layers) {
    if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= static_cast<uint64_t>(num_layers)) {
      return invalid_argument("ropes layers holds {}; expected 0 to {}", json_text(layer),
                              num_layers - 1);
    }
    result.layers.push_back(layer.get<int>());
  }
  KVX_RETURN_IF_ERROR(fields.check_end());
  return result;
}

template <class T>
std::vector<T> numbers_of(const Tensor& tensor) {
  std::vector<T> numbers(tensor.bytes.size() / sizeof(T));
  if (!numbers.empty()) std::memcpy(numbers.data(), tensor.bytes.data(), tensor.bytes.size());
  return numbers;
}

// "3" of "layers.3.k.mean" after `prefix`, and what follows its dot.
struct IndexedName {
  int index = 0;
  std::string_view rest;
};
std::optional<IndexedName> indexed_name(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  IndexedName result;
  const size_t dot = name.find('.');
  const std::string_view digits = name.substr(0, dot);
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), result.index);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  // One name a number: neither "03" nor "-0".
  if (dot == std::string_view::npos || !is_number || std::to_string(result.index) != digits) {
    return std::nullopt;
  }
  result.rest = name.substr(dot + 1);
  return result;
}

const TableField* field_named(std::string_view name) {
  for (const TableField& field : table_fields()) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

Status take_table(const Tensor& tensor, TuneFile& file) {
  const auto place = indexed_name(tensor.name, "layers.");
  const TableField* field = place ? field_named(place->rest) : nullptr;
  if (field == nullptr || place->index < 0 || place->index >= file.geometry.num_layers) {
    return invalid_argument("tensor '{}' is none of version {} with {} layers", tensor.name,
                            kTuneFileVersion, file.geometry.num_layers);
  }
  std::vector<float> numbers = numbers_of<float>(tensor);
  const std::vector<int64_t> expected =
      field->shape(file.geometry, static_cast<int64_t>(numbers.size()));
  if (tensor.type != TensorType::kF32 || tensor.shape != expected || numbers.empty()) {
    return invalid_argument("tensor '{}' has the shape [{}]; expected F32 [{}]", tensor.name,
                            fmt::join(tensor.shape, ", "), fmt::join(expected, ", "));
  }
  field->of(file.layers[place->index]) = std::move(numbers);
  return {};
}

Status take_inv_freq(const Tensor& tensor, std::vector<LayersOfRope>& ropes) {
  const auto place = indexed_name(tensor.name, "ropes.");
  const bool is_known =
      place && place->rest == "inv_freq" && place->index >= 0 && place->index < std::ssize(ropes);
  if (!is_known || tensor.type != TensorType::kF64 || tensor.shape.size() != 1) {
    return invalid_argument("tensor '{}' is none of version {} with {} ropes: F64 [n]", tensor.name,
                            kTuneFileVersion, ropes.size());
  }
  ropes[place->index].rope.inv_freq = numbers_of<double>(tensor);
  return {};
}

// Gives each layer its rope. What a rope lacks is found by check_tune_file(), in its layers.
Status spread_ropes(std::vector<LayersOfRope>& ropes, TuneFile& file) {
  std::set<int> seen;
  for (LayersOfRope& rope : ropes) {
    if (rope.layers.empty()) return invalid_argument("ropes holds one without layers");
    for (int layer : rope.layers) {
      if (!seen.insert(layer).second) {
        return invalid_argument("ropes name layer {} twice; expected once", layer);
      }
      if (file.layers[layer].k_rope_mean.empty()) {
        return invalid_argument("layer {} has a rope without a k.rope_mean", layer);
      }
      file.layers[layer].k_rope = rope.rope;
    }
  }
  return {};
}

}  // namespace

Result<TuneFile> parse_tune_file(std::span<const uint8_t> bytes) {
  KVX_ASSIGN_OR_RETURN(const Safetensors container, parse_safetensors(bytes));
  KVX_ASSIGN_OR_RETURN(Fields fields, fields_of(container));
  TuneFile file;
  KVX_RETURN_IF_ERROR(parse_header(fields, file));
  KVX_RETURN_IF_ERROR(kv::check_geometry(file.geometry));
  file.layers.resize(static_cast<size_t>(file.geometry.num_layers));
  KVX_ASSIGN_OR_RETURN(const json entries, fields.take("ropes"));
  if (!entries.is_array()) return invalid_argument("ropes is no list");
  std::vector<LayersOfRope> ropes;
  for (const json& entry : entries) {
    KVX_ASSIGN_OR_RETURN(LayersOfRope rope, parse_rope(entry, file.geometry.num_layers));
    ropes.push_back(std::move(rope));
  }
  KVX_RETURN_IF_ERROR(fields.check_end());
  for (const Tensor& tensor : container.tensors) {
    const bool is_rope = tensor.name.starts_with("ropes.");
    KVX_RETURN_IF_ERROR(is_rope ? take_inv_freq(tensor, ropes) : take_table(tensor, file));
  }
  KVX_RETURN_IF_ERROR(spread_ropes(ropes, file));
  KVX_RETURN_IF_ERROR(check_tune_file(file));
  return file;
}

}  // namespace kvx::tune
