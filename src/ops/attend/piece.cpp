// Attention of one piece: decode a tile of keys, score it, absorb the scores into the rows' softmax
// states, decode the tile of values, add them up; at the end the sink, the transforms and the
// output.
#include "ops/attend/piece.hpp"

#include <algorithm>

#include "ops/side_rows.hpp"

namespace kvx::ops {
namespace {

enum class Side { kKey, kValue };

class Piece {
 public:
  Piece(const AttendPlan& plan, int sequence, int64_t first_row, int kv_head,
        AttendScratch& scratch)
      : plan_(plan),
        args_(plan.args),
        kernels_(*plan.context.kernels),
        math_(plan.math),
        sequence_(sequence),
        kv_head_(kv_head),
        seq_len_(args_.seq_lens[sequence]),
        q_len_(args_.q_starts[sequence + 1] - args_.q_starts[sequence]),
        first_row_(first_row),
        num_rows_(static_cast<int>(
            std::min<int64_t>(plan.tiling.rows, int64_t{q_len_} * plan.q_per_kv - first_row))),
        rows_(scratch.rows) {
    const Tiling& t = plan.tiling;
    queries_ = scratch.floats;
    sums_ = queries_ + t.rows * plan.key_dim;
    scores_ = sums_ + t.rows * plan.value_dim;
    tile_ = scores_ + t.rows * t.tokens;
    key_rows_ = tile_ + t.tokens * std::max(plan.key_dim, plan.value_dim);
  }

  void run() {
    load_queries();
    int begin = seq_len_;
    int end = 0;
    for (int r = 0; r < num_rows_; ++r) {
      begin = std::min(begin, rows_[r].first_token);
      end = std::max(end, rows_[r].end_token);
    }
    std::fill_n(sums_, num_rows_ * plan_.value_dim, 0.0f);
    for (int token = begin; token < end;) {
      const int n = std::min(plan_.tiling.tokens, end - token);
      attend_tile(token, n);
      token += n;
    }
    for (int r = 0; r < num_rows_; ++r) finish_row(r);
  }

 private:
  // Row r of the piece is this token of the sequence's new ones, and this query head.
  int new_token(int r) const { return static_cast<int>((first_row_ + r) / plan_.q_per_kv); }
  int q_head(int r) const {
    return kv_head_ * plan_.q_per_kv + static_cast<int>((first_row_ + r) % plan_.q_per_kv);
  }
  int64_t q_token(int r) const { return int64_t{args_.q_starts[sequence_]} + new_token(r); }
  int first_new_token() const { return seq_len_ - q_len_; }

  // q' = H(q / factor), and the bias of K's mean, with the query as it came.
  void load_queries() {
    const SideTransform& k = args_.transform.k;
    const int dim = plan_.key_dim;
    for (int r = 0; r < num_rows_; ++r) {
      float* query = queries_ + r * dim;
      const int head = q_head(r);
      kernels_.load_floats(args_.q.dtype, args_.q.row(q_token(r), head), dim, query);
      const int position = first_new_token() + new_token(r);
      rows_[r] = {};
      rows_[r].end_token = args_.tree_mask ? seq_len_ : position + 1;
      rows_[r].first_token = args_.window > 0 ? std::max(0, position - args_.window + 1) : 0;
      if (k.mean) rows_[r].bias = math_.dot(query, k.mean + kv_head_ * dim, dim);
      if (k.factor) {
        const float* factor = k.factor + kv_head_ * dim;
        for (int d = 0; d < dim; ++d) query[d] /= factor[d];
      }
    }
    if (k.hadamard) kernels_.hadamard_rows(queries_, num_rows_, dim);
  }

  // Tokens [first, first + n) of the sequence.
  void attend_tile(int first, int n) {
    const bool has_hidden = hides_some(first, n);
    score_tile(first, n);
    if (has_hidden) hide(first, n);
    for (int r = 0; r < num_rows_; ++r) {
      math_.absorb_scores(scores_ + r * plan_.tiling.tokens, n, rows_[r].softmax,
                          sums_ + r * plan_.value_dim, plan_.value_dim);
    }
    decode<Side::kValue>(first, n, tile_);
    if (has_hidden && !math_.all_finite(tile_, n * plan_.value_dim)) {
      return add_seen_values(first, n);
    }
    math_.add_product({scores_, plan_.tiling.tokens, tile_, plan_.value_dim, sums_, plan_.value_dim,
                       num_rows_, n, plan_.value_dim});
  }

  void score_tile(int first, int n) {
    const int stride = plan_.tiling.tokens;
    const int dim = plan_.key_dim;
    for (int i = 0; i < n; i += plan_.tiling.key_chunk) {
      const int count = std::min(plan_.tiling.key_chunk, n - i);
      decode<Side::kKey>(first + i, count, key_rows_);
      math_.transpose(key_rows_, count, dim, tile_ + i, stride);
    }
    std::fill_n(scores_, num_rows_ * stride, 0.0f);
    math_.add_product({queries_, dim, tile_, stride, scores_, stride, num_rows_, dim, n});
    if (args_.transform.k.block_offset) add_block_offsets(first, n);
    for (int r = 0; r < num_rows_; ++r) {
      math_.scale_scores(scores_ + r * stride, n, rows_[r].bias, args_.softmax_scale,
                         args_.softcap);
    }
  }

  // q . offset = q' . H(offset * factor), added to the scores of the block's tokens.
  void add_block_offsets(int first, int n) {
    const SideTransform& k = args_.transform.k;
    const int dim = plan_.key_dim;
    const int block_size = args_.packed.block_size;
    for (int token = first; token < first + n;) {
      const int block = token / block_size;
      const int end =
          static_cast<int>(std::min<int64_t>(int64_t{block + 1} * block_size, int64_t{first} + n));
      const float* offset =
          k.block_offset + (int64_t{block} * args_.packed.num_kv_heads + kv_head_) * dim;
      std::copy_n(offset, dim, key_rows_);
      if (k.factor) {
        for (int d = 0; d < dim; ++d) key_rows_[d] *= k.factor[kv_head_ * dim + d];
      }
      if (k.hadamard) kernels_.hadamard_rows(key_rows_, 1, dim);
      for (int r = 0; r < num_rows_; ++r) {
        const float score = math_.dot(queries_ + r * dim, key_rows_, dim);
        float* scores = scores_ + r * plan_.tiling.tokens;
        for (int t = token; t < end; ++t) scores[t - first] += score;
      }
      token = end;
    }
  }

  bool sees(int r, int token) const {
    if (token < rows_[r].first_token || token >= rows_[r].end_token) return false;
    const int j = token - first_new_token();
    return !args_.tree_mask || j < 0 ||
           args_.tree_mask[q_token(r) * args_.tree_mask_stride + j] != 0;
  }

  bool hides_some(int first, int n) const {
    if (args_.tree_mask && first + n > first_new_token()) return true;
    for (int r = 0; r < num_rows_; ++r) {
      if (rows_[r].first_token > first || rows_[r].end_token < first + n) return true;
    }
    return false;
  }

  void hide(int first, int n) {
    for (int r = 0; r < num_rows_; ++r) {
      float* scores = scores_ + r * plan_.tiling.tokens;
      for (int i = 0; i < n; ++i) {
        if (!sees(r, first + i)) scores[i] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  // A hidden token has probability 0, but 0 * NaN is NaN: here every row adds just what it sees.
  void add_seen_values(int first, int n) {
    const int dim = plan_.value_dim;
    for (int r = 0; r < num_rows_; ++r) {
      for (int i = 0; i < n; ++i) {
        if (!sees(r, first + i)) continue;
        math_.add_product({scores_ + r * plan_.tiling.tokens + i, 1, tile_ + i * dim, dim,
                           sums_ + r * dim, dim, 1, 1, dim});
      }
    }
  }

  bool is_wide(int block) const {
    return args_.wide_head_blocks &&
           (block < args_.wide_head_blocks[sequence_] || block >= args_.wide_tail_block[sequence_]);
  }

  // rows: [n, head_dim], from the blocks in which the tokens lie.
  template <Side S>
  void decode(int first, int n, float* rows) const {
    const int block_size = args_.packed.block_size;
    for (int token = first; token < first + n;) {
      const int block = token / block_size;
      const int offset = token % block_size;
      const int count = std::min(block_size - offset, first + n - token);
      const LayerView& view = is_wide(block) ? args_.wide : args_.packed;
      const HeadRun& run = run_of_head(view, kv_head_);
      const SideView& side = S == Side::kKey ? run.k : run.v;
      const TokenRun tokens = {args_.block_table.at(sequence_, block), offset, count};
      kernels_.of(side.spec).decode_rows(decode_job(side, kv_head_ - run.first_head, tokens,
                                                    cpu::DecodeFor::kAttend,
                                                    rows + (token - first) * side.head_dim));
      token += count;
    }
  }

  // The sink joins the softmax, V's transform is undone, and the mean of V counts for all of the
  // probability that tokens have.
  void finish_row(int r) {
    const SideTransform& v = args_.transform.v;
    const int dim = plan_.value_dim;
    const SoftmaxState& tokens = rows_[r].softmax;
    const SoftmaxState whole =
        args_.sinks ? merge(tokens, SoftmaxState{args_.sinks[q_head(r)], 1.0f}) : tokens;
    const float weight = output_weight(tokens, whole);

    float* out = sums_ + r * dim;
    for (int d = 0; d < dim; ++d) out[d] *= weight;
    if (v.hadamard) kernels_.hadamard_rows(out, 1, dim);
    if (v.factor) {
      for (int d = 0; d < dim; ++d) out[d] /= v.factor[kv_head_ * dim + d];
    }
    if (v.mean) {
      const float probability = tokens.sum * weight;
      for (int d = 0; d < dim; ++d) out[d] += probability * v.mean[kv_head_ * dim + d];
    }
    const int64_t token = q_token(r);
    kernels_.store_floats(args_.out.dtype, out, dim, args_.out.row(token, q_head(r)));
    if (args_.lse) args_.lse[token * args_.num_q_heads + q_head(r)] = whole.log_sum_exp();
  }

  const AttendPlan& plan_;
  const AttendArgs& args_;
  const cpu::KernelTable& kernels_;
  const cpu::TileKernels& math_;
  int sequence_;
  int kv_head_;
  int seq_len_;
  int q_len_;
  int64_t first_row_;  // of the sequence's q_len * q_per_kv rows
  int num_rows_;

  QueryRow* rows_;   // [num_rows]
  float* queries_;   // [tiling.rows, key_dim]
  float* sums_;      // [tiling.rows, value_dim]
  float* scores_;    // [tiling.rows, tiling.tokens]
  float* tile_;      // keys [key_dim, tiling.tokens], then values [tiling.tokens, value_dim]
  float* key_rows_;  // [tiling.key_chunk, key_dim]
};

// The last sequence whose slots begin at or before `slot`.
int sequence_of_slot(const AttendPlan& plan, int64_t slot) {
  int low = 0;
  int high = plan.args.num_sequences - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (first_slot(plan, middle) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

void attend_piece(const AttendPlan& plan, int64_t piece) {
  const int64_t slot = piece / plan.args.packed.num_kv_heads;
  const int kv_head = static_cast<int>(piece % plan.args.packed.num_kv_heads);
  const int sequence = sequence_of_slot(plan, slot);
  const int64_t first_row = (slot - first_slot(plan, sequence)) * plan.tiling.rows;
  const int64_t q_len = plan.args.q_starts[sequence + 1] - plan.args.q_starts[sequence];
  if (first_row >= q_len * plan.q_per_kv) return;
  AttendScratch scratch;
  Piece(plan, sequence, first_row, kv_head, scratch).run();
}

}  // namespace kvx::ops
