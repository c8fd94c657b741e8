// Warp-wide tensor-core products D += A B with float32 accumulators.
//
// Fragment owners, g = lane / 4 and t = lane % 4 (PTX ISA, mma.m16n8k16):
//   A (16 x 16, row major)  a0: (g, 2t..)   a1: (g+8, 2t..)   a2: (g, 2t+8..)   a3: (g+8, 2t+8..)
//   B (16 x 8)              b0: k = 2t..    b1: k = 2t+8..    n = g
//   D (16 x 8)              d0, d1: (g, 2t), (g, 2t+1)        d2, d3: (g+8, 2t), (g+8, 2t+1)
// Two neighbouring D tiles, packed, are therefore one A operand: P needs no shuffle before P V.
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
