// SequenceExport: one answer a request; what an importer has is the importer's to know.
#include "transfer/sequence_export.hpp"

#include <chrono>

#include "core/random_id.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

constexpr uint64_t kMostBytesAtOnce = 4 * kPartBytes;

}  // namespace

Result<std::unique_ptr<SequenceExport>> SequenceExport::create(kv::KvCache& cache, int sequence,
                                                               const ExportOptions& options) {
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open_component());
  if (options.endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected tcp://ADDRESS:PORT or ipc://PATH");
  }
  KVX_ASSIGN_OR_RETURN(SharedFile file, SharedFile::create());
  KVX_RETURN_IF_ERROR(cache.save_sequence(sequence, file.path()));
  KVX_RETURN_IF_ERROR(file.open_written());
  std::unique_ptr<SequenceExport> made(new SequenceExport(functions, std::move(file)));
  made->id_ = random_id();
  made->shares_memory_ = options.endpoint.starts_with("ipc://");
  made->fingerprint_ = cache.fingerprint();
  made->state_.bytes = made->file_.bytes();
  kvx_transfer_error error{};
  made->server_ = functions->server_create(options.endpoint.c_str(), answer, made.get(), &error);
  if (made->server_ == nullptr) return invalid_argument("{}", error.text);
  return made;
}

SequenceExport::~SequenceExport() {
  if (server_ != nullptr) functions_->server_free(server_);
}

ExportState SequenceExport::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
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
    answer.bytes = static_cast<uint64_t>(file_.bytes());
    if (shares_memory_) answer.path = file_.path();
    answer.text = fingerprint_;
    return answer;
  }
  if (request.export_id != id_) {
    return refused("another sequence is on offer here by now; begin the import again");
  }
  if (request.kind == Kind::kRead) return read(request);
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

Answer SequenceExport::read(const Request& request) {
  const auto all = static_cast<uint64_t>(file_.bytes());
  if (request.offset > all || request.bytes > all - request.offset || request.bytes == 0 ||
      request.bytes > kMostBytesAtOnce) {
    return refused(
        fmt::format("{} bytes from {} are asked for; the offer has {} and gives {} at once",
                    request.bytes, request.offset, all, kMostBytesAtOnce));
  }
  buffer_.resize(static_cast<size_t>(request.bytes));
  const Status done = file_.read_at(static_cast<int64_t>(request.offset), buffer_);
  if (!done.ok()) return refused(done.error().message);
  {
    const std::lock_guard lock(mutex_);
    state_.bytes_sent += static_cast<int64_t>(request.bytes);
  }
  Answer answer;
  answer.kind = Kind::kRead;
  answer.export_id = id_;
  answer.offset = request.offset;
  answer.data = buffer_;
  return answer;
}

}  // namespace kvx::transfer
