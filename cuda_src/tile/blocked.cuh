// A [ROWS][COLS] tile of 16-bit elements in shared memory as tensor maps write it and wgmma reads
// it: blocks of 64 columns, each [ROWS][64] with rows of 128 bytes, 16-byte chunk c of row r at
// c ^ r % 8. Columns beyond COLS in the last block are zeros.
#pragma once
#include "../prim/copy.cuh"
#include "../prim/tma.cuh"
#include "../prim/wgmma.cuh"
#include "frag.cuh"

template <int ROWS_, int COLS_> struct BlockedTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  static constexpr int kBlocks = (COLS + 63) / 64, kBlockBytes = ROWS * 128;
  static constexpr int kBytes = kBlocks * kBlockBytes;
  static constexpr int kGroupBytes = 64 * 128;  // 64 rows of a block: a warpgroup's share
  static_assert(COLS % 16 == 0, "columns are whole k16 steps");
  static_assert(ROWS % 16 == 0 && ROWS <= 256, "a block is one box of a tensor map");

  // Byte offset of chunk `chunk` of row `row`.
  static CUFA2_DEVICE u32 offset(int row, int chunk) {
    return chunk / 8 * kBlockBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }

  // One thread asks for the box at these places on the map's axes behind the columns; kBytes will
  // come.
  static CUFA2_DEVICE void load(u32 shared, const TensorMap& map, u32 barrier, int y, int z,
                                int batch) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tma_load(shared + block * kBlockBytes, map, barrier, 64 * block, y, z, batch);
    }
  }

  // One thread sends a box of rows, the first of which is at `shared`.
  static CUFA2_DEVICE void store(const TensorMap& map, u32 shared, int y, int z, int batch) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tma_store(map, shared + block * kBlockBytes, 64 * block, y, z, batch);
    }
    tma_store_commit();
  }

  // From the operand of the whole tile to that of k16 step `kk`, summing over columns ...
  static CUFA2_DEVICE constexpr u64 step_of_columns(int kk) {
    return kk / 4 * (kBlockBytes / 16) + kk % 4 * 2;
  }
  // ... or over rows.
  static CUFA2_DEVICE constexpr u64 step_of_rows(int kk) { return kk * 128; }

  // The A operand of a warp's 16 rows from `row` on, a multiple of 8, as prim/mma.cuh has it.
  static CUFA2_DEVICE void load_a(u32 (&a)[4], u32 shared, int row, int kk, int lane) {
    ldmatrix_x4(a, shared + 128 * row + offset(lane % 16, 2 * kk + lane / 16));
  }
  // The two B operands of columns [16 column, 16 column + 16), summed over rows [row, row + 16).
  static CUFA2_DEVICE void load_b_of_rows(u32 (&b)[4], u32 shared, int row, int column,
                                          int lane) {
    ldmatrix_x4_trans(b, shared + 128 * row + offset(lane % 16, 2 * column + lane / 16));
  }
  // The B operands of rows [row, row + 8) for steps kk and kk + 1: (b0, b1) and (b2, b3).
  static CUFA2_DEVICE void load_b(u32 (&b)[4], u32 shared, int row, int kk, int lane) {
    ldmatrix_x4(b, shared + 128 * row + offset(lane % 8, 2 * kk + lane / 8));
  }
};
