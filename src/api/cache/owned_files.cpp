// kvx_*_save, kvx_*_load and kvx_file_*: sequences and prefixes in files.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"
#include "kv/files/transcode.hpp"
#include "tier/file_summary.hpp"

namespace kvx::boundary {

Status copy_text(std::string_view whole, char* text, uint64_t capacity, uint64_t* bytes) {
  if (bytes == nullptr) return invalid_argument("bytes is null");
  if (capacity > 0 && text == nullptr) return invalid_argument("text is null");
  *bytes = whole.size() + 1;
  if (capacity == 0) return {};
  const size_t length = std::min<uint64_t>(whole.size(), capacity - 1);
  whole.copy(text, length);
  text[length] = '\0';
  return {};
}

namespace {

Result<std::string> read_path(const char* path) {
  if (path == nullptr) return invalid_argument("path is null");
  if (*path == '\0') return invalid_argument("path is ''; expected a file's name");
  return std::string(path);
}

Result<kv::SaveOptions> read_save_options(const kvx_save_options_t* caller) {
  if (caller == nullptr) return kv::SaveOptions{};
  KVX_ASSIGN_OR_RETURN(const kvx_save_options_t args, read_struct(caller, "options"));
  if (args.zstd_level < 0 || args.zstd_level > 22) {
    return invalid_argument("options.zstd_level is {}; expected 0 to 22", args.zstd_level);
  }
  return kv::SaveOptions{args.zstd_level};
}

// Returns whether the caller allows transcoding.
Result<bool> read_load_options(const kvx_load_options_t* caller) {
  if (caller == nullptr) return false;
  KVX_ASSIGN_OR_RETURN(const kvx_load_options_t args, read_struct(caller, "options"));
  if (args.flags <= KVX_LOAD_TRANSCODE) return args.flags == KVX_LOAD_TRANSCODE;
  return Error{ErrorCode::kIncompatible,
               fmt::format("options.flags is {:#x}; this library supports {:#x}", args.flags,
                           static_cast<uint32_t>(KVX_LOAD_TRANSCODE))};
}

// ---- caches

Status save_sequence(kvx_cache_t handle, int32_t sequence, const char* caller_path,
                     const kvx_save_options_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(const kv::SaveOptions options, read_save_options(caller));
  return owned->cache->save_sequence(index, path, options);
}

Status save_prefixes(kvx_cache_t handle, const char* caller_path,
                     const kvx_save_options_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(const kv::SaveOptions options, read_save_options(caller));
  return owned->cache->save_prefixes(path, options);
}

Status load_sequence(kvx_cache_t handle, const char* caller_path, const kvx_load_options_t* options,
                     int32_t* sequence) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(const bool transcodes, read_load_options(options));
  if (sequence == nullptr) return invalid_argument("sequence is null");
  KVX_ASSIGN_OR_RETURN(const int index, transcodes ? kv::transcode_sequence(*owned->cache, path)
                                                   : owned->cache->load_sequence(path));
  *sequence = owned->numbers.number_of(index);
  return {};
}

Status load_prefixes(kvx_cache_t handle, const char* caller_path, const kvx_load_options_t* options,
                     kvx_load_report_t* report) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(const bool transcodes, read_load_options(options));
  if (report != nullptr) KVX_RETURN_IF_ERROR(check_out_struct(report, "report"));
  KVX_ASSIGN_OR_RETURN(const kv::LoadReport done, transcodes
                                                      ? kv::transcode_prefixes(*owned->cache, path)
                                                      : owned->cache->load_prefixes(path));
  if (report == nullptr) return {};
  kvx_load_report_t answer{};
  answer.num_blocks = done.num_blocks;
  answer.num_loaded = done.num_loaded;
  answer.num_known = done.num_known;
  answer.num_bad = done.num_bad;
  answer.num_no_room = done.num_no_room;
  return write_struct(answer, report, "report");
}

// ---- files alone

Status inspect(const char* caller_path, kvx_file_info_t* info) {
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_RETURN_IF_ERROR(check_out_struct(info, "info"));
  KVX_ASSIGN_OR_RETURN(const auto file, tier::CacheFileReader::open(path));
  const tier::FileIndex& index = file.index();
  kvx_file_info_t answer{};
  answer.version = tier::kFileVersion;
  answer.block_size = static_cast<uint32_t>(index.block_size);
  answer.num_scopes = static_cast<uint32_t>(index.scopes.size());
  answer.num_sequences = static_cast<uint32_t>(index.sequences.size());
  answer.num_blocks = static_cast<int64_t>(index.blocks.size());
  if (!index.sequences.empty()) {
    answer.num_tokens = tier::num_tokens_of(index, index.sequences.front());
  }
  answer.file_bytes = file.file_bytes();
  for (const tier::KindSummary& kind : tier::summarize_kinds(index)) {
    answer.num_block_copies += kind.num_block_copies;
    answer.stored_bytes += kind.stored_bytes;
    answer.memory_bytes += kind.memory_bytes;
  }
  return write_struct(answer, info, "info");
}

Status verify(const char* caller_path) {
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  return tier::check_block_copies(file, path);
}

Status file_fingerprint(const char* caller_path, char* text, uint64_t capacity, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const std::string path, read_path(caller_path));
  KVX_ASSIGN_OR_RETURN(const auto file, tier::CacheFileReader::open(path));
  return copy_text(file.index().fingerprint, text, capacity, bytes);
}

Status cache_fingerprint(kvx_cache_t handle, char* text, uint64_t capacity, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  return copy_text(owned->cache->fingerprint(), text, capacity, bytes);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_sequence_save(kvx_cache_t cache, int32_t sequence, const char* path,
                                          const kvx_save_options_t* options) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::save_sequence(cache, sequence, path, options); });
}

extern "C" kvx_status_t kvx_cache_save_prefixes(kvx_cache_t cache, const char* path,
                                                const kvx_save_options_t* options) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::save_prefixes(cache, path, options); });
}

extern "C" kvx_status_t kvx_sequence_load(kvx_cache_t cache, const char* path,
                                          const kvx_load_options_t* options, int32_t* sequence) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::load_sequence(cache, path, options, sequence); });
}

extern "C" kvx_status_t kvx_cache_load_prefixes(kvx_cache_t cache, const char* path,
                                                const kvx_load_options_t* options,
                                                kvx_load_report_t* report) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::load_prefixes(cache, path, options, report); });
}

extern "C" kvx_status_t kvx_file_inspect(const char* path, kvx_file_info_t* info) {
  return kvx::boundary::run_call([&] { return kvx::boundary::inspect(path, info); });
}

extern "C" kvx_status_t kvx_file_verify(const char* path) {
  return kvx::boundary::run_call([&] { return kvx::boundary::verify(path); });
}

extern "C" kvx_status_t kvx_file_fingerprint(const char* path, char* text, uint64_t capacity,
                                             uint64_t* bytes) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::file_fingerprint(path, text, capacity, bytes); });
}

extern "C" kvx_status_t kvx_cache_fingerprint(kvx_cache_t cache, char* text, uint64_t capacity,
                                              uint64_t* bytes) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::cache_fingerprint(cache, text, capacity, bytes); });
}
