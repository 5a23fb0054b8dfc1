// Speculation: what takes a sequence back to any of its last tokens, bit for bit, where pages share
// scales and append is immediate: a token that makes a page's scale grow has its codes made anew,
// and the page does not contain what they were.
//
//   begin   the open page as it is: one more user of its block, so that the append that follows
//           goes to a copy (Sequence::acquire_copies)
//   rows    K and V as they came, for each step since then
//   cut     the page from the block that was kept, then the rows that stay, run by run
#pragma once

#include <span>
#include <vector>

#include "cache/pool/memory.hpp"
#include "cache/sequence.hpp"
#include "kv/verbs/verbs.hpp"

namespace kvx::kv {

// Rows of one layer as append was given them.
struct LoggedRows {
  FloatRows k;
  FloatRows v;
};

struct SpeculationShape {
  int num_layers = 0;
  int num_kv_heads = 0;
  int k_head_dim = 0;
  int v_head_dim = 0;
  int max_tokens = 0;  // since the page was kept
};

// Of one sequence. Its writer's; open() and release() under the cache's lock.
class Speculation {
 public:
  // The rows' memory, where the verbs read it. Errors as Memory::allocate.
  static Result<Speculation> create(cache::Memory& memory, const SpeculationShape& shape);

  bool is_open() const { return is_open_; }
  // Cuts reach back to it. Requires: is_open().
  int64_t first_token() const { return first_token_; }
  bool has_room(int num_tokens) const { return logged_tokens_ + num_tokens <= shape_.max_tokens; }

  bool has_tokens() const { return !steps_.empty(); }

  // The sequence's tokens are firm from now on, and its open page is kept. retain()'s errors.
  Status open(cache::BlockPool& pool, const cache::SequenceShape& groups,
              const cache::Sequence& sequence);
  // Releases the page.
  void release(cache::BlockPool& pool);

  // A step of so many tokens follows. Requires: has_room().
  void begin_step(int num_tokens);
  // The step's rows in one layer.
  Status log(Verbs& verbs, int layer, FloatRows k, FloatRows v);
  // The last step never was.
  void cancel_step();
  // Only tokens before this one are left. Requires: first_token() <= num_tokens.
  void cut(int64_t num_tokens);

  // A group's block that holds what the page held; kNoBlock where no page was open.
  int32_t kept_page(int group) const { return pages_[group].id; }

  // Tokens [first, first + count) that one step appended.
  struct Run {
    int64_t first = 0;
    int count = 0;
  };
  // The runs of tokens from `first` on, in order.
  std::vector<Run> runs_from(int64_t first) const;
  LoggedRows rows(int layer, const Run& run) const;

 private:
  struct Page {
    int block_class = 0;
    int32_t id = cache::kNoBlock;
  };
  struct RowTypes {
    DType k = DType::kF32;
    DType v = DType::kF32;
  };
  struct Step {
    Run run;
    std::vector<RowTypes> types;  // [layers]
  };

  Speculation(cache::Region rows, const SpeculationShape& shape)
      : rows_(std::move(rows)), shape_(shape) {}
  MutableFloatRows k_place(int layer, int64_t token, DType type) const;
  MutableFloatRows v_place(int layer, int64_t token, DType type) const;
  int64_t end() const { return first_token_ + logged_tokens_; }

  cache::Region rows_;  // [layers][K, V][max_tokens][heads, head_dim], 4 bytes a number at most
  SpeculationShape shape_;
  bool is_open_ = false;
  int64_t first_token_ = 0;
  int logged_tokens_ = 0;
  std::vector<Page> pages_;  // [groups]
  std::vector<Step> steps_;
};

}  // namespace kvx::kv
