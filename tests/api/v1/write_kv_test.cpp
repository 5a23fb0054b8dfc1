// kvx_write_kv: every byte is stored where the layout requires, and no other byte changes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "core/float16.hpp"
#include "format/small_float.hpp"
#include "tests/api/v1_cache.hpp"

namespace kvx::api_test::write_kv_test {
namespace {

// What a side should hold after a write of equal dtypes, element by element.
void expect_side(const Cache& cache, const kvx_tensor_desc_t& tensor, const Memory& before,
                 const Memory& after, const kvx_tensor_desc_t& io, const Memory& source,
                 const std::vector<int64_t>& slots) {
  Memory expected = before;
  const int bytes = bytes_of(tensor.dtype);
  const Shape& shape = cache.shape();
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const int64_t to =
            place_of(tensor, slots[t] / shape.block_size, slots[t] % shape.block_size, h, d);
        const int64_t from = Io::token_place(io, static_cast<int64_t>(t)) + h * shape.head_dim + d;
        memcpy(expected.data() + to * bytes, source.data() + from * bytes, bytes);
      }
    }
  }
  EXPECT_TRUE(after == expected);
}

void write_and_expect(Cache& cache, const Io& io, const std::vector<int64_t>& slots) {
  const Memory k_before = cache.k_memory;
  const Memory v_before = cache.v_memory;
  const kvx_write_desc_t write = write_desc(io, slots);
  ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
  expect_side(cache, cache.desc.k, k_before, cache.k_memory, io.desc.key, io.k_memory, slots);
  expect_side(cache, cache.desc.v, v_before, cache.v_memory, io.desc.value, io.v_memory, slots);
}

const std::vector<int64_t> kSomeSlots = {3, 4, 5, 6, 7, 8, -1, 19, 0, 2, 11, 10};

TEST(WriteKv, PutsEveryByteWhereEachLayoutSays) {
  for (const Layout& layout : all_layouts()) {
    for (const kvx_dtype_t dtype :
         {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2}) {
      SCOPED_TRACE(layout.name + ", dtype " + std::to_string(dtype));
      // A gap of 16 elements is 16 bytes at least.
      Cache cache({}, layout, dtype, dtype);
      const Io io(cache.shape(), std::ssize(kSomeSlots), dtype, dtype);
      write_and_expect(cache, io, kSomeSlots);
    }
  }
}

TEST(WriteKv, TakesPaddedAndGappedIo) {
  for (const auto& [sequences, gap] : {std::pair{0, 16}, {3, 0}, {3, 32}, {12, 0}, {1, 0}}) {
    SCOPED_TRACE(std::to_string(sequences) + " sequences, gap " + std::to_string(gap));
    Cache cache;
    const Io io(cache.shape(), std::ssize(kSomeSlots), KVX_DTYPE_F16, KVX_DTYPE_F16, sequences,
                gap);
    write_and_expect(cache, io, kSomeSlots);
  }
}

TEST(WriteKv, TakesKeysAndValuesOfDifferentTypes) {
  Cache cache({}, {}, KVX_DTYPE_F32, KVX_DTYPE_BF16);
  const Io io(cache.shape(), std::ssize(kSomeSlots), KVX_DTYPE_F32, KVX_DTYPE_BF16);
  write_and_expect(cache, io, kSomeSlots);
}

TEST(WriteKv, TakesAnyHeadDimWithCanonicalStrides) {
  for (const uint32_t head_dim : {1u, 7u, 33u, 80u, 1025u}) {
    SCOPED_TRACE(head_dim);
    Cache cache({.num_blocks = 3, .block_size = 3, .num_heads = 3, .head_dim = head_dim});
    const Io io(cache.shape(), 4);
    write_and_expect(cache, io, {8, 0, 1, 2});
  }
}

TEST(WriteKv, IgnoresTheStrideOfAnAxisOfOneElement) {
  // The fuzzer found the product of such a stride to overflow.
  Cache cache({.num_blocks = 1, .block_size = 4, .num_heads = 1, .head_dim = 16});
  Io io(cache.shape(), 1);
  for (kvx_tensor_desc_t* tensor : {&cache.desc.k, &cache.desc.v}) {
    tensor->stride[0] = INT64_MAX - 7;
    tensor->stride[2] = INT64_MIN;
  }
  io.desc.key.stride[0] = INT64_MAX - 7;
  write_and_expect(cache, io, {3});
}

TEST(WriteKv, LetsTheLaterTokenOfEqualSlotsWin) {
  Cache cache;
  const Io io(cache.shape(), 3);
  write_and_expect(cache, io, {5, 6, 5});
}

TEST(WriteKv, TakesSlotsOf32Bits) {
  Cache cache;
  Cache fork;
  const Io io(cache.shape(), 3);
  const std::vector<int32_t> slots32 = {7, -5, 2};
  const std::vector<int64_t> slots64 = {7, -5, 2};
  kvx_write_desc_t write = write_desc(io, slots64);
  ASSERT_EQ(kvx_write_kv(&fork.desc, &write, nullptr), KVX_STATUS_OK);
  write.slots.dtype = KVX_DTYPE_S32;
  write.slots.slots = slots32.data();
  ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_TRUE(cache.k_memory == fork.k_memory && cache.v_memory == fork.v_memory);
}

TEST(WriteKv, SkipsTheInvalidSlotWhateverItsValue) {
  for (const int64_t invalid : {int64_t{5}, int64_t{99}, INT64_MAX, INT64_MIN, int64_t{-7}}) {
    SCOPED_TRACE(invalid);
    Cache cache;
    const Memory before = cache.k_memory;
    const Io io(cache.shape(), 2);
    const std::vector<int64_t> slots = {invalid, -3};
    kvx_write_desc_t write = write_desc(io, slots);
    write.slots.invalid_slot = invalid;
    EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_TRUE(cache.k_memory == before);
  }
}

TEST(WriteKv, RefusesASlotBeyondTheCacheAndWritesNothing) {
  for (const int64_t bad : {int64_t{20}, int64_t{21}, INT64_MAX, int64_t{1} << 32}) {
    Cache cache;
    const Memory before = cache.k_memory;
    const Io io(cache.shape(), 2);
    const std::vector<int64_t> slots = {0, bad};
    const kvx_write_desc_t write = write_desc(io, slots);
    EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OUT_OF_RANGE) << bad;
    EXPECT_TRUE(cache.k_memory == before) << bad;
    EXPECT_NE(std::string(kvx_last_error()).find("slots[1]"), std::string::npos);
  }
}

TEST(WriteKv, OfNoTokensIsANoOpEvenWithoutPointers) {
  Cache cache;
  const Memory before = cache.k_memory;
  Io io(cache.shape(), 0);
  io.desc.key.data = nullptr;
  io.desc.value.data = nullptr;
  kvx_write_desc_t write = write_desc(io, {});
  write.slots.slots = nullptr;
  EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_TRUE(cache.k_memory == before);
}

float to_float(kvx_dtype_t dtype, const uint8_t* element) {
  uint32_t bits = 0;
  memcpy(&bits, element, bytes_of(dtype));
  if (dtype == KVX_DTYPE_F32) return std::bit_cast<float>(bits);
  const auto half = static_cast<uint16_t>(bits);
  return dtype == KVX_DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

uint32_t from_float(kvx_dtype_t dtype, float number) {
  if (dtype == KVX_DTYPE_F32) return std::bit_cast<uint32_t>(number);
  return dtype == KVX_DTYPE_F16 ? f32_to_f16(number) : f32_to_bf16(number);
}

TEST(WriteKv, ConvertsBetweenTheFloatTypes) {
  for (const kvx_dtype_t from : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
    for (const kvx_dtype_t to : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
      if (from == to) continue;
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 1}, to, to);
      const Io io(cache.shape(), 1, from, from);
      const std::vector<int64_t> slots = {6};
      const kvx_write_desc_t write = write_desc(io, slots);
      ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 16; ++d) {
          const float number = to_float(from, io.v_memory.data() + (h * 16 + d) * bytes_of(from));
          uint32_t stored = 0;
          memcpy(&stored, cache.v_memory.data() + place_of(cache.desc.v, 1, 2, h, d) * bytes_of(to),
                 bytes_of(to));
          ASSERT_EQ(stored, from_float(to, number)) << h << " " << d;
        }
      }
    }
  }
}

// --- 8-bit floats and their scales ---

struct Scales {
  const char* name;
  kvx_scale_granularity_t granularity;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
};

std::vector<Scales> all_scales() {
  return {{"tensor", KVX_SCALE_PER_TENSOR, {1}, {1}},
          {"tensor without a dimension", KVX_SCALE_PER_TENSOR, {}, {}},
          {"block", KVX_SCALE_PER_BLOCK, {5}, {1}},
          {"block, every third", KVX_SCALE_PER_BLOCK, {5}, {3}},
          {"head", KVX_SCALE_PER_HEAD, {2}, {1}},
          {"head, one for all", KVX_SCALE_PER_HEAD, {2}, {0}},
          {"block and head", KVX_SCALE_PER_BLOCK_HEAD, {5, 2}, {2, 1}},
          {"head and block", KVX_SCALE_PER_BLOCK_HEAD, {5, 2}, {1, 7}}};
}

kvx_scale_desc_t scale_desc(const Scales& scales, const float* data) {
  kvx_scale_desc_t desc{};
  desc.size = sizeof desc;
  desc.dtype = KVX_DTYPE_F32;
  desc.granularity = scales.granularity;
  desc.ndim = static_cast<uint32_t>(scales.shape.size());
  for (size_t i = 0; i < scales.shape.size(); ++i) {
    desc.shape[i] = scales.shape[i];
    desc.stride[i] = scales.stride[i];
  }
  desc.data = data;
  return desc;
}

// A plain second reading of the shapes in the specification.
float scale_at(const Scales& scales, const float* data, int64_t block, int64_t head) {
  switch (scales.granularity) {
    case KVX_SCALE_PER_BLOCK:
      return data[block * scales.stride[0]];
    case KVX_SCALE_PER_HEAD:
      return data[head * scales.stride[0]];
    case KVX_SCALE_PER_BLOCK_HEAD:
      return data[block * scales.stride[0] + head * scales.stride[1]];
    default:
      return data[0];
  }
}

TEST(WriteKv, QuantisesTo8BitFloatsWithScalesOfEveryGranularity) {
  std::vector<float> data(64);
  for (size_t i = 0; i < data.size(); ++i) data[i] = 0.01f + 0.003f * static_cast<float>(i);
  for (const Scales& scales : all_scales()) {
    SCOPED_TRACE(scales.name);
    Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2);
    const Io io(cache.shape(), 3, KVX_DTYPE_F32, KVX_DTYPE_F32);
    const std::vector<int64_t> slots = {1, 18, 9};
    kvx_write_desc_t write = write_desc(io, slots);
    write.k_scale_desc = scale_desc(scales, data.data());
    write.v_scale_desc = scale_desc(scales, data.data());
    ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 16; ++d) {
          const int64_t at = place_of(cache.desc.k, slots[t] / 4, slots[t] % 4, h, d);
          const int64_t from = (t * 32 + h * 16 + d) * 4;
          const float inverse = 1.0f / scale_at(scales, data.data(), slots[t] / 4, h);
          const float k = to_float(KVX_DTYPE_F32, io.k_memory.data() + from) * inverse;
          const float v = to_float(KVX_DTYPE_F32, io.v_memory.data() + from) * inverse;
          ASSERT_EQ(cache.k_memory.data()[at], format::E4M3::encode(k))
              << t << " " << h << " " << d;
          ASSERT_EQ(cache.v_memory.data()[at], format::E5M2::encode(v))
              << t << " " << h << " " << d;
        }
      }
    }
  }
}

TEST(WriteKv, FallsBackToTheScaleOfTheTensorAndThenToOne) {
  const float scale = 0.25f;
  for (const float* fallback : {&scale, static_cast<const float*>(nullptr)}) {
    Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
    const Io io(cache.shape(), 1, KVX_DTYPE_F32, KVX_DTYPE_F32);
    const std::vector<int64_t> slots = {0};
    kvx_write_desc_t write = write_desc(io, slots);
    write.k_scale = fallback;
    ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
    const float number = to_float(KVX_DTYPE_F32, io.k_memory.data());
    EXPECT_EQ(cache.k_memory.data()[0], format::E4M3::encode(fallback ? number * 4 : number));
  }
}

TEST(WriteKv, RefusesScalesThatAreNoPositiveNumbersAndWritesNothing) {
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
    const Memory before = cache.k_memory;
    const Io io(cache.shape(), 2, KVX_DTYPE_F32, KVX_DTYPE_F32);
    const std::vector<int64_t> slots = {0, 17};
    std::vector<float> data(10, 1.0f);
    data[4 * 2 + 1] = bad;  // of block 4, head 1
    kvx_write_desc_t write = write_desc(io, slots);
    write.v_scale_desc = scale_desc({"", KVX_SCALE_PER_BLOCK_HEAD, {5, 2}, {2, 1}}, data.data());
    EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_INVALID_ARGUMENT) << bad;
    EXPECT_TRUE(cache.k_memory == before) << bad;
  }
}

TEST(WriteKv, LooksOnlyAtTheScalesOfTheBlocksThatItWrites) {
  Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
  const Io io(cache.shape(), 1, KVX_DTYPE_F32, KVX_DTYPE_F32);
  const std::vector<int64_t> slots = {0};
  std::vector<float> data = {1, -1, -1, -1, -1};
  kvx_write_desc_t write = write_desc(io, slots);
  write.k_scale_desc = scale_desc({"", KVX_SCALE_PER_BLOCK, {5}, {1}}, data.data());
  EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

TEST(WriteKv, MayRunInSeveralThreadsThatWriteDifferentSlots) {
  Cache cache;
  Cache alone;
  const Io io(cache.shape(), 20);
  std::vector<int64_t> all(20);
  for (int64_t t = 0; t < 20; ++t) all[static_cast<size_t>(t)] = (t * 7) % 20;
  const kvx_write_desc_t whole = write_desc(io, all);
  ASSERT_EQ(kvx_write_kv(&alone.desc, &whole, nullptr), KVX_STATUS_OK);
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < 4; ++part) {
    threads.emplace_back([&, part] {
      kvx_write_desc_t write = whole;
      write.io.num_tokens = write.slots.token_count = 5;
      write.slots.slots = all.data() + part * 5;
      for (kvx_tensor_desc_t* tensor : {&write.io.key, &write.io.value}) {
        tensor->shape[0] = 5;
        tensor->data = static_cast<uint8_t*>(tensor->data) + part * 5 * tensor->stride[0] * 2;
      }
      EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(cache.k_memory == alone.k_memory && cache.v_memory == alone.v_memory);
}

// --- the kernels' entry points ---

TEST(LaunchWrite, WritesHostMemoryAsTheHostCallDoes) {
  Cache cache;
  Cache fork;
  const Io io(cache.shape(), 4);
  const std::vector<int64_t> slots = {4, 5, 6, 7};
  const kvx_write_desc_t write = write_desc(io, slots);
  ASSERT_EQ(kvx_write_kv(&fork.desc, &write, nullptr), KVX_STATUS_OK);
  ASSERT_EQ(kvx_launch_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK);
  EXPECT_TRUE(cache.k_memory == fork.k_memory && cache.v_memory == fork.v_memory);
  Cache prefilled;
  ASSERT_EQ(kvx_launch_write_kv_prefill_f16(&prefilled.desc, &write, 2, nullptr), KVX_STATUS_OK);
  EXPECT_TRUE(prefilled.k_memory == fork.k_memory && prefilled.v_memory == fork.v_memory);
}

TEST(LaunchWrite, RefusesAnotherTypeThanItsName) {
  Cache cache;
  const Io io(cache.shape(), 1);
  const std::vector<int64_t> slots = {4};
  const kvx_write_desc_t write = write_desc(io, slots);
  EXPECT_EQ(kvx_launch_write_kv_f32(&cache.desc, &write, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(kvx_launch_write_kv_bf16(&cache.desc, &write, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(kvx_launch_write_kv_f16(&cache.desc, &write, nullptr), KVX_STATUS_OK);
}

TEST(LaunchWrite, RefusesPrefillsThatAreNoWholeSequences) {
  Cache cache;
  const Io io(cache.shape(), 3);
  const std::vector<int64_t> slots = {4, 5, 6};
  const kvx_write_desc_t write = write_desc(io, slots);
  for (const int32_t bad : {0, -1, 2, INT32_MIN}) {
    EXPECT_EQ(kvx_launch_write_kv_prefill(&cache.desc, &write, bad, nullptr),
              KVX_STATUS_INVALID_ARGUMENT)
        << bad;
  }
}

}  // namespace
}  // namespace kvx::api_test::write_kv_test
