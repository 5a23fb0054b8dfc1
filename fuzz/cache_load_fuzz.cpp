// Well-formed cache files with correct checksums and wrong contents: block size, lengths, parents,
// block copies and fingerprint. Caches load or refuse them, go on working, and lose no block.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "fuzz/abi_case.hpp"
#define KVX_NO_SHORT_NAMESPACE  // the core's own kvx::Result is seen here
#include "kvx/kvx.hpp"
#include "tier/cache_file.hpp"

namespace kvx::fuzz {
namespace {

using api::sized;
using tier::FileBlock;
using tier::FileIndex;
using tier::StoredBlockCopy;

constexpr int kDim = 16;
constexpr int kBlockSize = 4;
constexpr int kMaxTokens = 40;
constexpr int kMaxSequences = 3;
constexpr int64_t kLeastBytes = 40000;  // of a pool: a sequence of kMaxTokens in f32
constexpr const char* kRecipes[] = {"f32", "int8:sink=4,recent=8", "int4", "int8:source=page"};

// A cache of one of the recipes.
class OwnedCache {
 public:
  explicit OwnedCache(const char* recipe, int64_t memory_budget_bytes = 0) {
    auto config = sized<kvx_cache_config_t>();
    config.num_layers = 2;
    config.num_kv_heads = 1;
    config.k_head_dim = config.v_head_dim = kDim;
    config.block_size = kBlockSize;
    config.max_sequences = kMaxSequences;
    config.max_tokens_per_sequence = kMaxTokens;
    config.memory_budget_bytes = memory_budget_bytes;
    config.recipe = recipe;
    auto options = sized<kvx_cache_options_t>();
    options.flags = KVX_CACHE_PREFIXES;
    expect(kvx_cache_create_with(&config, &options, &handle) == KVX_STATUS_OK, "a cache is made");
  }
  ~OwnedCache() { kvx_cache_free(handle); }
  OwnedCache(const OwnedCache&) = delete;
  OwnedCache& operator=(const OwnedCache&) = delete;

  kvx_cache_t handle = nullptr;
};

// Fingerprint, kinds and block size as such a cache writes them, and no block.
const FileIndex& empty_index(const char* recipe, const std::string& path) {
  static std::map<std::string_view, FileIndex> indexes;
  const auto found = indexes.find(recipe);
  if (found != indexes.end()) return found->second;
  const OwnedCache cache(recipe);
  expect(kvx_cache_save_prefixes(cache.handle, path.c_str(), nullptr) == KVX_STATUS_OK, "saved");
  auto reader = tier::CacheFileReader::open(path);
  expect(reader.ok(), "an empty file is read");
  return indexes[recipe] = reader.value().index();
}

class Case {
 public:
  explicit Case(FuzzedDataProvider& data)
      : choices_(data),
        path_((std::filesystem::temp_directory_path() / ("kvx_load_" + std::to_string(getpid())))
                  .string()),
        recipe_(choices_.pick(kRecipes)),
        cache_(recipe_, choices_.flip() ? choices_.between(kLeastBytes, 2 * kLeastBytes) : 0) {}
  ~Case() { std::filesystem::remove(path_); }

  void run() {
    for (int64_t left = choices_.between(1, 3); left > 0; --left) {
      write_file();
      load();
      begin_with_a_prefix();
      step();
      if (choices_.flip()) free_all();
    }
    free_all();
    auto seen = sized<kvx_cache_snapshot_t>();
    expect(kvx_cache_snapshot(cache_.handle, &seen) == KVX_STATUS_OK, "a snapshot");
    for (uint32_t i = 0; i < seen.num_classes; ++i) {
      auto one = sized<kvx_block_class_t>();
      expect(kvx_cache_block_class(cache_.handle, i, &one) == KVX_STATUS_OK, "a class");
      expect(one.num_active == 0, "no block is lost");
      expect(one.num_cached + one.num_free == one.num_blocks, "blocks add up");
    }
  }

 private:
  // Not where the input has ended, whose numbers are the least that may be.
  bool rarely(int n) { return choices_.between(1, n) == n; }

  // ---- the file

  // Bytes of one block of a kind and where they lie.
  StoredBlockCopy add_block_copy(int32_t kind, int64_t num_bytes) {
    StoredBlockCopy block_copy{kind, tier::Codec::kRaw, std::ssize(file_), num_bytes, {}};
    std::vector<uint8_t> bytes;
    fill(bytes, num_bytes, static_cast<uint32_t>(choices_.between(0, 255)), rarely(4));
    bytes.pop_back();
    block_copy.checksum = cache::checksum(bytes);
    file_.insert(file_.end(), bytes.begin(), bytes.end());
    file_.resize((file_.size() + 63) / 64 * 64);
    return block_copy;
  }
  void spoil(StoredBlockCopy& block_copy) {
    switch (choices_.between(0, 4)) {
      case 0:
        block_copy.checksum.bytes[0] ^= 1;
        return;
      case 1:
        block_copy.codec = tier::Codec::kZstd;
        return;
      case 2:
        block_copy.stored_bytes = choices_.rarely_extreme(choices_.between(0, 4096));
        return;
      case 3:
        block_copy.offset = choices_.rarely_extreme(choices_.between(0, 64) * 64);
        return;
      default:
        block_copy.kind = static_cast<int32_t>(choices_.between(-1, 4));
    }
  }

  FileBlock some_block(const FileIndex& index, const std::vector<StoredBlockCopy>& block_copies) {
    const auto number = std::ssize(index.blocks);
    FileBlock block;
    // Mostly the chain's next one.
    block.parent = static_cast<int32_t>(number - 1);
    if (number == 0 || rarely(4)) {
      const bool is_outside = index.scopes.empty() || rarely(16);
      block.parent = static_cast<int32_t>(
          choices_.between(-std::ssize(index.scopes) - (is_outside ? 1 : 0), number - 1));
    }
    const int64_t most = std::min<int64_t>(index.block_size, 1024);
    const int64_t count = rarely(8) ? choices_.between(0, most + 1) : most;
    for (int64_t t = 0; t < count; ++t) block.tokens.push_back(rarely(12) ? 1 : 0);
    for (const StoredBlockCopy& block_copy : block_copies) {
      if (rarely(12)) continue;
      block.block_copies.push_back(block_copy);
      if (rarely(24)) spoil(block.block_copies.back());
    }
    return block;
  }

  void write_file() {
    FileIndex index = empty_index(rarely(3) ? choices_.pick(kRecipes) : recipe_, path_);
    if (rarely(4)) index.block_size = static_cast<int32_t>(choices_.between(0, 1025));
    if (rarely(16)) {
      const auto at = choices_.between(0, std::ssize(index.fingerprint) - 1);
      index.fingerprint[static_cast<size_t>(at)] = static_cast<char>(choices_.between(0, 127));
    }
    file_.assign(tier::kHeaderBytes, 0);
    std::vector<StoredBlockCopy> block_copies;
    for (size_t kind = 0; kind < index.kinds.size(); ++kind) {
      block_copies.push_back(add_block_copy(static_cast<int32_t>(kind), index.kinds[kind].bytes));
      if (rarely(24)) index.kinds[kind].bytes = choices_.between(1, 4096);
    }
    index.scopes.resize(static_cast<size_t>(rarely(16) ? 0 : choices_.between(1, 2)));
    if (index.scopes.size() == 2) index.scopes[1].adapter = "another";
    for (int64_t left = 10 - choices_.between(0, 10); left > 0; --left) {
      index.blocks.push_back(some_block(index, block_copies));
    }
    const auto num_blocks = std::ssize(index.blocks);
    if (!rarely(8)) {
      index.sequences.push_back(
          static_cast<int32_t>(rarely(4) ? choices_.between(-1, num_blocks) : num_blocks - 1));
    }
    const std::vector<uint8_t> coded = tier::encode_index(index);
    const std::vector<uint8_t> header =
        tier::encode_header({std::ssize(file_), std::ssize(coded), cache::checksum(coded)});
    std::copy(header.begin(), header.end(), file_.begin());
    file_.insert(file_.end(), coded.begin(), coded.end());
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(file_.data()), std::ssize(file_));
  }

  // ---- the cache

  void load() {
    auto options = sized<kvx_load_options_t>();
    options.flags = choices_.flip() ? KVX_LOAD_TRANSCODE : 0;
    if (choices_.flip()) {
      auto report = sized<kvx_load_report_t>();
      (void)kvx_cache_load_prefixes(cache_.handle, path_.c_str(), &options, &report);
    } else {
      int32_t number = 0;
      if (kvx_sequence_load(cache_.handle, path_.c_str(), &options, &number) == KVX_STATUS_OK) {
        sequences_.push_back(number);
      }
    }
    for (const int32_t number : sequences_) read_rows(number);
  }
  void begin_with_a_prefix() {
    const std::vector<int32_t> tokens(static_cast<size_t>(choices_.between(0, kMaxTokens)), 0);
    int32_t number = 0;
    int64_t num_found = 0;
    if (kvx_sequence_create_from(cache_.handle, nullptr, tokens.data(), std::ssize(tokens), &number,
                                 &num_found) != KVX_STATUS_OK) {
      return;
    }
    expect(num_found % kBlockSize == 0 && num_found <= std::ssize(tokens), "whole blocks");
    sequences_.push_back(number);
    read_rows(number);
  }
  void read_rows(int32_t number) {
    int64_t count = 0;
    expect(kvx_sequence_tokens(cache_.handle, number, &count, nullptr) == KVX_STATUS_OK, "it is");
    if (count == 0) return;
    std::vector<float> numbers(static_cast<size_t>(count) * kDim);
    const kvx_rows_t rows = api::rows(numbers.data(), KVX_DTYPE_F32);
    for (const uint32_t layer : {0u, 1u}) {
      expect(kvx_sequence_gather(cache_.handle, number, layer, 0, count, &rows, &rows) ==
                 KVX_STATUS_OK,
             "its rows are gathered");
    }
  }
  void step() {
    if (sequences_.empty()) return;
    const int32_t number = sequences_.back();
    const int32_t count = 1;
    if (kvx_step_begin(cache_.handle, 1, &number, &count) != KVX_STATUS_OK) return;
    std::vector<float> in(kDim, 0.5f);
    std::vector<float> out(kDim);
    const kvx_rows_t rows = api::rows(in.data(), KVX_DTYPE_F32);
    const kvx_rows_t result = api::rows(out.data(), KVX_DTYPE_F32);
    for (const uint32_t layer : {0u, 1u}) {
      auto args = sized<kvx_step_layer_args_t>();
      args.layer = layer;
      args.num_q_heads = 1;
      args.q = args.k = args.v = &rows;
      args.out = &result;
      expect(kvx_step_layer(cache_.handle, &args) == KVX_STATUS_OK, "a layer appends and attends");
    }
    expect(kvx_step_end(cache_.handle) == KVX_STATUS_OK, "a step ends");
  }
  void free_all() {
    for (const int32_t number : sequences_) {
      expect(kvx_sequence_free(cache_.handle, number) == KVX_STATUS_OK, "a sequence is freed");
    }
    sequences_.clear();
  }

  Choices choices_;
  std::string path_;
  const char* recipe_;
  OwnedCache cache_;
  std::vector<uint8_t> file_;
  std::vector<int32_t> sequences_;
};

}  // namespace
}  // namespace kvx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider provider(data, size);
  kvx::fuzz::Case(provider).run();
  return 0;
}
