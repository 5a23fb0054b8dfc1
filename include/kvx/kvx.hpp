// kvx.hpp: a thin C++20 face over kvx_abi.h: Result instead of status codes, handles that free
// themselves, spans, and descriptors of the common cases. It holds no code of its own beyond that.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvx/kvx_abi.h"

namespace kvx::api {

// Why a call failed: the text is kvx_last_error()'s.
struct Failure {
  kvx_status_t status;
  std::string text;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit
  Result(Failure failure) : state_(std::in_place_index<1>, std::move(failure)) {}  // NOLINT

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  // Requires: ok().
  T& operator*() { return *std::get_if<0>(&state_); }
  const T& operator*() const { return *std::get_if<0>(&state_); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  // Requires: !ok().
  const Failure& failure() const { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, Failure> state_;
};

using Status = Result<std::monostate>;

// Turns the status of a call that has just returned in this thread into a Status.
inline Status to_status(kvx_status_t status) {
  if (status == KVX_STATUS_OK) return std::monostate{};
  return Failure{status, kvx_last_error()};
}

// value(), or why the call that has just returned failed.
template <class Value>
auto value_or_failure(kvx_status_t status, Value value) -> Result<decltype(value())> {
  if (status != KVX_STATUS_OK) return Failure{status, kvx_last_error()};
  return value();
}

// A struct of zeros that knows its size.
template <class Struct>
Struct sized() {
  Struct object{};
  object.size = sizeof object;
  return object;
}

// ---- descriptors of host memory ----

// Dense and row-major.
inline kvx_tensor_desc_t tensor(void* data, kvx_dtype_t dtype, kvx_layout_t layout,
                                std::initializer_list<int64_t> shape) {
  auto desc = sized<kvx_tensor_desc_t>();
  desc.dtype = dtype;
  desc.layout = layout;
  desc.memory = KVX_MEMORY_HOST;
  desc.ndim = static_cast<uint32_t>(shape.size());
  int64_t stride = 1;
  for (uint32_t i = desc.ndim; i-- > 0;) {
    desc.shape[i] = shape.begin()[i];
    desc.stride[i] = stride;
    stride *= desc.shape[i];
  }
  desc.data = data;
  return desc;
}

struct CacheShape {
  uint32_t num_blocks;
  uint32_t block_size;
  uint32_t num_kv_heads;
  uint32_t head_dim;
};

// K and V as [num_blocks, block_size, num_kv_heads, head_dim].
inline kvx_cache_desc_t nhd_cache(void* k, void* v, kvx_dtype_t dtype, const CacheShape& shape) {
  auto desc = sized<kvx_cache_desc_t>();
  desc.num_blocks = shape.num_blocks;
  desc.block_size = shape.block_size;
  desc.num_kv_heads = shape.num_kv_heads;
  desc.head_dim = shape.head_dim;
  desc.k = tensor(k, dtype, KVX_LAYOUT_BLOCK_NHD,
                  {shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim});
  desc.v = desc.k;
  desc.v.data = v;
  return desc;
}

// Block ids [sequences, blocks_per_sequence].
inline kvx_block_table_t packed_table(std::span<const int32_t> ids, uint32_t blocks_per_sequence) {
  auto table = sized<kvx_block_table_t>();
  table.format = KVX_BLOCK_TABLE_PACKED;
  table.index_dtype = KVX_DTYPE_S32;
  table.max_blocks_per_seq = blocks_per_sequence;
  table.seq_count = static_cast<uint32_t>(ids.size() / blocks_per_sequence);
  table.beam_width = 1;
  table.indices = ids.data();
  table.indices_count = static_cast<uint32_t>(ids.size());
  return table;
}

inline kvx_seq_lens_t seq_lens(std::span<const int32_t> lengths) {
  auto desc = sized<kvx_seq_lens_t>();
  desc.dtype = KVX_DTYPE_S32;
  desc.seq_count = static_cast<uint32_t>(lengths.size());
  desc.lengths = lengths.data();
  return desc;
}

// Dense floats [tokens, heads, head_dim]; only calls that say so write to them.
inline kvx_rows_t rows(const void* data, kvx_dtype_t dtype) {
  auto desc = sized<kvx_rows_t>();
  desc.dtype = static_cast<uint32_t>(dtype);
  desc.data = const_cast<void*>(data);
  return desc;
}

// ---- calls ----

inline Status append(const kvx_append_args_t& args, void* stream = nullptr) {
  return to_status(kvx_append(&args, stream));
}
inline Status gather(const kvx_gather_args_t& args, void* stream = nullptr) {
  return to_status(kvx_gather(&args, stream));
}
inline Status attend(const kvx_attend_args_t& args, void* stream = nullptr) {
  return to_status(kvx_attend(&args, stream));
}
inline Status copy_blocks(const kvx_copy_args_t& args, void* stream = nullptr) {
  return to_status(kvx_copy_blocks(&args, stream));
}
inline Status transcode(const kvx_transcode_args_t& args, void* stream = nullptr) {
  return to_status(kvx_transcode(&args, stream));
}

// ---- cache files ----

inline Result<kvx_file_info_t> inspect_file(const std::string& path) {
  auto info = sized<kvx_file_info_t>();
  return value_or_failure(kvx_file_inspect(path.c_str(), &info), [&] { return info; });
}
// Reads every block.
inline Status verify_file(const std::string& path) {
  return to_status(kvx_file_verify(path.c_str()));
}

// A text of unknown length. call(text, capacity, bytes): kvx_file_fingerprint, say.
template <class Call>
Result<std::string> text_of(const Call& call) {
  uint64_t bytes = 0;
  if (const Status asked = to_status(call(nullptr, uint64_t{0}, &bytes)); !asked) {
    return asked.failure();
  }
  std::string text(bytes, '\0');
  return value_or_failure(call(text.data(), bytes, &bytes), [&] {
    text.resize(bytes - 1);  // without the 0 at its end
    return std::move(text);
  });
}
// What a file's blocks must agree in with a cache's, a fact a line.
inline Result<std::string> file_fingerprint(const std::string& path) {
  return text_of([&](char* text, uint64_t capacity, uint64_t* bytes) {
    return kvx_file_fingerprint(path.c_str(), text, capacity, bytes);
  });
}

// A cache that owns its memory.
class Cache {
 public:
  static Result<Cache> create(const kvx_cache_config_t& config,
                              const kvx_cache_options_t* options = nullptr) {
    kvx_cache_t handle = nullptr;
    return value_or_failure(kvx_cache_create_with(&config, options, &handle),
                            [&] { return Cache(handle); });
  }
  ~Cache() { kvx_cache_free(handle_); }
  Cache(Cache&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Cache& operator=(Cache&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // ---- sequences

  Result<int32_t> create_sequence() {
    int32_t sequence = 0;
    return value_or_failure(kvx_sequence_create(handle_, &sequence), [&] { return sequence; });
  }
  // Begins with the longest cached prefix of tokens; num_tokens() says how much that is.
  Result<int32_t> create_sequence_from(std::span<const int32_t> tokens,
                                       const kvx_prefix_keys_t* keys = nullptr) {
    int32_t sequence = 0;
    return value_or_failure(
        kvx_sequence_create_from(handle_, keys, tokens.data(), static_cast<int64_t>(tokens.size()),
                                 &sequence, nullptr),
        [&] { return sequence; });
  }
  Result<int32_t> fork_sequence(int32_t sequence) {
    int32_t fork = 0;
    return value_or_failure(kvx_sequence_fork(handle_, sequence, &fork), [&] { return fork; });
  }
  Status truncate_sequence(int32_t sequence, int64_t num_tokens) {
    return to_status(kvx_sequence_truncate(handle_, sequence, num_tokens));
  }
  Status record_tokens(int32_t sequence, std::span<const int32_t> tokens) {
    return to_status(
        kvx_sequence_record(handle_, sequence, tokens.data(), static_cast<int64_t>(tokens.size())));
  }
  Result<std::vector<int32_t>> recorded_tokens(int32_t sequence) const {
    int64_t count = 0;
    const Status asked = to_status(kvx_sequence_recorded(handle_, sequence, nullptr, 0, &count));
    if (!asked) return asked.failure();
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    return value_or_failure(kvx_sequence_recorded(handle_, sequence, tokens.data(), count, &count),
                            [&] { return std::move(tokens); });
  }
  // Stored rows of tokens [first_token, first_token + num_tokens); k or v null: not wanted.
  Status gather(int32_t sequence, uint32_t layer, int64_t first_token, int64_t num_tokens,
                const kvx_rows_t* k, const kvx_rows_t* v) const {
    return to_status(kvx_sequence_gather(handle_, sequence, layer, first_token, num_tokens, k, v));
  }
  Result<int64_t> num_tokens(int32_t sequence) const {
    int64_t count = 0;
    return value_or_failure(kvx_sequence_tokens(handle_, sequence, &count, nullptr),
                            [&] { return count; });
  }
  Status free_sequence(int32_t sequence) { return to_status(kvx_sequence_free(handle_, sequence)); }

  // ---- steps

  // One number of tokens for each sequence.
  Status begin_step(std::span<const int32_t> sequences, std::span<const int32_t> num_tokens) {
    if (sequences.size() != num_tokens.size()) {
      return Failure{KVX_STATUS_INVALID_ARGUMENT, "a step has as many sequences as token counts"};
    }
    return to_status(kvx_step_begin(handle_, static_cast<uint32_t>(sequences.size()),
                                    sequences.data(), num_tokens.data()));
  }
  // Where is_speculative is not 0, the sequence's tokens may go again.
  Status begin_step(std::span<const int32_t> sequences, std::span<const int32_t> num_tokens,
                    std::span<const uint8_t> is_speculative) {
    if (sequences.size() != num_tokens.size() || sequences.size() != is_speculative.size()) {
      return Failure{KVX_STATUS_INVALID_ARGUMENT,
                     "a step has as many sequences as token counts and speculative marks"};
    }
    return to_status(kvx_step_begin_with(handle_, static_cast<uint32_t>(sequences.size()),
                                         sequences.data(), num_tokens.data(),
                                         is_speculative.data()));
  }
  Status step_layer(const kvx_step_layer_args_t& args) {
    return to_status(kvx_step_layer(handle_, &args));
  }
  Status end_step() { return to_status(kvx_step_end(handle_)); }
  // Of each sequence's tokens the first kept_tokens stay.
  Status end_step(std::span<const int32_t> kept_tokens) {
    return to_status(
        kvx_step_end_kept(handle_, static_cast<uint32_t>(kept_tokens.size()), kept_tokens.data()));
  }
  Status cancel_step() { return to_status(kvx_step_cancel(handle_)); }
  // On a GPU: until the steps' work is done.
  Status synchronize() { return to_status(kvx_cache_synchronize(handle_)); }

  // ---- cached blocks and files

  Result<int64_t> evict(int64_t num_blocks) {
    int64_t num_evicted = 0;
    return value_or_failure(kvx_cache_evict(handle_, num_blocks, &num_evicted),
                            [&] { return num_evicted; });
  }
  Status clear_prefixes() { return to_status(kvx_cache_clear_prefixes(handle_)); }
  Status save_sequence(int32_t sequence, const std::string& path,
                       const kvx_save_options_t* options = nullptr) {
    return to_status(kvx_sequence_save(handle_, sequence, path.c_str(), options));
  }
  Result<int32_t> load_sequence(const std::string& path,
                                const kvx_load_options_t* options = nullptr) {
    int32_t sequence = 0;
    return value_or_failure(kvx_sequence_load(handle_, path.c_str(), options, &sequence),
                            [&] { return sequence; });
  }
  Status save_prefixes(const std::string& path, const kvx_save_options_t* options = nullptr) {
    return to_status(kvx_cache_save_prefixes(handle_, path.c_str(), options));
  }
  Result<kvx_load_report_t> load_prefixes(const std::string& path,
                                          const kvx_load_options_t* options = nullptr) {
    auto report = sized<kvx_load_report_t>();
    return value_or_failure(kvx_cache_load_prefixes(handle_, path.c_str(), options, &report),
                            [&] { return report; });
  }

  // ---- the host tier

  // A handle for the next two; the blocks stay in the pool until end_prefetch.
  Result<uint64_t> prefetch(std::span<const int32_t> tokens,
                            const kvx_prefix_keys_t* keys = nullptr) {
    uint64_t handle = 0;
    return value_or_failure(kvx_cache_prefetch(handle_, keys, tokens.data(),
                                               static_cast<int64_t>(tokens.size()), &handle),
                            [&] { return handle; });
  }
  Result<bool> is_prefetch_done(uint64_t prefetch) const {
    uint32_t is_done = 0;
    return value_or_failure(kvx_prefetch_is_done(handle_, prefetch, &is_done),
                            [&] { return is_done != 0; });
  }
  Status end_prefetch(uint64_t prefetch) { return to_status(kvx_prefetch_end(handle_, prefetch)); }
  Status wait_for_tiers() { return to_status(kvx_cache_wait_for_tiers(handle_)); }

  // ---- facts and events

  // What files must agree in.
  Result<std::string> fingerprint() const {
    return text_of([&](char* text, uint64_t capacity, uint64_t* bytes) {
      return kvx_cache_fingerprint(handle_, text, capacity, bytes);
    });
  }
  // Null: nobody listens any more.
  Status set_listener(const kvx_cache_listener_t* listener) {
    return to_status(kvx_cache_set_listener(handle_, listener));
  }
  Result<kvx_cache_snapshot_t> snapshot() const {
    auto seen = sized<kvx_cache_snapshot_t>();
    return value_or_failure(kvx_cache_snapshot(handle_, &seen), [&] { return seen; });
  }
  Result<kvx_block_class_t> block_class(uint32_t index) const {
    auto facts = sized<kvx_block_class_t>();
    return value_or_failure(kvx_cache_block_class(handle_, index, &facts), [&] { return facts; });
  }

  kvx_cache_t handle() const { return handle_; }

 private:
  explicit Cache(kvx_cache_t handle) : handle_(handle) {}
  kvx_cache_t handle_;
};

}  // namespace kvx::api
