// Products of float32 and float64 on tensor cores, and what their operands travel in.
//
// One logical product, m16n8k8, serves both types; g = lane / 4 and t = lane % 4 (PTX ISA,
// mma.m16n8k8 with .tf32 and .f64):
//   A (16 x 8)  a0: (g, t)  a1: (g+8, t)  a2: (g, t+4)  a3: (g+8, t+4)
//   B (8 x 8)   b0: k = t   b1: k = t+4   n = g
//   D (16 x 8)  d0, d1: (g, 2t), (g, 2t+1)              d2, d3: (g+8, 2t), (g+8, 2t+1)
//
// TF32 keeps 11 bits of a float32. At float32 accuracy x is hi + lo, hi being x rounded to TF32
// and lo the exact rest, at most 2^-11 of x; then x y = lo hi + hi lo + hi hi up to 2^-22 of it,
// the small terms first. The tensor core drops the low 13 bits of an operand, so lo, whose 12 bits
// are one too many, loses 2^-23 of x at most.
#pragma once
#include "copy.cuh"
#include "reduce.cuh"

// 16 bytes of elements: what one lane reads or writes at once.
template <class T> struct alignas(16) Piece {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <class T> CUFA2_DEVICE Piece<T> load_piece(u32 shared) {
  const Chunk c = load_shared_16(shared);
  return reinterpret_cast<const Piece<T>&>(c);
}
template <class T> CUFA2_DEVICE void store_piece(u32 shared, const Piece<T>& p) {
  store_shared_16(shared, reinterpret_cast<const Chunk&>(p));
}

// One element, and two neighbours at a multiple of their size.
template <class T> CUFA2_DEVICE T load_element(u32 shared) {
  if constexpr (is_same<T, float>) return __uint_as_float(load_shared_4(shared));
  else {
    const Pair x = load_shared_8(shared);
    return __hiloint2double(__float_as_int(x.hi), __float_as_int(x.lo));
  }
}
template <class T> CUFA2_DEVICE void load_two(T& first, T& second, u32 shared) {
  if constexpr (is_same<T, float>) {
    const Pair x = load_shared_8(shared);
    first = x.lo, second = x.hi;
  } else {
    const Piece<T> x = load_piece<T>(shared);
    first = x.at[0], second = x.at[1];
  }
}

template <class T> CUFA2_DEVICE void store_two(u32 shared, T first, T second) {
  if constexpr (is_same<T, float>) store_shared_8(shared, {first, second});
  else store_piece<T>(shared, {{first, second}});
}

// *p += x in L2, elementwise, in no defined order.
CUFA2_DEVICE void reduce_add(float* p, const Piece<float>& x) { reduce_add_4(p, x.at); }
CUFA2_DEVICE void reduce_add(double* p, const Piece<double>& x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) reduce_add_1(p + i, x.at[i]);
}

template <class T> CUFA2_DEVICE bool is_finite(T x) { return fabs(x) < T(inf()); }

// The larger one; a NaN in b is ignored. fmax(double) would mind a NaN in a as well, at twice the
// instructions.
CUFA2_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
CUFA2_DEVICE double larger(double a, double b) { return b > a ? b : a; }

// SIZE elements of a lane's A (4) or B (2) operand, as the tensor core takes them: float64 as it
// is, float32 rounded to TF32 or, at float32 accuracy, split.
template <class T, bool TF32, int SIZE> struct Operand {
  T at[SIZE];
  CUFA2_DEVICE void set(int i, T x) { at[i] = x; }
  CUFA2_DEVICE void set_finite(int i, T x) { set(i, x); }
};

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

// Half a unit in the last place of TF32 is added, the tensor core cuts. Adding it as a float keeps
// NaN and Inf what they are.
template <int SIZE> struct Operand<float, true, SIZE> {
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

CUFA2_DEVICE void mma_m16n8k8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Before Hopper a float64 product is m8n8k4, a quarter of the logical one.
CUFA2_DEVICE void mma_m16n8k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(d[2 * (i & 1)]), "+d"(d[2 * (i & 1) + 1]) : "d"(a[i]), "d"(b[i >> 1]));
  }
#endif
}

// D += A B in the operands' precision: first the small products of halves, where there are any,
// then the large one.
template <class A, class B, class T>
CUFA2_DEVICE void multiply_add_small(T (&d)[4], const A& a, const B& b) {}
CUFA2_DEVICE void multiply_add_small(float (&d)[4], const Operand<float, false, 4>& a,
                                     const Operand<float, false, 2>& b) {
  mma_m16n8k8(d, a.lo, b.hi);
  mma_m16n8k8(d, a.hi, b.lo);
}
template <class T>
CUFA2_DEVICE void multiply_add_large(T (&d)[4], const Operand<T, is_same<T, float>, 4>& a,
                                     const Operand<T, is_same<T, float>, 2>& b) {
  mma_m16n8k8(d, a.at, b.at);
}
CUFA2_DEVICE void multiply_add_large(float (&d)[4], const Operand<float, false, 4>& a,
                                     const Operand<float, false, 2>& b) {
  mma_m16n8k8(d, a.hi, b.hi);
}
template <class T, class A, class B>
CUFA2_DEVICE void multiply_add(T (&d)[4], const A& a, const B& b) {
  multiply_add_small(d, a, b);
  multiply_add_large(d, a, b);
}
