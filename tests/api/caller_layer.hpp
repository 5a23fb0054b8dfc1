// A layer in a caller's memory for tests of 1.2: one run of heads, as opaque pages or as a v1
// cache, with values that tell every (token, head, dim) apart.
#pragma once

#include <cmath>
#include <vector>

#define KVX_NO_SHORT_NAMESPACE  // the core's own kvx::Result is seen here
#include "kvx/kvx.hpp"

namespace kvx::api_test {

using api::sized;

struct Geometry {
  uint32_t num_blocks = 6;
  uint32_t block_size = 8;
  uint32_t num_kv_heads = 2;
  uint32_t head_dim = 32;
};

inline kvx_format_spec_t format_spec(kvx_format_t format,
                                     kvx_scale_source_t source = KVX_SCALE_SOURCE_DEFAULT) {
  auto spec = sized<kvx_format_spec_t>();
  spec.format = format;
  spec.scale_source = source;
  return spec;
}

// Formats whose rows can hold their own scales, as in a page.
inline kvx_format_spec_t in_page(kvx_format_t format) {
  const bool is_plain = format <= KVX_FORMAT_BF16;
  return format_spec(format, is_plain ? KVX_SCALE_SOURCE_DEFAULT : KVX_SCALE_SOURCE_COMPUTED);
}

// Pages of zeros.
class PagedLayer {
 public:
  PagedLayer(const Geometry& geometry, kvx_format_spec_t k_format, kvx_format_spec_t v_format)
      : k_spec(k_format), v_spec(v_format) {
    page.block_size = geometry.block_size;
    page.k_head_dim = page.v_head_dim = geometry.head_dim;
    page.k_spec = &k_spec;
    page.v_spec = &v_spec;
    status = kvx_page_bytes_per_token(&page, &bytes_per_token);
    if (status != KVX_STATUS_OK) return;
    memory.resize(geometry.num_blocks * geometry.num_kv_heads * geometry.block_size *
                  bytes_per_token);
    status = kvx_describe_pages(&page, memory.data(), geometry.num_kv_heads, &k, &v);
    run.num_heads = geometry.num_kv_heads;
    run.k = &k;
    run.v = &v;
    layer.block_size = geometry.block_size;
    layer.num_blocks = geometry.num_blocks;
    layer.num_kv_heads = geometry.num_kv_heads;
    layer.num_runs = 1;
    layer.runs = &runs;
  }
  PagedLayer(const PagedLayer&) = delete;

  kvx_format_spec_t k_spec;
  kvx_format_spec_t v_spec;
  kvx_page_desc_t page = sized<kvx_page_desc_t>();
  uint64_t bytes_per_token = 0;
  std::vector<uint8_t> memory;
  kvx_side_t k = sized<kvx_side_t>();
  kvx_side_t v = sized<kvx_side_t>();
  kvx_head_run_t run = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer = sized<kvx_layer_t>();
  kvx_status_t status = KVX_STATUS_OK;
};

// Rows [tokens, heads, dim] whose magnitudes differ from row to row.
inline std::vector<float> test_rows(int num_tokens, uint32_t num_heads, uint32_t head_dim,
                                    float seed) {
  std::vector<float> rows;
  for (int t = 0; t < num_tokens; ++t) {
    for (uint32_t h = 0; h < num_heads; ++h) {
      const float magnitude =
          0.25f + 0.1f * static_cast<float>((t * 7 + static_cast<int>(h) * 3) % 13);
      for (uint32_t d = 0; d < head_dim; ++d) {
        rows.push_back(magnitude *
                       std::sin(seed + static_cast<float>(t) + 1.7f * static_cast<float>(d)));
      }
    }
  }
  return rows;
}

// The same rows for K and V; what it points to outlives the call.
inline kvx_append_args_t append_args(const kvx_layer_t& layer, const kvx_rows_t& rows,
                                     const std::vector<int64_t>& slots) {
  auto args = sized<kvx_append_args_t>();
  args.layer = &layer;
  args.k = args.v = &rows;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = slots.data();
  args.num_tokens = static_cast<int64_t>(slots.size());
  return args;
}

inline kvx_status_t append_rows(const kvx_layer_t& layer, const std::vector<float>& k,
                                const std::vector<float>& v, const std::vector<int64_t>& slots) {
  const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
  kvx_append_args_t args = append_args(layer, k_rows, slots);
  const bool has_v = layer.cache != nullptr || layer.runs == nullptr || layer.runs[0] == nullptr ||
                     layer.runs[0]->v != nullptr;
  args.v = has_v ? &v_rows : nullptr;
  return kvx_append(&args, nullptr);
}

// A latent cache's layer: one KV head, whose V is the beginning of K's rows. The caller sets k and
// the number of blocks and their size.
struct PrefixLayer {
  explicit PrefixLayer(int value_dim) {
    v.head_dim = static_cast<uint32_t>(value_dim);
    v.flags = KVX_SIDE_PREFIX_OF_K;
    run.num_heads = 1;
    run.k = &k;
    run.v = &v;
    layer.num_kv_heads = 1;
    layer.num_runs = 1;
    layer.runs = &runs;
  }
  PrefixLayer(const PrefixLayer&) = delete;

  kvx_status_t append(const std::vector<float>& rows, const std::vector<int64_t>& slots) const {
    const kvx_rows_t k_rows = api::rows(rows.data(), KVX_DTYPE_F32);
    kvx_append_args_t args = append_args(layer, k_rows, slots);
    args.v = nullptr;
    return kvx_append(&args, nullptr);
  }

  kvx_side_t k = sized<kvx_side_t>();
  kvx_side_t v = sized<kvx_side_t>();
  kvx_head_run_t run = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer = sized<kvx_layer_t>();
};

// One sequence of the blocks in `ids`.
struct OneSequence {
  OneSequence(std::vector<int32_t> ids, int32_t length) : blocks(std::move(ids)), lengths{length} {
    table = api::packed_table(blocks, static_cast<uint32_t>(blocks.size()));
    seq_lens = api::seq_lens(lengths);
  }
  OneSequence(const OneSequence&) = delete;
  std::vector<int32_t> blocks;
  std::vector<int32_t> lengths;
  kvx_block_table_t table;
  kvx_seq_lens_t seq_lens;
};

// The whole sequence's keys to k; what it points to outlives the call.
inline kvx_gather_args_t gather_args(const kvx_layer_t& layer, const OneSequence& sequence,
                                     const kvx_rows_t& k) {
  auto args = sized<kvx_gather_args_t>();
  args.layer = &layer;
  args.block_table = &sequence.table;
  args.seq_lens = &sequence.seq_lens;
  args.num_ranges = 1;
  args.k = &k;
  return args;
}

inline kvx_status_t gather_rows(const kvx_layer_t& layer, const OneSequence& sequence,
                                std::vector<float>& k, std::vector<float>& v) {
  const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
  kvx_gather_args_t args = gather_args(layer, sequence, k_rows);
  args.v = &v_rows;
  return kvx_gather(&args, nullptr);
}

// Slots of tokens 0, 1, ... of a sequence.
inline std::vector<int64_t> slots_of(const OneSequence& sequence, int64_t block_size) {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < sequence.lengths[0]; ++t) {
    slots.push_back(sequence.blocks[static_cast<size_t>(t / block_size)] * block_size +
                    t % block_size);
  }
  return slots;
}

// Attention by its definition, in double: the last queries of one sequence.
inline std::vector<float> plain_attention(const std::vector<float>& q, const std::vector<float>& k,
                                          const std::vector<float>& v, int num_queries,
                                          int num_tokens, int q_heads, const Geometry& geometry) {
  const int dim = static_cast<int>(geometry.head_dim);
  const int kv_heads = static_cast<int>(geometry.num_kv_heads);
  std::vector<float> out(static_cast<size_t>(num_queries * q_heads * dim));
  for (int i = 0; i < num_queries; ++i) {
    for (int h = 0; h < q_heads; ++h) {
      const int kv = h / (q_heads / kv_heads);
      const int seen = num_tokens - num_queries + i + 1;
      std::vector<double> weights;
      double total = 0;
      for (int t = 0; t < seen; ++t) {
        double score = 0;
        for (int d = 0; d < dim; ++d) {
          score += static_cast<double>(q[(i * q_heads + h) * dim + d]) *
                   k[(t * kv_heads + kv) * dim + d];
        }
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
        total += weights.back();
      }
      for (int d = 0; d < dim; ++d) {
        double sum = 0;
        for (int t = 0; t < seen; ++t) sum += weights[t] * v[(t * kv_heads + kv) * dim + d];
        out[(i * q_heads + h) * dim + d] = static_cast<float>(sum / total);
      }
    }
  }
  return out;
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - b[i]);
    largest = difference <= largest ? largest : difference;  // a NaN is kept
  }
  return largest;
}

inline constexpr int kTokens = 21;

// The sequence's rows, and the layer that holds them.
struct Filled {
  explicit Filled(kvx_format_t k_format, kvx_format_t v_format = KVX_FORMAT_INVALID)
      : layer(geometry, in_page(k_format),
              in_page(v_format == KVX_FORMAT_INVALID ? k_format : v_format)),
        k(test_rows(kTokens, 2, 32, 0.3f)),
        v(test_rows(kTokens, 2, 32, 1.9f)) {
    status = append_rows(layer.layer, k, v, slots_of(sequence, geometry.block_size));
  }

  Geometry geometry;
  PagedLayer layer;
  OneSequence sequence{{4, 1, 5}, kTokens};
  std::vector<float> k;
  std::vector<float> v;
  kvx_status_t status;
};

inline constexpr int kQHeads = 4;

struct Attention {
  Attention(const kvx_layer_t& layer, const OneSequence& sequence, int num_queries,
            uint32_t head_dim = 32)
      : q(test_rows(num_queries, kQHeads, head_dim, 4.2f)), out(q.size()), starts{0, num_queries} {
    q_rows = api::rows(q.data(), KVX_DTYPE_F32);
    out_rows = api::rows(out.data(), KVX_DTYPE_F32);
    args.layer = &layer;
    args.block_table = &sequence.table;
    args.seq_lens = &sequence.seq_lens;
    args.q_starts = starts.data();
    args.num_q_heads = kQHeads;
    args.q = &q_rows;
    args.out = &out_rows;
  }
  Attention(const Attention&) = delete;
  std::vector<float> q;
  std::vector<float> out;
  std::vector<int32_t> starts;
  kvx_rows_t q_rows;
  kvx_rows_t out_rows;
  kvx_attend_args_t args = sized<kvx_attend_args_t>();
};

}  // namespace kvx::api_test
