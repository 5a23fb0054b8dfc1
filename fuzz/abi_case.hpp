// Structured random descriptors: what the ABI's fuzz targets share.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvx/kvx_abi.h"

// The slow provider of tests/providers, compiled with other names.
extern "C" {
kvx_status_t slow_validate_cache_desc(const kvx_cache_desc_t* cache);
kvx_status_t slow_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                           void* stream);
kvx_status_t slow_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                            void* stream);
}

namespace kvx::fuzz {

constexpr int64_t kMostBytes = 1 << 15;  // of a buffer

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not true: %s\nlast error: %s\n", what, kvx_last_error());
  std::abort();
}

constexpr kvx_dtype_t kFloats[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3,
                                   KVX_DTYPE_F8_E5M2};
constexpr kvx_dtype_t kIndices[] = {KVX_DTYPE_S32, KVX_DTYPE_S64};
constexpr int64_t kExtremes[] = {0,         1,         -1,         2,         INT32_MAX, INT32_MIN,
                                 INT64_MAX, INT64_MIN, UINT32_MAX, 1LL << 31, 7,         16};

inline int bytes_of(const kvx_dtype_t& dtype) {
  uint32_t number;
  memcpy(&number, &dtype, sizeof number);
  if (number == KVX_DTYPE_F32) return 4;
  return number == KVX_DTYPE_F16 || number == KVX_DTYPE_BF16 ? 2 : 1;
}

// Random choices.
class Choices {
 public:
  explicit Choices(FuzzedDataProvider& data) : data_(data) {}

  bool one_in(int n) { return data_.ConsumeIntegralInRange<int>(0, n - 1) == 0; }
  bool flip() { return data_.ConsumeBool(); }
  int64_t between(int64_t low, int64_t high) {
    return data_.ConsumeIntegralInRange<int64_t>(low, high);
  }
  template <class T, size_t N>
  T pick(const T (&list)[N]) {
    return list[data_.ConsumeIntegralInRange<size_t>(0, N - 1)];
  }
  int64_t rarely_extreme(int64_t usual) { return one_in(24) ? pick(kExtremes) : usual; }

 private:
  FuzzedDataProvider& data_;
};

// A struct with room behind it, for a size that claims a tail.
template <class Struct>
struct Roomy {
  Struct object{};
  uint8_t tail[4096] = {};
};

// Dense strides with some gaps of 16 elements.
inline void set_tensor(Choices& choices, kvx_tensor_desc_t& tensor,
                       std::initializer_list<int64_t> shape) {
  tensor.size = sizeof tensor;
  tensor.memory = KVX_MEMORY_HOST;
  tensor.ndim = static_cast<uint32_t>(shape.size());
  int64_t stride = 1;
  for (uint32_t i = tensor.ndim; i-- > 0;) {
    tensor.shape[i] = shape.begin()[i];
    tensor.stride[i] = stride;
    stride *= tensor.shape[i];
    if (i > 0 && choices.one_in(10)) stride += 16 * choices.between(1, 2);
  }
}

// Bytes that a tensor takes, or -1 when that is more than `most` or nonsense.
inline int64_t bytes_taken(const kvx_tensor_desc_t& tensor, int64_t most = kMostBytes) {
  if (tensor.ndim > KVX_MAX_TENSOR_DIMS) return -1;
  int64_t last = 0;
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return 0;
    if (tensor.shape[i] == 1) continue;
    int64_t step = 0;
    if (tensor.shape[i] < 0 || tensor.stride[i] < 0 ||
        __builtin_mul_overflow(tensor.shape[i] - 1, tensor.stride[i], &step) ||
        __builtin_add_overflow(last, step, &last) || last > most) {
      return -1;
    }
  }
  const int64_t bytes = (last + 1) * bytes_of(tensor.dtype);
  return bytes <= most ? bytes : -1;
}

// Bytes of finite numbers of ordinary size in every type; some buffers hold anything instead.
inline void fill(std::vector<uint8_t>& bytes, int64_t size, uint32_t seed, bool is_wild) {
  bytes.resize(static_cast<size_t>(size) + 1);  // never null
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto number = static_cast<uint32_t>(i) * 7 + seed;
    bytes[i] = static_cast<uint8_t>(is_wild ? number * 2654435761u >> 24 : 0x30 + number % 13);
  }
}

// A list of indices in the type and size of a descriptor.
class IndexList {
 public:
  std::vector<int64_t> entries;

  const void* as(const kvx_dtype_t& dtype) {
    uint32_t number;
    memcpy(&number, &dtype, sizeof number);
    if (number == KVX_DTYPE_S64) return entries.data();
    ids_in_32_bits_.assign(entries.begin(), entries.end());
    return ids_in_32_bits_.data();
  }

 private:
  std::vector<int32_t> ids_in_32_bits_;
};

}  // namespace kvx::fuzz
