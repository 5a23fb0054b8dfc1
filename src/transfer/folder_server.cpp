// FolderServer: heads are read and checked once a file; records are sent as they lie, with the
// writer's checksums, which their receiver checks. What is cut out of a page is checked here, and
// gets a record of its own.
#include "transfer/folder_server.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/os/os.hpp"
#include "tier/whole_transfer.hpp"
#include "transfer/layer_fetch.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

using tier::kRecordHeaderBytes;

constexpr size_t kMostKnownFiles = 4096;
constexpr size_t kMostNames = 64;

Answer refused(std::string text) {
  Answer answer;
  answer.kind = Kind::kRefused;
  answer.text = std::move(text);
  return answer;
}

class ReadFile {
 public:
  explicit ReadFile(const std::string& path) : descriptor_(os::open_file(path, os::Open::kRead)) {}
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;
  ~ReadFile() {
    if (descriptor_ >= 0) os::close_file(descriptor_);
  }
  bool is_open() const { return descriptor_ >= 0; }
  bool read(int64_t offset, std::span<uint8_t> bytes) const {
    return tier::transfer_all(bytes.size(), [&](size_t done) {
      return os::read_at(descriptor_, bytes.subspan(done), offset + static_cast<int64_t>(done));
    });
  }

 private:
  int descriptor_;
};

void append_part(std::vector<uint8_t>& to, std::span<const uint8_t> part) {
  const uint64_t bytes = part.size();
  std::array<uint8_t, sizeof bytes> length;
  std::memcpy(length.data(), &bytes, sizeof bytes);
  to.insert(to.end(), length.begin(), length.end());
  to.insert(to.end(), part.begin(), part.end());
}

// A file's head, empty where it is not there.
Result<std::vector<uint8_t>> read_head(const std::string& path) {
  const ReadFile file(path);
  std::vector<uint8_t> bytes(static_cast<size_t>(tier::kHeaderBytes));
  if (!file.is_open() || !file.read(0, bytes)) return std::vector<uint8_t>();
  KVX_ASSIGN_OR_RETURN(const int64_t head_bytes, tier::parse_layer_head_bytes(bytes));
  bytes.resize(static_cast<size_t>(head_bytes));
  if (!file.read(0, bytes)) return std::vector<uint8_t>();
  return bytes;
}

// The page of every layer, of a file with one block.
Result<std::vector<tier::StoredBlockCopy>> places_of(const tier::LayerHead& head) {
  if (head.index.blocks.size() != 1 ||
      head.index.blocks[0].block_copies.size() != head.index.kinds.size()) {
    return invalid_argument("it has {} blocks; expected one, with a page a layer",
                            head.index.blocks.size());
  }
  std::vector<tier::StoredBlockCopy> places(head.index.kinds.size());
  for (const tier::StoredBlockCopy& copy : head.index.blocks[0].block_copies) {
    places[copy.kind] = copy;
  }
  return places;
}

}  // namespace

Result<std::unique_ptr<FolderServer>> FolderServer::create(const std::string& endpoint,
                                                           std::string folder) {
  if (endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected tcp://ADDRESS:PORT or ipc://PATH");
  }
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open_component());
  std::unique_ptr<FolderServer> made(new FolderServer(functions, std::move(folder)));
  kvx_transfer_error error{};
  made->server_ = functions->server_create(endpoint.c_str(), answer, made.get(), &error);
  if (made->server_ == nullptr) return invalid_argument("{}", error.text);
  return made;
}

FolderServer::~FolderServer() {
  if (server_ != nullptr) functions_->server_free(server_);
}

void FolderServer::answer(void* user, const void* request, uint64_t bytes, kvx_transfer_reply reply,
                          void* to) {
  const Result<Request> parsed =
      parse_request({static_cast<const uint8_t*>(request), static_cast<size_t>(bytes)});
  const Answer given = parsed.ok() ? static_cast<FolderServer*>(user)->answer_to(parsed.value())
                                   : refused(parsed.error().message);
  const std::vector<uint8_t> head = encode(given);
  reply(to, head.data(), head.size(), given.data.data(), given.data.size());
}

Answer FolderServer::answer_to(const Request& request) {
  if (request.kind != Kind::kLayers) {
    return refused("layers of files are on offer here, by their names, and no sequence");
  }
  const HeadRange& heads = request.heads;
  if (heads.num_heads != 0 && (heads.first >= heads.end || heads.end > heads.num_heads)) {
    return refused(fmt::format("heads {} to {} of {} are asked for; expected some of them",
                               heads.first, heads.end, heads.num_heads));
  }
  if (request.text.empty()) return refused(check_file_name("").error().message);
  Answer answer;
  answer.kind = Kind::kLayers;
  answer.export_id = request.export_id;
  answer.record = request.record;
  parts_.clear();
  size_t num_names = 0;
  for (size_t begin = 0, end = 0; end < request.text.size(); begin = end + 1) {
    end = std::min(request.text.find(' ', begin), request.text.size());
    const std::string name = request.text.substr(begin, end - begin);
    const Status named = check_file_name(name);
    if (!named.ok()) return refused(named.error().message);
    if (++num_names > kMostNames) {
      return refused(fmt::format("{} names or more are asked for; expected at most {}", num_names,
                                 kMostNames));
    }
    if (parts_.size() >= kPartBytes) break;
    const Result<bool> added = add_part(name, request);
    if (!added.ok()) return refused(fmt::format("'{}': {}", name, added.error().message));
    if (!added.value()) break;
    ++answer.num_parts;
  }
  bytes_ += std::ssize(parts_) - int64_t{answer.num_parts} * static_cast<int64_t>(sizeof(uint64_t));
  answer.data = parts_;
  return answer;
}

Result<bool> FolderServer::add_part(const std::string& name, const Request& request) {
  auto found = places_.find(name);
  if (request.record == 0 || found == places_.end()) {
    KVX_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, read_head(path_of(name)));
    if (bytes.empty()) return false;
    KVX_ASSIGN_OR_RETURN(const tier::LayerHead head, tier::parse_layer_head(bytes));
    KVX_ASSIGN_OR_RETURN(std::vector<tier::StoredBlockCopy> places, places_of(head));
    if (places_.size() >= kMostKnownFiles) places_.clear();
    found = places_.insert_or_assign(name, std::move(places)).first;
    if (request.record == 0) {
      append_part(parts_, bytes);
      return true;
    }
  }
  const std::vector<tier::StoredBlockCopy>& places = found->second;
  if (request.record > places.size()) {
    return invalid_argument("record {} is asked for; expected 0 to {}", request.record,
                            places.size());
  }
  KVX_ASSIGN_OR_RETURN(const bool is_there,
                       add_record(path_of(name), places[request.record - 1], request.heads));
  if (is_there && request.record == places.size()) ++num_files_;
  return is_there;
}

Result<bool> FolderServer::add_record(const std::string& path, const tier::StoredBlockCopy& place,
                                      const HeadRange& heads) {
  const ReadFile file(path);
  record_.resize(static_cast<size_t>(kRecordHeaderBytes + place.stored_bytes));
  // The header first: the writer writes it last.
  const auto header = std::span(record_).first(static_cast<size_t>(kRecordHeaderBytes));
  const auto page = std::span(record_).subspan(static_cast<size_t>(kRecordHeaderBytes));
  if (!file.is_open() || !file.read(place.offset - kRecordHeaderBytes, header)) return false;
  const auto checksum = tier::parse_record_header(header, place);
  if (!checksum.ok() || !checksum.value()) return false;  // under way
  if (!file.read(place.offset, page)) return false;
  if (heads.num_heads == 0) {
    append_part(parts_, record_);
    return true;
  }
  if (place.stored_bytes % heads.num_heads != 0) {
    return invalid_argument("a page of {} bytes is not one of {} heads", place.stored_bytes,
                            heads.num_heads);
  }
  if (cache::checksum(page) != *checksum.value()) {
    return invalid_argument("the page of layer {} is damaged", place.kind);
  }
  const int64_t head_bytes = place.stored_bytes / heads.num_heads;
  const auto part = page.subspan(static_cast<size_t>(heads.first * head_bytes),
                                 static_cast<size_t>((heads.end - heads.first) * head_bytes));
  // Where the receiver's own file has the page is the receiver's to know.
  tier::StoredBlockCopy cut = place;
  cut.stored_bytes = std::ssize(part);
  const tier::RecordHeader own = tier::encode_record_header(cut, cache::checksum(part));
  std::vector<uint8_t> bytes(own.begin(), own.end());
  bytes.insert(bytes.end(), part.begin(), part.end());
  append_part(parts_, bytes);
  return true;
}

}  // namespace kvx::transfer
