// A store whose every answer is the input's: whatever it says, the cache in front of it computes
// what a cache without a store computes, and loses no block.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "kv/kv_cache.hpp"
#include "tier/store/store_registry.hpp"

namespace {

using namespace kvx;

constexpr int kBlockSize = 4;
constexpr int kNumTokens = 12;
constexpr int kHeadDim = 32;

// The input, a byte at a time and round again.
class Input {
 public:
  void set(std::span<const uint8_t> bytes) {
    const std::lock_guard lock(mutex_);
    bytes_.assign(bytes.begin(), bytes.end());
    at_ = 0;
  }
  uint8_t next() {
    const std::lock_guard lock(mutex_);
    if (bytes_.empty()) return 0;
    at_ = (at_ + 1) % bytes_.size();
    return bytes_[at_];
  }

 private:
  std::mutex mutex_;
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

// Keeps the last value that it was given, and gives it back as the input will have it.
class FuzzedStore final : public tier::RemoteStore {
 public:
  Input input;

  Status put(std::span<tier::StorePut> items) override {
    for (tier::StorePut& item : items) {
      item.is_stored = input.next() % 2 == 0;
      const std::lock_guard lock(mutex_);
      value_.assign(item.value.begin(), item.value.end());
    }
    return status();
  }
  Status get(std::span<tier::StoreGet> items) override {
    for (tier::StoreGet& item : items) {
      const std::lock_guard lock(mutex_);
      const size_t count = std::min(value_.size(), item.buffer.size());
      std::copy_n(value_.begin(), count, item.buffer.begin());
      item.num_bytes = static_cast<int64_t>(count) + static_cast<int8_t>(input.next());
      const uint8_t how = input.next();
      if (how % 4 == 0 && count > 0) item.buffer[how % count] ^= input.next();
      if (how % 16 == 1) std::memset(&item.num_bytes, input.next(), sizeof item.num_bytes);
      if (how % 4 >= 2) item.num_bytes = static_cast<int64_t>(count);
    }
    return status();
  }
  Status exists(std::span<const std::string>, std::span<uint8_t> has) override {
    for (uint8_t& one : has) one = input.next() % 3;
    return status();
  }
  Status remove(std::span<const std::string>) override { return status(); }
  Status remove_all(std::string_view) override { return status(); }

 private:
  Status status() {
    const uint8_t how = input.next();
    if (how < 250) return {};
    if (how == 250) throw std::bad_alloc();
    if (how == 251) throw std::runtime_error("thrown");
    return internal_error("failed");
  }

  std::mutex mutex_;
  std::vector<uint8_t> value_;
};

std::shared_ptr<FuzzedStore> store() {
  static const std::shared_ptr<FuzzedStore> one = [] {
    auto made = std::make_shared<FuzzedStore>();
    if (!tier::register_store("fuzzed", made).ok()) __builtin_trap();
    return made;
  }();
  return one;
}

std::unique_ptr<kv::KvCache> new_cache(const char* tiers) {
  kv::KvCacheConfig config;
  config.geometry = {1, 1, kHeadDim, kHeadDim, {}};
  config.recipe = kv::parse_recipe("int8").value();
  config.block_size = kBlockSize;
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kNumTokens;
  config.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
  config.tiers = tier::parse_tiers(tiers).value();
  static const device::CpuLevel level = device::choose_cpu_level().value();
  return kv::KvCache::create(std::move(config),
                             {&ops::cpu::kernel_table(level), &serial_executor()})
      .value();
}

// What attention of the last token gives.
std::vector<float> compute(kv::KvCache& cache) {
  std::vector<int32_t> tokens(kNumTokens);
  std::vector<float> rows(kNumTokens * kHeadDim);
  for (int i = 0; i < kNumTokens; ++i) tokens[i] = i;
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i * 7919 % 101) - 50;
  const int sequence = cache.create_sequence_from({}, tokens).value();
  const auto found = static_cast<int>(cache.num_tokens(sequence));
  std::vector<float> out(rows.size());
  const int count = kNumTokens - found;
  const FloatRows in =
      dense_rows(std::as_const(rows).data() + found * kHeadDim, DType::kF32, 1, kHeadDim);
  const MutableFloatRows to = dense_rows(out.data() + found * kHeadDim, DType::kF32, 1, kHeadDim);
  const kv::StepEntry entry{sequence, count};
  const bool is_done =
      cache.begin_step(std::span(&entry, 1)).ok() &&
      cache.append_and_attend(0, {1}, in, in, in, to).ok() && cache.end_step().ok() &&
      cache.record_tokens(sequence, std::span(tokens).subspan(static_cast<size_t>(found))).ok() &&
      cache.free_sequence(sequence).ok();
  if (!is_done) __builtin_trap();
  return {out.end() - kHeadDim, out.end()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<float> expected = compute(*new_cache(""));
  store()->input.set({data, size});
  for (int i = 0; i < 2; ++i) {
    const auto cache = new_cache("store(fuzzed, timeout=1s)");
    if (compute(*cache) != expected) __builtin_trap();
    cache->wait_for_tiers();
    (void)cache->erase_session({}, {}, 0);
    if (cache->snapshot().classes[0].num_active != 0) __builtin_trap();
  }
  return 0;
}
