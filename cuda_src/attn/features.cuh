// Mask and score policies: everything that may be composed into a kernel, none of it in a kernel.
//
// A mask answers three questions. `kv_range(q_begin, q_end)` gives the keys that any of the rows
// [q_begin, q_end) sees and the keys that all of them see: blocks outside the first are skipped,
// blocks inside the second are never masked. `row_range(i)` gives the keys that row i sees, and
// `keep(i, j)` whether key j is one. `q_range` and `column_range` are the same seen from the keys.
// A score edits a logit before the mask; `grad` is its derivative, given the edited logit.
#pragma once
#include "../prim/reduce.cuh"
#include "params.cuh"

// Lengths of one batch entry. Lengths that live on the device are clamped to the array, so that a
// wrong one can never lead outside it.
struct Lengths {
  int q, k, shift;
  CUFA2_DEVICE Lengths(int q, int k, int top_left) : q(q), k(k), shift(top_left ? 0 : k - q) {}
  template <class Params>
  CUFA2_DEVICE Lengths(const Params& p, i64 batch) : q(p.seqlen_q), k(p.seqlen_k) {
    if (p.seqlens_q) q = min(max(p.seqlens_q[batch * p.seqlens_q_stride], 0), q);
    if (p.seqlens_k) k = min(max(p.seqlens_k[batch * p.seqlens_k_stride], 0), k);
    shift = p.top_left ? 0 : k - q;
  }
};

// Keys [begin, end) are seen by some row of a tile, keys [full_begin, full_end) by every row.
struct KvRange { int begin, end, full_begin, full_end; };

// Rows [begin, end) see some key of a tile, rows [full_begin, full_end) every key.
using QRange = KvRange;

// Keys [begin, end) that one row sees.
struct RowRange { int begin, end; };

// Rows [begin, end) that see one key; they may lie before the first or past the last.
using ColumnRange = RowRange;

// Only the length of the sequence limits what a row sees.
struct FullMask {
  static constexpr bool kPerRow = false, kLeft = false;
  int seqlen_q, seqlen_k;
  template <class Params>
  CUFA2_DEVICE FullMask(const Params&, const Lengths& len) : seqlen_q(len.q), seqlen_k(len.k) {}
  CUFA2_DEVICE KvRange kv_range(int, int) const { return {0, seqlen_k, 0, seqlen_k}; }
  CUFA2_DEVICE RowRange row_range(int) const { return {0, seqlen_k}; }
  CUFA2_DEVICE bool keep(int, int j) const { return j < seqlen_k; }
  CUFA2_DEVICE QRange q_range(int k_begin, int k_end) const {
    return {0, k_begin < seqlen_k ? seqlen_q : 0, 0, k_end <= seqlen_k ? seqlen_q : 0};
  }
  CUFA2_DEVICE ColumnRange column_range(int j) const {
    return {0, j < seqlen_k ? seqlen_q : 0};
  }
};

// i + shift - left <= j <= i + shift + right, both ends inclusive; causal is right = 0.
template <bool LEFT, bool RIGHT> struct WindowMask {
  static_assert(LEFT || RIGHT, "a window without bounds is FullMask");
  static constexpr bool kPerRow = true, kLeft = LEFT;
  int seqlen_q, seqlen_k, first, last;  // row i sees keys i + first .. i + last
  template <class Params>
  CUFA2_DEVICE WindowMask(const Params& p, const Lengths& len)
      : seqlen_q(len.q), seqlen_k(len.k), first(len.shift - p.window_left),
        last(len.shift + p.window_right) {}
  CUFA2_DEVICE RowRange row_range(int i) const {
    return {LEFT ? max(i + first, 0) : 0, RIGHT ? min(i + last + 1, seqlen_k) : seqlen_k};
  }
  CUFA2_DEVICE KvRange kv_range(int q_begin, int q_end) const {
    const RowRange top = row_range(q_begin), bottom = row_range(q_end - 1);
    return {top.begin, bottom.end, bottom.begin, max(top.end, 0)};
  }
  CUFA2_DEVICE bool keep(int i, int j) const {
    const RowRange range = row_range(i);
    return j >= range.begin && j < range.end;
  }
  CUFA2_DEVICE ColumnRange column_range(int j) const {
    if (j >= seqlen_k) return {0, 0};
    return {RIGHT ? max(j - last, 0) : 0, LEFT ? min(j - first + 1, seqlen_q) : seqlen_q};
  }
  CUFA2_DEVICE QRange q_range(int k_begin, int k_end) const {
    if (k_begin >= seqlen_k) return {0, 0, 0, 0};
    const ColumnRange left = column_range(k_begin);
    const ColumnRange right = column_range(min(k_end, seqlen_k) - 1);
    const bool whole = k_end <= seqlen_k;
    return {left.begin, right.end, right.begin, whole ? max(left.end, 0) : 0};
  }
};

using CausalMask = WindowMask<false, true>;
using LeftMask = WindowMask<true, false>;
using LocalMask = WindowMask<true, true>;

// The logit as it is; the scale is folded into the exponential.
struct PlainScore {
  static constexpr bool kIdentity = true;
  template <class Params> CUFA2_DEVICE explicit PlainScore(const Params&) {}
  CUFA2_DEVICE float score(float s) const { return s; }
  CUFA2_DEVICE float grad(float) const { return 1.0f; }
};

// softcap * tanh(scale * s / softcap), of which this is the tanh. 1 - 2 / (1 + e^2x) is exact to
// 1e-7 (tanh.approx: 5e-4) and saturates without overflow, but cancels near 0, where a large cap
// would magnify that: below 1/8 the odd series up to x^5 takes over. Either is good to 1e-6 of the
// value itself.
struct SoftcapScore {
  static constexpr bool kIdentity = false;
  float tanh_scale;
  template <class Params>
  CUFA2_DEVICE explicit SoftcapScore(const Params& p) : tanh_scale(p.tanh_scale) {}
  CUFA2_DEVICE float score(float s) const {
    const float x = s * tanh_scale, x2 = x * x;
    const float series = fmaf(x2 * x, fmaf(x2, 2.0f / 15.0f, -1.0f / 3.0f), x);
    const float whole = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(x * (2.0f * kLog2E)));
    return fabsf(x) < 0.125f ? series : whole;
  }
  CUFA2_DEVICE float grad(float tanh) const { return fmaf(-tanh, tanh, 1.0f); }
};
