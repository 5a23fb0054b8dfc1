// The container's header, written and checked.
#include "tune/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/checked.hpp"
#include "tune/json.hpp"

namespace kvx::tune {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 8;
constexpr std::string_view kMetadata = "__metadata__";

int64_t bytes_of(TensorType type) {
  return type == TensorType::kF32 ? 4 : 8;
}

std::string_view name_of(TensorType type) {
  return type == TensorType::kF32 ? "F32" : "F64";
}

Status parse_metadata(const json& entry, Safetensors& file) {
  if (!entry.is_object()) return invalid_argument("{} is no JSON object", kMetadata);
  for (const auto& [name, text] : entry.items()) {
    if (!text.is_string()) return invalid_argument("{} '{}' is no text", kMetadata, name);
    file.metadata[name] = text.get<std::string>();
  }
  return {};
}

// Numbers of a JSON array, each 0 or more; empty: it is something else.
std::optional<std::vector<int64_t>> sizes_in(const json& entry, const char* field) {
  const auto found = entry.find(field);
  if (found == entry.end() || !found->is_array()) return std::nullopt;
  std::vector<int64_t> sizes;
  for (const json& size : *found) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > INT64_MAX) return std::nullopt;
    sizes.push_back(size.get<int64_t>());
  }
  return sizes;
}

// A tensor and where its bytes lie in the data.
struct Placed {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

Result<Placed> parse_tensor(const std::string& name, const json& entry) {
  if (!entry.is_object() || entry.size() != 3) {
    return invalid_argument("tensor '{}' is '{}'; expected dtype, shape and data_offsets", name,
                            json_text(entry));
  }
  Placed placed;
  placed.tensor.name = name;
  const json dtype = entry.value("dtype", json());
  if (dtype == "F64") {
    placed.tensor.type = TensorType::kF64;
  } else if (dtype != "F32") {
    return invalid_argument("tensor '{}' dtype is {}; expected F32 or F64", name, json_text(dtype));
  }
  const auto shape = sizes_in(entry, "shape");
  const auto offsets = sizes_in(entry, "data_offsets");
  if (!shape) return invalid_argument("tensor '{}' shape is no list of sizes", name);
  if (!offsets || offsets->size() != 2 || offsets->front() > offsets->back()) {
    return invalid_argument("tensor '{}' data_offsets are no [begin, end]", name);
  }
  placed.tensor.shape = *shape;
  placed.begin = offsets->front();
  placed.end = offsets->back();
  CheckedSize expected = bytes_of(placed.tensor.type);
  for (int64_t size : *shape) expected = expected * size;
  if (expected.get() == placed.end - placed.begin) return placed;
  return invalid_argument("tensor '{}' has {} bytes; its shape and dtype need others", name,
                          placed.end - placed.begin);
}

// Sets where each tensor's bytes are: they follow one another and fill the data.
Status place(std::span<const uint8_t> data, std::vector<Placed>& tensors) {
  std::ranges::sort(tensors, [](const Placed& a, const Placed& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  const auto size = static_cast<int64_t>(data.size());
  for (Placed& placed : tensors) {
    if (placed.begin != end) {
      return invalid_argument("tensor '{}' begins at byte {} of the data; expected {}",
                              placed.tensor.name, placed.begin, end);
    }
    if (placed.end > size) {
      return invalid_argument("tensor '{}' ends at byte {} of the data, which has {}",
                              placed.tensor.name, placed.end, size);
    }
    end = placed.end;
    placed.tensor.bytes = data.subspan(static_cast<size_t>(placed.begin),
                                       static_cast<size_t>(placed.end - placed.begin));
  }
  if (end == size) return {};
  return invalid_argument("{} bytes follow the last tensor; expected none", size - end);
}

}  // namespace

std::vector<uint8_t> encode_safetensors(const Safetensors& file) {
  std::vector<const Tensor*> tensors;
  for (const Tensor& tensor : file.tensors) tensors.push_back(&tensor);
  std::ranges::sort(tensors, [](const Tensor* a, const Tensor* b) {
    return std::pair(-bytes_of(a->type), a->name) < std::pair(-bytes_of(b->type), b->name);
  });
  json header = json::object();
  header[kMetadata] = file.metadata;
  int64_t offset = 0;
  for (const Tensor* tensor : tensors) {
    const auto end = offset + static_cast<int64_t>(tensor->bytes.size());
    header[tensor->name] = {{"dtype", name_of(tensor->type)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json_text(header);
  text.resize(round_up(text.size(), static_cast<size_t>(kAlignment)), ' ');

  std::vector<uint8_t> bytes(static_cast<size_t>(kLengthBytes) + text.size());
  const uint64_t header_bytes = text.size();
  std::memcpy(bytes.data(), &header_bytes, sizeof header_bytes);
  std::memcpy(bytes.data() + kLengthBytes, text.data(), text.size());
  bytes.reserve(bytes.size() + static_cast<size_t>(offset));
  for (const Tensor* tensor : tensors) {
    bytes.insert(bytes.end(), tensor->bytes.begin(), tensor->bytes.end());
  }
  return bytes;
}

Result<Safetensors> parse_safetensors(std::span<const uint8_t> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kLengthBytes) {
    return invalid_argument("the file has {} bytes; expected at least {}", size, kLengthBytes);
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  if (header_bytes > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return invalid_argument("header_bytes is {}; expected at most {}: no safetensors file",
                            header_bytes, kMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - kLengthBytes) {
    return invalid_argument("header_bytes is {}; only {} bytes follow: the file is cut short",
                            header_bytes, size - kLengthBytes);
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  KVX_ASSIGN_OR_RETURN(const json header, parse_json_object("the header", {text, header_bytes}));
  Safetensors file;
  std::vector<Placed> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      KVX_RETURN_IF_ERROR(parse_metadata(entry, file));
      continue;
    }
    KVX_ASSIGN_OR_RETURN(Placed placed, parse_tensor(name, entry));
    tensors.push_back(std::move(placed));
  }
  KVX_RETURN_IF_ERROR(place(bytes.subspan(kLengthBytes + header_bytes), tensors));
  for (Placed& placed : tensors) file.tensors.push_back(std::move(placed.tensor));
  return file;
}

}  // namespace kvx::tune
