// kvx_attend under structured random arguments: layers of every format, tables, lengths, queries,
// windows, softcaps, sinks. A call that succeeds returns attention's definition, in double
// precision, over the rows that kvx_gather returns; a call that fails changes no byte.
#include <cmath>
#include <numeric>

#include "fuzz/verb_layers.hpp"

namespace kvx::fuzz {
namespace {

// Numbers from -1 to 1 that are the same for the same place.
std::vector<float> some_floats(int64_t count, uint32_t seed) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = (static_cast<uint32_t>(i) + seed * 977) * 2654435761u;
    numbers.push_back(static_cast<float>(bits >> 8) / 8388608.0f - 1.0f);
  }
  return numbers;
}

class Case {
 public:
  explicit Case(FuzzedDataProvider& data) : choices_(data) {
    shape_ = {static_cast<uint32_t>(choices_.between(1, 5)),
              static_cast<uint32_t>(choices_.between(1, 4)) * 4,
              static_cast<uint32_t>(choices_.between(1, 3)),
              static_cast<uint32_t>(choices_.between(1, 4)) * 16};
  }

  void run() {
    if (choices_.one_in(4)) {
      FloatLayer layer(choices_, shape_, 1);
      return attend(layer.layer, /*is_affine=*/false);
    }
    const kvx_format_spec_t k_spec = some_format(choices_), v_spec = some_format(choices_);
    auto page = sized<kvx_page_desc_t>();
    page.block_size = shape_.block_size;
    page.k_head_dim = page.v_head_dim = shape_.head_dim;
    page.k_spec = &k_spec;
    page.v_spec = &v_spec;
    Pages pages;
    if (!pages.describe(page, shape_)) return;
    const auto is_affine = [](const kvx_format_spec_t& spec) {
      return spec.format == KVX_FORMAT_INT8_AFFINE || spec.format == KVX_FORMAT_INT4_AFFINE;
    };
    attend(pages.layer, is_affine(k_spec) || is_affine(v_spec));
  }

 private:
  int64_t row_floats() const { return int64_t{shape_.num_heads} * shape_.head_dim; }

  // Every slot of the layer gets a row.
  void append_rows(const kvx_layer_t& layer) {
    const int64_t count = shape_.num_slots();
    const std::vector<float> k = some_floats(count * row_floats(), 1);
    const std::vector<float> v = some_floats(count * row_floats(), 2);
    std::vector<int64_t> slots(static_cast<size_t>(count));
    std::iota(slots.begin(), slots.end(), 0);
    const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
    auto args = sized<kvx_append_args_t>();
    args.layer = &layer;
    args.k = &k_rows;
    args.v = &v_rows;
    args.slot_dtype = KVX_DTYPE_S64;
    args.slots = slots.data();
    args.num_tokens = count;
    expect(kvx_append(&args, nullptr) == KVX_STATUS_OK, "every slot takes a row");
  }

  // The stored rows of all slots, as floats: block b is sequence 0's block b.
  void gather_rows(const kvx_layer_t& layer) {
    k_.resize(static_cast<size_t>(shape_.num_slots() * row_floats()));
    v_.resize(k_.size());
    gather_slots(layer, shape_, k_, v_);
  }

  void attend(const kvx_layer_t& layer, bool is_affine) {
    append_rows(layer);
    gather_rows(layer);
    width_ = choices_.between(1, 6);
    const int64_t most = width_ * shape_.block_size;
    const int64_t sequences = choices_.between(1, 3);
    std::vector<int32_t> lengths;
    starts_ = {0};
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t b = 0; b < width_; ++b) {
        const int64_t id = choices_.rarely_extreme(choices_.between(0, shape_.num_blocks - 1));
        ids_.push_back(static_cast<int32_t>(id));
      }
      const int64_t length = choices_.rarely_extreme(choices_.between(0, most));
      lengths.push_back(static_cast<int32_t>(length));
      const int64_t queries = choices_.between(0, std::clamp<int64_t>(lengths.back(), 0, 5));
      starts_.push_back(starts_.back() + static_cast<int32_t>(queries));
    }
    num_q_heads_ = static_cast<int>(shape_.num_heads * choices_.between(1, 4));
    if (choices_.one_in(16)) ++num_q_heads_;  // mostly no multiple: refused
    const int64_t num_queries = starts_.back();
    const int64_t dim = shape_.head_dim;
    q_ = some_floats(num_queries * num_q_heads_ * dim, 3);
    q_.push_back(0);  // never null
    std::vector<float> out(static_cast<size_t>(num_queries * num_q_heads_ * dim + 1), 99.0f);
    std::vector<float> lse(static_cast<size_t>(num_queries * num_q_heads_ + 1), 99.0f);
    sinks_ = some_floats(num_q_heads_, 4);
    const kvx_block_table_t table = api::packed_table(ids_, static_cast<uint32_t>(width_));
    const kvx_seq_lens_t seq_lens = api::seq_lens(lengths);
    const kvx_rows_t q_rows = api::rows(q_.data(), KVX_DTYPE_F32);
    const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
    args_ = sized<kvx_attend_args_t>();
    args_.layer = &layer;
    args_.block_table = &table;
    args_.seq_lens = &seq_lens;
    args_.q_starts = starts_.data();
    args_.num_q_heads = static_cast<uint32_t>(num_q_heads_);
    args_.q = &q_rows;
    args_.out = &out_rows;
    if (choices_.flip()) args_.lse = lse.data();
    if (choices_.flip()) args_.sinks = sinks_.data();
    if (choices_.flip()) args_.window = static_cast<uint32_t>(choices_.between(0, most + 1));
    if (choices_.one_in(3)) args_.softcap = static_cast<float>(choices_.between(-1, 8));
    if (choices_.one_in(3)) args_.softmax_scale = static_cast<float>(choices_.between(-2, 2)) / 2;
    const std::vector<float> out_before = out, lse_before = lse;
    if (kvx_attend(&args_, nullptr) != KVX_STATUS_OK) {
      expect(out == out_before && lse == lse_before, "a failed attend changes nothing");
      return;
    }
    expect(out.back() == 99.0f && lse.back() == 99.0f, "nothing is written behind the output");
    // gather computes affine numbers in 16 bits, attention in 32.
    const double allowed = is_affine ? 2e-2 : 2e-4;
    for (int64_t s = 0; s < sequences; ++s) {
      for (int32_t i = starts_[s]; i < starts_[s + 1]; ++i) {
        const int64_t position = lengths[s] - (starts_[s + 1] - i);
        for (int h = 0; h < num_q_heads_; ++h) check_row(s, i, position, h, out, lse, allowed);
      }
    }
  }

  void check_row(int64_t sequence, int64_t query, int64_t position, int head,
                 const std::vector<float>& out, const std::vector<float>& lse, double allowed) {
    const int64_t dim = shape_.head_dim;
    const int64_t kv_head = head / (num_q_heads_ / static_cast<int>(shape_.num_heads));
    const double scale = args_.softmax_scale != 0 ? static_cast<double>(args_.softmax_scale)
                                                  : 1 / std::sqrt(static_cast<double>(dim));
    const float* q = &q_[static_cast<size_t>((query * num_q_heads_ + head) * dim)];
    double total = args_.sinks != nullptr
                       ? std::exp(static_cast<double>(sinks_[static_cast<size_t>(head)]))
                       : 0;
    std::vector<double> sum(static_cast<size_t>(dim));
    const int64_t window = args_.window;
    for (int64_t t = window == 0 ? 0 : std::max<int64_t>(0, position - window + 1); t <= position;
         ++t) {
      const int64_t block = ids_[static_cast<size_t>(sequence * width_ + t / shape_.block_size)];
      const int64_t slot = block * shape_.block_size + t % shape_.block_size;
      const auto at = static_cast<size_t>(slot * row_floats() + kv_head * dim);
      double score = 0;
      for (size_t d = 0; d < sum.size(); ++d) score += static_cast<double>(q[d]) * k_[at + d];
      score *= scale;
      const auto cap = static_cast<double>(args_.softcap);
      if (cap > 0) score = cap * std::tanh(score / cap);
      const double weight = std::exp(score);
      total += weight;
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * v_[at + d];
    }
    const auto row = static_cast<size_t>(query * num_q_heads_ + head);
    for (size_t d = 0; d < sum.size(); ++d) {
      const double expected = total > 0 ? sum[d] / total : 0;
      const double found = out[row * sum.size() + d];
      expect(std::fabs(found - expected) <= allowed, "attend is attention's definition");
    }
    if (args_.lse == nullptr) return;
    const double found = lse[row];
    const bool is_right = total > 0 ? std::fabs(found - std::log(total)) <= 10 * allowed
                                    : std::isinf(found) && found < 0;
    expect(is_right, "the LSE is the logarithm of the weights' sum");
  }

  Choices choices_;
  Shape shape_{};
  int64_t width_ = 0;
  int num_q_heads_ = 0;
  std::vector<int32_t> ids_;
  std::vector<int32_t> starts_;
  std::vector<float> k_, v_, q_, sinks_;
  kvx_attend_args_t args_{};
};

}  // namespace
}  // namespace kvx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  kvx::fuzz::Case(data).run();
  return 0;
}
