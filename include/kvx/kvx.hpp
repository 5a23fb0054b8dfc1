// kvx.hpp: the C++ face of the C ABI, header only. Errors come as Result, handles free themselves,
// and the structs of kvx_abi.h are filled from values. It needs C++17; from C++20 on spans are
// std::span.
//
//   Rows, indices      rows(), Indices, packed_table(), ragged_table(), seq_lens()
//   An engine's pages  Format, Side, Pages, Layer;  append, gather, attend, copy_blocks, transcode
//   The same on a GPU  PreparedLayer, with less work of the host;  attend_workspace_up_to
//   A cache of kvx     Recipe, CacheConfig, Cache, Sequence, Step
//   A tuned recipe     Tables: of a file, of bytes, or of an engine's own tables
//   Threads, words     Executor, Log, features(), version(), format_info()
//   A store of your own is in kvx/store.hpp.
//
// Everything is declared in kvx::api, and kvx::Cache names it too. Programs that see another
// namespace kvx define KVX_NO_SHORT_NAMESPACE and write kvx::api::Cache.
#pragma once

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) < 201703L
#error \
    "kvx/kvx.hpp needs C++17 or later (-std=c++17); kvx/kvx_abi.h is the header for C and for C++11"
#endif

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) >= 202002L
#include <span>
#endif

#include "kvx/kvx_abi.h"

namespace kvx::api {

// ---- results

// Why a call failed: the text is kvx_last_error()'s.
struct Failure {
  kvx_status_t status;
  std::string text;
};

// What Result::value() throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const Failure& failure)
      : std::runtime_error(failure.text), status(failure.status) {}
  kvx_status_t status;
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

  // The value; throws Error where the call failed (without exceptions: prints it and aborts).
  T& value() & {
    check();
    return **this;
  }
  const T& value() const& {
    check();
    return **this;
  }
  T value() && {
    check();
    return std::move(**this);
  }
  T value_or(T other) const& { return ok() ? **this : std::move(other); }
  T value_or(T other) && { return ok() ? std::move(**this) : std::move(other); }

 private:
  void check() const {
    if (ok()) return;
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
    throw Error(failure());
#else
    std::fprintf(stderr, "kvx: %s\n", failure().text.c_str());
    std::abort();
#endif
  }

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

// A struct of zeros whose size field is set.
template <class Struct>
Struct sized() {
  Struct object{};
  object.size = sizeof object;
  return object;
}

// ---- arrays

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) >= 202002L
template <class T>
using Span = std::span<T>;
#else
// As much of C++20's std::span as this header needs.
template <class T>
class Span {
 public:
  Span() = default;
  Span(T* data, size_t size) : data_(data), size_(size) {}
  template <class Range, class = std::enable_if_t<std::is_convertible_v<
                             decltype(std::data(std::declval<Range&>())), T*>>>
  Span(Range&& range) : data_(std::data(range)), size_(std::size(range)) {}  // NOLINT: implicit
  T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};
#endif

// Block ids, slots or lengths of 32 or 64 bits, in the caller's memory (on a GPU: its address and
// count). They must outlive the call that they are handed to.
struct Indices {
  Indices() = default;
  Indices(const int32_t* numbers, size_t num_numbers)
      : data(numbers), count(num_numbers), dtype(KVX_DTYPE_S32) {}
  Indices(const int64_t* numbers, size_t num_numbers)
      : data(numbers), count(num_numbers), dtype(KVX_DTYPE_S64) {}
  // A vector, an array or a span.
  template <class Range, class = decltype(std::data(std::declval<const Range&>()))>
  Indices(const Range& range) : Indices(std::data(range), std::size(range)) {}  // NOLINT: implicit

  const void* data = nullptr;
  size_t count = 0;
  kvx_dtype_t dtype = KVX_DTYPE_S32;
};

// Dense floats [tokens, heads, head_dim]; only calls that say so write to them.
inline kvx_rows_t rows(const void* data, kvx_dtype_t dtype) {
  auto desc = sized<kvx_rows_t>();
  desc.dtype = static_cast<uint32_t>(dtype);
  desc.data = const_cast<void*>(data);
  return desc;
}
inline kvx_rows_t rows(const float* data) {
  return rows(data, KVX_DTYPE_F32);
}

// Block ids [sequences, blocks_per_sequence]; entries past a sequence's length may be anything.
inline kvx_block_table_t packed_table(const Indices& ids, uint32_t blocks_per_sequence) {
  auto table = sized<kvx_block_table_t>();
  table.format = KVX_BLOCK_TABLE_PACKED;
  table.index_dtype = ids.dtype;
  table.max_blocks_per_seq = blocks_per_sequence;
  table.seq_count =
      blocks_per_sequence == 0 ? 0 : static_cast<uint32_t>(ids.count / blocks_per_sequence);
  table.beam_width = 1;
  table.indices = ids.data;
  table.indices_count = static_cast<uint32_t>(ids.count);
  return table;
}

// Pages of sequence s: pages[starts[s]], ..., pages[starts[s + 1] - 1]. A GPU's kernels are shaped
// by max_pages_per_sequence; 0: all pages.
inline kvx_block_table_t ragged_table(const Indices& pages, const Indices& starts,
                                      uint32_t max_pages_per_sequence = 0) {
  auto table = sized<kvx_block_table_t>();
  table.format = KVX_BLOCK_TABLE_RAGGED;
  table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  table.index_dtype = pages.dtype;
  table.indptr_dtype = starts.dtype;
  const auto num_pages = static_cast<uint32_t>(pages.count == 0 ? 1 : pages.count);
  table.max_blocks_per_seq = max_pages_per_sequence == 0 ? num_pages : max_pages_per_sequence;
  table.seq_count = starts.count == 0 ? 0 : static_cast<uint32_t>(starts.count - 1);
  table.beam_width = 1;
  table.indices = pages.data;
  table.indices_count = static_cast<uint32_t>(pages.count);
  table.indptr = starts.data;
  table.indptr_count = static_cast<uint32_t>(starts.count);
  return table;
}

// Tokens of each sequence; a padding sequence has 0.
inline kvx_seq_lens_t seq_lens(const Indices& lengths) {
  auto desc = sized<kvx_seq_lens_t>();
  desc.dtype = lengths.dtype;
  desc.seq_count = static_cast<uint32_t>(lengths.count);
  desc.lengths = lengths.data;
  return desc;
}

// slot = block id * block_size + offset: for the calls of KVX v1, kvx_write_kv and kvx_gather_kv.
inline kvx_slot_mapping_t slot_mapping(const Indices& slots) {
  auto desc = sized<kvx_slot_mapping_t>();
  desc.dtype = slots.dtype;
  desc.token_count = static_cast<uint32_t>(slots.count);
  desc.invalid_slot = -1;
  desc.slots = slots.data;
  return desc;
}

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

// ---- the library

inline Result<kvx_version_t> version() {
  auto found = sized<kvx_version_t>();
  return value_or_failure(kvx_get_version(&found), [&] { return found; });
}

inline Result<kvx_features_t> features() {
  auto found = sized<kvx_features_t>();
  return value_or_failure(kvx_query_features(&found), [&] { return found; });
}

// The library's log lines go to write(level, text), level is KVX_LOG_*, until the Log ends. A
// process has one log: make one at a time. write must not call this library.
class Log {
 public:
  using Write = std::function<void(uint32_t level, const char* text)>;
  static Result<Log> create(Write write, uint32_t least_level = KVX_LOG_INFO) {
    Log log(std::make_unique<Write>(std::move(write)));
    auto hook = sized<kvx_log_t>();
    hook.least = least_level;
    hook.user = log.write_.get();
    hook.write = [](void* user, uint32_t level, const char* text) {
      (*static_cast<Write*>(user))(level, text);
    };
    return value_or_failure(kvx_set_log(&hook), [&] { return std::move(log); });
  }
  ~Log() {
    if (write_) kvx_set_log(nullptr);
  }
  Log(Log&&) noexcept = default;
  Log& operator=(Log&&) = delete;

 private:
  explicit Log(std::unique_ptr<Write> write) : write_(std::move(write)) {}
  std::unique_ptr<Write> write_;
};

// Threads for the verbs and for caches: a pool of the library's own, or a callable. It must outlive
// the calls and caches that it is handed to.
class Executor {
 public:
  using Task = std::function<void(uint32_t i)>;
  // Calls task(i) once for every i below num_tasks, in any threads, and returns when all have
  // returned.
  using ParallelFor = std::function<void(uint32_t num_tasks, const Task& task)>;

  // num_threads counts the calling thread; 0: one a core.
  static Result<Executor> thread_pool(uint32_t num_threads = 0) {
    auto state = std::make_unique<State>();
    const kvx_status_t status = kvx_thread_pool_create(num_threads, &state->hook);
    return value_or_failure(status, [&] { return Executor(std::move(state)); });
  }
  Executor(uint32_t num_threads, ParallelFor parallel_for) : state_(std::make_unique<State>()) {
    state_->parallel_for = std::move(parallel_for);
    state_->hook.num_threads = num_threads;
    state_->hook.user = &state_->parallel_for;
    state_->hook.parallel_for = [](void* user, uint32_t num_tasks, void (*task)(void*, uint32_t),
                                   void* context) {
      (*static_cast<ParallelFor*>(user))(num_tasks, [=](uint32_t i) { task(context, i); });
    };
  }
  const kvx_executor_t* get() const { return &state_->hook; }
  uint32_t num_threads() const { return state_->hook.num_threads; }

 private:
  struct State {
    State() = default;
    ~State() {
      if (!parallel_for) kvx_thread_pool_free(&hook);
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    kvx_executor_t hook = sized<kvx_executor_t>();
    ParallelFor parallel_for;  // empty: the pool is the library's
  };
  explicit Executor(std::unique_ptr<State> state) : state_(std::move(state)) {}
  std::unique_ptr<State> state_;
};

// ---- formats and layers of an engine's own pages

// How a row of K or V is stored; what is left out is the format's default.
struct Format {
  kvx_format_t format = KVX_FORMAT_INVALID;
  uint32_t group_size = 0;  // numbers that share a scale; KVX_GROUP_WHOLE_ROW
  kvx_scale_type_t scale_type = KVX_SCALE_TYPE_DEFAULT;
  kvx_scale_rule_t scale_rule = KVX_SCALE_RULE_DEFAULT;
  kvx_scale_source_t scale_source = KVX_SCALE_SOURCE_DEFAULT;
  kvx_scale_choice_t scale_choice = KVX_SCALE_CHOICE_DEFAULT;

  kvx_format_spec_t spec() const {
    auto spec = sized<kvx_format_spec_t>();
    spec.format = static_cast<uint32_t>(format);
    spec.group_size = group_size;
    spec.scale_type = static_cast<uint32_t>(scale_type);
    spec.scale_rule = static_cast<uint32_t>(scale_rule);
    spec.scale_source = static_cast<uint32_t>(scale_source);
    spec.scale_choice = static_cast<uint32_t>(scale_choice);
    return spec;
  }
};

inline Result<kvx_format_info_t> format_info(const Format& format, uint32_t head_dim) {
  const kvx_format_spec_t spec = format.spec();
  auto info = sized<kvx_format_info_t>();
  return value_or_failure(kvx_format_info(&spec, head_dim, &info), [&] { return info; });
}

// Where the rows of K or V of some heads lie. Strides are bytes; a row's codes are contiguous but
// for code_fragment_bytes.
struct Side {
  Format format;
  uint32_t head_dim = 0;
  void* codes = nullptr;  // of block 0, token 0, the first head
  int64_t code_block_stride = 0;
  int64_t code_token_stride = 0;
  int64_t code_head_stride = 0;
  void* scales = nullptr;  // likewise, of group 0
  int64_t scale_block_stride = 0;
  int64_t scale_token_stride = 0;
  int64_t scale_head_stride = 0;
  int64_t scale_group_stride = 0;
  const float* tensor_scales = nullptr;  // [heads]
  uint32_t flags = 0;                    // KVX_SIDE_*
  uint32_t code_fragment_bytes = 0;
  int64_t code_fragment_stride = 0;
  const float* feedback = nullptr;  // [heads, head_dim, head_dim], of K
};

// Heads that are stored alike; without v no V is stored.
struct HeadRun {
  uint32_t num_heads = 0;
  Side k;
  std::optional<Side> v;
  std::optional<Side> k_rest = {};  // the numbers of K's rows behind k's
};

struct LayerShape {
  int64_t num_blocks = 0;
  uint32_t block_size = 0;  // tokens
  uint32_t num_kv_heads = 0;
};

// Opaque pages, [num_blocks, num_kv_heads, block_size * bytes_per_token] bytes: an engine allocates
// them, zeroed, and the library chooses the order inside a page.
struct Pages {
  uint32_t block_size = 0;  // tokens, a multiple of 4
  uint32_t head_dim = 0;
  Format k;
  Format v;
  std::optional<uint32_t> v_head_dim = std::nullopt;  // empty: as head_dim; 0: no V is stored
};

namespace detail {

// A C struct of pages and the specs that it points to.
struct PageDesc {
  explicit PageDesc(const Pages& pages) : k_spec(pages.k.spec()), v_spec(pages.v.spec()) {
    page.block_size = pages.block_size;
    page.k_head_dim = pages.head_dim;
    page.v_head_dim = pages.v_head_dim.value_or(pages.head_dim);
    page.k_spec = &k_spec;
    page.v_spec = &v_spec;
  }
  PageDesc(const PageDesc&) = delete;
  PageDesc& operator=(const PageDesc&) = delete;
  kvx_format_spec_t k_spec;
  kvx_format_spec_t v_spec;
  kvx_page_desc_t page = sized<kvx_page_desc_t>();
};

inline Side side_of(const kvx_side_t& described, const Format& format) {
  Side side;
  side.format = format;
  side.head_dim = described.head_dim;
  side.codes = described.codes;
  side.code_block_stride = described.code_block_stride;
  side.code_token_stride = described.code_token_stride;
  side.code_head_stride = described.code_head_stride;
  side.scales = described.scales;
  side.scale_block_stride = described.scale_block_stride;
  side.scale_token_stride = described.scale_token_stride;
  side.scale_head_stride = described.scale_head_stride;
  side.scale_group_stride = described.scale_group_stride;
  return side;
}

}  // namespace detail

// Bytes of one token of one KV head, K and V together.
inline Result<uint64_t> page_bytes_per_token(const Pages& pages) {
  const detail::PageDesc desc(pages);
  uint64_t bytes = 0;
  return value_or_failure(kvx_page_bytes_per_token(&desc.page, &bytes), [&] { return bytes; });
}

// Where K and V lie in pages that begin at `memory`.
inline Result<HeadRun> describe_pages(const Pages& pages, void* memory, uint32_t num_kv_heads) {
  const detail::PageDesc desc(pages);
  auto k = sized<kvx_side_t>(), v = sized<kvx_side_t>();
  const kvx_status_t status = kvx_describe_pages(&desc.page, memory, num_kv_heads, &k, &v);
  return value_or_failure(status, [&] {
    HeadRun run;
    run.num_heads = num_kv_heads;
    run.k = detail::side_of(k, pages.k);
    if (desc.page.v_head_dim != 0) run.v = detail::side_of(v, pages.v);
    return run;
  });
}

// A layer in the caller's memory. It is checked by each call that it is handed to.
class Layer {
 public:
  // K and V of F16, BF16 or F32 as KVX v1 describes them.
  explicit Layer(const kvx_cache_desc_t& cache) : parts_(std::make_unique<Parts>()) {
    parts_->cache = cache;
    parts_->layer.cache = &parts_->cache;
  }
  // Runs of heads, in head order.
  Layer(const LayerShape& shape, std::vector<HeadRun> runs) : parts_(std::make_unique<Parts>()) {
    parts_->keep(runs);
    parts_->layer.num_blocks = shape.num_blocks;
    parts_->layer.block_size = shape.block_size;
    parts_->layer.num_kv_heads = shape.num_kv_heads;
  }
  // All heads stored alike.
  Layer(const LayerShape& shape, const Side& k, const std::optional<Side>& v)
      : Layer(shape, std::vector<HeadRun>{HeadRun{shape.num_kv_heads, k, v}}) {}
  static Result<Layer> of_pages(const Pages& pages, void* memory, int64_t num_blocks,
                                uint32_t num_kv_heads) {
    auto run = describe_pages(pages, memory, num_kv_heads);
    if (!run) return run.failure();
    return Layer(LayerShape{num_blocks, pages.block_size, num_kv_heads}, {*run});
  }

  // Where the layer lies, with everything that a call names by address: KVX_MEMORY_DEVICE, say.
  // counters: [2] in that memory, or null (kvx_layer_t).
  Layer& set_memory(kvx_memory_type_t memory, uint64_t* counters = nullptr) {
    parts_->layer.memory = static_cast<uint32_t>(memory);
    parts_->layer.counters = counters;
    return *this;
  }
  // Kept by pointer; null: none.
  Layer& set_transforms(const kvx_transform_t* k, const kvx_transform_t* v) {
    parts_->layer.k_transform = k;
    parts_->layer.v_transform = v;
    return *this;
  }
  const kvx_layer_t* get() const { return &parts_->layer; }

 private:
  struct Parts {
    // A run's structs, which point to each other.
    struct Run {
      kvx_format_spec_t k_spec{}, v_spec{}, k_rest_spec{};
      kvx_side_t k{}, v{}, k_rest{};
      kvx_head_run_t run{};
    };
    void keep(const std::vector<HeadRun>& given) {
      for (const HeadRun& source : given) {
        auto kept = std::make_unique<Run>();
        kept->run = sized<kvx_head_run_t>();
        kept->run.num_heads = source.num_heads;
        kept->run.k = keep(source.k, kept->k_spec, kept->k);
        if (source.v) kept->run.v = keep(*source.v, kept->v_spec, kept->v);
        if (source.k_rest) {
          kept->run.k_rest = keep(*source.k_rest, kept->k_rest_spec, kept->k_rest);
        }
        pointers.push_back(&kept->run);
        runs.push_back(std::move(kept));
      }
      layer.num_runs = static_cast<uint32_t>(pointers.size());
      layer.runs = pointers.data();
    }
    static const kvx_side_t* keep(const Side& side, kvx_format_spec_t& spec, kvx_side_t& kept) {
      kept = sized<kvx_side_t>();
      kept.head_dim = side.head_dim;
      kept.flags = side.flags;
      if ((side.flags & KVX_SIDE_PREFIX_OF_K) != 0) return &kept;  // nothing else may be set
      spec = side.format.spec();
      kept.spec = &spec;
      kept.codes = side.codes;
      kept.code_block_stride = side.code_block_stride;
      kept.code_token_stride = side.code_token_stride;
      kept.code_head_stride = side.code_head_stride;
      kept.scales = side.scales;
      kept.scale_block_stride = side.scale_block_stride;
      kept.scale_token_stride = side.scale_token_stride;
      kept.scale_head_stride = side.scale_head_stride;
      kept.scale_group_stride = side.scale_group_stride;
      kept.tensor_scales = side.tensor_scales;
      kept.code_fragment_bytes = side.code_fragment_bytes;
      kept.code_fragment_stride = side.code_fragment_stride;
      kept.feedback = side.feedback;
      return &kept;
    }

    kvx_layer_t layer = sized<kvx_layer_t>();
    kvx_cache_desc_t cache{};
    std::vector<std::unique_ptr<Run>> runs;
    std::vector<const kvx_head_run_t*> pointers;
  };
  std::unique_ptr<Parts> parts_;
};

// ---- the verbs over a layer

// Rows to slots, transformed and quantised on the way.
struct AppendArgs {
  kvx_rows_t k{};  // [tokens, num_kv_heads, head_dim]
  kvx_rows_t v{};  // left out where no V is stored
  Indices slots;   // [tokens]: block id * block_size + offset; negative: not written
  const int64_t* positions = nullptr;      // [tokens]; with a block_offset only
  uint64_t* out_of_range_slots = nullptr;  // null: such a slot is an error
  uint64_t* nonfinite_inputs = nullptr;
  const Executor* executor = nullptr;  // null: the calling thread
};

// Stored rows to floats. Without ranges every sequence whole, one after the other.
struct GatherArgs {
  kvx_block_table_t block_table{};
  kvx_seq_lens_t seq_lens{};
  kvx_rows_t k{};  // left out: not wanted
  kvx_rows_t v{};
  uint32_t num_ranges = 0;  // of the arrays that follow; all four or none
  const int32_t* sequences = nullptr;
  const int64_t* first_tokens = nullptr;
  const int64_t* num_tokens = nullptr;
  const int64_t* first_rows = nullptr;
  int64_t num_rows = 0;  // of k and v; 0: what the ranges name is there
  const Executor* executor = nullptr;
};

// Attention straight from the stored bytes. kvx_attend_args_t says what each field means.
struct AttendArgs {
  uint32_t num_q_heads = 0;
  kvx_rows_t q{};    // [queries, num_q_heads, k head_dim]
  kvx_rows_t out{};  // [queries, num_q_heads, v head_dim]
  kvx_block_table_t block_table{};
  kvx_seq_lens_t seq_lens{};          // the queries' own tokens included
  const int32_t* q_starts = nullptr;  // [sequences + 1]; null: one query a sequence
  float* lse = nullptr;               // [queries, num_q_heads]
  float softmax_scale = 0;            // 0: 1 / sqrt(k head_dim)
  float softcap = 0;                  // 0: none
  uint32_t window = 0;                // 0: every token is seen
  const float* sinks = nullptr;       // [num_q_heads] logits
  const uint8_t* tree_mask = nullptr;
  int64_t tree_mask_stride = 0;
  const Layer* full_precision = nullptr;  // the full-precision window's blocks
  const int32_t* num_sink_blocks = nullptr;
  const int32_t* first_recent_blocks = nullptr;
  void* workspace = nullptr;  // on a GPU, attend_workspace() bytes
  uint64_t workspace_bytes = 0;
  int64_t num_queries = 0;  // these three on a GPU only; rows of q and out, padding included
  int64_t max_tokens = 0;
  uint32_t max_q_len = 0;
  kvx_precision_t precision = KVX_PRECISION_ACCURATE;
  const Executor* executor = nullptr;
  int64_t block_table_stride = 0;  // entries from row to row; 0: max_blocks_per_seq
  uint32_t num_decodes = 0;        // on a GPU: sequences in front with one query at most
};

namespace detail {

inline const kvx_rows_t* or_null(const kvx_rows_t& rows) {
  return rows.data == nullptr ? nullptr : &rows;
}
inline const kvx_executor_t* or_null(const Executor* executor) {
  return executor == nullptr ? nullptr : executor->get();
}

// These point into `args`, which must outlive them, and name no layer.
inline kvx_append_args_t c_args(const AppendArgs& args) {
  auto c = sized<kvx_append_args_t>();
  c.slot_dtype = static_cast<uint32_t>(args.slots.dtype);
  c.k = &args.k;
  c.v = or_null(args.v);
  c.num_tokens = static_cast<int64_t>(args.slots.count);
  c.slots = args.slots.data;
  c.positions = args.positions;
  c.out_of_range_slots = args.out_of_range_slots;
  c.nonfinite_inputs = args.nonfinite_inputs;
  c.executor = or_null(args.executor);
  return c;
}
inline kvx_attend_args_t c_args(const AttendArgs& args) {
  auto c = sized<kvx_attend_args_t>();
  c.num_q_heads = args.num_q_heads;
  c.block_table = &args.block_table;
  c.seq_lens = &args.seq_lens;
  c.q_starts = args.q_starts;
  c.q = &args.q;
  c.out = &args.out;
  c.lse = args.lse;
  c.softmax_scale = args.softmax_scale;
  c.softcap = args.softcap;
  c.window = args.window;
  c.sinks = args.sinks;
  c.tree_mask = args.tree_mask;
  c.tree_mask_stride = args.tree_mask_stride;
  c.num_sink_blocks = args.num_sink_blocks;
  c.first_recent_blocks = args.first_recent_blocks;
  c.workspace = args.workspace;
  c.workspace_bytes = args.workspace_bytes;
  c.executor = or_null(args.executor);
  c.num_queries = args.num_queries;
  c.max_tokens = args.max_tokens;
  c.max_q_len = args.max_q_len;
  c.precision = static_cast<uint32_t>(args.precision);
  c.block_table_stride = args.block_table_stride;
  c.num_decodes = args.num_decodes;
  return c;
}
inline kvx_attend_args_t c_args(const Layer& layer, const AttendArgs& args) {
  kvx_attend_args_t c = c_args(args);
  c.layer = layer.get();
  c.full_precision = args.full_precision == nullptr ? nullptr : args.full_precision->get();
  return c;
}

}  // namespace detail

// On a GPU `stream` is a cudaStream_t, and the calls are launches.
inline Status append(const Layer& layer, const AppendArgs& args, void* stream = nullptr) {
  kvx_append_args_t c = detail::c_args(args);
  c.layer = layer.get();
  return to_status(kvx_append(&c, stream));
}

inline Status gather(const Layer& layer, const GatherArgs& args, void* stream = nullptr) {
  auto c = sized<kvx_gather_args_t>();
  c.num_ranges = args.sequences == nullptr ? args.block_table.seq_count : args.num_ranges;
  c.layer = layer.get();
  c.block_table = &args.block_table;
  c.seq_lens = &args.seq_lens;
  c.sequences = args.sequences;
  c.first_tokens = args.first_tokens;
  c.num_tokens = args.num_tokens;
  c.first_rows = args.first_rows;
  c.k = detail::or_null(args.k);
  c.v = detail::or_null(args.v);
  c.executor = detail::or_null(args.executor);
  c.num_rows = args.num_rows;
  return to_status(kvx_gather(&c, stream));
}

inline Status attend(const Layer& layer, const AttendArgs& args, void* stream = nullptr) {
  const kvx_attend_args_t c = detail::c_args(layer, args);
  return to_status(kvx_attend(&c, stream));
}
// Bytes of workspace that attend needs for these arguments; 0 on the CPU.
inline Result<uint64_t> attend_workspace(const Layer& layer, const AttendArgs& args) {
  const kvx_attend_args_t c = detail::c_args(layer, args);
  uint64_t bytes = 0;
  return value_or_failure(kvx_attend_workspace(&c, &bytes), [&] { return bytes; });
}
// Bytes that are enough for every call of attend with this layer within the bounds; 0 on the CPU.
// args: as attend's, of which the arrays of a batch are not read.
struct AttendBounds {
  uint32_t max_sequences = 1;
  int64_t max_queries = 1;
  int64_t max_tokens = 1;  // of a sequence
  uint32_t max_q_len = 1;
};
inline Result<uint64_t> attend_workspace_up_to(const Layer& layer, const AttendArgs& args,
                                               const AttendBounds& bounds) {
  const kvx_attend_args_t c = detail::c_args(layer, args);
  auto most = sized<kvx_attend_bounds_t>();
  most.max_sequences = bounds.max_sequences;
  most.max_queries = bounds.max_queries;
  most.max_tokens = bounds.max_tokens;
  most.max_q_len = bounds.max_q_len;
  uint64_t bytes = 0;
  return value_or_failure(kvx_attend_workspace_up_to(&c, &most, &bytes), [&] { return bytes; });
}

// A layer on a GPU that was checked once: its calls take a few microseconds of the host. What the
// layers name by address must stay while the handle lives; the Layer itself need not.
class PreparedLayer {
 public:
  // full_precision: the layer of the full-precision window, or null.
  static Result<PreparedLayer> make(const Layer& layer, const Layer* full_precision = nullptr) {
    kvx_prepared_layer_t handle = nullptr;
    const kvx_layer_t* second = full_precision == nullptr ? nullptr : full_precision->get();
    return value_or_failure(kvx_prepare_layer(layer.get(), second, &handle),
                            [&] { return PreparedLayer(handle); });
  }
  PreparedLayer(PreparedLayer&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  PreparedLayer& operator=(PreparedLayer&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~PreparedLayer() { kvx_prepared_layer_free(handle_); }

  // As the functions of the same names. The arrays' memory is not checked.
  Status append(const AppendArgs& args, void* stream = nullptr) const {
    const kvx_append_args_t c = detail::c_args(args);
    return to_status(kvx_prepared_append(handle_, &c, stream));
  }
  // args.full_precision is null: the handle has it.
  Status attend(const AttendArgs& args, void* stream = nullptr) const {
    kvx_attend_args_t c = detail::c_args(args);
    if (args.full_precision != nullptr) c.full_precision = args.full_precision->get();
    return to_status(kvx_prepared_attend(handle_, &c, stream));
  }
  kvx_prepared_layer_t get() const { return handle_; }

 private:
  explicit PreparedLayer(kvx_prepared_layer_t handle) : handle_(handle) {}
  kvx_prepared_layer_t handle_;
};

// Whether attend is faster on this GPU with KVX_SIDE_INTERLEAVED_ORDER.
inline Result<bool> attend_prefers_interleaved_order(const Layer& layer) {
  uint32_t prefers = 0;
  return value_or_failure(kvx_attend_prefers_interleaved_order(layer.get(), &prefers),
                          [&] { return prefers != 0; });
}

// Whole blocks, from_blocks[i] to to_blocks[i].
inline Status copy_blocks(const Layer& from, const Layer& to, Span<const int64_t> from_blocks,
                          Span<const int64_t> to_blocks, const Executor* executor = nullptr,
                          void* stream = nullptr) {
  if (from_blocks.size() != to_blocks.size()) {
    return Failure{KVX_STATUS_INVALID_ARGUMENT, "copy_blocks has lists of two lengths"};
  }
  auto c = sized<kvx_copy_args_t>();
  c.num_copies = static_cast<uint32_t>(from_blocks.size());
  c.from = from.get();
  c.to = to.get();
  c.from_blocks = from_blocks.data();
  c.to_blocks = to_blocks.data();
  c.executor = detail::or_null(executor);
  return to_status(kvx_copy_blocks(&c, stream));
}

// Tokens from slots to slots, any format to any other.
inline Status transcode(const Layer& from, const Layer& to, const Indices& from_slots,
                        const Indices& to_slots, const Executor* executor = nullptr,
                        void* stream = nullptr) {
  if (from_slots.count != to_slots.count || from_slots.dtype != to_slots.dtype) {
    return Failure{KVX_STATUS_INVALID_ARGUMENT, "transcode has slot lists of two lengths or types"};
  }
  auto c = sized<kvx_transcode_args_t>();
  c.slot_dtype = static_cast<uint32_t>(from_slots.dtype);
  c.from = from.get();
  c.to = to.get();
  c.num_tokens = static_cast<int64_t>(from_slots.count);
  c.from_slots = from_slots.data;
  c.to_slots = to_slots.data;
  c.executor = detail::or_null(executor);
  return to_status(kvx_transcode(&c, stream));
}

// The same from the C structs.
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

// A full-precision window beside an engine's pages: copies of blocks in 16 bits in a second layer.
// kvx_window_t and kvx_window_plan_args_t say what the fields mean; this fills in the sizes and
// keeps the window's own numbers.
class Window {
 public:
  // window.state may be null until plan(): sizes() says how large it is.
  explicit Window(const kvx_window_t& window) : window_(window) { window_.size = sizeof window_; }

  Result<kvx_window_sizes_t> sizes() const {
    auto sizes = sized<kvx_window_sizes_t>();
    return value_or_failure(kvx_window_sizes(&window_, &sizes), [&] { return sizes; });
  }
  void set_state(void* state, uint64_t bytes) {
    window_.state = state;
    window_.state_bytes = bytes;
  }
  // args.window and args.size are set here.
  Status plan(kvx_window_plan_args_t args, void* stream = nullptr) const {
    args.size = sizeof args;
    args.window = &window_;
    return to_status(kvx_window_plan(&args, stream));
  }
  Status forget(Span<const int64_t> blocks, void* stream = nullptr) const {
    const auto num_blocks = static_cast<int64_t>(blocks.size());
    return to_status(kvx_window_forget(&window_, blocks.data(), num_blocks, stream));
  }

 private:
  kvx_window_t window_;
};

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
  if (const Status status = to_status(call(nullptr, uint64_t{0}, &bytes)); !status) {
    return status.failure();
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

// ---- caches that own their memory

// How a whole cache stores K and V: "int8", "int8/int4", "nvfp4:auto".
class Recipe {
 public:
  static Result<Recipe> parse(std::string text, uint32_t k_head_dim, uint32_t v_head_dim) {
    auto info = sized<kvx_recipe_info_t>();
    const kvx_status_t status = kvx_recipe_info(text.c_str(), k_head_dim, v_head_dim, &info);
    return value_or_failure(status, [&] { return Recipe(std::move(text), info); });
  }
  static Result<Recipe> parse(std::string text, uint32_t head_dim) {
    return parse(std::move(text), head_dim, head_dim);
  }
  const std::string& text() const { return text_; }
  const kvx_recipe_info_t& info() const { return info_; }
  bool has_window() const { return info_.window_format != 0; }
  // K and V of num_tokens tokens of one KV head in one layer. The full-precision window counts as
  // its sink_tokens and recent_tokens; a cache rounds both up to whole blocks and adds the open
  // one.
  uint64_t bytes(uint64_t num_tokens) const {
    const uint64_t most = uint64_t{info_.sink_tokens} + info_.recent_tokens;
    const uint64_t in_window = !has_window() ? 0 : num_tokens < most ? num_tokens : most;
    return in_window * info_.window_bytes_per_token +
           (num_tokens - in_window) * info_.bytes_per_token;
  }

 private:
  Recipe(std::string text, const kvx_recipe_info_t& info) : text_(std::move(text)), info_(info) {}
  std::string text_;
  kvx_recipe_info_t info_;
};

// kvx_cache_config_t and kvx_cache_options_t say what each field means.
// ---- tuned recipes

// A recipe with the tables that it was calibrated with. "tuned:FILE" as CacheConfig::recipe needs
// none; this is for engines that own layers, have a file's bytes, or make tables.
class Tables {
 public:
  static Result<Tables> load(const std::string& path) {
    kvx_tables_t handle = nullptr;
    return value_or_failure(kvx_tables_load(path.c_str(), &handle), [&] { return Tables(handle); });
  }
  static Result<Tables> load_bytes(Span<const uint8_t> bytes) {
    kvx_tables_t handle = nullptr;
    return value_or_failure(kvx_tables_load_bytes(bytes.data(), bytes.size(), &handle),
                            [&] { return Tables(handle); });
  }
  static Result<Tables> create(const kvx_tables_config_t& config) {
    kvx_tables_t handle = nullptr;
    return value_or_failure(kvx_tables_create(&config, &handle), [&] { return Tables(handle); });
  }
  Tables(Tables&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tables& operator=(Tables&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tables() { kvx_tables_free(handle_); }

  Status save(const std::string& path) const {
    return to_status(kvx_tables_save(handle_, path.c_str()));
  }
  Result<kvx_tables_info_t> info() const {
    auto info = sized<kvx_tables_info_t>();
    return value_or_failure(kvx_tables_info(handle_, &info), [&] { return info; });
  }
  // What they name lives as long as the tables.
  struct Transforms {
    kvx_transform_t k = sized<kvx_transform_t>();
    kvx_transform_t v = sized<kvx_transform_t>();
  };
  Result<Transforms> transforms(const kvx_tables_layer_args_t& args) const {
    Transforms filled;
    return value_or_failure(kvx_tables_layer(handle_, &args, &filled.k, &filled.v),
                            [&] { return filled; });
  }
  kvx_tables_t handle() const { return handle_; }

 private:
  explicit Tables(kvx_tables_t handle) : handle_(handle) {}
  kvx_tables_t handle_;
};

struct CacheConfig {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  std::string recipe;
  int64_t max_tokens_per_sequence = 0;
  uint32_t max_sequences = 1;
  uint32_t v_head_dim = 0;  // 0: as head_dim
  uint32_t block_size = 0;  // 0: 64 tokens
  int64_t memory_budget_bytes = 0;
  uint32_t num_threads = 0;
  const Executor* executor = nullptr;
  const kvx_allocator_t* allocator = nullptr;
  std::vector<int32_t> layer_windows;  // [num_layers], or empty
  std::vector<int32_t> layer_sinks;    // [num_layers], or empty
  uint32_t flags = 0;                  // KVX_CACHE_*
  std::string model;                   // what computes K and V
  kvx_prefix_hash_t prefix_hash = KVX_PREFIX_HASH_DEFAULT;
  kvx_eviction_t eviction = KVX_EVICTION_DEFAULT;
  int64_t host_tier_bytes = 0;
  std::string host_tier_folder;
  kvx_eviction_t host_tier_eviction = KVX_EVICTION_DEFAULT;
  std::string tiers;  // "host(8GiB), disk(/folder, 200GiB), store(NAME)"
  uint32_t max_speculative_tokens = 0;
  kvx_memory_type_t memory = KVX_MEMORY_HOST;
  uint32_t device = 0;  // these three with KVX_MEMORY_DEVICE
  uint32_t max_step_tokens = 0;
  void* stream = nullptr;
  std::vector<std::string> layer_overrides;  // "0,1=bf16"
  std::vector<std::string> head_overrides;   // layer:head, "2:0,2:1=int8"
  // A tuned recipe, which the cache copies; recipe is then empty, or "tuned,recent=128".
  const Tables* tables = nullptr;
};

// A sequence on offer to other processes (docs/transfer.md), until the object goes. It needs
// neither the sequence nor its cache, except for layers that are still to be computed.
class Export {
 public:
  // Offers a sequence all of whose tokens were recorded. endpoint: bound, tcp://ADDRESS:PORT (port
  // *: any) or ipc://PATH. Errors: kvx_sequence_export's.
  static Result<Export> create(kvx_cache_t cache, int32_t sequence, const std::string& endpoint) {
    kvx_export_t handle = nullptr;
    return value_or_failure(kvx_sequence_export(cache, sequence, endpoint.c_str(), &handle),
                            [&] { return Export(handle); });
  }
  // Offers it layer by layer, before the step that completes it. tokens: all that the sequence will
  // have after that step. Errors: kvx_sequence_export_layers'.
  static Result<Export> create_by_layer(kvx_cache_t cache, int32_t sequence,
                                        const std::string& endpoint, Span<const int32_t> tokens) {
    kvx_export_t handle = nullptr;
    return value_or_failure(
        kvx_sequence_export_layers(cache, sequence, tokens.data(),
                                   static_cast<int64_t>(tokens.size()), endpoint.c_str(), &handle),
        [&] { return Export(handle); });
  }
  ~Export() { kvx_export_free(handle_); }
  Export(Export&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Export& operator=(Export&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // The endpoint in it lives as long as the offer.
  Result<kvx_export_info_t> info() const {
    auto info = sized<kvx_export_info_t>();
    return value_or_failure(kvx_export_info(handle_, &info), [&] { return info; });
  }
  // Where the offer is bound, which importers are given.
  Result<std::string> endpoint() const {
    const Result<kvx_export_info_t> known = info();
    if (!known) return known.failure();
    return std::string(known->endpoint);
  }
  // Waits until an importer has taken it, at most so long; returns whether one has.
  Result<bool> wait(int64_t timeout_ms) const {
    uint32_t is_taken = 0;
    return value_or_failure(kvx_export_wait(handle_, timeout_ms, &is_taken),
                            [&] { return is_taken != 0; });
  }
  kvx_export_t handle() const { return handle_; }

 private:
  explicit Export(kvx_export_t handle) : handle_(handle) {}
  kvx_export_t handle_;
};

struct ImportOptions {
  int64_t timeout_ms = 0;      // how long without any progress; 0: 30,000
  bool may_transcode = false;  // whether blocks of another recipe are converted
  int32_t first_kv_head = 0;   // this cache's heads, of num_kv_heads at the exporter; 0, 0: all
  int32_t num_kv_heads = 0;
};

// A cache of all layers that owns its memory. Its sequences are numbers here; class Sequence owns
// one, class Step is an open step.
class Cache {
 public:
  static Result<Cache> create(const CacheConfig& given) {
    if ((!given.layer_windows.empty() && given.layer_windows.size() != given.num_layers) ||
        (!given.layer_sinks.empty() && given.layer_sinks.size() != given.num_layers)) {
      return Failure{KVX_STATUS_INVALID_ARGUMENT,
                     "layer_windows or layer_sinks have not num_layers numbers"};
    }
    auto config = sized<kvx_cache_config_t>();
    config.num_layers = given.num_layers;
    config.num_kv_heads = given.num_kv_heads;
    config.k_head_dim = given.head_dim;
    config.v_head_dim = given.v_head_dim == 0 ? given.head_dim : given.v_head_dim;
    config.block_size = given.block_size;
    config.max_sequences = given.max_sequences;
    config.num_threads = given.num_threads;
    config.max_tokens_per_sequence = given.max_tokens_per_sequence;
    config.memory_budget_bytes = given.memory_budget_bytes;
    const bool has_own_recipe = given.tables != nullptr && given.recipe.empty();
    config.recipe = has_own_recipe ? nullptr : given.recipe.c_str();
    config.layer_windows = given.layer_windows.empty() ? nullptr : given.layer_windows.data();
    config.executor = detail::or_null(given.executor);
    config.allocator = given.allocator;
    auto options = sized<kvx_cache_options_t>();
    options.flags = given.flags;
    options.prefix_hash = static_cast<uint32_t>(given.prefix_hash);
    options.eviction = static_cast<uint32_t>(given.eviction);
    options.model = given.model.c_str();
    options.layer_sinks = given.layer_sinks.empty() ? nullptr : given.layer_sinks.data();
    options.host_tier_bytes = given.host_tier_bytes;
    options.host_tier_eviction = static_cast<uint32_t>(given.host_tier_eviction);
    options.max_speculative_tokens = given.max_speculative_tokens;
    options.memory = static_cast<uint32_t>(given.memory);
    options.device = given.device;
    options.max_step_tokens = given.max_step_tokens;
    options.stream = given.stream;
    options.host_tier_folder =
        given.host_tier_folder.empty() ? nullptr : given.host_tier_folder.c_str();
    options.tiers = given.tiers.empty() ? nullptr : given.tiers.c_str();
    options.tables = given.tables == nullptr ? nullptr : given.tables->handle();
    const std::vector<const char*> layers = c_texts(given.layer_overrides);
    const std::vector<const char*> heads = c_texts(given.head_overrides);
    options.layer_overrides = layers.data();
    options.head_overrides = heads.data();
    options.num_layer_overrides = static_cast<uint32_t>(layers.size());
    options.num_head_overrides = static_cast<uint32_t>(heads.size());
    return create(config, &options);
  }
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
  Result<int32_t> create_sequence_from(Span<const int32_t> tokens,
                                       const kvx_prefix_keys_t* keys = nullptr) {
    int32_t sequence = 0;
    return value_or_failure(
        kvx_sequence_create_from(handle_, keys, tokens.data(), static_cast<int64_t>(tokens.size()),
                                 &sequence, nullptr),
        [&] { return sequence; });
  }
  // The same without waiting for blocks of host memory and disks: a layer of the first step waits
  // for its own part of them (kvx_sequence_create_loading).
  Result<int32_t> create_sequence_loading(Span<const int32_t> tokens,
                                          const kvx_prefix_keys_t* keys = nullptr) {
    int32_t sequence = 0;
    return value_or_failure(
        kvx_sequence_create_loading(handle_, keys, tokens.data(),
                                    static_cast<int64_t>(tokens.size()), &sequence, nullptr),
        [&] { return sequence; });
  }
  // Waits until layers [0, layer] are there.
  Status wait_for_layer(int32_t sequence, uint32_t layer) {
    return to_status(kvx_sequence_wait_for_layer(handle_, sequence, layer));
  }
  // Waits until all layers are there; returns how many tokens the sequence has then.
  Result<int64_t> end_loading(int32_t sequence) {
    int64_t num_tokens = 0;
    return value_or_failure(kvx_sequence_end_loading(handle_, sequence, &num_tokens),
                            [&] { return num_tokens; });
  }
  Result<int32_t> fork_sequence(int32_t sequence) {
    int32_t fork = 0;
    return value_or_failure(kvx_sequence_fork(handle_, sequence, &fork), [&] { return fork; });
  }
  Status truncate_sequence(int32_t sequence, int64_t num_tokens) {
    return to_status(kvx_sequence_truncate(handle_, sequence, num_tokens));
  }
  Status record_tokens(int32_t sequence, Span<const int32_t> tokens) {
    return to_status(
        kvx_sequence_record(handle_, sequence, tokens.data(), static_cast<int64_t>(tokens.size())));
  }
  Result<std::vector<int32_t>> recorded_tokens(int32_t sequence) const {
    int64_t count = 0;
    const Status status = to_status(kvx_sequence_recorded(handle_, sequence, nullptr, 0, &count));
    if (!status) return status.failure();
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
  // The most tokens that one step takes of this sequence.
  Result<int64_t> max_step_tokens(int32_t sequence) const {
    int64_t count = 0, most = 0;
    return value_or_failure(kvx_sequence_tokens(handle_, sequence, &count, &most),
                            [&] { return most; });
  }
  Status free_sequence(int32_t sequence) { return to_status(kvx_sequence_free(handle_, sequence)); }

  // ---- steps

  // One number of tokens for each sequence.
  Status begin_step(Span<const int32_t> sequences, Span<const int32_t> num_tokens) {
    if (sequences.size() != num_tokens.size()) {
      return Failure{KVX_STATUS_INVALID_ARGUMENT, "a step has as many sequences as token counts"};
    }
    return to_status(kvx_step_begin(handle_, static_cast<uint32_t>(sequences.size()),
                                    sequences.data(), num_tokens.data()));
  }
  // Where is_speculative is not 0, the sequence's tokens may go again.
  Status begin_step(Span<const int32_t> sequences, Span<const int32_t> num_tokens,
                    Span<const uint8_t> is_speculative) {
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
  Status end_step(Span<const int32_t> kept_tokens) {
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
  // How long the sequence's blocks stay after it.
  Status retain(int32_t sequence, Span<const kvx_retention_range_t> ranges) {
    return to_status(kvx_sequence_retain(handle_, sequence, ranges.data(),
                                         static_cast<uint32_t>(ranges.size())));
  }
  // How many blocks of tokens.
  Result<int64_t> end_session(const std::string& session) {
    int64_t num_blocks = 0;
    return value_or_failure(kvx_session_end(handle_, session.c_str(), &num_blocks),
                            [&] { return num_blocks; });
  }
  Result<int64_t> delete_session(const std::string& session) {
    int64_t num_blocks = 0;
    return value_or_failure(kvx_session_delete(handle_, session.c_str(), &num_blocks),
                            [&] { return num_blocks; });
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

  // ---- other processes

  Result<Export> export_sequence(int32_t sequence, const std::string& endpoint) const {
    return Export::create(handle_, sequence, endpoint);
  }
  Result<Export> export_layers(int32_t sequence, const std::string& endpoint,
                               Span<const int32_t> tokens) const {
    return Export::create_by_layer(handle_, sequence, endpoint, tokens);
  }
  // Creates a sequence as another process exported it, all or nothing. report: how it came; may be
  // null.
  Result<int32_t> import_sequence(const std::string& endpoint, const ImportOptions& given = {},
                                  kvx_import_report_t* report = nullptr) {
    auto options = sized<kvx_import_options_t>();
    options.flags = given.may_transcode ? KVX_LOAD_TRANSCODE : 0;
    options.endpoint = endpoint.c_str();
    options.timeout_ms = given.timeout_ms;
    options.first_kv_head = given.first_kv_head;
    options.num_kv_heads = given.num_kv_heads;
    if (report != nullptr) *report = sized<kvx_import_report_t>();
    int32_t sequence = 0;
    return value_or_failure(kvx_sequence_import(handle_, &options, &sequence, report),
                            [&] { return sequence; });
  }

  // ---- the tiers

  // A handle for the next two; the blocks stay in the pool until end_prefetch.
  Result<uint64_t> prefetch(Span<const int32_t> tokens, const kvx_prefix_keys_t* keys = nullptr) {
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
  // How many blocks of the pool and the tiers were erased; of a session those from the block with
  // first_token on.
  Result<int64_t> erase_tenant(const std::string& tenant) {
    int64_t num_erased = 0;
    return value_or_failure(kvx_cache_erase_tenant(handle_, tenant.c_str(), &num_erased),
                            [&] { return num_erased; });
  }
  Result<int64_t> erase_session(Span<const int32_t> tokens, int64_t first_token,
                                const kvx_prefix_keys_t* keys = nullptr) {
    int64_t num_erased = 0;
    return value_or_failure(
        kvx_cache_erase_session(handle_, keys, tokens.data(), static_cast<int64_t>(tokens.size()),
                                first_token, &num_erased),
        [&] { return num_erased; });
  }

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
  // Null: no events are sent any more.
  Status publish_events(const kvx_event_publisher_t* publisher) {
    return to_status(kvx_cache_publish_events(handle_, publisher));
  }
  // The label of its metrics (kvx_metrics_serve).
  Status set_name(const std::string& name) {
    return to_status(kvx_cache_set_name(handle_, name.c_str()));
  }
  Result<kvx_event_publisher_info_t> event_publisher() const {
    auto info = sized<kvx_event_publisher_info_t>();
    return value_or_failure(kvx_cache_event_publisher(handle_, &info), [&] { return info; });
  }
  Result<kvx_cache_snapshot_t> snapshot() const {
    auto seen = sized<kvx_cache_snapshot_t>();
    return value_or_failure(kvx_cache_snapshot(handle_, &seen), [&] { return seen; });
  }
  // What one KV head of one layer could not store as it came.
  Result<kvx_head_counts_t> head_counts(uint32_t layer, uint32_t kv_head) const {
    auto counts = sized<kvx_head_counts_t>();
    return value_or_failure(kvx_cache_head_counts(handle_, layer, kv_head, &counts),
                            [&] { return counts; });
  }
  Result<kvx_cache_tier_facts_t> tier_facts(uint32_t index) const {
    auto facts = sized<kvx_cache_tier_facts_t>();
    return value_or_failure(kvx_cache_tier_facts(handle_, index, &facts), [&] { return facts; });
  }
  Result<kvx_block_class_t> block_class(uint32_t index) const {
    auto facts = sized<kvx_block_class_t>();
    return value_or_failure(kvx_cache_block_class(handle_, index, &facts), [&] { return facts; });
  }

  kvx_cache_t handle() const { return handle_; }

 private:
  explicit Cache(kvx_cache_t handle) : handle_(handle) {}

  static std::vector<const char*> c_texts(const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    return pointers;
  }

  kvx_cache_t handle_;
};

// A sequence of a Cache, freed with the object. A cache that ends takes its sequences along: what
// is called on them then fails.
class Sequence {
 public:
  static Result<Sequence> create(Cache& cache) {
    return own(cache.handle(), cache.create_sequence());
  }
  // Begins with the longest cached prefix of tokens; num_tokens() returns its length.
  static Result<Sequence> create_from(Cache& cache, Span<const int32_t> tokens,
                                      const kvx_prefix_keys_t* keys = nullptr) {
    return own(cache.handle(), cache.create_sequence_from(tokens, keys));
  }
  // The same without waiting for blocks of host memory and disks: a layer of the first step waits
  // for its own part of them.
  static Result<Sequence> create_loading(Cache& cache, Span<const int32_t> tokens,
                                         const kvx_prefix_keys_t* keys = nullptr) {
    return own(cache.handle(), cache.create_sequence_loading(tokens, keys));
  }
  static Result<Sequence> load(Cache& cache, const std::string& path,
                               const kvx_load_options_t* options = nullptr) {
    return own(cache.handle(), cache.load_sequence(path, options));
  }
  ~Sequence() {
    if (cache_ != nullptr) kvx_sequence_free(cache_, number_);
  }
  Sequence(Sequence&& other) noexcept
      : cache_(std::exchange(other.cache_, nullptr)), number_(other.number_) {}
  Sequence& operator=(Sequence&& other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(number_, other.number_);
    return *this;
  }

  // Creates a sequence as another process exported it. report: how it came; may be null.
  static Result<Sequence> import_from(Cache& cache, const std::string& endpoint,
                                      const ImportOptions& options = {},
                                      kvx_import_report_t* report = nullptr) {
    return own(cache.handle(), cache.import_sequence(endpoint, options, report));
  }

  int32_t number() const { return number_; }
  // The number, which the caller frees from now on.
  int32_t release() {
    cache_ = nullptr;
    return number_;
  }
  // A sequence with the same tokens in the same blocks; whoever writes first copies the open block.
  Result<Sequence> fork() const {
    int32_t fork = 0;
    const kvx_status_t status = kvx_sequence_fork(cache_, number_, &fork);
    return value_or_failure(status, [&] { return Sequence(cache_, fork); });
  }
  // Forgets the tokens from num_tokens on.
  Status truncate(int64_t num_tokens) {
    return to_status(kvx_sequence_truncate(cache_, number_, num_tokens));
  }
  Result<int64_t> num_tokens() const {
    int64_t count = 0;
    const kvx_status_t status = kvx_sequence_tokens(cache_, number_, &count, nullptr);
    return value_or_failure(status, [&] { return count; });
  }
  // The most tokens that one step takes of this sequence.
  Result<int64_t> max_step_tokens() const {
    int64_t count = 0, most = 0;
    const kvx_status_t status = kvx_sequence_tokens(cache_, number_, &count, &most);
    return value_or_failure(status, [&] { return most; });
  }
  // Waits until layers [0, layer] of a sequence that loads are there.
  Status wait_for_layer(uint32_t layer) const {
    return to_status(kvx_sequence_wait_for_layer(cache_, number_, layer));
  }
  // Waits until all layers are there; returns how many tokens it has then.
  Result<int64_t> end_loading() {
    int64_t count = 0;
    return value_or_failure(kvx_sequence_end_loading(cache_, number_, &count),
                            [&] { return count; });
  }
  // Offers it to other processes with all of its tokens; the sequence may end from then on.
  Result<Export> export_to(const std::string& endpoint) const {
    return Export::create(cache_, number_, endpoint);
  }
  // Offers it layer by layer, in the step that brings it to all of `tokens`, among which are those
  // that it has.
  Result<Export> export_layers_to(const std::string& endpoint, Span<const int32_t> tokens) const {
    return Export::create_by_layer(cache_, number_, endpoint, tokens);
  }
  // Which tokens the sequence holds next, after the steps that added them.
  Status record(Span<const int32_t> tokens) {
    return to_status(
        kvx_sequence_record(cache_, number_, tokens.data(), static_cast<int64_t>(tokens.size())));
  }
  Status save(const std::string& path, const kvx_save_options_t* options = nullptr) const {
    return to_status(kvx_sequence_save(cache_, number_, path.c_str(), options));
  }
  // Stored rows of tokens [first_token, first_token + num_tokens) of a layer, as floats.
  Status gather(uint32_t layer, int64_t first_token, int64_t num_tokens, const kvx_rows_t& k,
                const kvx_rows_t& v) const {
    return to_status(kvx_sequence_gather(cache_, number_, layer, first_token, num_tokens,
                                         detail::or_null(k), detail::or_null(v)));
  }

 private:
  Sequence(kvx_cache_t cache, int32_t number) : cache_(cache), number_(number) {}
  static Result<Sequence> own(kvx_cache_t cache, const Result<int32_t>& number) {
    if (!number) return number.failure();
    return Sequence(cache, *number);
  }
  kvx_cache_t cache_;
  int32_t number_;
};

// Tokens that a step adds to a sequence.
struct StepEntry {
  StepEntry(const Sequence& grown, int32_t tokens, bool speculative = false)
      : StepEntry(grown.number(), tokens, speculative) {}
  StepEntry(int32_t grown, int32_t tokens, bool speculative = false)
      : sequence(grown), num_tokens(tokens), is_speculative(speculative) {}
  int32_t sequence;
  int32_t num_tokens;
  bool is_speculative;
};

// The rows of one layer in a step: the entries' tokens, one entry after the other.
struct StepRows {
  uint32_t num_q_heads = 0;
  kvx_rows_t q{};    // [tokens, num_q_heads, k head_dim]
  kvx_rows_t k{};    // [tokens, num_kv_heads, k head_dim]
  kvx_rows_t v{};    // [tokens, num_kv_heads, v head_dim]
  kvx_rows_t out{};  // [tokens, num_q_heads, v head_dim]
  float softmax_scale = 0;
  float softcap = 0;
  const float* sinks = nullptr;
  kvx_precision_t precision = KVX_PRECISION_ACCURATE;
};

// An open step of a Cache, one at a time: append_and_attend once for every layer, then end(). A
// Step that goes without end() is cancelled, and its tokens with it.
class Step {
 public:
  static Result<Step> begin(Cache& cache, const std::vector<StepEntry>& entries) {
    std::vector<int32_t> sequences, num_tokens;
    std::vector<uint8_t> is_speculative;
    for (const StepEntry& entry : entries) {
      sequences.push_back(entry.sequence);
      num_tokens.push_back(entry.num_tokens);
      is_speculative.push_back(entry.is_speculative);
    }
    const Status status = cache.begin_step(sequences, num_tokens, is_speculative);
    if (!status) return status.failure();
    return Step(cache.handle());
  }
  ~Step() {
    if (cache_ != nullptr) kvx_step_cancel(cache_);
  }
  Step(Step&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)) {}
  Step& operator=(Step&& other) noexcept {
    std::swap(cache_, other.cache_);
    return *this;
  }

  Status append_and_attend(uint32_t layer, const StepRows& rows) {
    auto args = sized<kvx_step_layer_args_t>();
    args.layer = layer;
    args.num_q_heads = rows.num_q_heads;
    args.softmax_scale = rows.softmax_scale;
    args.softcap = rows.softcap;
    args.q = &rows.q;
    args.k = &rows.k;
    args.v = &rows.v;
    args.out = &rows.out;
    args.sinks = rows.sinks;
    args.precision = static_cast<uint32_t>(rows.precision);
    return to_status(kvx_step_layer(cache_, &args));
  }
  // After a failure the step is still open.
  Status end() { return closed(kvx_step_end(cache_)); }
  // Of entry i's tokens the first kept_tokens[i] stay.
  Status end(Span<const int32_t> kept_tokens) {
    return closed(
        kvx_step_end_kept(cache_, static_cast<uint32_t>(kept_tokens.size()), kept_tokens.data()));
  }
  Status cancel() { return closed(kvx_step_cancel(cache_)); }
  // The most tokens that one step takes of a sequence.
  static Result<int64_t> max_step_tokens(const Sequence& sequence) {
    return sequence.max_step_tokens();
  }

 private:
  explicit Step(kvx_cache_t cache) : cache_(cache) {}
  Status closed(kvx_status_t status) {
    if (status == KVX_STATUS_OK) cache_ = nullptr;
    return to_status(status);
  }
  kvx_cache_t cache_;
};

}  // namespace kvx::api

#ifndef KVX_NO_SHORT_NAMESPACE
namespace kvx {
using namespace api;  // NOLINT
}
#endif
