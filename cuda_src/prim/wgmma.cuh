// Products of a warpgroup (four warps, 128 threads; sm_90a): D += A B with D of 64 x N in float32
// registers, A of 64 x 16 and B of 16 x N. They run in the background.
//
// Owners of D, for thread 32 w + lane: element i is row 16 w + lane / 4 + 8 * (i / 2 % 2), column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2: that of a warp's Accumulator<1, N / 8>. A in registers is
// the A operand of prim/mma.cuh, so two neighbouring tiles of D, packed, are one again.
//
// Operands in shared memory are blocks of 64 columns, [ROWS][64] of 16 bits each with 128-byte
// rows, 16-byte chunk c of row r at c ^ r % 8: what a tensor map with a swizzle of 128 bytes
// writes. A block begins at a multiple of 1024 bytes.
#pragma once
#include "types.cuh"

// Where such an operand begins. As it lies, its columns are what a product sums over; transposed,
// its rows are, and `rows` tells how far its blocks are apart.
CUFA2_DEVICE u64 operand_of_columns(u32 shared) {
  return (static_cast<u64>(0x40000040u) << 32) | (1u << 16) | ((shared & 0x3ffff) >> 4);
}
CUFA2_DEVICE u64 operand_of_rows(u32 shared, int rows) {
  return (static_cast<u64>(0x40000040u) << 32) | (static_cast<u32>(rows * 8) << 16) |
         ((shared & 0x3ffff) >> 4);
}

// Before the first product of a batch: orders it after what the threads did to its registers.
CUFA2_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a batch.
CUFA2_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `BATCHES` of the newest batches run.
template <int BATCHES> CUFA2_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(BATCHES) : "memory");
}

// What follows stays behind the instruction that makes x: ptxas moves a wait up over arithmetic on
// other registers, but keeps it behind this store, which it cannot know not to happen as long as
// x is in range. `never` are four bytes of shared memory of which nobody wants to know.
CUFA2_DEVICE void not_before(float x, u32 never) {
  asm volatile("{\n\t.reg .pred %%huge;\n\tsetp.gt.f32 %%huge, %0, 0f7f000000;\n\t"
               "@%%huge st.shared.f32 [%1], %0;\n\t}" :: "f"(x), "r"(never) : "memory");
}

// Keeps the compiler from moving what it does with these registers across this place.
template <class Value, int TILES> CUFA2_DEVICE void pin(Value (&d)[TILES][4]) {
#pragma unroll
  for (int i = 0; i < 4 * TILES; ++i) {
    if constexpr (is_same<Value, float>) asm volatile("" : "+f"(d[i / 4][i % 4]) :: "memory");
    else asm volatile("" : "+r"(d[i / 4][i % 4]) :: "memory");
  }
}

// The registers of D, by N: their names and what they stand for.
#define CUFA2_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFA2_NAMES_40 \
  CUFA2_NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUFA2_NAMES_48 \
  CUFA2_NAMES_40 \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFA2_NAMES_56 \
  CUFA2_NAMES_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUFA2_NAMES_64 \
  CUFA2_NAMES_56 \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFA2_NAMES_96 \
  CUFA2_NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFA2_NAMES_128 \
  CUFA2_NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
  ", %124, %125, %126, %127"
#define CUFA2_4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUFA2_8(i) CUFA2_4((i) / 4), CUFA2_4((i) / 4 + 1)
#define CUFA2_VALUES_32 CUFA2_8(0), CUFA2_8(8), CUFA2_8(16), CUFA2_8(24)
#define CUFA2_VALUES_40 CUFA2_VALUES_32, CUFA2_8(32)
#define CUFA2_VALUES_48 CUFA2_VALUES_40, CUFA2_8(40)
#define CUFA2_VALUES_56 CUFA2_VALUES_48, CUFA2_8(48)
#define CUFA2_VALUES_64 CUFA2_VALUES_56, CUFA2_8(56)
#define CUFA2_VALUES_96 CUFA2_VALUES_64, CUFA2_8(64), CUFA2_8(72), CUFA2_8(80), CUFA2_8(88)
#define CUFA2_VALUES_128 CUFA2_VALUES_96, CUFA2_8(96), CUFA2_8(104), CUFA2_8(112), CUFA2_8(120)

#define CUFA2_OF_TYPE(PRODUCT, ...) \
  if constexpr (is_same<T, fp16_t>) PRODUCT("f16", __VA_ARGS__); \
  else PRODUCT("bf16", __VA_ARGS__)

// D += A B, or D = A B if !accumulate. A and B in shared memory, summed over their columns or, if
// BY_ROWS, over their rows.
#define CUFA2_PRODUCT(TYPE, N, COUNT, A, B, ADD, A_ROWS, B_ROWS) \
  asm volatile("{\n\t.reg .pred %%add;\n\tsetp.ne.b32 %%add, " ADD ", 0;\n\t" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" \
               CUFA2_NAMES_##COUNT "}, " A ", " B ", %%add, 1, 1, " A_ROWS ", " B_ROWS ";\n\t}" \
               : CUFA2_VALUES_##COUNT \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(A_BY_ROWS), \
                 "n"(B_BY_ROWS))
template <class T, bool A_BY_ROWS, bool B_BY_ROWS, int TILES>
CUFA2_DEVICE void wgmma_shared(float (&d)[TILES][4], u64 a, u64 b, bool accumulate) {
  constexpr int COUNT = 4 * TILES;
  static_assert(COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 56 || COUNT == 64,
                "N is 64, 80, 96, 112 or 128");
  if constexpr (COUNT == 32) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 64, 32, "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (COUNT == 48) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 96, 48, "%48", "%49", "%50", "%51", "%52");
  } else if constexpr (COUNT == 40) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 80, 40, "%40", "%41", "%42", "%43", "%44");
  } else if constexpr (COUNT == 56) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 112, 56, "%56", "%57", "%58", "%59", "%60");
  } else {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 128, 64, "%64", "%65", "%66", "%67", "%68");
  }
}
#undef CUFA2_PRODUCT

// D += A B. A in registers, B in shared memory, summed over its rows.
#define CUFA2_PRODUCT(TYPE, N, COUNT, A, B) \
  asm volatile("{\n\t.reg .pred %%add;\n\tsetp.eq.b32 %%add, 0, 0;\n\t" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" \
               CUFA2_NAMES_##COUNT "}, {" A "}, " B ", %%add, 1, 1, 1;\n\t}" \
               : CUFA2_VALUES_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T, int TILES>
CUFA2_DEVICE void wgmma_rows(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {
  constexpr int COUNT = 4 * TILES;
  static_assert(COUNT == 32 || COUNT == 48 || COUNT == 64 || COUNT == 96 || COUNT == 128,
                "N is 64, 96, 128, 192 or 256");
  if constexpr (COUNT == 32) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 64, 32, "%32, %33, %34, %35", "%36");
  } else if constexpr (COUNT == 48) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 96, 48, "%48, %49, %50, %51", "%52");
  } else if constexpr (COUNT == 64) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 128, 64, "%64, %65, %66, %67", "%68");
  } else if constexpr (COUNT == 96) {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 192, 96, "%96, %97, %98, %99", "%100");
  } else {
    CUFA2_OF_TYPE(CUFA2_PRODUCT, 256, 128, "%128, %129, %130, %131", "%132");
  }
}
#undef CUFA2_PRODUCT
