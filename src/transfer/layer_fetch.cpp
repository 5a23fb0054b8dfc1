// fetch_layers: asks for the next record of several files at a time; a file's next one is asked for
// when the one before it has come.
#include "transfer/layer_fetch.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "core/os/os.hpp"
#include "core/random_id.hpp"
#include "kv/files/fingerprint.hpp"
#include "tier/layers/layer_file.hpp"
#include "tier/whole_file.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostRequestsAtOnce = 4;
constexpr size_t kMostNamesAtOnce = 32;
constexpr auto kLookAgainAfter = std::chrono::milliseconds(2);  // for a layer that is not there yet

// Files of which records are missing. A file's name is NAME.kvx once it is whole.
class Fetch {
 public:
  Fetch(const FetchOptions& options, std::span<const std::string> names, Peer& peer)
      : options_(options), names_(names), peer_(peer), files_(names.size()), end_(names.size()) {}
  Fetch(const Fetch&) = delete;
  Fetch& operator=(const Fetch&) = delete;
  ~Fetch() {
    for (const File& file : files_) {
      if (!file.is_done && !file.temporary.empty()) os::remove_file(file.temporary);
    }
  }

  Result<FetchReport> run() {
    while (first_open_ < end_) {
      KVX_RETURN_IF_ERROR(ask_for_more());
      if (asked_.empty()) {  // all that is missing is not there yet
        if (!leave_out_what_does_not_come()) std::this_thread::sleep_until(ask_again_);
        continue;
      }
      KVX_ASSIGN_OR_RETURN(const std::optional<Answer> answer, peer_.receive());
      if (answer) {
        KVX_RETURN_IF_ERROR(take(*answer));
        continue;
      }
      report_.num_asked_again += std::ssize(asked_);
      for (auto& [tag, run] : asked_) KVX_RETURN_IF_ERROR(send(tag, run));
    }
    report_.num_files = static_cast<int64_t>(end_);
    return report_;
  }

 private:
  struct File {
    tier::LayerHead head;  // of the file here
    std::string temporary;
    uint32_t num_records = 0;  // that are here, the head among them
    bool is_asked_for = false;
    bool is_done = false;
    Clock::time_point not_before{};  // it was not there when it was asked for
  };
  // Files with the same next record, one after the other.
  struct Run {
    size_t first = 0;
    size_t end = 0;
    uint32_t record = 0;
  };

  Status ask_for_more() {
    const auto now = Clock::now();
    ask_again_ = now + kLookAgainAfter;
    size_t i = first_open_;
    while (i < end_ && asked_.size() < kMostRequestsAtOnce) {
      const auto can_be_asked = [&](size_t j) {
        const File& file = files_[j];
        return !file.is_done && !file.is_asked_for && file.not_before <= now;
      };
      if (!can_be_asked(i)) {
        // What comes after a file that is not there is not there either, mostly.
        if (files_[i].not_before > now && files_[i].num_records == 0) break;
        ++i;
        continue;
      }
      Run run{i, i + 1, files_[i].num_records};
      while (run.end < end_ && run.end - run.first < kMostNamesAtOnce && can_be_asked(run.end) &&
             files_[run.end].num_records == run.record) {
        ++run.end;
      }
      for (size_t j = run.first; j < run.end; ++j) files_[j].is_asked_for = true;
      KVX_RETURN_IF_ERROR(send(next_tag_, run));
      asked_.emplace(next_tag_++, run);
      i = run.end;
    }
    return {};
  }

  Status send(uint64_t tag, const Run& run) {
    Request request;
    request.kind = Kind::kLayers;
    request.export_id = tag;
    request.record = run.record;
    if (run.record > 0) request.heads = options_.heads;
    for (size_t i = run.first; i < run.end; ++i) {
      request.text += (i == run.first ? "" : " ") + names_[i];
    }
    return peer_.send(request);
  }

  Status take(const Answer& answer) {
    const auto found = asked_.find(answer.export_id);
    // What was asked for twice comes twice.
    if (answer.kind != Kind::kLayers || found == asked_.end()) return {};
    const Run run = found->second;
    asked_.erase(found);
    if (answer.record != run.record || answer.num_parts > run.end - run.first) {
      return invalid_argument("the server sends {} parts of record {}; expected at most {} of {}",
                              answer.num_parts, answer.record, run.end - run.first, run.record);
    }
    const auto now = Clock::now();
    std::span<const uint8_t> left = answer.data;
    for (size_t i = run.first; i < run.end; ++i) {
      files_[i].is_asked_for = false;
      if (i - run.first >= answer.num_parts) {
        // What did not fit into the answer can be asked for at once.
        const bool was_first = i - run.first == answer.num_parts;
        if (was_first && answer.data.size() < kPartBytes) not_there_ = true;
        if (not_there_) files_[i].not_before = now + kLookAgainAfter;
        continue;
      }
      uint64_t bytes = 0;
      if (left.size() < sizeof bytes) return invalid_argument("the server's answer is cut short");
      std::memcpy(&bytes, left.data(), sizeof bytes);
      left = left.subspan(sizeof bytes);
      if (bytes > left.size()) return invalid_argument("the server's answer is cut short");
      if (i < end_) take_part(i, left.first(bytes));
      left = left.subspan(bytes);
    }
    not_there_ = false;
    if (!left.empty())
      return invalid_argument("the server's answer has {} bytes more than parts", left.size());
    return failure_;
  }

  // A damaged file ends what is fetched; so does what has another fingerprint, as an error.
  void take_part(size_t i, std::span<const uint8_t> bytes) {
    File& file = files_[i];
    const Status taken = file.num_records == 0 ? take_head(i, bytes) : take_record(i, bytes);
    if (!taken.ok()) {
      if (taken.error().code == ErrorCode::kIncompatible) failure_ = taken;
      report_.problem = fmt::format("'{}': {}", names_[i], taken.error().message);
      end_ = i;
      return;
    }
    ++file.num_records;
    report_.bytes += std::ssize(bytes);
    last_came_ = Clock::now();
    if (file.num_records <= file.head.index.kinds.size()) return;
    const std::string path = path_of(i);
    if (!os::rename_file(file.temporary, path)) {
      failure_ = tier::file_error(path, "cannot be written");
      return;
    }
    file.is_done = true;
    file.head = {};
    while (first_open_ < end_ && files_[first_open_].is_done) ++first_open_;
  }

  Status take_head(size_t i, std::span<const uint8_t> bytes) {
    File& file = files_[i];
    KVX_ASSIGN_OR_RETURN(file.head, tier::parse_layer_head(bytes));
    tier::FileIndex& index = file.head.index;
    const std::string reason = kv::reason_not_to_load(index.fingerprint, options_.fingerprint);
    if (!reason.empty()) {
      return Error{
          ErrorCode::kIncompatible,
          fmt::format("the server's blocks are not these: {} (the server's, and here)", reason)};
    }
    const bool is_one_block =
        index.blocks.size() == 1 && index.blocks[0].block_copies.size() == index.kinds.size();
    if (!is_one_block) return invalid_argument("it is no file of one block, with a page a layer");
    if (options_.heads.num_heads != 0) KVX_RETURN_IF_ERROR(cut_to_heads(file.head));
    if (file.head.file_bytes > kMostFileBytes) {
      return invalid_argument("it has {} bytes; expected at most {}", file.head.file_bytes,
                              kMostFileBytes);
    }
    const std::string temporary = fmt::format("{}.{:016x}.part", path_of(i), random_id());
    const Status created = tier::create_layer_file(temporary, file.head);
    if (!created.ok()) {
      failure_ = created;
      return created;
    }
    file.temporary = temporary;
    return {};
  }

  Status cut_to_heads(tier::LayerHead& head) const {
    const HeadRange& heads = options_.heads;
    for (tier::StoredBlockKind& kind : head.index.kinds) {
      if (kind.bytes % heads.num_heads != 0) {
        return invalid_argument("a page of {} bytes is not one of {} heads", kind.bytes,
                                heads.num_heads);
      }
      kind.bytes = kind.bytes / heads.num_heads * (heads.end - heads.first);
    }
    head.index.fingerprint = options_.fingerprint_of_heads;
    head = tier::lay_out_layers(std::move(head.index));
    return {};
  }

  Status take_record(size_t i, std::span<const uint8_t> bytes) {
    const File& file = files_[i];
    const auto kind = static_cast<int32_t>(file.num_records - 1);
    const auto& copies = file.head.index.blocks[0].block_copies;
    const auto place = std::ranges::find(copies, kind, &tier::StoredBlockCopy::kind);
    if (place == copies.end()) return invalid_argument("it has no page of layer {}", kind);
    if (std::ssize(bytes) != tier::kRecordHeaderBytes + place->stored_bytes) {
      return invalid_argument("a record of {} bytes came; expected {}", bytes.size(),
                              tier::kRecordHeaderBytes + place->stored_bytes);
    }
    const auto page = bytes.subspan(static_cast<size_t>(tier::kRecordHeaderBytes));
    tier::StoredBlockCopy sent = *place;
    std::memcpy(&sent.offset, bytes.data() + 8, sizeof sent.offset);  // where the server has it
    if (options_.heads.num_heads == 0) sent.offset = place->offset;
    KVX_ASSIGN_OR_RETURN(const auto checksum,
                         tier::parse_record_header(
                             bytes.first(static_cast<size_t>(tier::kRecordHeaderBytes)), sent));
    if (!checksum || cache::checksum(page) != *checksum) {
      return invalid_argument("the page of layer {} is damaged", kind);
    }
    const Status written = tier::write_record(file.temporary, *place, page);
    if (written.ok()) return {};
    failure_ = written;
    return written;
  }

  // Whether there is no more time for the first file that is not whole: it and those after it are
  // left out then.
  bool leave_out_what_does_not_come() {
    if (Clock::now() - last_came_ < std::chrono::milliseconds(options_.wait_ms)) return false;
    end_ = first_open_;
    return true;
  }

  std::string path_of(size_t i) const { return options_.folder + "/" + names_[i] + ".kvx"; }

  const FetchOptions& options_;
  std::span<const std::string> names_;
  Peer& peer_;
  FetchReport report_;
  Status failure_;
  std::vector<File> files_;
  size_t end_;             // from there on there is nothing
  size_t first_open_ = 0;  // all before it are done
  uint64_t next_tag_ = 1;
  std::map<uint64_t, Run> asked_;  // under way, by tag
  bool not_there_ = false;         // of the answer that is being taken
  Clock::time_point ask_again_{};
  Clock::time_point last_came_ = Clock::now();
};

}  // namespace

Status check_file_name(const std::string& name) {
  constexpr size_t kMost = 128;
  const bool is_name =
      !name.empty() && name.size() <= kMost && std::ranges::all_of(name, [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
               c == '-' || c == '_';
      });
  if (is_name) return {};
  return invalid_argument("a file's name is '{}'; expected 1 to {} letters, digits, '-' and '_'",
                          name.substr(0, kMost), kMost);
}

Result<FetchReport> fetch_layers(const FetchOptions& options, std::span<const std::string> names) {
  constexpr int64_t kDay = int64_t{1000} * 3600 * 24;
  if (options.wait_ms < 0 || options.wait_ms > kDay) {
    return invalid_argument("wait_ms is {}; expected 0 to {}", options.wait_ms, kDay);
  }
  const HeadRange& heads = options.heads;
  if (heads.num_heads != 0 && (heads.first >= heads.end || heads.end > heads.num_heads)) {
    return invalid_argument("heads are {} to {} of {}; expected some of them", heads.first,
                            heads.end, heads.num_heads);
  }
  for (const std::string& name : names) KVX_RETURN_IF_ERROR(check_file_name(name));
  KVX_ASSIGN_OR_RETURN(const std::unique_ptr<Peer> peer,
                       Peer::create(options.endpoint, options.timeout_ms));
  return Fetch(options, names, *peer).run();
}

}  // namespace kvx::transfer
