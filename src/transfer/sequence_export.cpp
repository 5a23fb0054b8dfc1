// SequenceExport: one answer a request; what an importer has is the importer's to know.
#include "transfer/sequence_export.hpp"

#include <algorithm>
#include <chrono>

#include "core/os/os.hpp"
#include "core/random_id.hpp"
#include "transfer/layer_head.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

constexpr uint64_t kMostBytesAtOnce = 4 * kPartBytes;

}  // namespace

Result<const kvx_transfer_functions_t*> SequenceExport::open(const ExportOptions& options) {
  if (options.endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected tcp://ADDRESS:PORT or ipc://PATH");
  }
  return open_component();
}

Status SequenceExport::serve(const kv::KvCache& cache, const ExportOptions& options) {
  id_ = random_id();
  fingerprint_ = cache.fingerprint();
  kvx_transfer_error error{};
  server_ = functions_->server_create(options.endpoint.c_str(), answer, this, &error);
  if (server_ != nullptr) return {};
  return invalid_argument("{}", error.text);
}

Result<std::unique_ptr<SequenceExport>> SequenceExport::create(kv::KvCache& cache, int sequence,
                                                               const ExportOptions& options) {
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open(options));
  KVX_ASSIGN_OR_RETURN(SharedFile file, SharedFile::create());
  KVX_RETURN_IF_ERROR(cache.save_sequence(sequence, file.path()));
  KVX_RETURN_IF_ERROR(file.open_written());
  std::unique_ptr<SequenceExport> made(new SequenceExport(functions));
  made->file_.emplace(std::move(file));
  made->shares_memory_ = options.endpoint.starts_with("ipc://");
  made->state_.bytes = made->file_->bytes();
  KVX_RETURN_IF_ERROR(made->serve(cache, options));
  return made;
}

Result<std::unique_ptr<SequenceExport>> SequenceExport::create_by_layer(
    kv::KvCache& cache, int sequence, std::span<const int32_t> tokens,
    const ExportOptions& options) {
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open(options));
  std::unique_ptr<SequenceExport> made(new SequenceExport(functions));
  KVX_ASSIGN_OR_RETURN(made->outgoing_,
                       cache.hand_on(sequence, tokens, options.endpoint.starts_with("ipc://")));
  KVX_RETURN_IF_ERROR(made->serve(cache, options));
  return made;
}

SequenceExport::~SequenceExport() {
  if (server_ != nullptr) functions_->server_free(server_);
  if (outgoing_) outgoing_->abandon("its offer was freed");  // the step need not copy any more
}

ExportState SequenceExport::state() const {
  ExportState state;
  {
    const std::lock_guard lock(mutex_);
    state = state_;
  }
  if (!outgoing_) return state;
  state.bytes = state.packed_bytes = outgoing_->bytes();
  state.num_layers = outgoing_->num_layers();
  state.num_layers_there = outgoing_->num_layers_there();
  state.problem = outgoing_->problem();
  return state;
}

bool SequenceExport::wait(int64_t timeout_ms) const {
  std::unique_lock lock(mutex_);
  return taken_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                         [this] { return state_.num_taken > 0; });
}

// ---- the server's thread

void SequenceExport::answer(void* user, const void* request, uint64_t bytes,
                            kvx_transfer_reply reply, void* to) {
  auto* const self = static_cast<SequenceExport*>(user);
  const Result<Request> parsed =
      parse_request({static_cast<const uint8_t*>(request), static_cast<size_t>(bytes)});
  const Answer given =
      parsed.ok() ? self->answer_to(parsed.value()) : self->refused(parsed.error().message);
  const std::vector<uint8_t> head = encode(given);
  reply(to, head.data(), head.size(), given.data.data(), given.data.size());
}

Answer SequenceExport::refused(std::string text) const {
  Answer answer;
  answer.kind = Kind::kRefused;
  answer.text = std::move(text);
  return answer;
}

Answer SequenceExport::answer_to(const Request& request) {
  if (request.kind == Kind::kLayers) return refused("a sequence is on offer here, and no files");
  if (request.kind == Kind::kHello) {
    Answer answer;
    answer.export_id = id_;
    answer.bytes = static_cast<uint64_t>(file_ ? file_->bytes() : outgoing_->bytes());
    if (shares_memory_) answer.path = file_->path();
    if (outgoing_) {
      answer.num_layers = static_cast<uint32_t>(outgoing_->num_layers());
      const std::vector<uint8_t> handle = outgoing_->ipc_handle();
      answer.ipc_handle.assign(handle.begin(), handle.end());
      answer.pool_order = outgoing_->pool_order();
      answer.process = static_cast<uint64_t>(os::process_id());
    }
    answer.text = fingerprint_;
    return answer;
  }
  if (request.export_id != id_) {
    return refused("another sequence is on offer here by now; begin the import again");
  }
  if (request.kind == Kind::kRead) return outgoing_ ? read_head(request) : read(request);
  if (request.kind == Kind::kPages) {
    if (outgoing_) return read_pages(request);
    return refused("a sequence is on offer here as a whole, not layer by layer");
  }
  {
    const std::lock_guard lock(mutex_);
    if (request.is_taken) {
      ++state_.num_taken;
    } else {
      ++state_.num_refused;
      state_.last_refusal = request.text;
    }
  }
  taken_.notify_all();
  Answer answer;
  answer.kind = Kind::kDone;
  answer.export_id = id_;
  return answer;
}

void SequenceExport::count_sent(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  state_.bytes_sent += bytes;
}

Answer SequenceExport::read(const Request& request) {
  const auto all = static_cast<uint64_t>(file_->bytes());
  if (request.offset > all || request.bytes > all - request.offset || request.bytes == 0 ||
      request.bytes > kMostBytesAtOnce) {
    return refused(
        fmt::format("{} bytes from {} are asked for; the offer has {} and gives {} at once",
                    request.bytes, request.offset, all, kMostBytesAtOnce));
  }
  buffer_.resize(static_cast<size_t>(request.bytes));
  const Status done = file_->read_at(static_cast<int64_t>(request.offset), buffer_);
  if (!done.ok()) return refused(done.error().message);
  count_sent(static_cast<int64_t>(request.bytes));
  Answer answer;
  answer.kind = Kind::kRead;
  answer.export_id = id_;
  answer.offset = request.offset;
  answer.data = buffer_;
  return answer;
}

Answer SequenceExport::read_head(const Request& request) {
  const std::string problem = outgoing_->problem();
  if (!problem.empty()) return refused(fmt::format("the sequence is incomplete: {}", problem));
  Answer answer;
  answer.kind = Kind::kRead;
  answer.export_id = id_;
  answer.offset = request.offset;
  std::optional<tier::FileIndex> index = outgoing_->index();
  if (!index) return answer;  // not there yet
  buffer_ = encode_head({std::move(*index), outgoing_->places()});
  count_sent(std::ssize(buffer_));
  answer.data = buffer_;
  return answer;
}

// Answers for pages that the importer reads by itself: whether they are there.
Answer SequenceExport::count_mapped(const Request& request) {
  const Result<bool> is_there = outgoing_->is_there(static_cast<int>(request.record));
  if (!is_there.ok()) return refused(is_there.error().message);
  Answer answer;
  answer.kind = Kind::kPages;
  answer.export_id = id_;
  answer.record = request.record;
  answer.first_page = request.first_page;
  if (is_there.value()) {
    answer.num_parts = static_cast<uint32_t>(request.end_page - request.first_page);
  }
  return answer;
}

Answer SequenceExport::read_pages(const Request& request) {
  constexpr uint64_t kMostPages = 1 << 20;
  constexpr uint32_t kMost = 1 << 20;  // of layers and heads
  if (request.end_page > kMostPages || request.first_page >= request.end_page ||
      request.record > kMost || request.heads.end > kMost || request.heads.num_heads > kMost) {
    return refused(fmt::format("pages {} to {} of layer {} are asked for; expected some of them",
                               request.first_page, request.end_page, request.record));
  }
  if (request.is_mapped) return count_mapped(request);
  const kv::HeadCut heads{static_cast<int>(std::min(request.heads.first, kMost)),
                          static_cast<int>(request.heads.end),
                          static_cast<int>(request.heads.num_heads)};
  const Result<std::optional<kv::Pages>> read = outgoing_->read(
      static_cast<int>(request.record), static_cast<int64_t>(request.first_page),
      static_cast<int64_t>(request.end_page), heads, static_cast<int64_t>(kMostBytesAtOnce));
  if (!read.ok()) return refused(read.error().message);
  Answer answer;
  answer.kind = Kind::kPages;
  answer.export_id = id_;
  answer.record = request.record;
  answer.first_page = request.first_page;
  if (!read.value()) return answer;  // not there yet
  const kv::Pages& pages = *read.value();
  answer.num_parts = static_cast<uint32_t>(pages.checksums.size());
  buffer_.clear();
  for (const cache::ContentHash& checksum : pages.checksums) {
    buffer_.insert(buffer_.end(), checksum.bytes.begin(), checksum.bytes.end());
  }
  buffer_.insert(buffer_.end(), pages.bytes.begin(), pages.bytes.end());
  count_sent(std::ssize(buffer_));
  answer.data = buffer_;
  return answer;
}

}  // namespace kvx::transfer
