// The reference for attention.
#include "tools/conformance/attend_call.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tools/conformance/numbers.hpp"

namespace kvx::conformance {
namespace {

constexpr int64_t kTreeStride = 8;

LayerCase full_precision_case(LayerCase layer) {
  return layer.set_formats(KVX_FORMAT_F32, KVX_FORMAT_F32);
}

int64_t num_queries(const AttendCase& given) {
  return std::accumulate(given.q_lens.begin(), given.q_lens.end(), int64_t{0});
}

// Queries are smaller than the stored rows, so that no token takes the whole probability.
std::vector<float> query_row(uint64_t place, int dim) {
  std::vector<float> row = some_row(50000 + place, dim);
  for (float& x : row) x *= 0.125f;
  return row;
}

}  // namespace

AttendCall::AttendCall(const Provider& provider, const AttendCase& attend_case)
    : given(attend_case),
      source(provider, memory, given.layer),
      full_precision(provider, memory, full_precision_case(given.layer), "full_precision "),
      table(memory, given.table, given.layer.block_size),
      q(memory, "q", given.io, num_queries(given), given.num_q_heads, given.layer.k_dim, given.gap),
      out(memory, "out", given.io, num_queries(given), given.num_q_heads, given.layer.v_dim,
          given.gap),
      k_transform_(memory, "K", given.layer.num_heads, given.layer.k_dim, 3),
      v_transform_(memory, "V", given.layer.num_heads, given.layer.v_dim, 0) {
  source.fill();
  full_precision.fill();
  for (int64_t i = 0; i < q.num_tokens; ++i) {
    for (int64_t h = 0; h < given.num_q_heads; ++h) {
      q.set_row(i, h, query_row(static_cast<uint64_t>(i * 64 + h), q.head_dim));
    }
  }
  args.size = sizeof args;
  args.layer = &source.layer;
  args.block_table = &table.table;
  args.seq_lens = &table.seq_lens;
  args.num_q_heads = static_cast<uint32_t>(given.num_q_heads);
  args.q = &q.rows;
  args.out = &out.rows;
  args.window = given.window;
  args.softcap = given.softcap;
  args.softmax_scale = given.softmax_scale;
  starts_ = {0};
  for (const int32_t length : given.q_lens) starts_.push_back(starts_.back() + length);
  if (!given.decodes) args.q_starts = memory.add_list("q_starts", starts_);
  if (given.has_sinks) {
    for (int h = 0; h < given.num_q_heads; ++h) {
      sinks_.push_back(0.5f * static_cast<float>(h % 4) + 1.0f);
    }
    args.sinks = memory.add_list("sinks", sinks_);
  }
  if (given.has_lse) {
    lse_ = memory.add_list(
        "lse", std::vector<float>(static_cast<size_t>(q.num_tokens * given.num_q_heads), 99.0f));
    args.lse = lse_;
  }
  if (given.has_tree) {
    for (int64_t i = 0; i < q.num_tokens * kTreeStride; ++i) {
      tree_.push_back((noise(static_cast<uint64_t>(i) + 77) & 1) != 0);
    }
    args.tree_mask = memory.add_list("tree_mask", tree_);
    args.tree_mask_stride = kTreeStride;
  }
  if (given.has_full_precision) {
    const auto count = given.q_lens.size();
    args.full_precision = &full_precision.layer;
    args.num_sink_blocks = memory.add_list("num_sink_blocks", std::vector<int32_t>(count, 1));
    args.first_recent_blocks =
        memory.add_list("first_recent_blocks", std::vector<int32_t>(count, 2));
  }
  if (given.has_transforms) {
    source.layer.k_transform = &k_transform_.transform;
    source.layer.v_transform = &v_transform_.transform;
  }
}

bool AttendCall::sees(const Query& query, int64_t token) const {
  if (given.window != 0 && query.position - token >= int64_t{given.window}) return false;
  if (!given.has_tree || token < query.first_new) {
    return token <= query.position;
  }
  return tree_[static_cast<size_t>(query.row * kTreeStride + token - query.first_new)] != 0;
}

// The row that attention multiplies with, with the transforms inverted.
std::vector<double> AttendCall::numbers(Side side, const Query& query, int64_t token,
                                        int64_t head) const {
  const int64_t block = token / given.layer.block_size;
  const bool is_full_precision = given.has_full_precision && (block < 1 || block >= 2);
  const VerbLayer& layer = is_full_precision ? full_precision : source;
  const auto& ids = given.table.blocks[static_cast<size_t>(query.sequence)];
  const RowPlace place = {ids[static_cast<size_t>(block)], token % given.layer.block_size, head};
  std::vector<double> row = decode_exactly(layer.facts(side, head), layer.stored(side, place),
                                           layer.head_dim(side), layer.tensor_scale(side, head));
  if (!given.has_transforms) return row;
  const std::vector<float> stored(row.begin(), row.end());
  const std::vector<float> undone = side == Side::kKey ? k_transform_.undo(stored, head, block)
                                                       : v_transform_.undo(stored, head, 0);
  return {undone.begin(), undone.end()};
}

void AttendCall::check_head(const Query& query, int head, const std::string& what) {
  const int64_t kv_head = head / (given.num_q_heads / static_cast<int>(given.layer.num_heads));
  const double scale = given.softmax_scale != 0
                           ? static_cast<double>(given.softmax_scale)
                           : 1 / std::sqrt(static_cast<double>(given.layer.k_dim));
  const std::vector<float> query_numbers = q.row(query.row, head);
  std::vector<double> sum(static_cast<size_t>(out.head_dim));
  double total =
      given.has_sinks ? std::exp(static_cast<double>(sinks_[static_cast<size_t>(head)])) : 0;
  double largest = 0;  // of the values
  for (int64_t t = 0; t < given.table.lengths[static_cast<size_t>(query.sequence)]; ++t) {
    if (!sees(query, t)) continue;
    const std::vector<double> key = numbers(Side::kKey, query, t, kv_head);
    const std::vector<double> value = numbers(Side::kValue, query, t, kv_head);
    double score = 0;
    for (size_t d = 0; d < key.size(); ++d) {
      score += static_cast<double>(query_numbers[d]) * key[d];
    }
    score *= scale;
    const auto cap = static_cast<double>(given.softcap);
    if (cap > 0) score = cap * std::tanh(score / cap);
    const double weight = std::exp(score);
    total += weight;
    for (size_t d = 0; d < value.size(); ++d) {
      sum[d] += weight * value[d];
      largest = std::max(largest, std::fabs(value[d]));
    }
  }
  // 0.5 % of what leaving out a token changes, and the rounding of a 16-bit output.
  const double rounding = given.io == KVX_DTYPE_F32 ? 0 : given.io == KVX_DTYPE_F16 ? 0.001 : 0.005;
  const double allowed = (2e-4 + rounding) * std::max(largest, 1e-3);
  for (int d = 0; d < out.head_dim; ++d) {
    const double expected = total > 0 ? sum[static_cast<size_t>(d)] / total : 0;
    const auto found = static_cast<double>(out.get(query.row, head, d));
    require(std::fabs(found - expected) <= allowed,
            "{}: sequence {}, position {}, head {}, dim {} is {}, expected {} (to {:.2g})", what,
            query.sequence, query.position, head, d, found, expected, allowed);
    out.expect_row(memory, query.row, head, out.row(query.row, head));
  }
  if (lse_ == nullptr) return;
  const auto found = static_cast<double>(lse_[query.row * given.num_q_heads + head]);
  const bool is_right =
      total > 0 ? std::fabs(found - std::log(total)) <= 2e-4 : std::isinf(found) && found < 0;
  require(is_right, "{}: the LSE of sequence {}, position {}, head {} is {}, expected {}", what,
          query.sequence, query.position, head, found, std::log(total));
}

void AttendCall::must_attend(const Provider& provider, const std::string& what) {
  uint64_t bytes = 0;
  require_status(provider.attend_workspace(&args, &bytes), KVX_STATUS_OK, "kvx_attend_workspace");
  if (bytes != 0) {
    args.workspace = memory.add("workspace", static_cast<int64_t>(bytes)).data();
    args.workspace_bytes = bytes;
  }
  memory.take_picture();
  require_status(provider.attend(&args, nullptr), KVX_STATUS_OK, what);
  for (size_t s = 0; s < given.q_lens.size(); ++s) {
    const int64_t first_new = given.table.lengths[s] - given.q_lens[s];
    for (int32_t i = 0; i < given.q_lens[s]; ++i) {
      const Query query = {static_cast<int>(s), starts_[s] + i, first_new + i, first_new};
      for (int head = 0; head < given.num_q_heads; ++head) check_head(query, head, what);
    }
  }
  // The numbers were compared above. All other bytes must be unchanged.
  for (int64_t i = 0; lse_ != nullptr && i < q.num_tokens * given.num_q_heads * 4; ++i) {
    const auto* byte = reinterpret_cast<uint8_t*>(lse_) + i;
    *memory.expect(byte) = *byte;
  }
  for (uint64_t i = 0; i < bytes; ++i) {
    const auto* byte = static_cast<uint8_t*>(args.workspace) + i;
    *memory.expect(byte) = *byte;
  }
  require_unchanged_but_expected(memory, what);
}

void AttendCall::must_refuse(const Provider& provider, kvx_status_t expected,
                             const std::string& what) {
  memory.take_picture();
  require_status(provider.attend(&args, nullptr), expected, what);
  require_unchanged_but_expected(memory, what + ", refused");
}

}  // namespace kvx::conformance
