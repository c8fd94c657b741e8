// Twin of prim/wgmma.cuh.
#pragma once
#include "types.cuh"

CUFA2_DEVICE u64 operand_of_columns(u32 shared) {
  return (static_cast<u64>(0x40000040u) << 32) | (1u << 16) | ((shared & 0x3ffff) >> 4);
}
CUFA2_DEVICE u64 operand_of_rows(u32 shared, int rows) {
  return (static_cast<u64>(0x40000040u) << 32) | (static_cast<u32>(rows * 8) << 16) |
         ((shared & 0x3ffff) >> 4);
}

CUFA2_DEVICE void wgmma_fence() { emulator::fence_products(); }
CUFA2_DEVICE void wgmma_commit() { emulator::commit_products(); }
template <int BATCHES> CUFA2_DEVICE void wgmma_wait() { emulator::wait_for_products(BATCHES); }
CUFA2_DEVICE void not_before(float x, u32 never) { (void)x, (void)never; }
template <class Value, int TILES> CUFA2_DEVICE void pin(Value (&d)[TILES][4]) { (void)d; }

template <class T, bool A_BY_ROWS, bool B_BY_ROWS, int TILES>
CUFA2_DEVICE void wgmma_shared(float (&d)[TILES][4], u64 a, u64 b, bool accumulate) {
  static_assert(TILES == 8 || TILES == 10 || TILES == 12 || TILES == 14 || TILES == 16,
                "N is 64, 80, 96, 112 or 128");
  emulator::begin_product(
      {d, TILES, is_same<T, fp16_t>, accumulate, A_BY_ROWS, B_BY_ROWS, a, b, nullptr});
}
template <class T, int TILES>
CUFA2_DEVICE void wgmma_rows(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {
  static_assert(TILES == 8 || TILES == 12 || TILES == 16 || TILES == 24 || TILES == 32,
                "N is 64, 96, 128, 192 or 256");
  emulator::begin_product({d, TILES, is_same<T, fp16_t>, true, false, true, 0, b, a});
}
