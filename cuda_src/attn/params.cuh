// Run-time parameters, passed by value. params.py packs the same layouts (a test compares the
// offsets), so fields are ordered by size and every name here has its twin there.
#pragma once
#include "../prim/types.cuh"

// Element strides of a (B, S, H, D) tensor; the last axis is contiguous.
struct Strides { i64 batch, row, head; };

struct FwdParams {
  const void* q;            // (B, Sq, H, D)
  const void* k;            // (B, Sk, Hk, D)
  const void* v;            // (B, Sk, Hk, Dv)
  void* o;                  // (B, Sq, H, Dv)
  void* lse;                // (B, H, Sq) float32, float64 for float64 inputs; null if not wanted
  const int* seqlens_q;     // (B,) or null
  const int* seqlens_k;     // (B,) or null
  Strides q_stride, k_stride, v_stride, o_stride, lse_stride;
  i64 heads_total;          // B * H
  i64 section;              // heads that run side by side, so that their K and V stay in L2
  double exact_tanh_scale, exact_scale_log2;  // tanh_scale and scale_log2 for float64 inputs
  int num_heads, group;     // H, H / Hk
  int seqlen_q, seqlen_k;
  int head_dim, head_dim_v; // real D and Dv, whole 16-byte chunks
  int window_left, window_right;  // read only by masks that have them
  int seqlens_q_stride, seqlens_k_stride;  // elements
  int top_left;             // 1: query i sits at key i, 0: at key i + Sk - Sq
  float tanh_scale;         // softcap: |softmax_scale| / softcap
  float scale_log2;         // factor from a score to its base-2 exponent
  float q_sign;             // 1; -1 for a negative scale, 0 for scale zero: applied to Q
};
static_assert(sizeof(FwdParams) == CUFA2_FWD_PARAMS_BYTES, "params.py packs another layout");

// One struct for all kernels of a backward pass; each reads what it needs.
struct BwdParams {
  const void* q;            // (B, Sq, H, D)
  const void* k;            // (B, Sk, Hk, D)
  const void* v;            // (B, Sk, Hk, Dv)
  const void* o;            // (B, Sq, H, Dv)
  const void* grad_o;       // (B, Sq, H, Dv)
  void* dq;                 // like q
  void* dk;                 // like k
  void* dv;                 // like v
  const void* lse;          // (B, H, Sq) as the forward wrote it
  const void* dlse;         // (B, H, Sq) or null
  void* row_lse;            // work, (B, H, rows) like lse: what bwd_delta.cuh makes of it
  void* delta;              // work, (B, H, rows) like lse: rowsum(dO * O) - dlse
  float* dq_sum;            // work, (B, H, rows, HEAD_DIM) float32 in fragment order; for wider
                            // inputs dq itself; null if dQ is not added up by atomics
  const int* seqlens_q;     // (B,) or null
  const int* seqlens_k;     // (B,) or null
  Strides q_stride, k_stride, v_stride, o_stride, grad_o_stride, dq_stride, dk_stride, dv_stride;
  Strides lse_stride, dlse_stride;
  i64 heads_total, heads_total_kv;  // B * H, B * Hk
  i64 section, section_kv;  // heads that run side by side, so that what they share stays in L2
  double exact_tanh_scale, exact_scale_log2, exact_scale;  // the floats below, for float64 inputs
  int num_heads, num_heads_kv, group;  // H, Hk, H / Hk
  int seqlen_q, seqlen_k;
  int rows;                 // rows of the work arrays: seqlen_q rounded up to kWorkRows
  int head_dim, head_dim_v; // real D and Dv, whole 16-byte chunks
  int window_left, window_right;  // read only by masks that have them
  int seqlens_q_stride, seqlens_k_stride;  // elements
  int top_left;             // 1: query i sits at key i, 0: at key i + Sk - Sq
  float tanh_scale;         // softcap: softmax_scale / softcap
  float scale_log2;         // factor from a (capped) score to its base-2 exponent; may be negative
  float scale;              // softmax_scale
};
static_assert(sizeof(BwdParams) == CUFA2_BWD_PARAMS_BYTES, "params.py packs another layout");

// Work arrays of a backward pass have whole tiles of rows.
constexpr int kWorkRows = 64;
