// The walk of a query tile over the key blocks that its mask leaves, from the last to the first.
#pragma once
#include "features.cuh"
#include "schedule.cuh"

// What a block knows about its queries. It lies in shared memory, as the forward's frame does.
template <class Tile, class Mask> struct QueryFrame {
  static constexpr bool kPerRow = Mask::kPerRow;
  Work work;
  Lengths len;
  Mask mask;
  int first, last;              // key blocks that some row of the tile sees; none: last < first
  int full_first, full_beyond;  // those [full_first, full_beyond) need no mask

  CUFA2_DEVICE QueryFrame(const BwdParams& p, const Work& w)
      : work(w), len(p, w.batch), mask(p, len), first(0), last(-1) {
    const int q_end = min(w.q_begin + Tile::BLOCK_Q, len.q);
    const KvRange range = mask.kv_range(w.q_begin, q_end);
    if (w.q_begin < q_end && range.begin < range.end) {
      first = range.begin / Tile::BLOCK_K;
      last = (range.end - 1) / Tile::BLOCK_K;
    }
    full_first = (range.full_begin + Tile::BLOCK_K - 1) / Tile::BLOCK_K;
    full_beyond = range.full_end / Tile::BLOCK_K;
  }
};
