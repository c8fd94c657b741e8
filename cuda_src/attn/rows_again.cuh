// O of 16 rows summed up anew by one warp, from global memory, such that no key reaches a row that
// does not see it: the exception of a kernel whose products multiply whole tiles, where 0 * NaN
// has leaked. The rows' references and sums are those of the first time.
//
// As in multiply_kept (tile/frag.cuh) the finite part of V is multiplied by P, and what is not
// finite is counted by a second product and added as +Inf, -Inf or NaN. Slow, and rare: it takes
// few columns at a time, and few registers.
#pragma once
#include "../prim/copy.cuh"
#include "../prim/nonfinite.cuh"
#include "scores.cuh"

// Two neighbouring elements at a multiple of 4 bytes; zeros if !valid.
CUFA2_DEVICE u32 two_elements(const void* at, bool valid) {
  return valid ? *static_cast<const u32*>(at) : 0u;
}
CUFA2_DEVICE u32 one_element(const void* at, bool valid) {
  return valid ? *static_cast<const u16*>(at) : 0u;
}

// A (q: rows g and g + 8) or B (k: row g) operand of k16 step kk; rows are 16 bytes aligned.
template <class T>
CUFA2_DEVICE u32 operand_pair(const T* row, int kk, int half, int t, int head_dim, bool valid) {
  const int column = 16 * kk + 8 * half + 2 * t;
  return two_elements(row + column, valid && column < head_dim);
}

// Columns [first_column, first_column + 8 * N_TILES) of the 16 rows of a tile from `first_row` on,
// not yet normalised, over keys [first, beyond).
template <class T, class Frame, class TileMask, class Score, class Softmax, class Output>
CUFA2_DEVICE void sum_again(const FwdParams& p, const Frame& frame, const TileMask& mask,
                            const Score& score, const Softmax& softmax, int first_row, int first,
                            int beyond, int first_column, Output& o) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const i64 batch = frame.batch;
  const int kv_head = frame.head / p.group, len_k = frame.len_k;
  const T* q = static_cast<const T*>(p.q) + batch * p.q_stride.batch;
  const T* k = static_cast<const T*>(p.k) + batch * p.k_stride.batch + kv_head * p.k_stride.head;
  const T* v = static_cast<const T*>(p.v) + batch * p.v_stride.batch + kv_head * p.v_stride.head;
  o.clear();
#pragma unroll 1
  for (int key = first & ~15; key < beyond; key += 16) {
    Accumulator<1, 2> s;
    s.clear();
#pragma unroll 1
    for (int kk = 0; 16 * kk < p.head_dim; ++kk) {
      u32 a[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first_row + g + 8 * (e & 1), i = mask.rows.position(row);
        const T* at = q + mask.rows.head_of(row) * p.q_stride.head + i * p.q_stride.row;
        a[e] = operand_pair(at, kk, e >> 1, t, p.head_dim, i < frame.len_q);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = key + 8 * n + g;
        const T* row = k + j * p.k_stride.row;
        const bool valid = j < len_k;
        mma_m16n8k16<T>(s.at[0][n], a, operand_pair(row, kk, 0, t, p.head_dim, valid),
                        operand_pair(row, kk, 1, t, p.head_dim, valid));
      }
    }
    u32 weights[4], kept[4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.at[0][n][e] = score.score(s.at[0][n][e] * p.q_sign);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* pair = &s.at[0][e >> 1][2 * (e & 1)];
      float weight[2], keep[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = first_row + g + 8 * (e & 1), j = key + 8 * (e >> 1) + 2 * t + c;
        const bool seen = mask.keep(row, j) && j >= first && j < beyond;
        weight[c] = seen ? exp2_approx(fmaf(pair[c], p.scale_log2, -softmax.reference[e & 1])) : 0;
        keep[c] = seen ? 1.0f : 0.0f;
      }
      weights[e] = pack2<T>(weight[0], weight[1]);
      kept[e] = pack2<T>(keep[0], keep[1]);
    }
#pragma unroll
    for (int n = 0; n < Output::N_TILES; ++n) {
      u32 finite[2], code[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = key + 8 * h + 2 * t, column = first_column + 8 * n + g;
        const T* at = v + j * p.v_stride.row + column;
        const bool inside = column < p.head_dim_v;
        finite[h] = one_element(at, inside && j < len_k) |
                    one_element(at + p.v_stride.row, inside && j + 1 < len_k) << 16;
        code[h] = split_nonfinite<T>(finite[h]);
      }
      mma_m16n8k16<T>(o.at[0][n], weights, finite[0], finite[1]);
      float counted[4] = {};
      mma_m16n8k16<T>(counted, kept, code[0], code[1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[0][n][e] += sum_of_codes(counted[e]);
    }
  }
}
