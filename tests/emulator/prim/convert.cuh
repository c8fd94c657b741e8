// Twin of prim/convert.cuh. Conversions are exact; exp2_approx and reciprocal_approx are within
// an ulp or two of the hardware's, see numerics.h.
#pragma once
#include "../numerics.h"
#include "types.cuh"

template <class T> CUFA2_DEVICE u32 pack2(float lo, float hi) {
  static_assert(is_same<T, fp16_t> || is_same<T, bf16_t>, "pack2 packs 16-bit floats");
  constexpr auto round = is_same<T, fp16_t> ? emulator::to_fp16 : emulator::to_bf16;
  return round(lo) | static_cast<u32>(round(hi)) << 16;
}

struct Float2 { float lo, hi; };

template <class T> CUFA2_DEVICE Float2 unpack2(u32 packed) {
  constexpr auto widen = is_same<T, fp16_t> ? emulator::from_fp16 : emulator::from_bf16;
  return {widen(packed & 0xffffu), widen(packed >> 16)};
}

CUFA2_DEVICE u32 rounded_to_tf32(float x) { return emulator::to_tf32(x); }
CUFA2_DEVICE float exp2_approx(float x) { return emulator::exp2_approx(x); }
CUFA2_DEVICE float reciprocal_approx(float x) { return emulator::reciprocal_approx(x); }
