// What the block manager's own work costs, from 10^3 to 10^7 blocks of a simulated geometry:
// allocate and free, prefix matches, forks, hashing, metadata. Prints a Markdown table.
//
//   kvx_manager_bench [largest power of ten, 3 to 7]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "cache/prefix/prefix_index.hpp"
#include "kv/kv_step.hpp"

namespace kvx::cache {
namespace {

constexpr int64_t kBlockSize = 16;
constexpr int64_t kChainBlocks = 6250;  // 100k tokens

// Of this thread alone: the machine is shared.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best of three: other programs only ever make it slower.
template <class Call>
double seconds_of(const Call& call) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double start = cpu_seconds();
    call();
    best = std::min(best, cpu_seconds() - start);
  }
  return best;
}

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "manager_bench: {}\n", status.error().message);
  std::exit(1);
}

BlockPool make_pool(int64_t num_blocks) {
  const BlockClassSpec spec{"blocks", num_blocks, {1}};  // bytes that nobody reads
  return BlockPool::create(host_memory(), std::span(&spec, 1)).value();
}

// Sequences of 1 to 200 blocks come and go in random order in a pool that is two thirds full.
double allocate_free_nanoseconds(int64_t num_blocks) {
  BlockPool pool = make_pool(num_blocks);
  std::mt19937 random(1);
  std::vector<std::vector<int32_t>> sequences;
  const auto length = [&random] { return static_cast<size_t>(1 + random() % 200); };
  while (pool.num_used(0) < num_blocks * 2 / 3) {
    std::vector<int32_t>& ids = sequences.emplace_back(length());
    for (int32_t& id : ids) must(pool.allocate(0, std::span(&id, 1)));
  }
  int64_t num_pairs = 0;
  const auto replace_one = [&] {
    std::vector<int32_t>& ids = sequences[random() % sequences.size()];
    for (size_t i = ids.size(); i-- > 0;) must(pool.release(0, ids[i]));
    ids.resize(std::min<size_t>(length(), static_cast<size_t>(pool.num_free(0))));
    for (int32_t& id : ids) must(pool.allocate(0, std::span(&id, 1)));
    num_pairs += static_cast<int64_t>(ids.size());
  };
  for (size_t i = 0; i < 10 * sequences.size(); ++i) replace_one();  // until ids are well mixed
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    num_pairs = 0;
    const double start = cpu_seconds();
    while (num_pairs < 2'000'000) replace_one();
    best = std::min(best, (cpu_seconds() - start) / static_cast<double>(num_pairs));
  }
  return 1e9 * best;
}

// One pair of allocate and release behind one mutex, by two threads at once.
double contended_nanoseconds(int64_t num_blocks) {
  constexpr int64_t kPairs = 1'000'000;
  BlockPool pool = make_pool(num_blocks);
  std::mutex mutex;
  const auto work = [&] {
    for (int64_t i = 0; i < kPairs; ++i) {
      int32_t id;
      {
        const std::lock_guard lock(mutex);
        must(pool.allocate(0, std::span(&id, 1)));
      }
      const std::lock_guard lock(mutex);
      must(pool.release(0, id));
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::thread other(work);
  work();
  other.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return 1e9 * seconds.count() / (2 * kPairs);
}

// What a step of one token costs beside its attention: begin() and end(), by `num_threads` writers
// at once, each with a sequence of its own. Microseconds of wall clock.
double step_microseconds(int num_threads) {
  constexpr int kSteps = 100'000;
  kv::KvCacheConfig config;
  config.geometry = {1, 1, 16, 16, {}};
  config.recipe = kv::parse_recipe("int8").value();
  config.block_size = 16;
  config.max_sequences = num_threads;
  config.max_tokens_per_sequence = kSteps;
  const auto level = device::choose_cpu_level().value();
  const ops::CpuContext context{&ops::cpu::kernel_table(level), &serial_executor()};
  const auto cache = kv::KvCache::create(config, context).value();
  const auto write = [&cache] {
    kv::KvStep step(*cache);
    const kv::StepEntry entry{cache->create_sequence().value(), 1};
    for (int i = 0; i < kSteps; ++i) {
      must(step.begin({&entry, 1}));
      if (i % 1000 == 999) {  // short tables: their copy is no part of the bookkeeping
        must(step.cancel());
        must(cache->truncate_sequence(entry.sequence, 0));
      } else {
        must(step.end());
      }
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < num_threads; ++i) others.emplace_back(write);
  write();
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return 1e6 * seconds.count() / kSteps;
}

struct Evictions : EvictionListener {
  PrefixIndex* index = nullptr;
  void on_evict(int block_class, int32_t id) override { index->on_evict(block_class, id); }
};

// A pool full of cached chains of random tokens.
struct FilledIndex {
  BlockPool pool;
  SequenceShape shape{kBlockSize, kChainBlocks* kBlockSize, {{0, 0, {}, 0}}};
  PrefixIndex index;
  Evictions evictions;
  int32_t scope;
  std::vector<std::vector<int32_t>> chains;  // tokens

  explicit FilledIndex(int64_t num_blocks)
      : pool(make_pool(num_blocks)),
        index(PrefixIndex::create(pool, shape, "", HashAlgorithm::kXxh3).value()),
        scope(index.pin_scope({}).value()) {
    evictions.index = &index;
    pool.set_eviction_listener(&evictions);
    std::mt19937 random(2);
    for (int64_t left = num_blocks; left > 0; left -= kChainBlocks) {
      add_chain(std::min(left, kChainBlocks), random);
    }
  }

  void add_chain(int64_t num_blocks, std::mt19937& random) {
    std::vector<int32_t>& tokens = chains.emplace_back(num_blocks * kBlockSize);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 50000);
    int32_t node = scope;
    for (int64_t b = 0; b < num_blocks; ++b) {
      int32_t id;
      must(pool.allocate(0, std::span(&id, 1)));
      node = index.insert(node, std::span(tokens).subspan(b * kBlockSize, kBlockSize));
      must(index.attach(node, 0, BlockKind::kPacked, id));
      must(pool.release(0, id));
    }
  }
};

double match_nanoseconds(FilledIndex& filled) {
  const double seconds = seconds_of([&] {
    for (const std::vector<int32_t>& tokens : filled.chains) {
      const PrefixMatch match = filled.index.match(filled.scope, tokens, kChainBlocks);
      if (match.num_blocks() * kBlockSize != static_cast<int64_t>(tokens.size())) std::exit(1);
    }
  });
  return 1e9 * seconds / static_cast<double>(filled.pool.num_blocks(0));
}

// Microseconds per 1,000 tokens of a fork.
double fork_microseconds() {
  BlockPool pool = make_pool(kChainBlocks);
  const SequenceShape shape{kBlockSize, kChainBlocks * kBlockSize, {{0, 0, {}, 0}}};
  Sequence one = Sequence::create(shape).value();
  must(one.append(pool, shape.max_tokens));
  Sequence fork = Sequence::create(shape).value();
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    const double start = cpu_seconds();
    must(fork.share(pool, one));
    best = std::min(best, cpu_seconds() - start);
    must(fork.clear(pool));
  }
  return 1e6 * best / (static_cast<double>(shape.max_tokens) / 1000);
}

// Tokens hashed block by block, in GB/s of token ids.
double hash_gigabytes(HashAlgorithm algorithm) {
  std::vector<int32_t> tokens(kChainBlocks * kBlockSize);
  std::iota(tokens.begin(), tokens.end(), 0);
  ContentHash hash = hash_scope(algorithm, "");
  const double seconds = seconds_of([&] {
    for (int64_t b = 0; b < kChainBlocks; ++b) {
      hash = hash_block(algorithm, hash, std::span(tokens).subspan(b * kBlockSize, kBlockSize));
    }
  });
  return static_cast<double>(tokens.size()) * 4 / seconds / 1e9;
}

void run(int largest_power) {
  fmt::print(
      "| blocks | allocate + free, ns | prefix match, ns a block | metadata, bytes a block |\n");
  fmt::print("|---|---|---|---|\n");
  int64_t num_blocks = 1000;
  for (int power = 3; power <= largest_power; ++power, num_blocks *= 10) {
    const double allocate = allocate_free_nanoseconds(num_blocks);
    FilledIndex filled(num_blocks);
    constexpr double kPoolBytes = 12 + 8 + 0.25;  // counters, LRU's links, what is held and waits
    const double metadata = kPoolBytes + static_cast<double>(filled.index.metadata_bytes()) /
                                             static_cast<double>(num_blocks);
    fmt::print("| 10^{} | {:.1f} | {:.1f} | {:.1f} |\n", power, allocate, match_nanoseconds(filled),
               metadata);
  }
  fmt::print("\nallocate + free behind one mutex, two threads: {:.0f} ns a pair\n",
             contended_nanoseconds(1'000'000));
  fmt::print("begin + end of a step of one token: {:.2f} us; with two writers at once {:.2f} us\n",
             step_microseconds(1), step_microseconds(2));
  fmt::print("fork of 100k tokens, blocks of 16: {:.2f} us per 1,000 tokens\n",
             fork_microseconds());
  fmt::print("hashing of token ids, blocks of 16: {} {:.2f} GB/s, {} {:.2f} GB/s\n", "xxh3",
             hash_gigabytes(HashAlgorithm::kXxh3), "sha256",
             hash_gigabytes(HashAlgorithm::kSha256));
}

}  // namespace
}  // namespace kvx::cache

int main(int argc, char** argv) {
  const int power = argc > 1 ? std::atoi(argv[1]) : 6;
  if (power < 3 || power > 7) {
    fmt::print(stderr, "manager_bench: the largest power of ten is {}; expected 3 to 7\n", power);
    return 2;
  }
  kvx::cache::run(power);
}
