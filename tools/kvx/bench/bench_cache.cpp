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

Status check_shape(const BenchShape& shape, const kv::Recipe& recipe) {
  if (recipe.has_full_precision_window) {
    return invalid_argument("formats has '{}'; bench measures formats without sink and recent",
                            recipe.text);
  }
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
  plan.geometry = {1, shape.num_kv_heads, shape.head_dim, shape.head_dim, {}};
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
  KVX_RETURN_IF_ERROR(check_shape(shape, recipe));
  KVX_RETURN_IF_ERROR(plan_cache(shape, recipe));
  return {};
}

Result<std::unique_ptr<BenchCache>> BenchCache::create(const BenchShape& shape,
                                                       const kv::Recipe& recipe,
                                                       const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_shape(shape, recipe));
  KVX_ASSIGN_OR_RETURN(BenchPlan plan, plan_cache(shape, recipe));
  std::unique_ptr<BenchCache> cache(new BenchCache(shape, context));
  cache->group_ = std::move(plan.group);
  const cache::BlockLayout& layout = cache->group_.packed;
  const int64_t num_blocks = shape.num_sequences * cache->blocks_per_sequence();
  KVX_ASSIGN_OR_RETURN(
      cache->memory_,
      cache::host_memory().allocate(num_blocks * layout.block_bytes, "the cache of kvx bench"));
  const kv::LayerMemory memory{cache->memory_.data(), num_blocks, &layout, 0};
  KVX_ASSIGN_OR_RETURN(cache->store_,
                       kv::LayerStore::create(plan.geometry, 0, plan.layer,
                                              recipe.full_precision_spec, {}, memory, {}));
  cache->fill_inputs();
  cache->fill_block_table();
  return cache;
}

int64_t BenchCache::blocks_per_sequence() const {
  return ceil_div(shape_.length, shape_.block_size);
}

int64_t BenchCache::packed_bytes(int64_t num_tokens) const {
  const cache::BlockLayout& layout = group_.packed;
  return num_tokens * (layout.code_bytes() + layout.scale_bytes()) / layout.block_size;
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
  out_.resize(queries_.size());
  slots_.resize(kStepTokens);
  positions_.resize(kStepTokens);
  gathered_k_.resize(int64_t{shape_.length} * shape_.num_kv_heads * shape_.head_dim);
  gathered_v_.resize(gathered_k_.size());
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

Status BenchCache::append_all() {
  ops::AppendArgs args;
  args.cache = store_->packed();
  args.transform = store_->transform();
  args.k = dense_rows(static_cast<const float*>(rows_.data()), DType::kF32, shape_.num_kv_heads,
                      shape_.head_dim);
  args.v = args.k;
  for (int s = 0; s < shape_.num_sequences; ++s) {
    const int32_t* ids = block_ids_.data() + s * blocks_per_sequence();
    for (int first = 0; first < shape_.length; first += kStepTokens) {
      const int count = std::min(kStepTokens, shape_.length - first);
      for (int t = 0; t < count; ++t) {
        const int position = first + t;
        positions_[t] = position;
        slots_[t] = int64_t{ids[position / shape_.block_size]} * shape_.block_size +
                    position % shape_.block_size;
      }
      args.slot_mapping = {slots_.data(), static_cast<size_t>(count)};
      args.positions = {positions_.data(), static_cast<size_t>(count)};
      KVX_RETURN_IF_ERROR(ops::append(context_, args));
    }
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
  args.v = dense_rows(gathered_v_.data(), DType::kF32, shape_.num_kv_heads, shape_.head_dim);
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
  args.block_table = {block_ids_.data() + first_sequence * blocks_per_sequence(),
                      blocks_per_sequence()};
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.seq_lens = lengths.data();
  args.q_starts = q_starts.data();
  args.num_q_heads = shape_.num_q_heads;
  args.q = dense_rows(static_cast<const float*>(queries_.data()), DType::kF32, shape_.num_q_heads,
                      shape_.head_dim);
  args.out = dense_rows(out_.data(), DType::kF32, shape_.num_q_heads, shape_.head_dim);
  args.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  if (shape_.is_fast) args.precision = ops::Precision::kFast;
  return ops::attend(context_, args);
}

namespace {

// A sum that depends on every word; asks for `next` while it reads, in the second cache as attend
// does: a head's next block would push this one out of the first.
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
  const auto read_head = [&](int piece) {
    const int32_t* ids = block_ids_.data() + piece / shape_.num_kv_heads * blocks_per_sequence();
    const int head = piece % shape_.num_kv_heads;
    const ops::HeadRun& run = ops::run_of_head(layer, head);
    const ops::CodeAddress& codes = run.k.codes;  // a head's K and V are one contiguous piece
    const auto head_of_block = [&](int64_t b) {
      return codes.at(ids[std::min(b, blocks_per_sequence() - 1)], 0, head - run.first_head);
    };
    uint64_t sum = 0;
    for (int64_t b = 0; b < blocks_per_sequence(); ++b) {
      sum += sum_of_words(head_of_block(b), codes.head_stride, head_of_block(b + 1));
    }
    read_sums_[piece] = sum;
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
