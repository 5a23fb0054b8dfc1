// KvStep: what the verbs read of an open step, and its layers.
#include <algorithm>

#include "kv/kv_step.hpp"
#include "ops/attend/check.hpp"

namespace kvx::kv {
namespace {

// A GPU's tiles begin at multiples of their own, before the window does: what they read there is
// hidden from every query, but a block must be there to be read.
void name_blocks_for_tiles(std::span<int32_t> row) {
  const auto is_there = [](int32_t id) { return id != cache::kNoBlock; };
  const auto known = std::find_if(row.begin(), row.end(), is_there);
  if (known != row.end()) std::replace(row.begin(), row.end(), cache::kNoBlock, *known);
}

}  // namespace

// Once a step, for all layers: slots, positions, lengths and block tables as the verbs take them.
Status KvStep::describe() {
  positions_.clear();
  q_starts_.assign(1, 0);
  seq_lens_.clear();
  tables_.max_q_len = 0;
  tables_.max_tokens = 0;
  for (const StepEntry& entry : entries_) {
    const int64_t first = cache_.sequences_[entry.sequence].num_tokens();
    const int64_t end = first + entry.num_tokens;
    for (int64_t position = first; position < end; ++position) positions_.push_back(position);
    q_starts_.push_back(q_starts_.back() + entry.num_tokens);
    seq_lens_.push_back(static_cast<int32_t>(end));
    tables_.max_q_len = std::max(tables_.max_q_len, entry.num_tokens);
    tables_.max_tokens = std::max(tables_.max_tokens, end);
  }
  tables_.positions = positions_;
  tables_.q_starts = q_starts_;
  tables_.seq_lens = seq_lens_;
  tables_.groups.resize(groups_.size());
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) describe_group(g);
  return verbs_->place(tables_);
}

void KvStep::describe_group(int g) {
  GroupStep& group = groups_[g];
  group.slots.resize(positions_.size());
  group.row_stride = 0;
  for (const StepEntry& entry : entries_) {
    group.row_stride =
        std::max(group.row_stride, cache_.sequences_[entry.sequence].table(g).size());
  }
  group.block_ids.assign(group.row_stride * entries_.size(), cache::kNoBlock);
  group.num_sink_blocks.clear();
  group.first_recent_block.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const cache::Sequence& sequence = cache_.sequences_[entries_[i].sequence];
    const std::span<int64_t> slots(group.slots.data() + q_starts_[i], entries_[i].num_tokens);
    sequence.slots(g, sequence.num_tokens(), slots);
    const cache::BlockTable& table = sequence.table(g);
    const std::span row(group.block_ids.data() + i * group.row_stride, group.row_stride);
    std::copy_n(table.data(), table.size(), row.begin());
    if (cache_.config_.cuda) name_blocks_for_tiles(row.first(table.size()));
    group.num_sink_blocks.push_back(static_cast<int32_t>(sequence.num_sink_blocks(g)));
    group.first_recent_block.push_back(static_cast<int32_t>(sequence.first_recent_block(g)));
  }
  tables_.groups[g] = {group.slots, group.block_ids, group.num_sink_blocks,
                       group.first_recent_block, group.row_stride};
}

// ---- a layer

Status KvStep::check_layer(int layer) const {
  const int num_layers = cache_.config_.geometry.num_layers;
  if (layer < 0 || layer >= num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer, num_layers - 1);
  }
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  return {};
}

Status KvStep::append(int layer, FloatRows k, FloatRows v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const LayerStore& store = *cache_.layers_[layer];
  ops::AppendArgs append;
  append.cache = cache_.has_full_precision_window() ? store.full_precision() : store.packed();
  append.transform = store.transform();
  append.k = k;
  append.v = v;
  append.slot_mapping = tables_.groups[cache_.group_of_layer_[layer]].slots;
  append.positions = tables_.positions;
  KVX_RETURN_IF_ERROR(verbs_->append(append));
  has_rows_[layer] = 1;
  return log_rows(layer, k, v);
}

Status KvStep::log_rows(int layer, FloatRows k, FloatRows v) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!speculates(entries_[i])) continue;
    FloatRows own_k = k, own_v = v;
    own_k.data = k.row(q_starts_[i], 0);
    if (v.data != nullptr) own_v.data = v.row(q_starts_[i], 0);
    KVX_RETURN_IF_ERROR(
        cache_.speculations_[entries_[i].sequence].log(*verbs_, layer, own_k, own_v));
  }
  return {};
}

Status KvStep::append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                                 FloatRows v, MutableFloatRows out) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const LayerStore& store = *cache_.layers_[layer];
  const int g = cache_.group_of_layer_[layer];
  const GroupTables& group = tables_.groups[g];
  ops::AttendArgs attend;
  attend.packed = store.packed();
  if (cache_.has_full_precision_window()) {
    attend.full_precision = store.full_precision();
    attend.num_sink_blocks = group.num_sink_blocks.data();
    attend.first_recent_block = group.first_recent_block.data();
  }
  attend.transform = store.transform();
  attend.num_sequences = static_cast<int>(entries_.size());
  attend.block_table = {group.block_ids.data(), group.row_stride};
  attend.max_blocks_per_sequence = group.row_stride;
  attend.seq_lens = tables_.seq_lens.data();
  attend.q_starts = tables_.q_starts.data();
  attend.num_q_heads = params.num_q_heads;
  attend.q = q;
  attend.out = out;
  attend.softmax_scale = params.softmax_scale;
  attend.softcap = params.softcap;
  attend.window = cache_.groups_[g].window;
  attend.window_sinks = cache_.groups_[g].sinks;
  attend.sinks = params.sinks;
  attend.precision = params.precision;
  KVX_RETURN_IF_ERROR(ops::check_attend_shape(attend));  // before anything is written
  KVX_RETURN_IF_ERROR(append(layer, k, v));
  return verbs_->attend(attend, tables_);
}

}  // namespace kvx::kv
