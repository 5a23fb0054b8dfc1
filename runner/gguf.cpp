// The GGUF container, version 2 and 3 (ggml's docs/gguf.md), little-endian:
//   [magic "GGUF"][version u32][num_tensors u64][num_values u64]
//   [values: key string, type u32, payload][tensors: name string, num_dims u32, dims u64[],
//   type u32, offset u64][padding to alignment][tensor data]
// A string is [length u64][bytes]; an array is [element type u32][count u64][elements].
#include "runner/gguf.hpp"

#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/checked.hpp"

namespace kvx::runner {
namespace {

constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kLargestAlignment = 1 << 20;
constexpr int kMostDims = 4;
constexpr size_t kShownName = 80;  // bytes of a hostile name that an error message repeats

enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32Value,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

// A name from the file as an error message may show it: short, one line.
std::string shown(std::string_view name) {
  std::string text(name.substr(0, kShownName));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return text;
}

// Walks the header; every read is checked against the bytes that are left.
class Cursor {
 public:
  explicit Cursor(std::span<const uint8_t> file) : file_(file) {}

  size_t position() const { return position_; }
  size_t left() const { return file_.size() - position_; }

  template <class T>
  Result<T> read(std::string_view what) {
    if (left() < sizeof(T)) return truncated(what, sizeof(T));
    T value;
    std::memcpy(&value, file_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  Result<std::string_view> read_string(std::string_view what) {
    KVX_ASSIGN_OR_RETURN(const uint64_t length, read<uint64_t>(what));
    if (length > left()) return truncated(what, length);
    const auto* begin = reinterpret_cast<const char*>(file_.data() + position_);
    position_ += length;
    return std::string_view(begin, length);
  }

  Error truncated(std::string_view what, uint64_t wanted) const {
    return invalid_argument("GGUF is truncated: {} at byte {} needs {} bytes, {} are left",
                            shown(what), position_, wanted, left());
  }

 private:
  std::span<const uint8_t> file_;
  size_t position_ = 0;
};

template <class Stored, class Target>
Result<GgufValue> read_scalar(Cursor& cursor, std::string_view key) {
  KVX_ASSIGN_OR_RETURN(const Stored value, cursor.read<Stored>(key));
  return GgufValue(static_cast<Target>(value));
}

template <class Stored, class Target>
Result<GgufValue> read_array(Cursor& cursor, std::string_view key, uint64_t count) {
  if (count > cursor.left() / sizeof(Stored)) {
    return invalid_argument("GGUF is truncated: array {} of {} elements, {} bytes are left",
                            shown(key), count, cursor.left());
  }
  std::vector<Target> values;
  values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    KVX_ASSIGN_OR_RETURN(const Stored value, cursor.read<Stored>(key));
    values.push_back(static_cast<Target>(value));
  }
  return GgufValue(std::move(values));
}

Result<GgufValue> read_strings(Cursor& cursor, std::string_view key, uint64_t count) {
  if (count > cursor.left() / sizeof(uint64_t)) {
    return invalid_argument("GGUF is truncated: array {} of {} strings, {} bytes are left",
                            shown(key), count, cursor.left());
  }
  std::vector<std::string_view> values;
  values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    KVX_ASSIGN_OR_RETURN(const std::string_view value, cursor.read_string(key));
    values.push_back(value);
  }
  return GgufValue(std::move(values));
}

Result<GgufValue> read_array(Cursor& cursor, std::string_view key) {
  KVX_ASSIGN_OR_RETURN(const uint32_t type, cursor.read<uint32_t>(key));
  KVX_ASSIGN_OR_RETURN(const uint64_t count, cursor.read<uint64_t>(key));
  switch (type) {
    case kU8:
      return read_array<uint8_t, uint64_t>(cursor, key, count);
    case kI8:
      return read_array<int8_t, int64_t>(cursor, key, count);
    case kU16:
      return read_array<uint16_t, uint64_t>(cursor, key, count);
    case kI16:
      return read_array<int16_t, int64_t>(cursor, key, count);
    case kU32:
      return read_array<uint32_t, uint64_t>(cursor, key, count);
    case kI32:
      return read_array<int32_t, int64_t>(cursor, key, count);
    case kU64:
      return read_array<uint64_t, uint64_t>(cursor, key, count);
    case kI64:
      return read_array<int64_t, int64_t>(cursor, key, count);
    case kF32Value:
      return read_array<float, double>(cursor, key, count);
    case kF64:
      return read_array<double, double>(cursor, key, count);
    case kBool:
      return read_array<uint8_t, bool>(cursor, key, count);
    case kString:
      return read_strings(cursor, key, count);
    default:
      return unsupported("GGUF array {} has element type {}; expected 0 to 8 or 10 to 12",
                         shown(key), type);
  }
}

Result<GgufValue> read_value(Cursor& cursor, std::string_view key) {
  KVX_ASSIGN_OR_RETURN(const uint32_t type, cursor.read<uint32_t>(key));
  switch (type) {
    case kU8:
      return read_scalar<uint8_t, uint64_t>(cursor, key);
    case kI8:
      return read_scalar<int8_t, int64_t>(cursor, key);
    case kU16:
      return read_scalar<uint16_t, uint64_t>(cursor, key);
    case kI16:
      return read_scalar<int16_t, int64_t>(cursor, key);
    case kU32:
      return read_scalar<uint32_t, uint64_t>(cursor, key);
    case kI32:
      return read_scalar<int32_t, int64_t>(cursor, key);
    case kU64:
      return read_scalar<uint64_t, uint64_t>(cursor, key);
    case kI64:
      return read_scalar<int64_t, int64_t>(cursor, key);
    case kF32Value:
      return read_scalar<float, double>(cursor, key);
    case kF64:
      return read_scalar<double, double>(cursor, key);
    case kBool:
      return read_scalar<uint8_t, bool>(cursor, key);
    case kString: {
      KVX_ASSIGN_OR_RETURN(const std::string_view text, cursor.read_string(key));
      return GgufValue(text);
    }
    case kArray:
      return read_array(cursor, key);
    default:
      return unsupported("GGUF value {} has type {}; expected 0 to 12", shown(key), type);
  }
}

struct TensorEntry {
  GgufTensor tensor;
  int64_t offset = 0;  // from the start of the data section
};

Status read_dims(Cursor& cursor, GgufTensor& tensor) {
  KVX_ASSIGN_OR_RETURN(const uint32_t num_dims, cursor.read<uint32_t>(tensor.name));
  if (num_dims < 1 || num_dims > kMostDims) {
    return invalid_argument("tensor {} has {} dimensions; 1 to {} are allowed", shown(tensor.name),
                            num_dims, kMostDims);
  }
  CheckedSize elements = 1;
  for (uint32_t i = 0; i < num_dims; ++i) {
    KVX_ASSIGN_OR_RETURN(const uint64_t dim, cursor.read<uint64_t>(tensor.name));
    if (dim == 0 || dim > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return invalid_argument("tensor {}: dimension {} is {}; 1 to 2^31 - 1 is allowed",
                              shown(tensor.name), i, dim);
    }
    elements = elements * CheckedSize(static_cast<int64_t>(dim));
    tensor.dims.push_back(static_cast<int64_t>(dim));
  }
  if (!(elements * CheckedSize(sizeof(float))).get()) {
    return invalid_argument("tensor {}: the product of its dimensions overflows 64 bits",
                            shown(tensor.name));
  }
  return {};
}

Result<TensorEntry> read_tensor(Cursor& cursor) {
  TensorEntry entry;
  KVX_ASSIGN_OR_RETURN(entry.tensor.name, cursor.read_string("a tensor's name"));
  KVX_RETURN_IF_ERROR(read_dims(cursor, entry.tensor));
  const std::string name = shown(entry.tensor.name);

  KVX_ASSIGN_OR_RETURN(const uint32_t type, cursor.read<uint32_t>(entry.tensor.name));
  const std::optional<TensorType> supported = tensor_type_from(type);
  if (!supported) {
    return unsupported("tensor {} has type {}; {} are read", name, type, kTensorTypeNames);
  }
  entry.tensor.type = *supported;
  if (entry.tensor.dims[0] % block_elements(*supported) != 0) {
    return invalid_argument("tensor {}: dimension 0 is {}; its type needs a multiple of {}", name,
                            entry.tensor.dims[0], block_elements(*supported));
  }
  KVX_ASSIGN_OR_RETURN(const uint64_t offset, cursor.read<uint64_t>(entry.tensor.name));
  if (offset > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return invalid_argument("tensor {}: its data starts at {}, beyond any file", name, offset);
  }
  entry.offset = static_cast<int64_t>(offset);
  return entry;
}

// Points the tensor at its bytes.
Status place(TensorEntry& entry, std::span<const uint8_t> data, int64_t alignment) {
  const std::string name = shown(entry.tensor.name);
  if (entry.offset % alignment != 0) {
    return invalid_argument("tensor {}: its data starts at {}, not a multiple of {}", name,
                            entry.offset, alignment);
  }
  const int64_t bytes = entry.tensor.num_rows() * entry.tensor.row_bytes();
  const auto size = static_cast<int64_t>(data.size());
  if (entry.offset > size || bytes > size - entry.offset) {
    return invalid_argument(
        "GGUF is truncated: tensor {} needs bytes {} + {} of the data section, which has {}", name,
        entry.offset, bytes, size);
  }
  entry.tensor.data = data.subspan(static_cast<size_t>(entry.offset), static_cast<size_t>(bytes));
  return {};
}

struct Header {
  uint64_t num_tensors = 0;
  uint64_t num_values = 0;
};

Result<Header> read_header(Cursor& cursor) {
  KVX_ASSIGN_OR_RETURN(const uint32_t magic, cursor.read<uint32_t>("the magic number"));
  if (magic != 0x46554747u) {  // "GGUF"
    return invalid_argument("not a GGUF file: its first bytes are {:08x}, not 47475546",
                            __builtin_bswap32(magic));
  }
  KVX_ASSIGN_OR_RETURN(const uint32_t version, cursor.read<uint32_t>("the version"));
  if (version != 2 && version != 3) {
    return unsupported("GGUF version is {}; 2 and 3 (little-endian) are read", version);
  }
  Header header;
  KVX_ASSIGN_OR_RETURN(header.num_tensors, cursor.read<uint64_t>("the number of tensors"));
  KVX_ASSIGN_OR_RETURN(header.num_values, cursor.read<uint64_t>("the number of values"));
  return header;
}

Error wrong_type(std::string_view key, std::string_view expected) {
  return invalid_argument("GGUF value {} is not {}", key, expected);
}

// The integer in value, whichever way it was stored; empty when it is none or does not fit.
std::optional<int64_t> as_integer(const GgufValue& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) return *number;
  const auto* number = std::get_if<uint64_t>(&value);
  if (number == nullptr || *number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  return static_cast<int64_t>(*number);
}

}  // namespace

int64_t GgufTensor::num_rows() const {
  int64_t rows = 1;
  for (size_t i = 1; i < dims.size(); ++i) rows *= dims[i];
  return rows;
}

Result<GgufView> GgufView::parse(std::span<const uint8_t> file) {
  Cursor cursor(file);
  KVX_ASSIGN_OR_RETURN(const Header header, read_header(cursor));
  GgufView view;
  for (uint64_t i = 0; i < header.num_values; ++i) {
    KVX_ASSIGN_OR_RETURN(const std::string_view key, cursor.read_string("a value's key"));
    KVX_ASSIGN_OR_RETURN(GgufValue value, read_value(cursor, key));
    if (!view.values_.emplace(key, std::move(value)).second) {
      return invalid_argument("GGUF value {} appears twice", shown(key));
    }
  }
  std::vector<TensorEntry> entries;
  for (uint64_t i = 0; i < header.num_tensors; ++i) {
    KVX_ASSIGN_OR_RETURN(TensorEntry entry, read_tensor(cursor));
    entries.push_back(std::move(entry));
  }
  KVX_ASSIGN_OR_RETURN(
      const int64_t alignment,
      view.integer_or("general.alignment", 8, kLargestAlignment, kDefaultAlignment));
  const auto data_start =
      static_cast<size_t>(round_up(static_cast<int64_t>(cursor.position()), alignment));
  const auto data =
      data_start < file.size() ? file.subspan(data_start) : std::span<const uint8_t>();
  for (TensorEntry& entry : entries) {
    KVX_RETURN_IF_ERROR(place(entry, data, alignment));
    const std::string_view name = entry.tensor.name;
    if (!view.tensors_.emplace(name, std::move(entry.tensor)).second) {
      return invalid_argument("tensor {} appears twice", shown(name));
    }
  }
  return view;
}

const GgufValue* GgufView::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const GgufTensor* GgufView::find_tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

Result<int64_t> GgufView::integer(std::string_view key, int64_t least, int64_t most) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return invalid_argument("GGUF value {} is missing", key);
  const std::optional<int64_t> number = as_integer(*value);
  if (!number) return wrong_type(key, "an integer below 2^63");
  if (*number < least || *number > most) {
    return invalid_argument("GGUF value {} is {}; {} to {} is allowed", key, *number, least, most);
  }
  return *number;
}

Result<int64_t> GgufView::integer_or(std::string_view key, int64_t least, int64_t most,
                                     int64_t fallback) const {
  if (find(key) == nullptr) return fallback;
  return integer(key, least, most);
}

Result<double> GgufView::number_or(std::string_view key, double fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return fallback;
  const auto* number = std::get_if<double>(value);
  if (number == nullptr) return wrong_type(key, "a floating-point number");
  return *number;
}

Result<bool> GgufView::flag_or(std::string_view key, bool fallback) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return fallback;
  const auto* flag = std::get_if<bool>(value);
  if (flag == nullptr) return wrong_type(key, "a boolean");
  return *flag;
}

Result<std::string_view> GgufView::string(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return invalid_argument("GGUF value {} is missing", key);
  const auto* text = std::get_if<std::string_view>(value);
  if (text == nullptr) return wrong_type(key, "a string");
  return *text;
}

Result<std::string_view> GgufView::string_or(std::string_view key,
                                             std::string_view fallback) const {
  if (find(key) == nullptr) return fallback;
  return string(key);
}

Result<std::vector<std::string_view>> GgufView::strings(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return invalid_argument("GGUF value {} is missing", key);
  const auto* texts = std::get_if<std::vector<std::string_view>>(value);
  if (texts == nullptr) return wrong_type(key, "an array of strings");
  return *texts;
}

Result<std::vector<int64_t>> GgufView::integers(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return invalid_argument("GGUF value {} is missing", key);
  const auto* numbers = std::get_if<std::vector<int64_t>>(value);
  if (numbers == nullptr) return wrong_type(key, "an array of signed integers");
  return *numbers;
}

}  // namespace kvx::runner
