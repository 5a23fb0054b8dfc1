// The prefill kernel's filling warpgroups: rings of K's and V's tiles, each at its own pace.
#pragma once

#include "ops/attend/cuda/prefill/decode.cuh"

namespace kvx::ops::cuda {

// Rows of 16 bits.
template <class Shape>
__device__ inline void produce_copies(const PrefillSideWalk<Shape>& side) {
  using Copier = TileCopier<Shape>;
  GroupFinder<Shape> finder(side);
  const uint8_t* own = nullptr;
#pragma unroll 1
  for (int tile = 0; tile < side.walk.num_tiles; ++tile) {
    if (finder.next()) own = Copier::own_rows(side, finder);
    side.ring.wait_free(side.side, tile);
    Copier::copy(side, finder, own, side.ring.tile(side.side, tile));
    commit_copies();
    finder.store_facts(tile);
    wait_for_copies<0>();
    side.ring.fill(side.side, tile);
  }
}

template <class Shape>
class PackedProducer {
 public:
  __device__ explicit PackedProducer(const PrefillSideWalk<Shape>& side)
      : side_(side), ring_(side.ring), finder_(side) {}

  __device__ void run() {
    if constexpr (Shape::kAcceptsFullPrecision) {
      visit([&]<class Element, class Scales>(Element, Scales) { start_ahead<Element, Scales>(); });
      fill_around_full_precision();
    } else {
      visit([&]<class Element, class Scales>(Element, Scales) {
        start_ahead<Element, Scales>();
        fill_tiles<Element, Scales>(0, side_.walk.num_tiles);
      });
    }
  }

 private:
  static constexpr int kUnits = Shape::kTokens / Shape::kUnitTokens;  // of a tile
  static constexpr int kSlots = Shape::kRawUnits;
  static constexpr int kAhead = kSlots - 1;

  template <class Visitor>
  __device__ void visit(const Visitor& visitor) const {
    visit_packed<Shape>(side_.facts(), visitor);
  }

  template <class Element, class Scales>
  __device__ void start_ahead() {
    const PackedUnits<Shape> units(side_, finder_);
    for (int u = 0; u < kAhead; ++u) start<Element, Scales>(units, 0, u, u);
  }
  // FullPrecision tokens are filled in outside of the loop over packed rows, which has no registers
  // to spare: it goes from one tile that has some to the next. Outside of the choice of a format
  // too, so that their code is there once.
  __device__ void fill_around_full_precision() {
    int tile = 0;
#pragma unroll 1
    while (tile < side_.walk.num_tiles) {
      const int first = tile;
      tile = side_.next_full_precision_tile(tile);
      visit([&]<class Element, class Scales>(Element, Scales) {
        fill_tiles<Element, Scales>(first, tile + 1);
      });
      fill_full_precision_tokens(side_, tile);
      ring_.fill(side_.side, tile);
      ++tile;
    }
  }
  // Packed rows of tiles [tile, end). Where tokens may be full-precision, the last tile is left
  // open.
  template <class Element, class Scales>
  __device__ void fill_tiles(int tile, int end) {
    const PackedUnits<Shape> units(side_, finder_);
#pragma unroll 1
    for (; tile < end; ++tile) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        wait_for_copies<kAhead - 1>();
        // Where the unit before this was.
        const int free_slot = slot_ == 0 ? kSlots - 1 : slot_ - 1;
        start<Element, Scales>(units, tile, unit + kAhead, free_slot);
        if (unit == 0) {
          ring_.wait_free(side_.side, tile);
          finder_.store_facts(tile);
        }
        units.template decode<Element, Scales>(units.raw_unit(slot_), tile, unit);
        slot_ = slot_ == kSlots - 1 ? 0 : slot_ + 1;
      }
      const bool is_open = Shape::kAcceptsFullPrecision && tile + 1 == end;
      if (!is_open) ring_.fill(side_.side, tile);
    }
  }

  // unit: from the tile's first on, also the next tiles'. A group of copies for every unit, also
  // behind the last.
  template <class Element, class Scales>
  __device__ void start(const PackedUnits<Shape>& units, int tile, int unit, int slot) {
    tile += unit / kUnits;
    unit %= kUnits;
    if (tile < side_.walk.num_tiles) {
      if (unit == 0 && finder_.next()) {
        own_rows_ = units.own_rows();
        finder_.place(own_rows_.codes);
      }
      units.template copy<Element, Scales>(unit, units.raw_unit(slot), own_rows_);
    }
    commit_copies();
  }

  const PrefillSideWalk<Shape>& side_;
  const PrefillRing<Shape>& ring_;
  GroupFinder<Shape> finder_;
  GroupRows own_rows_ = {};
  int slot_ = 0;  // of the unit that is decoded next
};

}  // namespace kvx::ops::cuda
