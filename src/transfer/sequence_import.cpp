// import_sequence: asks for parts, several at a time, and asks again for what does not come.
#include "transfer/sequence_import.hpp"

#include <map>
#include <optional>

#include "core/os/os.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/files/transcode.hpp"
#include "transfer/layer_import.hpp"
#include "transfer/peer.hpp"
#include "transfer/shared_file.hpp"

namespace kvx::transfer {
namespace {

constexpr size_t kMostPartsAtOnce = 4;

bool can_be_read(const std::string& path) {
  const int descriptor = os::open_file(path, os::Open::kRead);
  if (descriptor >= 0) os::close_file(descriptor);
  return descriptor >= 0;
}

class Import {
 public:
  Import(kv::KvCache& cache, const ImportOptions& options, ImportReport& report, Peer& peer)
      : cache_(cache), options_(options), report_(report), peer_(peer) {}

  Result<int> run() {
    KVX_ASSIGN_OR_RETURN(offer_, peer_.greet(cache_.fingerprint(), report_.num_asked_again));
    const Status fits = check_offer();
    if (!fits.ok()) {
      finish(false, fits.error().message);
      return fits.error();
    }
    const Result<int> sequence = take();
    finish(sequence.ok(), sequence.ok() ? "" : sequence.error().message);
    return sequence;
  }

 private:
  Status check_offer() const {
    // A claim of any size is no reason to fill the memory: f32 beside a packed cache, and its
    // index.
    const cache::ByteCount most = cache_.sequence_bytes(cache_.config().max_tokens_per_sequence);
    const auto limit = static_cast<uint64_t>(most.total()) * 32 + (64 << 20);
    if (offer_.bytes > limit) {
      return invalid_argument(
          "the exporter offers {} bytes; expected at most {} for a sequence of "
          "this cache",
          offer_.bytes, limit);
    }
    if (!options_.heads.is_whole()) return check_heads();
    const std::string reason = kv::reason_not_to_load(offer_.text, cache_.fingerprint());
    if (reason.empty()) return {};
    if (!options_.may_transcode) {
      return invalid_argument(
          "the exporter's cache is not this one's: {} (exporter's, and this "
          "cache's); allow transcoding where formats or block sizes differ",
          reason);
    }
    const Status convertible = kv::check_transcodable(offer_.text, cache_.config());
    if (convertible.ok()) return {};
    return Error{convertible.error().code,
                 fmt::format("the exporter's cache cannot become this one's: {} (exporter's, and "
                             "this cache's)",
                             convertible.error().message)};
  }

  // The exporter's cache with the cut's heads alone has to be this one.
  Status check_heads() const {
    if (options_.may_transcode) {
      return invalid_argument(
          "some heads are asked for, and transcoding is allowed; expected one of the two");
    }
    if (offer_.num_layers == 0) {
      return unsupported(
          "heads {} to {} of {} are asked for; the exporter offers its sequence as a whole "
          "(expected one that is offered layer by layer)",
          options_.heads.first, options_.heads.end, options_.heads.num_heads);
    }
    KVX_ASSIGN_OR_RETURN(const std::string expected,
                         fingerprint_of_heads(offer_.text, options_.heads));
    const std::string reason = kv::reason_not_to_load(expected, cache_.fingerprint());
    if (reason.empty()) return {};
    return invalid_argument(
        "heads {} to {} of the exporter's cache are not this one's: {} (exporter's, and this "
        "cache's)",
        options_.heads.first, options_.heads.end, reason);
  }

  Result<int> take() {
    if (offer_.num_layers != 0) return import_layers(cache_, options_, offer_, peer_, report_);
    if (!offer_.path.empty() && can_be_read(offer_.path)) {
      report_.was_shared = true;
      return load(offer_.path);
    }
    KVX_ASSIGN_OR_RETURN(SharedFile file, SharedFile::create());
    KVX_RETURN_IF_ERROR(file.open_empty());
    KVX_RETURN_IF_ERROR(receive_all(file));
    return load(file.path());
  }

  Result<int> load(const std::string& path) {
    return options_.may_transcode ? kv::transcode_sequence(cache_, path)
                                  : cache_.load_sequence(path);
  }

  Status ask(uint64_t offset) {
    Request read;
    read.kind = Kind::kRead;
    read.export_id = offer_.export_id;
    read.offset = offset;
    read.bytes = std::min(kPartBytes, offer_.bytes - offset);
    asked_[offset] = read.bytes;
    return peer_.send(read);
  }

  Status receive_all(const SharedFile& file) {
    uint64_t next = 0;
    while (next < offer_.bytes || !asked_.empty()) {
      while (next < offer_.bytes && asked_.size() < kMostPartsAtOnce) {
        KVX_RETURN_IF_ERROR(ask(next));
        next += asked_[next];
      }
      KVX_ASSIGN_OR_RETURN(const std::optional<Answer> answer, peer_.receive());
      if (!answer) {
        report_.num_asked_again += std::ssize(asked_);
        for (const auto& [offset, bytes] : std::map(asked_)) KVX_RETURN_IF_ERROR(ask(offset));
        continue;
      }
      // A part that was asked for twice comes twice.
      const auto found = asked_.find(answer->offset);
      if (answer->kind != Kind::kRead || answer->export_id != offer_.export_id ||
          found == asked_.end()) {
        continue;
      }
      if (answer->data.size() != found->second) {
        return invalid_argument("the exporter sends {} bytes from {}; {} were asked for",
                                answer->data.size(), answer->offset, found->second);
      }
      KVX_RETURN_IF_ERROR(file.write_at(static_cast<int64_t>(answer->offset), answer->data));
      report_.bytes += std::ssize(answer->data);
      asked_.erase(found);
    }
    return {};
  }

  // The exporter hears what became of it; whether it does changes nothing here.
  void finish(bool is_taken, const std::string& why) {
    Request done;
    done.kind = Kind::kDone;
    done.export_id = offer_.export_id;
    done.is_taken = is_taken;
    done.text = why;
    if (!peer_.send(done).ok()) return;
    while (true) {
      const Result<std::optional<Answer>> answer = peer_.receive();
      if (!answer.ok() || !answer.value() || answer.value()->kind == Kind::kDone) return;
    }
  }

  kv::KvCache& cache_;
  const ImportOptions& options_;
  ImportReport& report_;
  Peer& peer_;
  Answer offer_;
  std::map<uint64_t, uint64_t> asked_;  // offset and bytes of parts under way
};

}  // namespace

Result<int> import_sequence(kv::KvCache& cache, const ImportOptions& options,
                            ImportReport* report) {
  if (cache.fingerprint().empty()) {
    return unsupported(
        "prefix caching is off; expected a cache with prefix.is_on (C: KVX_CACHE_PREFIXES)");
  }
  ImportReport ignored;
  KVX_ASSIGN_OR_RETURN(const std::unique_ptr<Peer> peer,
                       Peer::create(options.endpoint, options.timeout_ms));
  return Import(cache, options, report == nullptr ? ignored : *report, *peer).run();
}

}  // namespace kvx::transfer
