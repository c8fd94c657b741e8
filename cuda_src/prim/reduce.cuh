// Reductions over the four lanes that share a fragment row, warp votes, and base-2 exponentials.
#pragma once
#include "types.cuh"

constexpr u32 kFullWarp = 0xffffffffu;

// Largest value among the four lanes of a quad; NaN operands are ignored, as in fmaxf.
CUFA2_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

template <class T> CUFA2_DEVICE T quad_sum(T x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Sum over eight neighbouring lanes.
template <class T> CUFA2_DEVICE T eighth_sum(T x) {
  x = quad_sum(x);
  return x + __shfl_xor_sync(kFullWarp, x, 4);
}

CUFA2_DEVICE bool warp_any(bool flag) { return __any_sync(kFullWarp, flag) != 0; }

// 2^x to 2 ulp; results below 2^-126 become 0; NaN stays NaN.
CUFA2_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x to 1 ulp.
CUFA2_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
