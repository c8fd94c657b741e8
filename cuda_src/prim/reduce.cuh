// Reductions over the four lanes that share a fragment row, warp votes, and base-2 exponentials.
#pragma once
#include "convert.cuh"

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

// Over the warp.
template <class T> CUFA2_DEVICE T warp_sum(T x) {
  x = eighth_sum(x);
  x += __shfl_xor_sync(kFullWarp, x, 8);
  return x + __shfl_xor_sync(kFullWarp, x, 16);
}
CUFA2_DEVICE float warp_max(float x) {
  x = quad_max(x);
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, apart));
  return x;
}

CUFA2_DEVICE bool warp_any(bool flag) { return __any_sync(kFullWarp, flag) != 0; }

// 2^x to one ulp for x < 1024, zero below 2^-1022; NaN stays NaN. What rounding x to an integer
// leaves, |f| <= 1/2, goes through a polynomial of 2^f that is good to 2^-55. Unlike exp2() it has
// no branch, so that the exponentials of a row overlap.
CUFA2_DEVICE double power_of_2(double x) {
  constexpr double kShift = 0x1.8p52;  // its unit in the last place is 1
  const double shifted = x + kShift, f = x - (shifted - kShift);
  double y = 0x1.c062d7c810824p-32;
  y = fma(y, f, 0x1.e605f960b6a12p-28);
  y = fma(y, f, 0x1.b541680643fabp-24);
  y = fma(y, f, 0x1.62bfd49ed6ee8p-20);
  y = fma(y, f, 0x1.ffcbee3ae07b2p-17);
  y = fma(y, f, 0x1.4309130961180p-13);
  y = fma(y, f, 0x1.5d87fe7bbbe89p-10);
  y = fma(y, f, 0x1.3b2ab6fba1e1cp-7);
  y = fma(y, f, 0x1.c6b08d7048f31p-5);
  y = fma(y, f, 0x1.ebfbdff82c598p-3);
  y = fma(y, f, 0x1.62e42fefa39f3p-1);
  y = fma(y, f, 1.0);
  const u32 exponent = static_cast<u32>(__double2loint(shifted)) + 1023u;
  const double scale = __hiloint2double(static_cast<int>(exponent << 20), 0);
  return shifted < kShift - 1022 ? 0.0 : y * scale;
}
CUFA2_DEVICE float power_of_2(float x) { return exp2_approx(x); }
