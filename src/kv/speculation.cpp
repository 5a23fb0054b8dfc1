// Speculation: a user more of one block a group, and a log of rows.
#include "kv/speculation.hpp"

#include <algorithm>

namespace kvx::kv {
namespace {

constexpr int64_t kMostBytes = 4;  // of a number that append takes

int64_t side_bytes(const SpeculationShape& shape, int head_dim) {
  return int64_t{shape.max_tokens} * shape.num_kv_heads * head_dim * kMostBytes;
}

int64_t layer_bytes(const SpeculationShape& shape) {
  return side_bytes(shape, shape.k_head_dim) + side_bytes(shape, shape.v_head_dim);
}

FloatRows as_input(const MutableFloatRows& rows) {
  return {rows.data, rows.dtype, rows.token_stride, rows.head_stride};
}

// A token's rows have room for the widest type, whatever theirs is.
MutableFloatRows place_of(uint8_t* side, int64_t token, DType type, int num_heads, int head_dim) {
  const int64_t row_bytes = int64_t{num_heads} * head_dim * kMostBytes;
  return {side + token * row_bytes, type, row_bytes / bytes_of(type), head_dim};
}

}  // namespace

Result<Speculation> Speculation::create(cache::Memory& memory, const SpeculationShape& shape) {
  KVX_ASSIGN_OR_RETURN(cache::Region rows, memory.allocate(shape.num_layers * layer_bytes(shape),
                                                           "rows of speculative tokens"));
  return Speculation(std::move(rows), shape);
}

Status Speculation::open(cache::BlockPool& pool, const cache::SequenceShape& groups,
                         const cache::Sequence& sequence) {
  release(pool);
  const int64_t open_block = sequence.num_tokens() / groups.block_size;
  const bool has_page = sequence.num_tokens() % groups.block_size != 0;
  pages_.assign(groups.groups.size(), {});
  is_open_ = true;
  first_token_ = sequence.num_tokens();
  for (int g = 0; has_page && g < static_cast<int>(pages_.size()); ++g) {
    const int block_class = groups.groups[g].packed_class;
    const int32_t id = sequence.table(g)[open_block];
    const Status retained = pool.retain(block_class, id);
    if (!retained.ok()) {
      release(pool);
      return retained;
    }
    pages_[g] = {block_class, id};
  }
  return {};
}

void Speculation::release(cache::BlockPool& pool) {
  for (Page& page : pages_) {
    if (page.id != cache::kNoBlock) (void)pool.release(page.block_class, page.id);
    page.id = cache::kNoBlock;
  }
  is_open_ = false;
  logged_tokens_ = 0;
  steps_.clear();
}

// ---- rows

MutableFloatRows Speculation::k_place(int layer, int64_t token, DType type) const {
  return place_of(rows_.data() + layer * layer_bytes(shape_), token - first_token_, type,
                  shape_.num_kv_heads, shape_.k_head_dim);
}

MutableFloatRows Speculation::v_place(int layer, int64_t token, DType type) const {
  uint8_t* const keys = rows_.data() + layer * layer_bytes(shape_);
  return place_of(keys + side_bytes(shape_, shape_.k_head_dim), token - first_token_, type,
                  shape_.num_kv_heads, shape_.v_head_dim);
}

void Speculation::begin_step(int num_tokens) {
  steps_.push_back({{end(), num_tokens}, std::vector<RowTypes>(shape_.num_layers)});
  logged_tokens_ += num_tokens;
}

Status Speculation::log(Verbs& verbs, int layer, FloatRows k, FloatRows v) {
  Step& step = steps_.back();
  step.types[layer] = {k.dtype, v.dtype};
  const int64_t first = step.run.first;
  KVX_RETURN_IF_ERROR(verbs.copy_rows(k, k_place(layer, first, k.dtype),
                                      {step.run.count, shape_.num_kv_heads, shape_.k_head_dim}));
  if (shape_.v_head_dim == 0) return {};
  return verbs.copy_rows(v, v_place(layer, first, v.dtype),
                         {step.run.count, shape_.num_kv_heads, shape_.v_head_dim});
}

void Speculation::cancel_step() {
  logged_tokens_ -= steps_.back().run.count;
  steps_.pop_back();
}

void Speculation::cut(int64_t num_tokens) {
  while (!steps_.empty() && steps_.back().run.first >= num_tokens) steps_.pop_back();
  if (!steps_.empty()) {
    Run& last = steps_.back().run;
    last.count = static_cast<int>(std::min<int64_t>(last.count, num_tokens - last.first));
  }
  logged_tokens_ = static_cast<int>(std::min<int64_t>(logged_tokens_, num_tokens - first_token_));
}

std::vector<Speculation::Run> Speculation::runs_from(int64_t first) const {
  std::vector<Run> runs;
  for (const Step& step : steps_) {
    const int64_t begin = std::max(first, step.run.first);
    const int64_t end = step.run.first + step.run.count;
    if (begin < end) runs.push_back({begin, static_cast<int>(end - begin)});
  }
  return runs;
}

LoggedRows Speculation::rows(int layer, const Run& run) const {
  const auto is_its_step = [&run](const Step& step) {
    return run.first < step.run.first + step.run.count;
  };
  const Step& step = *std::find_if(steps_.begin(), steps_.end(), is_its_step);
  const auto [k_type, v_type] = step.types[layer];
  LoggedRows rows{as_input(k_place(layer, run.first, k_type)), {}};
  if (shape_.v_head_dim > 0) rows.v = as_input(v_place(layer, run.first, v_type));
  return rows;
}

}  // namespace kvx::kv
