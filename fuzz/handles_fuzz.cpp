// Random calls on the handles of an owned cache, against a model: a sequence has the rows that were
// appended to it, whichever sequences share its blocks; stale handles are refused; no block is
// lost.
#include <unistd.h>

#include <filesystem>
#include <map>

#include "fuzz/abi_case.hpp"
#define KVX_NO_SHORT_NAMESPACE  // the core's own kvx::Result is seen here
#include "kvx/kvx.hpp"

namespace kvx::fuzz {
namespace {

using api::sized;

constexpr int kDim = 4;
constexpr int kBlockSize = 4;
constexpr int kMaxTokens = 40;
constexpr int kMaxSequences = 4;

// K and V of a token depend on the token and its position only, so that equal prefixes have equal
// rows.
float number_of(int32_t token, int64_t position) {
  return static_cast<float>(token * 100 + position);
}

struct ModelSequence {
  std::vector<int32_t> tokens;
  size_t num_recorded = 0;
};

class Case {
 public:
  explicit Case(FuzzedDataProvider& data)
      : choices_(data),
        path_((std::filesystem::temp_directory_path() / ("kvx_handles_" + std::to_string(getpid())))
                  .string()) {
    constexpr const char* kRecipes[] = {"f32", "f32", "int8:sink=4,recent=8"};
    recipe_ = choices_.pick(kRecipes);
    auto config = sized<kvx_cache_config_t>();
    config.num_layers = config.num_kv_heads = 1;
    config.k_head_dim = config.v_head_dim = kDim;
    config.block_size = kBlockSize;
    config.max_sequences = kMaxSequences;
    config.max_tokens_per_sequence = kMaxTokens;
    config.recipe = recipe_;
    const int32_t windows[] = {static_cast<int32_t>(choices_.between(1, 12))};
    has_window_ = choices_.one_in(3);
    if (has_window_) config.layer_windows = windows;
    // Blocks of 256 bytes at most: one sequence's, or more.
    if (choices_.flip()) config.memory_budget_bytes = choices_.between(4000, 16000);
    auto options = sized<kvx_cache_options_t>();
    options.flags = choices_.one_in(8) ? 0 : KVX_CACHE_PREFIXES;
    if (choices_.flip()) options.flags |= KVX_CACHE_ZEROES_ON_FREE;
    options.eviction = static_cast<uint32_t>(choices_.between(0, 3));
    has_prefixes_ = (options.flags & KVX_CACHE_PREFIXES) != 0;
    expect(kvx_cache_create_with(&config, &options, &cache_) == KVX_STATUS_OK, "a cache is made");
  }
  ~Case() {
    std::filesystem::remove(path_);
    kvx_cache_free(cache_);
    int32_t number = 0;
    expect(kvx_sequence_create(cache_, &number) != KVX_STATUS_OK, "a freed cache is refused");
  }

  void run() {
    for (int64_t left = choices_.between(1, 60); left > 0; --left) {
      call();
      check_counts();
    }
    for (const auto& [number, sequence] : model_) check_rows(number, sequence);
    while (!model_.empty()) free_one(model_.begin()->first);
    check_counts();
    for (const kvx_block_class_t& one : classes()) expect(one.num_active == 0, "no block is lost");
  }

 private:
  void call() {
    switch (choices_.between(0, 11)) {
      case 0:
        return create();
      case 1:
        return create_from();
      case 2:
        return fork();
      case 3:
        return truncate();
      case 4:
        return free_one(some_number());
      case 5:
        return record();
      case 6:
        return save_and_load();
      case 7:
        return forget_blocks();
      default:
        return step();
    }
  }

  // Mostly a living sequence's; otherwise a dead one's or any number.
  int32_t some_number() {
    if (!choices_.one_in(8) && !model_.empty()) {
      auto at = model_.begin();
      std::advance(at, choices_.between(0, static_cast<int64_t>(model_.size()) - 1));
      return at->first;
    }
    if (!dead_.empty() && choices_.flip()) {
      return dead_[static_cast<size_t>(
          choices_.between(0, static_cast<int64_t>(dead_.size()) - 1))];
    }
    return static_cast<int32_t>(choices_.between(INT32_MIN, INT32_MAX));
  }
  bool is_living(int32_t number) const { return model_.contains(number); }

  void add(kvx_status_t status, int32_t number, ModelSequence sequence) {
    if (status != KVX_STATUS_OK) return;
    expect(!is_living(number), "a number is given once");
    check_rows(number, sequence);
    model_[number] = std::move(sequence);
  }

  void create() {
    int32_t number = 0;
    const kvx_status_t status = kvx_sequence_create(cache_, &number);
    expect((status == KVX_STATUS_OK) == (model_.size() < kMaxSequences), "create until it is full");
    add(status, number, {});
  }

  void create_from() {
    std::vector<int32_t> tokens;
    for (int64_t left = choices_.between(0, kMaxTokens); left > 0; --left) {
      tokens.push_back(choices_.one_in(12) ? 1 : 0);
    }
    int32_t number = 0;
    int64_t num_found = 0;
    const kvx_status_t status = kvx_sequence_create_from(
        cache_, nullptr, tokens.data(), static_cast<int64_t>(tokens.size()), &number, &num_found);
    expect((status == KVX_STATUS_OK) == (has_prefixes_ && model_.size() < kMaxSequences),
           "create_from until it is full");
    if (status != KVX_STATUS_OK) return;
    expect(num_found % kBlockSize == 0, "whole blocks are found");
    expect(num_found == 0 || num_found < static_cast<int64_t>(tokens.size()), "not all are found");
    tokens.resize(static_cast<size_t>(num_found));
    add(status, number, {tokens, tokens.size()});
  }

  void fork() {
    const int32_t from = some_number();
    int32_t fork = 0;
    const kvx_status_t status = kvx_sequence_fork(cache_, from, &fork);
    expect((status == KVX_STATUS_OK) == (is_living(from) && model_.size() < kMaxSequences),
           "the living fork");
    if (status == KVX_STATUS_OK) add(status, fork, model_[from]);
  }

  void truncate() {
    const int32_t number = some_number();
    const int64_t num_tokens = choices_.between(-1, kMaxTokens);
    const kvx_status_t status = kvx_sequence_truncate(cache_, number, num_tokens);
    if (status != KVX_STATUS_OK) return;
    expect(is_living(number), "a dead sequence is not cut");
    ModelSequence& sequence = model_[number];
    expect(num_tokens <= static_cast<int64_t>(sequence.tokens.size()),
           "a cut makes nothing longer");
    sequence.tokens.resize(static_cast<size_t>(num_tokens));
    sequence.num_recorded = std::min(sequence.num_recorded, sequence.tokens.size());
  }

  void free_one(int32_t number) {
    const kvx_status_t status = kvx_sequence_free(cache_, number);
    expect((status == KVX_STATUS_OK) == is_living(number), "the living are freed");
    if (model_.erase(number) > 0) dead_.push_back(number);
  }

  void record() {
    const int32_t number = some_number();
    if (!is_living(number)) {
      const int32_t token = 0;
      expect(kvx_sequence_record(cache_, number, &token, 1) != KVX_STATUS_OK, "the dead are mute");
      return;
    }
    ModelSequence& sequence = model_[number];
    const auto left = static_cast<int64_t>(sequence.tokens.size() - sequence.num_recorded);
    const int64_t count = choices_.between(0, left);
    expect(kvx_sequence_record(cache_, number, sequence.tokens.data() + sequence.num_recorded,
                               count) == KVX_STATUS_OK,
           "tokens are recorded");
    sequence.num_recorded += static_cast<size_t>(count);
  }

  void save_and_load() {
    const int32_t number = some_number();
    const kvx_status_t saved = kvx_sequence_save(cache_, number, path_.c_str(), nullptr);
    if (saved != KVX_STATUS_OK) return;
    expect(is_living(number), "a dead sequence is not saved");
    int32_t loaded = 0;
    const kvx_status_t status = kvx_sequence_load(cache_, path_.c_str(), nullptr, &loaded);
    if (status == KVX_STATUS_OK) add(status, loaded, model_[number]);
  }

  void forget_blocks() {
    if (choices_.flip()) {
      expect(kvx_cache_clear_prefixes(cache_) == KVX_STATUS_OK, "prefixes are cleared");
      return;
    }
    const int64_t count = choices_.between(-1, 4);
    expect((kvx_cache_evict(cache_, count, nullptr) == KVX_STATUS_OK) == (count >= 0), "evicted");
  }

  void step() {
    std::vector<int32_t> numbers;
    std::vector<int32_t> counts;
    for (int64_t left = choices_.between(1, 3); left > 0; --left) {
      numbers.push_back(some_number());
      counts.push_back(static_cast<int32_t>(choices_.between(choices_.one_in(16) ? -1 : 1, 4)));
    }
    const auto num_entries = static_cast<uint32_t>(numbers.size());
    if (kvx_step_begin(cache_, num_entries, numbers.data(), counts.data()) != KVX_STATUS_OK) return;
    std::vector<std::vector<int32_t>> added;
    std::vector<float> rows;
    for (size_t i = 0; i < numbers.size(); ++i) {
      expect(is_living(numbers[i]), "the dead take no steps");
      std::vector<int32_t>& tokens = added.emplace_back();
      for (int32_t t = 0; t < counts[i]; ++t) {
        tokens.push_back(choices_.one_in(12) ? 1 : 0);
        const auto position = static_cast<int64_t>(model_[numbers[i]].tokens.size()) + t;
        rows.insert(rows.end(), kDim, number_of(tokens.back(), position));
      }
    }
    std::vector<float> out(rows.size());
    const kvx_rows_t in = api::rows(rows.data(), KVX_DTYPE_F32);
    const kvx_rows_t result = api::rows(out.data(), KVX_DTYPE_F32);
    auto layer = sized<kvx_step_layer_args_t>();
    layer.num_q_heads = 1;
    layer.q = layer.k = layer.v = &in;
    layer.out = &result;
    expect(kvx_step_layer(cache_, &layer) == KVX_STATUS_OK, "a layer appends and attends");
    end_step(added, numbers);
  }

  void end_step(std::vector<std::vector<int32_t>>& added, const std::vector<int32_t>& numbers) {
    const int64_t way = choices_.between(0, 3);
    if (way == 0) {
      expect(kvx_step_cancel(cache_) == KVX_STATUS_OK, "a step is cancelled");
      return;
    }
    if (way == 1) {
      std::vector<int32_t> kept;
      for (std::vector<int32_t>& tokens : added) {
        kept.push_back(
            static_cast<int32_t>(choices_.between(0, static_cast<int64_t>(tokens.size()))));
        tokens.resize(static_cast<size_t>(kept.back()));
      }
      expect(kvx_step_end_kept(cache_, static_cast<uint32_t>(kept.size()), kept.data()) ==
                 KVX_STATUS_OK,
             "a step keeps some");
    } else {
      expect(kvx_step_end(cache_) == KVX_STATUS_OK, "a step ends");
    }
    for (size_t i = 0; i < added.size(); ++i) {
      std::vector<int32_t>& tokens = model_[numbers[i]].tokens;
      tokens.insert(tokens.end(), added[i].begin(), added[i].end());
    }
  }

  // ---- what must hold

  std::vector<kvx_block_class_t> classes() const {
    auto seen = sized<kvx_cache_snapshot_t>();
    expect(kvx_cache_snapshot(cache_, &seen) == KVX_STATUS_OK, "a snapshot");
    expect(seen.num_sequences == static_cast<int64_t>(model_.size()), "sequences are counted");
    std::vector<kvx_block_class_t> all;
    for (uint32_t i = 0; i < seen.num_classes; ++i) {
      auto one = sized<kvx_block_class_t>();
      expect(kvx_cache_block_class(cache_, i, &one) == KVX_STATUS_OK, "a class");
      all.push_back(one);
    }
    return all;
  }

  void check_counts() {
    for (const kvx_block_class_t& one : classes()) {
      expect(one.num_active + one.num_cached + one.num_free == one.num_blocks, "blocks add up");
    }
    for (const auto& [number, sequence] : model_) {
      int64_t count = 0;
      expect(kvx_sequence_tokens(cache_, number, &count, nullptr) == KVX_STATUS_OK, "it lives");
      expect(count == static_cast<int64_t>(sequence.tokens.size()), "it has its tokens");
      if (choices_.one_in(4)) check_rows(number, sequence);
    }
    for (const int32_t number : dead_) {
      int64_t count = 0;
      expect(kvx_sequence_tokens(cache_, number, &count, nullptr) != KVX_STATUS_OK, "it is dead");
    }
  }

  // Rows are exact in f32; a window may have left the first ones behind.
  void check_rows(int32_t number, const ModelSequence& sequence) {
    const auto count = static_cast<int64_t>(sequence.tokens.size());
    if (count == 0) return;
    const int64_t first = choices_.between(0, count - 1);
    std::vector<float> k(static_cast<size_t>((count - first) * kDim));
    const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
    const kvx_status_t status =
        kvx_sequence_gather(cache_, number, 0, first, count - first, &rows, &rows);
    if (has_window_ && status != KVX_STATUS_OK) return;
    expect(status == KVX_STATUS_OK, "its rows are gathered");
    if (std::string_view(recipe_) != "f32") return;
    for (int64_t t = first; t < count; ++t) {
      const float expected = number_of(sequence.tokens[static_cast<size_t>(t)], t);
      for (int d = 0; d < kDim; ++d) {
        expect(k[static_cast<size_t>((t - first) * kDim + d)] == expected, "rows are its own");
      }
    }
  }

  Choices choices_;
  std::string path_;
  const char* recipe_ = nullptr;
  bool has_window_ = false;
  bool has_prefixes_ = false;
  kvx_cache_t cache_ = nullptr;
  std::map<int32_t, ModelSequence> model_;
  std::vector<int32_t> dead_;
};

}  // namespace
}  // namespace kvx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider provider(data, size);
  kvx::fuzz::Case(provider).run();
  return 0;
}
