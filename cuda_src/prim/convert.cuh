// Conversions and approximations of one instruction each.
#pragma once
#include "types.cuh"

// Rounds two floats to nearest even and packs them, `lo` in the lower half.
template <class T> CUFA2_DEVICE u32 pack2(float lo, float hi) {
  static_assert(is_same<T, fp16_t> || is_same<T, bf16_t>, "pack2 packs 16-bit floats");
  u32 packed;
  if constexpr (is_same<T, fp16_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

// The two elements of a packed pair, exactly, as floats.
struct Float2 { float lo, hi; };

template <class T> CUFA2_DEVICE Float2 unpack2(u32 packed) {
  if constexpr (is_same<T, fp16_t>) {
    Float2 f;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}"
        : "=f"(f.lo), "=f"(f.hi) : "r"(packed));
    return f;
  } else {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
}

// x rounded to TF32: one instruction since Hopper. Before, cvt.rna.tf32 would be four, most of
// them for NaN and Inf, of which the callers take care.
CUFA2_DEVICE u32 rounded_to_tf32(float x) {
#if __CUDA_ARCH__ >= 900
  u32 y;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
#else
  return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
#endif
}

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
