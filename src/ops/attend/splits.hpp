// Splits: how attention on a GPU cuts a long sequence into work tiles that run side by side. The
// host plans for the largest batch that may come; the device cuts what came. Shapes decide, nothing
// else, so results repeat.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.hpp"

namespace kvx::ops {

inline constexpr int kMaxSplits = 256;

// What the host knows before a launch. Costs are in granules.
struct SplitShape {
  int64_t num_work_tiles =
      0;                   // sequences x KV heads x tiles of query rows: work that needs no split
  int64_t max_tokens = 0;  // of a sequence
  int64_t num_slots = 0;   // work tiles that the device runs at once
  int granule = 1;         // tokens that a work tile takes at a time; splits are multiples of it
  double overhead = 2;     // a work tile's beginning and end
  double merge = 0;        // merging a row's splits, however many
  double merge_of_split = 0.03;  // and for each beyond the first
  int most_splits = kMaxSplits;
  int slots_at_a_place = 1;  // that share a multiprocessor; work tiles come to empty ones first
  double crowding = 0;       // by which a granule takes longer where all of those are taken
};

struct SplitPlan {
  int num_splits = 0;  // 0: none
  double cost = 0;     // of all waves, in granules of one work tile
};

// TaskGrid run in waves of num_slots; a work tile costs its tokens and a fixed overhead. The fewest
// splits within half a percent of the cheapest that can_have(num_splits) allows.
template <class CanHave>
SplitPlan plan_splits(const SplitShape& shape, const CanHave& can_have) {
  const int64_t granules =
      std::max<int64_t>((shape.max_tokens + shape.granule - 1) / shape.granule, 1);
  const int64_t num_places = std::max<int64_t>(shape.num_slots / shape.slots_at_a_place, 1);
  SplitPlan best;
  for (int splits = 1; splits <= std::min<int64_t>(granules, shape.most_splits); ++splits) {
    const int64_t work_tiles = shape.num_work_tiles * splits;
    const int64_t waves = (work_tiles + shape.num_slots - 1) / shape.num_slots;
    const int64_t at_a_place =
        std::min<int64_t>((work_tiles + num_places - 1) / num_places, shape.slots_at_a_place);
    const double of_granule = 1 + shape.crowding * static_cast<double>(at_a_place) /
                                      static_cast<double>(shape.slots_at_a_place);
    const int64_t in_a_split = (granules + splits - 1) / splits;
    double cost = static_cast<double>(waves) *
                  (static_cast<double>(in_a_split) * of_granule + shape.overhead);
    if (splits > 1) cost += shape.merge + shape.merge_of_split * (splits - 1);
    const bool is_better = best.num_splits == 0 || cost < best.cost * 0.995;
    if (is_better && can_have(splits)) best = {splits, cost};
  }
  return best;
}
inline SplitPlan plan_splits(const SplitShape& shape) {
  return plan_splits(shape, [](int) { return true; });
}

// A batch of sequences of different lengths shares a budget of work_tiles. Each has one at least,
// and none is longer than needed.
KVX_INLINE int num_work_tiles(int granules, int most_of_work_tile) {
  return granules <= most_of_work_tile ? 1 : (granules + most_of_work_tile - 1) / most_of_work_tile;
}

// The fewest granules that the longest work tile has, so that all sequences have at most `budget`
// work_tiles. sum(value): value(granules) summed over the sequences. Requires: budget >=
// num_sequences.
template <class Sum>
KVX_INLINE int balanced_granules(int num_sequences, int budget, const Sum& sum) {
  const int total = sum([](int granules) { return granules; });
  // Rounding up costs each sequence less than one work_tile.
  const int spare = budget > num_sequences ? budget - num_sequences : 1;
  int low = (total + budget - 1) / budget;
  int high = (total + spare - 1) / spare;
  low = low > 1 ? low : 1;
  // The lowest first: it is the answer where all sequences are equal.
  for (int middle = low; low < high; middle = low + (high - low) / 2) {
    const int work_tiles = sum([middle](int granules) { return num_work_tiles(granules, middle); });
    if (work_tiles <= budget) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

struct TokenRange {
  int begin = 0;
  int end = 0;
};

// Split `split` of tokens [begin, end): all but the last take a multiple of the granule, counted
// from the granule that begin lies in. May be empty.
// Count: int, or what divides as one.
template <class Count>
KVX_INLINE TokenRange split_of(TokenRange tokens, const Count& num_splits, int split, int granule) {
  const int first = tokens.begin / granule * granule;
  const int granules = (tokens.end - first + granule - 1) / granule;
  const int in_a_split = (granules + num_splits - 1) / num_splits;
  const int64_t from = int64_t{first} + int64_t{split} * in_a_split * granule;
  const int64_t to = from + int64_t{in_a_split} * granule;
  const int begin = static_cast<int>(from > tokens.begin ? from : tokens.begin);
  const int end = static_cast<int>(to < tokens.end ? to : tokens.end);
  return {begin, end > begin ? end : begin};
}

}  // namespace kvx::ops
