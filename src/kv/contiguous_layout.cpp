// Checks of a contiguous cache's configuration, and its sizes.
#include "kv/contiguous_layout.hpp"

#include <algorithm>

#include "core/checked.hpp"

namespace kvx::kv {
namespace {

Status check_count(std::string_view field, int value) {
  if (value >= 1) return {};
  return invalid_argument("{} is {}; expected 1 or more", field, value);
}

Status check_side(const format::FormatSpec& spec, int head_dim) {
  if (spec.facts == nullptr) return invalid_argument("formats has a side without a format");
  if (spec.has_scale() && spec.scale_source == format::ScaleSource::kPageShared) {
    return invalid_argument(
        "scale source is {}; a contiguous cache has no pages and takes computed or given scales",
        name_of(spec.scale_source));
  }
  return format::check_head_dim(spec, head_dim);
}

Status check_formats(const ContiguousConfig& config) {
  const size_t count = config.formats.size();
  if (count != 1 && count != static_cast<size_t>(config.num_layers)) {
    return invalid_argument("formats has {} entries; expected 1 or num_layers = {}", count,
                            config.num_layers);
  }
  for (const ContiguousFormats& formats : config.formats) {
    KVX_RETURN_IF_ERROR(check_side(formats.k, config.k_head_dim));
    KVX_RETURN_IF_ERROR(check_side(formats.v, config.v_head_dim));
  }
  return {};
}

Status check_ring(const ContiguousConfig& config) {
  if (config.window < 0) {
    return invalid_argument("window is {}; expected 0 (none) or more", config.window);
  }
  KVX_RETURN_IF_ERROR(check_count("max_append", config.max_append));
  if (config.window == 0 && config.max_append != 1) {
    return invalid_argument("max_append is {}; it belongs to a window, and window is 0",
                            config.max_append);
  }
  if (config.window > 0 && config.overflow == Overflow::kEvict) {
    return invalid_argument("window is {} and overflow is evict; a window evicts by itself",
                            config.window);
  }
  return {};
}

int64_t held_tokens(const ContiguousConfig& config) {
  const int64_t ring = int64_t{config.window} + config.max_append - 1;
  return config.window == 0 ? config.max_seq_len : std::min<int64_t>(ring, config.max_seq_len);
}

CheckedSize position_bytes(const ContiguousConfig& config) {
  CheckedSize bytes = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const ContiguousFormats& formats = config.formats_of(layer);
    const RowBytes k = row_bytes(formats.k, config.k_head_dim);
    const RowBytes v = row_bytes(formats.v, config.v_head_dim);
    bytes = bytes + (k.codes + k.scales + v.codes + v.scales);
  }
  return bytes * config.batch_size * config.num_kv_heads;
}

}  // namespace

int ContiguousConfig::capacity() const {
  return static_cast<int>(held_tokens(*this));
}

Status check_contiguous(const ContiguousConfig& config) {
  KVX_RETURN_IF_ERROR(check_count("num_layers", config.num_layers));
  KVX_RETURN_IF_ERROR(check_count("batch_size", config.batch_size));
  KVX_RETURN_IF_ERROR(check_count("num_q_heads", config.num_q_heads));
  KVX_RETURN_IF_ERROR(check_count("num_kv_heads", config.num_kv_heads));
  KVX_RETURN_IF_ERROR(check_count("max_seq_len", config.max_seq_len));
  if (config.num_q_heads % config.num_kv_heads != 0) {
    return invalid_argument("num_q_heads is {}; expected a multiple of num_kv_heads = {}",
                            config.num_q_heads, config.num_kv_heads);
  }
  KVX_RETURN_IF_ERROR(check_formats(config));
  KVX_RETURN_IF_ERROR(check_ring(config));
  if (held_tokens(config) > kMaxContiguousTokens) {
    return out_of_range("{} tokens a sequence are to be held; at most {} can be",
                        held_tokens(config), kMaxContiguousTokens);
  }
  if (!(position_bytes(config) * held_tokens(config)).get()) {
    return out_of_range(
        "num_layers {} x batch_size {} x num_kv_heads {} x {} tokens pass 2^63 bytes",
        config.num_layers, config.batch_size, config.num_kv_heads, held_tokens(config));
  }
  return {};
}

RowBytes row_bytes(const format::FormatSpec& spec, int head_dim) {
  const bool stores_scales = spec.scale_source == format::ScaleSource::kComputed;
  return {.codes = format::code_bytes_per_row(spec, head_dim),
          .scales = stores_scales ? format::scale_bytes_per_row(spec, head_dim) : 0};
}

int64_t bytes_per_position(const ContiguousConfig& config) {
  return *position_bytes(config).get();
}

Result<int64_t> contiguous_bytes(const ContiguousConfig& config) {
  KVX_RETURN_IF_ERROR(check_contiguous(config));
  return bytes_per_position(config) * config.capacity();
}

}  // namespace kvx::kv
