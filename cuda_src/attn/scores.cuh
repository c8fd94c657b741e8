// What policies do to the scores of a tile's warps. Tile: Scores, an Accumulator; M_TILES;
// warp_row(thread), the first row of a thread's warp.
#pragma once
#include "../prim/barrier.cuh"
#include "../tile/frag.cuh"
#include "features.cuh"

// Scores -> logits of one key block.
template <class Tile, class Score>
CUFA2_DEVICE void apply_score(typename Tile::Scores& s, const Score& score) {
  if constexpr (!Score::kIdentity) {
#pragma unroll
    for (int n = 0; n < Tile::Scores::N_TILES; ++n) {
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) s.at[m][n][e] = score.score(s.at[m][n][e]);
    }
  }
}

// Selects away the scores of keys that a row does not see; `key` is the block's first key.
template <class Tile, class Mask>
CUFA2_DEVICE void apply_mask(typename Tile::Scores& s, const Mask& mask, int q_begin, int key) {
  const int lane = thread_index() % 32, q_row = q_begin + Tile::warp_row(thread_index());
#pragma unroll
  for (int r = 0; r < Tile::Scores::kRows; ++r) {
    // Visible columns of this row, counted from the lane's first column.
    const RowRange range = mask.row_range(q_row + Tile::Scores::row(lane, r));
    const int origin = key + Tile::Scores::column(lane, 0, 0);
    const int begin = range.begin - origin, end = range.end - origin;
#pragma unroll
    for (int n = 0; n < Tile::Scores::N_TILES; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = Tile::Scores::column(0, n, c);
        const bool seen = (!Mask::kLeft || column >= begin) && column < end;
        if (!seen) s.at[r >> 1][n][2 * (r & 1) + c] = -inf();
      }
  }
}
