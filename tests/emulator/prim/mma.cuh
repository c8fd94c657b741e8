// Twin of prim/mma.cuh.
#pragma once
#include "../numerics.h"
#include "types.cuh"

template <class T>
CUFA2_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(is_same<T, fp16_t> || is_same<T, bf16_t>, "m16n8k16 takes 16-bit floats");
  const u32 b[2] = {b0, b1};
  if constexpr (is_same<T, fp16_t>) emulator::add_product_of_fp16(d, a, b);
  else emulator::add_product_of_bf16(d, a, b);
}

CUFA2_DEVICE void mma_m16n8k8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::add_product_of_tf32(d, a, b);
}
CUFA2_DEVICE void mma_m16n8k8_new(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  d[0] = d[1] = d[2] = d[3] = 0;
  mma_m16n8k8(d, a, b);
}

CUFA2_DEVICE void mma_m16n8k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  emulator::add_product_of_float64(d, a, b);
}
CUFA2_DEVICE void mma_m16n8k8_new(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  d[0] = d[1] = d[2] = d[3] = 0;
  mma_m16n8k8(d, a, b);
}
