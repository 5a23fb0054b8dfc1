// How the sets are made, and what a call of each verb is given.
#include "tools/kvx/bench/cuda_cache_sets.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "device/cuda_bandwidth.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "ops/transcode/transcode_cuda.hpp"
#include "ops/value_prefix.hpp"

namespace kvx::tool {
namespace {

constexpr int64_t kBytesOfSets = int64_t{1} << 30;  // walked over before a set comes again
constexpr int kMaxSets = 8;

}  // namespace

Status CudaCacheSets::prepare(const kv::Recipe& recipe) {
  KVX_ASSIGN_OR_RETURN(memory_, cache::cuda_memory(context_.device.index));
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  stream_.emplace(std::move(stream));
  context_.stream = stream_->get();
  const kv::CacheGeometry geometry = {.num_layers = 1,
                                      .num_kv_heads = shape_.num_kv_heads,
                                      .k_head_dim = dim_of(0),
                                      .v_head_dim = dim_of(1),
                                      .is_latent = shape_.is_latent()};
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerPlan> layers,
                       kv::plan_layers(geometry, recipe, {}));
  KVX_ASSIGN_OR_RETURN(std::vector<kv::GroupPlan> groups,
                       kv::plan_groups(geometry, layers, recipe, shape_.block_size));
  group_ = std::move(groups.front());
  num_sets_ =
      static_cast<int>(std::clamp<int64_t>(ceil_div(kBytesOfSets, set_bytes()), 2, kMaxSets));
  const int64_t num_blocks = num_sets_ * blocks_per_set();
  KVX_ASSIGN_OR_RETURN(
      blocks_, memory_->allocate(num_blocks * group_.packed.block_bytes, "the cache of kvx bench"));
  const kv::LayerMemory packed{blocks_.data(), num_blocks, &group_.packed, 0};
  kv::LayerMemory full_precision;
  if (has_full_precision_window()) {
    full_precision = {nullptr,
                      num_sets_ * shape_.num_sequences * full_precision_blocks_per_sequence(),
                      &group_.full_precision, 0};
    KVX_ASSIGN_OR_RETURN(
        full_precision_blocks_,
        memory_->allocate(full_precision.num_blocks * group_.full_precision.block_bytes,
                          "the full-precision window of kvx bench"));
    full_precision.base = full_precision_blocks_.data();
  }
  KVX_ASSIGN_OR_RETURN(
      store_, kv::LayerStore::create(geometry, 0, layers.front(), recipe.full_precision_spec, {},
                                     packed, full_precision));
  KVX_RETURN_IF_ERROR(move_tables_to_device());
  if (shape_.is_latent() && more_runs_.empty()) {  // rows in segments lie as a cache of kvx's own
    KVX_ASSIGN_OR_RETURN(
        blocks_, lay_out_latent_pages(*memory_, num_blocks, shape_.block_size, runs_.front()));
  } else if (!shape_.is_latent() && named_.pages != PageOrder::kPool) {
    KVX_ASSIGN_OR_RETURN(blocks_, lay_out_pages(*memory_, named_.pages, num_blocks,
                                                shape_.block_size, runs_.front()));
  }
  KVX_RETURN_IF_ERROR(make_tokens());
  make_lens();
  KVX_RETURN_IF_ERROR(make_queries());
  KVX_RETURN_IF_ERROR(fill());
  if (has_full_precision_window()) KVX_RETURN_IF_ERROR(make_full_precision_window());
  KVX_RETURN_IF_ERROR(make_feedback());
  return make_copies();
}

// Any weights take the same time.
Status CudaCacheSets::make_feedback() {
  const int dim = dim_of(0);
  std::vector<float> weights(static_cast<size_t>(shape_.num_kv_heads) * dim * dim);
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t from = i / dim % dim, to = i % dim;
    if (to > from) weights[i] = 0.1f / static_cast<float>(to - from);
  }
  KVX_ASSIGN_OR_RETURN(feedback_, DeviceArray::of(*memory_, weights));
  return {};
}

// The store's calibration lies in host memory: one number a head.
Status CudaCacheSets::move_tables_to_device() {
  runs_.assign(store_->packed().runs.begin(), store_->packed().runs.end());
  if (const ops::LayerView* more = store_->packed().next_segment) {
    more_runs_.assign(more->runs.begin(), more->runs.end());
    more_ = *more;
    more_.runs = more_runs_;
  }
  if (named_.pages == PageOrder::kPool && !shape_.is_latent()) {
    for (ops::HeadRun& run : runs_) {
      run.k.is_interleaved = run.v.is_interleaved =
          ops::attend_takes_interleaved_order(context_, run, shape_.block_size);
    }
  }
  for (ops::HeadRun& run : runs_) {
    KVX_RETURN_IF_ERROR(move_tables_to_device(run.k, run.num_heads));
    if (run.v.is_alias) {
      run.v = ops::prefix_of(run.k, run.v.head_dim);
    } else {
      KVX_RETURN_IF_ERROR(move_tables_to_device(run.v, run.num_heads));
    }
  }
  for (ops::HeadRun& run : more_runs_) {
    KVX_RETURN_IF_ERROR(move_tables_to_device(run.k, run.num_heads));
  }
  return {};
}

Status CudaCacheSets::move_tables_to_device(ops::SideView& side, int num_heads) {
  if (side.tensor_scales != nullptr) {
    const std::vector<float> host(side.tensor_scales, side.tensor_scales + num_heads);
    KVX_ASSIGN_OR_RETURN(DeviceArray array, DeviceArray::of(*memory_, host));
    side.tensor_scales = array.as<float>();
    tables_.push_back(std::move(array));
  }
  if (side.spec.scale_source != format::ScaleSource::kGiven) return {};
  const int64_t bytes = num_heads * std::max<int64_t>(side.scales.head_stride, 4);
  const std::vector<uint8_t> host(side.scales.base, side.scales.base + bytes);
  KVX_ASSIGN_OR_RETURN(DeviceArray array, DeviceArray::of(*memory_, host));
  side.scales.base = array.as<uint8_t>();
  tables_.push_back(std::move(array));
  return {};
}

// Blocks in random order and the rows that fill them.
Status CudaCacheSets::make_tokens() {
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
  KVX_ASSIGN_OR_RETURN(block_ids_, DeviceArray::of(*memory_, ids));
  std::vector<int64_t> slots(num_sets_ * tokens_of_set());
  for (int64_t t = 0; t < std::ssize(slots); ++t) {
    slots[t] = int64_t{ids[t / shape_.block_size]} * shape_.block_size + t % shape_.block_size;
  }
  KVX_ASSIGN_OR_RETURN(slots_, DeviceArray::of(*memory_, slots));
  KVX_ASSIGN_OR_RETURN(
      counters_, DeviceArray::of(*memory_, std::vector<uint8_t>(sizeof(ops::DeviceCounters))));
  static std::vector<uint16_t> side;  // the same for all measurements that have as many
  if (std::ssize(side) != side_bytes() / 2) side = random_bf16(side_bytes() / 2, 1);
  const int num_sides = 2 * num_sets_;
  KVX_ASSIGN_OR_RETURN(rows_, memory_->allocate(num_sides * side_bytes(), "rows of kvx bench"));
  KVX_ASSIGN_OR_RETURN(copied_, memory_->allocate(num_sides * side_bytes(), "rows of kvx bench"));
  for (int i = 0; i < num_sides; ++i) {
    KVX_RETURN_IF_ERROR(
        device::cuda_copy(rows_.data() + i * side_bytes(), side.data(), side_bytes()));
  }
  return {};
}

void CudaCacheSets::make_lens() {
  lens_.assign(shape_.num_sequences, shape_.length);
  if (!named_.is_mixed) return;
  constexpr double kShortest = 128;
  const double ratio = shape_.length / kShortest;
  for (int s = 0; s < shape_.num_sequences; ++s) {
    lens_[s] = static_cast<int32_t>(kShortest * std::pow(ratio, (s + 0.5) / shape_.num_sequences));
  }
  std::shuffle(lens_.begin(), lens_.end(), std::mt19937(5));
}

int64_t CudaCacheSets::attend_bytes() const {
  const auto bytes_of_block = [](const cache::BlockLayout& layout) {
    return layout.code_bytes() + layout.scale_bytes();
  };
  if (shape_.is_latent() && !has_full_precision_window()) {
    return tokens_seen() * (group_.packed.token_code_bytes + group_.packed.token_scale_bytes);
  }
  int64_t packed = 0, full_precision = 0;
  for (const int32_t len : lens_) {
    const int most_seen = named_.window + named_.window_sinks;
    const int64_t seen = named_.window > 0 ? std::min(most_seen, len) : len;
    const int64_t blocks = ceil_div<int64_t>(seen, shape_.block_size);
    const int64_t in_window =
        has_full_precision_window() ? std::min(blocks, full_precision_blocks_per_sequence()) : 0;
    packed += blocks - in_window;
    full_precision += in_window;
  }
  return packed * bytes_of_block(group_.packed) +
         full_precision * bytes_of_block(group_.full_precision);
}

// Blocks of the full-precision window in a pool of their own, in random order, filled by append.
Status CudaCacheSets::make_full_precision_window() {
  const int64_t num_full_precision =
      num_sets_ * shape_.num_sequences * full_precision_blocks_per_sequence();
  std::vector<int32_t> full_precision_ids(num_full_precision);
  std::iota(full_precision_ids.begin(), full_precision_ids.end(), 0);
  std::shuffle(full_precision_ids.begin(), full_precision_ids.end(), std::mt19937(9));
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  KVX_RETURN_IF_ERROR(device::cuda_copy(ids.data(), block_ids_.as<int32_t>(), std::ssize(ids) * 4));
  const cache::FullPrecisionWindow& ends = group_.full_precision_window;
  std::vector<int32_t> heads, tails;
  int64_t next = 0;
  for (int64_t i = 0; i < int64_t{num_sets_} * shape_.num_sequences; ++i) {
    const int64_t len = lens_[i % shape_.num_sequences];
    const int64_t blocks = ceil_div<int64_t>(len, shape_.block_size);
    const int64_t tail = cache::first_recent_block_of(ends, len, shape_.block_size);
    for (int64_t b = 0; b < blocks; ++b) {
      const bool is_full_precision = b < ends.sink_blocks || b >= tail;
      if (is_full_precision) ids[i * blocks_per_sequence() + b] = full_precision_ids[next++];
    }
    heads.push_back(static_cast<int32_t>(ends.sink_blocks));
    tails.push_back(static_cast<int32_t>(tail));
  }
  KVX_ASSIGN_OR_RETURN(attend_ids_, DeviceArray::of(*memory_, ids));
  KVX_ASSIGN_OR_RETURN(num_sink_blocks_, DeviceArray::of(*memory_, heads));
  KVX_ASSIGN_OR_RETURN(first_recent_block_, DeviceArray::of(*memory_, tails));
  std::vector<int64_t> slots(num_full_precision * shape_.block_size);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  KVX_ASSIGN_OR_RETURN(const DeviceArray full_precision_slots, DeviceArray::of(*memory_, slots));
  for (int64_t t = 0; t < std::ssize(slots); t += kTokens) {
    KVX_RETURN_IF_ERROR(append(store_->full_precision(), full_precision_slots.as<int64_t>() + t, 0,
                               std::min<int64_t>(kTokens, std::ssize(slots) - t)));
  }
  return device::cuda_synchronize(context_.stream);
}

Status CudaCacheSets::make_queries() {
  const int64_t total_q = int64_t{shape_.num_sequences} * named_.q_len;
  const int64_t rows = total_q * shape_.num_q_heads;
  KVX_ASSIGN_OR_RETURN(
      queries_, DeviceArray::of(*memory_, random_numbers(named_.query_type, rows * dim_of(0), 3)));
  KVX_ASSIGN_OR_RETURN(out_, DeviceArray::of(*memory_, std::vector<uint16_t>(rows * dim_of(1))));
  std::vector<int32_t> starts(shape_.num_sequences + 1);
  for (int s = 0; s <= shape_.num_sequences; ++s) starts[s] = s * named_.q_len;
  KVX_ASSIGN_OR_RETURN(seq_lens_, DeviceArray::of(*memory_, lens_));
  KVX_ASSIGN_OR_RETURN(q_starts_, DeviceArray::of(*memory_, starts));
  KVX_ASSIGN_OR_RETURN(sinks_,
                       DeviceArray::of(*memory_, std::vector<float>(shape_.num_q_heads, 0.5f)));
  limits_ = {named_.q_len, total_q, blocks_per_sequence() * shape_.block_size};
  const int64_t bytes = ops::attend_workspace_bytes(context_, attend_args(0), limits_, path());
  if (bytes == 0) return {};
  KVX_ASSIGN_OR_RETURN(workspace_, memory_->allocate(bytes, "attend's workspace"));
  return {};
}

Status CudaCacheSets::make_copies() {
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  KVX_RETURN_IF_ERROR(device::cuda_copy(ids.data(), block_ids_.as<int32_t>(), std::ssize(ids) * 4));
  const int64_t num_blocks = tokens_at_once() / shape_.block_size;
  std::vector<ops::BlockCopy> copies, packs;
  for (int set = 0; set < num_sets_; ++set) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t to = ids[(set + 1) % num_sets_ * blocks_per_set() + b];
      copies.push_back({ids[set * blocks_per_set() + b], to, shape_.block_size});
      packs.push_back({b, to, shape_.block_size});
    }
  }
  KVX_ASSIGN_OR_RETURN(copies_, DeviceArray::of(*memory_, copies));
  KVX_ASSIGN_OR_RETURN(packs_, DeviceArray::of(*memory_, packs));
  std::vector<int64_t> row_slots(num_blocks * shape_.block_size);
  std::iota(row_slots.begin(), row_slots.end(), int64_t{0});
  KVX_ASSIGN_OR_RETURN(row_slots_, DeviceArray::of(*memory_, row_slots));
  const int64_t tokens = tokens_at_once() / shape_.num_sequences;
  std::vector<ops::GatherRange> ranges;
  for (int s = 0; s < shape_.num_sequences; ++s) ranges.push_back({s, 0, tokens, s * tokens});
  KVX_ASSIGN_OR_RETURN(ranges_, DeviceArray::of(*memory_, ranges));
  return {};
}

// Slots of all sets one after the other; the set's rows come again.
Status CudaCacheSets::append(const ops::LayerView& cache, const int64_t* slots, int set,
                             int64_t num_tokens) {
  const auto rows = [&](int side) {
    return dense_rows(reinterpret_cast<const uint16_t*>(rows_of(set) + side * side_bytes()),
                      DType::kBF16, shape_.num_kv_heads, dim_of(side));
  };
  ops::AppendArgs args;
  args.cache = cache;
  args.transform = store_->transform();
  args.k = rows(0);
  args.v = rows(1);
  args.slot_mapping = {slots, static_cast<size_t>(num_tokens)};
  return ops::append(context_, args, counters());
}

Status CudaCacheSets::append_fed(int set, int64_t first_token, int64_t num_tokens) {
  std::vector<ops::HeadRun> runs = runs_;
  for (ops::HeadRun& run : runs) {
    const int64_t per_head = int64_t{dim_of(0)} * dim_of(0);
    run.k.feedback = feedback_.as<float>() + run.first_head * per_head;
  }
  ops::LayerView view = packed();
  view.runs = runs;
  return append(view, slots_.as<int64_t>() + first_token, set, num_tokens);
}

Status CudaCacheSets::fill() {
  if (runs_.front().k.spec.is_dual()) return fill_whole_blocks();
  const int64_t all = num_sets_ * tokens_of_set();
  for (int64_t t = 0; t < all; t += kTokens) {
    KVX_RETURN_IF_ERROR(append(0, t, std::min<int64_t>(kTokens, all - t)));
  }
  return device::cuda_synchronize(context_.stream);
}

// Dual-scale formats are quantised by whole blocks: the rows of set 0 again and again, as blocks.
Status CudaCacheSets::fill_whole_blocks() {
  const int64_t blocks_of_rows = kTokens / shape_.block_size;
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  KVX_RETURN_IF_ERROR(device::cuda_copy(ids.data(), block_ids_.as<int32_t>(), std::ssize(ids) * 4));
  std::vector<ops::BlockCopy> copies;
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    copies.push_back({i % blocks_of_rows, ids[i], shape_.block_size});
  }
  KVX_ASSIGN_OR_RETURN(const DeviceArray on_device, DeviceArray::of(*memory_, copies));
  const ops::HeadRun run = rows_as_run(0);
  const ops::LayerView rows = {blocks_of_rows, shape_.block_size, shape_.num_kv_heads, {&run, 1}};
  KVX_RETURN_IF_ERROR(ops::copy_blocks(context_, rows, packed(), on_device.as<ops::BlockCopy>(),
                                       std::ssize(copies), counters()));
  return device::cuda_synchronize(context_.stream);
}

// The first tokens of all sequences, as bf16.
Status CudaCacheSets::gather(int set) {
  const auto rows = [&](int side) {
    uint8_t* data = copied_.data() + (2 * set + side) * side_bytes();
    return dense_rows(reinterpret_cast<uint16_t*>(data), DType::kBF16, shape_.num_kv_heads,
                      dim_of(side));
  };
  ops::GatherArgs args;
  args.cache = packed();
  args.block_table = {block_ids_.as<int32_t>() + set * blocks_per_set(), blocks_per_sequence()};
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.num_sequences = shape_.num_sequences;
  args.ranges = {ranges_.as<ops::GatherRange>(), static_cast<size_t>(shape_.num_sequences)};
  args.k = rows(0);
  args.v = rows(1);
  return ops::gather(context_, args, tokens_at_once() / shape_.num_sequences, counters());
}

Status CudaCacheSets::copy(int set) {
  const int64_t num_blocks = tokens_at_once() / shape_.block_size;
  return ops::copy_blocks(context_, packed(), packed(),
                          copies_.as<ops::BlockCopy>() + set * num_blocks, num_blocks, counters());
}

// The set's rows as blocks of 16 bits.
ops::HeadRun CudaCacheSets::rows_as_run(int set) const {
  const auto full_precision_side = [&](int side) {
    ops::SideView view;
    view.spec = format::make_spec(format::FormatId::kBF16).value();
    view.head_dim = shape_.head_dim;
    view.codes = {rows_of(set) + side * side_bytes(), shape_.block_size * row_bytes(), row_bytes(),
                  int64_t{shape_.head_dim} * 2};
    return view;
  };
  return {0, shape_.num_kv_heads, full_precision_side(0), full_precision_side(1)};
}

Status CudaCacheSets::pack(int set) {
  const int64_t num_blocks = tokens_at_once() / shape_.block_size;
  const ops::HeadRun run = rows_as_run(set);
  const ops::LayerView full_precision = {
      num_blocks, shape_.block_size, shape_.num_kv_heads, {&run, 1}};
  return ops::copy_blocks(context_, full_precision, packed(),
                          packs_.as<ops::BlockCopy>() + set * num_blocks, num_blocks, counters());
}

Status CudaCacheSets::transcode(int set) {
  const ops::HeadRun run = rows_as_run(set);
  ops::TranscodeArgs args;
  args.from = {
      tokens_at_once() / shape_.block_size, shape_.block_size, shape_.num_kv_heads, {&run, 1}};
  args.to = packed();
  args.to_transform = store_->transform();
  args.from_slots = row_slots_.as<int64_t>();
  args.to_slots = slots_.as<int64_t>() + (set + 1) % num_sets_ * tokens_of_set();
  args.num_tokens = tokens_at_once();
  return ops::transcode(context_, args, counters());
}

ops::AttendArgs CudaCacheSets::attend_args(int set) const {
  ops::AttendArgs args;
  args.packed = packed();
  args.transform = store_->transform();
  args.num_sequences = shape_.num_sequences;
  args.block_table = {block_ids_.as<int32_t>() + set * blocks_per_set(), blocks_per_sequence()};
  if (has_full_precision_window()) {
    args.full_precision = store_->full_precision();
    args.num_sink_blocks = num_sink_blocks_.as<int32_t>() + set * shape_.num_sequences;
    args.first_recent_block = first_recent_block_.as<int32_t>() + set * shape_.num_sequences;
    args.block_table.ids = attend_ids_.as<int32_t>() + set * blocks_per_set();
  }
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.seq_lens = seq_lens_.as<int32_t>();
  args.q_starts = q_starts_.as<int32_t>();
  args.num_q_heads = shape_.num_q_heads;
  args.q =
      dense_rows(queries_.as<const uint16_t>(), named_.query_type, shape_.num_q_heads, dim_of(0));
  args.out = dense_rows(out_.as<uint16_t>(), named_.query_type, shape_.num_q_heads, dim_of(1));
  args.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  args.window = named_.window;
  args.window_sinks = named_.window_sinks;
  if (named_.has_sinks) args.sinks = sinks_.as<float>();
  return args;
}

Status CudaCacheSets::plain_copy(int set, int64_t bytes) {
  return device::cuda_launch_copy(context_.device, context_.stream, rows_of(set),
                                  bytes / 2 / 16 * 16, copied_.data() + set * 2 * side_bytes());
}

Result<uint64_t> CudaCacheSets::num_out_of_range() const {
  ops::DeviceCounters found;
  KVX_RETURN_IF_ERROR(device::cuda_copy(&found, counters(), sizeof found));
  return found.out_of_range;
}

}  // namespace kvx::tool
