// Online softmax over key blocks, in base 2.
//
// Per row the state is a reference r (in units of log2) and l = sum_j 2^(s_j c - r), c being
// scale_log2. The textbook keeps r at the running maximum and rescales O whenever that moves. Here
// r moves only when the maximum has risen by more than kHeadroom: every exponential then stays
// below 2^kHeadroom, which float32 sums and 16-bit P hold as well as values below 1, and O is
// rescaled a few times per row instead of once per block. The result is the same softmax.
#pragma once
#include "../prim/reduce.cuh"
#include "../tile/frag.cuh"

template <int ROWS> struct OnlineSoftmax {
  static constexpr float kHeadroom = 8.0f;
  float reference[ROWS];  // r; -inf until the row has seen a key
  float sum[ROWS];        // this lane's share of l

  CUFA2_DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) { reference[r] = -inf(); sum[r] = 0.0f; }
  }

  // Replaces scores by exp2(s * scale_log2 - r), adds them to the sums and, where r moved,
  // rescales the sums and `o`.
  template <class Scores, class Output>
  CUFA2_DEVICE void step(Scores& s, Output& o, float scale_log2) {
    static_assert(Scores::kRows == ROWS && Output::kRows == ROWS, "one softmax row per lane row");
    float factor[ROWS];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int m = r >> 1, e = (r & 1) * 2;
      float top = s.at[m][0][e];
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n) {
        top = fmaxf(top, fmaxf(s.at[m][n][e], s.at[m][n][e + 1]));
      }
      top = quad_max(top) * scale_log2;
      const bool rises = top > reference[r] + kHeadroom;
      factor[r] = rises ? exp2_approx(reference[r] - top) : 1.0f;
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
      // A row that has seen no key has r = -inf; all its scores are -inf and must become 0.
      const float subtract = reference[r] == -inf() ? 0.0f : reference[r];
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n) {
#pragma unroll
        for (int c = e; c < e + 2; ++c) {
          s.at[m][n][c] = exp2_approx(fmaf(s.at[m][n][c], scale_log2, -subtract));
          sum[r] += s.at[m][n][c];
        }
      }
    }
  }

  // After the last block: completes the sums over the quad and returns, per row, the factor that
  // normalises O and the log-sum-exp. A row without a visible key gives 0 and -inf.
  CUFA2_DEVICE void finish(float (&inverse)[ROWS], float (&lse)[ROWS]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float l = quad_sum(sum[r]);
      const bool empty = l == 0.0f;
      inverse[r] = empty ? 0.0f : 1.0f / l;
      lse[r] = empty ? -inf() : fmaf(reference[r], kLn2, logf(l));
    }
  }
};
