// Online softmax beside products that run in the background (see attn/softmax.cuh for the state).
//
// A softmax needs a reference exponent for each row, not the maximum of the row: any reference
// gives the same accuracy as long as nothing overflows. So most blocks take no maxima at all. They
// use the reference that the rows have, and the sums, needed anyway, tell whether that was in
// range: no exponential is larger than the sum that it is part of. If a sum is not, that warp
// takes the scores of its rows anew, with maxima, and keeps to maxima for the rest of the tile.
//
// The product that still uses `o` and `p` must have ended before they are touched: `wait` sees to
// that. It stands amid the exponentials, where the tensor cores are about done; before them it
// would idle, and behind them nothing would be left to do beside what follows.
#pragma once
#include "../prim/reduce.cuh"
#include "../prim/wgmma.cuh"
#include "../tile/frag.cuh"

template <class T, class Scores, class Output, int LATE> struct LazySoftmax {
  static constexpr int kElements = 4 * Scores::N_TILES, kSteps = Scores::N_TILES / 2;
  static constexpr float kHeadroom = 8.0f;
  // The reference of a row that has seen no key. Finite, as -inf less it is -inf still, not NaN:
  // the only scores that make a NaN are NaN, and no redo would mend them.
  static constexpr float kNone = -3.4028235e38f;
  // P in bf16 has the range of float32; in fp16 an exponential must stay below 65504.
  static constexpr float kLargest = is_same<T, fp16_t> ? 0x1p15f : 0x1p64f;
  using Weights = u32[kSteps][4];

  float reference[2];  // in units of log2; kNone until the row has seen a key
  float sum[2];        // this lane's share
  bool maxima;         // whether the warp takes maxima in every block

  CUFA2_DEVICE void reset() {
    reference[0] = reference[1] = kNone;
    sum[0] = sum[1] = 0.0f;
    maxima = false;
  }

  // Scores -> P, with maxima. Masked scores are -inf.
  template <class Wait>
  CUFA2_DEVICE void exact(Scores& s, Weights& p, Output& o, float scale_log2, u32 never,
                          const Wait& wait) {
    float factor[2];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s.at[0][0][2 * r];
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n) {
        top = fmaxf(top, fmaxf(s.at[0][n][2 * r], s.at[0][n][2 * r + 1]));
      }
      top = quad_max(top) * scale_log2;
      const bool rises = top > reference[r] + kHeadroom;
      factor[r] = rises ? exp2_approx(reference[r] - top) : 1.0f;
      reference[r] = rises ? top : reference[r];
      moved = moved || rises;
    }
    float added[2];
    exponentials<true>(s, added, scale_log2, never, wait);
    if (warp_any(moved)) {
#pragma unroll
      for (int n = 0; n < Output::N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o.at[0][n][e] *= factor[e >> 1];
      pin(o.at[0]);  // or the factors leave the branch and are always multiplied
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], factor[r], added[r]);
    pack(s, p);
  }

  // Scores of a block of which no key is masked -> P, without maxima. `again` restores the scores.
  template <class Wait, class Again>
  CUFA2_DEVICE void quick(Scores& s, Weights& p, Output& o, float scale_log2, u32 never,
                          const Wait& wait, const Again& again) {
    if (maxima) {
      exact(s, p, o, scale_log2, never, wait);
      return;
    }
    float added[2];
    exponentials<false>(s, added, scale_log2, never, wait);
    // NaN is in range: its row is NaN, and others keep every bit.
    if (warp_any(added[0] > kLargest || added[1] > kLargest)) {
      again(s);
      maxima = true;
      exact(s, p, o, scale_log2, never, [] {});
      return;
    }
    sum[0] += added[0], sum[1] += added[1];
    pack(s, p);
  }

  // As OnlineSoftmax::finish.
  CUFA2_DEVICE void finish(float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = quad_sum(sum[r]);
      const bool empty = l == 0.0f;
      inverse[r] = empty ? 0.0f : 1.0f / l;
      lse[r] = empty ? -inf() : fmaf(reference[r], kLn2, logf(l));
    }
  }

 private:
  // EMPTY: a row may have seen no key, and its scores, all -inf, become 0. Otherwise the first
  // score above -inf makes such a row infinite, out of range.
  template <bool EMPTY, class Wait>
  CUFA2_DEVICE void exponentials(Scores& s, float (&added)[2], float scale_log2, u32 never,
                                 const Wait& wait) const {
    float part[2][2] = {}, subtract[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      subtract[r] = EMPTY && reference[r] == kNone ? 0.0f : reference[r];
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int r = (i >> 1) & 1;
      float& x = s.at[0][i >> 2][i & 3];
      x = exp2_approx(fmaf(x, scale_log2, -subtract[r]));
      part[r][i & 1] += x;
      if (i + 1 == LATE) {
        not_before(part[r][i & 1], never);
        wait();
      }
    }
    if constexpr (LATE == 0) wait();
#pragma unroll
    for (int r = 0; r < 2; ++r) added[r] = part[r][0] + part[r][1];
  }

  static CUFA2_DEVICE void pack(const Scores& s, Weights& p) {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* pair = &s.at[0][2 * kk + (e >> 1)][2 * (e & 1)];
        p[kk][e] = pack2<T>(pair[0], pair[1]);
      }
  }
};
