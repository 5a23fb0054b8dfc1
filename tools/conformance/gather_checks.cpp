// Sections 4.2, 4.3, 5.1 and 6.8: gathers of every layout, table, index type and IO tensor.
#include "tools/conformance/gather_call.hpp"

namespace kvx::conformance {
namespace {

Features basic_needs(TableKind kind = TableKind::kPacked) {
  return Features(nhd().needs())
      .add(needs_of(kind))
      .add(kCacheDtypes, KVX_DTYPE_F16)
      .add(kIoDtypes, KVX_DTYPE_F16)
      .add(kIndexDtypes, KVX_DTYPE_S32)
      .add(kIndexDtypes, KVX_DTYPE_S64);
}

void gather_all(const Provider& provider, const GatherCase& gather_case) {
  for (const Geometry& geometry : {Geometry{}, Geometry{3, 8, 1, 16}, Geometry{7, 1, 3, 48}}) {
    for (const uint32_t max_seq_len : {8u, 6u}) {
      GatherCase variant = gather_case;
      variant.geometry = geometry;
      variant.max_seq_len = max_seq_len;
      GatherCall(variant).must_move(provider.gather_kv);
    }
  }
}

void gather_index_types(const Provider& provider, GatherCase gather_case) {
  const bool is_s32_only = gather_case.table == TableKind::kKvOffsets;
  for (const kvx_dtype_t index : kIndexTypes) {
    if (is_s32_only && index != KVX_DTYPE_S32) continue;
    for (const kvx_dtype_t indptr : kIndexTypes) {
      for (const kvx_dtype_t length : kIndexTypes) {
        gather_case.index_dtype = index;
        gather_case.indptr_dtype = indptr;
        gather_case.length_dtype = length;
        GatherCall(gather_case).must_move(provider.gather_kv);
      }
    }
  }
}

// Blocks of a pool are in HND, as in TensorRT-LLM, and have one type.
bool may_lie_in_pools(const Arrangement& arrangement) {
  return arrangement.name == "HND" || arrangement.name == "NHD";
}

void add_layouts(std::vector<Check>& checks) {
  for (const TableKind kind : kTableKinds) {
    for (const Arrangement& arrangement : arrangements()) {
      if (kind == TableKind::kKvOffsets && !may_lie_in_pools(arrangement)) continue;
      const GatherCase gather_case = {.arrangement = arrangement, .table = kind};
      checks.push_back({kind == TableKind::kPacked ? Section::kLayouts : Section::kBlockTables,
                        fmt::format("gather {} {}", name_of(kind), arrangement.name),
                        basic_needs(kind).add(arrangement.needs()),
                        [gather_case](const Provider& p) { gather_all(p, gather_case); }});
    }
  }
}

void add_types(std::vector<Check>& checks) {
  for (const kvx_dtype_t cache : kFloatTypes) {
    for (const kvx_dtype_t io : kFloatTypes) {
      const bool is_eight_bits = cache >= KVX_DTYPE_F8_E4M3 || io >= KVX_DTYPE_F8_E4M3;
      if (cache != io && is_eight_bits) continue;  // 1.1 has no scales in a gather
      GatherCase gather_case;
      gather_case.set_types(cache, io);
      Features needs = basic_needs().add(kCacheDtypes, cache).add(kIoDtypes, io);
      if (cache != io) needs.add_flags(kTraits, KVX_TRAIT_CONVERTS_DTYPES);
      checks.push_back({Section::kTypes,
                        cache == io ? fmt::format("gather {}", name_of(cache))
                                    : fmt::format("gather {} as {}", name_of(cache), name_of(io)),
                        needs, [gather_case](const Provider& p) { gather_all(p, gather_case); }});
    }
  }
}

void add_tables(std::vector<Check>& checks) {
  for (const TableKind kind : kTableKinds) {
    checks.push_back(
        {Section::kBlockTables, fmt::format("gather {} of every index type", name_of(kind)),
         basic_needs(kind), [kind](const Provider& p) { gather_index_types(p, {.table = kind}); }});
    if (kind == TableKind::kKvOffsets) continue;
    checks.push_back(
        {Section::kBlockTables,
         fmt::format("leave rows of negative entries alone, {}", name_of(kind)), basic_needs(kind),
         [kind](const Provider& p) { gather_all(p, {.table = kind, .has_nulls = true}); }});
  }
}

// RAGGED names a block for every token, so the block may change after any token.
void follows_every_token(const Provider& provider) {
  GatherCall call(GatherCase{.table = TableKind::kRaggedTokens});
  for (size_t i = 0; i < call.entries.size(); ++i) {
    call.entries[i] = static_cast<int64_t>(i * i) % call.given.geometry.num_blocks;
  }
  call.store_entries();
  call.must_move(provider.gather_kv);
}

// Tables end where readable memory ends: reading one entry beyond is a fault.
void reads_no_further_than_it_must(const Provider& provider) {
  for (const TableKind kind : {TableKind::kPacked, TableKind::kRaggedTokens}) {
    for (const kvx_dtype_t index : kIndexTypes) {
      // 4 blocks in S32 and 2 in S64 end on 16 bytes, as the buffers do.
      const auto blocks = index == KVX_DTYPE_S64 ? 2 : 4;
      GatherCase gather_case = {.table = kind, .index_dtype = index};
      gather_case.lengths = {kind == TableKind::kPacked ? blocks * 4 : blocks};
      gather_case.max_seq_len = static_cast<uint32_t>(gather_case.lengths[0]);
      GatherCall(gather_case).must_move(provider.gather_kv);
    }
  }
}

void bounds_lengths(const Provider& provider) {
  for (const uint32_t max_seq_len : {1u, 2u, 5u, 16u}) {
    for (const TableKind kind : {TableKind::kPacked, TableKind::kRaggedTokens}) {
      GatherCase gather_case = {.table = kind, .lengths = {12, 1, 0, 16, 7}};
      if (max_seq_len == 16) gather_case.lengths = {3, 1, 0, 2, 1};
      gather_case.max_seq_len = max_seq_len;
      GatherCall(gather_case).must_move(provider.gather_kv);
    }
  }
}

// --- pools ---

Features pool_needs() {
  return basic_needs(TableKind::kKvOffsets).add(hnd().needs());
}

GatherCase pool_case() {
  return {.arrangement = hnd(), .table = TableKind::kKvOffsets};
}

void follows_beams(const Provider& provider) {
  for (const uint32_t beams : {2u, 3u}) {
    GatherCase gather_case = pool_case();
    gather_case.num_beams = beams;
    GatherCall(gather_case).must_move(provider.gather_kv);
    gather_case.is_dense = true;
    GatherCall(gather_case).must_move(provider.gather_kv);
  }
}

void follows_the_secondary_pool(const Provider& provider) {
  GatherCase gather_case = pool_case();
  gather_case.has_secondary = true;
  gather_all(provider, gather_case);
}

void leaves_nulls_alone(const Provider& provider) {
  for (const bool has_secondary : {false, true}) {
    GatherCase gather_case = pool_case();
    gather_case.has_nulls = true;
    gather_case.has_secondary = has_secondary;
    gather_all(provider, gather_case);
  }
}

void add_io_forms(std::vector<Check>& checks) {
  const auto add = [&checks](const char* name, uint64_t trait, bool is_dense, int64_t gap) {
    checks.push_back({Section::kIo, name, basic_needs().add_flags(kTraits, trait),
                      [is_dense, gap](const Provider& p) {
                        gather_all(p, {.is_dense = is_dense, .gap = gap});
                      }});
  };
  add("gather into padded IO", 0, false, 0);
  add("gather into dense IO", KVX_TRAIT_DENSE_GATHER_IO, true, 0);
  add("gather into padded IO with gaps", KVX_TRAIT_STRIDED_IO, false, 24);
  add("gather into dense IO with gaps", KVX_TRAIT_STRIDED_IO | KVX_TRAIT_DENSE_GATHER_IO, true, 16);
}

void gathers_through_launch(const Provider& provider) {
  require(provider.launch_gather_kv != nullptr && provider.launch_gather_kv_f16 != nullptr,
          "the library does not export kvx_launch_gather_kv and _f16");
  GatherCall(GatherCase{}).must_move(provider.launch_gather_kv);
  GatherCall(GatherCase{}).must_move(provider.launch_gather_kv_f16);
  GatherCase f32;
  f32.set_types(KVX_DTYPE_F32, KVX_DTYPE_F32);
  GatherCall(f32).must_refuse(provider.launch_gather_kv_f16, KVX_STATUS_UNSUPPORTED,
                              "kvx_launch_gather_kv_f16 on F32");
}

}  // namespace

std::vector<Check> gather_checks() {
  std::vector<Check> checks;
  add_layouts(checks);
  add_types(checks);
  add_io_forms(checks);
  checks.push_back({Section::kLaunch, "launch gathers",
                    basic_needs().add_flags(kTraits, KVX_TRAIT_LAUNCH_ON_HOST),
                    gathers_through_launch});
  return checks;
}

std::vector<Check> table_checks() {
  std::vector<Check> checks;
  add_tables(checks);
  const Features both = basic_needs().add(needs_of(TableKind::kRaggedTokens));
  checks.push_back({Section::kBlockTables, "follow RAGGED token by token",
                    basic_needs(TableKind::kRaggedTokens), follows_every_token});
  checks.push_back({Section::kBlockTables, "read no entry behind the table", both,
                    reads_no_further_than_it_must});
  checks.push_back({Section::kBlockTables, "follow beams",
                    pool_needs().add_flags(kTraits, KVX_TRAIT_BEAMS | KVX_TRAIT_DENSE_GATHER_IO),
                    follows_beams});
  checks.push_back(
      {Section::kLengths, "gather no more than length and max_seq_len", both, bounds_lengths});
  checks.push_back({Section::kPools, "follow bit 31 to the secondary pool",
                    pool_needs().add_flags(kTraits, KVX_TRAIT_SECONDARY_POOL),
                    follows_the_secondary_pool});
  checks.push_back({Section::kPools, "leave rows of null indices alone",
                    pool_needs().add_flags(kTraits, KVX_TRAIT_SECONDARY_POOL), leaves_nulls_alone});
  return checks;
}

}  // namespace kvx::conformance
