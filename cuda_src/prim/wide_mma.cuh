// Operands of the tensor-core products of float32 and float64, and sums of such products.
//
// TF32 keeps 11 bits of a float32. At float32 accuracy x is hi + lo, hi being x rounded to TF32
// and lo the exact rest, at most 2^-11 of x; then x y = lo hi + hi lo + hi hi up to 2^-22 of it,
// the small terms first. The tensor core drops the low 13 bits of an operand, so lo, whose 12 bits
// are one too many, loses 2^-23 of x at most.
#pragma once
#include "mma.cuh"
#include "wide.cuh"

// SIZE elements of a lane's A (4) or B (2) operand, as the tensor core takes them: float64 as it
// is, float32 rounded to TF32 or, at float32 accuracy, split.
template <class T, bool TF32, int SIZE> struct Operand {
  static constexpr bool kHalves = false;
  T at[SIZE];
  CUFA2_DEVICE void set(int i, T x) { at[i] = x; }
  CUFA2_DEVICE void set_finite(int i, T x) { set(i, x); }
};

// Half a unit in the last place of TF32 is added, the tensor core cuts. Adding it as a float keeps
// NaN and Inf what they are.
template <int SIZE> struct Operand<float, true, SIZE> {
  static constexpr bool kHalves = false;
  u32 at[SIZE];
  CUFA2_DEVICE void set(int i, float x) {
    const float power = __uint_as_float(__float_as_uint(x) & 0xff800000u);
    at[i] = __float_as_uint(fmaf(power, 0x1p-11f, x));
  }
  // For any finite x: cuts where rounding would give infinity.
  CUFA2_DEVICE void set_finite(int i, float x) {
    set(i, x);
    if (fabsf(x) >= 0x1.ffep127f) at[i] = __float_as_uint(x);
  }
};

// A non-finite x, or one that rounds to infinity, makes lo NaN or Inf of the other sign: NaN in
// every product.
template <int SIZE> struct Operand<float, false, SIZE> {
  static constexpr bool kHalves = true;
  u32 hi[SIZE], lo[SIZE];
  CUFA2_DEVICE void set(int i, float x) {
    hi[i] = rounded_to_tf32(x);
    lo[i] = __float_as_uint(x - __uint_as_float(hi[i]));
  }
  // For any finite x: cuts where rounding would give infinity.
  CUFA2_DEVICE void set_finite(int i, float x) {
    hi[i] = fabsf(x) < 0x1.ffep127f ? rounded_to_tf32(x) : __float_as_uint(x) & 0xffffe000u;
    lo[i] = __float_as_uint(x - __uint_as_float(hi[i]));
  }
};

// acc += sum of a[i] b[i]; FRESH: as a sum of its own, added by a rounding addition. Of halves all
// small products come first, so that few cuts are those of a large sum.
template <bool FRESH, int STEPS, class T, class A, class B>
CUFA2_DEVICE void accumulate(T (&acc)[4], const A (&a)[STEPS], const B (&b)[STEPS]) {
  if constexpr (!FRESH) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) mma_m16n8k8(acc, a[i].at, b[i].at);
  } else {
    T fresh[4];
    if constexpr (A::kHalves) {
      mma_m16n8k8_new(fresh, a[0].lo, b[0].hi);
      mma_m16n8k8(fresh, a[0].hi, b[0].lo);
#pragma unroll
      for (int i = 1; i < STEPS; ++i) {
        mma_m16n8k8(fresh, a[i].lo, b[i].hi);
        mma_m16n8k8(fresh, a[i].hi, b[i].lo);
      }
#pragma unroll
      for (int i = 0; i < STEPS; ++i) mma_m16n8k8(fresh, a[i].hi, b[i].hi);
    } else {
      mma_m16n8k8_new(fresh, a[0].at, b[0].at);
#pragma unroll
      for (int i = 1; i < STEPS; ++i) mma_m16n8k8(fresh, a[i].at, b[i].at);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] += fresh[e];
  }
}
