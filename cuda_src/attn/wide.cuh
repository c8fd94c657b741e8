// Scores and softmax of float32 and float64, at the accuracy of the type: what features.cuh and
// softmax.cuh do for 16-bit types.
#pragma once
#include "../tile/wide.cuh"
#include "features.cuh"

// What the score policies compute, at the accuracy of float32 and float64: logits that the softmax
// multiplies by scale_log2. PlainScore is the identity.
template <class Score, class T> struct WideScore {
  static_assert(Score::kIdentity, "every other score needs its own form here");
  template <class Params> CUFA2_DEVICE explicit WideScore(const Params&) {}
  CUFA2_DEVICE T score(T s) const { return s; }
  CUFA2_DEVICE T grad(T) const { return T(1); }
};

template <class T> struct WideScore<SoftcapScore, T> {
  T tanh_scale;
  template <class Params>
  CUFA2_DEVICE explicit WideScore(const Params& p)
      : tanh_scale(is_same<T, float> ? p.tanh_scale : p.exact_tanh_scale) {}
  CUFA2_DEVICE T score(T s) const { return tanh(s * tanh_scale); }
  CUFA2_DEVICE T grad(T tanh) const { return fma(-tanh, tanh, T(1)); }
};

// Scores -> logits of one key block.
template <class Tile, class Score, class Wide>
CUFA2_DEVICE void apply_score(typename Tile::Scores& s, const Wide& score) {
  if constexpr (!Score::kIdentity) {
#pragma unroll
    for (int n = 0; n < Tile::Scores::N_TILES; ++n)
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) s.at[m][n][e] = score.score(s.at[m][n][e]);
  }
}

// Selects away the scores of keys that a row does not see; `q_row` is the warp's first row, `key`
// the block's first key.
template <class Tile, class Mask>
CUFA2_DEVICE void apply_mask(typename Tile::Scores& s, const Mask& mask, int q_row, int key) {
  const int lane = thread_index() % 32;
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
        if (column < begin || column >= end) s.at[r >> 1][n][2 * (r & 1) + c] = -inf();
      }
  }
}

// Online softmax over key blocks in base 2: attn/softmax.cuh for either type. float64 has room for
// a larger headroom, and moves its reference almost never.
template <class T, int ROWS> struct WideSoftmax {
  static constexpr T kHeadroom = is_same<T, float> ? 8 : 64;
  T reference[ROWS];  // -inf until the row has seen a key
  T sum[ROWS];        // this lane's share of the sum

  CUFA2_DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) { reference[r] = -inf(); sum[r] = T(0); }
  }

  // Replaces scores by exp2(s * scale_log2 - reference), adds them to the sums and, where the
  // reference moved, rescales the sums and `o`.
  template <class Scores, class Output>
  CUFA2_DEVICE void step(Scores& s, Output& o, T scale_log2) {
    static_assert(Scores::kRows == ROWS && Output::kRows == ROWS, "one softmax row per lane row");
    T factor[ROWS];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int m = r >> 1, e = (r & 1) * 2;
      T top = -inf();
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n) {
        top = larger(top, larger(s.at[m][n][e], s.at[m][n][e + 1]));
      }
      top = larger(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = larger(top, __shfl_xor_sync(kFullWarp, top, 2)) * scale_log2;
      const bool rises = top > reference[r] + kHeadroom;
      factor[r] = rises ? power_of_2(reference[r] - top) : T(1);
      reference[r] = rises ? top : reference[r];
      moved = moved || rises;
    }
    if (warp_any(moved)) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int m = r >> 1, e = (r & 1) * 2;
        sum[r] *= factor[r];
#pragma unroll
        for (int n = 0; n < Output::N_TILES; ++n) {
          o.at[m][n][e] *= factor[r];
          o.at[m][n][e + 1] *= factor[r];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int m = r >> 1, e = (r & 1) * 2;
      // A row that has seen no key has reference -inf; all its scores are -inf and must become 0.
      const T subtract = reference[r] == T(-inf()) ? T(0) : reference[r];
      T block = T(0);  // a sum of its own: the long one then rounds once per block
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n)
#pragma unroll
        for (int c = e; c < e + 2; ++c) {
          s.at[m][n][c] = power_of_2(fma(s.at[m][n][c], scale_log2, -subtract));
          block += s.at[m][n][c];
        }
      sum[r] += block;
    }
  }

  // After the last block: per row, the factor that normalises O and the log-sum-exp. A row without
  // a visible key gives 0 and -inf.
  CUFA2_DEVICE void finish(T (&inverse)[ROWS], T (&lse)[ROWS]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      T l = sum[r] + __shfl_xor_sync(kFullWarp, sum[r], 1);
      l += __shfl_xor_sync(kFullWarp, l, 2);
      const bool empty = l == T(0);
      inverse[r] = empty ? T(0) : T(1) / l;
      lse[r] = empty ? T(-inf()) : fma(reference[r], T(0.69314718055994531), log(l));
    }
  }
};
