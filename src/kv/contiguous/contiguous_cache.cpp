// The contiguous cache over the verbs: positions, rings and eviction; the bytes are the verbs'
// work.
#include "kv/contiguous/contiguous_cache.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "device/cuda_caller.hpp"
#include "kv/verbs/cpu_verbs.hpp"
#include "kv/verbs/cuda_verbs.hpp"

namespace kvx::kv {

Result<ContiguousCache> ContiguousCache::create(ContiguousConfig config,
                                                const ops::CpuContext& context) {
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans, plan_contiguous(config));
  ContiguousCache cache(std::move(config));
  KVX_RETURN_IF_ERROR(cache.create_verbs(context));
  std::optional<device::CurrentCudaDevice> current;  // kernels are chosen for this device
  if (cache.place_) {
    KVX_ASSIGN_OR_RETURN(auto set,
                         device::CurrentCudaDevice::set(cache.place_->context.device.index));
    current.emplace(std::move(set));
  }
  for (int l = 0; l < cache.config_.geometry.num_layers; ++l) {
    KVX_ASSIGN_OR_RETURN(Layer layer, cache.make_layer(l, plans[l]));
    cache.layers_.push_back(std::move(layer));
  }
  return cache;
}

ContiguousCache::ContiguousCache(ContiguousConfig config)
    : config_(std::move(config)),
      nonfinite_inputs_(std::make_unique<std::atomic<int64_t>>(0)),
      seq_lens_(config_.batch_size),
      q_starts_(config_.batch_size + 1) {
  for (int b = 0; b < config_.batch_size; ++b) block_ids_.insert(block_ids_.end(), 2, b);
}

Status ContiguousCache::create_verbs(const ops::CpuContext& context) {
  if (!config_.cuda) {
    verbs_ = std::make_unique<CpuVerbs>(context, *nonfinite_inputs_);
    return {};
  }
  KVX_ASSIGN_OR_RETURN(place_, CudaPlace::create(config_.cuda->context));
  CudaVerbLimits limits;
  limits.max_step_tokens = config_.cuda->max_step_tokens;
  limits.max_entries = config_.batch_size;
  limits.max_blocks = 2;
  limits.num_groups = 1;
  limits.max_block_bytes = 1;  // the host reads no blocks
  KVX_ASSIGN_OR_RETURN(verbs_, CudaVerbs::create(*place_, limits));
  return {};
}

Result<ContiguousCache::Layer> ContiguousCache::make_layer(int index, const LayerPlan& plan) const {
  const CacheGeometry& geometry = config_.geometry;
  const LayerCalibration none;
  Layer layer;
  layer.kept_tokens = config_.kept_tokens(index);
  layer.capacity = config_.capacity(index);
  layer.block_tokens = config_.block_tokens(index);
  layer.position_bytes = bytes_per_position(config_, plan);
  KVX_ASSIGN_OR_RETURN(
      layer.tables,
      LayerTables::create(geometry, index, plan,
                          config_.calibration.empty() ? none : config_.calibration[index]));
  if (place_) KVX_RETURN_IF_ERROR(layer.tables.place_in(*place_->memory));
  for (const HeadRunPlan& run : plan.runs) {
    ops::HeadRun view;
    view.first_head = run.first_head;
    view.num_heads = run.num_heads;
    KVX_ASSIGN_OR_RETURN(view.k, make_side(layer, run.k.spec, geometry.k_head_dim, run.num_heads));
    KVX_ASSIGN_OR_RETURN(view.v, make_side(layer, run.v.spec, geometry.v_head_dim, run.num_heads));
    layer.tables.attach(layer.runs.size(), view);
    layer.runs.push_back(view);
  }
  return layer;
}

// Allocates the arrays of K or V of a run of heads.
Result<ops::SideView> ContiguousCache::make_side(Layer& layer, const format::FormatSpec& spec,
                                                 int head_dim, int num_heads) const {
  const int64_t num_rows = int64_t{config_.batch_size} * num_heads * layer.block_tokens;
  const int64_t code_bytes = format::code_bytes_per_row(spec, head_dim);
  ops::SideView view;
  view.spec = spec;
  view.head_dim = head_dim;
  KVX_ASSIGN_OR_RETURN(cache::Region codes,
                       memory().allocate(num_rows * code_bytes, "a contiguous cache's codes"));
  view.codes = {.base = codes.data(),
                .block_stride = num_heads * layer.block_tokens * code_bytes,
                .token_stride = code_bytes,
                .head_stride = layer.block_tokens * code_bytes};
  layer.regions.push_back(std::move(codes));
  if (!spec.has_scale() || spec.scale_source != format::ScaleSource::kComputed) return view;

  const int64_t scale_bytes = format::scale_bytes_per_row(spec, head_dim);
  KVX_ASSIGN_OR_RETURN(cache::Region scales,
                       memory().allocate(num_rows * scale_bytes, "a contiguous cache's scales"));
  view.scales = {.base = scales.data(),
                 .block_stride = num_heads * layer.block_tokens * scale_bytes,
                 .token_stride = scale_bytes,
                 .head_stride = layer.block_tokens * scale_bytes,
                 .group_stride = format::scale_bytes_per_group(spec)};
  layer.regions.push_back(std::move(scales));
  return view;
}

ops::LayerView ContiguousCache::view(int layer) const {
  return {.num_blocks = config_.batch_size,
          .block_size = layers_[layer].block_tokens,
          .num_kv_heads = config_.geometry.num_kv_heads,
          .runs = layers_[layer].runs};
}

Status ContiguousCache::check_layer(int layer) const {
  const int num_layers = config_.geometry.num_layers;
  if (layer >= 0 && layer < num_layers) return {};
  return invalid_argument("layer is {}; expected 0 to {}", layer, num_layers - 1);
}

Status ContiguousCache::append(int layer, int num_tokens, FloatRows k, FloatRows v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  Layer& target = layers_[layer];
  if (num_tokens < 1) return invalid_argument("num_tokens is {}; expected 1 or more", num_tokens);
  if (target.num_pending > 0) {
    return invalid_argument("layer {} has appended {} tokens since the last advance", layer,
                            target.num_pending);
  }
  const int64_t num_past_end = int64_t{seq_len_} + num_tokens - config_.max_seq_len;
  if (num_past_end > 0 && config_.overflow == Overflow::kError) {
    return out_of_range("seq_len is {} and {} tokens come; max_seq_len is {}", seq_len_, num_tokens,
                        config_.max_seq_len);
  }
  if (config_.cuda && num_tokens > config_.cuda->max_step_tokens / config_.batch_size) {
    return out_of_range(
        "num_tokens is {} in a batch of {}; a GPU's cache takes at most {} tokens in one append",
        num_tokens, config_.batch_size, config_.cuda->max_step_tokens);
  }
  const int num_evicted = static_cast<int>(std::max<int64_t>(num_past_end, 0));
  if (num_evicted > 0) KVX_RETURN_IF_ERROR(evict(target, std::min(num_evicted, seq_len_)));

  target.num_pending = num_tokens;  // of which length_in_blocks() is to know
  const Status placed = place_tables({.capacity = target.capacity,
                                      .block_tokens = target.block_tokens,
                                      .first_position = seq_len_ - num_evicted,
                                      .num_tokens = num_tokens,
                                      .seq_len = length_in_blocks(target),
                                      .q_len = std::min(num_tokens, length(target))});
  target.num_pending = 0;
  KVX_RETURN_IF_ERROR(placed);
  KVX_RETURN_IF_ERROR(verbs_->append({.cache = view(layer),
                                      .transform = target.tables.transform(),
                                      .k = k,
                                      .v = v,
                                      .slot_mapping = placed_.groups[0].slots,
                                      .positions = {}}));
  target.num_pending = num_tokens;
  return {};
}

// Fills the tables of a call and lets the verbs place them, unless those of the last one serve.
Status ContiguousCache::place_tables(const TableShape& shape) {
  if (!placed_.groups.empty() && placed_shape_ == shape) return {};
  placed_.groups.clear();
  slots_.clear();
  for (int b = 0; b < config_.batch_size; ++b) {
    for (int t = 0; t < shape.num_tokens; ++t) {
      const int64_t position = int64_t{shape.first_position} + t;
      // Of a write longer than the array only its end stays.
      const bool is_kept = shape.num_tokens - t <= shape.capacity;
      const int64_t slot = int64_t{b} * shape.block_tokens + position % shape.capacity;
      slots_.push_back(is_kept ? slot : -1);
    }
    seq_lens_[b] = shape.seq_len;
    q_starts_[b + 1] = q_starts_[b] + shape.q_len;
  }
  positions_.resize(static_cast<size_t>(q_starts_.back()));
  StepTables tables;
  tables.positions = positions_;
  tables.q_starts = q_starts_;
  tables.seq_lens = seq_lens_;
  tables.max_q_len = shape.q_len;
  tables.max_tokens = shape.seq_len;
  tables.groups.push_back({.slots = slots_,
                           .block_ids = block_ids_,
                           .num_sink_blocks = {},
                           .first_recent_block = {},
                           .row_stride = 2});
  KVX_RETURN_IF_ERROR(verbs_->place(tables));
  placed_ = std::move(tables);
  placed_shape_ = shape;
  return {};
}

// Drops the first num_tokens tokens and moves the others to the front.
Status ContiguousCache::evict(Layer& layer, int num_tokens) {
  const auto move_side = [&](const ops::SideView& side, int block, int head) -> Status {
    KVX_RETURN_IF_ERROR(
        move_rows(side.codes.at(block, 0, head), side.codes.token_stride, num_tokens));
    if (side.scales.token_stride == 0) return {};
    return move_rows(side.scales.at(block, 0, head), side.scales.token_stride, num_tokens);
  };
  for (const ops::HeadRun& run : layer.runs) {
    for (int b = 0; b < config_.batch_size; ++b) {
      for (int head = 0; head < run.num_heads; ++head) {
        KVX_RETURN_IF_ERROR(move_side(run.k, b, head));
        KVX_RETURN_IF_ERROR(move_side(run.v, b, head));
      }
    }
  }
  return {};
}

// The rows from num_tokens on move to the first one; both places may overlap.
Status ContiguousCache::move_rows(uint8_t* first_row, int64_t row_bytes, int num_tokens) {
  const uint8_t* const from = first_row + num_tokens * row_bytes;
  const int64_t bytes = (seq_len_ - num_tokens) * row_bytes;
  if (bytes == 0) return {};
  if (!place_) {
    std::memmove(first_row, from, static_cast<size_t>(bytes));
    return {};
  }
  if (scratch_.bytes() < bytes) {
    KVX_RETURN_IF_ERROR(verbs_->synchronize());  // it may be in use
    scratch_ = {};
    KVX_ASSIGN_OR_RETURN(scratch_, memory().allocate(config_.max_seq_len * row_bytes,
                                                     "rows of a contiguous cache that move"));
  }
  KVX_RETURN_IF_ERROR(verbs_->copy_bytes(from, scratch_.data(), bytes));
  return verbs_->copy_bytes(scratch_.data(), first_row, bytes);
}

Status ContiguousCache::advance(int num_tokens) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].num_pending == num_tokens) continue;
    return invalid_argument("num_tokens is {}; layer {} has appended {}", num_tokens, l,
                            layers_[l].num_pending);
  }
  seq_len_ = length(layers_.front());
  for (Layer& layer : layers_) layer.num_pending = 0;
  return {};
}

void ContiguousCache::reset() {
  seq_len_ = 0;
  for (Layer& layer : layers_) layer.num_pending = 0;
}

int ContiguousCache::length(const Layer& layer) const {
  const int64_t appended = int64_t{seq_len_} + layer.num_pending;
  return static_cast<int>(std::min<int64_t>(appended, config_.max_seq_len));
}

int ContiguousCache::num_held(int layer) const {
  return std::min(length(layers_[layer]), layers_[layer].kept_tokens);
}

// The sequence's length in block_ids_: a ring's last pass, and the whole pass before it.
int ContiguousCache::length_in_blocks(const Layer& layer) const {
  const int num_tokens = length(layer);
  const int num_full_passes = std::max(num_tokens - 1, 0) / layer.capacity;
  return num_tokens - std::max(num_full_passes - 1, 0) * layer.capacity;
}

Status ContiguousCache::check_queries(int layer, int q_len, int window) const {
  const int num_tokens = length(layers_[layer]);
  if (q_len < 1 || q_len > num_tokens) {
    return invalid_argument("q_len is {}; expected 1 to {}, the tokens that are there", q_len,
                            num_tokens);
  }
  if (int64_t{config_.batch_size} * q_len > std::numeric_limits<int32_t>::max()) {
    return out_of_range("batch_size {} x q_len {} is more queries than one call can take",
                        config_.batch_size, q_len);
  }
  const int ring_window = config_.geometry.window_of(layer);
  if (ring_window == 0) return {};
  if (window > ring_window) {
    return invalid_argument("window is {}; layer {} keeps {}", window, layer, ring_window);
  }
  const int num_lost = num_tokens - num_held(layer);
  const int oldest_seen = std::max(num_tokens - q_len - window + 1, 0);
  if (oldest_seen >= num_lost) return {};
  const int kept = layers_[layer].kept_tokens;
  return invalid_argument(
      "q_len is {}; a ring of {} tokens serves {} queries with a window of {} (see max_append)",
      q_len, kept, kept - window + 1, window);
}

Status ContiguousCache::attend(int layer, int q_len, FloatRows q, MutableFloatRows out,
                               const ContiguousAttention& attention) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const int window = attention.window != 0 ? attention.window : config_.geometry.window_of(layer);
  KVX_RETURN_IF_ERROR(check_queries(layer, q_len, window));
  const Layer& target = layers_[layer];
  TableShape shape = {.capacity = target.capacity,
                      .block_tokens = target.block_tokens,
                      .seq_len = length_in_blocks(target),
                      .q_len = q_len};
  const bool has_appended_them = placed_shape_.capacity == shape.capacity &&
                                 placed_shape_.block_tokens == shape.block_tokens &&
                                 placed_shape_.seq_len == shape.seq_len &&
                                 placed_shape_.q_len == q_len;
  if (has_appended_them) shape = placed_shape_;
  KVX_RETURN_IF_ERROR(place_tables(shape));

  ops::AttendArgs args;
  args.packed = view(layer);
  args.transform = target.tables.transform();
  args.num_sequences = config_.batch_size;
  args.block_table = {placed_.groups[0].block_ids.data(), 2};
  args.max_blocks_per_sequence = 2;
  args.seq_lens = placed_.seq_lens.data();
  args.q_starts = placed_.q_starts.data();
  args.num_q_heads = config_.num_q_heads;
  args.q = q;
  args.out = out;
  args.lse = attention.lse;
  args.softmax_scale = attention.softmax_scale;
  args.softcap = attention.softcap;
  args.window = window;
  args.sinks = attention.sinks;
  args.precision = attention.precision;
  args.is_causal = attention.is_causal;
  return verbs_->attend(args, placed_);
}

Status ContiguousCache::gather(int layer, MutableFloatRows k, MutableFloatRows v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const int num_tokens = num_held(layer);
  const ops::LayerView cache = view(layer);
  ops::GatherArgs args;
  args.transform = layers_[layer].tables.transform();
  args.max_blocks_per_sequence = 2;
  args.num_sequences = 1;
  args.k = k;
  args.v = v;
  for (int b = 0; b < config_.batch_size; ++b) {
    args.block_table = {block_ids_.data() + 2 * int64_t{b}, 2};
    const GatherPart part = {.view = &cache,
                             .range = {.sequence = 0,
                                       .first_token = length_in_blocks(layers_[layer]) - num_tokens,
                                       .num_tokens = num_tokens,
                                       .first_row = int64_t{b} * num_tokens}};
    KVX_RETURN_IF_ERROR(verbs_->gather(args, {&part, 1}));
  }
  return {};
}

int64_t ContiguousCache::allocated_bytes() const {
  int64_t bytes = 0;
  for (const Layer& layer : layers_) bytes += layer.position_bytes * layer.block_tokens;
  return bytes;
}

int64_t ContiguousCache::used_bytes() const {
  int64_t bytes = 0;
  for (const Layer& layer : layers_) {
    bytes += layer.position_bytes * std::min(seq_len_, layer.kept_tokens);
  }
  return bytes;
}

int64_t ContiguousCache::read_bytes_per_step() const {
  int64_t bytes = 0;
  for (int l = 0; l < config_.geometry.num_layers; ++l) {
    const int window = config_.geometry.window_of(l);
    const int num_seen = window > 0 ? std::min(seq_len_, window) : seq_len_;
    bytes += layers_[l].position_bytes * num_seen;
  }
  return bytes;
}

}  // namespace kvx::kv
