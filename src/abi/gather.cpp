// kvx_gather_kv: checks everything, walks every sequence's blocks once to check what the tables
// hold, and a second time to copy.
#include "abi/gather.hpp"

#include "abi/call.hpp"
#include "abi/check_cache.hpp"
#include "abi/check_index.hpp"
#include "abi/guard.hpp"
#include "abi/kernels.hpp"
#include "abi/move_rows.hpp"
#include "core/checked.hpp"

namespace kvx::abi {
namespace {

struct GatherPlan {
  CacheView cache;
  IoView io;
  TableView table;
  IndexArray seq_lens;
  int64_t max_seq_len = 0;

  // Tokens that a row of the output receives; rows are sequences, or beams of sequences.
  int64_t length(int64_t row) const {
    return std::min(seq_lens.at(row / table.num_beams), max_seq_len);
  }
};

// Consecutive tokens of a row in one block. The entries of the table stand as they are there.
struct Segment {
  int64_t row = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  int64_t k_entry = 0;
  int64_t v_entry = 0;
};

// Bits of a KVCacheIndex.
constexpr uint32_t kSecondaryPool = 0x80000000u;
constexpr uint32_t kNullIndex = 0xFFFFFFFFu;

void check_types(const CacheSide& cache, const IoSide& io, std::optional<Element> only,
                 std::string_view name, Findings& findings) {
  if (!can_gather(cache.element, io.element)) {
    findings.add(
        unsupported("cache.{} and io.{} have different dtypes, one of them F8; "
                    "kvx_gather_kv copies equal ones, kvx_gather dequantises",
                    name[0], name));
  }
  if (only && (cache.element != *only || io.element != *only)) {
    findings.add(unsupported("cache.{} or io.{} has another dtype than this function's name says",
                             name[0], name));
  }
}

Result<GatherPlan> check_gather(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                std::optional<Element> only) {
  if (cache == nullptr || gather == nullptr) {
    return invalid_argument("{} is null", cache == nullptr ? "cache" : "gather");
  }
  Findings findings;
  GatherPlan plan;
  KVX_RETURN_IF_ERROR(check_top_level(gather, "gather"));
  KVX_RETURN_IF_ERROR(check_io_sizes(gather->io));
  KVX_RETURN_IF_ERROR(check_nested(gather->block_table, "block_table"));
  KVX_RETURN_IF_ERROR(check_nested(gather->seq_lens, "seq_lens"));
  KVX_ASSIGN_OR_RETURN(plan.cache, check_cache(cache, findings));
  KVX_ASSIGN_OR_RETURN(plan.table, check_table(gather->block_table, *cache, plan.cache, findings));
  KVX_ASSIGN_OR_RETURN(plan.seq_lens,
                       check_seq_lens(gather->seq_lens, plan.table.num_sequences, findings));
  plan.max_seq_len = gather->max_seq_len;
  const auto num_tokens =
      (CheckedSize(plan.table.num_rows()) * CheckedSize(plan.max_seq_len)).get();
  if (num_tokens != int64_t{gather->io.num_tokens}) {
    return invalid_argument("io.num_tokens is {}; expected {} rows x max_seq_len {}",
                            gather->io.num_tokens, plan.table.num_rows(), plan.max_seq_len);
  }
  KVX_ASSIGN_OR_RETURN(plan.io, check_io(gather->io, plan.table.num_rows(), plan.cache, findings));
  check_types(plan.cache.k, plan.io.k, only, "key", findings);
  check_types(plan.cache.v, plan.io.v, only, "value", findings);
  KVX_RETURN_IF_ERROR(findings.status());
  const bool reads_cache = plan.table.kind != TableView::Kind::kKvOffsets;
  if (plan.io.num_tokens > 0 && reads_cache) KVX_RETURN_IF_ERROR(check_apart(plan.io, plan.cache));
  return plan;
}

// Blocks that the table has for a row.
int64_t blocks_of_row(const TableView& table, int64_t row) {
  if (table.kind != TableView::Kind::kRaggedPages) return table.max_blocks;
  return table.indptr.at(row + 1) - table.indptr.at(row);
}

Status check_length(const GatherPlan& plan, int64_t row) {
  const int64_t s = row / plan.table.num_beams;
  const int64_t length = plan.seq_lens.at(s);
  if (length < 0) {
    return invalid_argument("seq_lens[{}] is {}; expected 0 or more", s, length);
  }
  if (plan.table.kind == TableView::Kind::kRaggedTokens) {
    const int64_t entries = plan.table.indptr.at(s + 1) - plan.table.indptr.at(s);
    if (entries == length) return {};
    return invalid_argument("seq_lens[{}] is {}; block_table.indptr gives the sequence {} tokens",
                            s, length, entries);
  }
  const int64_t num_blocks = ceil_div(plan.length(row), plan.cache.block_size);
  const int64_t held = blocks_of_row(plan.table, row);
  if (num_blocks <= held) return {};
  return out_of_range("seq_lens[{}] is {}; its {} blocks of {} tokens hold less", s, length, held,
                      plan.cache.block_size);
}

// The table's entries for one token of a row.
void read_entries(const TableView& table, int64_t block_size, Segment& segment) {
  const int64_t block = segment.first_token / block_size;
  switch (table.kind) {
    case TableView::Kind::kPacked:
      segment.k_entry = table.indices.at(segment.row * table.max_blocks + block);
      break;
    case TableView::Kind::kRaggedPages:
      segment.k_entry = table.indices.at(table.indptr.at(segment.row) + block);
      break;
    case TableView::Kind::kRaggedTokens:
      segment.k_entry = table.indices.at(table.indptr.at(segment.row) + segment.first_token);
      break;
    case TableView::Kind::kKvOffsets: {
      const int64_t k_row = segment.row * 2;  // [rows, 2 (K, V), max_blocks]
      segment.k_entry = table.indices.at(k_row * table.max_blocks + block);
      segment.v_entry = table.indices.at((k_row + 1) * table.max_blocks + block);
      return;
    }
  }
  segment.v_entry = segment.k_entry;
}

// A block per token may change in the middle of a block.
int64_t tokens_of_one_block(const TableView& table, const Segment& segment, int64_t most) {
  if (table.kind != TableView::Kind::kRaggedTokens) return most;
  const int64_t first = table.indptr.at(segment.row) + segment.first_token;
  int64_t n = 1;
  while (n < most && table.indices.at(first + n) == segment.k_entry) ++n;
  return n;
}

// Calls visit(segment), which returns a Status, for the tokens of a row, in order.
template <class Visit>
Status for_each_segment(const GatherPlan& plan, int64_t row, Visit visit) {
  const int64_t length = plan.length(row);
  const int64_t block_size = plan.cache.block_size;
  for (int64_t t = 0; t < length;) {
    Segment segment = {.row = row, .first_token = t};
    read_entries(plan.table, block_size, segment);
    const int64_t most = std::min(length - t, block_size - t % block_size);
    segment.num_tokens = tokens_of_one_block(plan.table, segment, most);
    KVX_RETURN_IF_ERROR(visit(segment));
    t += segment.num_tokens;
  }
  return {};
}

// The first byte of the block that an entry names; null for an entry without a block, whose rows
// are left as they are. Requires: a checked entry.
uint8_t* block_of(const GatherPlan& plan, const CacheSide& side, int64_t entry) {
  if (plan.table.kind != TableView::Kind::kKvOffsets) {
    return entry < 0 ? nullptr : side.data + entry * side.block_stride;
  }
  const auto index = static_cast<uint32_t>(entry);
  if (index == kNullIndex) return nullptr;
  uint8_t* pool = (index & kSecondaryPool) != 0 ? plan.table.secondary : plan.table.primary;
  return pool + int64_t{index & ~kSecondaryPool} * plan.table.bytes_per_block;
}

// A KVCacheIndex counts blocks of the pool, whose number nobody tells: what is read must at least
// lie apart from what is written.
Status check_pool_entry(const GatherPlan& plan, const CacheSide& side, const Segment& segment,
                        int64_t entry) {
  const auto index = static_cast<uint32_t>(entry);
  if (index == kNullIndex) return {};
  if ((index & kSecondaryPool) != 0 && plan.table.secondary == nullptr) {
    return invalid_argument(
        "block_table names secondary block {} for row {}, token {}; "
        "cache.pool.secondary is null",
        index & ~kSecondaryPool, segment.row, segment.first_token);
  }
  return check_apart(plan.io, block_of(plan, side, entry), side.block_bytes, "a block of the pool");
}

Status check_segment(const GatherPlan& plan, const Segment& segment) {
  if (plan.table.kind == TableView::Kind::kKvOffsets) {
    KVX_RETURN_IF_ERROR(check_pool_entry(plan, plan.cache.k, segment, segment.k_entry));
    return check_pool_entry(plan, plan.cache.v, segment, segment.v_entry);
  }
  if (segment.k_entry < plan.cache.num_blocks) return {};
  return out_of_range("block_table names block {} for sequence {}, token {}; the cache has {}",
                      segment.k_entry, segment.row, segment.first_token, plan.cache.num_blocks);
}

Status check_contents(const GatherPlan& plan) {
  KVX_RETURN_IF_ERROR(check_prefix_sums(plan.table));
  for (int64_t row = 0; row < plan.table.num_rows(); ++row) {
    KVX_RETURN_IF_ERROR(check_length(plan, row));
    KVX_RETURN_IF_ERROR(for_each_segment(
        plan, row, [&](const Segment& segment) { return check_segment(plan, segment); }));
  }
  return {};
}

void gather_side(const GatherPlan& plan, const CacheSide& side, const IoSide& io,
                 const Segment& segment, int64_t entry, RowMover& mover) {
  uint8_t* block = block_of(plan, side, entry);
  if (block == nullptr) return;
  const int64_t offset = segment.first_token % plan.cache.block_size;
  mover.gather({.cache = block + offset * side.token_stride,
                .io = io.token(segment.row * plan.max_seq_len + segment.first_token),
                .num_tokens = segment.num_tokens});
}

}  // namespace

Status gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                 std::optional<Element> only) {
  KVX_ASSIGN_OR_RETURN(const GatherPlan plan, check_gather(cache, gather, only));
  if (plan.io.num_tokens == 0) return {};
  KVX_RETURN_IF_ERROR(check_contents(plan));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  RowMover k(*kernels, plan.cache, plan.cache.k, plan.io.k, plan.io.num_tokens);
  RowMover v(*kernels, plan.cache, plan.cache.v, plan.io.v, plan.io.num_tokens);
  for (int64_t row = 0; row < plan.table.num_rows(); ++row) {
    KVX_RETURN_IF_ERROR(for_each_segment(plan, row, [&](const Segment& segment) -> Status {
      gather_side(plan, plan.cache.k, plan.io.k, segment, segment.k_entry, k);
      gather_side(plan, plan.cache.v, plan.io.v, segment, segment.v_entry, v);
      return {};
    }));
  }
  return {};
}

}  // namespace kvx::abi

extern "C" kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache,
                                      const kvx_gather_desc_t* gather, void* /*stream*/) {
  return kvx::abi::run_call([&] { return kvx::abi::gather_kv(cache, gather, std::nullopt); });
}
