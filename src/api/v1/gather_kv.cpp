// kvx_gather_kv: checks the whole call, the contents of its tables included, before it copies a
// byte.
#include "api/v1/gather_kv.hpp"

#include <array>

#include "api/call.hpp"
#include "api/checks/check_cache.hpp"
#include "api/checks/check_index.hpp"
#include "api/checks/device_memory.hpp"
#include "api/guard.hpp"
#include "api/kernels.hpp"
#include "core/checked.hpp"
#include "ops/copy_rows/copy_rows_cuda.hpp"
#include "ops/copy_rows/gather_plan.hpp"
#include "ops/copy_rows/row_mover.hpp"

namespace kvx::boundary {
namespace {

using ops::copy_rows::GatherPlan;
using ops::copy_rows::kNullIndex;
using ops::copy_rows::kSecondaryPool;
using ops::copy_rows::RowMover;
using ops::copy_rows::TokenEntries;

// Consecutive tokens of a row in one block, with the table's entries for it.
struct Segment {
  int64_t row = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  int64_t k_entry = 0;
  int64_t v_entry = 0;
};

void check_types(const CacheSide& cache, const IoSide& io, std::optional<Element> only,
                 std::string_view name, DeferredErrors& deferred_errors) {
  if (!can_gather(cache.element, io.element)) {
    deferred_errors.add(
        unsupported("cache.{} and io.{} have different dtypes, one of them F8; "
                    "kvx_gather_kv copies equal ones, kvx_gather dequantises",
                    name[0], name));
  }
  if (only && (cache.element != *only || io.element != *only)) {
    deferred_errors.add(unsupported("cache.{} or io.{} has another dtype than this function's name",
                                    name[0], name));
  }
}

// The tensors, followed by the arrays that only the GPU reads. With pools, cache.k and cache.v are
// not read.
std::array<CallAddress, 7> addresses_of(const GatherPlan& plan) {
  const bool has_pools = plan.reads_pools();
  const MemoryType pools = plan.table.pool_memory;
  const CacheSide& k = plan.cache.k;
  const CacheSide& v = plan.cache.v;
  return {{{"io.key", plan.io.k.data, plan.io.k.memory},
           {"io.value", plan.io.v.data, plan.io.v.memory},
           has_pools ? CallAddress{"cache.pool.primary", plan.table.primary, pools}
                     : CallAddress{"cache.k", k.data, k.memory},
           has_pools ? CallAddress{"cache.pool.secondary", plan.table.secondary, pools}
                     : CallAddress{"cache.v", v.data, v.memory},
           readable("block_table.indices", plan.table.indices.data),
           readable("block_table.indptr", plan.table.indptr.data),
           readable("seq_lens.lengths", plan.seq_lens.data)}};
}

Result<GatherPlan> check_gather(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                std::optional<Element> only) {
  if (cache == nullptr || gather == nullptr) {
    return invalid_argument("{} is null", cache == nullptr ? "cache" : "gather");
  }
  DeferredErrors deferred_errors;
  GatherPlan plan;
  KVX_RETURN_IF_ERROR(check_top_level(gather, "gather"));
  KVX_RETURN_IF_ERROR(check_io_sizes(gather->io));
  KVX_RETURN_IF_ERROR(check_nested(gather->block_table, "block_table"));
  KVX_RETURN_IF_ERROR(check_nested(gather->seq_lens, "seq_lens"));
  KVX_ASSIGN_OR_RETURN(plan.cache, check_cache(cache, deferred_errors));
  KVX_ASSIGN_OR_RETURN(plan.table,
                       check_table(gather->block_table, *cache, plan.cache, deferred_errors));
  KVX_ASSIGN_OR_RETURN(plan.seq_lens,
                       check_seq_lens(gather->seq_lens, plan.table.num_sequences, deferred_errors));
  plan.max_seq_len = gather->max_seq_len;
  const auto num_tokens =
      (CheckedSize(plan.table.num_rows()) * CheckedSize(plan.max_seq_len)).get();
  if (num_tokens != int64_t{gather->io.num_tokens}) {
    return invalid_argument("io.num_tokens is {}; expected {} rows x max_seq_len {}",
                            gather->io.num_tokens, plan.table.num_rows(), plan.max_seq_len);
  }
  KVX_ASSIGN_OR_RETURN(plan.io,
                       check_io(gather->io, plan.table.num_rows(), plan.cache, deferred_errors));
  check_types(plan.cache.k, plan.io.k, only, "key", deferred_errors);
  check_types(plan.cache.v, plan.io.v, only, "value", deferred_errors);
  check_one_place(addresses_of(plan), deferred_errors);
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  if (plan.io.num_tokens > 0 && !plan.reads_pools()) {
    KVX_RETURN_IF_ERROR(check_apart(plan.io, plan.cache));
  }
  return plan;
}

// Returns how many blocks the table has for a row.
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

// RAGGED without pages may change the block after any token.
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
    const TokenEntries entries = entries_of(plan.table, row, t, t / block_size);
    Segment segment = {.row = row, .first_token = t, .k_entry = entries.k, .v_entry = entries.v};
    const int64_t most = std::min(length - t, block_size - t % block_size);
    segment.num_tokens = tokens_of_one_block(plan.table, segment, most);
    KVX_RETURN_IF_ERROR(visit(segment));
    t += segment.num_tokens;
  }
  return {};
}

// A KVCacheIndex counts blocks of the pool. No descriptor contains the pool's size, so this checks
// only that what is read lies apart from what is written.
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
  return check_apart(plan.io, block_of(plan.table, side, entry), side.block_bytes,
                     "a block of the pool");
}

Status check_pool_entries(const GatherPlan& plan, const Segment& segment) {
  KVX_RETURN_IF_ERROR(check_pool_entry(plan, plan.cache.k, segment, segment.k_entry));
  return check_pool_entry(plan, plan.cache.v, segment, segment.v_entry);
}

// Checks the block ids of a row, which are consecutive in `list`.
template <class Id>
Status check_ids_of(const Id* list, const GatherPlan& plan, int64_t row) {
  const TableView& table = plan.table;
  const bool is_per_token = table.kind == TableView::Kind::kRaggedTokens;
  const int64_t tokens_of_each = is_per_token ? 1 : plan.cache.block_size;
  const int64_t first =
      table.indptr.data == nullptr ? row * table.max_blocks : table.indptr.at(row);
  const int64_t count = ceil_div(plan.length(row), tokens_of_each);
  for (int64_t i = 0; i < count; ++i) {
    if (list[first + i] < plan.cache.num_blocks) continue;
    return out_of_range("block_table names block {} for sequence {}, token {}; the cache has {}",
                        list[first + i], row, i * tokens_of_each, plan.cache.num_blocks);
  }
  return {};
}

Status check_entries(const GatherPlan& plan, int64_t row) {
  if (plan.table.kind == TableView::Kind::kKvOffsets) {
    return for_each_segment(
        plan, row, [&](const Segment& segment) { return check_pool_entries(plan, segment); });
  }
  const void* list = plan.table.indices.data;
  return plan.table.indices.is_64_bit ? check_ids_of(static_cast<const int64_t*>(list), plan, row)
                                      : check_ids_of(static_cast<const int32_t*>(list), plan, row);
}

Status check_contents(const GatherPlan& plan) {
  KVX_RETURN_IF_ERROR(check_prefix_sums(plan.table));
  for (int64_t row = 0; row < plan.table.num_rows(); ++row) {
    KVX_RETURN_IF_ERROR(check_length(plan, row));
    KVX_RETURN_IF_ERROR(check_entries(plan, row));
  }
  return {};
}

void gather_side(const GatherPlan& plan, const CacheSide& side, const IoSide& io,
                 const Segment& segment, int64_t entry, RowMover& mover) {
  uint8_t* block = block_of(plan.table, side, entry);
  if (block == nullptr) return;
  const int64_t offset = segment.first_token % plan.cache.block_size;
  mover.gather({.cache = block + offset * side.token_stride,
                .io = io.token(segment.row * plan.max_seq_len + segment.first_token),
                .num_tokens = segment.num_tokens});
}

Status gather_on_host(const GatherPlan& plan) {
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

}  // namespace

Status gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                 std::optional<Element> only, void* stream) {
  KVX_ASSIGN_OR_RETURN(const GatherPlan plan, check_gather(cache, gather, only));
  if (plan.io.num_tokens == 0) return {};
  if (!plan.is_on_device()) return gather_on_host(plan);
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device, find_device(addresses_of(plan)));
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device->index));
  return gather_on_device({*device, stream}, plan);
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache,
                                      const kvx_gather_desc_t* gather, void* stream) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::gather_kv(cache, gather, std::nullopt, stream); });
}
