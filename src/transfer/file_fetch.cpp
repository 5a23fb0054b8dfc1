// fetch_files: asks for the first part of several files at a time, then for the other parts.
#include "transfer/file_fetch.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "tier/whole_file.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostRequestsAtOnce = 16;
constexpr auto kLookAgainAfter = std::chrono::milliseconds(5);  // for a file that is not there yet

class Fetch {
 public:
  Fetch(const FetchOptions& options, std::span<const std::string> names, Peer& peer)
      : options_(options), names_(names), peer_(peer), end_(names.size()) {}

  Result<FetchReport> run() {
    while (first_open_ < end_) {
      while (next_ < end_ && asked_.size() < kMostRequestsAtOnce) {
        KVX_RETURN_IF_ERROR(ask(next_++, 0));
      }
      KVX_ASSIGN_OR_RETURN(const std::optional<Answer> answer, peer_.receive());
      if (!answer) {
        for (const auto& [index, offset] : std::set(asked_)) {
          KVX_RETURN_IF_ERROR(ask(index, offset));
        }
        continue;
      }
      KVX_RETURN_IF_ERROR(take(*answer));
    }
    report_.num_files = static_cast<int64_t>(end_);
    return report_;
  }

 private:
  using Part = std::pair<size_t, uint64_t>;  // index in names_, offset

  // A file of which parts are missing.
  struct File {
    std::vector<uint8_t> bytes;
    uint64_t num_there = 0;
  };

  Status ask(size_t index, uint64_t offset) {
    Request request;
    request.kind = Kind::kFile;
    request.offset = offset;
    request.text = names_[index];
    asked_.insert({index, offset});
    return peer_.send(request);
  }

  Status take(const Answer& answer) {
    const auto found = std::ranges::find_if(asked_, [&](const Part& part) {
      return names_[part.first] == answer.path && part.second == answer.offset;
    });
    // A part that was asked for twice comes twice.
    if (answer.kind != Kind::kFile || found == asked_.end()) return {};
    const auto [index, offset] = *found;
    if (answer.bytes == 0) return miss(index);
    if (answer.bytes > static_cast<uint64_t>(kMostFileBytes)) {
      return invalid_argument("the server has {} bytes under '{}'; expected at most {}",
                              answer.bytes, answer.path, kMostFileBytes);
    }
    File& file = files_[index];
    if (file.bytes.empty()) {
      file.bytes.resize(static_cast<size_t>(answer.bytes));
      for (uint64_t other = kPartBytes; other < answer.bytes; other += kPartBytes) {
        KVX_RETURN_IF_ERROR(ask(index, other));
      }
    }
    const uint64_t expected = std::min(kPartBytes, file.bytes.size() - offset);
    if (answer.bytes != file.bytes.size() || answer.data.size() != expected) {
      return invalid_argument("the server sends {} of {} bytes of '{}' from {}; expected {} of {}",
                              answer.data.size(), answer.bytes, answer.path, offset, expected,
                              file.bytes.size());
    }
    std::ranges::copy(answer.data, file.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    file.num_there += expected;
    report_.bytes += static_cast<int64_t>(expected);
    last_came_ = Clock::now();
    asked_.erase(found);
    return file.num_there == file.bytes.size() ? finish(index) : Status();
  }

  // The file is asked for again while there is time; then it and those after it are left out.
  Status miss(size_t index) {
    if (Clock::now() - last_came_ < std::chrono::milliseconds(options_.wait_ms)) {
      std::this_thread::sleep_for(kLookAgainAfter);
      return ask(index, 0);
    }
    end_ = std::min(end_, index);
    std::erase_if(asked_, [this](const Part& part) { return part.first >= end_; });
    return {};
  }

  Status finish(size_t index) {
    const std::string path = options_.folder + "/" + names_[index] + ".kvx";
    KVX_RETURN_IF_ERROR(tier::write_whole_file(path, files_[index].bytes));
    files_.erase(index);
    is_done_.insert(index);
    while (is_done_.contains(first_open_)) ++first_open_;
    return {};
  }

  const FetchOptions& options_;
  std::span<const std::string> names_;
  Peer& peer_;
  FetchReport report_;
  size_t next_ = 0;               // to be asked for
  size_t end_;                    // from there on there is nothing
  size_t first_open_ = 0;         // all before it are done
  std::set<Part> asked_;          // under way
  std::map<size_t, File> files_;  // by index
  std::set<size_t> is_done_;
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

Result<FetchReport> fetch_files(const FetchOptions& options, std::span<const std::string> names) {
  constexpr int64_t kDay = int64_t{1000} * 3600 * 24;
  if (options.wait_ms < 0 || options.wait_ms > kDay) {
    return invalid_argument("wait_ms is {}; expected 0 to {}", options.wait_ms, kDay);
  }
  for (const std::string& name : names) KVX_RETURN_IF_ERROR(check_file_name(name));
  KVX_ASSIGN_OR_RETURN(const std::unique_ptr<Peer> peer,
                       Peer::create(options.endpoint, options.timeout_ms));
  return Fetch(options, names, *peer).run();
}

}  // namespace kvx::transfer
