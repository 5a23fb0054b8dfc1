// Contiguous caches of the host: the bytes of their arrays, what rings and full caches keep, and
// attention in one and in both directions.
#include <algorithm>
#include <cmath>

#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

constexpr int kBatch = 2;
constexpr int kHeads = 3;
constexpr int kQueryHeads = 6;
constexpr int kDim = 64;
constexpr int kLength = 9;  // max_seq_len
constexpr int kNumQueries = 3;

// The words that name the format in a recipe, with scales that append computes.
std::string recipe_of(const FormatFacts& facts) {
  const bool is_fp8 = facts.format == KVX_FORMAT_FP8_E4M3 || facts.format == KVX_FORMAT_FP8_E5M2;
  return std::string(facts.name) + (is_fp8 ? ":source=computed" : "");
}

class ContiguousCache {
 public:
  ContiguousCache(const Provider& provider, const FormatFacts& facts, uint32_t flags = 0,
                  int32_t window = 0)
      : provider_(provider), facts_(facts) {
    const std::string recipe = recipe_of(facts);
    kvx_contiguous_config_t config{};
    config.size = sizeof config;
    config.num_layers = 1;
    config.num_q_heads = kQueryHeads;
    config.num_kv_heads = kHeads;
    config.k_head_dim = kDim;
    config.batch_size = kBatch;
    config.max_seq_len = kLength;
    config.flags = flags;
    config.recipe = recipe.c_str();
    config.layer_windows = window > 0 ? &window : nullptr;
    require_status(provider.contiguous_create(&config, &cache_), KVX_STATUS_OK,
                   "kvx_contiguous_create");
  }
  ContiguousCache(const ContiguousCache&) = delete;
  ~ContiguousCache() { provider_.contiguous_free(cache_); }

  static std::vector<float> row(Side side, int sequence, int token, int head) {
    const int place = ((sequence * 64 + token) * 8 + head) * 2 + (side == Side::kValue ? 1 : 0);
    return some_row(static_cast<uint64_t>(place), kDim);
  }

  // Tokens first to first + count of every sequence, and the step's end.
  kvx_status_t feed(int first, int count) const {
    Memory memory;
    FloatTensor k(memory, "k", KVX_DTYPE_F32, kBatch * count, kHeads, kDim);
    FloatTensor v(memory, "v", KVX_DTYPE_F32, kBatch * count, kHeads, kDim);
    for (int s = 0; s < kBatch; ++s) {
      for (int t = 0; t < count; ++t) {
        for (int h = 0; h < kHeads; ++h) {
          k.set_row(s * count + t, h, row(Side::kKey, s, first + t, h));
          v.set_row(s * count + t, h, row(Side::kValue, s, first + t, h));
        }
      }
    }
    memory.take_picture();
    const auto number = static_cast<uint32_t>(count);
    const kvx_status_t appended = provider_.contiguous_append(cache_, 0, number, &k.rows, &v.rows);
    require_unchanged_but_expected(memory, "kvx_contiguous_append");
    return appended == KVX_STATUS_OK ? provider_.contiguous_advance(cache_, number) : appended;
  }
  kvx_contiguous_facts_t facts() const {
    kvx_contiguous_facts_t facts{};
    facts.size = sizeof facts;
    require_status(provider_.contiguous_facts(cache_, 0, &facts), KVX_STATUS_OK,
                   "kvx_contiguous_facts");
    return facts;
  }

  // slot: of the sequence's array.
  CodedRow stored(Side side, int sequence, int slot, int head) const {
    kvx_side_t k{}, v{};
    k.size = v.size = sizeof k;
    require_status(provider_.contiguous_layer(cache_, 0, &k, &v), KVX_STATUS_OK,
                   "kvx_contiguous_layer");
    const kvx_side_t& of = side == Side::kKey ? k : v;
    const auto* codes = static_cast<const uint8_t*>(of.codes) + sequence * of.code_block_stride +
                        slot * of.code_token_stride + head * of.code_head_stride;
    CodedRow row;
    row.codes.assign(codes, codes + facts_.code_bytes(kDim));
    if (!facts_.has_scale()) return row;
    const auto* scales = static_cast<const uint8_t*>(of.scales) + sequence * of.scale_block_stride +
                         slot * of.scale_token_stride + head * of.scale_head_stride;
    for (int g = 0; g < facts_.groups_per_row(kDim); ++g) {
      const auto* scale = scales + g * of.scale_group_stride;
      row.scales.insert(row.scales.end(), scale, scale + facts_.scale_bytes());
    }
    return row;
  }
  // Tokens first to first + count are all that the cache has.
  void must_hold(int first, int count) const {
    require(facts().num_held == static_cast<uint32_t>(count), "num_held is {}, expected {}",
            facts().num_held, count);
    Memory memory;
    FloatTensor k(memory, "k", KVX_DTYPE_F32, kBatch * count, kHeads, kDim);
    FloatTensor v(memory, "v", KVX_DTYPE_F32, kBatch * count, kHeads, kDim);
    require_status(provider_.contiguous_gather(cache_, 0, &k.rows, &v.rows), KVX_STATUS_OK,
                   "kvx_contiguous_gather");
    for (const Side side : {Side::kKey, Side::kValue}) {
      const FloatTensor& found = side == Side::kKey ? k : v;
      for (int s = 0; s < kBatch; ++s) {
        for (int t = 0; t < count; ++t) {
          for (int h = 0; h < kHeads; ++h) {
            const CodedRow coded = encode_row(facts_, row(side, s, first + t, h), 1);
            require(found.row(s * count + t, h) == decode_row(facts_, coded, kDim, 1),
                    "{} of sequence {}, token {}, head {} is not token {}'s row",
                    side == Side::kKey ? "k" : "v", s, t, h, first + t);
          }
        }
      }
    }
  }
  void must_attend(int num_tokens, bool sees_all) const {
    Memory memory;
    FloatTensor q(memory, "q", KVX_DTYPE_F32, kBatch * kNumQueries, kQueryHeads, kDim);
    FloatTensor out(memory, "out", KVX_DTYPE_F32, kBatch * kNumQueries, kQueryHeads, kDim);
    for (int i = 0; i < kBatch * kNumQueries; ++i) {
      for (int h = 0; h < kQueryHeads; ++h) {
        q.set_row(i, h, some_row(static_cast<uint64_t>(4096 + i * 8 + h), kDim));
      }
    }
    kvx_contiguous_attend_args_t args{};
    args.size = sizeof args;
    args.num_queries = kNumQueries;
    args.sees_all = sees_all ? 1 : 0;
    args.q = &q.rows;
    args.out = &out.rows;
    require_status(provider_.contiguous_attend(cache_, &args), KVX_STATUS_OK,
                   "kvx_contiguous_attend");
    for (int s = 0; s < kBatch; ++s) {
      for (int i = 0; i < kNumQueries; ++i) {
        const int num_seen = sees_all ? num_tokens : num_tokens - kNumQueries + i + 1;
        for (int h = 0; h < kQueryHeads; ++h) {
          const int at = s * kNumQueries + i;
          check_row(q.row(at, h), out.row(at, h), s, h, num_seen);
        }
      }
    }
  }

 private:
  void check_row(const std::vector<float>& query, const std::vector<float>& found, int sequence,
                 int q_head, int num_seen) const {
    const int head = q_head / (kQueryHeads / kHeads);
    std::vector<double> sum(kDim);
    double total = 0, largest = 1e-3;
    for (int t = 0; t < num_seen; ++t) {
      const auto numbers = [&](Side side) {
        return decode_exactly(facts_, encode_row(facts_, row(side, sequence, t, head), 1), kDim, 1);
      };
      const std::vector<double> key = numbers(Side::kKey), value = numbers(Side::kValue);
      double score = 0;
      for (size_t d = 0; d < kDim; ++d) score += static_cast<double>(query[d]) * key[d];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(kDim)));
      total += weight;
      for (size_t d = 0; d < kDim; ++d) {
        sum[d] += weight * value[d];
        largest = std::max(largest, std::fabs(value[d]));
      }
    }
    for (size_t d = 0; d < kDim; ++d) {
      require(std::fabs(static_cast<double>(found[d]) - sum[d] / total) <= 2e-4 * largest,
              "sequence {}, query head {}, {} tokens seen: dim {} is {}, expected {}", sequence,
              q_head, num_seen, d, found[d], sum[d] / total);
    }
  }

  const Provider& provider_;
  const FormatFacts& facts_;
  kvx_contiguous_t cache_ = nullptr;
};

// In one step and token by token; rows behind the tokens are still zeros.
void stores_rows(const Provider& provider, const FormatFacts& facts) {
  const ContiguousCache cache(provider, facts);
  require_status(cache.feed(0, 4), KVX_STATUS_OK, "kvx_contiguous_append");
  require_status(cache.feed(4, 1), KVX_STATUS_OK, "kvx_contiguous_append");
  const kvx_contiguous_facts_t counts = cache.facts();
  require(counts.seq_len == 5 && counts.capacity == kLength, "seq_len is {} and capacity {}",
          counts.seq_len, counts.capacity);
  for (const Side side : {Side::kKey, Side::kValue}) {
    for (int s = 0; s < kBatch; ++s) {
      for (int t = 0; t < kLength; ++t) {
        for (int h = 0; h < kHeads; ++h) {
          const CodedRow found = cache.stored(side, s, t, h);
          CodedRow expected = encode_row(facts, ContiguousCache::row(side, s, t, h), 1);
          if (t >= 5) {
            std::fill(expected.codes.begin(), expected.codes.end(), uint8_t{0});
            std::fill(expected.scales.begin(), expected.scales.end(), uint8_t{0});
          }
          require(found.codes == expected.codes, "codes of sequence {}, token {}, head {} differ",
                  s, t, h);
          require(found.scales == expected.scales,
                  "scales of sequence {}, token {}, head {} differ", s, t, h);
        }
      }
    }
  }
  cache.must_hold(0, 5);
}

void attends(const Provider& provider, const FormatFacts& facts) {
  const ContiguousCache cache(provider, facts);
  require_status(cache.feed(0, 7), KVX_STATUS_OK, "kvx_contiguous_append");
  for (const bool sees_all : {false, true}) cache.must_attend(7, sees_all);
}

void keeps_a_ring(const Provider& provider) {
  const FormatFacts& facts = facts_of(KVX_FORMAT_F32);
  const ContiguousCache cache(provider, facts, 0, /*window=*/4);
  for (int t = 0; t < kLength; ++t) {
    require_status(cache.feed(t, 1), KVX_STATUS_OK, "kvx_contiguous_append");
  }
  require(cache.facts().capacity == 4, "capacity is {}, expected 4", cache.facts().capacity);
  cache.must_hold(kLength - 4, 4);
}

void refuses_or_evicts(const Provider& provider) {
  const FormatFacts& facts = facts_of(KVX_FORMAT_F32);
  const ContiguousCache refusing(provider, facts);
  const ContiguousCache evicting(provider, facts, KVX_CONTIGUOUS_EVICTS);
  for (const ContiguousCache* cache : {&refusing, &evicting}) {
    require_status(cache->feed(0, 7), KVX_STATUS_OK, "kvx_contiguous_append");
  }
  require_status(refusing.feed(7, 4), KVX_STATUS_OUT_OF_RANGE, "an append past max_seq_len");
  refusing.must_hold(0, 7);
  require_status(evicting.feed(7, 4), KVX_STATUS_OK, "an append past max_seq_len that evicts");
  evicting.must_hold(2, kLength);
}

}  // namespace

std::vector<Check> contiguous_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](Section section, std::string name, kvx_format_t format, auto ask) {
    Features needs;
    needs.add(kFormats, format).add(kIoDtypes, KVX_DTYPE_F32);
    checks.push_back({.section = section,
                      .name = "contiguous cache, " + std::move(name),
                      .needs = needs,
                      .ask = ask,
                      .is_exported = [](const Provider& p) { return p.contiguous_create; }});
  };
  for (const FormatFacts& facts : all_formats()) {
    add(Section::kAppend, facts.name, facts.format,
        [&facts](const Provider& p) { stores_rows(p, facts); });
    add(Section::kAttend, facts.name, facts.format,
        [&facts](const Provider& p) { attends(p, facts); });
  }
  add(Section::kAppend, "a ring", KVX_FORMAT_F32, keeps_a_ring);
  add(Section::kAppend, "past its end", KVX_FORMAT_F32, refuses_or_evicts);
  return checks;
}

}  // namespace kvx::conformance
