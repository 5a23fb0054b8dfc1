// A folder as a store: a value a file, written beside its place and renamed, so that a reader of
// any machine sees all of it or none.
//
//   FOLDER/kvx1/tenant/scope/ab/ab...-0p    key kvx1/tenant/scope/ab...-0p
//   FOLDER/.incoming/WRITER-NUMBER          values on their way; what a killed process left of them
//                                           is removed an hour later by whoever opens the folder
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/executor.hpp"
#include "core/os/os.hpp"
#include "core/random_id.hpp"
#include "tier/store/remote_store.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
namespace {

namespace fs = std::filesystem;

// Of a batch, each with a value of its own: making, naming and opening a file is mostly waiting.
constexpr int kNumThreads = 4;
constexpr auto kMostAgeOfIncoming = std::chrono::hours(1);

// Closes itself.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) os::close_file(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

class FolderStore final : public RemoteStore {
 public:
  explicit FolderStore(fs::path folder) : folder_(std::move(folder)) {}

  Status prepare() {
    std::error_code problem;
    fs::create_directories(incoming(), problem);
    const std::string probe = next_incoming();
    const int number = os::open_file(probe, os::Open::kNew);
    if (number < 0) {
      return invalid_argument("'{}' takes no files ({}); expected a folder that may be written",
                              folder_.string(), std::strerror(errno));
    }
    os::close_file(number);
    os::remove_file(probe);
    remove_old_incoming();
    return {};
  }

  Status put(std::span<StorePut> items) override {
    return for_each(items.size(), [&](size_t i) -> Status {
      KVX_ASSIGN_OR_RETURN(items[i].is_stored, write(path_of(items[i].key), items[i].value));
      return {};
    });
  }

  Status get(std::span<StoreGet> items) override {
    return get_each(items, [](size_t) {});
  }

  Status get_each(std::span<StoreGet> items, const Arrived& arrived) override {
    return for_each(items.size(), [&](size_t i) -> Status {
      KVX_ASSIGN_OR_RETURN(items[i].num_bytes, read(path_of(items[i].key), items[i].buffer));
      arrived(i);
      return {};
    });
  }

  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    for (size_t i = 0; i < keys.size(); ++i) {
      has[i] = os::facts_of(path_of(keys[i]).string()) ? 1 : 0;
      if (has[i] == 0 && errno != ENOENT) return failed("looked up");
    }
    return {};
  }

  Status remove(std::span<const std::string> keys) override {
    for (const std::string& key : keys) {
      if (!os::remove_file(path_of(key).string()) && errno != ENOENT) return failed("removed");
    }
    return {};
  }

  Status remove_all(std::string_view parts) override {
    std::error_code problem;
    fs::remove_all(folder_ / parts, problem);
    if (!problem) return {};
    return internal_error("'{}' could not be emptied: {}", (folder_ / parts).string(),
                          problem.message());
  }

 private:
  // call(i) of each, by several threads, until one has failed; its error.
  template <class Call>
  Status for_each(size_t count, const Call& call) {
    std::vector<Status> statuses(count);
    std::atomic<bool> has_failed = false;
    executor_->parallel_for(static_cast<int>(count), [&](int i) {
      if (!has_failed) statuses[i] = call(i);
      if (!statuses[i].ok()) has_failed = true;
    });
    for (Status& status : statuses) KVX_RETURN_IF_ERROR(std::move(status));
    return {};
  }

  fs::path incoming() const { return folder_ / ".incoming"; }
  std::string next_incoming() {
    const std::string name = fmt::format("{:016x}-{}", writer_, num_incoming_.fetch_add(1));
    return (incoming() / name).string();
  }
  Error failed(std::string_view what) const {
    return internal_error("a file in '{}' could not be {}: {}", folder_.string(), what,
                          std::strerror(errno));
  }
  // 256 folders a scope keep each of them short.
  fs::path path_of(const std::string& key) const {
    const size_t slash = key.rfind('/');
    const size_t begin = slash == std::string::npos ? 0 : slash + 1;
    return folder_ / key.substr(0, begin) / key.substr(begin, 2) / key.substr(begin);
  }

  // False: there is no room.
  Result<bool> write(const fs::path& path, std::span<const uint8_t> value) {
    const std::string temporary = next_incoming();
    const Status written = write_whole(temporary, value);
    if (written.ok() && rename_into_folder(temporary, path)) return true;
    const int error = errno;
    os::remove_file(temporary);
    errno = error;
    if (os::is_no_room(error)) return false;
    return failed("written");
  }

  // The folder is there but for the first of its files, and after an erasure.
  static bool rename_into_folder(const std::string& temporary, const fs::path& path) {
    if (os::rename_file(temporary, path.string())) return true;
    if (errno != ENOENT) return false;
    std::error_code problem;
    fs::create_directories(path.parent_path(), problem);
    return os::rename_file(temporary, path.string());
  }

  Status write_whole(const std::string& path, std::span<const uint8_t> value) const {
    const Descriptor file(os::open_file(path, os::Open::kNew));
    if (file.number() < 0) return failed("made");
    const bool is_written = transfer_all(value.size(), [&](size_t done) {
      return os::write_at(file.number(), value.subspan(done), static_cast<int64_t>(done));
    });
    return is_written ? Status{} : Status{failed("written")};
  }

  // -1: there is none that fits.
  Result<int64_t> read(const fs::path& path, std::span<uint8_t> buffer) const {
    const Descriptor file(os::open_file(path.string(), os::Open::kRead));
    if (file.number() < 0) {
      if (errno == ENOENT) return int64_t{-1};
      return failed("opened");
    }
    const std::optional<os::FileFacts> facts = os::facts_of(file.number());
    if (!facts) return failed("read");
    if (!facts->is_regular || facts->bytes > std::ssize(buffer)) return int64_t{-1};
    const auto bytes = static_cast<size_t>(facts->bytes);
    const bool is_read = transfer_all(bytes, [&](size_t done) {
      return os::read_at(file.number(), buffer.subspan(done, bytes - done),
                         static_cast<int64_t>(done));
    });
    if (!is_read) return failed("read");
    return static_cast<int64_t>(bytes);
  }

  void remove_old_incoming() const {
    std::error_code problem;
    const auto oldest = fs::file_time_type::clock::now() - kMostAgeOfIncoming;
    for (const fs::directory_entry& one : fs::directory_iterator(incoming(), problem)) {
      const auto written = one.last_write_time(problem);
      if (!problem && written < oldest) fs::remove(one.path(), problem);
    }
  }

  const fs::path folder_;
  const std::unique_ptr<Executor> executor_ = make_thread_pool(kNumThreads);
  // Other stores of the process and of other machines write to the folder at the same time.
  const uint64_t writer_ = random_id();
  std::atomic<int64_t> num_incoming_ = 0;
};

}  // namespace

Result<std::unique_ptr<RemoteStore>> open_folder_store(const std::string& folder) {
  auto store = std::make_unique<FolderStore>(folder);
  KVX_RETURN_IF_ERROR(store->prepare());
  return std::unique_ptr<RemoteStore>(std::move(store));
}

}  // namespace kvx::tier
