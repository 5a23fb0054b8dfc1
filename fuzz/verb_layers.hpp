// Layers in the fuzzer's memory for the verbs of 1.2: plain floats as a v1 descriptor, and opaque
// pages of any format.
#pragma once

#include <numeric>

#include "fuzz/abi_case.hpp"
#define KVX_NO_SHORT_NAMESPACE  // the core's own kvx::Result is seen here
#include "kvx/kvx.hpp"

namespace kvx::fuzz {

using api::sized;

// More than any tensor of a case takes, its padding included: a buffer is never smaller than it.
constexpr int64_t kMostVerbBytes = 1 << 20;
constexpr kvx_dtype_t kReference[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32};

struct Shape {
  uint32_t num_blocks;
  uint32_t block_size;
  uint32_t num_heads;
  uint32_t head_dim;
  int64_t num_slots() const { return int64_t{num_blocks} * block_size; }
};

// A layer of plain floats as a v1 descriptor, with its memory.
struct FloatLayer {
  FloatLayer(Choices& choices, const Shape& s, uint32_t seed) {
    constexpr kvx_layout_t kLayouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                         KVX_LAYOUT_BLOCK_CUSTOM};
    cache = sized<kvx_cache_desc_t>();
    cache.num_blocks = s.num_blocks;
    cache.block_size = s.block_size;
    cache.num_kv_heads = s.num_heads;
    cache.head_dim = s.head_dim;
    const kvx_layout_t layout = choices.pick(kLayouts);
    for (kvx_tensor_desc_t* tensor : {&cache.k, &cache.v}) {
      const bool is_hnd = layout == KVX_LAYOUT_BLOCK_HND;
      const int64_t second = is_hnd ? s.num_heads : s.block_size;
      const int64_t third = is_hnd ? s.block_size : s.num_heads;
      set_tensor(choices, *tensor, {s.num_blocks, second, third, s.head_dim});
      tensor->layout = layout;
      tensor->dtype = choices.pick(kReference);
      std::vector<uint8_t>& bytes = tensor == &cache.k ? k : v;
      fill(bytes, bytes_taken(*tensor, kMostVerbBytes), seed++, false);
      tensor->data = bytes.data();
    }
    layer.cache = &cache;
  }
  FloatLayer(const FloatLayer&) = delete;

  kvx_cache_desc_t cache;
  kvx_layer_t layer = sized<kvx_layer_t>();
  std::vector<uint8_t> k;
  std::vector<uint8_t> v;
};

inline kvx_format_spec_t some_format(Choices& choices) {
  auto spec = sized<kvx_format_spec_t>();
  spec.format = static_cast<uint32_t>(choices.between(KVX_FORMAT_F32, KVX_FORMAT_INT4_ROW));
  if (choices.one_in(4)) spec.group_size = static_cast<uint32_t>(choices.between(1, 64));
  if (choices.one_in(4)) spec.scale_type = static_cast<uint32_t>(choices.between(0, 6));
  if (choices.one_in(4)) spec.scale_choice = static_cast<uint32_t>(choices.between(0, 4));
  return spec;
}

// Opaque pages with their memory.
struct Pages {
  std::vector<uint8_t> memory;
  kvx_side_t k = sized<kvx_side_t>();
  kvx_side_t v = sized<kvx_side_t>();
  kvx_head_run_t run = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer = sized<kvx_layer_t>();

  bool describe(const kvx_page_desc_t& page, const Shape& s) {
    uint64_t bytes = 0;
    if (kvx_page_bytes_per_token(&page, &bytes) != KVX_STATUS_OK) return false;
    memory.resize(s.num_blocks * s.num_heads * page.block_size * bytes);
    expect(kvx_describe_pages(&page, memory.data(), s.num_heads, &k, &v) == KVX_STATUS_OK,
           "pages that have a size can be described");
    run.num_heads = layer.num_kv_heads = s.num_heads;
    run.k = &k;
    run.v = &v;
    layer.num_blocks = s.num_blocks;
    layer.block_size = page.block_size;
    layer.num_runs = 1;
    layer.runs = &runs;
    return true;
  }
};

// The stored rows of all slots, as floats [slots, heads, head_dim]: block b is sequence 0's block
// b.
inline void gather_slots(const kvx_layer_t& layer, const Shape& shape, std::vector<float>& k,
                         std::vector<float>& v) {
  std::vector<int32_t> ids(shape.num_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  const auto length = static_cast<int32_t>(shape.num_slots());
  const kvx_block_table_t table = api::packed_table(ids, shape.num_blocks);
  const kvx_seq_lens_t lengths = api::seq_lens({&length, 1});
  const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_gather_args_t>();
  args.layer = &layer;
  args.block_table = &table;
  args.seq_lens = &lengths;
  args.num_ranges = 1;
  args.k = &k_rows;
  args.v = &v_rows;
  expect(kvx_gather(&args, nullptr) == KVX_STATUS_OK, "every slot has a row");
}

}  // namespace kvx::fuzz
