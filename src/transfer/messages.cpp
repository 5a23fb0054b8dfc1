// Messages: written and read field by field.
#include "transfer/messages.hpp"

#include <cstring>

namespace kvx::transfer {
namespace {

constexpr uint32_t kMagic = 0x5458564b;  // "KVXT"
constexpr uint32_t kVersion = 3;
constexpr size_t kMostText = 1 << 20;

class Writer {
 public:
  void u32(uint32_t value) { number(value, 4); }
  void u64(uint64_t value) { number(value, 8); }
  void text(const std::string& text) { bytes_.insert(bytes_.end(), text.begin(), text.end()); }
  void head(Kind kind) {
    u32(kMagic);
    u32(kVersion);
    u32(static_cast<uint32_t>(kind));
    u32(0);
  }
  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  void number(uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<uint8_t>(value >> (8 * i)));
  }
  std::vector<uint8_t> bytes_;
};

// Reads beyond the end give zeros, and is_whole() is false from then on.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : left_(bytes) {}
  uint32_t u32() { return static_cast<uint32_t>(number(4)); }
  uint64_t u64() { return number(8); }
  std::string text(size_t length) {
    if (length > left_.size()) return fail();
    std::string text(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(length));
    left_ = left_.subspan(length);
    return text;
  }
  std::string rest() { return left_.size() > kMostText ? fail() : text(left_.size()); }
  std::span<const uint8_t> data() { return std::exchange(left_, {}); }
  bool is_whole() const { return is_whole_; }
  bool is_at_end() const { return left_.empty(); }

 private:
  std::string fail() {
    is_whole_ = false;
    left_ = {};
    return {};
  }
  uint64_t number(size_t size) {
    if (size > left_.size()) {
      fail();
      return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{left_[i]} << (8 * i);
    left_ = left_.subspan(size);
    return value;
  }
  std::span<const uint8_t> left_;
  bool is_whole_ = true;
};

Result<Kind> read_head(Reader& reader) {
  const uint32_t magic = reader.u32();
  const uint32_t version = reader.u32();
  const uint32_t kind = reader.u32();
  const uint32_t reserved = reader.u32();
  if (!reader.is_whole() || magic != kMagic) {
    return invalid_argument("a message of {} bytes or fewer is none of a kvx transfer", 16);
  }
  if (version != kVersion) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("the peer's transfer has version {}; expected {}", version, kVersion)};
  }
  if (kind < 1 || kind > 6 || reserved != 0) {
    return invalid_argument("a transfer's message has the kind {} and {}; expected 1 to 6 and 0",
                            kind, reserved);
  }
  return static_cast<Kind>(kind);
}

// Whether an answer of this kind names an export, or repeats a tag.
bool has_export(Kind kind) {
  return kind != Kind::kRefused;
}

Status check_end(const Reader& reader) {
  if (reader.is_whole() && reader.is_at_end()) return {};
  return invalid_argument("a transfer's message has another length than its kind");
}

}  // namespace

std::vector<uint8_t> encode(const Request& request) {
  Writer writer;
  writer.head(request.kind);
  if (request.kind != Kind::kHello) writer.u64(request.export_id);
  if (request.kind == Kind::kRead) {
    writer.u64(request.offset);
    writer.u64(request.bytes);
  }
  if (request.kind == Kind::kLayers || request.kind == Kind::kPages) {
    writer.u32(request.record);
    writer.u32(request.heads.first);
    writer.u32(request.heads.end);
    writer.u32(request.heads.num_heads);
  }
  if (request.kind == Kind::kPages) {
    writer.u64(request.first_page);
    writer.u64(request.end_page);
    writer.u32(request.is_mapped ? 1 : 0);
    writer.u32(0);
  }
  if (request.kind == Kind::kDone) {
    writer.u32(request.is_taken ? 1 : 0);
    writer.u32(0);
  }
  writer.text(request.text);
  return writer.take();
}

Result<Request> parse_request(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  Request request;
  KVX_ASSIGN_OR_RETURN(request.kind, read_head(reader));
  switch (request.kind) {
    case Kind::kHello:
      request.text = reader.rest();
      break;
    case Kind::kRead:
      request.export_id = reader.u64();
      request.offset = reader.u64();
      request.bytes = reader.u64();
      break;
    case Kind::kDone:
      request.export_id = reader.u64();
      request.is_taken = reader.u32() != 0;
      reader.u32();
      request.text = reader.rest();
      break;
    case Kind::kLayers:
    case Kind::kPages:
      request.export_id = reader.u64();
      request.record = reader.u32();
      request.heads.first = reader.u32();
      request.heads.end = reader.u32();
      request.heads.num_heads = reader.u32();
      if (request.kind == Kind::kLayers) {
        request.text = reader.rest();
      } else {
        request.first_page = reader.u64();
        request.end_page = reader.u64();
        request.is_mapped = reader.u32() != 0;
        reader.u32();
      }
      break;
    case Kind::kRefused:
      return invalid_argument("a request has the kind of a refusal; expected one that asks");
  }
  KVX_RETURN_IF_ERROR(check_end(reader));
  return request;
}

std::vector<uint8_t> encode(const Answer& answer) {
  Writer writer;
  writer.head(answer.kind);
  if (has_export(answer.kind)) writer.u64(answer.export_id);
  if (answer.kind == Kind::kLayers || answer.kind == Kind::kPages) {
    writer.u32(answer.record);
    writer.u32(answer.num_parts);
  }
  if (answer.kind == Kind::kPages) writer.u64(answer.first_page);
  if (answer.kind == Kind::kHello) {
    writer.u64(answer.bytes);
    writer.u32(answer.num_layers);
    for (const std::string* text : {&answer.path, &answer.ipc_handle, &answer.pool_order}) {
      writer.u32(static_cast<uint32_t>(text->size()));
      writer.text(*text);
    }
    writer.u64(answer.process);
  }
  if (answer.kind == Kind::kRead) writer.u64(answer.offset);
  writer.text(answer.text);
  return writer.take();
}

Result<Answer> parse_answer(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  Answer answer;
  KVX_ASSIGN_OR_RETURN(answer.kind, read_head(reader));
  if (has_export(answer.kind)) answer.export_id = reader.u64();
  switch (answer.kind) {
    case Kind::kHello:
      answer.bytes = reader.u64();
      answer.num_layers = reader.u32();
      answer.path = reader.text(reader.u32());
      answer.ipc_handle = reader.text(reader.u32());
      answer.pool_order = reader.text(reader.u32());
      answer.process = reader.u64();
      answer.text = reader.rest();
      break;
    case Kind::kRead:
      answer.offset = reader.u64();
      answer.data = reader.data();
      break;
    case Kind::kDone:
      break;
    case Kind::kLayers:
    case Kind::kPages:
      answer.record = reader.u32();
      answer.num_parts = reader.u32();
      if (answer.kind == Kind::kPages) answer.first_page = reader.u64();
      answer.data = reader.data();
      break;
    case Kind::kRefused:
      answer.text = reader.rest();
      break;
  }
  KVX_RETURN_IF_ERROR(check_end(reader));
  return answer;
}

}  // namespace kvx::transfer
