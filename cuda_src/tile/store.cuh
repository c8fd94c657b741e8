// Accumulators on their way out: rounded into a shared tile, and from there in whole rows.
#pragma once
#include "../prim/barrier.cuh"
#include "frag.cuh"

// Rounds scale * x into a shared tile, its first element going to (row, column). Of SIDES warps
// that take turns at 16 columns this is number `side`.
template <class Smem, class T, int SIDES, class Acc>
CUFA2_DEVICE void stage(u32 tile, const Acc& x, float scale, int row, int column, int side) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < Acc::kRows; ++r)
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n) {
      const float* pair = &x.at[r >> 1][n][2 * (r & 1)];
      const int chunk = column / 8 + (n / 2 * SIDES + side) * 2 + n % 2;
      // Adding 0 turns the -0 that a negative scale makes of an empty sum into 0.
      store_shared_4(tile + Smem::offset(row + Acc::row(lane, r), chunk) + 4 * (lane % 4),
                     pack2<T>(fmaf(pair[0], scale, 0.0f), fmaf(pair[1], scale, 0.0f)));
    }
}

// Writes columns [begin, end) of the first `rows` rows of a shared tile; those from `zero_from` on
// as zeros. `out` is column 0 of row 0.
template <class Smem, int THREADS, class T>
CUFA2_DEVICE void store_rows(u32 tile, T* out, i64 row_stride, int rows, int zero_from, int begin,
                             int end) {
  const Chunk zeros = {{0u, 0u, 0u, 0u}};
  for (int c = thread_index(); c < Smem::ROWS * Smem::kChunks; c += THREADS) {
    const int row = c / Smem::kChunks, chunk = c % Smem::kChunks;
    if (row >= rows || chunk * 8 < begin || chunk * 8 >= end) continue;
    store_global_16(out + row * row_stride + chunk * 8,
                    row < zero_from ? load_shared_16(tile + Smem::offset(row, chunk)) : zeros);
  }
}
