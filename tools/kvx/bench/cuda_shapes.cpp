// The batches that `kvx bench --device cuda` has names for.
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "tools/kvx/bench/cuda_bench.hpp"
#include "tools/kvx/bench/latent_shape.hpp"

namespace kvx::tool {
namespace {

// p, pc, pm and pcm, with head_dims behind them: p256, pc192/128.
bool set_prefill(const std::string& name, CudaBenchShape& named) {
  char kind[4] = {};
  int key_dim = 128, value_dim = 0, length = 0;
  if (std::sscanf(name.c_str(), "%3[pcm]%n%d%n/%d%n", kind, &length, &key_dim, &length, &value_dim,
                  &length) < 1 ||
      length != std::ssize(name)) {
    return false;
  }
  const std::string_view which = kind;
  const bool is_chunk = which == "pc" || which == "pcm";
  if (!is_chunk && which != "p" && which != "pm") return false;
  named.shape.num_sequences = 1;
  named.shape.length = is_chunk ? 32768 : 8192;
  named.shape.num_q_heads = 32;
  named.shape.head_dim = key_dim;
  named.value_dim = value_dim > 0 ? value_dim : key_dim;
  named.q_len = is_chunk ? 1024 : named.shape.length;  // on a cached prefix, or a whole prompt
  named.without_wgmma = which.ends_with('m');
  return true;
}

bool set_latent(const std::string& name, CudaBenchShape& named) {
  const std::optional<LatentBatch> batch = parse_latent_batch(name);
  if (!batch) return false;
  const int block_size = named.shape.block_size;
  named.shape = batch->shape;
  named.shape.block_size = block_size;
  named.value_dim = named.shape.value_dim();
  named.is_mixed = batch->is_mixed;
  return true;
}

// aq4, 64x4096q8: so many queries a sequence, 2 to 16. Takes that off the name's end; without it 1.
int take_q_len(std::string& name) {
  constexpr int kMost = 16;
  int q_len = 0, length = 0;
  const size_t at = name.rfind('q');
  if (at == std::string::npos || std::sscanf(name.c_str() + at, "q%2d%n", &q_len, &length) < 1 ||
      length != std::ssize(name) - static_cast<ptrdiff_t>(at) || q_len < 2 || q_len > kMost) {
    return 1;
  }
  name.resize(at);
  return q_len;
}

}  // namespace

Result<std::vector<CudaBenchShape>> parse_cuda_shapes(const std::string& names, int block_size) {
  std::vector<CudaBenchShape> shapes;
  std::stringstream stream(names);
  for (std::string name; std::getline(stream, name, ',');) {
    CudaBenchShape named;
    named.name = name;
    named.shape.block_size = block_size;
    if (const size_t colon = name.find(':'); colon != std::string::npos) {
      KVX_ASSIGN_OR_RETURN(const PageLayout layout, parse_page_layout(name.substr(colon + 1)));
      named.pages = layout.order;
      if (layout.block_size > 0) named.shape.block_size = layout.block_size;
      name.resize(colon);
    }
    named.q_len = take_q_len(name);
    BenchShape& s = named.shape;
    const auto set = [&s](int sequences, int length, int q_heads) {
      s.num_sequences = sequences;
      s.length = length;
      s.num_q_heads = q_heads;
    };
    if (name == "a") {
      set(64, 8192, 32);
    } else if (name == "b") {
      set(1, 131072, 32);
    } else if (name == "c") {
      set(256, 1024, 32);
    } else if (name == "d") {
      set(16, 32768, 64);
    } else if (name == "a64") {  // head_dim 64, as in GPT-OSS
      set(64, 8192, 64);
      s.head_dim = 64;
    } else if (name == "a80" || name == "a96" || name == "a192" || name == "a256") {
      s.head_dim = std::stoi(name.substr(1));
      set(64, s.head_dim > 128 ? 4096 : 8192, 32);
    } else if (named.q_len == 1 && set_prefill(name, named)) {
    } else if (set_latent(name, named)) {
    } else if (name == "mixed") {
      set(64, 32768, 32);
      named.is_mixed = true;
    } else if (name == "oss" || name == "ossw") {  // GPT-OSS's two kinds of layers
      set(64, 8192, 64);
      s.head_dim = 64;
      named.has_sinks = true;
      named.window = name == "ossw" ? 128 : 0;
    } else if (name == "aw" || name == "aws") {  // half of a's tokens; aws: and the first four
      set(64, 8192, 32);
      named.window = 4096;
      named.window_sinks = name == "aws" ? 4 : 0;
    } else if (int sequences = 0, tokens = 0, length = 0;
               std::sscanf(name.c_str(), "%dx%d%n", &sequences, &tokens, &length) == 2 &&
               length == std::ssize(name) && sequences > 0 && sequences <= 4096 && tokens > 0 &&
               tokens <= 1 << 20) {
      set(sequences, tokens, 32);
    } else {
      return invalid_argument(
          "shapes has '{}'; expected a, b, c, d, a64, a80, a96, a192, a256, mixed, oss, "
          "ossw, aw, aws or SEQUENCESxTOKENS (aq4: with 4 queries a sequence, 2 to 16), p, pc, pm "
          "or pcm (p256, pc192/128: with those head_dims), mlaSEQUENCESxTOKENS or mlamixed (with "
          "h16: 16 query heads, 1 to 128)",
          named.name);
    }
    if (!named.is_prefill() && !s.is_latent()) named.value_dim = s.head_dim;
    s.prefill_tokens = std::min(s.prefill_tokens, s.length);
    shapes.push_back(named);
  }
  return shapes;
}

}  // namespace kvx::tool
