// AttendScene: a small batch with everything that attend reads (caches, tables, queries, masks,
// transforms), built from options and filled through append, and its reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>

#include "core/checked.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/copy_blocks/copy_blocks.hpp"
#include "ops/side_rows.hpp"
#include "tests/support/attend_reference.hpp"
#include "tests/support/cpu_levels.hpp"
#include "tests/support/scene_cache.hpp"

namespace kvx::tests {

using device::CpuLevel;

// What attend's default precision promises, relative to the root mean square of the output: formats
// of 8 and 4 bits may meet 16-bit fixed-point queries and probabilities.
inline constexpr double kFloatTolerance = 1e-5;
inline constexpr double kCodeTolerance = 3e-4;

inline double tolerance_of(const std::string& format) {
  const auto& facts = format::facts_of(format::format_named(format).value());
  return facts.element_bits >= 16 ? kFloatTolerance : kCodeTolerance;
}
inline double tolerance_of(const std::vector<RunOptions>& runs) {
  double tolerance = 0;
  for (const RunOptions& run : runs) {
    tolerance = std::max({tolerance, tolerance_of(run.k_format), tolerance_of(run.v_format)});
  }
  return tolerance;
}

class AttendScene {
 public:
  explicit AttendScene(const SceneOptions& options) : options_(options) {
    for (const RunOptions& run : options.runs) num_kv_heads_ += run.num_heads;
    std::mt19937 rng(7);
    make_batch(rng);
    make_tables();
    make_transforms(rng);
    make_args();
    fill();
  }
  AttendScene(const AttendScene&) = delete;

  ops::AttendArgs& args() { return args_; }
  const SceneOptions& options() const { return options_; }
  SceneCache& packed() { return *packed_; }
  SceneCache* full_precision() {
    return full_precision_.get();
  }  // null without full-precision window
  std::vector<int32_t>& table() { return table_; }
  std::vector<float>& queries() { return q_; }
  // Numbers that were appended: [token of the batch, num_kv_heads, dim].
  std::vector<float>& keys() { return k_; }
  std::vector<float>& values() { return v_; }

  const std::vector<uint8_t>& out_bytes() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }
  int num_q_heads() const { return num_kv_heads_ * options_.q_per_kv; }

  // Appends all tokens, again after a change of the inputs.
  void fill() {
    append_to(packed_->view(), false);
    if (full_precision_) append_to(full_precision_->view(), true);
  }

  Status attend(CpuLevel level, Executor& executor = serial_executor()) {
    return ops::attend({&ops::cpu::kernel_table(level), &executor}, args_);
  }

  // The output as it was stored, widened to double.
  AttendOutput run(CpuLevel level, Executor& executor = serial_executor()) {
    std::fill(out_.begin(), out_.end(), uint8_t{0xFF});
    std::fill(lse_.begin(), lse_.end(), std::nanf(""));
    const Status status = attend(level, executor);
    EXPECT_TRUE(status.ok()) << status.error().message;
    if (out_.empty()) return {};
    std::vector<float> out(out_.size() / bytes_of(options_.out_type));
    ops::cpu::kernel_table(level).load_floats(options_.out_type, out_.data(),
                                              static_cast<int>(out.size()), out.data());
    return {{out.begin(), out.end()}, {lse_.begin(), lse_.end()}};
  }

  AttendOutput reference() const {
    // Each query asks for each row again, and a rotation is undone in as many steps as its matrix
    // has numbers.
    std::map<std::array<int, 4>, Row> rows;
    const auto row_of = [&](bool is_key, int s, int t, int h) {
      if (!options_.k_hadamard && !options_.v_hadamard) return stored_row(is_key, s, t, h);
      Row& row = rows[{is_key, s, t, h}];
      if (row.empty()) row = stored_row(is_key, s, t, h);
      return row;
    };
    return attend_reference(
        args_, q_, options_.key_dim, options_.value_dim,
        [&](int s, int t, int h) { return row_of(true, s, t, h); },
        [&](int s, int t, int h) { return row_of(false, s, t, h); });
  }

  // What the cache holds for a token, transforms undone.
  Row stored_row(bool is_key, int sequence, int token, int kv_head) const {
    const int64_t block = token / options_.block_size;
    const ops::LayerView& view =
        is_full_precision(sequence, block) ? args_.full_precision : args_.packed;
    const ops::HeadRun& run = ops::run_of_head(view, kv_head);
    const Row row = decoded_row(is_key ? run.k : run.v, kv_head - run.first_head,
                                args_.block_table.at(sequence, block), token % options_.block_size);
    Row whole = untransformed(row, is_key ? args_.transform.k : args_.transform.v, kv_head,
                              num_kv_heads_, block);
    if (is_key && view.next_segment != nullptr) {
      const ops::HeadRun& segment = ops::run_of_head(*view.next_segment, kv_head);
      const Row rest =
          decoded_row(segment.k, kv_head - segment.first_head,
                      args_.block_table.at(sequence, block), token % options_.block_size);
      whole.insert(whole.end(), rest.begin(), rest.end());
    }
    return whole;
  }

 private:
  bool is_full_precision(int sequence, int64_t block) const {
    return full_precision_ &&
           (block < num_sink_blocks_[sequence] || block >= first_recent_block_[sequence]);
  }

  // Some channels of keys lie far from zero, as real ones do.
  void make_batch(std::mt19937& rng) {
    std::normal_distribution<float> normal;
    q_starts_ = {0};
    for (size_t s = 0; s < options_.seq_lens.size(); ++s) {
      seq_lens_.push_back(options_.seq_lens[s]);
      total_tokens_ += options_.seq_lens[s];
      q_starts_.push_back(q_starts_.back() + options_.q_lens[s]);
      max_blocks_ = std::max(max_blocks_, ceil_div(options_.seq_lens[s], options_.block_size));
    }
    const int64_t total_q = q_starts_.back();
    q_.resize(total_q * num_q_heads() * options_.key_dim);
    for (float& x : q_) x = normal(rng);
    q_bytes_.resize(q_.size() * bytes_of(options_.q_type) + 1);
    const auto& kernels = ops::cpu::kernel_table(CpuLevel::kScalar);
    const int n = static_cast<int>(q_.size());
    if (n > 0) {
      kernels.store_floats(options_.q_type, q_.data(), n, q_bytes_.data());
      kernels.load_floats(options_.q_type, q_bytes_.data(), n, q_.data());
    }
    out_.resize(total_q * num_q_heads() * options_.value_dim * bytes_of(options_.out_type));
    lse_.resize(total_q * num_q_heads());
    k_.resize(int64_t{total_tokens_} * num_kv_heads_ * options_.key_dim);
    v_.resize(int64_t{total_tokens_} * num_kv_heads_ * options_.value_dim);
    for (size_t i = 0; i < k_.size(); ++i) {
      k_[i] = normal(rng) + (i % 16 == 3 ? 3.0f : 0.0f);
    }
    for (float& x : v_) x = normal(rng);
    sinks_.resize(num_q_heads());
    for (float& x : sinks_) x = normal(rng);
  }

  // Every sequence gets blocks of its own, in random order.
  void make_tables() {
    const int num_sequences = static_cast<int>(seq_lens_.size());
    const int num_blocks = num_sequences * max_blocks_ + 3;
    std::vector<int32_t> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(options_.table_seed));
    table_.assign(ids.begin(), ids.begin() + num_sequences * max_blocks_);
    packed_ = std::make_unique<SceneCache>(options_, options_.runs, num_blocks);
    if (options_.full_precision_format.empty()) return;
    const RunOptions full_precision = {num_kv_heads_, options_.full_precision_format,
                                       options_.full_precision_format};
    full_precision_ =
        std::make_unique<SceneCache>(options_, std::vector<RunOptions>{full_precision}, num_blocks);
    for (int seq_len : seq_lens_) {
      const int blocks = ceil_div(seq_len, options_.block_size);
      num_sink_blocks_.push_back(std::min(options_.num_sink_blocks, blocks));
      first_recent_block_.push_back(std::max(blocks - options_.first_recent_block, 0));
    }
  }

  static const float* table_if(bool wanted, std::vector<float>& table, int64_t size, float low,
                               float high, std::mt19937& rng) {
    if (!wanted) return nullptr;
    std::uniform_real_distribution<float> uniform(low, high);
    table.resize(size);
    for (float& x : table) x = uniform(rng);
    return table.data();
  }

  void make_transforms(std::mt19937& rng) {
    const SceneOptions& o = options_;
    const int64_t keys = int64_t{num_kv_heads_} * o.key_dim;
    const int64_t values = int64_t{num_kv_heads_} * o.value_dim;
    ops::SideTransform& k = args_.transform.k;
    ops::SideTransform& v = args_.transform.v;
    k.mean = table_if(o.k_mean, k_mean_, keys, -2, 2, rng);
    k.factor = table_if(o.k_factor, k_factor_, keys, 0.5f, 2, rng);
    k.block_offset = table_if(o.k_offset, k_offset_, keys * max_blocks_, -1, 1, rng);
    k.num_offset_blocks = o.k_offset ? max_blocks_ : 0;
    k.hadamard = o.k_hadamard;
    v.mean = table_if(o.v_mean, v_mean_, values, -2, 2, rng);
    v.factor = table_if(o.v_factor, v_factor_, values, 0.5f, 2, rng);
    v.hadamard = o.v_hadamard;
  }

  void make_args() {
    const SceneOptions& o = options_;
    args_.packed = packed_->view();
    if (full_precision_) {
      args_.full_precision = full_precision_->view();
      args_.num_sink_blocks = num_sink_blocks_.data();
      args_.first_recent_block = first_recent_block_.data();
    }
    args_.num_sequences = static_cast<int>(seq_lens_.size());
    args_.block_table = {table_.data(), max_blocks_};
    args_.max_blocks_per_sequence = max_blocks_;
    args_.seq_lens = seq_lens_.data();
    args_.q_starts = q_starts_.data();
    args_.num_q_heads = num_q_heads();
    const void* q = q_bytes_.data();
    void* out = out_.data();
    args_.q = dense_rows(q, o.q_type, num_q_heads(), o.key_dim);
    args_.out = dense_rows(out, o.out_type, num_q_heads(), o.value_dim);
    args_.lse = lse_.data();
    args_.softmax_scale = o.softmax_scale;
    args_.softcap = o.softcap;
    args_.window = o.window;
    args_.window_sinks = o.window_sinks;
    args_.sinks = o.sinks ? sinks_.data() : nullptr;
  }

  // The tokens whose blocks are of this kind; others are skipped by a negative slot.
  void append_to(const ops::LayerView& view, bool full_precision) {
    if (ops::dual_format_of(view) != nullptr) return quantise_blocks(view);
    std::vector<int64_t> slots, positions;
    for (size_t s = 0; s < seq_lens_.size(); ++s) {
      for (int t = 0; t < seq_lens_[s]; ++t) {
        const int block = t / options_.block_size;
        const int64_t id = table_[s * max_blocks_ + block];
        const bool belongs = is_full_precision(static_cast<int>(s), block) == full_precision;
        slots.push_back(belongs ? id * options_.block_size + t % options_.block_size : -1);
        positions.push_back(t);
      }
    }
    if (slots.empty()) return;
    ops::AppendArgs append;
    append.cache = view;
    append.transform = args_.transform;
    const void* k = k_.data();
    const void* v = v_.data();
    append.k = dense_rows(k, DType::kF32, num_kv_heads_, options_.key_dim);
    append.v = dense_rows(v, DType::kF32, num_kv_heads_, options_.value_dim);
    append.slot_mapping = slots;
    append.positions = positions;
    const auto report = ops::append(serial_context(CpuLevel::kScalar), append);
    ASSERT_TRUE(report.ok()) << report.error().message;
  }

  // Dual-scale formats: blocks are quantised whole, from rows of 32 bits.
  void quantise_blocks(const ops::LayerView& packed) {
    SceneOptions options = options_;
    options.order = RowOrder::kNhd;
    const std::vector<RunOptions> runs = {{num_kv_heads_, "f32", "f32"}};
    SceneCache rows(options, runs, static_cast<int>(packed.num_blocks));
    append_to(rows.view(), false);
    std::vector<ops::BlockCopy> copies;
    for (size_t s = 0; s < seq_lens_.size(); ++s) {
      for (int first = 0; first < seq_lens_[s]; first += options_.block_size) {
        const int block = first / options_.block_size;
        if (is_full_precision(static_cast<int>(s), block)) continue;
        const int64_t id = table_[s * max_blocks_ + block];
        copies.push_back({id, id, std::min(options_.block_size, seq_lens_[s] - first)});
      }
    }
    const auto done =
        ops::copy_blocks(serial_context(CpuLevel::kScalar), rows.view(), packed, copies);
    ASSERT_TRUE(done.ok()) << done.error().message;
  }

  SceneOptions options_;
  int num_kv_heads_ = 0;
  int total_tokens_ = 0;
  int max_blocks_ = 1;
  std::unique_ptr<SceneCache> packed_, full_precision_;
  std::vector<int32_t> table_, q_starts_, num_sink_blocks_, first_recent_block_, seq_lens_;
  std::vector<float> q_, k_, v_, sinks_, lse_;
  std::vector<uint8_t> q_bytes_, out_;
  std::vector<float> k_mean_, k_factor_, k_offset_, v_mean_, v_factor_;
  ops::AttendArgs args_;
};

}  // namespace kvx::tests
