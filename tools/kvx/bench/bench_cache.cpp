// BenchCache calls the public verbs as an engine would: slots and block tables in, floats out.
#include "tools/kvx/bench/bench_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "core/checked.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/gather/gather.hpp"
#include "ops/side_rows.hpp"

namespace kvx::tool {
namespace {

constexpr int kStepTokens = 512;
constexpr int64_t kMaxTokens = int64_t{1} << 30;

Status check_shape(const BenchShape& shape) {
  if (shape.num_q_heads % shape.num_kv_heads != 0) {
    return invalid_argument("q-heads is {}; expected a multiple of heads, {}", shape.num_q_heads,
                            shape.num_kv_heads);
  }
  if (shape.prefill_tokens > shape.length) {
    return invalid_argument("prefill is {}; expected at most the length, {}", shape.prefill_tokens,
                            shape.length);
  }
  const int64_t num_tokens = int64_t{shape.num_sequences} * shape.length;
  if (num_tokens > kMaxTokens) {
    return invalid_argument("sequences x length is {}; expected at most {}", num_tokens,
                            kMaxTokens);
  }
  return {};
}

// One layer, one group.
struct BenchPlan {
  kv::CacheGeometry geometry;
  kv::LayerPlan layer;
  kv::GroupPlan group;
};

Result<BenchPlan> plan_cache(const BenchShape& shape, const kv::Recipe& recipe) {
  BenchPlan plan;
  plan.geometry = {.num_layers = 1,
                   .num_kv_heads = shape.num_kv_heads,
                   .k_head_dim = shape.head_dim,
                   .v_head_dim = shape.value_dim(),
                   .is_latent = shape.is_latent()};
  KVX_ASSIGN_OR_RETURN(std::vector<kv::LayerPlan> layers,
                       kv::plan_layers(plan.geometry, recipe, {}));
  KVX_ASSIGN_OR_RETURN(std::vector<kv::GroupPlan> groups,
                       kv::plan_groups(plan.geometry, layers, recipe, shape.block_size));
  plan.layer = std::move(layers.front());
  plan.group = std::move(groups.front());
  return plan;
}

}  // namespace

Status BenchCache::check(const BenchShape& shape, const kv::Recipe& recipe) {
  KVX_RETURN_IF_ERROR(check_shape(shape));
  KVX_RETURN_IF_ERROR(plan_cache(shape, recipe));
  return {};
}

Result<std::unique_ptr<BenchCache>> BenchCache::create(const BenchShape& shape,
                                                       const kv::Recipe& recipe,
                                                       const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_shape(shape));
  KVX_ASSIGN_OR_RETURN(BenchPlan plan, plan_cache(shape, recipe));
  std::unique_ptr<BenchCache> cache(new BenchCache(shape, context));
  cache->group_ = std::move(plan.group);
  const cache::BlockLayout& layout = cache->group_.packed;
  const int64_t num_blocks = shape.num_sequences * cache->blocks_per_sequence();
  KVX_ASSIGN_OR_RETURN(
      cache->memory_,
      cache::host_memory().allocate(num_blocks * layout.block_bytes, "the cache of kvx bench"));
  const kv::LayerMemory memory{cache->memory_.data(), num_blocks, &layout, 0};
  kv::LayerMemory full_precision;
  if (cache->has_full_precision_window()) {
    const int64_t num_full_precision =
        shape.num_sequences * cache->full_precision_blocks_per_sequence();
    const cache::BlockLayout& window_layout = cache->group_.full_precision;
    KVX_ASSIGN_OR_RETURN(
        cache->full_precision_memory_,
        cache::host_memory().allocate(num_full_precision * window_layout.block_bytes,
                                      "the full-precision window of kvx bench"));
    full_precision = {cache->full_precision_memory_.data(), num_full_precision, &window_layout, 0};
  }
  KVX_ASSIGN_OR_RETURN(cache->store_, kv::LayerStore::create(plan.geometry, 0, plan.layer,
                                                             recipe.full_precision_spec, {}, memory,
                                                             full_precision));
  cache->fill_inputs();
  cache->fill_block_table();
  if (cache->has_full_precision_window()) KVX_RETURN_IF_ERROR(cache->fill_full_precision_window());
  return cache;
}

int64_t BenchCache::full_precision_blocks_per_sequence() const {
  return cache::count_blocks(group_.full_precision_window, shape_.length, shape_.block_size)
      .full_precision;
}

// Every sequence's blocks of the window, one sequence after the other, filled once.
Status BenchCache::fill_full_precision_window() {
  const cache::FullPrecisionWindow& window = group_.full_precision_window;
  const int64_t tail = cache::first_recent_block_of(window, shape_.length, shape_.block_size);
  attend_ids_ = block_ids_;
  int32_t next = 0;
  for (int s = 0; s < shape_.num_sequences; ++s) {
    for (int64_t b = 0; b < blocks_per_sequence(); ++b) {
      if (b >= window.sink_blocks && b < tail) continue;
      attend_ids_[s * blocks_per_sequence() + b] = next++;
    }
  }
  const int64_t num_sinks = std::min(window.sink_blocks, blocks_per_sequence());
  num_sink_blocks_.assign(shape_.num_sequences, static_cast<int32_t>(num_sinks));
  first_recent_block_.assign(shape_.num_sequences, static_cast<int32_t>(tail));
  return append_rows(store_->full_precision(), int64_t{next} * shape_.block_size,
                     [](int64_t token) { return token; });
}

int64_t BenchCache::blocks_per_sequence() const {
  return ceil_div(shape_.length, shape_.block_size);
}

int64_t BenchCache::packed_bytes(int64_t num_tokens) const {
  const auto bytes_of = [](const cache::BlockLayout& layout, int64_t tokens) {
    return tokens * (layout.code_bytes() + layout.scale_bytes()) / layout.block_size;
  };
  if (!has_full_precision_window()) return bytes_of(group_.packed, num_tokens);
  const int64_t num_sequences = num_tokens / shape_.length;
  const int64_t in_window =
      num_sequences *
      std::min<int64_t>(shape_.length, full_precision_blocks_per_sequence() * shape_.block_size);
  return bytes_of(group_.full_precision, in_window) +
         bytes_of(group_.packed, num_tokens - in_window);
}

void BenchCache::fill_inputs() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& rows, int64_t num_rows) {
    rows.resize(num_rows * shape_.head_dim);
    for (float& x : rows) x = normal(random);
  };
  const int64_t num_queries = std::max(shape_.num_sequences, shape_.prefill_tokens);
  fill(rows_, int64_t{kStepTokens} * shape_.num_kv_heads);
  fill(queries_, num_queries * shape_.num_q_heads);
  out_.resize(num_queries * shape_.num_q_heads * shape_.value_dim());
  slots_.resize(kStepTokens);
  positions_.resize(kStepTokens);
  gathered_k_.resize(int64_t{shape_.length} * shape_.num_kv_heads * shape_.head_dim);
  gathered_v_.resize(int64_t{shape_.length} * shape_.num_kv_heads * shape_.value_dim());
}

// Neighbouring blocks of a sequence lie num_sequences blocks apart, as when sequences grow
// together.
void BenchCache::fill_block_table() {
  const int64_t per_sequence = blocks_per_sequence();
  block_ids_.resize(shape_.num_sequences * per_sequence);
  for (int s = 0; s < shape_.num_sequences; ++s) {
    for (int64_t b = 0; b < per_sequence; ++b) {
      block_ids_[s * per_sequence + b] = static_cast<int32_t>(b * shape_.num_sequences + s);
    }
  }
}

// Rows of tokens 0 to num_tokens - 1, each to the slot that slot_of(token) returns.
Status BenchCache::append_rows(const ops::LayerView& view, int64_t num_tokens,
                               const std::function<int64_t(int64_t)>& slot_of) {
  ops::AppendArgs args;
  args.cache = view;
  args.transform = store_->transform();
  args.k = dense_rows(static_cast<const float*>(rows_.data()), DType::kF32, shape_.num_kv_heads,
                      shape_.head_dim);
  if (!shape_.is_latent()) args.v = args.k;
  for (int64_t first = 0; first < num_tokens; first += kStepTokens) {
    const int64_t count = std::min<int64_t>(kStepTokens, num_tokens - first);
    for (int64_t t = 0; t < count; ++t) {
      positions_[t] = first + t;
      slots_[t] = slot_of(first + t);
    }
    args.slot_mapping = {slots_.data(), static_cast<size_t>(count)};
    args.positions = {positions_.data(), static_cast<size_t>(count)};
    KVX_RETURN_IF_ERROR(ops::append(context_, args));
  }
  return {};
}

Status BenchCache::append_all() {
  for (int s = 0; s < shape_.num_sequences; ++s) {
    const int32_t* ids = block_ids_.data() + s * blocks_per_sequence();
    const auto slot_of = [&](int64_t token) {
      return int64_t{ids[token / shape_.block_size]} * shape_.block_size +
             token % shape_.block_size;
    };
    KVX_RETURN_IF_ERROR(append_rows(store_->packed(), shape_.length, slot_of));
  }
  return {};
}

Status BenchCache::gather(int sequence) {
  const ops::GatherRange range{sequence, 0, shape_.length, 0};
  ops::GatherArgs args;
  args.cache = store_->packed();
  args.transform = store_->transform();
  args.block_table = {block_ids_.data(), blocks_per_sequence()};
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.num_sequences = shape_.num_sequences;
  args.ranges = {&range, 1};
  args.k = dense_rows(gathered_k_.data(), DType::kF32, shape_.num_kv_heads, shape_.head_dim);
  args.v = dense_rows(gathered_v_.data(), DType::kF32, shape_.num_kv_heads, shape_.value_dim());
  return ops::gather(context_, args);
}

Status BenchCache::attend(int first_sequence, int num_sequences, int queries_per_sequence) {
  std::vector<int32_t> lengths(num_sequences, shape_.length);
  std::vector<int32_t> q_starts = {0};
  for (int s = 0; s < num_sequences; ++s)
    q_starts.push_back(q_starts.back() + queries_per_sequence);
  ops::AttendArgs args;
  args.packed = store_->packed();
  args.transform = store_->transform();
  args.num_sequences = num_sequences;
  const std::vector<int32_t>& ids = has_full_precision_window() ? attend_ids_ : block_ids_;
  args.block_table = {ids.data() + first_sequence * blocks_per_sequence(), blocks_per_sequence()};
  if (has_full_precision_window()) {
    args.full_precision = store_->full_precision();
    args.num_sink_blocks = num_sink_blocks_.data();
    args.first_recent_block = first_recent_block_.data();
  }
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.seq_lens = lengths.data();
  args.q_starts = q_starts.data();
  args.num_q_heads = shape_.num_q_heads;
  args.q = dense_rows(static_cast<const float*>(queries_.data()), DType::kF32, shape_.num_q_heads,
                      shape_.head_dim);
  args.out = dense_rows(out_.data(), DType::kF32, shape_.num_q_heads, shape_.value_dim());
  args.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  if (shape_.is_fast) args.precision = ops::Precision::kFast;
  return ops::attend(context_, args);
}

namespace {

// A sum that depends on every word. It prefetches `next` while it reads, into the second cache as
// attend does: a head's next block would push this one out of the first.
uint64_t sum_of_words(const uint8_t* bytes, int64_t count, const uint8_t* next) {
  constexpr int64_t kLine = 64;
  uint64_t sum = 0;
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    __builtin_prefetch(next + i, 0, 2);
    uint64_t words[kLine / sizeof(uint64_t)];
    memcpy(words, bytes + i, kLine);
    for (const uint64_t word : words) sum += word;
  }
  for (; i < count; ++i) sum += bytes[i];
  return sum;
}

}  // namespace

Status BenchCache::read_blocks() {
  const ops::LayerView& layer = store_->packed();
  read_sums_.assign(int64_t{shape_.num_sequences} * shape_.num_kv_heads, 0);
  const auto read_head = [&](int task) {
    const int32_t* ids = block_ids_.data() + task / shape_.num_kv_heads * blocks_per_sequence();
    const int head = task % shape_.num_kv_heads;
    const ops::HeadRun& run = ops::run_of_head(layer, head);
    const ops::CodeAddress& codes = run.k.codes;  // a head's K and V are contiguous
    const auto head_of_block = [&](int64_t b) {
      return codes.at(ids[std::min(b, blocks_per_sequence() - 1)], 0, head - run.first_head);
    };
    uint64_t sum = 0;
    for (int64_t b = 0; b < blocks_per_sequence(); ++b) {
      sum += sum_of_words(head_of_block(b), codes.head_stride, head_of_block(b + 1));
    }
    read_sums_[task] = sum;
  };
  context_.executor->parallel_for(static_cast<int>(read_sums_.size()), read_head);
  return {};
}

Status BenchCache::attend_decode() {
  return attend(0, shape_.num_sequences, 1);
}

Status BenchCache::attend_prefill(int sequence) {
  return attend(sequence, 1, shape_.prefill_tokens);
}

}  // namespace kvx::tool
