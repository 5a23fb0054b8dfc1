// Sections 7.1 and 8: bad writes and gathers return the right status and change nothing.
#include <cstring>

#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr auto kUnsupported = KVX_STATUS_UNSUPPORTED;
constexpr auto kOutOfRange = KVX_STATUS_OUT_OF_RANGE;

template <class Call>
struct Spoiled {
  const char* what;
  kvx_status_t expected;
  void (*spoil)(Call&);
};
using SpoiledWrite = Spoiled<WriteCall>;
using SpoiledGather = Spoiled<GatherCall>;

void refuse_writes(const Provider& provider, std::initializer_list<SpoiledWrite> list) {
  for (const SpoiledWrite& spoiled : list) {
    WriteCall call(WriteCase{});
    spoiled.spoil(call);
    call.must_refuse(provider.write_kv, spoiled.expected,
                     std::string("a write with ") + spoiled.what);
  }
}

void refuse_gathers(const Provider& provider, const GatherCase& gather_case,
                    std::initializer_list<SpoiledGather> list) {
  for (const SpoiledGather& spoiled : list) {
    GatherCall call(gather_case);
    spoiled.spoil(call);
    call.must_refuse(
        provider.gather_kv, spoiled.expected,
        fmt::format("a gather of {} with {}", name_of(gather_case.table), spoiled.what));
  }
}

// --- writes ---

void refuses_null_in_writes(const Provider& provider) {
  refuse_writes(
      provider,
      {{"cache.k.data null", kInvalid, [](WriteCall& c) { c.cache.k.data = nullptr; }},
       {"cache.v.data null", kInvalid, [](WriteCall& c) { c.cache.v.data = nullptr; }},
       {"io.key.data null", kInvalid, [](WriteCall& c) { c.write.io.key.data = nullptr; }},
       {"io.value.data null", kInvalid, [](WriteCall& c) { c.write.io.value.data = nullptr; }},
       {"slots null", kInvalid, [](WriteCall& c) { c.write.slots.slots = nullptr; }}});
  WriteCall call(WriteCase{});
  require_status(provider.write_kv(nullptr, &call.write, nullptr), kInvalid, "a null cache");
  require_status(provider.write_kv(&call.cache, nullptr, nullptr), kInvalid, "a null write");
}

void refuses_other_counts_in_writes(const Provider& provider) {
  refuse_writes(
      provider,
      {{"another num_tokens", kInvalid, [](WriteCall& c) { ++c.write.io.num_tokens; }},
       {"another num_kv_heads", kInvalid, [](WriteCall& c) { ++c.write.io.num_kv_heads; }},
       {"another head_dim", kInvalid, [](WriteCall& c) { c.write.io.head_dim = 8; }},
       {"another token_count", kInvalid, [](WriteCall& c) { --c.write.slots.token_count; }},
       {"another io.key.shape[0]", kInvalid, [](WriteCall& c) { --c.write.io.key.shape[0]; }},
       {"another io.value.shape[1]", kInvalid, [](WriteCall& c) { ++c.write.io.value.shape[1]; }},
       {"another io.value.shape[2]", kInvalid, [](WriteCall& c) { --c.write.io.value.shape[2]; }},
       {"io.key.ndim 2", kInvalid, [](WriteCall& c) { c.write.io.key.ndim = 2; }},
       {"io.value.ndim 5", kInvalid, [](WriteCall& c) { c.write.io.value.ndim = 5; }}});
}

void refuses_types_in_writes(const Provider& provider) {
  refuse_writes(
      provider,
      {{"io.key.dtype 0", kInvalid,
        [](WriteCall& c) { memset(&c.write.io.key.dtype, 0, sizeof(uint32_t)); }},
       {"io.value.dtype U32", kInvalid,
        [](WriteCall& c) { c.write.io.value.dtype = KVX_DTYPE_U32; }},
       {"slots of F32", kInvalid, [](WriteCall& c) { c.write.slots.dtype = KVX_DTYPE_F32; }},
       {"slots of U64", kInvalid, [](WriteCall& c) { c.write.slots.dtype = KVX_DTYPE_U64; }}});
}

// Malformed is reported before unsupported, and that before out of range, in any order of fields.
void orders_errors_of_writes(const Provider& provider) {
  refuse_writes(provider, {{"a bad stride and a null pointer", kInvalid,
                            [](WriteCall& c) {
                              ++c.cache.k.stride[0];
                              c.write.slots.slots = nullptr;
                            }},
                           {"a bad stride and a small struct", kInvalid,
                            [](WriteCall& c) {
                              ++c.cache.k.stride[0];
                              c.write.slots.size = 4;
                            }},
                           {"a bad stride and another shape", kInvalid, [](WriteCall& c) {
                              ++c.cache.k.stride[0];
                              ++c.cache.v.shape[2];
                            }}});
}

// Slots out of range are reported last, after malformed and unsupported arguments.
void orders_out_of_range_last(const Provider& provider) {
  WriteCall unsupported(WriteCase{.slots = {20, 1}});
  ++unsupported.cache.k.stride[0];
  unsupported.must_refuse(provider.write_kv, kUnsupported, "a bad stride and a slot outside");
  WriteCall invalid(WriteCase{.slots = {20, 1}});
  invalid.write.io.value.data = nullptr;
  invalid.must_refuse(provider.write_kv, kInvalid, "a null pointer and a slot outside");
}

// --- gathers ---

const std::initializer_list<SpoiledGather> kBadInEveryTable = {
    {"seq_count 0", kInvalid, [](GatherCall& c) { c.gather.block_table.seq_count = 0; }},
    {"another seq_count", kInvalid, [](GatherCall& c) { ++c.gather.block_table.seq_count; }},
    {"another seq_lens.seq_count", kInvalid, [](GatherCall& c) { --c.gather.seq_lens.seq_count; }},
    {"max_blocks_per_seq 0", kInvalid,
     [](GatherCall& c) { c.gather.block_table.max_blocks_per_seq = 0; }},
    {"beam_width 0", kInvalid, [](GatherCall& c) { c.gather.block_table.beam_width = 0; }},
    {"another indices_count", kInvalid,
     [](GatherCall& c) { --c.gather.block_table.indices_count; }},
    {"indices null", kInvalid, [](GatherCall& c) { c.gather.block_table.indices = nullptr; }},
    {"indices of U32", kInvalid,
     [](GatherCall& c) { c.gather.block_table.index_dtype = KVX_DTYPE_U32; }},
    {"lengths null", kInvalid, [](GatherCall& c) { c.gather.seq_lens.lengths = nullptr; }},
    {"lengths of F32", kInvalid, [](GatherCall& c) { c.gather.seq_lens.dtype = KVX_DTYPE_F32; }},
    {"another max_seq_len", kInvalid, [](GatherCall& c) { ++c.gather.max_seq_len; }},
    {"another num_tokens", kInvalid, [](GatherCall& c) { ++c.gather.io.num_tokens; }},
    {"io.key.data null", kInvalid, [](GatherCall& c) { c.gather.io.key.data = nullptr; }},
    {"io.value.data null", kInvalid, [](GatherCall& c) { c.gather.io.value.data = nullptr; }}};

void refuses_packed(const Provider& provider) {
  refuse_gathers(provider, {}, kBadInEveryTable);
  refuse_gathers(
      provider, {},
      {{"beam_width 2", kInvalid, [](GatherCall& c) { c.gather.block_table.beam_width = 2; }},
       {"an indptr", kInvalid,
        [](GatherCall& c) { c.gather.block_table.indptr = c.gather.block_table.indices; }},
       {"an indptr_count", kInvalid, [](GatherCall& c) { c.gather.block_table.indptr_count = 5; }},
       {"format 0", kInvalid,
        [](GatherCall& c) { memset(&c.gather.block_table.format, 0, sizeof(uint32_t)); }},
       {"format 255", kInvalid,
        [](GatherCall& c) { memset(&c.gather.block_table.format, 0xFF, 1); }}});
}

void refuses_ragged(const Provider& provider) {
  const GatherCase ragged = {.table = TableKind::kRaggedTokens, .indptr_dtype = KVX_DTYPE_S64};
  refuse_gathers(provider, ragged, kBadInEveryTable);
  const auto sums = [](GatherCall& c) {
    return static_cast<int64_t*>(const_cast<void*>(c.gather.block_table.indptr));
  };
  refuse_gathers(
      provider, ragged,
      {{"beam_width 2", kInvalid, [](GatherCall& c) { c.gather.block_table.beam_width = 2; }},
       {"indptr null", kInvalid, [](GatherCall& c) { c.gather.block_table.indptr = nullptr; }},
       {"another indptr_count", kInvalid,
        [](GatherCall& c) { --c.gather.block_table.indptr_count; }},
       {"indptr of U8", kInvalid,
        [](GatherCall& c) { c.gather.block_table.indptr_dtype = KVX_DTYPE_U8; }}});
  // Prefix sums that do not begin at 0, that decrease, or that do not end at indices_count.
  for (const auto& [entry, value] :
       {std::pair{0, int64_t{1}}, {1, int64_t{-1}}, {2, INT64_MAX}, {4, int64_t{15}}}) {
    GatherCall call(ragged);
    sums(call)[entry] = value;
    call.must_refuse(provider.gather_kv, kInvalid,
                     fmt::format("a gather of RAGGED with indptr[{}] {}", entry, value));
  }
}

void refuses_kv_offsets(const Provider& provider) {
  const GatherCase offsets = {.arrangement = hnd(), .table = TableKind::kKvOffsets};
  refuse_gathers(provider, offsets, kBadInEveryTable);
  refuse_gathers(
      provider, offsets,
      {{"S64 indices", kInvalid,
        [](GatherCall& c) { c.gather.block_table.index_dtype = KVX_DTYPE_S64; }},
       {"no flag KVCACHEINDEX", kInvalid, [](GatherCall& c) { c.gather.block_table.flags = 0; }},
       {"an indptr_count", kInvalid, [](GatherCall& c) { c.gather.block_table.indptr_count = 5; }},
       {"no pool", kInvalid, [](GatherCall& c) { c.cache.pool.primary = nullptr; }},
       {"pool.bytes_per_block 0", kInvalid,
        [](GatherCall& c) { c.cache.pool.bytes_per_block = 0; }}});
  GatherCase odd = offsets;
  odd.geometry.block_size = 6;
  GatherCall(odd).must_refuse(provider.gather_kv, kInvalid,
                              "a gather of KV_OFFSETS with block_size 6");
}

// No tokens, so that a provider whose products overflow finds no other error.
void ask_for_no_tokens(GatherCall& call) {
  call.gather.io.num_tokens = 0;
  const bool is_padded = !call.given.is_dense;
  for (kvx_tensor_desc_t* tensor : {&call.gather.io.key, &call.gather.io.value}) {
    tensor->shape[0] = is_padded ? call.gather.block_table.seq_count : 0;
    if (!is_padded) continue;
    tensor->shape[1] = call.gather.max_seq_len;
    tensor->stride[0] = tensor->shape[1] * tensor->stride[1];
  }
}

// Counts whose product is 0 in 32 bits.
void multiplies_in_64_bits(const Provider& provider) {
  for (const bool is_dense : {true, false}) {
    GatherCall packed(GatherCase{.is_dense = is_dense});
    kvx_block_table_t& table = packed.gather.block_table;
    table.seq_count = packed.gather.seq_lens.seq_count = 1u << 30;
    table.max_blocks_per_seq = packed.gather.max_seq_len = 4;
    table.indices_count = 0;
    ask_for_no_tokens(packed);
    packed.must_refuse(provider.gather_kv, kInvalid,
                       "a gather of 2^30 sequences of 4 blocks and 4 tokens, with no index");
  }
  GatherCall ragged(GatherCase{.table = TableKind::kRaggedTokens, .is_dense = true});
  ragged.gather.block_table.seq_count = ragged.gather.seq_lens.seq_count = UINT32_MAX;
  ragged.gather.block_table.indptr_count = 0;
  ragged.gather.max_seq_len = 0;
  ask_for_no_tokens(ragged);
  ragged.must_refuse(provider.gather_kv, kInvalid,
                     "a gather of 2^32 - 1 ragged sequences, with no prefix sum");
}

// With any status, nothing outside the cache may be read and nothing outside the rows written.
void reads_nothing_outside(const Provider& provider) {
  for (const int64_t block : {int64_t{5}, int64_t{6}, int64_t{INT32_MAX}}) {
    for (const TableKind kind : {TableKind::kPacked, TableKind::kRaggedTokens}) {
      GatherCall call(GatherCase{.table = kind});
      call.entries[0] = block;
      call.store_entries();
      call.memory.take_picture();
      if (provider.gather_kv(&call.cache, &call.gather, nullptr) == KVX_STATUS_OK) {
        call.entries[0] = -1;  // no row comes from there
        call.expect_moved();
      }
      require_picture(call.memory, call.cache, call.gather.io, fmt::format("block {}", block));
    }
  }
}

void reports_blocks_outside(const Provider& provider) {
  for (const TableKind kind : {TableKind::kPacked, TableKind::kRaggedTokens}) {
    for (const kvx_dtype_t index : kIndexTypes) {
      for (const int64_t block : {int64_t{5}, int64_t{INT32_MAX}, (int64_t{1} << 32) + 1}) {
        if (index == KVX_DTYPE_S32 && block > INT32_MAX) continue;
        GatherCall call(GatherCase{.table = kind, .index_dtype = index});
        call.entries[call.entries.size() - 1] = block;
        // The last sequence has 3 tokens in the first of its 2 blocks.
        if (kind == TableKind::kPacked) call.entries[call.entries.size() - 2] = block;
        call.store_entries();
        call.must_refuse(provider.gather_kv, kOutOfRange,
                         fmt::format("a gather with block {}", block));
      }
    }
  }
}

void reports_lengths_outside(const Provider& provider) {
  GatherCall longer(GatherCase{.lengths = {8, 8}, .max_seq_len = 8});
  longer.gather.block_table.max_blocks_per_seq = 1;
  longer.gather.block_table.indices_count = 2;
  longer.must_refuse(provider.gather_kv, kOutOfRange, "a length beyond the table's blocks");
  GatherCall negative(GatherCase{.lengths = {8, -1}});
  negative.must_refuse(provider.gather_kv, kInvalid, "a negative length");
}

}  // namespace

std::vector<Check> bad_write_checks() {
  const Features needs = Features(nhd().needs())
                             .add(kCacheDtypes, KVX_DTYPE_F16)
                             .add(kIoDtypes, KVX_DTYPE_F16)
                             .add(kIndexDtypes, KVX_DTYPE_S64);
  const Features reports = Features(needs).add_flags(kTraits, KVX_TRAIT_REPORTS_OUT_OF_RANGE);
  return {{Section::kValidation, "refuse null pointers in writes", needs, refuses_null_in_writes},
          {Section::kValidation, "refuse counts that differ in writes", needs,
           refuses_other_counts_in_writes},
          {Section::kValidation, "refuse types in writes", needs, refuses_types_in_writes},
          {Section::kErrors, "malformed comes before unsupported", needs, orders_errors_of_writes},
          {Section::kErrors, "out of range comes last", reports, orders_out_of_range_last}};
}

std::vector<Check> bad_gather_checks() {
  const Features packed = Features(nhd().needs())
                              .add(needs_of(TableKind::kPacked))
                              .add(kCacheDtypes, KVX_DTYPE_F16)
                              .add(kIoDtypes, KVX_DTYPE_F16)
                              .add(kIndexDtypes, KVX_DTYPE_S32);
  const Features ragged = Features(packed).add(needs_of(TableKind::kRaggedTokens));
  const Features reports = Features(ragged)
                               .add(kIndexDtypes, KVX_DTYPE_S64)
                               .add_flags(kTraits, KVX_TRAIT_REPORTS_OUT_OF_RANGE);
  return {{Section::kValidation, "refuse bad PACKED tables", packed, refuses_packed},
          {Section::kValidation, "refuse bad RAGGED tables", ragged, refuses_ragged},
          {Section::kValidation, "refuse bad KV_OFFSETS tables",
           Features(packed).add(needs_of(TableKind::kKvOffsets)).add(hnd().needs()),
           refuses_kv_offsets},
          {Section::kValidation, "multiply counts in 64 bits",
           Features(ragged).add_flags(kTraits, KVX_TRAIT_DENSE_GATHER_IO), multiplies_in_64_bits},
          {Section::kBlockTables, "read nothing outside the cache", ragged, reads_nothing_outside},
          {Section::kErrors, "report blocks outside the cache", reports, reports_blocks_outside},
          {Section::kErrors, "report lengths outside the table", reports, reports_lengths_outside}};
}

}  // namespace kvx::conformance
