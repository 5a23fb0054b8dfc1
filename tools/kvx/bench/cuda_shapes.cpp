// The batches that `kvx bench --device cuda` knows by name.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "tools/kvx/bench/cuda_bench.hpp"

namespace kvx::tool {

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
    } else if (name == "aq4") {  // speculative verification
      set(64, 8192, 32);
      named.q_len = 4;
    } else if (name == "p" || name == "pm") {  // a whole prompt
      set(1, 8192, 32);
      named.q_len = s.length;
      named.without_wgmma = name == "pm";
    } else if (name == "pc" || name == "pcm") {  // a chunk of a prompt on a cached prefix
      set(1, 32768, 32);
      named.q_len = 1024;
      named.without_wgmma = name == "pcm";
    } else if (name == "aq8") {
      set(64, 8192, 32);
      named.q_len = 8;
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
    } else if (int sequences = 0, tokens = 0;
               std::sscanf(name.c_str(), "%dx%d", &sequences, &tokens) == 2 && sequences > 0 &&
               sequences <= 4096 && tokens > 0 && tokens <= 1 << 20) {
      set(sequences, tokens, 32);
    } else {
      return invalid_argument(
          "shapes has '{}'; expected a, b, c, d, a64, a80, a96, a192, a256, aq4, aq8, mixed, "
          "oss, ossw, aw, aws, p, pc, pm, pcm "
          "or SEQUENCESxTOKENS",
          name);
    }
    s.prefill_tokens = std::min(s.prefill_tokens, s.length);
    shapes.push_back(named);
  }
  return shapes;
}

}  // namespace kvx::tool
