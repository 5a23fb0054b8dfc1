// AbiCache: a 16-bit cache in a caller's memory, with the C ABI's calls that kvx bench abi
// measures.
#pragma once

#include <string>
#include <vector>

#include "cache/pool/memory.hpp"
#include "core/result.hpp"
#include "device/cuda.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::tool {

struct AbiShape {
  int seq_count = 8;
  int seq_len = 1024;       // tokens of each sequence in the cache
  int tokens_per_seq = 16;  // that a write adds to each sequence, at its end
  int num_heads = 8;
  int head_dim = 128;
  int block_size = 16;

  int num_blocks() const { return seq_count * ((seq_len + block_size - 1) / block_size); }
  int64_t row_bytes() const { return int64_t{num_heads} * head_dim * 2; }  // of one token's K
};

// "nhd", "nhd_strided" (halves of a fused tensor), "hnd", "hnd_packed".
const std::vector<std::string>& abi_layouts();

class AbiCache {
 public:
  // INVALID_ARGUMENT: tokens_per_seq above seq_len, a head_dim that no pack of 8 divides.
  static Status check(const AbiShape& shape);

  // Requires: a checked shape, a layout of the list.
  AbiCache(const AbiShape& shape, const std::string& layout);
  AbiCache(const AbiCache&) = delete;

  // Puts all that the calls read and write into a device's memory; from then on they and the copies
  // are launches on the stream, and those with nothing to move are no more.
  Status move_to_device(cache::Memory& memory, device::CudaStream stream);

  Status write();
  Status gather();
  // The same calls with nothing to move, which measures their checks: num_tokens slots that are all
  // skipped, and a table without blocks, read for as many tokens as its sequences have or for none.
  // Requires: num_tokens <= tokens_of_write().
  Status write_nowhere(int64_t num_tokens);
  Status gather_nothing(bool reads_table);
  // Copies as many bytes from one array to another, for comparison: memcpy, cudaMemcpyAsync.
  Status copy_as_write();
  Status copy_as_gather();

  int64_t tokens_of_write() const { return int64_t{shape_.seq_count} * shape_.tokens_per_seq; }
  int64_t tokens_of_gather() const { return int64_t{shape_.seq_count} * shape_.seq_len; }
  int64_t table_entries() const { return static_cast<int64_t>(blocks_.size()); }

 private:
  void describe_cache(const std::string& layout);
  void describe_calls();
  kvx_tensor_desc_t io_tensor(int64_t tokens, std::vector<uint16_t>& memory) const;
  Status copy(int64_t tokens);
  Result<uint8_t*> moved(const void* host, int64_t bytes);
  template <class T>
  Result<T*> moved(const std::vector<T>& host);

  AbiShape shape_;
  std::vector<uint16_t> k_;  // both halves of a fused tensor lie in k_
  std::vector<uint16_t> v_;
  std::vector<uint16_t> key_;  // [tokens_of_gather, num_heads, head_dim]
  std::vector<uint16_t> value_;
  std::vector<uint16_t> copied_;  // as much as key_ and value_ together
  std::vector<int64_t> slots_;    // [tokens_of_write]
  std::vector<int32_t> blocks_;   // [seq_count, blocks of a sequence]
  std::vector<int32_t> lengths_;
  std::vector<int64_t> skipped_slots_;    // [tokens_of_write], -1
  std::vector<int32_t> unmapped_blocks_;  // as blocks_, -1
  std::vector<int32_t> zero_lengths_;
  kvx_cache_desc_t cache_{};
  kvx_write_desc_t write_{};
  kvx_gather_desc_t gather_{};
  // On a device:
  cache::Memory* memory_ = nullptr;
  device::CudaStream stream_ = nullptr;
  std::vector<cache::Region> regions_;
  void* copied_on_device_ = nullptr;
};

}  // namespace kvx::tool
