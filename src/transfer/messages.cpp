// Messages: written and read field by field.
#include "transfer/messages.hpp"

#include "transfer/fields.hpp"

namespace kvx::transfer {
namespace {

constexpr uint32_t kMagic = 0x5458564b;  // "KVXT"
constexpr uint32_t kVersion = 3;

void write_head(FieldWriter& writer, Kind kind) {
  writer.u32(kMagic);
  writer.u32(kVersion);
  writer.u32(static_cast<uint32_t>(kind));
  writer.u32(0);
}

Result<Kind> read_head(FieldReader& reader) {
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

Status check_end(const FieldReader& reader) {
  if (reader.is_whole() && reader.num_left() == 0) return {};
  return invalid_argument("a transfer's message has another length than its kind");
}

}  // namespace

std::vector<uint8_t> encode(const Request& request) {
  FieldWriter writer;
  write_head(writer, request.kind);
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
  FieldReader reader(bytes);
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
  FieldWriter writer;
  write_head(writer, answer.kind);
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
  FieldReader reader(bytes);
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
