// What a store gives a cache: records made and put, got and opened, in batches as a tier makes
// them. Prints "put GB/s, get GB/s" of each round for bench/manager/stores.py, which measures the
// same store's own benchmark in between.
//
//   kvx_store_bench TIER BLOCK_KIB MEGABYTES ROUNDS
//   kvx_store_bench 'redis(redis://127.0.0.1:6379)' 256 256 3
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>

#include "tier/chain/tier_config.hpp"
#include "tier/store/open_store.hpp"

namespace kvx::tier {
namespace {

constexpr int kTokens = 64;
constexpr int64_t kBatchBytes = int64_t{8} << 20;

[[noreturn]] void fail(std::string_view text) {
  fmt::print(stderr, "store_bench: {}\n", text);
  std::exit(1);
}

void must(const Status& status) {
  if (!status.ok()) fail(status.error().message);
}

double seconds_of(const auto& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Bench {
 public:
  Bench(const TierConfig& config, int64_t block_bytes, int64_t total_bytes)
      : payload_bytes_(block_bytes),
        record_bytes_(record_bytes(kTokens, block_bytes)),
        num_records_(std::max<int64_t>(total_bytes / block_bytes, 1)),
        batch_(std::max<int64_t>(kBatchBytes / record_bytes_, 1)),
        memory_(static_cast<size_t>(batch_ * record_bytes_)),
        tokens_(kTokens) {
    auto opened = open_store(config, record_bytes_);
    must(opened.ok() ? Status{} : Status{opened.error()});
    store_ = std::move(opened).value();
    std::iota(tokens_.begin(), tokens_.end(), 0);
    std::mt19937 random(1);
    for (uint8_t& byte : memory_) byte = static_cast<uint8_t>(random());
  }

  // GB/s of blocks.
  double put() {
    return gigabytes() / seconds_of([&] {
             for_each_batch([&](int64_t first, int64_t count) {
               std::vector<StorePut> items;
               for (int64_t i = 0; i < count; ++i) {
                 must(seal_record(facts_of(first + i), nullptr, record(i)));
                 items.push_back({key_of(first + i), record(i)});
               }
               must(store_->put(items));
               for (const StorePut& one : items) {
                 if (!one.is_stored) fail("the store has no room");
               }
             });
           });
  }
  double get() {
    return gigabytes() / seconds_of([&] {
             for_each_batch([&](int64_t first, int64_t count) {
               std::vector<StoreGet> items;
               for (int64_t i = 0; i < count; ++i) items.push_back({key_of(first + i), record(i)});
               must(store_->get_each(items, [&](size_t i) {
                 const auto place = static_cast<int64_t>(i);
                 if (items[i].num_bytes != record_bytes_) fail("a value is not there");
                 const auto payload = open_record(facts_of(first + place), nullptr, record(place));
                 if (!payload.ok()) fail(payload.error().message);
               }));
             });
           });
  }
  void clear() { must(store_->remove_all("kvx1/bench")); }

 private:
  void for_each_batch(const auto& visit) const {
    for (int64_t first = 0; first < num_records_; first += batch_) {
      visit(first, std::min(batch_, num_records_ - first));
    }
  }
  double gigabytes() const { return static_cast<double>(num_records_ * payload_bytes_) / 1e9; }
  std::span<uint8_t> record(int64_t i) {
    return std::span(memory_).subspan(static_cast<size_t>(i * record_bytes_),
                                      static_cast<size_t>(record_bytes_));
  }
  static std::string key_of(int64_t i) { return fmt::format("kvx1/bench/s/{:016x}-0p", i * 7919); }
  RecordFacts facts_of(int64_t i) const {
    RecordFacts facts;
    facts.hash.bytes[0] = static_cast<uint8_t>(i);
    facts.tokens = tokens_;
    facts.payload_bytes = payload_bytes_;
    return facts;
  }

  int64_t payload_bytes_, record_bytes_, num_records_, batch_;
  std::vector<uint8_t> memory_;
  std::vector<int32_t> tokens_;
  std::shared_ptr<RemoteStore> store_;
};

void run(const TierConfig& config, int64_t block_bytes, int64_t total_bytes, int num_rounds) {
  Bench bench(config, block_bytes, total_bytes);
  for (int round = 0; round < num_rounds; ++round) {
    const double put = bench.put();
    const double get = bench.get();
    fmt::print("{:.4f} {:.4f}\n", put, get);
    bench.clear();
  }
}

}  // namespace
}  // namespace kvx::tier

int main(int argc, char** argv) {
  const auto tiers = kvx::tier::parse_tiers(argc == 5 ? argv[1] : "");
  const int64_t block_kib = argc == 5 ? std::atoi(argv[2]) : 0;
  const int64_t megabytes = argc == 5 ? std::atoi(argv[3]) : 0;
  const int num_rounds = argc == 5 ? std::atoi(argv[4]) : 0;
  if (!tiers.ok() || tiers.value().size() != 1 || !kvx::tier::is_store(tiers.value()[0].kind) ||
      block_kib < 1 || megabytes < 1 || num_rounds < 1) {
    fmt::print(stderr,
               "usage: kvx_store_bench 'folder(FOLDER)'|'redis(URL)' BLOCK_KIB MEGABYTES "
               "ROUNDS\n");
    return 2;
  }
  kvx::tier::run(tiers.value()[0], block_kib << 10, megabytes << 20, num_rounds);
}
