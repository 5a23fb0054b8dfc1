// KvCache: cuts inside pages whose shared scales grow, by Speculation.
#include <algorithm>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

bool KvCache::has_growing_pages() const {
  return !has_full_precision_window() && std::ranges::any_of(groups_, [](const GroupPlan& group) {
    return group.packed.page_scale_bytes > 0;
  });
}

Status KvCache::create_speculations() {
  const int most = config_.max_speculative_tokens;
  if (most < 0 || most > config_.max_tokens_per_sequence) {
    return invalid_argument("max_speculative_tokens is {}; expected 0 to {}", most,
                            config_.max_tokens_per_sequence);
  }
  if (most == 0 || !has_growing_pages()) return {};
  const CacheGeometry& geometry = config_.geometry;
  cache::Memory& memory = place_ ? *place_->memory : cache::host_memory();
  for (int s = 0; s < config_.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(
        Speculation speculation,
        Speculation::create(memory, {geometry.num_layers, geometry.num_kv_heads,
                                     geometry.k_head_dim, geometry.v_head_dim, most}));
    speculations_.push_back(std::move(speculation));
  }
  return {};
}

// Requires: 0 <= num_tokens <= num_tokens_before.
Status KvCache::check_cut(int sequence, int64_t num_tokens, int64_t num_tokens_before) const {
  if (!cuts_growing_page(num_tokens, num_tokens_before)) return {};
  const bool is_speculative = !speculations_.empty() && speculations_[sequence].is_open() &&
                              num_tokens >= speculations_[sequence].first_token();
  if (!is_speculative) {
    return unsupported(
        "sequence {} would be cut to {} tokens, inside a page whose shared scale may have grown; "
        "expected a multiple of block_size {}, or tokens of speculative steps "
        "(max_speculative_tokens is {}), or a fork made before the append",
        sequence, num_tokens, config_.block_size, config_.max_speculative_tokens);
  }
  const int64_t block = num_tokens / config_.block_size;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const int block_class = packed_class(g);
    const int32_t id = sequences_[sequence].table(g)[block];
    if (id == cache::kNoBlock) continue;  // a window has let go of it: Sequence::truncate refuses
    const bool is_own = pool_->use_count(block_class, id) == 1 && !pool_->is_kept(block_class, id);
    if (is_own || pool_->num_available(block_class) > 0) continue;
    return out_of_range("the page that is cut is shared; none of {} blocks of {} is free",
                        pool_->num_blocks(block_class), pool_->name(block_class));
  }
  return {};
}

// The sequence ends after num_tokens, of num_written that its blocks hold. Requires: check_cut().
Status KvCache::cut(Verbs& verbs, int sequence, int64_t num_tokens, int64_t num_written) {
  const bool cuts_page = cuts_growing_page(num_tokens, num_written);
  KVX_RETURN_IF_ERROR(sequences_[sequence].truncate(*pool_, num_tokens));
  if (speculations_.empty() || !speculations_[sequence].is_open()) return {};
  speculations_[sequence].cut(std::max(num_tokens, speculations_[sequence].first_token()));
  return cuts_page ? restore_page(verbs, sequence) : Status();
}

// The open page as it was with its tokens alone.
Status KvCache::restore_page(Verbs& verbs, int sequence) {
  cache::Sequence& blocks = sequences_[sequence];
  const Speculation& speculation = speculations_[sequence];
  // A page that others use, or the prefix index keeps, is not written: another takes its place.
  std::vector<cache::OpenBlockCopy> new_pages;
  KVX_RETURN_IF_ERROR(blocks.acquire_copies(*pool_, new_pages));
  KVX_RETURN_IF_ERROR(blocks.commit_copies(*pool_, new_pages));
  const int64_t page = blocks.num_tokens() / config_.block_size;
  const int64_t page_begin = page * config_.block_size;
  const auto num_kept = static_cast<int>(speculation.first_token() - page_begin);
  for (int g = 0; num_kept > 0 && g < static_cast<int>(groups_.size()); ++g) {
    const ops::BlockCopy kept{speculation.kept_page(g), blocks.table(g)[page], num_kept};
    KVX_RETURN_IF_ERROR(verbs.copy_blocks(layer_copies(g, CopyKind::kPacked), {&kept, 1}));
  }
  return append_again(verbs, sequence, std::max(page_begin, speculation.first_token()));
}

// The rows from first_token on, in the runs that they came in.
Status KvCache::append_again(Verbs& verbs, int sequence, int64_t first_token) {
  const cache::Sequence& blocks = sequences_[sequence];
  const Speculation& speculation = speculations_[sequence];
  const auto num_tokens = static_cast<size_t>(blocks.num_tokens() - first_token);
  if (num_tokens == 0) return {};
  std::vector<int64_t> positions(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) positions[i] = first_token + static_cast<int64_t>(i);
  std::vector<std::vector<int64_t>> slots(groups_.size(), std::vector<int64_t>(num_tokens));
  StepTables tables;
  tables.positions = positions;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    blocks.slots(g, first_token, slots[g]);
    tables.groups.push_back({slots[g], {}, {}, {}, 0});
  }
  KVX_RETURN_IF_ERROR(verbs.place(tables));
  for (const Speculation::Run& run : speculation.runs_from(first_token)) {
    const auto at = static_cast<size_t>(run.first - first_token);
    const auto count = static_cast<size_t>(run.count);
    for (int layer = 0; layer < config_.geometry.num_layers; ++layer) {
      const LoggedRows rows = speculation.rows(layer, run);
      ops::AppendArgs args;
      args.cache = layers_[layer]->packed();
      args.transform = layers_[layer]->transform();
      args.k = rows.k;
      args.v = rows.v;
      args.slot_mapping = tables.groups[group_of_layer_[layer]].slots.subspan(at, count);
      args.positions = tables.positions.subspan(at, count);
      KVX_RETURN_IF_ERROR(verbs.append(args));
    }
  }
  return {};
}

}  // namespace kvx::kv
