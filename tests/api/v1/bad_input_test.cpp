// Bad input at the API boundary of the v1 calls: a status and a message, never a crash, and no byte
// changed.
#include <gtest/gtest.h>

#include <functional>

#include "tests/api/v1_cache.hpp"

namespace kvx::api_test::bad_input_test {
namespace {

// A legal write and a legal gather over one cache, which a test then spoils in one place.
struct Calls {
  Calls()
      : cache({}, {}),
        io(cache.shape(), 2),
        out(cache.shape(), 4, KVX_DTYPE_F16, KVX_DTYPE_F16, 2) {
    write = write_desc(io, slots);
    write.k_scale_desc.size = sizeof write.k_scale_desc;
    write.v_scale_desc.size = sizeof write.v_scale_desc;
    gather.size = sizeof gather;
    gather.io = out.desc;
    gather.max_seq_len = 2;
    gather.block_table = {sizeof gather.block_table,
                          KVX_BLOCK_TABLE_PACKED,
                          KVX_DTYPE_S32,
                          KVX_DTYPE_INVALID,
                          2,
                          1,
                          1,
                          blocks.data(),
                          nullptr,
                          2,
                          0,
                          0};
    gather.seq_lens = {sizeof gather.seq_lens, KVX_DTYPE_S32, 2, lengths.data()};
  }

  Cache cache;
  Io io;
  Io out;
  std::vector<int64_t> slots = {1, 6};
  std::vector<int32_t> blocks = {1, 2};
  std::vector<int32_t> lengths = {2, 1};
  kvx_write_desc_t write{};
  kvx_gather_desc_t gather{};
};

using Spoil = std::function<void(Calls&)>;

struct Case {
  const char* name;
  kvx_status_t expected;
  Spoil spoil;
};

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr auto kUnsupported = KVX_STATUS_UNSUPPORTED;
constexpr auto kIncompatible = KVX_STATUS_INCOMPATIBLE;

template <class Field>
void set_raw(Field& field, uint32_t number) {
  static_assert(sizeof field == sizeof number);
  memcpy(&field, &number, sizeof number);
}

template <class Struct>
void resize(Struct& object, int by) {
  object.size += static_cast<uint32_t>(by);
}

// Faults of the cache, which every call sees.
const Case kCacheCases[] = {
    {"cache.size", kInvalid, [](Calls& c) { resize(c.cache.desc, -4); }},
    {"cache.k.size small", kInvalid, [](Calls& c) { resize(c.cache.desc.k, -1); }},
    {"cache.v.size zero", kInvalid, [](Calls& c) { c.cache.desc.v.size = 0; }},
    {"cache.k.size large", kIncompatible, [](Calls& c) { resize(c.cache.desc.k, 8); }},
    {"cache.pool.size small", kInvalid, [](Calls& c) { c.cache.desc.pool.size = 8; }},
    {"cache.pool.size large", kIncompatible, [](Calls& c) { c.cache.desc.pool.size = 40; }},
    {"cache.pool without a size", kInvalid,
     [](Calls& c) { c.cache.desc.pool.bytes_per_block = 64; }},
    {"cache.size endless", kIncompatible, [](Calls& c) { c.cache.desc.size = UINT32_MAX; }},
    {"num_blocks 0", kInvalid, [](Calls& c) { c.cache.desc.num_blocks = 0; }},
    {"num_blocks most", kInvalid, [](Calls& c) { c.cache.desc.num_blocks = UINT32_MAX; }},
    {"block_size 0", kInvalid, [](Calls& c) { c.cache.desc.block_size = 0; }},
    {"num_kv_heads 0", kInvalid, [](Calls& c) { c.cache.desc.num_kv_heads = 0; }},
    {"head_dim 0", kInvalid, [](Calls& c) { c.cache.desc.head_dim = 0; }},
    {"head_dim other", kInvalid, [](Calls& c) { c.cache.desc.head_dim = 15; }},
    {"k.dtype 0", kInvalid, [](Calls& c) { set_raw(c.cache.desc.k.dtype, 0); }},
    {"k.dtype an index", kInvalid, [](Calls& c) { c.cache.desc.k.dtype = KVX_DTYPE_S32; }},
    {"k.dtype unheard of", kInvalid, [](Calls& c) { set_raw(c.cache.desc.k.dtype, 0x80000001u); }},
    {"layout 0", kInvalid,
     [](Calls& c) { set_raw(c.cache.desc.k.layout, 0), set_raw(c.cache.desc.v.layout, 0); }},
    {"layout unheard of", kInvalid,
     [](Calls& c) { set_raw(c.cache.desc.k.layout, 99), set_raw(c.cache.desc.v.layout, 99); }},
    {"layouts differ", kInvalid, [](Calls& c) { c.cache.desc.v.layout = KVX_LAYOUT_BLOCK_HND; }},
    {"memory unknown", kInvalid, [](Calls& c) { c.cache.desc.k.memory = KVX_MEMORY_UNKNOWN; }},
    {"memory unheard of", kInvalid, [](Calls& c) { set_raw(c.cache.desc.v.memory, 4); }},
    {"memory of a device", kUnsupported,
     [](Calls& c) { c.cache.desc.k.memory = KVX_MEMORY_DEVICE; }},
    {"memory unified", kUnsupported, [](Calls& c) { c.cache.desc.v.memory = KVX_MEMORY_UNIFIED; }},
    {"k.ndim 0", kInvalid, [](Calls& c) { c.cache.desc.k.ndim = 0; }},
    {"k.ndim 5", kInvalid, [](Calls& c) { c.cache.desc.k.ndim = 5; }},
    {"k.ndim most", kInvalid, [](Calls& c) { c.cache.desc.k.ndim = UINT32_MAX; }},
    {"k.shape", kInvalid, [](Calls& c) { ++c.cache.desc.k.shape[2]; }},
    {"k.shape negative", kInvalid, [](Calls& c) { c.cache.desc.k.shape[0] = INT64_MIN; }},
    {"k.data null", kInvalid, [](Calls& c) { c.cache.desc.k.data = nullptr; }},
    {"v.data null", kInvalid, [](Calls& c) { c.cache.desc.v.data = nullptr; }},
    {"k.data odd", kUnsupported,
     [](Calls& c) { c.cache.desc.k.data = c.cache.k_memory.data() + 1; }},
    {"stride of a block odd", kUnsupported, [](Calls& c) { ++c.cache.desc.k.stride[0]; }},
    {"stride of a block 0", kUnsupported, [](Calls& c) { c.cache.desc.k.stride[0] = 0; }},
    {"stride of a block negative", kUnsupported, [](Calls& c) { c.cache.desc.k.stride[0] = -128; }},
    {"stride of a token too small", kUnsupported, [](Calls& c) { c.cache.desc.v.stride[1] = 8; }},
    {"stride of a dim 2", kUnsupported, [](Calls& c) { c.cache.desc.k.stride[3] = 2; }},
    {"stride least", kUnsupported, [](Calls& c) { c.cache.desc.k.stride[1] = INT64_MIN; }},
    {"stride beyond memory", kInvalid, [](Calls& c) { c.cache.desc.k.stride[0] = INT64_MAX - 7; }},
    {"an INVALID_ARGUMENT behind an UNSUPPORTED", kInvalid,
     [](Calls& c) {
       ++c.cache.desc.k.stride[0];
       c.cache.desc.v.data = nullptr;
     }},
};

const Case kWriteCases[] = {
    {"write.size", kInvalid, [](Calls& c) { resize(c.write, -1); }},
    {"write.size endless", kIncompatible, [](Calls& c) { c.write.size = UINT32_MAX; }},
    {"io.size", kInvalid, [](Calls& c) { resize(c.write.io, -8); }},
    {"io.size large", kIncompatible, [](Calls& c) { resize(c.write.io, 8); }},
    {"io.key.size", kInvalid, [](Calls& c) { resize(c.write.io.key, -4); }},
    {"io.value.size", kInvalid, [](Calls& c) { c.write.io.value.size = 0; }},
    {"slots.size", kInvalid, [](Calls& c) { resize(c.write.slots, -1); }},
    {"slots.size large", kIncompatible, [](Calls& c) { resize(c.write.slots, 1); }},
    {"k_scale_desc.size", kInvalid, [](Calls& c) { resize(c.write.k_scale_desc, -1); }},
    {"v_scale_desc without a size", kInvalid,
     [](Calls& c) {
       c.write.v_scale_desc.size = 0;
       c.write.v_scale_desc.data = &c;
     }},
    {"io.num_tokens", kInvalid, [](Calls& c) { c.write.io.num_tokens = 3; }},
    {"io.num_kv_heads", kInvalid, [](Calls& c) { c.write.io.num_kv_heads = 3; }},
    {"io.head_dim", kInvalid, [](Calls& c) { c.write.io.head_dim = 8; }},
    {"io.key.dtype", kInvalid, [](Calls& c) { set_raw(c.write.io.key.dtype, 77); }},
    {"io.key.dtype F8", kUnsupported, [](Calls& c) { c.write.io.key.dtype = KVX_DTYPE_F8_E4M3; }},
    {"io.key.ndim", kInvalid, [](Calls& c) { c.write.io.key.ndim = 2; }},
    {"io.key.ndim 4 without shape", kInvalid, [](Calls& c) { c.write.io.key.ndim = 4; }},
    {"io.key.shape", kInvalid, [](Calls& c) { c.write.io.key.shape[0] = 1; }},
    {"io.value.data null", kInvalid, [](Calls& c) { c.write.io.value.data = nullptr; }},
    {"io.value.memory", kInvalid, [](Calls& c) { set_raw(c.write.io.value.memory, 0); }},
    {"io.value.memory of a device", kUnsupported,
     [](Calls& c) { c.write.io.value.memory = KVX_MEMORY_DEVICE; }},
    {"io.key.stride odd", kUnsupported, [](Calls& c) { ++c.write.io.key.stride[0]; }},
    {"io.key.stride of a dim", kUnsupported, [](Calls& c) { c.write.io.key.stride[2] = 8; }},
    {"io.key.data odd", kUnsupported,
     [](Calls& c) { c.write.io.key.data = c.io.k_memory.data() + 1; }},
    {"io.key over the cache", kInvalid,
     [](Calls& c) { c.write.io.key.data = c.cache.desc.v.data; }},
    {"slots.dtype U32", kInvalid, [](Calls& c) { c.write.slots.dtype = KVX_DTYPE_U32; }},
    {"slots.token_count", kInvalid, [](Calls& c) { c.write.slots.token_count = 1; }},
    {"slots.slots null", kInvalid, [](Calls& c) { c.write.slots.slots = nullptr; }},
    {"slots.slots odd", kUnsupported,
     [](Calls& c) { c.write.slots.slots = reinterpret_cast<const char*>(c.slots.data()) + 1; }},
    {"a slot beyond", KVX_STATUS_OUT_OF_RANGE, [](Calls& c) { c.slots[1] = 20; }},
};

const Case kGatherCases[] = {
    {"gather.size", kInvalid, [](Calls& c) { resize(c.gather, -1); }},
    {"gather.size endless", kIncompatible, [](Calls& c) { c.gather.size = UINT32_MAX; }},
    {"block_table.size", kInvalid, [](Calls& c) { resize(c.gather.block_table, -1); }},
    {"block_table.size large", kIncompatible, [](Calls& c) { resize(c.gather.block_table, 8); }},
    {"seq_lens.size", kInvalid, [](Calls& c) { c.gather.seq_lens.size = 0; }},
    {"seq_lens.size large", kIncompatible, [](Calls& c) { resize(c.gather.seq_lens, 1); }},
    {"format 0", kInvalid, [](Calls& c) { set_raw(c.gather.block_table.format, 0); }},
    {"format unheard of", kInvalid, [](Calls& c) { set_raw(c.gather.block_table.format, 4); }},
    {"index_dtype", kInvalid, [](Calls& c) { c.gather.block_table.index_dtype = KVX_DTYPE_U32; }},
    {"seq_count 0", kInvalid, [](Calls& c) { c.gather.block_table.seq_count = 0; }},
    {"seq_count most", kInvalid, [](Calls& c) { c.gather.block_table.seq_count = UINT32_MAX; }},
    {"max_blocks_per_seq 0", kInvalid,
     [](Calls& c) { c.gather.block_table.max_blocks_per_seq = 0; }},
    {"beam_width 2", kInvalid, [](Calls& c) { c.gather.block_table.beam_width = 2; }},
    {"beam_width 0", kInvalid, [](Calls& c) { c.gather.block_table.beam_width = 0; }},
    {"indices null", kInvalid, [](Calls& c) { c.gather.block_table.indices = nullptr; }},
    {"indices_count", kInvalid, [](Calls& c) { c.gather.block_table.indices_count = 1; }},
    // 2^31 * 2 is 0 in 32 bits.
    {"indices_count that only 32 bits believe", kInvalid,
     [](Calls& c) {
       c.gather.block_table.seq_count = 0x80000000u;
       c.gather.block_table.max_blocks_per_seq = 2;
       c.gather.block_table.indices_count = 0;
       c.gather.seq_lens.seq_count = 0x80000000u;
     }},
    {"indptr without RAGGED", kInvalid, [](Calls& c) { c.gather.block_table.indptr = &c; }},
    {"indptr_count without RAGGED", kInvalid,
     [](Calls& c) { c.gather.block_table.indptr_count = 3; }},
    {"flags unheard of", kIncompatible, [](Calls& c) { c.gather.block_table.flags = 1u << 30; }},
    {"flags of another format", kInvalid, [](Calls& c) { c.gather.block_table.flags = 2; }},
    {"RAGGED without indptr", kInvalid,
     [](Calls& c) { c.gather.block_table.format = KVX_BLOCK_TABLE_RAGGED; }},
    {"KV_OFFSETS without a pool", kInvalid,
     [](Calls& c) {
       c.gather.block_table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
       c.gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
     }},
    {"seq_lens.dtype", kInvalid, [](Calls& c) { c.gather.seq_lens.dtype = KVX_DTYPE_F32; }},
    {"seq_lens.seq_count", kInvalid, [](Calls& c) { c.gather.seq_lens.seq_count = 1; }},
    {"seq_lens.lengths null", kInvalid, [](Calls& c) { c.gather.seq_lens.lengths = nullptr; }},
    {"max_seq_len", kInvalid, [](Calls& c) { c.gather.max_seq_len = 3; }},
    {"max_seq_len most", kInvalid, [](Calls& c) { c.gather.max_seq_len = UINT32_MAX; }},
    {"io.num_tokens", kInvalid, [](Calls& c) { c.gather.io.num_tokens = 5; }},
    {"io.key.data null", kInvalid, [](Calls& c) { c.gather.io.key.data = nullptr; }},
    {"io.key over the cache", kInvalid,
     [](Calls& c) { c.gather.io.key.data = c.cache.desc.k.data; }},
    {"a block beyond", KVX_STATUS_OUT_OF_RANGE, [](Calls& c) { c.blocks[1] = 5; }},
    {"a length below 0", kInvalid, [](Calls& c) { c.lengths[0] = -1; }},
};

// Every byte that a call could have written.
struct Snapshot {
  explicit Snapshot(const Calls& c)
      : k(c.cache.k_memory), v(c.cache.v_memory), out_k(c.out.k_memory), out_v(c.out.v_memory) {}
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
  Memory k, v, out_k, out_v;
};

void expect_refused(const Case& spoiled, const std::function<kvx_status_t(Calls&)>& call) {
  SCOPED_TRACE(spoiled.name);
  Calls calls;
  spoiled.spoil(calls);
  const Snapshot before(calls);
  EXPECT_EQ(call(calls), spoiled.expected) << kvx_last_error();
  EXPECT_STRNE(kvx_last_error(), "");
  EXPECT_TRUE(Snapshot(calls) == before);
}

kvx_status_t validate(Calls& c) {
  return kvx_validate_cache_desc(&c.cache.desc);
}
kvx_status_t write(Calls& c) {
  return kvx_write_kv(&c.cache.desc, &c.write, nullptr);
}
kvx_status_t launch_write(Calls& c) {
  return kvx_launch_write_kv(&c.cache.desc, &c.write, nullptr);
}
kvx_status_t gather(Calls& c) {
  return kvx_gather_kv(&c.cache.desc, &c.gather, nullptr);
}
kvx_status_t launch_gather(Calls& c) {
  return kvx_launch_gather_kv(&c.cache.desc, &c.gather, nullptr);
}

TEST(BadInput, SpoilsCallsThatAreFineWithoutIt) {
  Calls calls;
  EXPECT_EQ(validate(calls), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(write(calls), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(gather(calls), KVX_STATUS_OK) << kvx_last_error();
}

TEST(BadInput, InTheCacheIsRefusedByEveryCall) {
  for (const Case& spoiled : kCacheCases) {
    for (const auto& call : {validate, write, launch_write, gather, launch_gather}) {
      expect_refused(spoiled, call);
    }
  }
}

TEST(BadInput, InAWriteIsRefused) {
  for (const Case& spoiled : kWriteCases) {
    expect_refused(spoiled, write);
    expect_refused(spoiled, launch_write);
  }
}

TEST(BadInput, InAGatherIsRefused) {
  for (const Case& spoiled : kGatherCases) {
    expect_refused(spoiled, gather);
    expect_refused(spoiled, launch_gather);
  }
}

TEST(BadInput, OfNullDescriptorsIsRefused) {
  Calls c;
  EXPECT_EQ(kvx_validate_cache_desc(nullptr), kInvalid);
  EXPECT_EQ(kvx_write_kv(nullptr, &c.write, nullptr), kInvalid);
  EXPECT_EQ(kvx_write_kv(&c.cache.desc, nullptr, nullptr), kInvalid);
  EXPECT_EQ(kvx_gather_kv(nullptr, &c.gather, nullptr), kInvalid);
  EXPECT_EQ(kvx_gather_kv(&c.cache.desc, nullptr, nullptr), kInvalid);
  EXPECT_EQ(kvx_launch_write_kv(nullptr, &c.write, nullptr), kInvalid);
  EXPECT_EQ(kvx_launch_write_kv_prefill(&c.cache.desc, nullptr, 1, nullptr), kInvalid);
  EXPECT_EQ(kvx_launch_write_kv_prefill(nullptr, &c.write, 1, nullptr), kInvalid);
  EXPECT_EQ(kvx_launch_gather_kv(&c.cache.desc, nullptr, nullptr), kInvalid);
  EXPECT_EQ(kvx_query_features(nullptr), kInvalid);
}

// --- the size rules of top-level structs ---

template <class Struct>
struct Longer {
  Struct object;
  uint64_t tail;
};

TEST(StructSizes, AboveTheKnownOneNeedATailOfZeros) {
  Calls c;
  Longer<kvx_write_desc_t> longer = {c.write, 0};
  longer.object.size = sizeof longer;
  EXPECT_EQ(kvx_write_kv(&c.cache.desc, &longer.object, nullptr), KVX_STATUS_OK)
      << kvx_last_error();
  longer.tail = uint64_t{1} << 63;
  const Snapshot before(c);
  EXPECT_EQ(kvx_write_kv(&c.cache.desc, &longer.object, nullptr), kIncompatible);
  EXPECT_TRUE(Snapshot(c) == before);

  Longer<kvx_cache_desc_t> cache = {c.cache.desc, 0};
  cache.object.size = sizeof cache;
  EXPECT_EQ(kvx_validate_cache_desc(&cache.object), KVX_STATUS_OK) << kvx_last_error();
  cache.tail = 1;
  EXPECT_EQ(kvx_validate_cache_desc(&cache.object), kIncompatible);
}

TEST(StructSizes, OfOptionalNestedStructsMayBeZeroWhenTheyAreEmpty) {
  Calls c;
  c.write.k_scale_desc = {};
  c.write.v_scale_desc = {};
  c.cache.desc.pool = {};
  EXPECT_EQ(write(c), KVX_STATUS_OK) << kvx_last_error();
}

}  // namespace
}  // namespace kvx::api_test::bad_input_test
