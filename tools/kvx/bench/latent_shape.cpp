// How the names are read and written.
#include "tools/kvx/bench/latent_shape.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <sstream>

namespace kvx::tool {
namespace {

constexpr int kRowDim = 576;
constexpr int kLatentDim = 512;
constexpr int kMostHeads = 128;
constexpr int kMostSequences = 4096;
constexpr int kMostTokens = 1 << 20;

}  // namespace

std::optional<LatentBatch> parse_latent_batch(const std::string& name) {
  int sequences = 64, tokens = 32768, heads = kMostHeads, length = 0;
  LatentBatch batch;
  batch.is_mixed = name.starts_with("mlamixed");
  if (batch.is_mixed) {
    length = 8;
  } else if (std::sscanf(name.c_str(), "mla%dx%d%n", &sequences, &tokens, &length) < 2) {
    return std::nullopt;
  }
  const int end_of_tokens = length;
  if (length < std::ssize(name) &&
      (std::sscanf(name.c_str() + length, "h%d%n", &heads, &length) < 1 ||
       end_of_tokens + length != std::ssize(name))) {
    return std::nullopt;
  }
  if (sequences < 1 || sequences > kMostSequences || tokens < 1 || tokens > kMostTokens ||
      heads < 1 || heads > kMostHeads) {
    return std::nullopt;
  }
  batch.shape.num_sequences = sequences;
  batch.shape.length = tokens;
  batch.shape.num_kv_heads = 1;
  batch.shape.num_q_heads = heads;
  batch.shape.head_dim = kRowDim;
  batch.shape.latent_dim = kLatentDim;
  return batch;
}

std::string latent_batch_name(const BenchShape& shape) {
  return fmt::format("mla{}x{}h{}", shape.num_sequences, shape.length, shape.num_q_heads);
}

Result<std::vector<BenchShape>> parse_latent_shapes(const std::string& names,
                                                    const BenchShape& like) {
  std::vector<BenchShape> shapes;
  std::stringstream stream(names);
  for (std::string name; std::getline(stream, name, ',');) {
    const std::optional<LatentBatch> batch = parse_latent_batch(name);
    if (!batch || batch->is_mixed) {
      return invalid_argument(
          "shapes has '{}'; on a CPU expected mlaSEQUENCESxTOKENS (with h16: 16 query heads, 1 to "
          "128), or --sequences, --lengths, --heads, --q-heads and --head-dim for other rows",
          name);
    }
    BenchShape shape = batch->shape;
    shape.block_size = like.block_size;
    shape.prefill_tokens = std::min(like.prefill_tokens, shape.length);
    shape.is_fast = like.is_fast;
    shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace kvx::tool
