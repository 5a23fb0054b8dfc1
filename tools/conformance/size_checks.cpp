// Section 6: every struct begins with its size, and an impossible size is refused.
#include <cstring>

#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;

struct BadSize {
  const char* what;
  uint32_t* (*size)(WriteCall&, GatherCall&);
};

uint32_t* of_cache_k(WriteCall& w, GatherCall&) {
  return &w.cache.k.size;
}

constexpr BadSize kInWrites[] = {
    {"cache", [](WriteCall& w, GatherCall&) { return &w.cache.size; }},
    {"cache.k", of_cache_k},
    {"cache.v", [](WriteCall& w, GatherCall&) { return &w.cache.v.size; }},
    {"write", [](WriteCall& w, GatherCall&) { return &w.write.size; }},
    {"io", [](WriteCall& w, GatherCall&) { return &w.write.io.size; }},
    {"io.key", [](WriteCall& w, GatherCall&) { return &w.write.io.key.size; }},
    {"io.value", [](WriteCall& w, GatherCall&) { return &w.write.io.value.size; }},
    {"slots", [](WriteCall& w, GatherCall&) { return &w.write.slots.size; }}};

constexpr BadSize kInGathers[] = {
    {"cache", [](WriteCall&, GatherCall& g) { return &g.cache.size; }},
    {"gather", [](WriteCall&, GatherCall& g) { return &g.gather.size; }},
    {"io", [](WriteCall&, GatherCall& g) { return &g.gather.io.size; }},
    {"io.value", [](WriteCall&, GatherCall& g) { return &g.gather.io.value.size; }},
    {"block_table", [](WriteCall&, GatherCall& g) { return &g.gather.block_table.size; }},
    {"seq_lens", [](WriteCall&, GatherCall& g) { return &g.gather.seq_lens.size; }}};

// Zero, one byte less than the struct, and half of it.
template <class Ask>
void for_every_small_size(const BadSize& bad, const Ask& ask) {
  for (int variant = 0; variant < 3; ++variant) {
    WriteCall write(WriteCase{});
    GatherCall gather(GatherCase{});
    uint32_t* size = bad.size(write, gather);
    const uint32_t sizes[] = {0, *size - 1, *size / 2};
    *size = sizes[variant];
    ask(write, gather, fmt::format("{}.size {}", bad.what, *size));
  }
}

void refuses_small_structs_in_writes(const Provider& provider) {
  for (const BadSize& bad : kInWrites) {
    for_every_small_size(bad, [&](WriteCall& write, GatherCall&, const std::string& what) {
      write.must_refuse(provider.write_kv, kInvalid, "a write with " + what);
    });
  }
  for (int i = 0; i < 3; ++i) {
    for_every_small_size(kInWrites[i], [&](WriteCall& write, GatherCall&, const std::string& what) {
      require_status(provider.validate_cache_desc(&write.cache), kInvalid,
                     "kvx_validate_cache_desc with " + what);
    });
  }
}

void refuses_small_structs_in_gathers(const Provider& provider) {
  for (const BadSize& bad : kInGathers) {
    for_every_small_size(bad, [&](WriteCall&, GatherCall& gather, const std::string& what) {
      gather.must_refuse(provider.gather_kv, kInvalid, "a gather with " + what);
    });
  }
}

template <class Struct>
struct Longer {
  Struct known;
  uint64_t tail;
};

// A caller of a later 1.x that uses no field of it.
void takes_longer_structs_of_zeros(const Provider& provider) {
  WriteCall call(WriteCase{});
  Longer<kvx_write_desc_t> write = {call.write, 0};
  write.known.size = sizeof write;
  Longer<kvx_cache_desc_t> cache = {call.cache, 0};
  cache.known.size = sizeof cache;
  call.memory.take_picture();
  call.expect_moved();
  require_status(provider.write_kv(&cache.known, &write.known, nullptr), KVX_STATUS_OK,
                 "a write whose structs are 8 zero bytes longer");
  require_picture(call.memory, call.cache, call.write.io, "a write of longer structs");
}

// The size of an unused pool is checked as well.
void refuses_a_small_pool(const Provider& provider) {
  WriteCall call(WriteCase{});
  call.cache.pool.size = 8;
  require_status(provider.validate_cache_desc(&call.cache), kInvalid, "a cache with pool.size 8");
}

}  // namespace

std::vector<Check> size_checks() {
  const Features needs = Features(nhd().needs())
                             .add(needs_of(TableKind::kPacked))
                             .add(kCacheDtypes, KVX_DTYPE_F16)
                             .add(kIoDtypes, KVX_DTYPE_F16);
  return {{Section::kSizes, "refuse structs that are too small, in writes", needs,
           refuses_small_structs_in_writes},
          {Section::kSizes, "refuse structs that are too small, in gathers", needs,
           refuses_small_structs_in_gathers},
          {Section::kSizes, "refuse a pool that is too small", needs, refuses_a_small_pool},
          {Section::kSizes, "take longer structs whose tail is zero", needs,
           takes_longer_structs_of_zeros}};
}

}  // namespace kvx::conformance
