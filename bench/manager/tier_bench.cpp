// What the host tier's copies cost: blocks to host memory and back through HostTier, with their
// checksums and books, beside memcpy of the same blocks by one thread. Prints a Markdown table.
//
//   kvx_tier_bench [megabytes a direction, 256]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "tier/host_tier.hpp"

namespace kvx::tier {
namespace {

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "tier_bench: {}\n", status.error().message);
  std::exit(1);
}

double seconds_of(const auto& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One chain of blocks of one token in both tiers.
struct Chain : cache::EvictionListener {
  int64_t num_blocks;
  int64_t block_bytes;
  cache::SequenceShape shape;
  cache::BlockPool pool;
  cache::PrefixIndex index;
  std::unique_ptr<HostTier> host;
  int32_t scope, host_scope;
  std::vector<int32_t> tokens, nodes, host_nodes;

  Chain(int64_t count, int64_t bytes)
      : num_blocks(count),
        block_bytes(bytes),
        shape{1, num_blocks, {{0, 0, {}, 0}}},
        pool(make_pool(num_blocks, block_bytes)),
        index(cache::PrefixIndex::create(pool, shape, "", cache::HashAlgorithm::kXxh3).value()),
        host(HostTier::create(pool, index, shape, "", cache::HashAlgorithm::kXxh3,
                              {(num_blocks + 1) * block_bytes, cache::EvictionKind::kLru})
                 .value()),
        scope(index.pin_scope({}).value()),
        host_scope(host->nodes().pin_scope({}).value()),
        tokens(num_blocks) {
    pool.set_eviction_listener(this);
    for (int64_t i = 0; i < num_blocks; ++i) tokens[i] = static_cast<int32_t>(i);
    std::memset(pool.region(0), 1, num_blocks * block_bytes);
    int32_t node = scope, host_node = host_scope;
    for (int64_t i = 0; i < num_blocks; ++i) {
      node = index.insert(node, std::span(tokens).subspan(i, 1));
      index.pin(node);
      nodes.push_back(node);
      host_node = host->nodes().insert(host_node, std::span(tokens).subspan(i, 1));
      host->nodes().pin(host_node);
      host_nodes.push_back(host_node);
    }
  }
  static cache::BlockPool make_pool(int64_t count, int64_t bytes) {
    const cache::BlockClassSpec spec{"blocks", count, {bytes}};
    return cache::BlockPool::create(cache::host_memory(), std::span(&spec, 1)).value();
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  void fill_first_tier() {
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (index.block_of(nodes[i], 0, cache::BlockKind::kPacked) != cache::kNoBlock) continue;
      int32_t id;
      must(pool.allocate(0, std::span(&id, 1)));
      must(index.attach(nodes[i], 0, cache::BlockKind::kPacked, id));
      must(pool.release(0, id));
    }
  }
  void store_all() {
    for (int64_t i = 0; i < num_blocks; ++i) {
      host->store(host_nodes[i], 0, cache::BlockKind::kPacked,
                  index.block_of(nodes[i], 0, cache::BlockKind::kPacked));
    }
    host->wait_for_all();
    host->collect();
  }
  void load_all() {
    Promotion promotion = host->promote(scope, host_scope, tokens, num_blocks);
    host->wait(promotion);
    host->collect();
    host->release(promotion);
  }
  // The same blocks, by the calling thread.
  void copy_all(bool to_host) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      uint8_t* const first = pool.region(0) + i * block_bytes;
      uint8_t* const other = host->block_bytes(0, static_cast<int32_t>(i));
      std::memcpy(to_host ? other : first, to_host ? first : other, block_bytes);
    }
  }
};

struct Seconds {
  double copy_out = 1e9, store = 1e9, copy_back = 1e9, load = 1e9;
};

Seconds measure(int64_t num_blocks, int64_t block_bytes) {
  Chain chain(num_blocks, block_bytes);
  Seconds best;
  for (int round = 0; round < 6; ++round) {  // the first one touches the memory
    chain.fill_first_tier();
    must(chain.host->clear());
    const double copy_out = seconds_of([&] { chain.copy_all(true); });
    const double store = seconds_of([&] { chain.store_all(); });
    chain.pool.evict(0, num_blocks);
    const double copy_back = seconds_of([&] { chain.copy_all(false); });
    const double load = seconds_of([&] { chain.load_all(); });
    if (round == 0) continue;
    best = {std::min(best.copy_out, copy_out), std::min(best.store, store),
            std::min(best.copy_back, copy_back), std::min(best.load, load)};
  }
  const HostTierSnapshot seen = chain.host->snapshot();
  if (seen.num_loaded != 6 * num_blocks || seen.num_bad != 0) {
    fmt::print(stderr, "tier_bench: {} blocks came back, {} bad; expected {}\n", seen.num_loaded,
               seen.num_bad, 6 * num_blocks);
    std::exit(1);
  }
  return best;
}

void run(int64_t total_bytes) {
  fmt::print(
      "| block | memcpy out, GB/s | store, GB/s | % | memcpy back, GB/s | load, GB/s | % |\n");
  fmt::print("|---|---|---|---|---|---|---|\n");
  for (int64_t block_bytes = 16 << 10; block_bytes <= 4 << 20; block_bytes *= 4) {
    const int64_t num_blocks = total_bytes / block_bytes;
    const Seconds best = measure(num_blocks, block_bytes);
    const double gigabytes = static_cast<double>(num_blocks * block_bytes) / 1e9;
    fmt::print("| {} KiB | {:.2f} | {:.2f} | {:.0f} | {:.2f} | {:.2f} | {:.0f} |\n",
               block_bytes >> 10, gigabytes / best.copy_out, gigabytes / best.store,
               100 * best.copy_out / best.store, gigabytes / best.copy_back, gigabytes / best.load,
               100 * best.copy_back / best.load);
  }
}

}  // namespace
}  // namespace kvx::tier

int main(int argc, char** argv) {
  const int megabytes = argc > 1 ? std::atoi(argv[1]) : 256;
  if (megabytes < 8 || megabytes > 100'000) {
    fmt::print(stderr, "tier_bench: {} megabytes; expected 8 to 100000\n", megabytes);
    return 2;
  }
  kvx::tier::run(int64_t{megabytes} << 20);
}
