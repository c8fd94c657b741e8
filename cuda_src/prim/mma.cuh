// Warp-wide tensor-core products D += A B: of 16-bit inputs with float32 accumulators, of TF32
// with float32 ones, and of float64.
//
// Fragment owners, g = lane / 4 and t = lane % 4 (PTX ISA, mma.m16n8k16):
//   A (16 x 16, row major)  a0: (g, 2t..)   a1: (g+8, 2t..)   a2: (g, 2t+8..)   a3: (g+8, 2t+8..)
//   B (16 x 8)              b0: k = 2t..    b1: k = 2t+8..    n = g
//   D (16 x 8)              d0, d1: (g, 2t), (g, 2t+1)        d2, d3: (g+8, 2t), (g+8, 2t+1)
// Two neighbouring D tiles, packed, are therefore one A operand: P needs no shuffle before P V.
//
// m16n8k8 serves TF32 and float64 (PTX ISA, mma.m16n8k8 with .tf32 and .f64):
//   A (16 x 8)  a0: (g, t)  a1: (g+8, t)  a2: (g, t+4)  a3: (g+8, t+4)
//   B (8 x 8)   b0: k = t   b1: k = t+4   n = g
//   D (16 x 8)  as above
#pragma once
#include "types.cuh"

template <class T>
CUFA2_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(is_same<T, fp16_t> || is_same<T, bf16_t>, "m16n8k16 takes 16-bit floats");
  if constexpr (is_same<T, fp16_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// D += A B.
CUFA2_DEVICE void mma_m16n8k8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D = A B.
CUFA2_DEVICE void mma_m16n8k8_new(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
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

CUFA2_DEVICE void mma_m16n8k8_new(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  d[0] = d[1] = d[2] = d[3] = 0;
  mma_m16n8k8(d, a, b);
}
