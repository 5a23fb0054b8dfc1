// A cache that kvx owns: two answers to one prompt, a third from the prefix cache, a cut, and all
// of it from a file again.
#include <cmath>
#include <cstdio>
#include <exception>
#include <kvx/kvx.hpp>
#include <vector>

namespace {

constexpr uint32_t kKvHeads = 2, kQHeads = 4, kDim = 32;

// One step: appends the tokens' K and V and attends. A model would compute q, k and v. Returns the
// last token's first output number.
float feed(kvx::Cache& cache, kvx::Sequence& sequence, const std::vector<int32_t>& tokens) {
  std::vector<float> q(tokens.size() * kQHeads * kDim), k(tokens.size() * kKvHeads * kDim);
  std::vector<float> out(q.size());
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(tokens[i / kDim / kKvHeads]);
  kvx::StepRows rows;
  rows.num_q_heads = kQHeads;
  rows.q = kvx::rows(q.data());
  rows.k = rows.v = kvx::rows(k.data());
  rows.out = kvx::rows(out.data());
  const auto count = static_cast<int32_t>(tokens.size());
  kvx::Step step = kvx::Step::begin(cache, {{sequence, count}}).value();
  step.append_and_attend(0, rows).value();  // once for every layer
  step.end().value();                       // an exception before this cancels the step
  sequence.record(tokens).value();          // blocks can be found by them
  return out[out.size() - kDim];
}

bool run() {
  const kvx::Recipe recipe = kvx::Recipe::parse("int8", kDim).value();
  std::printf("%s: %llu bytes per token and KV head\n", recipe.text().c_str(),
              static_cast<unsigned long long>(recipe.bytes(1)));
  kvx::CacheConfig config;
  config.num_layers = 1;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.recipe = recipe.text();
  config.block_size = 8;
  config.max_sequences = 4;
  config.max_tokens_per_sequence = 64;
  config.flags = KVX_CACHE_PREFIXES;
  kvx::Cache cache = kvx::Cache::create(config).value();

  std::vector<int32_t> prompt;
  for (int t = 0; t < 20; ++t) prompt.push_back(t % 7);
  kvx::Sequence first = kvx::Sequence::create(cache).value();
  const float mean = feed(cache, first, prompt);
  kvx::Sequence second = first.fork().value();  // shares every block of the prompt
  feed(cache, first, {1, 2, 3});
  feed(cache, second, {4});
  second.truncate(10).value();  // forgets the tokens from the tenth on

  const auto third = kvx::Sequence::create_from(cache, prompt).value();
  first.save("owned_cache_cpp.kvx").value();
  const auto loaded = kvx::Sequence::load(cache, "owned_cache_cpp.kvx").value();
  const auto num_found = static_cast<int>(third.num_tokens().value());
  const auto num_left = static_cast<int>(second.num_tokens().value());
  const auto num_loaded = static_cast<int>(loaded.num_tokens().value());
  std::printf(
      "%d of 20 prompt tokens were found, %d are left after the cut, %d came from the file\n",
      num_found, num_left, num_loaded);
  // All queries are 0: the output is the mean of the values 0, 1, ..., 6, 0, ..., of 20 tokens.
  return num_found == 16 && num_left == 10 && num_loaded == 23 && std::fabs(mean - 2.85f) < 0.02f &&
         std::remove("owned_cache_cpp.kvx") == 0;
}

}  // namespace

int main() try { return run() ? 0 : 1; } catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
