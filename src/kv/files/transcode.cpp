// Transcoding: a chain of a file's blocks is decoded some tokens at a time and fed to a sequence.
#include "kv/files/transcode.hpp"

#include <algorithm>

#include "kv/files/fingerprint.hpp"
#include "kv/files/stored_chain.hpp"
#include "kv/kv_step.hpp"
#include "kv/verbs/staged_rows.hpp"

namespace kvx::kv {
namespace {

constexpr int64_t kTokensAtOnce = 256;  // that are decoded; bounds the rows' memory

Error differs(std::string_view fact, std::string_view found, std::string_view expected) {
  return {
      ErrorCode::kInvalidArgument,
      fmt::format("{} is {}; expected {}, which no transcoding changes", fact, found, expected)};
}

Status check_same(std::string_view fact, int found, int expected) {
  if (found == expected) return {};
  return differs(fact, std::to_string(found), std::to_string(expected));
}

bool has_block_offsets(std::span<const LayerCalibration> calibration) {
  return std::any_of(calibration.begin(), calibration.end(),
                     [](const LayerCalibration& layer) { return !layer.k_block_offset.empty(); });
}

// Can rows of the stored cache be this cache's?
Status check_convertible(const StoredCache& stored, const KvCacheConfig& config) {
  const CacheGeometry& have = stored.geometry;
  const CacheGeometry& want = config.geometry;
  KVX_RETURN_IF_ERROR(check_same("num_layers", have.num_layers, want.num_layers));
  KVX_RETURN_IF_ERROR(check_same("num_kv_heads", have.num_kv_heads, want.num_kv_heads));
  KVX_RETURN_IF_ERROR(check_same("k_head_dim", have.k_head_dim, want.k_head_dim));
  KVX_RETURN_IF_ERROR(check_same("v_head_dim", have.v_head_dim, want.v_head_dim));
  KVX_RETURN_IF_ERROR(check_same("latent", have.is_latent, want.is_latent));
  for (int layer = 0; layer < want.num_layers; ++layer) {
    KVX_RETURN_IF_ERROR(check_same(fmt::format("the window of layer {}", layer),
                                   have.window_of(layer), want.window_of(layer)));
    KVX_RETURN_IF_ERROR(check_same(fmt::format("the sinks of layer {}", layer),
                                   have.sinks_of(layer), want.sinks_of(layer)));
  }
  if (stored.model != config.prefix.model) {
    return differs("model", stored.model, config.prefix.model);
  }
  if (stored.calibration == calibration_name({})) return {};
  const std::string own = calibration_name(config.calibration);
  if (stored.calibration != own) return differs("calibration", stored.calibration, own);
  if (stored.block_size == config.block_size || !has_block_offsets(config.calibration)) return {};
  return unsupported("block_size is {}; the calibrated block offsets are those of {}",
                     stored.block_size, config.block_size);
}

// A file whose blocks are to become this cache's.
struct Source {
  tier::CacheFileReader file;
  StoredChain chain;
};

Result<Source> open_source(tier::CacheFileReader file, const KvCacheConfig& config,
                           const ops::CpuContext& context) {
  KVX_ASSIGN_OR_RETURN(StoredCache stored, parse_fingerprint(file.index().fingerprint));
  if (file.index().block_size != stored.block_size) {
    return invalid_argument("its blocks are of {} tokens; its fingerprint has {}",
                            file.index().block_size, stored.block_size);
  }
  KVX_RETURN_IF_ERROR(check_convertible(stored, config));
  const bool is_calibrated = stored.calibration != calibration_name({});
  const std::span<const LayerCalibration> calibration =
      is_calibrated ? config.calibration : std::span<const LayerCalibration>();
  KVX_ASSIGN_OR_RETURN(StoredChain chain, StoredChain::create(std::move(stored), calibration,
                                                              file.index().kinds, context));
  return Source{std::move(file), std::move(chain)};
}

// A sequence's way through the file: the blocks, their tokens, and what sets them apart.
struct Path {
  std::vector<const tier::FileBlock*> blocks;
  std::vector<int32_t> tokens;
  cache::PrefixKeys keys;
};

Path path_to(const tier::FileIndex& index, int32_t last_block) {
  Path path;
  int32_t block = last_block;
  for (; block >= 0; block = index.blocks[block].parent) {
    path.blocks.push_back(&index.blocks[block]);
  }
  path.keys = index.scopes[-1 - block];
  std::reverse(path.blocks.begin(), path.blocks.end());
  for (const tier::FileBlock* one : path.blocks) {
    path.tokens.insert(path.tokens.end(), one->tokens.begin(), one->tokens.end());
  }
  return path;
}

// The blocks that a window keeps must be there from their first token on, since a shorter sequence
// may read them; of those before num_found the cache has its own.
Status check_windows(const StoredChain& chain, const KvCacheConfig& config, int64_t num_found,
                     int64_t num_tokens) {
  for (int layer = 0; layer < config.geometry.num_layers; ++layer) {
    const int window = config.geometry.window_of(layer);
    const int64_t kept = cache::expired_blocks(num_tokens, window, config.block_size);
    const int64_t first_kept = kept * config.block_size;
    const int64_t first_there = chain.first_token(layer);
    const int64_t sinks_end =
        cache::blocks_for(config.geometry.sinks_of(layer), config.block_size) * config.block_size;
    const bool has_sinks = sinks_end <= std::max(chain.sinks_end(layer), num_found) ||
                           first_there <= chain.sinks_end(layer);
    if (first_there <= std::max(first_kept, num_found) && has_sinks) continue;
    return unsupported(
        "layer {} has tokens from {} on; in blocks of {} its window begins with token {} (expected "
        "a block_size that divides {})",
        layer, first_there, config.block_size, first_kept, chain.stored().block_size);
  }
  return {};
}

// K and V of some tokens in one layer.
struct LayerRows {
  StagedRows k;
  StagedRows v;
};

Result<LayerRows> create_rows(const KvCacheConfig& config) {
  const CacheGeometry& geometry = config.geometry;
  const int64_t num_heads = kTokensAtOnce * geometry.num_kv_heads;
  const int64_t v_floats = num_heads * std::max(geometry.stored_v_head_dim(), 1);
  KVX_ASSIGN_OR_RETURN(StagedRows k,
                       StagedRows::create(config.cuda, num_heads * geometry.k_head_dim));
  KVX_ASSIGN_OR_RETURN(StagedRows v, StagedRows::create(config.cuda, v_floats));
  return LayerRows{std::move(k), std::move(v)};
}

// Tokens [first, first + count) of the chain to all layers of the open step.
Status append_rows(KvStep& step, const StoredChain& chain, LayerRows& rows, int64_t first,
                   int count) {
  const CacheGeometry& geometry = chain.stored().geometry;
  const int heads = geometry.num_kv_heads;
  const int64_t num_heads = int64_t{count} * heads;
  const auto target = [heads](float* data, int head_dim) {
    if (head_dim == 0) return MutableFloatRows();
    return dense_rows(static_cast<void*>(data), DType::kF32, heads, head_dim);
  };
  const auto source = [heads](const float* data, int head_dim) {
    return dense_rows(static_cast<const void*>(data), DType::kF32, heads, head_dim);
  };
  for (int layer = 0; layer < geometry.num_layers; ++layer) {
    // A window has left the first tokens behind: in their places zeros go into blocks that this
    // cache's window leaves behind too.
    std::fill_n(rows.k.host(), num_heads * geometry.k_head_dim, 0.0f);
    std::fill_n(rows.v.host(), num_heads * geometry.stored_v_head_dim(), 0.0f);
    KVX_RETURN_IF_ERROR(chain.gather(layer, first, count,
                                     target(rows.k.host(), geometry.k_head_dim),
                                     target(rows.v.host(), geometry.stored_v_head_dim())));
    KVX_RETURN_IF_ERROR(rows.k.send());
    KVX_RETURN_IF_ERROR(rows.v.send());
    KVX_RETURN_IF_ERROR(step.append(layer, source(rows.k.placed(), geometry.k_head_dim),
                                    source(rows.v.placed(), geometry.stored_v_head_dim())));
    KVX_RETURN_IF_ERROR(rows.k.wait());  // their stream is one
  }
  return {};
}

// Tokens from the sequence's end to the path's.
Status feed(KvCache& cache, int sequence, const StoredChain& chain, int64_t num_tokens) {
  KvStep step(cache);
  KVX_ASSIGN_OR_RETURN(LayerRows rows, create_rows(cache.config()));
  while (cache.num_tokens(sequence) < num_tokens) {
    const int64_t first = cache.num_tokens(sequence);
    const int64_t most = std::min(cache.max_step_tokens(sequence), kTokensAtOnce);
    const StepEntry entry{sequence, static_cast<int>(std::min(most, num_tokens - first))};
    KVX_RETURN_IF_ERROR(step.begin({&entry, 1}));
    KVX_RETURN_IF_ERROR(append_rows(step, chain, rows, first, entry.num_tokens));
    KVX_RETURN_IF_ERROR(step.end());
  }
  return cache.release_expired(sequence);
}

// The blocks that the sequence needs for the tokens that it has not yet.
Result<StoredChain::Reading> read_rest(const KvCache& cache, int sequence, Source& source,
                                       const Path& path) {
  const int64_t first_block = cache.num_tokens(sequence) / source.chain.stored().block_size;
  return source.chain.read(source.file, path.blocks, first_block);
}

// Appends and records what the sequence has not yet. Requires: read_rest().
Status complete(KvCache& cache, int sequence, const StoredChain& chain, const Path& path) {
  const int64_t num_found = cache.num_tokens(sequence);
  const auto num_tokens = static_cast<int64_t>(path.tokens.size());
  if (num_found >= num_tokens) return {};
  KVX_RETURN_IF_ERROR(check_windows(chain, cache.config(), num_found, num_tokens));
  KVX_RETURN_IF_ERROR(feed(cache, sequence, chain, num_tokens));
  return cache.record_tokens(sequence,
                             std::span(path.tokens).subspan(static_cast<size_t>(num_found)));
}

Status fill_sequence(KvCache& cache, int sequence, Source& source, const Path& path) {
  KVX_ASSIGN_OR_RETURN(const StoredChain::Reading reading,
                       read_rest(cache, sequence, source, path));
  if (!reading.problem.empty()) return invalid_argument("{}", reading.problem);
  return complete(cache, sequence, source.chain, path);
}

// ---- prefixes

// What has become of the file's blocks so far; each is counted once.
struct Progress {
  LoadReport report;
  std::vector<uint8_t> is_counted;  // [blocks of the file]

  void count(const tier::FileIndex& index, std::span<const tier::FileBlock* const> blocks,
             int64_t& number) {
    for (const tier::FileBlock* block : blocks) {
      uint8_t& counted = is_counted[block - index.blocks.data()];
      if (counted == 0) ++number;
      counted = 1;
    }
  }
  void note(std::string_view problem) {
    if (report.first_problem.empty()) report.first_problem = problem;
  }
};

void cut(Path& path, int64_t num_blocks) {
  path.blocks.resize(static_cast<size_t>(num_blocks));
  size_t num_tokens = 0;
  for (const tier::FileBlock* block : path.blocks) num_tokens += block->tokens.size();
  path.tokens.resize(num_tokens);
}

// Cuts the path before a block that cannot be read, until all that is left can.
Status read_what_is_whole(const KvCache& cache, int sequence, Source& source, Path& path,
                          Progress& progress) {
  for (;;) {
    cut(path, source.chain.num_usable(path.blocks));
    KVX_ASSIGN_OR_RETURN(const StoredChain::Reading reading,
                         read_rest(cache, sequence, source, path));
    if (reading.problem.empty()) return {};
    progress.note(reading.problem);
    const std::span<const tier::FileBlock* const> all(path.blocks);
    progress.count(source.file.index(), all.subspan(static_cast<size_t>(reading.num_blocks)),
                   progress.report.num_bad);
    cut(path, reading.num_blocks);
  }
}

// The blocks from the file's first to this one, by way of a sequence.
Status transcode_chain(KvCache& cache, Source& source, int32_t last_block, Progress& progress) {
  const tier::FileIndex& index = source.file.index();
  Path path = path_to(index, last_block);
  cut(path, std::ssize(path.tokens) / index.block_size);
  KVX_ASSIGN_OR_RETURN(const int sequence, cache.create_sequence_from(path.keys, path.tokens));
  const int64_t num_known = cache.num_tokens(sequence) / index.block_size;
  Status done = read_what_is_whole(cache, sequence, source, path, progress);
  if (done.ok()) done = complete(cache, sequence, source.chain, path);
  const std::span<const tier::FileBlock* const> blocks(path.blocks);
  const auto num_before = static_cast<size_t>(std::min<int64_t>(num_known, blocks.size()));
  progress.count(index, blocks.first(num_before), progress.report.num_known);
  const bool has_no_room = !done.ok() && done.error().code == ErrorCode::kOutOfRange;
  if (done.ok()) {
    progress.count(index, blocks.subspan(num_before), progress.report.num_loaded);
  } else if (has_no_room) {
    progress.count(index, blocks.subspan(num_before), progress.report.num_no_room);
    progress.note(done.error().message);
  }
  KVX_RETURN_IF_ERROR(cache.free_sequence(sequence));
  return has_no_room ? Status() : done;
}

// Where the chains of all blocks without children end that one sequence can hold: the last blocks
// of the chains, each once.
std::vector<int32_t> ends_of_chains(const tier::FileIndex& index, int64_t most_blocks) {
  constexpr int32_t kNone = -1;
  const size_t num_blocks = index.blocks.size();
  std::vector<int64_t> depths(num_blocks, 1);
  std::vector<int32_t> last_that_fits(num_blocks, kNone);
  std::vector<uint8_t> has_child(num_blocks, 0);
  for (size_t i = 0; i < num_blocks; ++i) {  // parents come first
    const int32_t parent = index.blocks[i].parent;
    if (parent >= 0) {
      has_child[parent] = 1;
      depths[i] = depths[parent] + 1;
      last_that_fits[i] = last_that_fits[parent];
    }
    if (depths[i] <= most_blocks) last_that_fits[i] = static_cast<int32_t>(i);
  }
  std::vector<int32_t> ends;
  std::vector<uint8_t> is_end(num_blocks, 0);
  for (size_t i = 0; i < num_blocks; ++i) {
    const int32_t end = last_that_fits[i];
    if (has_child[i] != 0 || end == kNone || is_end[end] != 0) continue;
    is_end[end] = 1;
    ends.push_back(end);
  }
  return ends;
}

// Rows that are quantised already gain nothing from being decoded and appended.
bool loads_as_it_lies(const tier::CacheFileReader& file, const KvCache& cache) {
  return reason_not_to_load(file.index().fingerprint, cache.fingerprint()).empty();
}

Error with_path(const std::string& path, const Error& error) {
  return {error.code, fmt::format("'{}': {}", path, error.message)};
}

}  // namespace

Status check_transcodable(std::string_view fingerprint, const KvCacheConfig& config) {
  KVX_ASSIGN_OR_RETURN(const StoredCache stored, parse_fingerprint(fingerprint));
  return check_convertible(stored, config);
}

Result<int> transcode_sequence(KvCache& cache, const std::string& path) {
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  if (loads_as_it_lies(file, cache) || !cache.config().prefix.is_on) {
    return cache.load_sequence(path);
  }
  auto opened = open_source(std::move(file), cache.config(), cache.context());
  if (!opened.ok()) return with_path(path, opened.error());
  Source& source = opened.value();
  const tier::FileIndex& index = source.file.index();
  if (index.sequences.empty()) return invalid_argument("'{}' holds no sequence", path);
  const Path saved = path_to(index, index.sequences.front());
  if (source.chain.num_usable(saved.blocks) < static_cast<int64_t>(saved.blocks.size())) {
    return invalid_argument("'{}': blocks of its sequence are missing", path);
  }
  const auto num_tokens = static_cast<int64_t>(saved.tokens.size());
  if (num_tokens > cache.config().max_tokens_per_sequence) {
    return out_of_range("'{}' holds {} tokens; max_tokens_per_sequence is {}", path, num_tokens,
                        cache.config().max_tokens_per_sequence);
  }
  KVX_ASSIGN_OR_RETURN(const int sequence, cache.create_sequence_from(saved.keys, saved.tokens));
  const Status filled = fill_sequence(cache, sequence, source, saved);
  if (filled.ok()) return sequence;
  KVX_RETURN_IF_ERROR(cache.free_sequence(sequence));
  return with_path(path, filled.error());
}

Result<LoadReport> transcode_prefixes(KvCache& cache, const std::string& path) {
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  if (loads_as_it_lies(file, cache) || !cache.config().prefix.is_on) {
    return cache.load_prefixes(path);
  }
  auto opened = open_source(std::move(file), cache.config(), cache.context());
  if (!opened.ok()) return with_path(path, opened.error());
  Source& source = opened.value();
  const tier::FileIndex& index = source.file.index();
  Progress progress;
  progress.is_counted.resize(index.blocks.size(), 0);
  progress.report.num_blocks = static_cast<int64_t>(index.blocks.size());
  const int64_t most_blocks = cache.config().max_tokens_per_sequence / index.block_size;
  for (const int32_t end : ends_of_chains(index, most_blocks)) {
    KVX_RETURN_IF_ERROR(transcode_chain(cache, source, end, progress));
  }
  return progress.report;
}

}  // namespace kvx::kv
