// The v1 calls of the door under structured random descriptors. A call either fails and changes
// nothing, or every byte is what plain loops over the specification say.
//
// Descriptors are built to be legal, then one field in some is spoiled. Memory is as large as the
// descriptor says, so that a wrong access is a fault of the library; descriptors that claim more
// than kMostBytes are only shown to kvx_validate_cache_desc, which looks at no data.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvx/kvx_abi.h"

namespace {

constexpr int64_t kMostBytes = 1 << 20;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not true: %s\nlast error: %s\n", what, kvx_last_error());
  std::abort();
}

constexpr kvx_dtype_t kFloats[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3,
                                   KVX_DTYPE_F8_E5M2};
constexpr kvx_layout_t kLayouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                     KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM};
constexpr int64_t kExtremes[] = {0,         1,         -1,         2,         INT32_MAX, INT32_MIN,
                                 INT64_MAX, INT64_MIN, UINT32_MAX, 1LL << 31, 7,         16};

int bytes_of(uint32_t dtype) {
  if (dtype == KVX_DTYPE_F32) return 4;
  return dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 ? 2 : 1;
}

// Bytes that the tensor takes, or -1 when that is more than kMostBytes or nonsense.
int64_t bytes_taken(const kvx_tensor_desc_t& tensor, int element_bytes) {
  if (tensor.ndim > KVX_MAX_TENSOR_DIMS) return -1;
  int64_t last = 0;
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return 0;
    int64_t step = 0;
    if (tensor.shape[i] < 0 || tensor.stride[i] < 0 ||
        __builtin_mul_overflow(tensor.shape[i] - 1, tensor.stride[i], &step) ||
        __builtin_add_overflow(last, step, &last) || last > kMostBytes) {
      return -1;
    }
  }
  return (last + 1) * element_bytes <= kMostBytes ? (last + 1) * element_bytes : -1;
}

// Where element (block, token, head, dim) lies, in elements.
int64_t place_of(const kvx_tensor_desc_t& tensor, int64_t block, int64_t token, int64_t head,
                 int64_t dim) {
  const int64_t* s = tensor.stride;
  if (tensor.ndim == 5) {
    const int64_t pack = tensor.shape[4];
    return block * s[0] + head * s[1] + dim / pack * s[2] + token * s[3] + dim % pack * s[4];
  }
  if (tensor.layout == KVX_LAYOUT_BLOCK_HND) {
    return block * s[0] + head * s[1] + token * s[2] + dim * s[3];
  }
  return block * s[0] + token * s[1] + head * s[2] + dim * s[3];
}

int64_t io_place(const kvx_tensor_desc_t& tensor, int64_t token, int64_t head, int64_t dim) {
  const int64_t* s = tensor.stride;
  if (tensor.ndim == 3) return token * s[0] + head * s[1] + dim * s[2];
  const int64_t each = tensor.shape[1];
  return token / each * s[0] + token % each * s[1] + head * s[2] + dim * s[3];
}

class Case {
 public:
  explicit Case(FuzzedDataProvider& data) : data_(data) {
    make_cache();
    make_io();
    make_slots();
    make_table();
    if (data_.ConsumeBool()) spoil();
  }

  void run() {
    if (!allocate()) {
      kvx_validate_cache_desc(&cache_);
      return;
    }
    is_write_ ? run_write() : run_gather();
  }

 private:
  int64_t small(int64_t most) { return data_.ConsumeIntegralInRange<int64_t>(1, most); }

  template <class T, size_t N>
  T pick(const T (&list)[N]) {
    return list[data_.ConsumeIntegralInRange<size_t>(0, N - 1)];
  }

  void set_tensor(kvx_tensor_desc_t& tensor, std::initializer_list<int64_t> shape) {
    tensor.ndim = static_cast<uint32_t>(shape.size());
    int64_t stride = 1;
    for (uint32_t i = tensor.ndim; i-- > 0;) {
      tensor.shape[i] = shape.begin()[i];
      tensor.stride[i] = stride;
      stride *= tensor.shape[i];
      if (i > 0 && data_.ConsumeIntegralInRange<int>(0, 7) == 0) stride += 16 * small(2);
    }
  }

  kvx_tensor_desc_t cache_tensor(kvx_layout_t layout) {
    kvx_tensor_desc_t tensor{};
    tensor.size = sizeof tensor;
    tensor.dtype = pick(kFloats);
    tensor.layout = layout;
    tensor.memory = KVX_MEMORY_HOST;
    const int64_t nb = cache_.num_blocks, bs = cache_.block_size, h = cache_.num_kv_heads;
    const int64_t d = cache_.head_dim;
    const bool packed = layout == KVX_LAYOUT_BLOCK_HND_PACKED ||
                        (layout == KVX_LAYOUT_BLOCK_CUSTOM && data_.ConsumeBool());
    if (packed) {
      int64_t pack = small(d);
      while (d % pack != 0) --pack;
      set_tensor(tensor, {nb, h, d / pack, bs, pack});
    } else if (layout == KVX_LAYOUT_BLOCK_HND) {
      set_tensor(tensor, {nb, h, bs, d});
    } else {
      set_tensor(tensor, {nb, bs, h, d});
    }
    return tensor;
  }

  void make_cache() {
    cache_.size = sizeof cache_;
    cache_.num_blocks = static_cast<uint32_t>(small(4));
    cache_.block_size = static_cast<uint32_t>(small(5));
    cache_.num_kv_heads = static_cast<uint32_t>(small(3));
    cache_.head_dim = static_cast<uint32_t>(small(24));
    const kvx_layout_t layout = pick(kLayouts);
    cache_.k = cache_tensor(layout);
    cache_.v = cache_tensor(layout);
  }

  void make_io() {
    is_write_ = data_.ConsumeBool();
    rows_ = data_.ConsumeIntegralInRange<int64_t>(is_write_ ? 0 : 1, 3);
    each_ = data_.ConsumeIntegralInRange<int64_t>(0, 6);
    io_.size = sizeof io_;
    io_.num_tokens = static_cast<uint32_t>(rows_ * each_);
    io_.num_kv_heads = cache_.num_kv_heads;
    io_.head_dim = cache_.head_dim;
    for (kvx_tensor_desc_t* tensor : {&io_.key, &io_.value}) {
      tensor->size = sizeof *tensor;
      const kvx_dtype_t own = (tensor == &io_.key ? cache_.k : cache_.v).dtype;
      tensor->dtype = data_.ConsumeIntegralInRange<int>(0, 3) == 0 ? pick(kFloats) : own;
      tensor->memory = KVX_MEMORY_HOST;
      const int64_t h = io_.num_kv_heads, d = io_.head_dim;
      if (data_.ConsumeBool()) {
        set_tensor(*tensor, {rows_ * each_, h, d});
      } else {
        set_tensor(*tensor, {rows_, each_, h, d});
      }
    }
  }

  void make_slots() {
    const int64_t num_slots = int64_t{cache_.num_blocks} * cache_.block_size;
    for (int64_t t = 0; t < rows_ * each_; ++t) {
      const bool any = data_.ConsumeIntegralInRange<int>(0, 15) == 0;
      slots_.push_back(any ? pick(kExtremes)
                           : data_.ConsumeIntegralInRange<int64_t>(-1, num_slots - 1));
    }
    invalid_slot_ = data_.ConsumeBool() ? -1 : pick(kExtremes);
  }

  void make_table() {
    width_ = small(4);
    for (int64_t i = 0; i < rows_ * width_; ++i) {
      const bool any = data_.ConsumeIntegralInRange<int>(0, 15) == 0;
      blocks_.push_back(any ? pick(kExtremes)
                            : data_.ConsumeIntegralInRange<int64_t>(-1, cache_.num_blocks - 1));
    }
    for (int64_t r = 0; r < rows_; ++r) {
      const bool any = data_.ConsumeIntegralInRange<int>(0, 15) == 0;
      lengths_.push_back(any ? pick(kExtremes)
                             : data_.ConsumeIntegralInRange<int64_t>(
                                   0, width_ * static_cast<int64_t>(cache_.block_size)));
    }
  }

  // One field of one descriptor becomes something else.
  void spoil() {
    kvx_tensor_desc_t* tensors[] = {&cache_.k, &cache_.v, &io_.key, &io_.value};
    kvx_tensor_desc_t& tensor = *pick(tensors);
    const int64_t wide = data_.ConsumeBool() ? pick(kExtremes) : small(64);
    const auto number = static_cast<uint32_t>(wide);
    const int axis = data_.ConsumeIntegralInRange<int>(0, KVX_MAX_TENSOR_DIMS - 1);
    switch (data_.ConsumeIntegralInRange<int>(0, 15)) {
      case 0:
        tensor.stride[axis] = wide;
        break;
      case 1:
        tensor.shape[axis] = wide;
        break;
      case 2:
        tensor.ndim = number;
        break;
      case 3:
        memcpy(&tensor.dtype, &number, 4);
        break;
      case 4:
        memcpy(&tensor.layout, &number, 4);
        break;
      case 5:
        memcpy(&tensor.memory, &number, 4);
        break;
      case 6:
        tensor.size = number;
        break;
      case 7:
        cache_.num_blocks = number;
        break;
      case 8:
        cache_.block_size = number;
        break;
      case 9:
        cache_.num_kv_heads = number;
        break;
      case 10:
        cache_.head_dim = number;
        break;
      case 11:
        io_.num_tokens = number;
        break;
      case 12:
        count_change_ = wide;
        break;
      case 13:
        cache_.pool.size = number;
        break;
      case 14:
        io_.size = number;
        break;
      default:
        tensor.stride[axis] += 1;
        break;
    }
  }

  // Every tensor gets the memory that it describes. False: it describes too much.
  bool allocate() {
    kvx_tensor_desc_t* tensors[] = {&cache_.k, &cache_.v, &io_.key, &io_.value};
    for (int i = 0; i < 4; ++i) {
      uint32_t dtype;
      memcpy(&dtype, &tensors[i]->dtype, 4);
      const int64_t bytes = bytes_taken(*tensors[i], bytes_of(dtype));
      if (bytes < 0) return false;
      memory_[i].resize(static_cast<size_t>(bytes) + 4);  // never null
      for (size_t b = 0; b < memory_[i].size(); ++b) {
        // Bytes of finite numbers of ordinary size in every type.
        memory_[i][b] = static_cast<uint8_t>(0x30 + (b * 7 + static_cast<size_t>(i)) % 13);
      }
      tensors[i]->data = memory_[i].data();
    }
    return true;
  }

  void expect_unchanged(const std::vector<uint8_t> (&before)[4]) {
    for (int i = 0; i < 4; ++i) expect(memory_[i] == before[i], "a failed call changes nothing");
  }

  // Copies one row of a side in a model of the target.
  void copy_row(std::vector<uint8_t>& to, int64_t to_place, const std::vector<uint8_t>& from,
                int64_t from_place, int bytes) {
    memcpy(to.data() + to_place * bytes, from.data() + from_place * bytes,
           static_cast<size_t>(bytes));
  }

  void run_write() {
    kvx_write_desc_t write{};
    write.size = sizeof write;
    write.io = io_;
    write.slots.size = sizeof write.slots;
    write.slots.dtype = KVX_DTYPE_S64;
    write.slots.token_count =
        static_cast<uint32_t>(slots_.size()) + static_cast<uint32_t>(count_change_);
    write.slots.invalid_slot = invalid_slot_;
    write.slots.slots = slots_.data();
    const std::vector<uint8_t> before[4] = {memory_[0], memory_[1], memory_[2], memory_[3]};
    if (kvx_write_kv(&cache_, &write, nullptr) != KVX_STATUS_OK) return expect_unchanged(before);
    const kvx_tensor_desc_t* io[] = {&io_.key, &io_.value};
    const kvx_tensor_desc_t* cache[] = {&cache_.k, &cache_.v};
    for (int side = 0; side < 2; ++side) {
      if (io[side]->dtype != cache[side]->dtype) continue;  // conversions have tests of their own
      std::vector<uint8_t> expected = before[side];
      for (int64_t t = 0; t < std::ssize(slots_); ++t) {
        const int64_t slot = slots_[static_cast<size_t>(t)];
        if (slot < 0 || slot == invalid_slot_) continue;
        for (int64_t h = 0; h < cache_.num_kv_heads; ++h) {
          for (int64_t d = 0; d < cache_.head_dim; ++d) {
            copy_row(
                expected,
                place_of(*cache[side], slot / cache_.block_size, slot % cache_.block_size, h, d),
                before[2 + side], io_place(*io[side], t, h, d),
                bytes_of(static_cast<uint32_t>(cache[side]->dtype)));
          }
        }
      }
      expect(memory_[side] == expected, "a write moves just the rows of its slots");
    }
    expect(memory_[2] == before[2] && memory_[3] == before[3], "a write leaves its input alone");
  }

  void run_gather() {
    kvx_gather_desc_t gather{};
    gather.size = sizeof gather;
    gather.io = io_;
    gather.max_seq_len = static_cast<uint32_t>(each_);
    gather.block_table.size = sizeof gather.block_table;
    gather.block_table.format = KVX_BLOCK_TABLE_PACKED;
    gather.block_table.index_dtype = KVX_DTYPE_S64;
    gather.block_table.seq_count = static_cast<uint32_t>(rows_);
    gather.block_table.beam_width = 1;
    gather.block_table.max_blocks_per_seq = static_cast<uint32_t>(width_);
    gather.block_table.indices = blocks_.data();
    gather.block_table.indices_count =
        static_cast<uint32_t>(blocks_.size()) + static_cast<uint32_t>(count_change_);
    gather.seq_lens = {sizeof gather.seq_lens, KVX_DTYPE_S64, static_cast<uint32_t>(rows_),
                       lengths_.data()};
    const std::vector<uint8_t> before[4] = {memory_[0], memory_[1], memory_[2], memory_[3]};
    if (kvx_gather_kv(&cache_, &gather, nullptr) != KVX_STATUS_OK) return expect_unchanged(before);
    const kvx_tensor_desc_t* io[] = {&io_.key, &io_.value};
    const kvx_tensor_desc_t* cache[] = {&cache_.k, &cache_.v};
    for (int side = 0; side < 2; ++side) {
      if (io[side]->dtype != cache[side]->dtype) continue;
      std::vector<uint8_t> expected = before[2 + side];
      for (int64_t r = 0; r < rows_; ++r) {
        for (int64_t t = 0; t < each_ && t < lengths_[static_cast<size_t>(r)]; ++t) {
          const int64_t block = blocks_[static_cast<size_t>(r * width_ + t / cache_.block_size)];
          if (block < 0) continue;
          for (int64_t h = 0; h < cache_.num_kv_heads; ++h) {
            for (int64_t d = 0; d < cache_.head_dim; ++d) {
              copy_row(expected, io_place(*io[side], r * each_ + t, h, d), before[side],
                       place_of(*cache[side], block, t % cache_.block_size, h, d),
                       bytes_of(static_cast<uint32_t>(cache[side]->dtype)));
            }
          }
        }
      }
      expect(memory_[2 + side] == expected, "a gather fetches just its sequences' rows");
    }
    expect(memory_[0] == before[0] && memory_[1] == before[1], "a gather leaves the cache alone");
  }

  FuzzedDataProvider& data_;
  kvx_cache_desc_t cache_{};
  kvx_kv_io_desc_t io_{};
  bool is_write_ = false;
  int64_t rows_ = 0;
  int64_t each_ = 0;
  int64_t width_ = 0;
  int64_t invalid_slot_ = -1;
  int64_t count_change_ = 0;
  std::vector<int64_t> slots_;
  std::vector<int64_t> blocks_;
  std::vector<int64_t> lengths_;
  std::vector<uint8_t> memory_[4];  // K, V, key, value
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  Case(data).run();
  return 0;
}
