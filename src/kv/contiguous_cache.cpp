// The contiguous cache over the verbs: positions, ring and eviction; the bytes are the verbs' work.
#include "kv/contiguous_cache.hpp"

#include <algorithm>
#include <cstring>

#include "kv/scale_table.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::kv {

Result<ContiguousCache> ContiguousCache::create(ContiguousConfig config,
                                                const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_contiguous(config));
  ContiguousCache cache(std::move(config), context);
  const ContiguousConfig& checked = cache.config_;
  for (int l = 0; l < checked.num_layers; ++l) {
    const ContiguousFormats& formats = checked.formats_of(l);
    Layer& layer = cache.layers_[l];
    KVX_ASSIGN_OR_RETURN(layer.k, cache.make_side(formats.k, checked.k_head_dim, formats.k_scales,
                                                  fmt::format("layer {} K", l)));
    KVX_ASSIGN_OR_RETURN(layer.v, cache.make_side(formats.v, checked.v_head_dim, formats.v_scales,
                                                  fmt::format("layer {} V", l)));
    layer.run = {.first_head = 0,
                 .num_heads = checked.num_kv_heads,
                 .k = cache.side_view(formats.k, checked.k_head_dim, layer.k),
                 .v = cache.side_view(formats.v, checked.v_head_dim, layer.v)};
  }
  return cache;
}

ContiguousCache::ContiguousCache(ContiguousConfig config, const ops::CpuContext& context)
    : config_(std::move(config)),
      context_(context),
      capacity_(config_.capacity()),
      layers_(config_.num_layers),
      seq_lens_(config_.batch_size),
      q_starts_(config_.batch_size + 1) {
  for (int b = 0; b < config_.batch_size; ++b) block_ids_.insert(block_ids_.end(), 2, b);
}

Result<ContiguousCache::Side> ContiguousCache::make_side(const format::FormatSpec& spec,
                                                         int head_dim, const StaticScales& scales,
                                                         std::string_view what) const {
  const RowBytes row = row_bytes(spec, head_dim);
  const int64_t num_rows = int64_t{config_.batch_size} * config_.num_kv_heads * capacity_;
  Side side;
  KVX_ASSIGN_OR_RETURN(side.codes, cache::host_memory().allocate(num_rows * row.codes, what));
  if (row.scales > 0) {
    KVX_ASSIGN_OR_RETURN(side.scales, cache::host_memory().allocate(num_rows * row.scales, what));
  }
  if (spec.has_scale() && spec.scale_source == format::ScaleSource::kGiven) {
    KVX_ASSIGN_OR_RETURN(side.given, make_scale_table(spec, head_dim, config_.num_kv_heads,
                                                      scales.group_scales, what));
  } else if (!scales.group_scales.empty()) {
    return invalid_argument("{} has {} given scales; {} computes its own", what,
                            scales.group_scales.size(), spec.facts->name);
  }
  KVX_RETURN_IF_ERROR(check_tensor_scales(spec, config_.num_kv_heads, scales.tensor_scales, what));
  side.tensor_scales = scales.tensor_scales;
  return side;
}

ops::SideView ContiguousCache::side_view(const format::FormatSpec& spec, int head_dim,
                                         const Side& side) const {
  const RowBytes row = row_bytes(spec, head_dim);
  const int64_t heads = config_.num_kv_heads;
  const int group_bytes = format::scale_bytes_per_group(spec);
  ops::SideView view;
  view.spec = spec;
  view.head_dim = head_dim;
  view.codes = {.base = side.codes.data(),
                .block_stride = heads * capacity_ * row.codes,
                .token_stride = row.codes,
                .head_stride = capacity_ * row.codes};
  if (row.scales > 0) {
    view.scales = {.base = side.scales.data(),
                   .block_stride = heads * capacity_ * row.scales,
                   .token_stride = row.scales,
                   .head_stride = capacity_ * row.scales,
                   .group_stride = group_bytes};
  } else if (!side.given.empty()) {
    // Append reads given scales only; views have one pointer type for both.
    view.scales = {.base = const_cast<uint8_t*>(side.given.data()),
                   .head_stride = int64_t{group_bytes} * format::groups_per_row(spec, head_dim),
                   .group_stride = group_bytes};
  }
  view.tensor_scales = side.tensor_scales.empty() ? nullptr : side.tensor_scales.data();
  return view;
}

ops::LayerView ContiguousCache::view(int layer) const {
  return {.num_blocks = config_.batch_size,
          .block_size = capacity_,
          .num_kv_heads = config_.num_kv_heads,
          .runs = {&layers_[layer].run, 1}};
}

Status ContiguousCache::check_layer(int layer) const {
  if (layer >= 0 && layer < config_.num_layers) return {};
  return invalid_argument("layer is {}; expected 0 to {}", layer, config_.num_layers - 1);
}

Status ContiguousCache::append(int layer, int num_tokens, FloatRows k, FloatRows v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  if (num_tokens < 1) return invalid_argument("num_tokens is {}; expected 1 or more", num_tokens);
  Layer& target = layers_[layer];
  if (target.num_pending > 0) {
    return invalid_argument("layer {} has appended {} tokens since the last advance", layer,
                            target.num_pending);
  }
  const int64_t past_end = int64_t{seq_len_} + num_tokens - config_.max_seq_len;
  if (past_end > 0 && config_.overflow == Overflow::kError) {
    return out_of_range("seq_len is {} and {} tokens come; max_seq_len is {}", seq_len_, num_tokens,
                        config_.max_seq_len);
  }
  const int64_t num_evicted = std::max<int64_t>(past_end, 0);
  if (num_evicted > 0) {
    evict(target, static_cast<int>(std::min<int64_t>(num_evicted, seq_len_)));
  }

  slots_.clear();
  for (int b = 0; b < config_.batch_size; ++b) {
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t position = seq_len_ + t - num_evicted;
      const bool is_kept = num_tokens - t <= capacity_;  // a longer write would overtake itself
      slots_.push_back(is_kept ? int64_t{b} * capacity_ + position % capacity_ : -1);
    }
  }
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report,
                       ops::append(context_, {.cache = view(layer),
                                              .transform = {},
                                              .k = k,
                                              .v = v,
                                              .slot_mapping = slots_,
                                              .positions = {}}));
  nonfinite_inputs_ += report.nonfinite_inputs;
  target.num_pending = num_tokens;
  return {};
}

// Moves the rows of tokens num_tokens and later to the front.
void ContiguousCache::evict(Layer& layer, int num_tokens) {
  const auto move_rows = [&](uint8_t* first_row, int64_t row) {
    std::memmove(first_row, first_row + num_tokens * row, (seq_len_ - num_tokens) * row);
  };
  for (const ops::SideView* side : {&layer.run.k, &layer.run.v}) {
    for (int b = 0; b < config_.batch_size; ++b) {
      for (int head = 0; head < config_.num_kv_heads; ++head) {
        move_rows(side->codes.at(b, 0, head), side->codes.token_stride);
        if (side->scales.token_stride > 0) {
          move_rows(side->scales.at(b, 0, head), side->scales.token_stride);
        }
      }
    }
  }
}

Status ContiguousCache::advance(int num_tokens) {
  for (int l = 0; l < config_.num_layers; ++l) {
    if (layers_[l].num_pending == num_tokens) continue;
    return invalid_argument("num_tokens is {}; layer {} has appended {}", num_tokens, l,
                            layers_[l].num_pending);
  }
  seq_len_ = length(0);
  for (Layer& layer : layers_) layer.num_pending = 0;
  return {};
}

void ContiguousCache::reset() {
  seq_len_ = 0;
  for (Layer& layer : layers_) layer.num_pending = 0;
}

int ContiguousCache::length(int layer) const {
  const int64_t appended = int64_t{seq_len_} + layers_[layer].num_pending;
  return static_cast<int>(std::min<int64_t>(appended, config_.max_seq_len));
}

int ContiguousCache::num_held(int layer) const {
  return std::min(length(layer), capacity_);
}

ContiguousCache::Span ContiguousCache::span_of(int layer) const {
  const int num_tokens = length(layer);
  const int last_pass = std::max(num_tokens - 1, 0) / capacity_;
  const int base = std::max(last_pass - 1, 0) * capacity_;
  return {.num_tokens = num_tokens - base, .base = base};
}

Status ContiguousCache::check_queries(int layer, int q_len, int window) const {
  if (q_len < 1 || q_len > length(layer)) {
    return invalid_argument("q_len is {}; expected 1 to {}, the tokens that are there", q_len,
                            length(layer));
  }
  if (config_.window == 0) return {};
  if (window > config_.window) {
    return invalid_argument("window is {}; the ring keeps {}", window, config_.window);
  }
  const int64_t num_lost = length(layer) - num_held(layer);
  const int64_t oldest_seen = int64_t{length(layer)} - q_len - window + 1;
  if (std::max<int64_t>(oldest_seen, 0) >= num_lost) return {};
  return invalid_argument(
      "q_len is {}; a ring of {} tokens serves {} queries with a window of {} (see max_append)",
      q_len, capacity_, capacity_ - window + 1, window);
}

Status ContiguousCache::attend(int layer, int q_len, FloatRows q, MutableFloatRows out,
                               const ContiguousAttention& attention) const {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const int window = attention.window > 0 ? attention.window : config_.window;
  KVX_RETURN_IF_ERROR(check_queries(layer, q_len, window));
  const Span span = span_of(layer);
  for (int b = 0; b < config_.batch_size; ++b) {
    seq_lens_[b] = span.num_tokens;
    q_starts_[b + 1] = q_starts_[b] + q_len;
  }
  ops::AttendArgs args;
  args.packed = view(layer);
  args.num_sequences = config_.batch_size;
  args.block_table = {block_ids_.data(), 2};
  args.max_blocks_per_sequence = 2;
  args.seq_lens = seq_lens_.data();
  args.q_starts = q_starts_.data();
  args.num_q_heads = config_.num_q_heads;
  args.q = q;
  args.out = out;
  args.lse = attention.lse;
  args.softmax_scale = attention.softmax_scale;
  args.softcap = attention.softcap;
  args.window = window;
  args.sinks = attention.sinks;
  return ops::attend(context_, args);
}

Status ContiguousCache::gather(int layer, MutableFloatRows k, MutableFloatRows v) const {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const Span span = span_of(layer);
  const int64_t num_tokens = num_held(layer);
  std::vector<ops::GatherRange> ranges;
  for (int b = 0; b < config_.batch_size; ++b) {
    ranges.push_back({.sequence = b,
                      .first_token = span.num_tokens - num_tokens,
                      .num_tokens = num_tokens,
                      .first_row = b * num_tokens});
  }
  return ops::gather(context_, {.cache = view(layer),
                                .transform = {},
                                .block_table = {block_ids_.data(), 2},
                                .max_blocks_per_sequence = 2,
                                .num_sequences = config_.batch_size,
                                .ranges = ranges,
                                .k = k,
                                .v = v});
}

int64_t ContiguousCache::used_bytes() const {
  return bytes_per_position(config_) * std::min(seq_len_, capacity_);
}

int64_t ContiguousCache::read_bytes_per_step() const {
  const int num_seen = config_.window > 0 ? std::min(seq_len_, config_.window) : seq_len_;
  return bytes_per_position(config_) * num_seen;
}

}  // namespace kvx::kv
