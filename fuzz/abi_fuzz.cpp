// The v1 calls of the API boundary under structured random descriptors: whatever they are, the
// library and the slow provider of tests/providers return the same status and write the
// same bytes; a call that fails changes no byte.
//
// Descriptors are legal at first, then one field of some is changed. Memory is as large as the
// descriptor claims, so that a wrong access is a fault of the library. A descriptor that claims
// more than kMostBytes is passed only to kvx_validate_cache_desc, which reads no data.
#include "fuzz/abi_case.hpp"

namespace kvx::fuzz {
namespace {

constexpr kvx_layout_t kLayouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                     KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM};
enum class Table { kPacked, kRagged, kPages, kOffsets };
constexpr Table kTables[] = {Table::kPacked, Table::kRagged, Table::kPages, Table::kOffsets};
constexpr int64_t kPoolBlocks = 6;
constexpr int64_t kNullIndex = 0xFFFFFFFF;
constexpr int64_t kSecondaryPool = 0x80000000;

class Case {
 public:
  explicit Case(FuzzedDataProvider& data) : choices_(data) {
    is_write_ = choices_.flip();
    table_ = choices_.pick(kTables);
    make_cache();
    is_write_ ? make_write() : make_gather();
    if (choices_.flip()) spoil();
  }

  void run() {
    const bool fits = allocate();
    expect(kvx_validate_cache_desc(&cache()) == slow_validate_cache_desc(&cache()),
           "both judge a cache descriptor alike");
    if (!fits) return;
    const auto before = memory_;
    const kvx_status_t status = is_write_ ? kvx_write_kv(&cache(), &write(), nullptr)
                                          : kvx_gather_kv(&cache(), &gather(), nullptr);
    if (status != KVX_STATUS_OK) expect(memory_ == before, "a failed call changes nothing");
    auto after = memory_;
    for (size_t i = 0; i < memory_.size(); ++i) {
      std::copy(before[i].begin(), before[i].end(), memory_[i].begin());
    }
    const kvx_status_t slow = is_write_ ? slow_write_kv(&cache(), &write(), nullptr)
                                        : slow_gather_kv(&cache(), &gather(), nullptr);
    if (!is_write_) {
      forget_payloads(io().key, cache().k, after[2], memory_[2]);
      forget_payloads(io().value, cache().v, after[3], memory_[3]);
    }
    if (status != slow || memory_ != after) describe(status, slow, after);
    expect(status == slow, "both give the same status");
    expect(memory_ == after, "both leave the same bytes");
  }

 private:
  kvx_cache_desc_t& cache() { return cache_.object; }
  kvx_write_desc_t& write() { return write_.object; }
  kvx_gather_desc_t& gather() { return gather_.object; }
  kvx_kv_io_desc_t& io() { return is_write_ ? write().io : gather().io; }
  bool has_pool() const { return !is_write_ && table_ == Table::kOffsets; }

  // Which NaN a 16-bit NaN becomes when it is gathered as F32 is unspecified.
  static void forget_payloads(const kvx_tensor_desc_t& io, const kvx_tensor_desc_t& cache,
                              std::vector<uint8_t>& one, std::vector<uint8_t>& other) {
    if (bytes_of(io.dtype) != 4 || bytes_of(cache.dtype) == 4) return;
    for (std::vector<uint8_t>* bytes : {&one, &other}) {
      for (size_t i = 0; i + 4 <= bytes->size(); i += 4) {
        float number;
        memcpy(&number, bytes->data() + i, 4);
        if (number != number) memset(bytes->data() + i, 0xFF, 4);
      }
    }
  }

  // For whoever has to find out why.
  void describe(kvx_status_t status, kvx_status_t slow,
                const std::vector<std::vector<uint8_t>>& after) {
    std::fprintf(stderr, "%s: status %d, the slow provider's %d\n", is_write_ ? "write" : "gather",
                 status, slow);
    for (const kvx_tensor_desc_t* tensor : {&cache().k, &cache().v, &io().key, &io().value}) {
      uint32_t words[4];
      memcpy(words, tensor, sizeof words);
      std::fprintf(stderr, "dtype %u layout %u ndim %u:", words[1], words[2], tensor->ndim);
      for (int i = 0; i < KVX_MAX_TENSOR_DIMS; ++i) {
        std::fprintf(stderr, " %lld*%lld", static_cast<long long>(tensor->shape[i]),
                     static_cast<long long>(tensor->stride[i]));
      }
      std::fprintf(stderr, "\n");
    }
    for (size_t i = 0; i < memory_.size(); ++i) {
      for (size_t b = 0; b < memory_[i].size(); ++b) {
        if (memory_[i][b] == after[i][b]) continue;
        std::fprintf(stderr, "buffer %zu, byte %zu: %#x, the slow provider's %#x\n", i, b,
                     after[i][b], memory_[i][b]);
        break;
      }
    }
  }

  void make_tensor(kvx_tensor_desc_t& tensor, kvx_layout_t layout) {
    const int64_t nb = cache().num_blocks, bs = cache().block_size, h = cache().num_kv_heads;
    const int64_t d = cache().head_dim;
    const bool has_pack = layout == KVX_LAYOUT_BLOCK_HND_PACKED ||
                          (layout == KVX_LAYOUT_BLOCK_CUSTOM && choices_.flip());
    if (has_pack) {
      int64_t pack = choices_.between(1, d);
      while (d % pack != 0) --pack;
      set_tensor(choices_, tensor, {nb, h, d / pack, bs, pack});
    } else if (layout == KVX_LAYOUT_BLOCK_HND) {
      set_tensor(choices_, tensor, {nb, h, bs, d});
    } else {
      set_tensor(choices_, tensor, {nb, bs, h, d});
    }
    tensor.dtype = choices_.pick(kFloats);
    tensor.layout = layout;
  }

  void make_cache() {
    constexpr uint32_t kPowers[] = {1, 2, 4};
    cache().size = sizeof cache();
    cache().num_blocks = static_cast<uint32_t>(choices_.between(1, 4));
    cache().block_size =
        has_pool() ? choices_.pick(kPowers) : static_cast<uint32_t>(choices_.between(1, 5));
    cache().num_kv_heads = static_cast<uint32_t>(choices_.between(1, 3));
    cache().head_dim = static_cast<uint32_t>(choices_.between(1, 20));
    const kvx_layout_t layout = choices_.pick(kLayouts);
    make_tensor(cache().k, layout);
    make_tensor(cache().v, layout);
    if (!has_pool()) return;
    cache().pool.size = sizeof cache().pool;
    cache().pool.memory = KVX_MEMORY_HOST;
    int64_t block_bytes = 4;
    for (kvx_tensor_desc_t block : {cache().k, cache().v}) {
      block.shape[0] = 1;
      block_bytes = std::max(block_bytes, bytes_taken(block));
    }
    cache().pool.bytes_per_block = static_cast<uint32_t>((block_bytes + 3) / 4 * 4);
    has_secondary_ = choices_.flip();
  }

  void make_io(int64_t rows, int64_t each) {
    io().size = sizeof io();
    io().num_tokens = static_cast<uint32_t>(rows * each);
    io().num_kv_heads = cache().num_kv_heads;
    io().head_dim = cache().head_dim;
    for (kvx_tensor_desc_t* tensor : {&io().key, &io().value}) {
      const int64_t h = io().num_kv_heads, d = io().head_dim;
      if (choices_.flip()) {
        set_tensor(choices_, *tensor, {rows * each, h, d});
      } else {
        set_tensor(choices_, *tensor, {rows, each, h, d});
      }
      const kvx_dtype_t own = (tensor == &io().key ? cache().k : cache().v).dtype;
      tensor->dtype = choices_.one_in(3) ? choices_.pick(kFloats) : own;
    }
    shares_memory_ = choices_.one_in(32);
  }

  void make_write() {
    const int64_t rows = choices_.between(0, 3), each = choices_.between(0, 6);
    write().size = sizeof write();
    make_io(rows, each);
    const int64_t num_slots = int64_t{cache().num_blocks} * cache().block_size;
    for (int64_t t = 0; t < rows * each; ++t) {
      slots_.entries.push_back(choices_.rarely_extreme(choices_.between(-1, num_slots - 1)));
    }
    write().slots.size = sizeof write().slots;
    write().slots.dtype = choices_.pick(kIndices);
    write().slots.token_count = io().num_tokens;
    write().slots.invalid_slot = choices_.flip() ? -1 : choices_.pick(kExtremes);
    make_scale(write().k_scale_desc);
    make_scale(write().v_scale_desc);
    has_plain_scales_ = choices_.flip();
  }

  void make_scale(kvx_scale_desc_t& desc) {
    constexpr kvx_dtype_t kTypes[] = {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16};
    if (choices_.flip()) return;
    desc.size = sizeof desc;
    desc.dtype = choices_.pick(kTypes);
    desc.granularity = static_cast<kvx_scale_granularity_t>(choices_.between(1, 4));
    const bool has_block =
        desc.granularity == KVX_SCALE_PER_BLOCK || desc.granularity == KVX_SCALE_PER_BLOCK_HEAD;
    const bool has_head =
        desc.granularity == KVX_SCALE_PER_HEAD || desc.granularity == KVX_SCALE_PER_BLOCK_HEAD;
    if (has_block) desc.shape[desc.ndim++] = cache().num_blocks;
    if (has_head) desc.shape[desc.ndim++] = cache().num_kv_heads;
    if (desc.ndim == 0) desc.shape[desc.ndim++] = 1;
    for (uint32_t i = 0; i < desc.ndim; ++i) desc.stride[i] = choices_.between(0, 6);
    desc.data = &desc;  // some address until allocate()
  }

  int64_t some_entry() {
    if (!has_pool()) return choices_.rarely_extreme(choices_.between(-1, cache().num_blocks - 1));
    if (choices_.one_in(8)) return kNullIndex;
    const int64_t index = choices_.between(0, kPoolBlocks - 1);
    return choices_.one_in(3) ? index | kSecondaryPool : index;
  }

  void make_gather() {
    kvx_block_table_t& table = gather().block_table;
    const int64_t sequences = choices_.between(1, 3);
    const int64_t beams = has_pool() ? choices_.between(1, 2) : 1;
    const int64_t width = choices_.between(1, 3), each = choices_.between(0, 6);
    gather().size = sizeof gather();
    make_io(sequences * beams, each);
    gather().max_seq_len = static_cast<uint32_t>(each);
    table.size = sizeof table;
    table.format = table_ == Table::kPacked    ? KVX_BLOCK_TABLE_PACKED
                   : table_ == Table::kOffsets ? KVX_BLOCK_TABLE_KV_OFFSETS
                                               : KVX_BLOCK_TABLE_RAGGED;
    table.index_dtype = has_pool() ? KVX_DTYPE_S32 : choices_.pick(kIndices);
    table.seq_count = static_cast<uint32_t>(sequences);
    table.beam_width = static_cast<uint32_t>(beams);
    table.max_blocks_per_seq = static_cast<uint32_t>(width);
    if (has_pool()) table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
    if (table_ == Table::kPages) table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t most = width * static_cast<int64_t>(cache().block_size);
      lengths_.entries.push_back(choices_.rarely_extreme(choices_.between(0, most)));
    }
    table_ == Table::kRagged || table_ == Table::kPages ? make_ragged() : make_rectangle();
    table.indices_count = static_cast<uint32_t>(indices_.entries.size());
    gather().seq_lens = {sizeof gather().seq_lens, choices_.pick(kIndices), table.seq_count,
                         nullptr};
  }

  void make_rectangle() {
    const kvx_block_table_t& table = gather().block_table;
    const int64_t count = int64_t{table.seq_count} * table.beam_width * (has_pool() ? 2 : 1) *
                          table.max_blocks_per_seq;
    for (int64_t i = 0; i < count; ++i) indices_.entries.push_back(some_entry());
  }

  void make_ragged() {
    kvx_block_table_t& table = gather().block_table;
    sums_.entries = {0};
    for (const int64_t length : lengths_.entries) {
      int64_t count = std::clamp<int64_t>(length, 0, 20);
      if (table_ == Table::kPages) count = (count + cache().block_size - 1) / cache().block_size;
      if (choices_.one_in(16)) ++count;
      for (int64_t i = 0; i < count; ++i) {
        const bool is_new = i % cache().block_size == 0 || choices_.one_in(8);
        indices_.entries.push_back(is_new ? some_entry() : indices_.entries.back());
      }
      sums_.entries.push_back(static_cast<int64_t>(indices_.entries.size()));
    }
    if (choices_.one_in(16)) sums_.entries[sums_.entries.size() / 2] = choices_.pick(kExtremes);
    table.indptr_dtype = choices_.pick(kIndices);
    table.indptr_count = static_cast<uint32_t>(sums_.entries.size());
  }

  // One 32-bit word of a descriptor, or the whole 64 bits of a stride or shape.
  void spoil() {
    uint8_t* const structs[] = {
        reinterpret_cast<uint8_t*>(&cache()),
        is_write_ ? reinterpret_cast<uint8_t*>(&write()) : reinterpret_cast<uint8_t*>(&gather())};
    const size_t sizes[] = {sizeof(kvx_cache_desc_t),
                            is_write_ ? sizeof(kvx_write_desc_t) : sizeof(kvx_gather_desc_t)};
    const int which = choices_.flip() ? 1 : 0;
    const auto words = static_cast<int64_t>(sizes[which] / 4);
    const int64_t word = choices_.between(0, words - 1);
    uint8_t* field = structs[which] + word * 4;
    if (choices_.one_in(4)) {  // the next or the previous number
      uint32_t number;
      memcpy(&number, field, 4);
      number += choices_.flip() ? 1u : ~0u;
      memcpy(field, &number, 4);
      return;
    }
    const int64_t number = choices_.flip() ? choices_.pick(kExtremes) : choices_.between(0, 64);
    const bool has_64_bits = choices_.flip() && word % 2 == 0 && word + 1 < words;
    memcpy(field, &number, has_64_bits ? 8 : 4);
    if (choices_.flip()) (which == 0 ? cache_.tail : write_or_gather_tail())[7] = 1;
  }
  uint8_t* write_or_gather_tail() { return is_write_ ? write_.tail : gather_.tail; }

  // A scale's memory, all positive numbers but for a few. Returns false when it describes too much.
  bool allocate_scale(kvx_scale_desc_t& desc, std::vector<uint8_t>& bytes) {
    if (desc.data == nullptr) return true;
    int64_t last = 0;
    for (uint32_t i = 0; i < std::min(desc.ndim, 2u); ++i) {
      int64_t step = 0;
      // Strides that cannot be are refused before anything is read.
      if (desc.stride[i] < 0 || desc.shape[i] < 1) continue;
      if (__builtin_mul_overflow(desc.shape[i] - 1, desc.stride[i], &step) ||
          __builtin_add_overflow(last, step, &last) || last > kMostBytes) {
        return false;
      }
    }
    fill(bytes, (last + 1) * 4, 5, choices_.one_in(8));
    desc.data = bytes.data();
    return true;
  }

  // Every pointer gets the memory that its descriptor describes, or null where it was spoiled.
  // Returns false when a descriptor describes too much.
  bool allocate() {
    memory_.resize(8);
    kvx_tensor_desc_t* tensors[] = {&cache().k, &cache().v, &io().key, &io().value};
    for (size_t i = 0; i < 4; ++i) {
      const int64_t bytes = bytes_taken(*tensors[i]);
      const bool is_spoiled = tensors[i]->data != nullptr;
      fill(memory_[i], std::max<int64_t>(bytes, 0), static_cast<uint32_t>(i), choices_.one_in(4));
      tensors[i]->data = is_spoiled ? nullptr : memory_[i].data();
      if (bytes < 0) fits_ = false;
    }
    const bool may_share = bytes_taken(io().key) <= bytes_taken(cache().k);
    if (shares_memory_ && may_share && io().key.data != nullptr) io().key.data = cache().k.data;
    if (has_pool()) {
      const int64_t bytes = int64_t{cache().pool.bytes_per_block} * kPoolBlocks;
      if (bytes > kMostBytes) fits_ = false;
      fill(memory_[4], std::min(bytes, kMostBytes), 8, false);
      fill(memory_[5], std::min(bytes, kMostBytes), 9, false);
      const bool is_spoiled = cache().pool.primary != nullptr;
      cache().pool.primary = is_spoiled ? nullptr : memory_[4].data();
      cache().pool.secondary = has_secondary_ ? memory_[5].data() : nullptr;
    } else {
      cache().pool.primary = cache().pool.secondary = nullptr;
    }
    if (is_write_) {
      write().slots.slots = write().slots.slots ? nullptr : slots_.as(write().slots.dtype);
      write().k_scale = write().v_scale = nullptr;
      if (has_plain_scales_) {
        fill(memory_[6], 3, 0, false);
        write().k_scale = write().v_scale = memory_[6].data();
      }
      const bool fits = allocate_scale(write().k_scale_desc, k_scales_) &&
                        allocate_scale(write().v_scale_desc, v_scales_);
      return fits && fits_;
    }
    kvx_block_table_t& table = gather().block_table;
    table.indices = table.indices ? nullptr : indices_.as(table.index_dtype);
    const bool has_indptr = !sums_.entries.empty() && table.indptr == nullptr;
    table.indptr = has_indptr ? sums_.as(table.indptr_dtype) : nullptr;
    gather().seq_lens.lengths =
        gather().seq_lens.lengths ? nullptr : lengths_.as(gather().seq_lens.dtype);
    return fits_;
  }

  Choices choices_;
  Roomy<kvx_cache_desc_t> cache_;
  Roomy<kvx_write_desc_t> write_;
  Roomy<kvx_gather_desc_t> gather_;
  bool is_write_ = false;
  Table table_ = Table::kPacked;
  bool has_secondary_ = false;
  bool has_plain_scales_ = false;
  bool shares_memory_ = false;
  bool fits_ = true;
  IndexList slots_;
  IndexList indices_;
  IndexList sums_;
  IndexList lengths_;
  std::vector<uint8_t> k_scales_;
  std::vector<uint8_t> v_scales_;
  std::vector<std::vector<uint8_t>> memory_;  // K, V, key, value, the pools, a scale
};

}  // namespace
}  // namespace kvx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  kvx::fuzz::Case(data).run();
  return 0;
}
