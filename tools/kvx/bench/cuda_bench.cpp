// A cache on the device, filled by append in random block order, and graphs that walk over several
// sets of sequences, so that no replay finds its bytes in the second-level cache.
#include "tools/kvx/bench/cuda_bench.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/checked.hpp"
#include "device/cuda_bandwidth.hpp"
#include "format/list.hpp"
#include "kv/group_plan.hpp"
#include "kv/layer_store.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "ops/transcode/transcode_cuda.hpp"
#include "tools/kvx/bench/device_array.hpp"

namespace kvx::tool {
namespace {

constexpr int64_t kBytesOfSets = int64_t{1} << 30;  // walked over before a set comes again
constexpr int kMaxSets = 8;
constexpr int kTokens = 16384;  // that a call of append, gather or copy_blocks moves

class CudaBench {
 public:
  CudaBench(const device::CudaDevice& device, const CudaBenchShape& named)
      : named_(named), shape_(named.shape), context_{device, nullptr} {}

  Status prepare(const kv::Recipe& recipe);
  Status measure(const std::string& format, bool only_attend, CudaBenchReport& report);

 private:
  int64_t blocks_per_sequence() const { return ceil_div(shape_.length, shape_.block_size); }
  int64_t blocks_per_set() const { return shape_.num_sequences * blocks_per_sequence(); }
  int64_t set_bytes() const {
    return blocks_per_set() * (group_.packed.code_bytes() + group_.packed.scale_bytes());
  }
  int64_t tokens_of_set() const { return blocks_per_set() * shape_.block_size; }
  int64_t attend_bytes() const;
  ops::CudaAttendPath path() const {
    return named_.without_wgmma ? ops::CudaAttendPath::kPrefillMma : ops::CudaAttendPath::kChoose;
  }
  bool has_wide_ends() const { return group_.wide_ends.is_on(); }
  int64_t wide_blocks_per_sequence() const {
    return group_.wide_ends.head_blocks + group_.wide_ends.recent_blocks;
  }

  int64_t tokens_at_once() const { return std::min<int64_t>(kTokens, tokens_of_set()); }
  int64_t row_bytes() const { return int64_t{shape_.num_kv_heads} * shape_.head_dim * 2; }
  int64_t side_bytes() const { return kTokens * row_bytes(); }
  uint8_t* rows_of(int set) const { return rows_.data() + set * 2 * side_bytes(); }
  ops::CudaFindings* findings() const { return findings_.as<ops::CudaFindings>(); }
  ops::LayerView packed() const {
    ops::LayerView view = store_->packed();
    view.runs = runs_;
    return view;
  }

  Status move_tables_to_device();
  Status make_tokens();
  void make_lens();
  Status make_wide_ends();
  Status make_queries();
  Status make_copies();
  Status fill();
  ops::AttendArgs attend_args(int set) const;
  Status append(const ops::LayerView& cache, const int64_t* slots, int set, int64_t num_tokens);
  Status append(int set, int64_t first_token, int64_t num_tokens) {
    return append(packed(), slots_.as<int64_t>() + first_token, set, num_tokens);
  }
  Status gather(int set);
  Status copy(int set);
  Status pack(int set);
  Status transcode(int set);
  ops::HeadRun rows_as_run(int set) const;

  Result<double> time_calls(const std::function<Status(int set)>& call);
  Result<double> time_copy(int64_t bytes);
  Status measure_attend(CudaMeasurement m, CudaBenchReport& report);
  Status measure_prefill(CudaMeasurement m, CudaBenchReport& report);
  Status measure_step(CudaMeasurement m, CudaBenchReport& report);
  Status measure_moves(CudaMeasurement m, CudaBenchReport& report);

  CudaBenchShape named_;
  BenchShape shape_;
  ops::CudaContext context_;
  std::unique_ptr<cache::Memory> memory_;
  std::optional<device::OwnedCudaStream> stream_;
  kv::GroupPlan group_;
  cache::Region blocks_;
  std::unique_ptr<kv::LayerStore> store_;
  std::vector<ops::HeadRun> runs_;
  std::vector<DeviceArray> tables_;  // given scales and tensor scales
  int num_sets_ = 1;
  cache::Region wide_blocks_;
  DeviceArray block_ids_;   // [num_sets, num_sequences, blocks_per_sequence]
  DeviceArray attend_ids_;  // the same, but the wide ends' blocks are of their own pool
  DeviceArray wide_head_, wide_tail_;
  DeviceArray sinks_;
  std::vector<int32_t> lens_;  // of a set's sequences
  DeviceArray slots_;          // [num_sets, tokens_of_set]
  cache::Region rows_;         // bf16 [num_sets, K and V, kTokens, num_kv_heads, head_dim]
  cache::Region copied_;       // the same again
  DeviceArray ranges_;         // tokens_at_once of the sequences
  DeviceArray copies_;         // [num_sets, tokens_at_once / block_size]: to the next set's blocks
  DeviceArray packs_;          // the same, from the set's rows as if they were blocks
  DeviceArray row_slots_;      // [tokens_at_once]: of the set's rows, likewise
  DeviceArray queries_, out_, seq_lens_, q_starts_, findings_;
  ops::CudaAttendLimits limits_;
  cache::Region workspace_;
};

Status CudaBench::prepare(const kv::Recipe& recipe) {
  KVX_ASSIGN_OR_RETURN(memory_, cache::cuda_memory(context_.device.index));
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  stream_.emplace(std::move(stream));
  context_.stream = stream_->get();
  const kv::CacheGeometry geometry = {1, shape_.num_kv_heads, shape_.head_dim, shape_.head_dim, {}};
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
  kv::LayerMemory wide;
  if (has_wide_ends()) {
    wide = {nullptr, num_sets_ * shape_.num_sequences * wide_blocks_per_sequence(), &group_.wide,
            0};
    KVX_ASSIGN_OR_RETURN(wide_blocks_, memory_->allocate(wide.num_blocks * group_.wide.block_bytes,
                                                         "the wide ends of kvx bench"));
    wide.base = wide_blocks_.data();
  }
  KVX_ASSIGN_OR_RETURN(store_, kv::LayerStore::create(geometry, 0, layers.front(), recipe.wide_spec,
                                                      {}, packed, wide));
  KVX_RETURN_IF_ERROR(move_tables_to_device());
  if (named_.pages != PageOrder::kPool) {
    KVX_ASSIGN_OR_RETURN(blocks_, lay_out_pages(*memory_, named_.pages, num_blocks,
                                                shape_.block_size, runs_.front()));
  }
  KVX_RETURN_IF_ERROR(make_tokens());
  make_lens();
  KVX_RETURN_IF_ERROR(make_queries());
  KVX_RETURN_IF_ERROR(fill());
  if (has_wide_ends()) KVX_RETURN_IF_ERROR(make_wide_ends());
  return make_copies();
}

// The store's calibration lies in host memory: one number a head.
Status CudaBench::move_tables_to_device() {
  runs_.assign(store_->packed().runs.begin(), store_->packed().runs.end());
  for (ops::HeadRun& run : runs_) {
    for (ops::SideView* side : {&run.k, &run.v}) {
      if (side->tensor_scales != nullptr) {
        const std::vector<float> host(side->tensor_scales, side->tensor_scales + run.num_heads);
        KVX_ASSIGN_OR_RETURN(DeviceArray array, DeviceArray::of(*memory_, host));
        side->tensor_scales = array.as<float>();
        tables_.push_back(std::move(array));
      }
      if (side->spec.scale_source != format::ScaleSource::kGiven) continue;
      const int64_t bytes = run.num_heads * std::max<int64_t>(side->scales.head_stride, 4);
      const std::vector<uint8_t> host(side->scales.base, side->scales.base + bytes);
      KVX_ASSIGN_OR_RETURN(DeviceArray array, DeviceArray::of(*memory_, host));
      side->scales.base = array.as<uint8_t>();
      tables_.push_back(std::move(array));
    }
  }
  return {};
}

// Blocks in random order and the rows that fill them.
Status CudaBench::make_tokens() {
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
  KVX_ASSIGN_OR_RETURN(block_ids_, DeviceArray::of(*memory_, ids));
  std::vector<int64_t> slots(num_sets_ * tokens_of_set());
  for (int64_t t = 0; t < std::ssize(slots); ++t) {
    slots[t] = int64_t{ids[t / shape_.block_size]} * shape_.block_size + t % shape_.block_size;
  }
  KVX_ASSIGN_OR_RETURN(slots_, DeviceArray::of(*memory_, slots));
  KVX_ASSIGN_OR_RETURN(findings_,
                       DeviceArray::of(*memory_, std::vector<uint8_t>(sizeof(ops::CudaFindings))));
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

void CudaBench::make_lens() {
  lens_.assign(shape_.num_sequences, shape_.length);
  if (!named_.is_mixed) return;
  constexpr double kShortest = 128;
  const double ratio = shape_.length / kShortest;
  for (int s = 0; s < shape_.num_sequences; ++s) {
    lens_[s] = static_cast<int32_t>(kShortest * std::pow(ratio, (s + 0.5) / shape_.num_sequences));
  }
  std::shuffle(lens_.begin(), lens_.end(), std::mt19937(5));
}

// What attend reads of a set, once each.
int64_t CudaBench::attend_bytes() const {
  const auto bytes_of_block = [](const cache::BlockLayout& layout) {
    return layout.code_bytes() + layout.scale_bytes();
  };
  int64_t packed = 0, wide = 0;
  for (const int32_t len : lens_) {
    const int64_t seen = named_.window > 0 ? std::min(named_.window, len) : len;
    const int64_t blocks = ceil_div<int64_t>(seen, shape_.block_size);
    const int64_t ends = has_wide_ends() ? std::min(blocks, wide_blocks_per_sequence()) : 0;
    packed += blocks - ends;
    wide += ends;
  }
  return packed * bytes_of_block(group_.packed) + wide * bytes_of_block(group_.wide);
}

// Blocks of the ends in a pool of their own, in random order, filled by append.
Status CudaBench::make_wide_ends() {
  const int64_t num_wide = num_sets_ * shape_.num_sequences * wide_blocks_per_sequence();
  std::vector<int32_t> wide_ids(num_wide);
  std::iota(wide_ids.begin(), wide_ids.end(), 0);
  std::shuffle(wide_ids.begin(), wide_ids.end(), std::mt19937(9));
  std::vector<int32_t> ids(num_sets_ * blocks_per_set());
  KVX_RETURN_IF_ERROR(device::cuda_copy(ids.data(), block_ids_.as<int32_t>(), std::ssize(ids) * 4));
  const cache::WideEnds& ends = group_.wide_ends;
  std::vector<int32_t> heads, tails;
  int64_t next = 0;
  for (int64_t i = 0; i < int64_t{num_sets_} * shape_.num_sequences; ++i) {
    const int64_t len = lens_[i % shape_.num_sequences];
    const int64_t blocks = ceil_div<int64_t>(len, shape_.block_size);
    const int64_t tail = cache::wide_tail_block(ends, len, shape_.block_size);
    for (int64_t b = 0; b < blocks; ++b) {
      const bool is_wide = b < ends.head_blocks || b >= tail;
      if (is_wide) ids[i * blocks_per_sequence() + b] = wide_ids[next++];
    }
    heads.push_back(static_cast<int32_t>(ends.head_blocks));
    tails.push_back(static_cast<int32_t>(tail));
  }
  KVX_ASSIGN_OR_RETURN(attend_ids_, DeviceArray::of(*memory_, ids));
  KVX_ASSIGN_OR_RETURN(wide_head_, DeviceArray::of(*memory_, heads));
  KVX_ASSIGN_OR_RETURN(wide_tail_, DeviceArray::of(*memory_, tails));
  std::vector<int64_t> slots(num_wide * shape_.block_size);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  KVX_ASSIGN_OR_RETURN(const DeviceArray wide_slots, DeviceArray::of(*memory_, slots));
  for (int64_t t = 0; t < std::ssize(slots); t += kTokens) {
    KVX_RETURN_IF_ERROR(append(store_->wide(), wide_slots.as<int64_t>() + t, 0,
                               std::min<int64_t>(kTokens, std::ssize(slots) - t)));
  }
  return device::cuda_synchronize(context_.stream);
}

Status CudaBench::make_queries() {
  const int64_t total_q = int64_t{shape_.num_sequences} * named_.q_len;
  const int64_t q_numbers = total_q * shape_.num_q_heads * shape_.head_dim;
  KVX_ASSIGN_OR_RETURN(queries_, DeviceArray::of(*memory_, random_f16(q_numbers, 3)));
  KVX_ASSIGN_OR_RETURN(out_, DeviceArray::of(*memory_, std::vector<uint16_t>(q_numbers)));
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

Status CudaBench::make_copies() {
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
Status CudaBench::append(const ops::LayerView& cache, const int64_t* slots, int set,
                         int64_t num_tokens) {
  const auto rows = [&](int side) {
    return dense_rows(reinterpret_cast<const uint16_t*>(rows_of(set) + side * side_bytes()),
                      DType::kBF16, shape_.num_kv_heads, shape_.head_dim);
  };
  ops::AppendArgs args;
  args.cache = cache;
  args.transform = store_->transform();
  args.k = rows(0);
  args.v = rows(1);
  args.slot_mapping = {slots, static_cast<size_t>(num_tokens)};
  return ops::append(context_, args, findings());
}

Status CudaBench::fill() {
  const int64_t all = num_sets_ * tokens_of_set();
  for (int64_t t = 0; t < all; t += kTokens) {
    KVX_RETURN_IF_ERROR(append(0, t, std::min<int64_t>(kTokens, all - t)));
  }
  return device::cuda_synchronize(context_.stream);
}

// The first tokens of all sequences, as bf16.
Status CudaBench::gather(int set) {
  const auto rows = [&](int side) {
    uint8_t* data = copied_.data() + (2 * set + side) * side_bytes();
    return dense_rows(reinterpret_cast<uint16_t*>(data), DType::kBF16, shape_.num_kv_heads,
                      shape_.head_dim);
  };
  ops::GatherArgs args;
  args.cache = packed();
  args.block_table = {block_ids_.as<int32_t>() + set * blocks_per_set(), blocks_per_sequence()};
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.num_sequences = shape_.num_sequences;
  args.ranges = {ranges_.as<ops::GatherRange>(), static_cast<size_t>(shape_.num_sequences)};
  args.k = rows(0);
  args.v = rows(1);
  return ops::gather(context_, args, tokens_at_once() / shape_.num_sequences, findings());
}

Status CudaBench::copy(int set) {
  const int64_t num_blocks = tokens_at_once() / shape_.block_size;
  return ops::copy_blocks(context_, packed(), packed(),
                          copies_.as<ops::BlockCopy>() + set * num_blocks, num_blocks, findings());
}

// The set's rows as blocks of 16 bits.
ops::HeadRun CudaBench::rows_as_run(int set) const {
  const auto wide_side = [&](int side) {
    ops::SideView view;
    view.spec = format::make_spec(format::FormatId::kBF16).value();
    view.head_dim = shape_.head_dim;
    view.codes = {rows_of(set) + side * side_bytes(), shape_.block_size * row_bytes(), row_bytes(),
                  int64_t{shape_.head_dim} * 2};
    return view;
  };
  return {0, shape_.num_kv_heads, wide_side(0), wide_side(1)};
}

// Blocks that leave the recent window.
Status CudaBench::pack(int set) {
  const int64_t num_blocks = tokens_at_once() / shape_.block_size;
  const ops::HeadRun run = rows_as_run(set);
  const ops::LayerView wide = {num_blocks, shape_.block_size, shape_.num_kv_heads, {&run, 1}};
  return ops::copy_blocks(context_, wide, packed(), packs_.as<ops::BlockCopy>() + set * num_blocks,
                          num_blocks, findings());
}

// Tokens of a layer of 16 bits to slots of the next set.
Status CudaBench::transcode(int set) {
  const ops::HeadRun run = rows_as_run(set);
  ops::TranscodeArgs args;
  args.from = {
      tokens_at_once() / shape_.block_size, shape_.block_size, shape_.num_kv_heads, {&run, 1}};
  args.to = packed();
  args.to_transform = store_->transform();
  args.from_slots = row_slots_.as<int64_t>();
  args.to_slots = slots_.as<int64_t>() + (set + 1) % num_sets_ * tokens_of_set();
  args.num_tokens = tokens_at_once();
  return ops::transcode(context_, args, findings());
}

ops::AttendArgs CudaBench::attend_args(int set) const {
  ops::AttendArgs args;
  args.packed = packed();
  args.transform = store_->transform();
  args.num_sequences = shape_.num_sequences;
  args.block_table = {block_ids_.as<int32_t>() + set * blocks_per_set(), blocks_per_sequence()};
  if (has_wide_ends()) {
    args.wide = store_->wide();
    args.wide_head_blocks = wide_head_.as<int32_t>() + set * shape_.num_sequences;
    args.wide_tail_block = wide_tail_.as<int32_t>() + set * shape_.num_sequences;
    args.block_table.ids = attend_ids_.as<int32_t>() + set * blocks_per_set();
  }
  args.max_blocks_per_sequence = blocks_per_sequence();
  args.seq_lens = seq_lens_.as<int32_t>();
  args.q_starts = q_starts_.as<int32_t>();
  args.num_q_heads = shape_.num_q_heads;
  args.q =
      dense_rows(queries_.as<const uint16_t>(), DType::kF16, shape_.num_q_heads, shape_.head_dim);
  args.out = dense_rows(out_.as<uint16_t>(), DType::kF16, shape_.num_q_heads, shape_.head_dim);
  args.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  args.window = named_.window;
  if (named_.has_sinks) args.sinks = sinks_.as<float>();
  return args;
}

// Seconds a call, each of the sets twice.
Result<double> CudaBench::time_calls(const std::function<Status(int set)>& call) {
  const int num_calls = 2 * num_sets_;
  return time_graph(context_.stream, num_calls, [&]() -> Status {
    for (int i = 0; i < num_calls; ++i) KVX_RETURN_IF_ERROR(call(i % num_sets_));
    return Status();
  });
}

// bytes: read and written together.
Result<double> CudaBench::time_copy(int64_t bytes) {
  return time_calls([&](int set) {
    return device::cuda_launch_copy(context_.device, context_.stream, rows_of(set),
                                    bytes / 2 / 16 * 16, copied_.data() + set * 2 * side_bytes());
  });
}

Status CudaBench::measure_attend(CudaMeasurement m, CudaBenchReport& report) {
  m.verb = "attend";
  m.packed_bytes = attend_bytes();
  m.yardstick_seconds = static_cast<double>(m.packed_bytes) / report.bandwidth.read / 1e9;
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) {
                         return ops::attend(context_, attend_args(set), limits_, workspace_.data(),
                                            findings());
                       }));
  report.measurements.push_back(m);
  return {};
}

// Causal: each query sees itself and all tokens before it.
Status CudaBench::measure_prefill(CudaMeasurement m, CudaBenchReport& report) {
  m.verb = "prefill";
  m.packed_bytes = set_bytes();
  const double queries = named_.q_len;
  const double pairs = queries * (shape_.length - queries) + queries * (queries + 1) / 2;
  m.flops = 4.0 * shape_.head_dim * shape_.num_q_heads * pairs * shape_.num_sequences;
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) {
                         return ops::attend(context_, attend_args(set), limits_, workspace_.data(),
                                            findings(), path());
                       }));
  report.measurements.push_back(m);
  return {};
}

// A decode step's append: a token a sequence.
Status CudaBench::measure_step(CudaMeasurement m, CudaBenchReport& report) {
  m.verb = "step";
  m.packed_bytes = (set_bytes() / tokens_of_set() + 2 * row_bytes()) * shape_.num_sequences;
  KVX_ASSIGN_OR_RETURN(m.yardstick_seconds, time_calls([&](int) {
                         return device::cuda_launch_nothing(context_.stream);
                       }));
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) {
                         return append(set, set * tokens_of_set(), shape_.num_sequences);
                       }));
  report.measurements.push_back(m);
  return {};
}

Status CudaBench::measure_moves(CudaMeasurement m, CudaBenchReport& report) {
  const int64_t rows = 2 * row_bytes() * tokens_at_once();
  const int64_t packed = set_bytes() / tokens_of_set() * tokens_at_once();
  struct Move {
    const char* verb;
    int64_t bytes;
    std::function<Status(int set)> call;
  };
  const Move moves[] = {
      {"append", rows + packed,
       [&](int set) { return append(set, set * tokens_of_set(), tokens_at_once()); }},
      {"gather", packed + rows, [&](int set) { return gather(set); }},
      {"copy", 2 * packed, [&](int set) { return copy(set); }},
      {"pack", rows + packed, [&](int set) { return pack(set); }},
      {"transcode", rows + packed, [&](int set) { return transcode(set); }},
  };
  for (const Move& move : moves) {
    m.verb = move.verb;
    m.packed_bytes = move.bytes;
    KVX_ASSIGN_OR_RETURN(m.yardstick_seconds, time_copy(move.bytes));
    KVX_ASSIGN_OR_RETURN(m.seconds, time_calls(move.call));
    report.measurements.push_back(m);
  }
  return {};
}

Status CudaBench::measure(const std::string& format, bool only_attend, CudaBenchReport& report) {
  CudaMeasurement m;
  m.format = format;
  m.shape = named_.name;
  if (named_.is_prefill()) {
    KVX_RETURN_IF_ERROR(measure_prefill(m, report));
  } else {
    KVX_RETURN_IF_ERROR(measure_attend(m, report));
    if (named_.pages == PageOrder::kPool && !only_attend && !has_wide_ends()) {
      KVX_RETURN_IF_ERROR(measure_step(m, report));
      KVX_RETURN_IF_ERROR(measure_moves(m, report));
    }
  }
  ops::CudaFindings found;
  KVX_RETURN_IF_ERROR(device::cuda_copy(&found, findings(), sizeof found));
  if (found.out_of_range != 0) {
    return internal_error("kernels found {} things out of range", found.out_of_range);
  }
  return {};
}

}  // namespace

Status measure_cuda(const device::CudaDevice& device, const CudaBenchShape& shape,
                    const kv::Recipe& recipe, bool only_attend, CudaBenchReport& report) {
  kv::Recipe without_ends = recipe;  // the check is the CPU's, which measures none
  without_ends.has_wide_ends = false;
  KVX_RETURN_IF_ERROR(BenchCache::check(shape.shape, without_ends));
  CudaBench bench(device, shape);
  KVX_RETURN_IF_ERROR(bench.prepare(recipe));
  return bench.measure(recipe.text, only_attend, report);
}

}  // namespace kvx::tool
