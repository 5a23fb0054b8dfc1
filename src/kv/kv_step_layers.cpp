// KvStep: what the verbs read of an open step, and its layers.
#include <algorithm>

#include "kv/files/outgoing_sequence.hpp"
#include "kv/kv_step.hpp"
#include "ops/attend/check.hpp"

namespace kvx::kv {
namespace {

// A GPU's tiles begin at multiples of their own, before the window does: what they read there is
// hidden from every query, but a block must be there to be read.
void name_blocks_for_tiles(std::span<int32_t> row) {
  const auto is_there = [](int32_t id) { return id != cache::kNoBlock; };
  const auto first = std::find_if(row.begin(), row.end(), is_there);
  if (first != row.end()) std::replace(row.begin(), row.end(), cache::kNoBlock, *first);
}

template <class Rows>
Rows rows_from(Rows rows, int first_row) {
  if (rows.data != nullptr) rows.data = rows.row(first_row, 0);
  return rows;
}

}  // namespace

// Entries that stay in one block, and all entries without a full-precision window, are one pass
// with their neighbours. The others go block by block: each block that enters the window lets
// another leave it.
void KvStep::plan_passes() {
  passes_.clear();
  bool joins_the_last = false;
  int first_row = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int num_tokens = entries_[i].num_tokens;
    const cache::Sequence& sequence = table_.sequences[entries_[i].sequence];
    int64_t room =
        storage_.has_full_precision_window() ? sequence.tokens_left_in_block() : num_tokens;
    if (num_tokens <= room) {
      if (!joins_the_last) passes_.push_back({i, 0, first_row, 0, 0});
      ++passes_.back().num_entries;
      passes_.back().num_rows += num_tokens;
      joins_the_last = true;
    } else {
      joins_the_last = false;
      for (int first = 0; first < num_tokens;) {
        const auto count = static_cast<int>(std::min<int64_t>(room, num_tokens - first));
        passes_.push_back({i, 1, first_row + first, count, first});
        first += count;
        room = sequence.block_size();
      }
    }
    first_row += num_tokens;
  }
}

// How many tokens of the pass are its i-th entry's.
int KvStep::num_tokens_in(const Pass& pass, size_t i) const {
  return pass.num_entries == 1 ? pass.num_rows : entries_[pass.first_entry + i].num_tokens;
}

// Positions and lengths, slots and block tables, as the verbs take them. group: the only one whose
// layers will read them; -1: all do.
Status KvStep::describe(const Pass& pass, int group) {
  positions_.clear();
  q_starts_.assign(1, 0);
  seq_lens_.clear();
  tables_.max_q_len = 0;
  tables_.max_tokens = 0;
  for (size_t i = 0; i < pass.num_entries; ++i) {
    const int num_tokens = num_tokens_in(pass, i);
    const int64_t before = table_.sequences[entries_[pass.first_entry + i].sequence].num_tokens();
    const int64_t first = before + pass.first_token;
    const int64_t end = first + num_tokens;
    for (int64_t position = first; position < end; ++position) positions_.push_back(position);
    q_starts_.push_back(q_starts_.back() + num_tokens);
    seq_lens_.push_back(static_cast<int32_t>(end));
    tables_.max_q_len = std::max(tables_.max_q_len, num_tokens);
    tables_.max_tokens = std::max(tables_.max_tokens, end);
  }
  tables_.positions = positions_;
  tables_.q_starts = q_starts_;
  tables_.seq_lens = seq_lens_;
  tables_.groups.assign(groups_.size(), {});
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    if (group < 0 || g == group) describe_group(pass, g);
  }
  return verbs_->place(tables_);
}

void KvStep::describe_group(const Pass& pass, int g) {
  GroupStep& group = groups_[g];
  const int64_t block_size = storage_.config.block_size;
  group.slots.resize(positions_.size());
  group.row_stride = cache::blocks_for(tables_.max_tokens, block_size);
  group.block_ids.assign(group.row_stride * pass.num_entries, cache::kNoBlock);
  group.num_sink_blocks.clear();
  group.first_recent_block.clear();
  for (size_t i = 0; i < pass.num_entries; ++i) {
    const size_t entry = pass.first_entry + i;
    const cache::Sequence& sequence = table_.sequences[entries_[entry].sequence];
    const int64_t num_blocks = cache::blocks_for(seq_lens_[i], block_size);
    const std::span row(group.block_ids.data() + i * group.row_stride, num_blocks);
    sequence.blocks_at(g, growths_[entry], num_blocks, row);
    for (int t = q_starts_[i]; t < q_starts_[i + 1]; ++t) {
      const int64_t position = positions_[t];
      group.slots[t] = row[position / block_size] * block_size + position % block_size;
    }
    if (storage_.config.cuda) name_blocks_for_tiles(row);
    group.num_sink_blocks.push_back(static_cast<int32_t>(sequence.num_sink_blocks(g)));
    group.first_recent_block.push_back(
        static_cast<int32_t>(sequence.first_recent_block_at(g, growths_[entry], num_blocks)));
  }
  tables_.groups[g] = {group.slots, group.block_ids, group.num_sink_blocks,
                       group.first_recent_block, group.row_stride};
}

// ---- a layer

Status KvStep::check_layer(int layer) const {
  const int num_layers = storage_.config.geometry.num_layers;
  if (layer < 0 || layer >= num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer, num_layers - 1);
  }
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  return {};
}

// A step of several passes shows each pass the tokens before it, all of them.
Status KvStep::check_tree_mask(const AttentionParams& params) const {
  if (params.tree_mask == nullptr) return {};
  if (passes_.size() > 1) {
    return unsupported(
        "tree_mask is given for a step that goes over a block's end in a cache with a "
        "full-precision "
        "window; expected at most the {} tokens that a block holds from its open one on",
        storage_.config.block_size);
  }
  if (params.tree_mask_stride >= tables_.max_q_len) return {};
  return invalid_argument("tree_mask_stride is {}; expected at least {}, the tokens of an entry",
                          params.tree_mask_stride, tables_.max_q_len);
}

Status KvStep::append(int layer, FloatRows k, FloatRows v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  return run_passes(layer, k, v, nullptr);
}

Status KvStep::wait_for_loads(int layer) const {
  for (const auto& load : loads_) KVX_RETURN_IF_ERROR(table_.wait_for_layer(*load, layer));
  return {};
}

// attend: of all rows, without tables; null: nothing is asked of the rows.
Status KvStep::run_passes(int layer, FloatRows k, FloatRows v, const ops::AttendArgs* attend) {
  KVX_RETURN_IF_ERROR(wait_for_loads(layer));
  if (passes_.size() > 1) {
    if (layer_states_[layer] != LayerState::kUntouched) {
      return invalid_argument(
          "layer {} has rows of this step; a step that fills several blocks takes each layer once",
          layer);
    }
    layer_states_[layer] = LayerState::kBegun;
  }
  for (const Pass& pass : passes_) KVX_RETURN_IF_ERROR(run_pass(layer, pass, k, v, attend));
  layer_states_[layer] = LayerState::kComplete;
  for (const auto& leaving : outgoing_) leaving->take(*verbs_, layer);
  return log_rows(layer, k, v);
}

Status KvStep::run_pass(int layer, const Pass& pass, FloatRows k, FloatRows v,
                        const ops::AttendArgs* attend) {
  const LayerStore& store = *storage_.layers[layer];
  const int g = storage_.group_of_layer[layer];
  if (passes_.size() > 1) {
    KVX_RETURN_IF_ERROR(describe(pass, g));
    KVX_RETURN_IF_ERROR(pack_leaving_block(layer, pass));
  }
  const GroupTables& group = tables_.groups[g];
  ops::AppendArgs append;
  append.cache = storage_.has_full_precision_window() ? store.full_precision() : store.packed();
  append.transform = store.transform();
  append.k = rows_from(k, pass.first_row);
  append.v = rows_from(v, pass.first_row);
  append.slot_mapping = group.slots;
  append.positions = tables_.positions;
  KVX_RETURN_IF_ERROR(verbs_->append(append));
  if (attend == nullptr) return {};

  ops::AttendArgs args = *attend;
  args.q = rows_from(args.q, pass.first_row);
  args.out = rows_from(args.out, pass.first_row);
  set_tables(args, pass, group);
  return verbs_->attend(args, tables_);
}

// The block that the pass's block takes the place of, if the step itself has written it.
Status KvStep::pack_leaving_block(int layer, const Pass& pass) {
  if (pass.first_token == 0) return {};
  const cache::Sequence& sequence = table_.sequences[entries_[pass.first_entry].sequence];
  const cache::SequenceGrowth& growth = growths_[pass.first_entry];
  const int g = storage_.group_of_layer[layer];
  const int64_t end_block = cache::blocks_for(seq_lens_.front(), storage_.config.block_size);
  const std::optional<int64_t> leaving = sequence.block_leaving_at(g, growth, end_block);
  if (!leaving) return {};
  const LayerStore& store = *storage_.layers[layer];
  const LayerCopy packs{&store.full_precision_in_packed_runs(), &store.packed()};
  const ops::BlockCopy copy{growth.groups[g].id(*leaving), growth.groups[g].packed_id(*leaving),
                            storage_.config.block_size};
  return verbs_->copy_blocks({&packs, 1}, {&copy, 1});
}

void KvStep::set_tables(ops::AttendArgs& args, const Pass& pass, const GroupTables& group) const {
  if (storage_.has_full_precision_window()) {
    args.num_sink_blocks = group.num_sink_blocks.data();
    args.first_recent_block = group.first_recent_block.data();
  }
  args.num_sequences = static_cast<int>(pass.num_entries);
  args.block_table = {group.block_ids.data(), group.row_stride};
  args.max_blocks_per_sequence = group.row_stride;
  args.seq_lens = tables_.seq_lens.data();
  args.q_starts = tables_.q_starts.data();
}

// Only without a full-precision window: the step is one pass.
Status KvStep::log_rows(int layer, FloatRows k, FloatRows v) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!speculates(entries_[i])) continue;
    Speculation& speculation = table_.speculations[entries_[i].sequence];
    KVX_RETURN_IF_ERROR(
        speculation.log(*verbs_, layer, rows_from(k, q_starts_[i]), rows_from(v, q_starts_[i])));
  }
  return {};
}

Status KvStep::append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                                 FloatRows v, MutableFloatRows out) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const LayerStore& store = *storage_.layers[layer];
  const GroupPlan& group = storage_.groups[storage_.group_of_layer[layer]];
  ops::AttendArgs attend;
  attend.packed = store.packed();
  static constexpr int32_t kPlaceholder = 0;  // each pass has tables of its own
  if (storage_.has_full_precision_window()) {
    attend.full_precision = store.full_precision();
    attend.num_sink_blocks = attend.first_recent_block = &kPlaceholder;
  }
  attend.transform = store.transform();
  attend.num_q_heads = params.num_q_heads;
  attend.q = q;
  attend.out = out;
  attend.softmax_scale = params.softmax_scale;
  attend.softcap = params.softcap;
  attend.window = group.window;
  attend.window_sinks = group.sinks;
  attend.sinks = params.sinks;
  attend.precision = params.precision;
  attend.tree_mask = params.tree_mask;
  attend.tree_mask_stride = params.tree_mask_stride;
  KVX_RETURN_IF_ERROR(check_tree_mask(params));
  KVX_RETURN_IF_ERROR(ops::check_attend_shape(attend));  // before anything is written
  return run_passes(layer, k, v, &attend);
}

}  // namespace kvx::kv
