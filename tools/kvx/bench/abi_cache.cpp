// A 16-bit cache in a caller's memory, driven through the C ABI.
#include "tools/kvx/bench/abi_cache.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "device/cuda_bandwidth.hpp"

namespace kvx::tool {
namespace {

constexpr int kPack = 8;  // 16 bytes of F16, as vLLM's and TGI's keys

// Extents in layout order; strides of a dense tensor.
kvx_tensor_desc_t dense_tensor(kvx_layout_t layout, const std::vector<int64_t>& extents) {
  kvx_tensor_desc_t tensor{};
  tensor.size = sizeof tensor;
  tensor.dtype = KVX_DTYPE_F16;
  tensor.layout = layout;
  tensor.memory = KVX_MEMORY_HOST;
  tensor.ndim = static_cast<uint32_t>(extents.size());
  int64_t stride = 1;
  for (size_t i = extents.size(); i-- > 0;) {
    tensor.shape[i] = extents[i];
    tensor.stride[i] = stride;
    stride *= extents[i];
  }
  return tensor;
}

Status status_of(kvx_status_t status, const char* name) {
  if (status == KVX_STATUS_OK) return {};
  return Error{ErrorCode::kInternal, fmt::format("{}: {}", name, kvx_last_error())};
}

}  // namespace

const std::vector<std::string>& abi_layouts() {
  static const std::vector<std::string> names = {"nhd", "nhd_strided", "hnd", "hnd_packed"};
  return names;
}

Status AbiCache::check(const AbiShape& shape) {
  if (shape.tokens_per_seq > shape.seq_len) {
    return invalid_argument("tokens-per-seq is {}; expected at most the length {}",
                            shape.tokens_per_seq, shape.seq_len);
  }
  if (shape.head_dim % kPack != 0) {
    return invalid_argument("head-dim is {}; expected a multiple of {}", shape.head_dim, kPack);
  }
  constexpr int64_t kMostBytes = int64_t{4} << 30;  // of K, V, their IO and a copy together
  const int64_t bytes = 6 * shape.row_bytes() * shape.num_blocks() * shape.block_size;
  if (bytes <= kMostBytes) return {};
  return invalid_argument("{} sequences of {} tokens take {} bytes; expected at most {}",
                          shape.seq_count, shape.seq_len, bytes, kMostBytes);
}

AbiCache::AbiCache(const AbiShape& shape, const std::string& layout) : shape_(shape) {
  describe_cache(layout);
  describe_calls();
}

void AbiCache::describe_cache(const std::string& layout) {
  const int64_t blocks = shape_.num_blocks(), tokens = shape_.block_size;
  const int64_t heads = shape_.num_heads, dims = shape_.head_dim;
  cache_.size = sizeof cache_;
  cache_.num_blocks = static_cast<uint32_t>(blocks);
  cache_.block_size = static_cast<uint32_t>(tokens);
  cache_.num_kv_heads = static_cast<uint32_t>(heads);
  cache_.head_dim = static_cast<uint32_t>(dims);
  if (layout == "hnd") {
    cache_.k = dense_tensor(KVX_LAYOUT_BLOCK_HND, {blocks, heads, tokens, dims});
  } else if (layout == "hnd_packed") {
    cache_.k =
        dense_tensor(KVX_LAYOUT_BLOCK_HND_PACKED, {blocks, heads, dims / kPack, tokens, kPack});
  } else {
    cache_.k = dense_tensor(KVX_LAYOUT_BLOCK_NHD, {blocks, tokens, heads, dims});
  }
  const int64_t block_elements = tokens * heads * dims;
  const bool is_fused = layout == "nhd_strided";
  if (is_fused) cache_.k.stride[0] *= 2;
  cache_.v = cache_.k;
  k_.assign(static_cast<size_t>(blocks * block_elements * (is_fused ? 2 : 1)), 1);
  if (!is_fused) v_.assign(static_cast<size_t>(blocks * block_elements), 2);
  cache_.k.data = k_.data();
  cache_.v.data = is_fused ? k_.data() + block_elements : v_.data();
}

kvx_tensor_desc_t AbiCache::io_tensor(int64_t tokens, std::vector<uint16_t>& memory) const {
  kvx_tensor_desc_t tensor =
      dense_tensor(KVX_LAYOUT_BLOCK_CUSTOM, {tokens, shape_.num_heads, shape_.head_dim});
  tensor.data = memory.data();
  return tensor;
}

void AbiCache::describe_calls() {
  const auto elements = static_cast<size_t>(tokens_of_gather() * shape_.row_bytes() / 2);
  key_.assign(elements, 3);
  value_.assign(elements, 4);
  copied_.assign(2 * elements, 5);
  // Sequences' blocks lie anywhere, as after some hours of an engine's work.
  blocks_.resize(static_cast<size_t>(shape_.num_blocks()));
  std::iota(blocks_.begin(), blocks_.end(), 0);
  std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937(1));
  const int width = shape_.num_blocks() / shape_.seq_count;
  for (int s = 0; s < shape_.seq_count; ++s) {
    for (int t = shape_.seq_len - shape_.tokens_per_seq; t < shape_.seq_len; ++t) {
      const int64_t block = blocks_[static_cast<size_t>(s * width + t / shape_.block_size)];
      slots_.push_back(block * shape_.block_size + t % shape_.block_size);
    }
  }
  lengths_.assign(static_cast<size_t>(shape_.seq_count), shape_.seq_len);
  skipped_slots_.assign(slots_.size(), -1);
  unmapped_blocks_.assign(blocks_.size(), -1);
  zero_lengths_.assign(lengths_.size(), 0);

  const auto fill_io = [this](kvx_kv_io_desc_t& io, int64_t tokens) {
    io.size = sizeof io;
    io.num_tokens = static_cast<uint32_t>(tokens);
    io.num_kv_heads = cache_.num_kv_heads;
    io.head_dim = cache_.head_dim;
    io.key = io_tensor(tokens, key_);
    io.value = io_tensor(tokens, value_);
  };
  write_.size = sizeof write_;
  fill_io(write_.io, tokens_of_write());
  write_.slots = {sizeof write_.slots, KVX_DTYPE_S64, write_.io.num_tokens, -1, slots_.data()};
  gather_.size = sizeof gather_;
  fill_io(gather_.io, tokens_of_gather());
  gather_.max_seq_len = static_cast<uint32_t>(shape_.seq_len);
  kvx_block_table_t& table = gather_.block_table;
  table.size = sizeof table;
  table.format = KVX_BLOCK_TABLE_PACKED;
  table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = static_cast<uint32_t>(shape_.seq_count);
  table.beam_width = 1;
  table.max_blocks_per_seq = static_cast<uint32_t>(width);
  table.indices = blocks_.data();
  table.indices_count = static_cast<uint32_t>(blocks_.size());
  gather_.seq_lens = {sizeof gather_.seq_lens, KVX_DTYPE_S32, table.seq_count, lengths_.data()};
}

Status AbiCache::write() {
  return status_of(kvx_write_kv(&cache_, &write_, stream_), "kvx_write_kv");
}

Status AbiCache::gather() {
  return status_of(kvx_gather_kv(&cache_, &gather_, stream_), "kvx_gather_kv");
}

Status AbiCache::write_nowhere(int64_t num_tokens) {
  kvx_write_desc_t write = write_;
  write.io.num_tokens = static_cast<uint32_t>(num_tokens);
  write.io.key.shape[0] = write.io.value.shape[0] = num_tokens;
  write.slots.token_count = write.io.num_tokens;
  write.slots.slots = skipped_slots_.data();
  return status_of(kvx_write_kv(&cache_, &write, nullptr), "kvx_write_kv");
}

Status AbiCache::gather_nothing(bool reads_table) {
  kvx_gather_desc_t gather = gather_;
  gather.block_table.indices = unmapped_blocks_.data();
  gather.seq_lens.lengths = reads_table ? lengths_.data() : zero_lengths_.data();
  return status_of(kvx_gather_kv(&cache_, &gather, nullptr), "kvx_gather_kv");
}

Result<uint8_t*> AbiCache::moved(const void* host, int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(cache::Region region, memory_->allocate(bytes, "an array of kvx bench"));
  KVX_RETURN_IF_ERROR(device::cuda_copy(region.data(), host, bytes));
  regions_.push_back(std::move(region));
  return regions_.back().data();
}

template <class T>
Result<T*> AbiCache::moved(const std::vector<T>& host) {
  KVX_ASSIGN_OR_RETURN(uint8_t * data,
                       moved(host.data(), std::ssize(host) * static_cast<int64_t>(sizeof(T))));
  return reinterpret_cast<T*>(data);
}

Status AbiCache::move_to_device(cache::Memory& memory, device::CudaStream stream) {
  memory_ = &memory;
  stream_ = stream;
  const bool is_fused = v_.empty();
  const auto v_of_fused = static_cast<const uint16_t*>(cache_.v.data) - k_.data();
  KVX_ASSIGN_OR_RETURN(uint16_t * k, moved(k_));
  uint16_t* v = k + v_of_fused;
  if (!is_fused) {
    KVX_ASSIGN_OR_RETURN(v, moved(v_));
  }
  cache_.k.data = k;
  cache_.v.data = v;
  KVX_ASSIGN_OR_RETURN(uint16_t * key, moved(key_));
  KVX_ASSIGN_OR_RETURN(uint16_t * value, moved(value_));
  for (kvx_kv_io_desc_t* io : {&write_.io, &gather_.io}) {
    io->key.data = key;
    io->value.data = value;
    io->key.memory = io->value.memory = KVX_MEMORY_DEVICE;
  }
  cache_.k.memory = cache_.v.memory = KVX_MEMORY_DEVICE;
  KVX_ASSIGN_OR_RETURN(write_.slots.slots, moved(slots_));
  KVX_ASSIGN_OR_RETURN(gather_.block_table.indices, moved(blocks_));
  KVX_ASSIGN_OR_RETURN(gather_.seq_lens.lengths, moved(lengths_));
  KVX_ASSIGN_OR_RETURN(copied_on_device_, moved(copied_));
  return {};
}

Status AbiCache::copy(int64_t tokens) {
  const int64_t bytes = tokens * shape_.row_bytes();
  const auto half = copied_.size() / 2;
  if (memory_ == nullptr) {
    memcpy(copied_.data(), key_.data(), static_cast<size_t>(bytes));
    memcpy(copied_.data() + half, value_.data(), static_cast<size_t>(bytes));
    return {};
  }
  auto* to = static_cast<uint16_t*>(copied_on_device_);
  KVX_RETURN_IF_ERROR(device::cuda_launch_memcpy(stream_, write_.io.key.data, bytes, to));
  return device::cuda_launch_memcpy(stream_, write_.io.value.data, bytes, to + half);
}

Status AbiCache::copy_as_write() {
  return copy(tokens_of_write());
}
Status AbiCache::copy_as_gather() {
  return copy(tokens_of_gather());
}

}  // namespace kvx::tool
