// import_layers: asks for parts of the layers in their order, several at a time, and again for
// what is not there yet or does not come.
#include "transfer/layer_import.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "core/log.hpp"
#include "core/os/os.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/files/incoming_sequence.hpp"
#include "kv/files/transcode.hpp"
#include "transfer/layer_head.hpp"
#include "transfer/shared_file.hpp"

namespace kvx::transfer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostPartsAtOnce = 4;
constexpr auto kLookAgainAfter = std::chrono::milliseconds(2);  // for a layer that is not there yet
constexpr size_t kChecksumBytes = sizeof(cache::ContentHash);

// Pages [first, end) of a layer.
struct Part {
  int layer = 0;
  uint64_t first = 0;
  uint64_t end = 0;
};

class LayerImport {
 public:
  LayerImport(kv::KvCache& cache, const ImportOptions& options, const Answer& offer, Peer& peer,
              ImportReport& report)
      : cache_(cache), options_(options), offer_(offer), peer_(peer), report_(report) {}

  Result<int> run() {
    KVX_RETURN_IF_ERROR(receive_head());
    KVX_RETURN_IF_ERROR(check_head());
    if (options_.heads.is_whole() &&
        !kv::reason_not_to_load(offer_.text, cache_.fingerprint()).empty()) {
      return convert();
    }
    KVX_ASSIGN_OR_RETURN(incoming_, kv::IncomingSequence::begin(cache_, ours_.index));
    KVX_RETURN_IF_ERROR(map_peer());
    KVX_RETURN_IF_ERROR(plan_parts());
    KVX_RETURN_IF_ERROR(receive_parts());
    KVX_RETURN_IF_ERROR(incoming_->synchronize());
    if (peer_bytes_) KVX_RETURN_IF_ERROR(check_offer_is_alive());
    return incoming_->commit();
  }

 private:
  Status check_progress(std::string_view what) const {
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - last_came_);
    if (waited.count() < options_.timeout_ms) return {};
    return unsupported("{} has not come from {} for {} ms; expected a step that computes it", what,
                       options_.endpoint, waited.count());
  }

  Status receive_head() {
    Request read;
    read.kind = Kind::kRead;
    read.export_id = offer_.export_id;
    while (true) {
      KVX_RETURN_IF_ERROR(peer_.send(read));
      KVX_ASSIGN_OR_RETURN(const std::optional<Answer> answer, peer_.receive());
      if (!answer) {
        ++report_.num_asked_again;
      } else if (answer->kind == Kind::kRead && answer->export_id == offer_.export_id) {
        if (!answer->data.empty()) {
          report_.bytes += std::ssize(answer->data);
          last_came_ = Clock::now();
          KVX_ASSIGN_OR_RETURN(theirs_, parse_head(answer->data));
          return {};
        }
        std::this_thread::sleep_for(kLookAgainAfter);
      }
      KVX_RETURN_IF_ERROR(check_progress("the sequence's head"));
    }
  }

  // What is written here is the exporter's, or this cache's heads of it.
  Status check_head() {
    if (theirs_.index.fingerprint != offer_.text) {
      return invalid_argument("the exporter's head has another fingerprint than its offer");
    }
    ours_ = theirs_;
    if (!options_.heads.is_whole()) {
      ours_.index.fingerprint = cache_.fingerprint();
      ours_.index.kinds = kv::block_kinds(cache_.table().storage);
      KVX_ASSIGN_OR_RETURN(ours_.layers, kv::layer_places(cache_.table().storage));
      if (ours_.layers.size() != theirs_.layers.size() ||
          ours_.index.kinds.size() != theirs_.index.kinds.size()) {
        return invalid_argument(
            "the exporter has {} layers and {} kinds of blocks; expected {}, {}",
            theirs_.layers.size(), theirs_.index.kinds.size(), ours_.layers.size(),
            ours_.index.kinds.size());
      }
    }
    index_offset_ = lay_out_block_copies(ours_.index);
    const cache::ByteCount most = cache_.sequence_bytes(cache_.config().max_tokens_per_sequence);
    const int64_t limit = most.total() * 32 + (64 << 20);  // f32 beside a packed cache
    if (index_offset_ <= limit) return {};
    return invalid_argument(
        "the exporter offers {} bytes; expected at most {} for a sequence of this cache",
        index_offset_, limit);
  }

  // A GPU's pages on this host are copied by this cache's GPU. Where they cannot be mapped they
  // come as messages.
  Status map_peer() {
    const kv::CacheStorage& storage = cache_.table().storage;
    if (offer_.ipc_handle.empty() || !storage.place || !options_.heads.is_whole() ||
        offer_.pool_order != storage.pool_fingerprint("") ||
        offer_.process == static_cast<uint64_t>(os::process_id())) {
      return {};
    }
    const auto* const handle = reinterpret_cast<const uint8_t*>(offer_.ipc_handle.data());
    Result<std::unique_ptr<kv::PeerBytes>> opened =
        incoming_->open_peer({handle, offer_.ipc_handle.size()});
    if (opened.ok()) {
      peer_bytes_ = std::move(opened).value();
      report_.was_shared = true;
      return {};
    }
    if (opened.error().code != ErrorCode::kUnsupported) return opened.error();
    log(LogLevel::kWarning, "a sequence on a GPU of this host comes as messages: {}",
        opened.error().message);
    return {};
  }

  // The exporter's memory was not freed while it was copied.
  Status check_offer_is_alive() {
    KVX_ASSIGN_OR_RETURN(const Answer answer,
                         peer_.greet(cache_.fingerprint(), report_.num_asked_again));
    if (answer.export_id == offer_.export_id) return {};
    return invalid_argument("the exporter at {} ended its offer before all was copied",
                            options_.endpoint);
  }

  // Another format or block size: by way of a file, which is decoded and appended again.
  Result<int> convert() {
    KVX_ASSIGN_OR_RETURN(SharedFile file, SharedFile::create());
    KVX_RETURN_IF_ERROR(file.open_empty());
    file_ = &file;
    KVX_RETURN_IF_ERROR(plan_parts());
    KVX_RETURN_IF_ERROR(receive_parts());
    KVX_RETURN_IF_ERROR(finish_file());
    return kv::transcode_sequence(cache_, file.path());
  }

  Status plan_parts() {
    int64_t layer_offset = 0;
    for (int layer = 0; layer < static_cast<int>(ours_.layers.size()); ++layer) {
      pages_.push_back(pages_of(ours_, layer));
      const std::vector<PageOfLayer> theirs = pages_of(theirs_, layer);
      if (theirs.size() != pages_.back().size()) {
        return invalid_argument("layer {} has {} pages; expected {}", layer, theirs.size(),
                                pages_.back().size());
      }
      layer_offsets_.push_back(layer_offset);
      uint64_t bytes = 0;
      Part part{layer, 0, 0};
      for (const PageOfLayer& page : theirs) {
        const auto page_bytes = static_cast<uint64_t>(page.place.bytes);
        if (!peer_bytes_ && part.end > part.first && bytes + page_bytes > kPartBytes) {
          parts_.push_back(part);
          part.first = part.end;
          bytes = 0;
        }
        ++part.end;
        bytes += page_bytes;
        layer_offset += page.place.bytes;
      }
      if (part.end > part.first) parts_.push_back(part);
    }
    return {};
  }

  Status ask(size_t number) {
    const Part& part = parts_[number];
    Request request;
    request.kind = Kind::kPages;
    request.export_id = offer_.export_id;
    request.record = static_cast<uint32_t>(part.layer);
    request.heads = {static_cast<uint32_t>(options_.heads.first),
                     static_cast<uint32_t>(options_.heads.end),
                     static_cast<uint32_t>(options_.heads.num_heads)};
    request.first_page = part.first;
    request.end_page = part.end;
    request.is_mapped = peer_bytes_ != nullptr;
    return peer_.send(request);
  }

  Status receive_parts() {
    size_t next = 0;
    size_t num_done = 0;
    while (num_done < parts_.size()) {
      // A layer that is not there yet is the first that is asked for again; those after it wait.
      while (asked_.size() < kMostPartsAtOnce && Clock::now() >= not_before_) {
        size_t number = next;
        if (!missing_.empty()) {
          number = missing_.extract(missing_.begin()).value();
        } else if (next < parts_.size()) {
          ++next;
        } else {
          break;
        }
        asked_.emplace(std::pair(parts_[number].layer, parts_[number].first), number);
        KVX_RETURN_IF_ERROR(ask(number));
      }
      if (asked_.empty()) {
        std::this_thread::sleep_until(not_before_);
        KVX_RETURN_IF_ERROR(
            check_progress(fmt::format("layer {}", parts_[*missing_.begin()].layer)));
        continue;
      }
      KVX_ASSIGN_OR_RETURN(const std::optional<Answer> answer, peer_.receive());
      if (!answer) {
        report_.num_asked_again += std::ssize(asked_);
        for (const auto& [key, number] : asked_) KVX_RETURN_IF_ERROR(ask(number));
        continue;
      }
      // A part that was asked for twice comes twice.
      const auto found =
          asked_.find(std::pair(static_cast<int>(answer->record), answer->first_page));
      if (answer->kind != Kind::kPages || answer->export_id != offer_.export_id ||
          found == asked_.end()) {
        continue;
      }
      const size_t number = found->second;
      asked_.erase(found);
      if (answer->num_parts == 0) {
        missing_.insert(number);
        not_before_ = Clock::now() + kLookAgainAfter;
        continue;
      }
      KVX_RETURN_IF_ERROR(write_part(parts_[number], *answer));
      last_came_ = Clock::now();
      ++num_done;
    }
    return {};
  }

  Status write_part(const Part& part, const Answer& answer) {
    const auto num_pages = static_cast<size_t>(part.end - part.first);
    if (peer_bytes_) {
      return incoming_->copy(part.layer,
                             peer_bytes_->data() + layer_offsets_[static_cast<size_t>(part.layer)]);
    }
    const std::span<const PageOfLayer> pages =
        std::span(pages_[static_cast<size_t>(part.layer)]).subspan(part.first, num_pages);
    size_t expected = num_pages * kChecksumBytes;
    for (const PageOfLayer& page : pages) expected += static_cast<size_t>(page.place.bytes);
    if (answer.num_parts != num_pages || answer.data.size() != expected) {
      return invalid_argument(
          "the exporter sends {} pages of layer {} in {} bytes; expected {}, {}", answer.num_parts,
          part.layer, answer.data.size(), num_pages, expected);
    }
    report_.bytes += std::ssize(answer.data);
    auto checksums = answer.data.first(num_pages * kChecksumBytes);
    auto left = answer.data.subspan(checksums.size());
    for (size_t i = 0; i < num_pages; ++i) {
      const auto bytes = left.first(static_cast<size_t>(pages[i].place.bytes));
      left = left.subspan(bytes.size());
      if (std::memcmp(cache::checksum(bytes).bytes.data(), checksums.data() + i * kChecksumBytes,
                      kChecksumBytes) != 0) {
        return invalid_argument("page {} of layer {} is damaged", part.first + i, part.layer);
      }
      if (file_ == nullptr) continue;
      KVX_RETURN_IF_ERROR(
          file_->write_at(pages[i].block_copy->offset + pages[i].place.offset, bytes));
    }
    if (file_ != nullptr) return {};
    return incoming_->write(part.layer, static_cast<int64_t>(part.first),
                            static_cast<int64_t>(num_pages),
                            answer.data.subspan(num_pages * kChecksumBytes));
  }

  // Header and index, with the blocks' checksums.
  Status finish_file() {
    std::vector<uint8_t> block;
    for (tier::FileBlock& one : ours_.index.blocks) {
      for (tier::StoredBlockCopy& copy : one.block_copies) {
        block.assign(static_cast<size_t>(copy.stored_bytes), 0);
        const auto end = std::min(copy.stored_bytes, file_->bytes() - copy.offset);
        if (end > 0) {
          KVX_RETURN_IF_ERROR(
              file_->read_at(copy.offset, std::span(block).first(static_cast<size_t>(end))));
        }
        copy.checksum = cache::checksum(block);
      }
    }
    const std::vector<uint8_t> index = tier::encode_index(ours_.index);
    KVX_RETURN_IF_ERROR(file_->write_at(index_offset_, index));
    const tier::FileHeader header{index_offset_, std::ssize(index), cache::checksum(index)};
    return file_->write_at(0, tier::encode_header(header));
  }

  kv::KvCache& cache_;
  const ImportOptions& options_;
  const Answer& offer_;
  Peer& peer_;
  const SharedFile* file_ = nullptr;  // where blocks are converted
  ImportReport& report_;
  SequenceHead theirs_;
  SequenceHead ours_;
  int64_t index_offset_ = 0;
  std::unique_ptr<kv::PeerBytes> peer_bytes_;  // null: pages come as messages
  std::vector<int64_t> layer_offsets_;         // in the peer's bytes
  std::unique_ptr<kv::IncomingSequence>
      incoming_;                                 // it goes first: its copies read the peer's bytes
  std::vector<std::vector<PageOfLayer>> pages_;  // [layers], of ours_
  std::vector<Part> parts_;
  std::map<std::pair<int, uint64_t>, size_t> asked_;  // layer and first page, of parts under way
  std::set<size_t> missing_;                          // parts that were not there
  Clock::time_point not_before_{};
  Clock::time_point last_came_ = Clock::now();
};

}  // namespace

Result<int> import_layers(kv::KvCache& cache, const ImportOptions& options, const Answer& offer,
                          Peer& peer, ImportReport& report) {
  return LayerImport(cache, options, offer, peer, report).run();
}

Result<std::string> fingerprint_of_heads(std::string_view fingerprint, const kv::HeadCut& heads) {
  KVX_ASSIGN_OR_RETURN(kv::StoredCache stored, kv::parse_fingerprint(fingerprint));
  if (heads.first < 0 || heads.first >= heads.end || heads.end > heads.num_heads ||
      heads.num_heads != stored.geometry.num_kv_heads) {
    return invalid_argument("heads are {} to {} of {}; the exporter has {}", heads.first, heads.end,
                            heads.num_heads, stored.geometry.num_kv_heads);
  }
  if (stored.order != cache::BlockOrder::kHeads) {
    return unsupported("the exporter's blocks have an order in which heads lie apart");
  }
  if (stored.calibration != kv::calibration_name({})) {
    return unsupported(
        "the exporter's cache is calibrated, and its fingerprint has a hash of the tables of all "
        "heads; expected a recipe without calibration where some heads are imported");
  }
  stored.geometry.num_kv_heads = heads.end - heads.first;
  for (kv::LayerPlan& layer : stored.layers) {
    std::vector<kv::HeadRunPlan> runs;
    for (kv::HeadRunPlan run : layer.runs) {
      const int first = std::max(run.first_head, heads.first);
      const int end = std::min(run.first_head + run.num_heads, heads.end);
      if (first >= end) continue;
      run.first_head = first - heads.first;
      run.num_heads = end - first;
      runs.push_back(std::move(run));
    }
    layer.runs = std::move(runs);
  }
  return kv::fingerprint_of({&stored.geometry,
                             stored.layers,
                             {},
                             stored.full_precision_window,
                             &stored.full_precision_spec,
                             stored.block_size,
                             stored.model,
                             stored.order});
}

}  // namespace kvx::transfer
