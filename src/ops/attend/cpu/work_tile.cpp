// Attention of one work tile: score a tile of keys, absorb the scores into the rows' softmax
// states, add the tile's values up; at the end the sink, the transforms and the output. Tiles are
// read as they are stored where the level has kernels for it, and decoded first where not.
#include "ops/attend/cpu/work_tile.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "ops/attend/cpu/matrix/tile.hpp"
#include "ops/attend/tile_reader.hpp"

namespace kvx::ops {
namespace {

// One sequence's rows [first_row, first_row + num_rows) at KV heads from first_head on.
struct WorkTileRows {
  int sequence;
  int first_head;
  int64_t first_row;  // of the sequence's q_len * q_per_kv rows
  int num_rows;       // 0: the slot is empty
};

// The rows of one KV head of a work tile.
class WorkTileHead {
 public:
  // head counts from the work tile's first.
  WorkTileHead(const CpuAttendPlan& plan, const WorkTileRows& place, int head,
               AttendScratch& scratch)
      : plan_(plan),
        args_(plan.args),
        kernels_(*plan.context.kernels),
        math_(plan.math),
        reader_(plan, place.sequence, place.first_head + head),
        sequence_(place.sequence),
        kv_head_(place.first_head + head),
        seq_len_(args_.seq_lens[place.sequence]),
        q_len_(args_.q_starts[place.sequence + 1] - args_.q_starts[place.sequence]),
        key_dim_(reader_.first_segment_dim()),
        first_row_(place.first_row),
        num_rows_(place.num_rows),
        sinks_(args_.window > 0 ? args_.window_sinks : 0),
        rows_(scratch.rows + head * plan.tiling.rows),
        prefetcher_(scratch.prefetcher) {
    const Tiling& t = plan.tiling;
    const int floats_a_head = head_floats(t, plan.key_dim, plan.value_dim);
    queries_ = scratch.floats + head * floats_a_head;
    prepared_ = queries_ + t.rows * plan.key_dim;
    sums_ = prepared_ + t.rows * plan.key_dim;
    scores_ = scratch.floats + plan.heads_together * floats_a_head;
    tile_ = scores_ + t.rows * t.tokens;
    key_rows_ = tile_ + t.num_tiles * t.tokens * std::max(plan.key_dim, plan.value_dim);
    matrix_.emplace(plan, reader_, num_rows_, MatrixTiles::Memory{prepared_, tile_, key_rows_},
                    prefetcher_);
  }

  void begin() {
    load_queries();
    matrix_->begin(queries_);
    std::fill_n(sums_, num_rows_ * plan_.value_dim, 0.0f);
  }

  const TileReader& reader() const { return reader_; }
  int sinks() const { return sinks_; }
  int first_seen() const {
    int first = seq_len_;
    for (int r = 0; r < num_rows_; ++r) first = std::min(first, rows_[r].first_token);
    return first;
  }
  int end_seen() const {
    int end = 0;
    for (int r = 0; r < num_rows_; ++r) end = std::max(end, rows_[r].end_token);
    return end;
  }

  void attend_tile(const TileRows& tile) {
    const int first = tile.first_token;
    const int n = tile.num_tokens;
    const bool has_hidden = hides_some(first, n);
    if (matrix_->is_used() && !has_hidden && has_plain_scores(args_) &&
        matrix_->attend_tile(tile, rows_, args_.softmax_scale, scores_, sums_)) {
      return;
    }
    score_tile(tile);
    absorb_scores(first, n, has_hidden);
    if (matrix_->is_used() && matrix_->add_values(first, n, scores_, sums_)) return;
    if (!has_hidden && add_packed_values(tile)) return;
    reader_.decode(Side::kValue, first, n, tile_);
    if (has_hidden && !math_.all_finite(tile_, n * plan_.value_dim)) {
      return add_seen_values(first, n);
    }
    math_.add_product({scores_, plan_.tiling.tokens, tile_, plan_.value_dim, sums_, plan_.value_dim,
                       num_rows_, n, plan_.value_dim});
  }

  void finish() {
    for (int r = 0; r < num_rows_; ++r) finish_row(r);
  }

  // Stores the rows' states and sums in `result`, [floats_per_head].
  void store_result(float* result) const {
    for (int r = 0; r < num_rows_; ++r) {
      float* row = result + int64_t{r} * (plan_.value_dim + 2);
      row[0] = rows_[r].softmax.sum;
      row[1] = rows_[r].softmax.max;
      std::copy_n(sums_ + r * plan_.value_dim, plan_.value_dim, row + 2);
    }
  }

  // results: [num_parts], floats_per_part() apart, as store_result wrote them. They are added in
  // this order.
  void merge_results(const float* results) {
    for (int r = 0; r < num_rows_; ++r) {
      const auto row_of = [&](int part) {
        return results + part * plan_.floats_per_part() + int64_t{r} * (plan_.value_dim + 2);
      };
      SoftmaxState whole;
      for (int part = 0; part < plan_.split.num_parts; ++part) {
        whole = merge(whole, SoftmaxState{row_of(part)[1], row_of(part)[0]});
      }
      float* sums = sums_ + r * plan_.value_dim;
      std::fill_n(sums, plan_.value_dim, 0.0f);
      for (int part = 0; part < plan_.split.num_parts; ++part) {
        const float* row = row_of(part);
        const SoftmaxState state = {row[1], row[0]};
        if (state.sum == 0) continue;
        const float factor = rescale(state, whole.max);
        for (int d = 0; d < plan_.value_dim; ++d) sums[d] += factor * row[2 + d];
      }
      rows_[r].softmax = whole;
      finish_row(r);
    }
  }

 private:
  // Row r of the work tile is this token of the sequence's new ones, and this query head.
  int new_token(int r) const { return static_cast<int>((first_row_ + r) / plan_.q_per_kv); }
  int q_head(int r) const {
    return kv_head_ * plan_.q_per_kv + static_cast<int>((first_row_ + r) % plan_.q_per_kv);
  }
  int64_t q_token(int r) const { return int64_t{args_.q_starts[sequence_]} + new_token(r); }
  int first_new_token() const { return seq_len_ - q_len_; }

  // Query r's numbers of each segment, as they came.
  void load_query(int r) {
    const uint8_t* query = args_.q.row(q_token(r), q_head(r));
    int first = 0;
    for (const LayerView* view = &args_.packed; view != nullptr; view = view->next_segment) {
      const int dim = view->runs.front().k.head_dim;
      kernels_.load_floats(args_.q.dtype, query + first * bytes_of(args_.q.dtype), dim,
                           segment_queries(first) + r * dim);
      first += dim;
    }
  }
  // [num_rows, numbers of the segment]; first: its first number in a row.
  float* segment_queries(int first) const { return queries_ + plan_.tiling.rows * first; }

  // q' = H(q / factor), and the bias of K's mean, with the query as it came.
  void load_queries() {
    const SideTransform& k = args_.transform.k;
    const int dim = key_dim_;
    for (int r = 0; r < num_rows_; ++r) {
      float* query = queries_ + r * dim;
      load_query(r);
      const int position = first_new_token() + new_token(r);
      rows_[r] = {};
      rows_[r].end_token = args_.tree_mask || !args_.is_causal ? seq_len_ : position + 1;
      rows_[r].first_token = args_.window > 0 ? std::max(0, position - args_.window + 1) : 0;
      if (k.mean) rows_[r].bias = math_.dot(query, k.mean + kv_head_ * dim, dim);
      if (k.factor) {
        const float* factor = k.factor + kv_head_ * dim;
        for (int d = 0; d < dim; ++d) query[d] /= factor[d];
      }
    }
    if (k.hadamard) kernels_.hadamard_rows(queries_, num_rows_, dim);
  }

  // Scores become probabilities up to the rows' factors.
  void absorb_scores(int first, int n, bool has_hidden) {
    const int stride = plan_.tiling.tokens;
    const int dim = plan_.value_dim;
    prefetcher_.pace(cpu::PhaseShares::kSoftmax, num_rows_);
    for (int r = 0; r < num_rows_; ++r) prefetcher_.step();
    if (n == cpu::kMaxTileTokens && !has_hidden && args_.softcap == 0) {
      return math_.absorb_tile({.scores = scores_,
                                .scores_stride = stride,
                                .rows = rows_,
                                .num_rows = num_rows_,
                                .softmax_scale = args_.softmax_scale,
                                .sums = sums_,
                                .num_sums = dim});
    }
    for (int r = 0; r < num_rows_; ++r) {
      math_.scale_scores(scores_ + r * stride, n, rows_[r].bias, args_.softmax_scale,
                         args_.softcap);
    }
    if (has_hidden) hide(first, n);
    for (int r = 0; r < num_rows_; ++r) {
      math_.absorb_scores(scores_ + r * stride, n, rows_[r].softmax, sums_ + r * dim, dim);
    }
  }

  // scores_ = q . k, offsets of blocks included.
  void score_tile(const TileRows& tile) {
    const int first = tile.first_token;
    const int n = tile.num_tokens;
    const bool is_scored =
        matrix_->is_used() ? matrix_->score(first, n, scores_) : score_packed(tile);
    if (!is_scored) score_decoded(first, n);
    add_segment_scores(first, n);
    if (args_.transform.k.block_offset) add_block_offsets(first, n);
  }

  void add_segment_scores(int first, int n) {
    const int stride = plan_.tiling.tokens;
    int number = key_dim_;
    for (const LayerView* segment = reader_.more_segments(first); segment != nullptr;
         segment = segment->next_segment) {
      const int dim = segment->runs.front().k.head_dim;
      for (int i = 0; i < n; i += plan_.tiling.key_chunk) {
        const int count = std::min(plan_.tiling.key_chunk, n - i);
        reader_.decode_segment(*segment, first + i, count, key_rows_);
        math_.transpose(key_rows_, count, dim, tile_ + i, stride);
      }
      math_.add_product(
          {segment_queries(number), dim, tile_, stride, scores_, stride, num_rows_, dim, n});
      number += dim;
    }
  }

  void score_decoded(int first, int n) {
    const int stride = plan_.tiling.tokens;
    const int dim = key_dim_;
    for (int i = 0; i < n; i += plan_.tiling.key_chunk) {
      const int count = std::min(plan_.tiling.key_chunk, n - i);
      reader_.decode(Side::kKey, first + i, count, key_rows_);
      math_.transpose(key_rows_, count, dim, tile_ + i, stride);
    }
    std::fill_n(scores_, num_rows_ * stride, 0.0f);
    math_.add_product({queries_, dim, tile_, stride, scores_, stride, num_rows_, dim, n});
  }

  // False: there are no kernels for these rows, or they declined.
  bool score_packed(const TileRows& tile) {
    if (tile.keys.num_tokens == 0) return false;
    const cpu::PackedKernels* packed = reader_.kernels(Side::kKey, tile.first_token);
    if (num_rows_ > packed->most_rows) return false;
    if (prepared_for_ != tile.keys.spec) {
      packed->prepare_queries(*tile.keys.spec, key_dim_, queries_, num_rows_, prepared_);
      prepared_for_ = tile.keys.spec;
    }
    return packed->score({.keys = tile.keys,
                          .prefetcher = prefetcher_,
                          .queries = queries_,
                          .prepared = prepared_,
                          .num_rows = num_rows_,
                          .scores = scores_,
                          .scores_stride = plan_.tiling.tokens,
                          .scratch = tile_});
  }
  bool add_packed_values(const TileRows& tile) {
    if (tile.values.num_tokens == 0) return false;
    const cpu::PackedKernels* packed = reader_.kernels(Side::kValue, tile.first_token);
    if (num_rows_ > packed->most_rows) return false;
    return packed->add_values({.values = tile.values,
                               .prefetcher = prefetcher_,
                               .p = scores_,
                               .p_stride = plan_.tiling.tokens,
                               .num_rows = num_rows_,
                               .sums = sums_,
                               .scratch = tile_});
  }

  // q . offset = q' . H(offset * factor), added to the scores of the block's tokens.
  void add_block_offsets(int first, int n) {
    const SideTransform& k = args_.transform.k;
    const int dim = key_dim_;
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
    if (token < rows_[r].first_token && token >= sinks_) return false;
    if (token >= rows_[r].end_token) return false;
    const int j = token - first_new_token();
    return !args_.tree_mask || j < 0 ||
           args_.tree_mask[q_token(r) * args_.tree_mask_stride + j] != 0;
  }

  bool hides_some(int first, int n) const {
    if (args_.tree_mask && first + n > first_new_token()) return true;
    for (int r = 0; r < num_rows_; ++r) {
      const bool sees_first = rows_[r].first_token <= first || first + n <= sinks_;
      if (!sees_first || rows_[r].end_token < first + n) return true;
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

  const CpuAttendPlan& plan_;
  const AttendArgs& args_;
  const cpu::KernelTable& kernels_;
  const cpu::TileKernels& math_;
  TileReader reader_;
  int sequence_;
  int kv_head_;
  int seq_len_;
  int q_len_;
  int key_dim_;  // of the rows' first segment
  int64_t first_row_;
  int num_rows_;
  int sinks_;  // tokens that every query sees, whatever its window

  QueryRow* rows_;  // [num_rows]
  cpu::Prefetcher& prefetcher_;
  float* queries_;   // of each segment of a row in turn [tiling.rows, its numbers]
  float* prepared_;  // [tiling.rows, key_dim_], as packed kernels or the matrix unit want them
  float* sums_;      // [tiling.rows, value_dim]
  float* scores_;    // [tiling.rows, tiling.tokens]
  float* tile_;      // keys [key_dim, tiling.tokens], then values [tiling.tokens, value_dim]
  float* key_rows_;  // [tiling.key_chunk, the larger head_dim]
  const format::FormatSpec* prepared_for_ = nullptr;
  std::optional<MatrixTiles> matrix_;
};

// The heads of a work tile, tile by tile: all heads read a tile before any reads the next, so that
// rows that lie side by side are read together.
class WorkTile {
 public:
  WorkTile(const CpuAttendPlan& plan, const WorkTileRows& place, AttendScratch& scratch)
      : plan_(plan),
        num_heads_(plan.heads_together),
        tiles_(scratch.tiles),
        prefetcher_(scratch.prefetcher) {
    for (int h = 0; h < num_heads_; ++h) heads_[h].emplace(plan, place, h, scratch);
  }

  void attend_all() {
    for_heads([](WorkTileHead& head, int) { head.begin(); });
    const int begin = heads_[0]->first_seen();
    attend_tokens(0, std::min(heads_[0]->sinks(), begin));
    attend_tokens(begin, heads_[0]->end_seen());
    for_heads([](WorkTileHead& head, int) { head.finish(); });
  }

  // result: [floats_per_part]
  void attend_part(int part, float* result) {
    for_heads([](WorkTileHead& head, int) { head.begin(); });
    const int begin = heads_[0]->first_seen();
    const int end = heads_[0]->end_seen();
    const int64_t first_tile = begin / cpu::kMaxTileTokens * cpu::kMaxTileTokens;
    const int64_t part_begin = first_tile + int64_t{part} * plan_.split.part_tokens;
    const int64_t part_end = part_begin + plan_.split.part_tokens;
    if (part == 0) attend_tokens(0, std::min(heads_[0]->sinks(), begin));
    attend_tokens(static_cast<int>(std::clamp<int64_t>(part_begin, begin, end)),
                  static_cast<int>(std::clamp<int64_t>(part_end, begin, end)));
    for_heads([&](WorkTileHead& head, int h) {
      head.store_result(result + h * plan_.floats_per_head());
    });
  }

  // results: [num_parts, floats_per_part]
  void merge_results(const float* results) {
    for_heads([&](WorkTileHead& head, int h) {
      head.merge_results(results + h * plan_.floats_per_head());
    });
  }

 private:
  template <class Body>
  void for_heads(const Body& body) {
    for (int h = 0; h < num_heads_; ++h) body(*heads_[h], h);
  }

  void attend_tokens(int begin, int end) {
    const TileReader& reader = heads_[0]->reader();
    TileRows* tile = &tiles_[0];
    TileRows* next = &tiles_[1];
    reader.find(begin, begin < end ? reader.tile_length(begin, end) : 0, *tile);
    while (tile->num_tokens > 0) {
      const int after = tile->first_token + tile->num_tokens;
      reader.find(after, after < end ? reader.tile_length(after, end) : 0, *next);
      for_heads([&](WorkTileHead& head, int h) {
        prefetcher_.start_share(next->keys, next->values, h, num_heads_);
        if (h == 0) return head.attend_tile(*tile);
        TileRows& others = tiles_[2];
        head.reader().find(tile->first_token, tile->num_tokens, others);
        head.attend_tile(others);
      });
      std::swap(tile, next);
    }
  }

  const CpuAttendPlan& plan_;
  int num_heads_;
  std::optional<WorkTileHead> heads_[kMaxHeadsTogether];
  TileRows* tiles_;  // [3]: the first head's, its next, and another head's
  cpu::Prefetcher& prefetcher_;
};

// The last sequence whose slots begin at or before `slot`.
int sequence_of_slot(const CpuAttendPlan& plan, int64_t slot) {
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

WorkTileRows place_of(const CpuAttendPlan& plan, int64_t work_tile) {
  const int64_t slot = work_tile / plan.work_tiles_per_slot();
  const int sequence = sequence_of_slot(plan, slot);
  const int64_t first_row = (slot - first_slot(plan, sequence)) * plan.tiling.rows;
  const int64_t q_len = plan.args.q_starts[sequence + 1] - plan.args.q_starts[sequence];
  const int64_t rows_left = q_len * plan.q_per_kv - first_row;
  const auto first_head =
      static_cast<int>(work_tile % plan.work_tiles_per_slot()) * plan.heads_together;
  return {sequence, first_head, first_row,
          static_cast<int>(std::clamp<int64_t>(rows_left, 0, plan.tiling.rows))};
}

// The partial results of a work tile, [num_parts] of floats_per_part().
float* results_of(const CpuAttendPlan& plan, int64_t work_tile) {
  return plan.partial_results + work_tile * plan.split.num_parts * plan.floats_per_part();
}

// Never inlined: a work tile that needs little memory must not take the other's from its stack.
template <class Memory, class Body>
[[gnu::noinline]] void run_in(const CpuAttendPlan& plan, const WorkTileRows& place,
                              const Body& body) {
  Memory memory;
  memory.scratch.floats = memory.floats;
  memory.scratch.rows = memory.rows;
  WorkTile tile(plan, place, memory.scratch);
  body(tile);
}

template <class Body>
void run_work_tile(const CpuAttendPlan& plan, int64_t work_tile, const Body& body) {
  const WorkTileRows place = place_of(plan, work_tile);
  if (place.num_rows == 0) return;
  const int needed = scratch_floats(plan.tiling, plan.key_dim, plan.value_dim, plan.heads_together);
  const int num_rows = plan.tiling.rows * plan.heads_together;
  if (needed <= kScratchFloats && num_rows <= kMaxUsualRows) {
    return run_in<UsualMemory>(plan, place, body);
  }
  run_in<MatrixMemory>(plan, place, body);
}

}  // namespace

void attend_work_tile(const CpuAttendPlan& plan, int64_t work_tile) {
  run_work_tile(plan, work_tile, [](WorkTile& tile) { tile.attend_all(); });
}

void attend_part(const CpuAttendPlan& plan, int64_t work_tile, int part) {
  float* result = results_of(plan, work_tile) + part * plan.floats_per_part();
  run_work_tile(plan, work_tile, [=](WorkTile& tile) { tile.attend_part(part, result); });
}

void merge_parts(const CpuAttendPlan& plan, int64_t work_tile) {
  const float* results = results_of(plan, work_tile);
  run_work_tile(plan, work_tile, [=](WorkTile& tile) { tile.merge_results(results); });
}

}  // namespace kvx::ops
