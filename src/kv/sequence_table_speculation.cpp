// SequenceTable: cuts inside pages whose shared scales grow, by Speculation.
#include <algorithm>

#include "kv/sequence_table.hpp"

namespace kvx::kv {

Status SequenceTable::create_speculations() {
  const int most = storage.config.max_speculative_tokens;
  if (most < 0 || most > storage.config.max_tokens_per_sequence) {
    return invalid_argument("max_speculative_tokens is {}; expected 0 to {}", most,
                            storage.config.max_tokens_per_sequence);
  }
  if (most == 0 || !storage.has_growing_pages()) return {};
  const CacheGeometry& geometry = storage.config.geometry;
  cache::Memory& memory = storage.device_or_host_memory();
  for (int s = 0; s < storage.config.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(
        Speculation speculation,
        Speculation::create(memory, {geometry.num_layers, geometry.num_kv_heads,
                                     geometry.k_head_dim, geometry.stored_v_head_dim(), most}));
    speculations.push_back(std::move(speculation));
  }
  return {};
}

// Requires: 0 <= num_tokens <= num_tokens_before.
Status SequenceTable::check_cut(int sequence, int64_t num_tokens, int64_t num_tokens_before) const {
  if (!cuts_growing_page(num_tokens, num_tokens_before)) return {};
  const bool is_speculative = !speculations.empty() && speculations[sequence].is_open() &&
                              num_tokens >= speculations[sequence].first_token();
  if (!is_speculative) {
    return unsupported(
        "sequence {} would be cut to {} tokens, inside a page whose shared scale may have grown; "
        "expected a multiple of block_size {}, or tokens of speculative steps "
        "(max_speculative_tokens is {}), or a fork made before the append",
        sequence, num_tokens, storage.config.block_size, storage.config.max_speculative_tokens);
  }
  const int64_t block = num_tokens / storage.config.block_size;
  for (int g = 0; g < static_cast<int>(storage.groups.size()); ++g) {
    const int block_class = storage.packed_class(g);
    const int32_t id = sequences[sequence].table(g)[block];
    if (id == cache::kNoBlock) continue;  // a window has released it: Sequence::truncate refuses
    const bool is_own =
        storage.pool->use_count(block_class, id) == 1 && !storage.pool->is_kept(block_class, id);
    if (is_own || storage.pool->num_available(block_class) > 0) continue;
    return out_of_range("the page that is cut is shared; none of {} blocks of {} is free",
                        storage.pool->num_blocks(block_class), storage.pool->name(block_class));
  }
  return {};
}

// The sequence ends after num_tokens, of num_written that its blocks hold. Requires: check_cut().
Status SequenceTable::cut(Verbs& verbs, int sequence, int64_t num_tokens, int64_t num_written) {
  const bool cuts_page = cuts_growing_page(num_tokens, num_written);
  KVX_RETURN_IF_ERROR(sequences[sequence].truncate(*storage.pool, num_tokens));
  if (speculations.empty() || !speculations[sequence].is_open()) return {};
  speculations[sequence].cut(std::max(num_tokens, speculations[sequence].first_token()));
  return cuts_page ? restore_page(verbs, sequence) : Status();
}

// The open page as it was with its tokens alone.
Status SequenceTable::restore_page(Verbs& verbs, int sequence) {
  cache::Sequence& blocks = sequences[sequence];
  const Speculation& speculation = speculations[sequence];
  // A page that others use, or the prefix index keeps, is not written: another takes its place.
  std::vector<cache::OpenBlockCopy> new_pages;
  KVX_RETURN_IF_ERROR(blocks.acquire_copies(*storage.pool, new_pages));
  KVX_RETURN_IF_ERROR(blocks.commit_copies(*storage.pool, new_pages));
  const int64_t page = blocks.num_tokens() / storage.config.block_size;
  const int64_t page_begin = page * storage.config.block_size;
  const auto num_kept = static_cast<int>(speculation.first_token() - page_begin);
  for (int g = 0; num_kept > 0 && g < static_cast<int>(storage.groups.size()); ++g) {
    const ops::BlockCopy kept{speculation.kept_page(g), blocks.table(g)[page], num_kept};
    KVX_RETURN_IF_ERROR(verbs.copy_blocks(storage.layer_copies(g, CopyKind::kPacked), {&kept, 1}));
  }
  return append_again(verbs, sequence, std::max(page_begin, speculation.first_token()));
}

// The rows from first_token on, in the runs that they came in.
Status SequenceTable::append_again(Verbs& verbs, int sequence, int64_t first_token) {
  const cache::Sequence& blocks = sequences[sequence];
  const Speculation& speculation = speculations[sequence];
  const auto num_tokens = static_cast<size_t>(blocks.num_tokens() - first_token);
  if (num_tokens == 0) return {};
  std::vector<int64_t> positions(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) positions[i] = first_token + static_cast<int64_t>(i);
  std::vector<std::vector<int64_t>> slots(storage.groups.size(), std::vector<int64_t>(num_tokens));
  StepTables tables;
  tables.positions = positions;
  for (int g = 0; g < static_cast<int>(storage.groups.size()); ++g) {
    blocks.slots(g, first_token, slots[g]);
    tables.groups.push_back({slots[g], {}, {}, {}, 0});
  }
  KVX_RETURN_IF_ERROR(verbs.place(tables));
  for (const Speculation::Run& run : speculation.runs_from(first_token)) {
    const auto at = static_cast<size_t>(run.first - first_token);
    const auto count = static_cast<size_t>(run.count);
    for (int layer = 0; layer < storage.config.geometry.num_layers; ++layer) {
      const LoggedRows rows = speculation.rows(layer, run);
      ops::AppendArgs args;
      args.cache = storage.layers[layer]->packed();
      args.transform = storage.layers[layer]->transform();
      args.k = rows.k;
      args.v = rows.v;
      args.slot_mapping = tables.groups[storage.group_of_layer[layer]].slots.subspan(at, count);
      args.positions = tables.positions.subspan(at, count);
      KVX_RETURN_IF_ERROR(verbs.append(args));
    }
  }
  return {};
}

}  // namespace kvx::kv
