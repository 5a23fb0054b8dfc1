// An engine's own memory, quantised: append, attend and gather over its pages of int8 and nvfp4,
// and over llama.cpp's q8_0 rows, read where they lie. The engine keeps its block tables.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <exception>
#include <kvx/kvx.hpp>
#include <vector>

namespace {

constexpr uint32_t kBlocks = 8, kBlockSize = 16, kKvHeads = 2, kQHeads = 8, kDim = 64;
constexpr int kTokens = 40;

// One sequence of 40 tokens in blocks 5, 2 and 7 of the pool.
const std::vector<int32_t> kBlockIds = {5, 2, 7}, kLengths = {kTokens};

std::vector<int64_t> slots_of_tokens() {
  std::vector<int64_t> slots;
  for (int t = 0; t < kTokens; ++t) {
    slots.push_back(int64_t{kBlockIds[t / kBlockSize]} * kBlockSize + t % kBlockSize);
  }
  return slots;
}

// Rows [tokens, kv_heads, head_dim] as a model computes them. K grows along a row, V is the token's
// number.
struct Rows {
  Rows() : k(size_t{kTokens} * kKvHeads * kDim), v(k.size()) {
    for (size_t i = 0; i < k.size(); ++i) {
      const auto token = static_cast<float>(i / kDim / kKvHeads);
      k[i] = 0.01f * (static_cast<float>(i % kDim) - token);
      v[i] = 0.1f * token;
    }
  }
  std::vector<float> k;
  std::vector<float> v;
};

// Appends the rows, attends with queries that weigh all tokens alike, and reads K back.
bool run(const char* name, const kvx::Layer& layer, float most, const kvx::Executor* threads) {
  const Rows rows;
  const std::vector<int64_t> slots = slots_of_tokens();
  kvx::AppendArgs append;
  append.k = kvx::rows(rows.k.data());
  append.v = kvx::rows(rows.v.data());
  append.slots = slots;
  append.executor = threads;
  kvx::append(layer, append).value();

  const std::vector<float> q(kQHeads * kDim, 0.0f);
  std::vector<float> out(q.size());
  kvx::AttendArgs attend;
  attend.num_q_heads = kQHeads;
  attend.q = kvx::rows(q.data());
  attend.out = kvx::rows(out.data());
  attend.block_table = kvx::packed_table(kBlockIds, 3);
  attend.seq_lens = kvx::seq_lens(kLengths);
  attend.executor = threads;
  kvx::attend(layer, attend).value();

  std::vector<float> stored(rows.k.size());
  kvx::GatherArgs gather;
  gather.block_table = attend.block_table;
  gather.seq_lens = attend.seq_lens;
  gather.k = kvx::rows(stored.data());
  kvx::gather(layer, gather).value();
  float error = 0;
  for (size_t i = 0; i < stored.size(); ++i) {
    error = std::max(error, std::fabs(stored[i] - rows.k[i]));
  }
  std::printf("%-5s stores K within %.4f, attention gives %.3f\n", name, error, out[0]);
  return error <= most && std::fabs(out[0] - 1.95f) <= 0.05f;
}

// The engine allocates num_blocks * num_kv_heads * block_size * bytes_per_token zeroed bytes; kvx
// chooses the order inside a page.
bool run_pages(const char* name, kvx_format_t format, float most, const kvx::Executor& threads) {
  kvx::Pages pages;
  pages.block_size = kBlockSize;
  pages.head_dim = kDim;
  pages.k.format = pages.v.format = format;
  const uint64_t bytes_per_token = kvx::page_bytes_per_token(pages).value();
  std::vector<uint8_t> pool(kBlocks * kKvHeads * kBlockSize * bytes_per_token);
  const kvx::Layer layer = kvx::Layer::of_pages(pages, pool.data(), kBlocks, kKvHeads).value();
  return run(name, layer, most, &threads);
}

// llama.cpp's q8_0: a row of [n_kv_heads, head_dim] numbers is blocks of 34 bytes,
//   block: [scale: f16, 2 bytes][codes: int8, 32 bytes]
// kvx's int8 with groups of 32 and f16 scales means the same numbers. Its codes are fragments of 32
// bytes that begin at byte 2 of a block, 34 bytes apart; its scales begin at byte 0.
constexpr int kQ8Block = 34, kQ8Group = 32, kQ8Row = kDim / kQ8Group * kQ8Block;

kvx::Side q8_0_side(uint8_t* first) {
  kvx::Side side;
  side.format.format = KVX_FORMAT_INT8;
  side.format.group_size = kQ8Group;
  side.format.scale_type = KVX_SCALE_TYPE_F16;
  side.head_dim = kDim;
  side.codes = first + 2;
  side.scales = first;
  side.code_fragment_bytes = kQ8Group;
  side.code_fragment_stride = side.scale_group_stride = kQ8Block;
  side.code_head_stride = side.scale_head_stride = kQ8Row;
  side.code_token_stride = side.scale_token_stride = kKvHeads * kQ8Row;
  side.code_block_stride = side.scale_block_stride = kBlockSize * kKvHeads * kQ8Row;
  return side;
}

bool run_q8_0() {
  std::vector<uint8_t> k(kBlocks * kBlockSize * kKvHeads * kQ8Row), v(k.size());
  const kvx::Layer layer({kBlocks, kBlockSize, kKvHeads}, q8_0_side(k.data()), q8_0_side(v.data()));
  if (!run("q8_0", layer, 0.01f, nullptr)) return false;

  // What llama.cpp wrote is read in place: the scale 0.5, the codes 0, 1, ...
  uint8_t* const block = k.data() + kBlockIds[0] * int{kBlockSize * kKvHeads} * kQ8Row;
  block[0] = 0x00;
  block[1] = 0x38;  // f16 0.5
  for (int i = 0; i < kQ8Group; ++i) block[2 + i] = static_cast<uint8_t>(i);
  std::vector<float> stored(size_t{kTokens} * kKvHeads * kDim);
  kvx::GatherArgs gather;
  gather.block_table = kvx::packed_table(kBlockIds, 3);
  gather.seq_lens = kvx::seq_lens(kLengths);
  gather.k = kvx::rows(stored.data());
  kvx::gather(layer, gather).value();
  for (int i = 0; i < kQ8Group; ++i) {
    if (stored[i] != 0.5f * static_cast<float>(i)) return false;
  }
  std::printf("q8_0  blocks of llama.cpp's are read where they lie\n");
  return true;
}

}  // namespace

int main() try {
  // One thread a core; an engine may lend its own: kvx::Executor(num_threads, callable).
  const kvx::Executor threads = kvx::Executor::thread_pool().value();
  const bool is_right = run_pages("int8", KVX_FORMAT_INT8, 0.01f, threads) &&
                        run_pages("nvfp4", KVX_FORMAT_NVFP4, 0.12f, threads) && run_q8_0();
  return is_right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
