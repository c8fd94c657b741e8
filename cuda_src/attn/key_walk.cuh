// The walk of a key tile over the query blocks that see it, for every query head of its group.
#pragma once
#include "../prim/barrier.cuh"
#include "features.cuh"
#include "schedule.cuh"

// A query block of one query head of the group.
struct Step { int head, block; };

// What a block knows about its keys. It lies in shared memory, as the forward's frame does.
template <class Tile, class Mask> struct KeyFrame {
  static constexpr bool kPerRow = Mask::kPerRow;
  KeyWork work;
  Lengths len;
  Mask mask;
  int first, count;             // query blocks that see some key of the tile
  int full_first, full_beyond;  // those [full_first, full_beyond) need no mask
  Step steps[8];                // step n of the walk at n % 8, written by one thread

  CUFA2_DEVICE KeyFrame(const BwdParams& p, const KeyWork& w)
      : work(w), len(p, w.batch), mask(p, len), first(0), count(0) {
    const QRange range = mask.q_range(w.k_begin, w.k_begin + Tile::BLOCK_K);
    const int end = min(range.end, len.q);
    if (range.begin < end) {
      first = range.begin / Tile::BLOCK_Q;
      count = (end - 1) / Tile::BLOCK_Q + 1 - first;
    }
    full_first = (range.full_begin + Tile::BLOCK_Q - 1) / Tile::BLOCK_Q;
    // Rows past the last one have P = 0: their block needs no mask for them.
    full_beyond = range.full_end >= len.q ? first + count : range.full_end / Tile::BLOCK_Q;
  }
  CUFA2_DEVICE bool masked(const Step& at) const {
    return at.block < full_first || at.block >= full_beyond;
  }
  CUFA2_DEVICE bool within(const BwdParams& p, const Step& at) const {
    return at.head < (work.head + 1) * p.group;
  }
  CUFA2_DEVICE Step begin(const BwdParams& p) const { return {work.head * p.group, first}; }
  CUFA2_DEVICE Step next(const Step& at) const {
    const bool same = at.block + 1 < first + count;
    return {same ? at.head : at.head + 1, same ? at.block + 1 : first};
  }
};

// Where a walk is: its steps in registers, or one number and the steps in shared memory, which one
// thread writes ahead. The first is faster, the second spares two registers.
template <bool SHARED, class Frame> struct Position {
  Frame& frame;
  Step step;
  u32 flips = 0;
  CUFA2_DEVICE u32 parity() const { return flips; }
  CUFA2_DEVICE Position(const BwdParams& p, Frame& f) : frame(f), step(f.begin(p)) {}
  CUFA2_DEVICE Step at() const { return step; }
  template <int N> CUFA2_DEVICE Step after() const {
    return N == 1 ? frame.next(step) : frame.next(frame.next(step));
  }
  CUFA2_DEVICE void prepare() {}
  CUFA2_DEVICE void advance() {
    step = frame.next(step);
    flips ^= 1;
  }
};

template <class Frame> struct Position<true, Frame> {
  Frame& frame;
  int n = 0;
  CUFA2_DEVICE u32 parity() const { return n & 1; }
  CUFA2_DEVICE Position(const BwdParams& p, Frame& f) : frame(f) {
    if (thread_index() == 0) {
      frame.steps[0] = frame.begin(p);
      for (int i = 1; i < 3; ++i) frame.steps[i] = frame.next(frame.steps[i - 1]);
    }
    block_sync();
  }
  CUFA2_DEVICE Step at() const { return frame.steps[n % 8]; }
  template <int N> CUFA2_DEVICE Step after() const { return frame.steps[(n + N) % 8]; }
  // Writes the step after the next two, which nobody reads before the next barrier.
  CUFA2_DEVICE void prepare() {
    if (thread_index() == 0) frame.steps[(n + 3) % 8] = frame.next(frame.steps[(n + 2) % 8]);
  }
  CUFA2_DEVICE void advance() { ++n; }
};
