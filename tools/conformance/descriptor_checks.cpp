// Sections 4.2 and 4.3: which cache descriptors kvx_validate_cache_desc accepts and refuses.
#include <cstring>

#include "tools/conformance/check.hpp"
#include "tools/conformance/numbers.hpp"
#include "tools/conformance/tensors.hpp"

namespace kvx::conformance {
namespace {

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr auto kUnsupported = KVX_STATUS_UNSUPPORTED;

// A good descriptor with one field changed.
struct Spoiled {
  const char* what;
  kvx_status_t expected;
  void (*spoil)(kvx_cache_desc_t&);
};

template <class Enum>
void set_number(Enum& field, uint32_t number) {
  memcpy(&field, &number, sizeof number);
}

void must_refuse(const Provider& provider, const Arrangement& arrangement,
                 std::initializer_list<Spoiled> list) {
  for (const Spoiled& spoiled : list) {
    Memory memory;
    kvx_cache_desc_t cache = make_cache(memory, {}, arrangement, KVX_DTYPE_F16, KVX_DTYPE_F16);
    spoiled.spoil(cache);
    require_status(provider.validate_cache_desc(&cache), spoiled.expected,
                   std::string("a descriptor with ") + spoiled.what);
  }
}

// Odd sizes as well: canonical strides need no more than the elements' alignment.
std::vector<Geometry> geometries(const Arrangement& arrangement) {
  std::vector<Geometry> all = {{}, {1, 1, 1, 8}, {3, 5, 3, 80}};
  const bool is_dense = arrangement.view == Arrangement::View::kDense && arrangement.k_pack == 0;
  if (is_dense) all.push_back({2, 3, 1, 5});
  return all;
}

void takes(const Provider& provider, const Arrangement& arrangement) {
  for (const Geometry& g : geometries(arrangement)) {
    Memory memory;
    const kvx_cache_desc_t cache = make_cache(memory, g, arrangement, KVX_DTYPE_F16, KVX_DTYPE_F16);
    require_status(provider.validate_cache_desc(&cache), KVX_STATUS_OK,
                   fmt::format("a cache of {} blocks, {} tokens, {} heads, {} dims", g.num_blocks,
                               g.block_size, g.num_heads, g.head_dim));
  }
}

void refuses_shapes(const Provider& provider) {
  must_refuse(
      provider, nhd(),
      {{"k.ndim 3", kInvalid, [](kvx_cache_desc_t& c) { c.k.ndim = 3; }},
       {"v.ndim 5", kInvalid, [](kvx_cache_desc_t& c) { c.v.ndim = 5; }},
       {"k.ndim 2^32 - 1", kInvalid, [](kvx_cache_desc_t& c) { c.k.ndim = UINT32_MAX; }},
       {"another number of blocks in k", kInvalid, [](kvx_cache_desc_t& c) { ++c.k.shape[0]; }},
       {"another block size in v", kInvalid, [](kvx_cache_desc_t& c) { --c.v.shape[1]; }},
       {"another number of heads in v", kInvalid, [](kvx_cache_desc_t& c) { ++c.v.shape[2]; }},
       {"a negative head_dim in k", kInvalid, [](kvx_cache_desc_t& c) { c.k.shape[3] = -16; }},
       {"shapes of HND under NHD", kInvalid,
        [](kvx_cache_desc_t& c) { std::swap(c.k.shape[1], c.k.shape[2]); }}});
}

void refuses_layouts(const Provider& provider) {
  must_refuse(provider, nhd(),
              {{"layout 0", kInvalid,
                [](kvx_cache_desc_t& c) { set_number(c.k.layout, 0), set_number(c.v.layout, 0); }},
               {"layout 99", kInvalid, [](kvx_cache_desc_t& c) {
                  set_number(c.k.layout, 99), set_number(c.v.layout, 99);
                }}});
}

void refuses_packs(const Provider& provider) {
  must_refuse(
      provider, arrangements()[2],
      {{"pack 0", kInvalid, [](kvx_cache_desc_t& c) { c.k.shape[4] = 0; }},
       {"pack 3, no divisor of head_dim", kInvalid,
        [](kvx_cache_desc_t& c) { c.v.shape[4] = 3, c.v.shape[2] = 5; }},
       {"head_dim / pack that is not", kInvalid, [](kvx_cache_desc_t& c) { c.k.shape[2] = 16; }},
       {"four dimensions", kInvalid, [](kvx_cache_desc_t& c) { c.k.ndim = 4; }}});
}

void refuses_strides(const Provider& provider) {
  must_refuse(
      provider, nhd(),
      {{"k.stride[0] + 1", kUnsupported, [](kvx_cache_desc_t& c) { ++c.k.stride[0]; }},
       {"v.stride[0] + 1", kUnsupported, [](kvx_cache_desc_t& c) { ++c.v.stride[0]; }},
       {"k.stride[0] of 0", kUnsupported, [](kvx_cache_desc_t& c) { c.k.stride[0] = 0; }},
       {"k.stride[1] below a token's row", kUnsupported,
        [](kvx_cache_desc_t& c) { c.k.stride[1] = 8; }},
       {"a negative v.stride[0]", kUnsupported, [](kvx_cache_desc_t& c) { c.v.stride[0] *= -1; }},
       {"k.stride[3] of 2", kUnsupported, [](kvx_cache_desc_t& c) { c.k.stride[3] = 2; }}});
}

void refuses_types(const Provider& provider) {
  must_refuse(provider, nhd(),
              {{"k.dtype 0", kInvalid, [](kvx_cache_desc_t& c) { set_number(c.k.dtype, 0); }},
               {"v.dtype S32", kInvalid, [](kvx_cache_desc_t& c) { c.v.dtype = KVX_DTYPE_S32; }},
               {"k.dtype U8", kInvalid, [](kvx_cache_desc_t& c) { c.k.dtype = KVX_DTYPE_U8; }},
               {"v.dtype 77", kInvalid, [](kvx_cache_desc_t& c) { set_number(c.v.dtype, 77); }}});
}

void refuses_memory(const Provider& provider) {
  must_refuse(provider, nhd(),
              {{"k.memory 9", kInvalid, [](kvx_cache_desc_t& c) { set_number(c.k.memory, 9); }},
               {"v.memory 2^32 - 1", kInvalid,
                [](kvx_cache_desc_t& c) { set_number(c.v.memory, UINT32_MAX); }}});
}

void refuses_counts_and_nulls(const Provider& provider) {
  must_refuse(provider, nhd(),
              {{"num_blocks 0", kInvalid, [](kvx_cache_desc_t& c) { c.num_blocks = 0; }},
               {"block_size 0", kInvalid, [](kvx_cache_desc_t& c) { c.block_size = 0; }},
               {"num_kv_heads 0", kInvalid, [](kvx_cache_desc_t& c) { c.num_kv_heads = 0; }},
               {"head_dim 0", kInvalid, [](kvx_cache_desc_t& c) { c.head_dim = 0; }},
               {"num_blocks 0, in the shapes too", kInvalid,
                [](kvx_cache_desc_t& c) { c.num_blocks = 0, c.k.shape[0] = c.v.shape[0] = 0; }},
               {"k.data null", kInvalid, [](kvx_cache_desc_t& c) { c.k.data = nullptr; }},
               {"v.data null", kInvalid, [](kvx_cache_desc_t& c) { c.v.data = nullptr; }}});
  require_status(provider.validate_cache_desc(nullptr), kInvalid, "kvx_validate_cache_desc(null)");
}

// Products that overflow 64 bits. Either of the two errors may be reported.
void refuses_sizes_beyond_memory(const Provider& provider) {
  Memory memory;
  kvx_cache_desc_t cache = make_cache(memory, {}, nhd(), KVX_DTYPE_F16, KVX_DTYPE_F16);
  cache.num_blocks = cache.block_size = cache.num_kv_heads = cache.head_dim = UINT32_MAX;
  for (kvx_tensor_desc_t* tensor : {&cache.k, &cache.v}) {
    uint64_t stride = 1;
    for (int i = 3; i >= 0; --i, stride *= UINT32_MAX) {
      tensor->shape[i] = UINT32_MAX;
      tensor->stride[i] = static_cast<int64_t>(stride);
    }
  }
  const kvx_status_t status = provider.validate_cache_desc(&cache);
  require(status == kInvalid || status == kUnsupported,
          "a cache of (2^32 - 1)^4 elements returns status {}, expected INVALID_ARGUMENT 1 or "
          "UNSUPPORTED 2",
          static_cast<int>(status));
}

}  // namespace

std::vector<Check> descriptor_checks() {
  std::vector<Check> checks;
  for (const Arrangement& arrangement : arrangements()) {
    checks.push_back({Section::kLayouts, "validate " + arrangement.name,
                      Features(arrangement.needs()).add(kCacheDtypes, KVX_DTYPE_F16),
                      [&arrangement](const Provider& p) { takes(p, arrangement); }});
  }
  const auto add = [&checks](Section section, const char* name, const Arrangement& arrangement,
                             void (*ask)(const Provider&)) {
    checks.push_back(
        {section, name, Features(arrangement.needs()).add(kCacheDtypes, KVX_DTYPE_F16), ask});
  };
  add(Section::kLayouts, "refuse layouts that are none", nhd(), refuses_layouts);
  add(Section::kLayouts, "refuse other shapes", nhd(), refuses_shapes);
  add(Section::kLayouts, "refuse packs that do not divide", arrangements()[2], refuses_packs);
  add(Section::kLayouts, "refuse strides that cannot be", nhd(), refuses_strides);
  add(Section::kLayouts, "refuse sizes beyond memory", nhd(), refuses_sizes_beyond_memory);
  add(Section::kTypes, "refuse types that no cache has", nhd(), refuses_types);
  add(Section::kTypes, "refuse memory kinds that are none", nhd(), refuses_memory);
  add(Section::kValidation, "refuse counts of zero and null data", nhd(), refuses_counts_and_nulls);
  return checks;
}

}  // namespace kvx::conformance
