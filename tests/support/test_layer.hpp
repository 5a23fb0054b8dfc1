// TestLayer owns the memory of a one-layer cache and lays it out as a test asks.
#pragma once

#include <vector>

#include "ops/cache_view.hpp"

namespace kvx::tests {

enum class Order { kNhd, kHnd };  // [block, token, head, ...] or [block, head, token, ...]

// K or V of one run of heads: codes, scales and channels' numbers in regions of their own.
class TestSide {
 public:
  TestSide(const format::FormatSpec& spec, int head_dim, int num_blocks, int block_size,
           int num_heads, Order order)
      : row_bytes_(format::code_bytes_per_row(spec, head_dim)),
        scale_bytes_(format::scale_bytes_per_row(spec, head_dim)) {
    // A page's tokens share their scales: the token's stride is 0 and a block has one row of them.
    const bool is_shared = spec.scale_source == format::ScaleSource::kPageShared;
    const int scale_rows = is_shared ? 1 : block_size;
    codes.assign(size_t(num_blocks) * block_size * num_heads * row_bytes_, 0xCC);
    scales.assign(size_t(num_blocks) * scale_rows * num_heads * scale_bytes_, 0xCC);
    const bool is_nhd = order == Order::kNhd;
    view.spec = spec;
    view.head_dim = head_dim;
    view.codes = {codes.data(), int64_t{block_size} * num_heads * row_bytes_,
                  is_nhd ? int64_t{num_heads} * row_bytes_ : row_bytes_,
                  is_nhd ? row_bytes_ : int64_t{block_size} * row_bytes_};
    view.scales = {scales.data(), int64_t{scale_rows} * num_heads * scale_bytes_,
                   is_nhd ? int64_t{num_heads} * scale_bytes_ : scale_bytes_,
                   is_nhd ? scale_bytes_ : int64_t{scale_rows} * scale_bytes_,
                   format::scale_bytes_per_group(spec)};
    if (is_shared) view.scales.token_stride = 0;
    const int channel_bytes = format::channel_bytes_per_block(spec, head_dim);
    channels.assign(size_t(num_blocks) * num_heads * channel_bytes, 0xCC);
    if (channel_bytes > 0) {
      view.channels = {channels.data(), int64_t{num_heads} * channel_bytes, channel_bytes};
    }
  }
  TestSide(const TestSide&) = delete;
  TestSide& operator=(const TestSide&) = delete;
  TestSide(TestSide&&) = default;

  std::vector<uint8_t> codes_at(int64_t block, int token, int head) const {
    const uint8_t* row = view.codes.at(block, token, head);
    return {row, row + row_bytes_};
  }
  std::vector<uint8_t> scales_at(int64_t block, int token, int head) const {
    const uint8_t* row = view.scales.at(block, token, head);
    return {row, row + scale_bytes_};
  }
  // Writes one scale's bits everywhere (given scales).
  void fill_scales(format::StoredScale scale) {
    const int size = format::bytes_of(view.spec.scale_type);
    for (size_t i = 0; size > 0 && i + size <= scales.size(); i += size) {
      format::store_scale(view.spec.scale_type, scale, scales.data() + i);
    }
  }

  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<uint8_t> channels;
  ops::SideView view;

 private:
  int64_t row_bytes_;
  int64_t scale_bytes_;
};

struct LayerShape {
  int num_blocks = 4;
  int block_size = 16;
  int num_heads = 2;
  int k_dim = 64;
  int v_dim = 64;
  Order order = Order::kNhd;
};

// One run of heads.
class TestLayer {
 public:
  TestLayer(const format::FormatSpec& k_spec, const format::FormatSpec& v_spec,
            const LayerShape& shape)
      : k(k_spec, shape.k_dim, shape.num_blocks, shape.block_size, shape.num_heads, shape.order),
        v(v_spec, shape.v_dim, shape.num_blocks, shape.block_size, shape.num_heads, shape.order),
        shape_(shape) {}

  ops::LayerView view() {
    run_ = {0, shape_.num_heads, k.view, v.view};
    return {shape_.num_blocks, shape_.block_size, shape_.num_heads, {&run_, 1}};
  }

  TestSide k;
  TestSide v;

 private:
  LayerShape shape_;
  ops::HeadRun run_;
};

}  // namespace kvx::tests
