// Run-time parameters, passed by value. launch.py packs the same layout (a test compares offsets),
// so fields are ordered by size and every name here has its twin there.
#pragma once
#include "../prim/types.cuh"

// Element strides of a (B, S, H, D) tensor; the last axis is contiguous.
struct Strides { i64 batch, row, head; };

struct FwdParams {
  const void* q;            // (B, Sq, H, D)
  const void* k;            // (B, Sk, Hk, D)
  const void* v;            // (B, Sk, Hk, Dv)
  void* o;                  // (B, Sq, H, Dv)
  float* lse;               // (B, H, Sq) float32, natural log; null if not wanted
  const int* seqlens_q;     // (B,) or null
  const int* seqlens_k;     // (B,) or null
  Strides q_stride, k_stride, v_stride, o_stride, lse_stride;
  i64 heads_total;          // B * H
  i64 section;              // heads that run side by side, so that their K and V stay in L2
  int num_heads, group;     // H, H / Hk
  int seqlen_q, seqlen_k;
  int head_dim, head_dim_v; // real D and Dv, multiples of 8
  int window_left, window_right;  // read only by masks that have them
  int seqlens_q_stride, seqlens_k_stride;  // elements
  int top_left;             // 1: query i sits at key i, 0: at key i + Sk - Sq
  float tanh_scale;         // softcap: |softmax_scale| / softcap
  float scale_log2;         // factor from a score to its base-2 exponent
  float q_sign;             // 1; -1 for a negative scale, 0 for scale zero: applied to Q
};
static_assert(sizeof(FwdParams) == CUFA2_FWD_PARAMS_BYTES, "launch.py packs another layout");
