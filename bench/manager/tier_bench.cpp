// What the host tier's copies cost: blocks to host memory and back through HostTier, with their
// checksums and bookkeeping, beside memcpy of the same blocks by one thread; or, with the first
// tier on a GPU, beside one cudaMemcpyAsync of all of their bytes from and to pinned memory. With a
// folder the host tier lies in its files, and memcpy writes and reads their pages. Prints a
// Markdown table.
//
//   kvx_tier_bench [--cuda | --files FOLDER] [megabytes a direction, 256]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>

#include "device/cuda_async.hpp"
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

// Where the tiers lie.
struct Place {
  std::unique_ptr<cache::Memory> device;  // the first; null: the host
  std::unique_ptr<cache::Memory> pinned;
  std::unique_ptr<device::OwnedCudaStream> compute;
  std::string folder = {};  // the host tier's; empty: memory

  cache::Memory& memory() const { return device ? *device : cache::host_memory(); }
  TierLink link() const {
    return device ? cuda_link(0, compute->get(), *pinned).value() : host_link();
  }
  void wait() const {
    if (device) must(device::cuda_synchronize(compute->get()));
  }
};

Place cuda_place() {
  auto device = cache::cuda_memory(0);
  must(device.ok() ? Status() : Status(device.error()));
  Place place{std::move(device).value(), cache::pinned_memory(0).value(), nullptr};
  place.compute =
      std::make_unique<device::OwnedCudaStream>(device::OwnedCudaStream::create().value());
  return place;
}

// One chain of blocks of one token in both tiers.
struct Chain : cache::EvictionListener {
  const Place& place;
  int64_t num_blocks;
  int64_t block_bytes;
  cache::SequenceShape shape;
  cache::BlockPool pool;
  cache::PrefixIndex index;
  std::unique_ptr<HostTier> host;
  int32_t scope, host_scope;
  std::vector<int32_t> tokens, nodes, host_nodes;

  Chain(const Place& where, int64_t count, int64_t bytes)
      : place(where),
        num_blocks(count),
        block_bytes(bytes),
        shape{1, num_blocks, {{0, 0, {}, 0}}},
        pool(make_pool(place.memory(), num_blocks, block_bytes)),
        index(cache::PrefixIndex::create(pool, shape, "", cache::HashAlgorithm::kXxh3).value()),
        host(HostTier::create(pool, index, shape, "", cache::HashAlgorithm::kXxh3,
                              {place.folder.empty() ? TierKind::kHost : TierKind::kDisk,
                               (num_blocks + 1) * block_bytes, place.folder},
                              place.link())
                 .value()),
        scope(index.pin_scope({}).value()),
        host_scope(host->nodes().pin_scope({}).value()),
        tokens(num_blocks) {
    pool.set_eviction_listener(this);
    for (int64_t i = 0; i < num_blocks; ++i) tokens[i] = static_cast<int32_t>(i);
    fill_with_noise();
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
  static cache::BlockPool make_pool(cache::Memory& memory, int64_t count, int64_t bytes) {
    const cache::BlockClassSpec spec{"blocks", count, {bytes}};
    return cache::BlockPool::create(memory, std::span(&spec, 1)).value();
  }
  void fill_with_noise() {
    std::vector<uint32_t> noise(static_cast<size_t>(num_blocks * block_bytes / 4));
    std::mt19937 random(1);
    for (uint32_t& word : noise) word = static_cast<uint32_t>(random());
    if (place.device) {
      must(device::cuda_copy(pool.region(0), noise.data(), num_blocks * block_bytes));
    } else {
      std::memcpy(pool.region(0), noise.data(), num_blocks * block_bytes);
    }
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  // On a GPU in any order, as a pool is after a while: neighbours of the chain lie apart.
  void fill_first_tier() {
    std::vector<int64_t> order(static_cast<size_t>(num_blocks));
    std::iota(order.begin(), order.end(), 0);
    if (place.device) std::shuffle(order.begin(), order.end(), std::mt19937(2));
    for (const int64_t i : order) {
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
    collect_all();
  }
  // As a cache's calls do while blocks are under way.
  void collect_all() {
    while (!host->is_idle()) {
      host->wait_for_some();
      host->collect();
    }
  }
  void load_all() {
    const TierScope from{host.get(), host_scope};
    Promotion promotion =
        promote({&pool, &index, &shape}, scope, std::span(&from, 1), tokens, num_blocks);
    collect_all();
    release_promotion({&pool, &index, &shape}, promotion);
  }
  // The same blocks by the calling thread, or the same bytes by the device in one copy.
  void copy_all(bool to_host) {
    if (place.device) {
      uint8_t* const first = pool.region(0);
      uint8_t* const other = host->block_bytes(0, 0);
      must(device::cuda_copy_async(to_host ? other : first, to_host ? first : other,
                                   num_blocks * block_bytes, place.compute->get()));
      return place.wait();
    }
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

Seconds measure(const Place& place, int64_t num_blocks, int64_t block_bytes) {
  Chain chain(place, num_blocks, block_bytes);
  Seconds best;
  for (int round = 0; round < 6; ++round) {  // the first one touches the memory
    chain.fill_first_tier();
    must(chain.host->clear());
    const double copy_out = seconds_of([&] { chain.copy_all(true); });
    const double store = seconds_of([&] { chain.store_all(); });
    chain.pool.evict(0, num_blocks);
    const double copy_back = seconds_of([&] { chain.copy_all(false); });
    // The yardstick put other blocks' bytes there; what comes back is checked by its own checksum.
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

void run(const Place& place, int64_t total_bytes) {
  fmt::print("| block | copy out, GB/s | store, GB/s | % | copy back, GB/s | load, GB/s | % |\n");
  fmt::print("|---|---|---|---|---|---|---|\n");
  for (int64_t block_bytes = 16 << 10; block_bytes <= 4 << 20; block_bytes *= 4) {
    const int64_t num_blocks = total_bytes / block_bytes;
    const Seconds best = measure(place, num_blocks, block_bytes);
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
  const bool on_gpu = argc > 1 && std::strcmp(argv[1], "--cuda") == 0;
  const bool in_files = argc > 2 && std::strcmp(argv[1], "--files") == 0;
  const int num_options = on_gpu ? 1 : in_files ? 2 : 0;
  const char* const size = argc > 1 + num_options ? argv[1 + num_options] : "256";
  const int megabytes = std::atoi(size);
  if (megabytes < 8 || megabytes > 100'000) {
    fmt::print(stderr, "tier_bench: '{}' megabytes; expected 8 to 100000\n", size);
    return 2;
  }
  using kvx::tier::Place;
  Place place = on_gpu ? kvx::tier::cuda_place() : Place{};
  if (in_files) place.folder = argv[2];
  kvx::tier::run(place, int64_t{megabytes} << 20);
}
