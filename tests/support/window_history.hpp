// WindowHistory: an engine that runs random steps with a full-precision window, in which the number
// of a token stands for its row. Sequences begin, share prefixes, are cut, skip steps and end.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/checked.hpp"
#include "ops/window/plan_window.hpp"

namespace kvx::tests {

struct WindowHistoryOptions {
  int block_size = 4;
  int64_t sink_tokens = 4;
  int64_t recent_tokens = 6;
  ops::WindowUnit unit = ops::WindowUnit::kRows;
  int64_t num_window_blocks = 64;
  int max_sequences = 5;
  int max_new_tokens = 23;
  unsigned seed = 1;
  // Pages store whole blocks alone, and nobody says that a sequence has ended.
  bool reopens = false;
};

class WindowHistory {
 public:
  static constexpr int64_t kPages = 400, kMaxBlocks = 48;

  explicit WindowHistory(const WindowHistoryOptions& options)
      : options_(options),
        window_(cache::make_full_precision_window(options.sink_tokens, options.recent_tokens,
                                                  options.block_size)
                    .value()),
        rng_(options.seed),
        users_(kPages),
        pages_(static_cast<size_t>(kPages * options.block_size), -1),
        copies_(static_cast<size_t>(options.num_window_blocks * options.block_size), -1),
        state_(
            static_cast<size_t>(ops::WindowState::num_words(kPages, options.num_window_blocks))) {}

  // Decides what the next step does, and fills the arrays that a plan reads and writes.
  void begin_step() {
    forgotten_.clear();
    end_some();
    if (sequences_.size() < static_cast<size_t>(options_.max_sequences) && chance(2)) begin_one();
    make_batch();
  }

  ops::WindowPlanArgs& args() { return args_; }
  std::vector<int32_t>& state() { return state_; }
  // Pages whose copies are to be forgotten before the plan.
  std::vector<int64_t>& forgotten() { return forgotten_; }
  // What a plan writes, as one list to compare: of the same step by another machine.
  std::vector<int64_t> written() const {
    std::vector<int64_t> all;
    const auto add = [&all](const auto& list) { all.insert(all.end(), list.begin(), list.end()); };
    add(ids_), add(sinks_), add(recent_), add(slots_), add(window_slots_);
    add(closing_from_), add(closing_to_), add(closing_tokens_), add(state_);
    add(evicted_from_), add(evicted_to_), add(evicted_tokens_);
    add(reopened_from_), add(reopened_to_), add(reopened_tokens_);
    return all;
  }
  // Every array of the step, for a copy of it elsewhere.
  template <class F>
  void for_each_array(const F& visit) {
    visit(state_), visit(table_), visit(lengths_), visit(starts_), visit(ids_), visit(sinks_);
    visit(recent_), visit(slots_), visit(window_slots_), visit(closing_from_);
    visit(closing_to_), visit(closing_tokens_);
    visit(evicted_from_), visit(evicted_to_), visit(evicted_tokens_);
    visit(reopened_from_), visit(reopened_to_), visit(reopened_tokens_);
  }
  int64_t num_reopened() const { return num_reopened_; }

  // Does what append and copy_blocks would, and checks what attend would read.
  void end_step() {
    copy_blocks(copies_, pages_, evicted_from_, evicted_to_, evicted_tokens_);
    copy_blocks(pages_, copies_, reopened_from_, reopened_to_, reopened_tokens_);
    for (const int32_t tokens : reopened_tokens_) num_reopened_ += tokens > 0 ? 1 : 0;
    if (options_.reopens) check_whole_blocks();
    for (size_t row = 0; row < rows_.size(); ++row) {
      if (slots_[row] >= 0) pages_[slots_[row]] = rows_[row];
      if (window_slots_[row] >= 0) copies_[window_slots_[row]] = rows_[row];
    }
    copy_blocks(copies_, pages_, closing_from_, closing_to_, closing_tokens_);
    for (size_t s = 0; s < batch_.size(); ++s) check(s);
  }

 private:
  struct Sequence {
    std::vector<int32_t> pages;
    std::vector<int64_t> tokens;  // their numbers
    bool is_whole = true;         // each token was planned by this sequence, in every step
  };

  void copy_blocks(const std::vector<int64_t>& source, std::vector<int64_t>& target,
                   const std::vector<int64_t>& from, const std::vector<int64_t>& to,
                   const std::vector<int32_t>& tokens) const {
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::copy_n(source.begin() + from[i] * options_.block_size, tokens[i],
                  target.begin() + to[i] * options_.block_size);
    }
  }

  // A row goes to its page with all others of its block.
  void check_whole_blocks() const {
    for (size_t row = 0; row < slots_.size(); ++row) {
      if (slots_[row] < 0) continue;
      const int64_t offset = slots_[row] % options_.block_size;
      for (int64_t i = 0; i < options_.block_size; ++i) {
        ASSERT_EQ(slots_.at(row - offset + i), slots_[row] - offset + i);
      }
    }
  }

  int below(int64_t n) { return static_cast<int>(rng_() % static_cast<uint64_t>(n)); }
  bool chance(int one_in) { return below(one_in) == 0; }

  int32_t new_page() {
    int32_t page = below(kPages);
    while (users_[page] != 0) page = below(kPages);
    users_[page] = 1;
    return page;
  }
  void release(int32_t page) {
    const bool is_told = options_.unit == ops::WindowUnit::kBlocks && !options_.reopens;
    if (--users_[page] == 0 && is_told) {
      forgotten_.push_back(page);
    }
  }

  void end_some() {
    for (size_t s = sequences_.size(); s-- > 0;) {
      const bool is_full = sequences_[s]->tokens.size() + options_.max_new_tokens >
                           static_cast<size_t>(kMaxBlocks * options_.block_size);
      if (!is_full && !chance(25)) continue;
      for (const int32_t page : sequences_[s]->pages) release(page);
      sequences_.erase(sequences_.begin() + static_cast<int64_t>(s));
    }
  }

  // A sequence that may begin with whole blocks of another one.
  void begin_one() {
    auto sequence = std::make_unique<Sequence>();
    if (!sequences_.empty() && chance(2)) {
      const Sequence& other = *sequences_[below(std::ssize(sequences_))];
      const int64_t blocks = std::ssize(other.tokens) / options_.block_size;
      const int64_t shared = below(blocks + 1);
      for (int64_t b = 0; b < shared; ++b) {
        sequence->pages.push_back(other.pages[b]);
        ++users_[other.pages[b]];
      }
      sequence->tokens.assign(other.tokens.begin(),
                              other.tokens.begin() + shared * options_.block_size);
      sequence->is_whole = shared == 0;
    }
    sequences_.push_back(std::move(sequence));
  }

  // The page of a block that is cut inside is copied where others use it.
  void cut(Sequence& sequence, int64_t length) {
    if (length < std::ssize(sequence.tokens)) sequence.is_whole = false;
    sequence.tokens.resize(static_cast<size_t>(length));
    const auto blocks = ceil_div<int64_t>(length, options_.block_size);
    while (std::ssize(sequence.pages) > blocks) {
      release(sequence.pages.back());
      sequence.pages.pop_back();
    }
    if (length % options_.block_size == 0 || users_[sequence.pages.back()] == 1) return;
    const int32_t from = sequence.pages.back(), to = new_page();
    for (int t = 0; t < options_.block_size; ++t) {
      pages_[to * options_.block_size + t] = pages_[from * options_.block_size + t];
    }
    forgotten_.push_back(to);
    release(from);
    sequence.pages.back() = to;
  }

  void make_batch() {
    batch_.clear();
    rows_.clear();
    starts_ = {0};
    lengths_.clear();
    table_.clear();
    for (const auto& sequence : sequences_) {
      if (chance(6)) {
        sequence->is_whole = false;  // others may take its copies
        continue;
      }
      if (chance(5) && !sequence->tokens.empty()) {
        cut(*sequence, std::ssize(sequence->tokens) -
                           below(std::min<int64_t>(std::ssize(sequence->tokens), 9)));
      }
      const int count = chance(2) ? 1 : chance(8) ? 0 : 1 + below(options_.max_new_tokens);
      for (int i = 0; i < count; ++i) {
        if (std::ssize(sequence->tokens) % options_.block_size == 0) {
          sequence->pages.push_back(new_page());
        }
        sequence->tokens.push_back(next_token_);
        rows_.push_back(next_token_++);
      }
      batch_.push_back(sequence.get());
      starts_.push_back(static_cast<int32_t>(rows_.size()));
      lengths_.push_back(static_cast<int32_t>(sequence->tokens.size()));
      table_.insert(table_.end(), sequence->pages.begin(), sequence->pages.end());
      table_.resize(lengths_.size() * kMaxBlocks, -7);
    }
    rows_.push_back(-2);  // a row of padding
    make_args();
  }

  void make_args() {
    args_.window = window_;
    args_.unit = options_.unit;
    args_.block_size = options_.block_size;
    args_.num_sequences = static_cast<int>(batch_.size());
    args_.max_blocks_per_sequence = kMaxBlocks;
    args_.num_tokens = std::ssize(rows_);
    const auto closing = static_cast<int64_t>(batch_.size()) * args_.closing_blocks_per_sequence();
    ids_.assign(table_.size(), -9);
    sinks_.assign(batch_.size(), -9);
    recent_.assign(batch_.size(), -9);
    slots_.assign(rows_.size(), -9);
    window_slots_.assign(rows_.size(), -9);
    const bool is_of_blocks = options_.unit == ops::WindowUnit::kBlocks;
    closing_from_.assign(is_of_blocks ? closing : 0, -9);
    closing_to_.assign(closing_from_.size(), -9);
    closing_tokens_.assign(closing_from_.size(), -9);
    args_.state = {kPages, options_.num_window_blocks, state_.data()};
    args_.block_table = {table_.data(), kMaxBlocks};
    args_.seq_lens = lengths_.data();
    args_.q_starts = starts_.data();
    args_.ids = ids_.data();
    args_.num_sink_blocks = sinks_.data();
    args_.first_recent_block = recent_.data();
    args_.slots = slots_.data();
    args_.window_slots = window_slots_.data();
    args_.closing_from = closing_from_.data();
    args_.closing_to = closing_to_.data();
    args_.closing_tokens = closing_tokens_.data();
    if (options_.reopens) add_reopening();
  }

  void add_reopening() {
    evicted_from_.assign(closing_from_.size(), -9);
    evicted_to_ = evicted_from_;
    evicted_tokens_.assign(closing_from_.size(), -9);
    reopened_from_.assign(batch_.size(), -9);
    reopened_to_ = reopened_from_;
    reopened_tokens_.assign(batch_.size(), -9);
    args_.evicted_from = evicted_from_.data();
    args_.evicted_to = evicted_to_.data();
    args_.evicted_tokens = evicted_tokens_.data();
    args_.reopened_from = reopened_from_.data();
    args_.reopened_to = reopened_to_.data();
    args_.reopened_tokens = reopened_tokens_.data();
  }

  void check(size_t s) const {
    const Sequence& sequence = *batch_[s];
    const int64_t block_size = options_.block_size;
    const int64_t length = std::ssize(sequence.tokens);
    const auto is_copy = [&](int64_t block) { return block < sinks_[s] || block >= recent_[s]; };
    for (int64_t t = 0; t < length; ++t) {
      const int64_t id = ids_[s * kMaxBlocks + t / block_size];
      const int64_t slot = id * block_size + t % block_size;
      const auto& memory = is_copy(t / block_size) ? copies_ : pages_;
      ASSERT_GE(slot, 0);
      ASSERT_LT(slot, std::ssize(memory));
      ASSERT_EQ(memory[slot], sequence.tokens[t]) << "token " << t << " of " << length << ", sinks "
                                                  << sinks_[s] << ", recent from " << recent_[s];
      const bool is_closed = (t / block_size + 1) * block_size <= length;
      if (options_.unit == ops::WindowUnit::kRows || is_closed) {
        ASSERT_EQ(pages_[sequence.pages[t / block_size] * block_size + t % block_size],
                  sequence.tokens[t])
            << "the page of token " << t;
      }
    }
    const bool is_roomy =
        options_.num_window_blocks >=
        2 * options_.max_sequences * (window_.sink_blocks + window_.recent_blocks);
    if (length == 0 || !is_roomy || !sequence.is_whole) return;
    // The last query's promise.
    EXPECT_GE(sinks_[s] * block_size, std::min(options_.sink_tokens, length));
    EXPECT_LE(recent_[s] * block_size,
              std::max<int64_t>(length - 1 - options_.recent_tokens, 0) + sinks_[s] * block_size);
  }

  const WindowHistoryOptions options_;
  const cache::FullPrecisionWindow window_;
  std::mt19937_64 rng_;
  std::vector<int> users_;  // of each page
  std::vector<int64_t> pages_, copies_;
  std::vector<int32_t> state_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  int64_t next_token_ = 0;
  int64_t num_reopened_ = 0;
  std::vector<int64_t> forgotten_;

  std::vector<Sequence*> batch_;
  std::vector<int64_t> rows_;
  std::vector<int32_t> table_, lengths_, starts_, ids_, sinks_, recent_, closing_tokens_;
  std::vector<int64_t> slots_, window_slots_, closing_from_, closing_to_;
  std::vector<int64_t> evicted_from_, evicted_to_, reopened_from_, reopened_to_;
  std::vector<int32_t> evicted_tokens_, reopened_tokens_;
  ops::WindowPlanArgs args_;
};

}  // namespace kvx::tests
